"""A run that is stopped, killed or moved ends as if nothing had happened."""

import contextlib
import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import time
from functools import partial

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest
from helpers.digests import tree_digest
from helpers.xla import xla_flags

from vit_jax.__main__ import main
from vit_jax.config import load as config_lib
from vit_jax.errors import EXIT_PREEMPTED, UserError
from vit_jax.storage import lock as workdir
from vit_jax.storage import run_folder
from vit_jax.trainer import build, meter, train

pytestmark = [pytest.mark.process, pytest.mark.slow]

TOTAL = 30
# Everything that has a state or draws random numbers is on: dropout, augmentation and mixup by
# the experiment itself, the moving average and accumulation here.
FLAGS = {
    'total': f'{TOTAL} steps',
    'step.accum_steps': 2,
    'step.ema_decay': 0.9,
    'every.log': '1',
    'every.eval': '15',
    'every.checkpoint': '2',
    'checkpoint.keep_last': 3,
}


def arguments(repo: pathlib.Path, folder: pathlib.Path, *extra: str) -> list[str]:
    config = f'{repo}/experiments/vit/digits.py:smoke'
    flags = [f'--config.{name}={value}' for name, value in FLAGS.items()]
    return ['train', '--config', config, *flags, '--workdir', str(folder), *extra]


@contextlib.contextmanager
def started(repo: pathlib.Path, folder: pathlib.Path, *extra: str):
    """A run in the background, on one device."""
    environment = {**os.environ, 'XLA_FLAGS': xla_flags(devices=1)}
    command = [sys.executable, '-m', 'vit_jax', *arguments(repo, folder, *extra)]
    pipes = {'stdout': subprocess.PIPE, 'stderr': subprocess.STDOUT, 'text': True}
    with subprocess.Popen(command, cwd=repo, env=environment, **pipes) as process:
        try:
            yield process
        finally:
            process.kill()


def wait_until(condition, process: subprocess.Popen) -> None:
    deadline = time.monotonic() + 120
    while not condition():
        assert process.poll() is None, f'ended too soon: {process.stdout.read()}'
        assert time.monotonic() < deadline
        time.sleep(0.001)


def metrics(folder: pathlib.Path) -> list[dict]:
    path = folder / 'metrics.jsonl'
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def last_step(folder: pathlib.Path) -> int:
    with contextlib.suppress(json.JSONDecodeError):  # a line that is being written
        return max((line['step'] for line in metrics(folder)), default=0)
    return 0


def steps(folder: pathlib.Path) -> list[int]:
    return run_folder.steps(folder)


def has_saved_beyond(folder: pathlib.Path, step: int) -> bool:
    return max(steps(folder), default=0) > step


def is_saving(folder: pathlib.Path) -> bool:
    return any(folder.glob('checkpoints/*.orbax-checkpoint-tmp'))


def digest(folder: pathlib.Path) -> str:
    """Of all that the last checkpoint holds."""
    last = folder / 'checkpoints' / str(steps(folder)[-1])
    return tree_digest([read_item(last / name) for name in ('variables', 'training')])


def read_item(path: pathlib.Path):
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as reader:
        tree = reader.metadata(path).item_metadata.tree
        as_numpy = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), tree)
        return reader.restore(path, args=ocp.args.PyTreeRestore(tree, restore_args=as_numpy))


def losses(folder: pathlib.Path) -> list[float]:
    """The loss of every step; each step must be there exactly once."""
    lines = [line for line in metrics(folder) if 'train/loss' in line]
    assert [line['step'] for line in lines] == list(range(1, TOTAL + 1))
    return [line['train/loss'] for line in lines]


def assert_same_run(folder: pathlib.Path, reference: pathlib.Path) -> None:
    assert steps(folder)[-1] == TOTAL
    assert digest(folder) == digest(reference)
    assert losses(folder) == losses(reference)
    evaluations = [[m for m in metrics(f) if 'test/loss' in m] for f in (folder, reference)]
    assert [m['step'] for m in evaluations[0]] == [15, 30]
    assert evaluations[0] == evaluations[1]
    assert (folder / 'result.json').read_text() == (reference / 'result.json').read_text()


