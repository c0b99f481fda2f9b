"""A rehearsal tries what a run needs, names what is broken, and leaves nothing behind."""

import argparse
import json
import os
import subprocess
import sys
import types

import jax
import numpy as np
import pytest
from helpers import broken_evaluation, second_start
from helpers import forked as forked_lib
from helpers.messages import mentions
from helpers.mounts import small_disk
from PIL import Image

from vit_jax import __main__ as cli
from vit_jax import extras
from vit_jax.commands.rehearse import choose_configs, preflight_flags
from vit_jax.config import load
from vit_jax.rehearsal import dry_run, kill_and_resume, rehearsal
from vit_jax.trainer.build import build

DIGITS = 'experiments/vit/digits.py:smoke'
LINEAR = 'tests/helpers/linear.py'


def rehearse(config, folder, *words):
    """The rows by their names, without those that need devices."""
    found = rehearsal.rehearse(load.load(config, words), folder)
    return {row.name: row for row in found}


@pytest.fixture
def no_steps(monkeypatch):
    monkeypatch.setattr(kill_and_resume.DryRun, 'rows', lambda self: iter(()))


@pytest.fixture
def forked(monkeypatch):
    """Dry runs are forked where all is imported; another test below starts one."""

    def start(words, env, **pipes):
        assert words[1:3] == ['-m', dry_run.__name__]
        return forked_lib.start(words[3:], os.environ, DRY_RUN, **pipes)

    started = types.SimpleNamespace(**vars(subprocess) | {'Popen': start})
    monkeypatch.setattr(kill_and_resume, 'subprocess', started)


# What the module does as a program.
DRY_RUN = """
import os, sys
from vit_jax.rehearsal import dry_run

code = dry_run.main()
sys.stdout.flush()
sys.stderr.flush()
os._exit(code)
"""


@pytest.mark.slow
@pytest.mark.usefixtures('forked')
def test_a_run_that_works(tmp_path, capsys):
    workdir = tmp_path / 'runs' / 'digits'
    assert cli.main(['rehearse', '--config', LINEAR, '--workdir', str(workdir), '--json']) == 0
    rows = {row['name']: row for row in json.loads(capsys.readouterr().out)}
    assert {row['result'] for row in rows.values()} == {'ok'}
    assert '12 of 1,437 records' in rows['data train']['note']
    assert 'image [8, 8, 1], label' in rows['data train']['note']
    assert '32 images a step' in rows['start']['note']
    assert mentions(rows['resumption']['note'], 'killed', 'step')
    pace = rows['step']['seconds'] * 20 / 3600
    assert f'all 20 take {pace:.2g} hours' in rows['step']['note']
    assert 0 < rows['step']['seconds'] < rows['resumption']['seconds']
    assert rows['evaluations']['note'] == 'one batch each: test'
    assert rows['saving']['seconds'] > 0
    assert not (tmp_path / 'runs').exists()


@pytest.mark.slow
@pytest.mark.usefixtures('forked')
def test_a_run_that_cannot_resume(tmp_path, monkeypatch):
    marker = tmp_path / 'started'
    monkeypatch.setenv(second_start.MARKER, str(marker))
    words = [f'task.name={second_start.__name__}']
    config = load.load(LINEAR, words)
    found = {r.name: r for r in rehearsal.rehearse(config, tmp_path / 'run')}
    assert found['start'].result == 'ok'
    assert found['resumption'].result == 'failed'
    assert found['resumption'].note == second_start.REASON
    assert os.listdir(tmp_path) == ['started']


@pytest.mark.slow
@pytest.mark.usefixtures('forked')
def test_an_evaluation_that_is_broken(tmp_path):
    found = rehearse(LINEAR, tmp_path / 'run', f'task.name={broken_evaluation.__name__}')
    assert (found['start'].result, found['start'].note) == ('failed', broken_evaluation.REASON)
    assert os.listdir(tmp_path) == []


