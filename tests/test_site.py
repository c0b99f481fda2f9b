"""The web site builds without a warning, loads nothing from elsewhere, and works in a browser."""

import functools
import http.server
import importlib.util
import pathlib
import re
import shutil
import subprocess
import sys
import threading

import pytest

ROOT = pathlib.Path(__file__).parents[1]
PAGES = ('index', 'images', 'tpu', 'config', 'gallery')
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
    handler = functools.partial(Quiet, directory=str(site))
    with http.server.ThreadingHTTPServer(('127.0.0.1', 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f'http://127.0.0.1:{server.server_port}'
        server.shutdown()


class Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *args):
        pass


def browse(*words):
    """Chromium's standard output and errors."""
    flags = ['--headless=new', '--no-sandbox', '--disable-gpu', '--virtual-time-budget=8000']
    flags += [
        '--enable-logging=stderr',
        '--v=0',
        '--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1',
    ]
    return subprocess.run([BROWSER, *flags, *words], capture_output=True, text=True, timeout=120)


@needs_sphinx
@pytest.mark.long
@pytest.mark.skipif(BROWSER is None, reason='no chromium')
@pytest.mark.parametrize('page', PAGES)
def test_a_page_has_no_error_in_a_browser(address, page):
    done = browse('--dump-dom', f'{address}/{page}.html')
    assert '</html>' in done.stdout
    assert not re.search(r'ERROR:CONSOLE|Uncaught|Failed to load|ERR_', done.stderr), done.stderr


@needs_sphinx
@pytest.mark.long
@pytest.mark.skipif(BROWSER is None, reason='no chromium')
@pytest.mark.parametrize('words', ['accumulation', 'hf'])
def test_the_search_finds_pages(address, words):
    done = browse('--dump-dom', f'{address}/search.html?q={words}')
    assert re.search(r'Search finished, found \d+ page', done.stdout)