@pytest.fixture(scope='module')
def uninterrupted(tmp_path_factory, repo, run_cli) -> pathlib.Path:
    folder = tmp_path_factory.mktemp('uninterrupted')
    done = run_cli(*arguments(repo, folder))
    assert done.returncode == 0, done.stderr
    return folder


# --- stopped, killed, told to go: bit for bit the same state ---


@pytest.fixture(scope='module')
def stopped(tmp_path_factory, repo, run_cli) -> pathlib.Path:
    folder = tmp_path_factory.mktemp('stopped')
    done = run_cli(*arguments(repo, folder, '--stop-at', '13'))
    assert done.returncode == EXIT_PREEMPTED, done.stderr
    assert steps(folder) == [10, 12, 13]
    assert not (folder / 'result.json').exists()
    return folder


def test_stopping_and_going_on(tmp_path, repo, run_cli, stopped, uninterrupted):
    folder = shutil.copytree(stopped, tmp_path / 'run')
    done = run_cli(*arguments(repo, folder))
    assert done.returncode == 0, done.stderr
    assert 'resumes after step 13' in done.stdout
    assert_same_run(folder, uninterrupted)


def test_a_damaged_checkpoint_costs_steps_but_not_the_result(
    tmp_path, repo, run_cli, stopped, uninterrupted
):
    folder = shutil.copytree(stopped, tmp_path / 'run')
    data = max(folder.glob('checkpoints/13/*/d/*'), key=lambda path: path.stat().st_size)
    os.truncate(data, 100)
    done = run_cli(*arguments(repo, folder))
    assert done.returncode == 0, done.stderr
    assert f'checkpoints/13 ignored: {data.relative_to(folder / "checkpoints/13")}' in done.stderr
    assert 'resumes after step 12' in done.stdout
    assert_same_run(folder, uninterrupted)


def test_kills_in_the_middle_of_a_save(tmp_path, repo, run_cli, uninterrupted):
    in_the_middle = 0
    for _ in range(2):
        reached = max(steps(tmp_path), default=0)
        with started(repo, tmp_path) as process:
            wait_until(partial(has_saved_beyond, tmp_path, reached), process)
            wait_until(partial(is_saving, tmp_path), process)
            process.kill()
            assert process.wait() == -signal.SIGKILL
        in_the_middle += is_saving(tmp_path)
        assert steps(tmp_path)[-1] > reached
    assert in_the_middle > 0
    done = run_cli(*arguments(repo, tmp_path))
    assert done.returncode == 0, done.stderr
    assert not is_saving(tmp_path)
    assert_same_run(tmp_path, uninterrupted)


def test_sigterm_saves_and_exits_with_75_however_often_it_comes(
    tmp_path, repo, run_cli, uninterrupted
):
    with started(repo, tmp_path) as process:
        wait_until(lambda: last_step(tmp_path) >= 3, process)
        while process.poll() is None:
            process.send_signal(signal.SIGTERM)
            time.sleep(0.01)
        output = process.stdout.read()
        assert process.returncode == EXIT_PREEMPTED, output
    stopped = steps(tmp_path)[-1]
    assert f'stopped after step {stopped}/{TOTAL}; the state is saved' in output
    assert stopped == last_step(tmp_path) < TOTAL
    done = run_cli(*arguments(repo, tmp_path))
    assert done.returncode == 0, done.stderr
    assert_same_run(tmp_path, uninterrupted)


# --- nothing to do, or not allowed to ---


def test_a_complete_run_is_left_alone(repo, uninterrupted, capsys):
    def state():
        return {path: path.stat().st_mtime_ns for path in uninterrupted.rglob('*')}

    before = state()
    assert main(arguments(repo, uninterrupted)) == 0
    assert 'complete' in capsys.readouterr().out
    assert state() == before


