"""The web site builds without a warning, loads nothing from elsewhere, and works in a browser."""

import functools
import html
import http.server
import importlib.util
import json
import pathlib
import re
import shutil
import subprocess
import sys
import threading
from typing import ClassVar

import pytest

ROOT = pathlib.Path(__file__).parents[1]
PHONE = 400  # pixels of its width
# Shows every page in a frame of that width, and writes down how wide it is, and how many errors.
PROBE = """<!DOCTYPE html><meta charset="utf-8"><pre id="found"></pre><script>
const show = (page) => new Promise((done) => {
  const frame = document.createElement('iframe');
  frame.style = 'width: WIDTHpx; height: 800px; border: 0';
  frame.src = page;
  frame.onload = () => {
    done([page, frame.contentDocument.documentElement.scrollWidth]);
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
BROWSER = shutil.which('chromium') or shutil.which('google-chrome')
needs_sphinx = pytest.mark.skipif(
    not all(map(importlib.util.find_spec, ('sphinx', 'myst_nb', 'sphinx_book_theme'))),
    reason="no Sphinx: pip install 'vit_jax[docs]'",
)


def build(folder, *words):
    """Run the builder, whose warnings are errors."""
    words = [sys.executable, 'docs/site/build.py', str(folder / 'site'), *words]
    done = subprocess.run(
        [*words, '--sources', str(folder / 'sources')], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return folder / 'site'


@needs_sphinx
@pytest.mark.slow
def test_no_page_has_a_warning(tmp_path):
    build(tmp_path, '--no-execute', '--no-reference', '--builder', 'dummy')


@pytest.fixture(scope='module')
def site(tmp_path_factory):
    return build(tmp_path_factory.mktemp('site'))


@needs_sphinx
@pytest.mark.long
def test_nothing_is_loaded_from_another_host(site):
    loaded = re.compile(r'<(?:script|img|link)[^>]*(?:src|href)="(?:https?:)?//[^"]*"')
    found = {match for page in site.rglob('*.html') for match in loaded.findall(page.read_text())}
    assert not found


@needs_sphinx
@pytest.mark.long
def test_every_picture_has_a_text(site):
    for page in site.glob('*.html'):
        for picture in re.findall(r'<img[^>]*>', page.read_text()):
            assert re.search(r'alt="[^"]+"', picture), f'{page.name}: {picture}'


@pytest.fixture(scope='module')
def address(site):
    """The site on a port of this machine."""
    Quiet.missing.clear()
    handler = functools.partial(Quiet, directory=str(site))
    with http.server.ThreadingHTTPServer(('127.0.0.1', 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f'http://127.0.0.1:{server.server_port}'
        server.shutdown()


class Quiet(http.server.SimpleHTTPRequestHandler):
    missing: ClassVar[set[str]] = set()

    def log_message(self, *args):
        pass

    def send_error(self, *args, **keywords):
        self.missing.add(self.path)
        super().send_error(*args, **keywords)


def browse(*words, budget=8_000):
    """Chromium's standard output and errors, after some milliseconds of the page's own time."""
    flags = ['--headless=new', '--no-sandbox', '--disable-gpu', f'--virtual-time-budget={budget}']
    flags += [
        '--enable-logging=stderr',
        '--v=0',
        '--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1',
    ]
    return subprocess.run([BROWSER, *flags, *words], capture_output=True, text=True, timeout=600)


@pytest.fixture(scope='module')
def shown(site, address):
    """The width of every page on a phone, and what the browser has to say about them."""
    pages = sorted(str(path.relative_to(site)) for path in site.rglob('*.html'))
    pages = [page for page in pages if not page.startswith('_')]  # sources of the package
    probe = PROBE.replace('WIDTH', str(PHONE)).replace('PAGES', json.dumps(pages))
    (site / 'probe.html').write_text(probe)
    done = browse('--dump-dom', f'{address}/probe.html', budget=1_000_000)
    (site / 'probe.html').unlink()
    rows = json.loads(html.unescape(re.search('<pre id="found">(.*?)</pre>', done.stdout)[1]))
    assert [page for page, _ in rows] == pages
    return dict(rows), done.stderr


@needs_sphinx
@pytest.mark.long
@pytest.mark.skipif(BROWSER is None, reason='no chromium')
def test_no_page_has_an_error_in_a_browser(shown):
    # Chromium marks errors and remarks alike; remarks are the theme's.
    messages = re.findall(r':CONSOLE[^"]*"(.*)", source:', shown[1])
    assert [m for m in messages if not m.startswith(('[PST]', 'Got invalid theme mode'))] == []
    assert Quiet.missing - {'/favicon.ico'} == set()


@needs_sphinx
@pytest.mark.long
@pytest.mark.skipif(BROWSER is None, reason='no chromium')
def test_no_page_is_wider_than_a_phone(shown):
    assert {page: width for page, width in shown[0].items() if width > PHONE} == {}


@needs_sphinx
@pytest.mark.long
def test_each_card_leads_to_a_page_with_a_picture(site):
    links = re.findall(
        r'class="sd-stretched-link[^"]*" href="([^"#]+)', (site / 'index.html').read_text()
    )
    assert len(links) == len(set(links)) == 6
    for link in links:
        article = (site / link).read_text().partition('<article')[2].partition('</article>')[0]
        assert '<img' in article and 'class="highlight' in article, link


@needs_sphinx
@pytest.mark.long
@pytest.mark.skipif(BROWSER is None, reason='no chromium')
@pytest.mark.parametrize('words', ['accumulation', 'hf'])
def test_the_search_finds_pages(address, words):
    done = browse('--dump-dom', f'{address}/search.html?q={words}')
    assert re.search(r'Search finished, found \d+ page', done.stdout)
