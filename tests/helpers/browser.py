"""Pages in headless Chromium, which reaches this machine alone."""

from __future__ import annotations

import contextlib
import functools
import html
import http.server
import json
import pathlib
import re
import shutil
import subprocess
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

CHROMIUM = shutil.which('chromium') or shutil.which('google-chrome')
needs_browser = pytest.mark.skipif(CHROMIUM is None, reason='no chromium: apt-get install chromium')
# Shows each page in a frame of that width, and writes down what a function finds in it.
PROBE = """<!DOCTYPE html><meta charset="utf-8"><pre id="found"></pre><script>
const look = LOOK;
const show = (page) => new Promise((done) => {
  const frame = document.createElement('iframe');
  frame.style = 'width: WIDTHpx; height: 800px; border: 0';
  frame.src = page;
  frame.onload = () => {
    done([page, look(frame.contentDocument)]);
    frame.remove();
  };
  document.body.append(frame);
});
(async () => {
  const rows = [];
  for (const page of PAGES) rows.push(await show(page));
  found.textContent = JSON.stringify(rows);
})();
</script>"""


class Server(http.server.ThreadingHTTPServer):
    """Serves a folder; `missing` are the paths that were asked for in vain."""

    def __init__(self, folder: pathlib.Path) -> None:
        self.folder = folder
        self.missing: set[str] = set()
        super().__init__(('127.0.0.1', 0), functools.partial(_Quiet, directory=str(folder)))

    @property
    def address(self) -> str:
        return f'http://127.0.0.1:{self.server_port}'


class _Quiet(http.server.SimpleHTTPRequestHandler):
    server: Server

    def log_message(self, *args):
        pass

    def send_error(self, *args, **keywords):
        self.server.missing.add(self.path)
        super().send_error(*args, **keywords)


@contextlib.contextmanager
def serve(folder: pathlib.Path) -> Iterator[Server]:
    with Server(folder) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()


def browse(*words: str, budget: int = 8_000) -> subprocess.CompletedProcess[str]:
    """Chromium's standard output and errors, after some milliseconds of the page's own time."""
    flags = ['--headless=new', '--no-sandbox', '--disable-gpu', f'--virtual-time-budget={budget}']
    flags += [
        '--enable-logging=stderr',
        '--v=0',
        '--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1',
    ]
    return subprocess.run([CHROMIUM, *flags, *words], capture_output=True, text=True, timeout=600)


def probe(
    server: Server, pages: Sequence[str], look: str, width: int
) -> tuple[dict[str, Any], list[str]]:
    """What a function finds in each page, and the errors that the browser reports.

    Args:
      server: of the pages.
      pages: their paths.
      look: a function of JavaScript from a document to what JSON holds.
      width: of the window, in pixels.
    """
    text = PROBE.replace('LOOK', look).replace('WIDTH', str(width))
    file = server.folder / 'probe.html'
    file.write_text(text.replace('PAGES', json.dumps(pages)))
    done = browse('--dump-dom', f'{server.address}/probe.html', budget=1_000_000)
    file.unlink()
    rows = json.loads(html.unescape(re.search('<pre id="found">(.*?)</pre>', done.stdout)[1]))
    assert [page for page, _ in rows] == list(pages)
    # Chromium marks errors and remarks alike; remarks are the theme's.
    messages = re.findall(r':CONSOLE[^"]*"(.*)", source:', done.stderr)
    return dict(rows), [m for m in messages if not m.startswith(('[PST]', 'Got invalid theme'))]
