"""The web site builds without a warning, loads nothing from elsewhere, and works in a browser."""

import importlib.util
import os
import pathlib
import re
import subprocess
import sys
from urllib.parse import quote

import pytest
from helpers.browser import browse, needs_browser, probe, serve

ROOT = pathlib.Path(__file__).parents[1]
PHONE = 400  # pixels of its width
SPHINX = ('sphinx', 'myst_nb', 'sphinx_book_theme', 'sphinx_copybutton', 'sphinx_design')
CONTRAST = 4.5  # that WCAG 2.2 asks for (1.4.3, level AA)
pytestmark = pytest.mark.timeout(1800)  # building takes two cores a minute, if they are free
# The width of a page, and the texts that have too little contrast, light or dark.
LOOK = """(page) => {
  const numbers = (color) => color.match(/[\\d.]+/g).map(Number);
  const linear = (x) => (x <= 10 ? x / 3294.6 : ((x / 255 + 0.055) / 1.055) ** 2.4);
  const luminance = (color) => {
    const [red, green, blue] = numbers(color).map(linear);
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue;
  };
  const style = (element) => page.defaultView.getComputedStyle(element);
  const behind = (element) => {
    for (; element; element = element.parentElement) {
      const color = style(element).backgroundColor;
      if ((numbers(color)[3] ?? 1) > 0.5) return color;
    }
    return 'rgb(255, 255, 255)';
  };
  const contrast = (element) => {
    const shades = [style(element).color, behind(element)].map(luminance);
    return (Math.max(...shades) + 0.05) / (Math.min(...shades) + 0.05);
  };
  const shown = (element) => element.getClientRects().length
    && [...element.childNodes].some((node) => node.nodeType === 3 && node.data.trim());
  const still = page.createElement('style');
  still.textContent = '* { transition: none !important }';
  page.head.append(still);
  const faint = [];
  for (const theme of ['light', 'dark']) {
    page.documentElement.dataset.theme = theme;
    for (const element of page.querySelectorAll('article :not(.headerlink), .bd-links *')) {
      if (shown(element) && contrast(element) < CONTRAST) {
        faint.push(`${theme}: ${element.textContent.slice(0, 40)}`);
      }
    }
  }
  return [page.documentElement.scrollWidth, faint];
}"""
needs_sphinx = pytest.mark.skipif(
    not all(map(importlib.util.find_spec, SPHINX)),
    reason="no Sphinx: pip install -e '.[docs]'",
)


def build(folder, *words):
    """Run the builder, whose warnings are errors; its notebook trains as users do."""
    env = {name: value for name, value in os.environ.items() if name != 'XLA_FLAGS'}
    words = [sys.executable, 'docs/site/build.py', str(folder / 'site'), *words]
    done = subprocess.run(
        [*words, '--sources', str(folder / 'sources')],
        cwd=ROOT,
        env=env,
        capture_output=True,
        text=True,
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
    for page in site.rglob('*.html'):
        for picture in re.findall(r'<img[^>]*>', page.read_text()):
            assert re.search(r'alt="[^"]+"', picture), f'{page}: {picture}'


@pytest.fixture(scope='module')
def server(site):
    with serve(site) as server:
        yield server


@pytest.fixture(scope='module')
def shown(site, server):
    """What every page is like on a phone, and the errors of all."""
    pages = sorted(str(path.relative_to(site)) for path in site.rglob('*.html'))
    pages = [page for page in pages if not page.startswith('_')]  # sources of the package
    return probe(server, pages, LOOK.replace('CONTRAST', str(CONTRAST)), PHONE)


@needs_sphinx
@pytest.mark.long
@needs_browser
def test_no_page_has_an_error_in_a_browser(shown, server):
    assert shown[1] == []
    assert server.missing - {'/favicon.ico'} == set()


@needs_sphinx
@pytest.mark.long
@needs_browser
def test_no_page_is_wider_than_a_phone(shown):
    assert {page: width for page, (width, _) in shown[0].items() if width > PHONE} == {}


@needs_sphinx
@pytest.mark.long
@needs_browser
def test_every_text_can_be_read_light_and_dark(shown):
    assert {page: faint for page, (_, faint) in shown[0].items() if faint} == {}


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
@needs_browser
@pytest.mark.parametrize(
    ('words', 'page'),
    [('accumulation', 'moving'), ('hf://', 'checkpoints'), ('accum_steps', 'config')],
)
def test_the_search_finds_pages(server, words, page):
    done = browse('--dump-dom', f'{server.address}/search.html?q={quote(words, safe="")}')
    assert re.search(r'Search finished, found \d+ page', done.stdout)
    assert f'href="{page}.html' in done.stdout.partition('id="search-results"')[2]