def test_a_second_run_in_the_same_folder_is_refused(tmp_path, repo, capsys):
    with workdir.lock(tmp_path):
        assert main(arguments(repo, tmp_path)) == 2
    owner = f'in use by another run: host {os.uname().nodename}, pid {os.getpid()}'
    assert owner in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ['lock']


@pytest.fixture
def config(repo):
    flags = [f'{name}={value}' for name, value in FLAGS.items()]
    return config_lib.load(f'{repo}/experiments/vit/digits.py:smoke', flags)


def test_a_folder_that_cannot_be_written_is_refused_before_the_data_is_opened(
    tmp_path, config, monkeypatch
):
    (tmp_path / 'file').write_text('')
    monkeypatch.delattr(build, 'build')
    with pytest.raises(UserError, match='cannot write to the workdir'):
        train.train(config, tmp_path / 'file' / 'run')


# --- other devices ---


def test_every_layout_goes_on_from_any_other(tmp_path, config, uninterrupted, capsys):
    plan = [('jit', 8, 1, 9), ('jit', 2, 2, 19), ('pmap', 4, 1, None)]
    for strategy, count, fsdp, stop_at in plan:
        config.parallel = {'strategy': strategy, 'fsdp': fsdp, 'tensor': 1}
        with contextlib.suppress(train.Preempted):
            train.train(config, tmp_path, stop_at=stop_at, devices=jax.devices()[:count])
    output = capsys.readouterr().out
    assert 'so far on 8 x cpu (jit): the examples stay the same' in output
    assert 'so far on 2 x cpu (jit): the examples stay the same' in output
    np.testing.assert_allclose(losses(tmp_path), losses(uninterrupted), rtol=1e-4)


# --- a state that is not finite ---


BROKEN = """
import dataclasses
import jax.numpy as jnp
from vit_jax.tasks import classify

@dataclasses.dataclass(frozen=True)
class Task(classify.Task):
    def loss(self, outputs, batch):
        found = super().loss(outputs, batch)
        broken = jnp.where(batch['label'][0] == 3, jnp.nan, found['loss'].sum)
        return {**found, 'loss': found['loss']._replace(sum=broken)}
"""


def test_a_run_that_skips_steps_also_ends_as_if_it_had_never_stopped(
    tmp_path, monkeypatch, config, capsys
):
    (tmp_path / 'my_lab').mkdir()
    (tmp_path / 'my_lab/broken.py').write_text(BROKEN)
    monkeypatch.syspath_prepend(tmp_path)
    config.task = {'name': 'my_lab.broken'}
    with config.unlocked():
        config.step.max_skips = 3
    whole, halves = tmp_path / 'whole', tmp_path / 'halves'
    train.train(config, whole, devices=jax.devices()[:1])
    with pytest.raises(train.Preempted):
        train.train(config, halves, stop_at=11, devices=jax.devices()[:1])
    train.train(config, halves, devices=jax.devices()[:1])
    assert digest(halves) == digest(whole)
    skipped = [m['step'] for m in metrics(whole) if m.get('train/skipped')]
    assert 0 < len(skipped) < 15
    assert skipped == [m['step'] for m in metrics(halves) if m.get('train/skipped')]
    assert '1 steps skipped' in capsys.readouterr().out


def test_an_exploding_run_stops_and_saves_no_state_that_is_not_finite(tmp_path, config):
    config.optim.lr = 1e20
    config.optim.schedule.warmup = '0'
    config.every.checkpoint = '1'
    with pytest.raises(meter.Diverged, match=r'step \d+: .*the last checkpoint stands'):
        train.train(config, tmp_path, devices=jax.devices()[:1])
    for step in steps(tmp_path):
        for item in ('variables', 'training'):
            leaves = jax.tree.leaves(read_item(tmp_path / 'checkpoints' / str(step) / item))
            assert all(np.isfinite(leaf).all() for leaf in leaves)
