"""Trunks have not cooled down: they are left out of a table, with the reason."""

import itertools
import json

import numpy as np
import pytest
from helpers.messages import mentions, says

from vit_jax.__main__ import main
from vit_jax.scaling import runs

CONSTANT = {'schedule': {'name': 'constant', 'warmup': '2 steps', 'cooldown': '0 steps'}}
COOLED = {
    'schedule': {'name': 'constant', 'warmup': '2 steps', 'cooldown': '5 steps'},
    'weight_decay': 0.1,
}


def make_run(folder, total, optim=CONSTANT, **sections):
    folder.mkdir(parents=True)
    config = {'batch_size': 10, 'model': {'name': 'vit'}, 'task': {'name': 'classify'}}
    config |= {'total': total, 'optim': optim, **sections}
    (folder / 'config.json').write_text(json.dumps(config))
    line = {'step': total, 'test/loss': 3 / total**0.5}
    (folder / 'metrics.jsonl').write_text(json.dumps(line) + '\n')
    (folder / 'result.json').write_text(json.dumps({'test/loss': 3 / total**0.5}))
    return folder


@pytest.fixture
def study(tmp_path):
    """A trunk and its branches of 10, 20, 30 and 40 steps."""
    trunk = make_run(tmp_path / 'runs/0000', 32)
    for n in range(1, 5):
        branch = {'from': str(trunk), 'step': 8 * n}
        make_run(tmp_path / f'runs/000{n}', 10 * n, COOLED, branch=branch)
    return tmp_path / 'runs'


def names(folder):
    return [row['run'].rpartition('/')[2] for row in runs.collect([folder], lambda meta: None)]


def test_collect_leaves_out_the_trunk_with_a_reason(study, tmp_path, capsys):
    table = tmp_path / 'runs.csv'
    assert main(['scaling', 'collect', str(study), '--output', str(table)]) == 0
    reason, written = capsys.readouterr().out.splitlines()
    assert says(reason, f'{study}/0000', 'trunk', '4 runs') and written == f'{table}: 4 runs'
    assert [line.partition(',')[0][-4:] for line in table.read_text().splitlines()[1:]] == [
        *('0001', '0002', '0003', '0004')
    ]


@pytest.mark.slow
def test_the_reason_is_in_the_manifest_of_a_report(study, tmp_path):
    argv = ['--y', 'test/loss', '--holdout', '0', '--bootstrap', '0', '--form', 'power']
    assert main(['scaling', 'report', str(study), *argv, '--output', str(tmp_path / 'out')]) == 0
    stored = json.loads((tmp_path / 'out/scaling.json').read_text())
    assert says(stored['left_out'], 'trunk', '4 runs')
    assert len(stored['manifest']) == 4
    assert mentions((tmp_path / 'out/scaling.md').read_text(), 'trunk', 'learning')


@pytest.mark.slow
def test_a_report_shows_the_law_of_a_study_at_equal_compute(tmp_path, capsys, monkeypatch):
    sizes, budgets, results = (1000, 1700, 3000, 5200, 9000), (1e11, 1e12, 1e13), {}
    for i, (c, n) in enumerate(itertools.product(budgets, sizes)):
        steps = round(c / n / 1e5)
        folder = make_run(tmp_path / f'runs/{i:04}', steps, COOLED)
        off = np.log(n / 3000 / (c / 1e12) ** 0.2)
        results[str(folder)] = {'parameters': n, 'flops': c, 'test/loss': c**-0.05 + 0.02 * off**2}
    (tmp_path / 'runs/0000/result.json').unlink()
    read = runs.read_run
    monkeypatch.setattr(runs, 'read_run', lambda *args: read(*args) | results[str(args[0])])
    argv = ['--y', 'test/loss', '--by', 'parameters', '--bootstrap', '5', '--holdout', '0']
    out = tmp_path / 'out'
    assert main(['scaling', 'report', str(tmp_path / 'runs'), *argv, '--output', str(out)]) == 0
    page, stored = (out / 'scaling.md').read_text(), json.loads((out / 'scaling.json').read_text())
    assert '# Optimal sizes' in page and '![optimal sizes](optimal.png)' in page
    assert (out / 'optimal.png').read_bytes()[:4] == b'\x89PNG'
    assert 'data:image/png' in (out / 'scaling.html').read_text()
    assert stored['optimal']['isoflop']['a'] == pytest.approx(0.2, abs=0.05)
    assert page.count(' % |') == 2 * 14, 'two residuals for each finished run'
    assert 'constant with cooldown' in page and '0000: not finished' in page
    questions = stored['checklist']
    assert questions['batch'] == '10 for every run' and questions['weight decay'] == '0.1'
    assert questions['runs'] == '14 fitted, 1 left out'
    assert 'cooldown' in questions['schedule'] and 'joint: ' in questions['starts']
    assert '| precision | float32 |' in page and '| data | not recorded' in page
    assert mentions(page, 'form', '`a x^-b`') and 'mean of forms' not in page
    for text in (page, capsys.readouterr().out):
        assert text.count('3 points') == 1
        assert '1700 parameters, 3000 parameters, ' in text


def test_a_study_that_was_moved_is_read_alike(study, tmp_path):
    moved = study.rename(tmp_path / 'elsewhere')
    assert names(moved) == ['0001', '0002', '0003', '0004']


def test_a_trunk_without_branches_keeps_steps(tmp_path):
    trunk = make_run(tmp_path / 'a', 32, checkpoint={'keep_steps': [8, 16]})
    make_run(tmp_path / 'b', 32)
    notes = runs.trunk_notes([trunk, tmp_path / 'b'])
    assert list(notes) == [trunk] and mentions(notes[trunk], 'keeps', 'steps')


@pytest.mark.parametrize(
    ('schedule', 'cooled'),
    [
        ({'name': 'cosine'}, True),
        ({'name': 'linear', 'warmup': '5%'}, True),
        ({'name': 'rsqrt', 'cooldown': '20%'}, True),
        ({'name': 'rsqrt', 'cooldown': '0'}, False),
        ({'name': 'constant', 'cooldown': ''}, False),
        ({}, False),
    ],
)
def test_a_run_with_a_cooldown_is_not_a_trunk(study, schedule, cooled):
    config = json.loads((study / '0000/config.json').read_text())
    config['optim'] = {'schedule': schedule}
    (study / '0000/config.json').write_text(json.dumps(config))
    assert ('0000' in names(study)) == runs.cools_down(config) == cooled
