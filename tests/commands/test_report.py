"""`report`: one file about runs, with everything inside."""

from __future__ import annotations

import json
import pathlib
import re
import shutil

import numpy as np
import pytest
from helpers.browser import needs_browser, probe, serve
from helpers.messages import mentions
from PIL import Image

from vit_jax.__main__ import main

HOSTILE = '<img src=x onerror=alert(1)>\x1b'


def report(capsys, *argv: object) -> tuple[int, str]:
    code = main(['report', *map(str, argv)])
    output = capsys.readouterr()
    return code, output.out + output.err


@pytest.fixture
def hostile_run(smoke_run, tmp_path) -> pathlib.Path:
    """A run whose name, picture, config, metrics and classes are markup; its seed is another."""
    folder = pathlib.Path(shutil.copytree(smoke_run, tmp_path / HOSTILE))
    Image.fromarray(np.zeros((4, 4, 3), np.uint8)).save(folder / '"><script>.png')
    config = json.loads((folder / 'config.json').read_text())
    config |= {'seed': 7, '</pre><script>': '</td><script>'}
    (folder / 'config.json').write_text(json.dumps(config))
    with (folder / 'metrics.jsonl').open('a') as file:
        file.write('{"step": 20, "<script>/accuracy": 0.5}\n')
    meta = max((folder / 'checkpoints').iterdir()) / 'meta' / 'metadata'
    facts = json.loads(meta.read_text()) | {'class_names': ['</pre><script>']}
    meta.write_text(json.dumps(facts))
    return folder


def loaded(page: str) -> list[str]:
    """Addresses that a browser would load, data inside of the page left out."""
    found = re.findall(r'(?:src|href|srcset|data|action)\s*=\s*"?([^">\s]+)', page)
    return [address for address in found if not address.startswith('data:')]


def test_a_run_is_one_file_with_everything_inside(smoke_run, tmp_path, capsys):
    out = tmp_path / 'new' / 'one.html'
    code, output = report(capsys, smoke_run, '--out', out)
    page = out.read_text()
    assert code == 0 and output.startswith(f'{out}: 1 run, ')
    assert [p.name for p in out.parent.iterdir()] == ['one.html']
    assert loaded(page) == [] and 'http' not in page.replace('http-equiv', '')
    assert '<script' not in page and "default-src 'none'" in page
    assert 'finished after 20 steps' in page and '&quot;batch_size&quot;' in page
    assert page.count('src="data:image/svg+xml;base64,') >= 4
    *curves, time = re.findall(r'<img alt="([^"]*)"', page)
    assert all('ends at' in parts for parts in curves) and re.search(r'run: [\d.]+% steps', time)
    for row in ('test/accuracy', 'parameters', 'examples', 'chip-hours', 'FLOPs', 'jax', 'python'):
        assert f'<td>{row}</td>' in page
    assert re.search(r'<td>20</td><td>\d+</td><td>[0-9a-f]{64}</td>', page)  # a step's digest
    assert 'prefers-color-scheme:dark' in page and 'name="viewport"' in page
    report(capsys, smoke_run, '--out', out)
    assert out.read_text() == page


@pytest.mark.slow
def test_several_runs_show_their_differences_and_names_are_escaped(
    smoke_run, hostile_run, tmp_path, capsys
):
    out = tmp_path / 'two.html'
    code, output = report(capsys, smoke_run, hostile_run, hostile_run, '--out', out)
    page = out.read_text()
    assert code == 0 and ': 2 runs, ' in output
    assert re.search(r'<td>config.seed</td><td>\d+</td><td>7</td>', page)
    assert '<td>config.batch_size</td>' not in page
    assert '<script' not in page and loaded(re.sub(r'&lt;.*?&gt;', '', page)) == []
    assert page.count('&lt;img src=x onerror=alert(1)&gt;\\u001b') >= 8
    assert '<pre tabindex="0">&lt;/pre&gt;&lt;script&gt;</pre>' in page
    assert 'alt="&quot;&gt;&lt;script&gt;.png of' in page and 'data:image/png;base64,' in page


