"""`goodput`: what the time of runs went into."""

from __future__ import annotations

import json
import shutil

import pytest
from helpers.messages import mentions, says

from vit_jax.__main__ import main


@pytest.fixture
def old_run(smoke_run, tmp_path):
    """A run of a version that did not record its time."""
    folder = tmp_path / 'old'
    shutil.copytree(smoke_run, folder)
    (folder / 'times.jsonl').unlink()
    return folder


def test_a_table_a_picture_and_json(smoke_run, old_run, tmp_path, capsys):
    picture = tmp_path / 'time.png'
    assert main(['goodput', str(smoke_run), str(old_run), '--out', str(picture)]) == 0
    output = capsys.readouterr().out
    assert picture.read_bytes()[:4] == b'\x89PNG'
    rows = {line.split()[0]: line for line in output.splitlines()[1:] if line[:1].strip()}
    assert {'steps', 'data', 'compile', 'lost', 'between', 'all', 'starts'} <= rows.keys()
    assert '100.0%' in rows['all'] and rows['starts'].split()[1] == '1'
    assert mentions(output.splitlines()[-1], 'times.jsonl', 'older')

    assert main(['goodput', str(smoke_run), str(old_run), '--json']) == 0
    measured, old = json.loads(capsys.readouterr().out)
    assert old == {'run': 'old', 'goodput': None}
    assert sum(measured['seconds'].values()) == pytest.approx(measured['wall_sec'])
    assert 0 < measured['goodput'] < 1 and measured['starts'] == 1


def test_only_runs_without_a_record(old_run, capsys):
    assert main(['goodput', str(old_run)]) == 2
    assert says(capsys.readouterr().err, 'old', 'times.jsonl')


def test_compare_has_the_share(smoke_run, old_run, capsys):
    assert main(['compare', str(smoke_run), str(old_run), '--json']) == 0
    measured, old = json.loads(capsys.readouterr().out)
    assert 0 < measured['goodput'] < 1 and old['goodput'] is None


def test_the_page_has_the_parts(smoke_run, old_run, tmp_path, capsys):
    for folder, has in ((smoke_run, True), (old_run, False)):
        out = tmp_path / 'page.html'
        assert main(['report', str(folder), '--out', str(out)]) == 0
        page = out.read_text()
        assert ('<td>compile</td>' in page) == has == ('Shares of time' in page)
