"""Real workers: the example trains, and a killed worker's trial ends as if nothing had happened."""

import json
import pathlib
import signal
import subprocess
import time

import pytest

pytest.importorskip('optuna')

from helpers.digests import tree_digest
from helpers.runs import started, undrawn  # noqa: F401
from optuna.trial import TrialState

from vit_jax.__main__ import main
from vit_jax.checkpoints import checkpointer
from vit_jax.storage import run_folder
from vit_jax.sweeps import study
from vit_jax.sweeps.space import Sweep, grid

pytestmark = [pytest.mark.process, pytest.mark.slow]

TOTAL = 48
CONFIG = 'tests/helpers/linear.py'
FLAGS = {'total': f'{TOTAL} steps', 'every.checkpoint': '8', 'every.eval': '16'}


def kill_after_a_checkpoint(process: subprocess.Popen, folder: pathlib.Path) -> None:
    deadline = time.monotonic() + 200
    while not run_folder.steps(folder):
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.001)
    process.send_signal(signal.SIGKILL)


def digest(folder: pathlib.Path) -> str:
    step, variables, _ = checkpointer.load_variables(folder / 'checkpoints')
    assert step == TOTAL
    return tree_digest(variables)


@pytest.mark.fault(48)
def test_a_trial_of_a_killed_worker_is_resumed_from_its_checkpoint(
    tmp_path, repo, run_cli, monkeypatch
):
    monkeypatch.chdir(repo)
    folder = tmp_path / 'study'
    sweep = Sweep(CONFIG, 'test/accuracy', points=grid({'optim.lr': [0.002]}), overrides=FLAGS)
    made = study.create(sweep, 'killed', folder=folder)
    words = ['sweep', 'work', 'killed', '--workdir', str(folder), '--allow', 'helpers']
    with started(repo, *words) as process:
        kill_after_a_checkpoint(process, made.run_folder(0))
    assert [trial.state for trial in made.trials()] == [TrialState.RUNNING]

    done = run_cli(*words)
    assert done.returncode == 0, done.stderr
    assert 'resumes after step' in done.stdout
    (trial,) = made.trials()
    assert trial.state == TrialState.COMPLETE
    result = json.loads((made.run_folder(0) / 'result.json').read_text())
    assert trial.value == result['test/accuracy']
    assert sorted(trial.intermediate_values) == list(range(16, TOTAL + 1, 16))

    flags = [f'--config.{k}={v}' for k, v in {**FLAGS, 'optim.lr': 0.002}.items()]
    flags += [f'--config.every.checkpoint={TOTAL}']
    alone = tmp_path / 'alone'
    trained = run_cli('train', '--config', CONFIG, *flags, '--workdir', alone)
    assert trained.returncode == 0, trained.stderr
    assert digest(made.run_folder(0)) == digest(alone)


# Of another model, which is not what is tested.
EXAMPLE = f"""
import dataclasses
from experiments.sweeps import digits

def get_sweep(arg=None):
    return dataclasses.replace(digits.smoke_sweep(digits.get_sweep()), config={CONFIG!r})
"""


def test_a_worker_trains_the_example(tmp_path, repo, monkeypatch, one_device):
    monkeypatch.chdir(repo)
    (tmp_path / 'sweep.py').write_text(EXAMPLE)
    words = ['--study', 'a', '--workdir', str(tmp_path), '--storage']
    words.append(f'sqlite:///{tmp_path}/sweep.db')
    assert main(['sweep', 'create', str(tmp_path / 'sweep.py'), *words]) == 0
    words = ['--workdir', str(tmp_path), '--trials', '1', '--allow', 'helpers']
    assert main(['sweep', 'work', 'a', *words]) == 0
    trial, *others = study.open_study('a', folder=tmp_path).trials()
    assert trial.state == TrialState.COMPLETE
    assert {other.state for other in others} == {TrialState.WAITING}
    stored = json.loads((tmp_path / '0001' / 'config.json').read_text())
    assert stored['optim']['lr'] == trial.params['optim.lr']
    settled = {'model': stored['model'], 'step': stored['step']}  # by the data, and by the start
    assert stored == trial.user_attrs['config'] | settled