def test_an_unfinished_run_is_said_to_be_so(tmp_path, capsys):
    for name, lines in (('begun', ''), ('going', '{"step": 3, "train/loss": 2.0}\n')):
        (tmp_path / name).mkdir()
        config = {'batch_size': 8, 'model': {'name': 'vit'}}
        (tmp_path / name / 'config.json').write_text(json.dumps(config))
        (tmp_path / name / 'metrics.jsonl').write_text(lines)
        assert report(capsys, tmp_path / name, '--out', tmp_path / f'{name}.html')[0] == 0
    assert 'unfinished, 0 steps so far' in (tmp_path / 'begun.html').read_text()
    assert mentions((tmp_path / 'begun.html').read_text(), 'nothing', 'draw')
    assert 'unfinished, 3 steps so far' in (tmp_path / 'going.html').read_text()
    assert report(capsys, tmp_path, '--out', tmp_path / 'both.html')[0] == 0
    assert mentions((tmp_path / 'both.html').read_text(), 'config')


def test_pictures_that_are_large_are_named_and_links_left_out(tmp_path, capsys):
    config = {'batch_size': 8, 'model': {'name': 'vit'}}
    (tmp_path / 'config.json').write_text(json.dumps(config))
    (tmp_path / 'large.png').write_bytes(bytes(2**21 + 1))
    (tmp_path / 'link.png').symlink_to(tmp_path / 'config.json')
    assert report(capsys, tmp_path, '--out', tmp_path / 'a.html')[0] == 0
    page = (tmp_path / 'a.html').read_text()
    assert 'not shown here: large.png' in page and '<img' not in page and 'link.png' not in page


def test_damaged_metadata_are_one_line(smoke_run, tmp_path, capsys):
    run = pathlib.Path(shutil.copytree(smoke_run, tmp_path / 'run'))
    (run / 'checkpoints' / '20' / 'meta' / 'metadata').write_text('{"confi')
    code, line = report(capsys, run, '--out', tmp_path / 'a.html')
    assert code == 2 and 'damaged metadata' in line and line.count('\n') == 1
    assert not (tmp_path / 'a.html').exists()


def test_mistakes_are_one_line_and_leave_no_file(smoke_run, tmp_path, capsys):
    (tmp_path / 'file').touch()
    (tmp_path / 'folder.html').mkdir()
    before = sorted(tmp_path.rglob('*'))
    for argv, text in (
        ((tmp_path / 'none', '--out', tmp_path / 'a.html'), 'holds no run'),
        ((smoke_run, tmp_path / 'none', '--out', tmp_path / 'a.html'), 'holds no run'),
        ((smoke_run, '--out', tmp_path / 'a.pdf'), ('end', 'html')),
        ((smoke_run, '--out', tmp_path / 'folder.html'), 'is a folder'),
        ((smoke_run, '--out', tmp_path / 'file' / 'a.html'), 'cannot be written'),
        ((), 'RUN'),
    ):
        code, line = report(capsys, *argv)
        assert code == 2 and mentions(line, text) and line.count('\n') == 1 and line[:6] == 'error:'
    assert sorted(tmp_path.rglob('*')) == before


# Widths of the page, of what it shows of the first drawing, and of that after a click; then what
# scripts have done.
LOOK = """(page) => {
  const label = page.querySelector('.drawing');
  const before = label.querySelector('img').clientWidth;
  label.click();
  const after = label.querySelector('img').clientWidth;
  return [page.documentElement.scrollWidth, before, after, page.querySelectorAll('script').length];
}"""


@pytest.mark.long
@needs_browser
@pytest.mark.parametrize('width', [400, 1400])
def test_in_a_browser_drawings_are_enlarged_and_nothing_runs(
    smoke_run, hostile_run, tmp_path, capsys, width
):
    (tmp_path / 'pages').mkdir()
    page = tmp_path / 'pages' / 'report.html'
    assert report(capsys, smoke_run, hostile_run, '--out', page)[0] == 0
    with serve(page.parent) as server:
        results, errors = probe(server, ['report.html'], LOOK, width)
    page_width, before, after, scripts = results['report.html']
    assert errors == [] and server.missing <= {'/favicon.ico'} and scripts == 0
    assert page_width <= width and after > 1.5 * before