@pytest.mark.slow
@pytest.mark.long
def test_a_disk_that_is_too_small_for_a_checkpoint(tmp_path):
    """The megabyte that is written first fits, a state of several does not."""
    with small_disk(tmp_path / 'disk', 3 * 2**20) as disk:
        (disk / 'ballast').write_bytes(bytes(2**20 * 17 // 10))
        found = rehearse(DIGITS, disk / 'run', 'model.mlp_dim=8192')
        assert found['folder'].result == 'ok'
        assert found['start'].result == 'failed'
        assert 'No space left on device' in found['start'].note
        assert os.listdir(disk) == ['ballast']


def test_an_extra_that_is_missing(tmp_path, monkeypatch):
    monkeypatch.setattr(extras, 'is_installed', lambda extra: extra != 'detection')
    found = rehearse('experiments/detr/scenes.py:smoke', tmp_path / 'run')
    assert found['extras'].result == 'failed'
    assert found['extras'].note == "pip install -e '.[detection]'"
    assert found['start'] == kill_and_resume.Row('start', 'not tried', 0.0, 'needs: extras')


def test_a_folder_that_cannot_be_made(tmp_path, no_steps):
    (tmp_path / 'file').write_text('')
    found = rehearse(DIGITS, tmp_path / 'file' / 'run')
    assert found['folder'].result == 'failed'
    assert mentions(found['folder'].note, 'folder')
    assert os.listdir(tmp_path) == ['file']


def test_a_writer_whose_server_does_not_answer(tmp_path, no_steps, monkeypatch):
    monkeypatch.setenv('MLFLOW_TRACKING_URI', 'http://127.0.0.1:1')
    pytest.importorskip('mlflow')
    found = rehearse(DIGITS, tmp_path / 'run', "writers=('mlflow',)")
    assert found['writer mlflow'].result == 'failed'


def test_a_writer_without_its_package(tmp_path, no_steps, monkeypatch):
    monkeypatch.setitem(sys.modules, 'wandb', None)  # importing it fails
    found = rehearse(DIGITS, tmp_path / 'run', "writers=('wandb',)")
    assert found['writer wandb'].result == 'failed'
    assert 'pip install -e' in found['writer wandb'].note


@pytest.mark.slow
def test_a_dry_run_ends_with_its_parent(tmp_path):
    request = tmp_path / 'request.json'
    asked = dry_run.Request({}, str(tmp_path / 'run'), str(tmp_path / 'facts.json'))
    request.write_text(json.dumps(asked._asdict()))
    words = [sys.executable, '-c', WAITING, str(request)]
    pipes = dict.fromkeys(('stdin', 'stdout', 'stderr'), subprocess.PIPE)
    process = subprocess.Popen(words, **pipes)
    assert process.stdout.readline() == b'running\n'
    _, errors = process.communicate(timeout=60)  # closes its standard input
    assert process.returncode == 1
    assert b'Traceback' not in errors, 'an error ends it with the same code'


# The process with a run that takes an hour.
WAITING = """
import time
from vit_jax.rehearsal import dry_run

def act(request):
    print('running', flush=True)
    time.sleep(3600)

dry_run.act = act
dry_run.main()
"""


def flowers(folder, broken=()):
    """Two classes of three pictures; those numbered in `broken` are not."""
    for number in range(6):
        file = folder / 'train' / 'ab'[number % 2] / f'{number}.png'
        file.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(np.full((8, 8, 3), number, np.uint8)).save(file)
        if number in broken:
            file.write_bytes(b'no picture')
    return f'data.source=folder:{folder}'


def test_records_that_are_broken(tmp_path, no_steps):
    words = [flowers(tmp_path / 'flowers', broken=range(6)), 'evals.test.split=train']
    words.append('data.transforms=resize(8)')
    found = rehearse(DIGITS, tmp_path / 'run', *words)
    assert found['data train'].result == 'failed'
    assert 'flowers/train/' in found['data train'].note


def test_a_split_that_is_not_there(tmp_path, no_steps):
    found = rehearse(DIGITS, tmp_path / 'run', 'data.split=trian')
    assert found['data trian'].result == 'failed'
    assert "did you mean 'train'" in found['data trian'].note
    assert found['evals.test test'].result == 'ok'


def test_a_rehearsal_that_goes_on_already(tmp_path, capsys):
    other = tmp_path / f'run{rehearsal.SUFFIX}'
    other.mkdir()
    (other / 'config.json').write_text('{}')
    words = ['rehearse', '--config', DIGITS, '--workdir', str(tmp_path / 'run')]
    assert cli.main(words) == 2
    assert 'another rehearsal' in capsys.readouterr().err
    assert (other / 'config.json').exists()


def test_a_step_for_which_cpus_are_too_slow(monkeypatch):
    training = build(load.load(DIGITS, []))
    facts = dry_run.facts_of(training)
    dry_run.require_suitable(training, facts)
    monkeypatch.setattr(dry_run, 'CPU_FLOPS', 1e3)
    with pytest.raises(dry_run.TooLarge, match='minutes on CPUs'):
        dry_run.require_suitable(training, facts)
    with pytest.raises(dry_run.TooLarge, match=r'the state has 1024\.0 GiB'):
        dry_run.require_suitable(training, facts._replace(state_bytes=2**40))


def test_the_smallest_batches():
    config = load.load(DIGITS, ['step.accum_steps=2'])
    assert dry_run.smallest(config).batch_size == 2 * jax.device_count()


def test_an_evaluation_of_one_batch():
    training = build(load.load(DIGITS, ['evals.test.batch_size=16']))
    short = dry_run.with_short_evaluations(training)
    data = short.evaluations['test'].data
    assert len(list(data.eval_batches())) == 1
    assert data.info == training.data.info


def test_the_first_and_the_last_run_of_a_sweep():
    found = choose_configs(None, 'experiments/sweeps/digits.py:smoke-grid')
    assert [name for name, _ in found] == ['optim.lr=0.001, seed=0', 'optim.lr=0.003, seed=1']


@pytest.mark.parametrize(
    ('words', 'message'),
    [
        ([], 'needs one of CONFIG'),
        (['--config', DIGITS, '--minutes', '0'], '--minutes 0: must be positive'),
        (['--config', DIGITS, '--price', '1'], 'give both'),
    ],
)
def test_mistakes(words, message, tmp_path, capsys):
    assert cli.main(['rehearse', '--workdir', str(tmp_path / 'run'), *words]) == 2
    assert message in capsys.readouterr().err


def test_the_flags_that_preflight_gets():
    words = ['--config.x=1', '--workdir', 'runs/a', 'a.py', '--config.y', '2']
    args = argparse.Namespace(config='a.py', sweep=None, topology='v5e:4x4', price=None)
    flags = ['--config', 'a.py', '--config.x=1', '--config.y=2', '--topology', 'v5e:4x4']
    assert preflight_flags(words, args) == flags
