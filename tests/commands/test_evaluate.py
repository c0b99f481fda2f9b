"""`evaluate`: what results are called after the data that gave them."""

from __future__ import annotations

import argparse
import json
import shutil

import pytest
from helpers.runs import in_checkpoint

from vit_jax.__main__ import main
from vit_jax.commands.evaluate import with_sampling_flags
from vit_jax.inference.load import open_run


@pytest.fixture
def run_with(smoke_run, tmp_path):
    """`run_with(evals)`: a copy of a finished run with other evaluations."""

    def make(evals):
        folder = tmp_path / 'run'
        shutil.copytree(smoke_run, folder)
        config = json.loads((folder / 'config.json').read_text())
        config['evals'] = {name: config['evals']['test'] | more for name, more in evals.items()}
        (folder / 'config.json').write_text(json.dumps(config))
        return folder

    return make


def results(capsys, *words):
    assert main(['evaluate', *map(str, words), '--json']) == 0
    return json.loads(capsys.readouterr().out)


def test_a_missing_run_is_called_missing(tmp_path, capsys):
    assert main(['evaluate', str(tmp_path / 'gone')]) == 2
    assert 'no such file or folder' in capsys.readouterr().err
    (tmp_path / 'empty').mkdir()
    assert main(['evaluate', str(tmp_path / 'empty')]) == 2
    assert '--source' in capsys.readouterr().err


@pytest.mark.slow
def test_results_are_named_by_the_split_that_is_given(smoke_run, capsys):
    record = results(capsys, '--workdir', smoke_run, '--split', 'train[:12.5%]')
    assert list(record) == ['step', 'train[:12.5%]/accuracy', 'train[:12.5%]/loss']
    assert list(results(capsys, '--workdir', smoke_run)) == ['step', 'test/accuracy', 'test/loss']


@pytest.mark.slow
def test_evaluations_that_become_the_same_are_one(run_with, capsys):
    knn = {'evaluator': 'knn', 'fit': 'train[:50]', 'k': 3}
    other = {'transforms': 'central_crop(8)'}
    folder = run_with({'val': {'split': 'train[:20]'}, 'test': {}, 'odd': other, 'near': knn})
    record = results(capsys, '--workdir', folder, '--split', 'test[:40]')
    assert record.keys() == {
        'step',
        *('test[:40]_test/loss', 'test[:40]_test/accuracy'),
        *('test[:40]_odd/loss', 'test[:40]_odd/accuracy'),
        'test[:40]_knn/knn_accuracy',
    }


@pytest.mark.slow
def test_a_report_has_every_class_and_agrees_with_the_accuracy(run_with, tmp_path, capsys):
    # The task's own evaluation is measured, not the first by name.
    near = {'split': 'test[:20]', 'evaluator': 'knn', 'fit': 'train[:50]', 'k': 3}
    smoke_run = run_with({'near': near, 'test': {}})
    picture = tmp_path / 'confusion.png'
    table = tmp_path / 'classes.csv'
    record = results(capsys, '--workdir', smoke_run, '--report', picture, '--table', table)
    matrix, rows = record['classes']['matrix'], record['classes']['rows']
    correct = sum(matrix[i][i] for i in range(10))
    assert correct / sum(map(sum, matrix)) == pytest.approx(record['test/accuracy'])
    assert [row['examples'] for row in rows] == list(map(sum, matrix))
    assert picture.stat().st_size > 0
    header, *lines = table.read_text().splitlines()
    assert header == 'class,examples,accuracy,most_confused_with' and len(lines) == 10
    assert main(['evaluate', '--workdir', str(smoke_run), '--report', 'a.txt']) == 2
    assert (
        main(['evaluate', '--workdir', str(smoke_run), '--table', 'a.csv', '--threshold', '0.3'])
        == 2
    )


def test_a_report_of_a_task_that_predicts_nothing_is_refused(
    run_with, tmp_path, monkeypatch, capsys
):
    folder = run_with({'test': {}})
    (tmp_path / 'mute_lab').mkdir()
    (tmp_path / 'mute_lab' / 'tasks.py').write_text(
        'from vit_jax.tasks import base, classify\n'
        'class Task(classify.Task):\n'
        '    predict = base.Task.predict\n'
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    config = json.loads((folder / 'config.json').read_text())
    config['task']['name'] = 'mute_lab.tasks'
    (folder / 'config.json').write_text(json.dumps(config))
    in_checkpoint(folder, lambda meta: meta['config']['task'].update(name='mute_lab.tasks'))
    argv = ['--allow', 'mute_lab', '--workdir', str(folder), '--report', str(tmp_path / 'a.png')]
    assert main(['evaluate', *argv]) == 2
    *_, line = capsys.readouterr().err.splitlines()
    assert '--report' in line and "'mute_lab.tasks'" in line
    assert not (tmp_path / 'a.png').exists()


def test_samples_are_evaluated_with_the_flags_of_sampling(repo, capsys):
    flags = argparse.Namespace(steps=3, guidance=None, sampler='heun')
    jit = with_sampling_flags(open_run(repo / 'tests/golden/run_jit'), flags).task
    assert (jit.steps, jit.sampler) == (3, 'heun')
    digits = str(repo / 'tests/golden/run_digits')
    assert main(['evaluate', digits, '--steps', '3']) == 2
    error = capsys.readouterr().err
    assert '--steps' in error and 'classify' in error
