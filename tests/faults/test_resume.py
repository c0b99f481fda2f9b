"""A run that is stopped, killed or moved ends as if nothing had happened."""

import os
import pathlib
import re
import shutil
import signal
import subprocess
import time
from functools import partial

import jax
import numpy as np
import pytest
from helpers.messages import mentions
from helpers.runs import (
    digest,
    is_saving,
    last_step,
    linear,
    metrics,
    read_item,
    started,
    steps,
    undrawn,  # noqa: F401
    wait_until,
)
from helpers.xla import use_devices

from vit_jax.__main__ import main
from vit_jax.errors import EXIT_PREEMPTED
from vit_jax.storage import lock

pytestmark = [pytest.mark.process, pytest.mark.slow]

TOTAL = 24
# Everything that has a state or draws random numbers is on: dropout and augmentation by the
# config itself, mixup, the moving average and accumulation here.
FLAGS = {
    'total': f'{TOTAL} steps',
    'task.mixup': 0.2,
    'step.accum_steps': 2,
    'step.ema_decay': 0.9,
    'every.log': '1',
    'every.eval': '12',
    'every.checkpoint': '12',
    'checkpoint.keep_last': 3,
}
# Of runs that are stopped soon: saving takes longer than the steps between.
OFTEN = '--config.every.checkpoint=2'
# Of runs that end in a process of the tests, and whose evaluations are not looked at.
SELDOM = ['--config.every.eval=1000', '--config.every.checkpoint=1000']


def arguments(folder: pathlib.Path, *extra: str) -> list[str]:
    return linear(folder, *extra, **FLAGS)


def has_saved_beyond(folder: pathlib.Path, step: int) -> bool:
    return max(steps(folder), default=0) > step


def held_by(process: subprocess.Popen, folder: pathlib.Path) -> bool:
    return (lock.holder(folder) or {}).get('pid') == process.pid


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
    assert [m['step'] for m in evaluations[0]] == [12, 24]
    assert evaluations[0] == evaluations[1]
    assert (folder / 'result.json').read_text() == (reference / 'result.json').read_text()


@pytest.fixture(scope='module')
def uninterrupted(tmp_path_factory, run_cli) -> pathlib.Path:
    folder = tmp_path_factory.mktemp('uninterrupted')
    done = run_cli(*arguments(folder))
    assert done.returncode == 0, done.stderr
    return folder


# --- stopped, killed, told to go: bit for bit the same state ---


@pytest.mark.fault(2, 20)
@pytest.mark.long
def test_kills_in_the_middle_of_a_save_of_a_run_that_lets_no_other_in(
    tmp_path, repo, run_cli, uninterrupted, capsys
):
    in_the_middle = 0
    for _ in range(2):
        reached = max(steps(tmp_path), default=0)
        with started(repo, *arguments(tmp_path, OFTEN)) as process:
            wait_until(lambda process=process: held_by(process, tmp_path), process)
            process.send_signal(signal.SIGSTOP)  # so that it does not come to its end meanwhile
            assert main(arguments(tmp_path)) == 2
            owner = os.uname().nodename, f'pid {process.pid}'
            assert mentions(capsys.readouterr().err, 'in use', owner)
            process.send_signal(signal.SIGCONT)
            wait_until(partial(has_saved_beyond, tmp_path, reached), process)
            wait_until(partial(is_saving, tmp_path), process)
            process.kill()
            assert process.wait() == -signal.SIGKILL
        in_the_middle += is_saving(tmp_path)
        assert steps(tmp_path)[-1] > reached
    assert in_the_middle > 0
    done = run_cli(*arguments(tmp_path))
    assert done.returncode == 0, done.stderr
    assert not is_saving(tmp_path)
    assert_same_run(tmp_path, uninterrupted)


@pytest.fixture(scope='module')
def told_to_stop(tmp_path_factory, repo) -> tuple[pathlib.Path, int, str]:
    """The folder of a run that got one SIGTERM after another, its exit code and its words."""
    folder = tmp_path_factory.mktemp('told_to_stop')
    with started(repo, *arguments(folder, OFTEN)) as process:
        wait_until(lambda: last_step(folder) >= 3, process)
        while process.poll() is None:
            process.send_signal(signal.SIGTERM)
            time.sleep(0.01)
        return folder, process.returncode, process.stdout.read()


@pytest.mark.fault(3, 5)
def test_sigterm_saves_and_exits_with_75_however_often_it_comes(
    tmp_path, run_cli, told_to_stop, uninterrupted
):
    folder, code, output = told_to_stop
    assert code == EXIT_PREEMPTED, output
    stopped = steps(folder)[-1]
    assert mentions(output, 'stopped', 'step', stopped, TOTAL, 'state', 'saved')
    assert stopped == last_step(folder) < TOTAL
    folder = shutil.copytree(folder, tmp_path / 'run')
    done = run_cli(*arguments(folder))
    assert done.returncode == 0, done.stderr
    assert_same_run(folder, uninterrupted)


@pytest.fixture(scope='module')
def damaged(tmp_path_factory, run_cli, told_to_stop):
    """The run that was told to stop, whose last step was damaged, after two steps more.

    Its folder, the path that was damaged, the steps that there were, and the process.
    """
    folder = shutil.copytree(told_to_stop[0], tmp_path_factory.mktemp('damaged') / 'run')
    before = steps(folder)
    root = folder / 'checkpoints' / str(before[-1])
    data = max(root.glob('*/d/*'), key=lambda path: path.stat().st_size)
    os.truncate(data, 100)
    done = run_cli(*arguments(folder, f'--stop-at={before[-1] + 2}'))
    return folder, data.relative_to(root), before, done


@pytest.fixture(scope='module')
def gone_on(run_cli, damaged):
    """The folder of that run after it went on to its end, and what it said."""
    folder = shutil.copytree(damaged[0], damaged[0].with_name('gone_on'))
    done = run_cli(*arguments(folder))
    assert done.returncode == 0, done.stderr
    return folder, done.stdout


@pytest.mark.fault(9)
def test_a_damaged_checkpoint_costs_steps_but_not_the_result(damaged, gone_on, uninterrupted):
    _, data, before, done = damaged
    assert f'checkpoints/{before[-1]} ignored: {data}' in done.stderr
    assert f'resumes after step {before[-2]}' in done.stdout
    assert_same_run(gone_on[0], uninterrupted)


@pytest.mark.fault(1)
def test_stopping_and_going_on(damaged, gone_on, uninterrupted):
    folder, _, before, done = damaged
    stopped = before[-1] + 2
    assert done.returncode == EXIT_PREEMPTED, done.stderr
    assert steps(folder)[-1] == stopped
    assert not (folder / 'result.json').exists()
    assert f'resumes after step {stopped}' in gone_on[1]
    assert_same_run(gone_on[0], uninterrupted)


# --- nothing to do, or not allowed to ---


@pytest.mark.fault(21)
def test_a_complete_run_is_left_alone(uninterrupted, capsys):
    def state():
        return {path: path.stat().st_mtime_ns for path in uninterrupted.rglob('*')}

    before = state()
    assert main(arguments(uninterrupted)) == 0
    assert 'complete' in capsys.readouterr().out
    assert state() == before


# --- other devices, another place ---


def copied_until(step: int, run: pathlib.Path, folder: pathlib.Path) -> None:
    """Copies a finished run as if it had been killed some time after it saved the step."""
    shutil.copytree(run, folder)
    for later in (number for number in steps(folder) if number > step):
        shutil.rmtree(folder / 'checkpoints' / str(later))
    (folder / 'result.json').unlink()
    assert steps(folder)[-1] == step


ON_SLICES = ['--config.parallel.slices=2', '--config.parallel.fsdp=2']
PMAP = ['--config.parallel.strategy=pmap']


@pytest.mark.fault(7, 8, 47)
@pytest.mark.parametrize(
    ('plan', 'before'),
    [
        ([(PMAP, str(TOTAL + 1))], ['1 x cpu (jit)']),
        pytest.param(
            *([(ON_SLICES, '17'), (PMAP, str(TOTAL + 1))], ['4 x cpu', '2 slices (jit)']),
            marks=pytest.mark.long,
        ),
    ],
    ids=['pmap', 'slices and pmap'],
)
def test_every_layout_goes_on_from_any_other_and_in_another_folder(
    tmp_path, uninterrupted, capsys, plan, before
):
    copied_until(12, uninterrupted, tmp_path / 'moved-0')
    for i, (layout, stop_at) in enumerate(plan):
        layout = [*layout, '--config.parallel.min_split_size=64', *SELDOM]
        folder = tmp_path / f'moved-{i}'
        with pytest.MonkeyPatch.context() as patch:
            use_devices(patch, 4)
            ended = main(arguments(folder, *layout, '--stop-at', stop_at))
        assert ended == (0 if int(stop_at) > TOTAL else EXIT_PREEMPTED)
        folder.rename(tmp_path / f'moved-{i + 1}')
    output = capsys.readouterr().out
    assert mentions(output, '1 x cpu (jit)') and mentions(output, *before)
    moved = tmp_path / f'moved-{len(plan)}'
    np.testing.assert_allclose(losses(moved), losses(uninterrupted), rtol=1e-4)


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


@pytest.mark.fault(31)
@pytest.mark.long
def test_a_run_that_skips_steps_also_ends_as_if_it_had_never_stopped(
    tmp_path, monkeypatch, one_device, capsys
):
    (tmp_path / 'my_lab').mkdir()
    (tmp_path / 'my_lab/broken.py').write_text(BROKEN)
    monkeypatch.syspath_prepend(tmp_path)
    flags = ['--config.task.name=my_lab.broken', '--config.step.max_skips=3', *SELDOM]
    flags += ['--config.every.checkpoint=11']
    whole, halves = tmp_path / 'whole', tmp_path / 'halves'
    assert main(arguments(whole, *flags)) == 0
    copied_until(11, whole, halves)
    assert main(arguments(halves, *flags)) == 0
    assert digest(halves) == digest(whole)
    skipped = [m['step'] for m in metrics(whole) if m.get('train/skipped')]
    assert min(skipped) < 11 < max(skipped) and len(skipped) < 15
    assert skipped == [m['step'] for m in metrics(halves) if m.get('train/skipped')]
    assert '1 steps skipped' in capsys.readouterr().out


@pytest.mark.fault(31)
def test_the_rate_that_is_logged_is_the_one_that_is_applied_and_reaches_its_end(
    tmp_path, monkeypatch, one_device
):
    (tmp_path / 'my_lab').mkdir()
    (tmp_path / 'my_lab/broken.py').write_text(BROKEN)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / 'config.py').write_text(
        'from helpers import linear\n'
        'def get_config(arg=None):\n'
        '    config = linear.get_config()\n'
        "    config.optim = dict(name='sgd', lr=0.5, schedule=dict(name='cosine', warmup='2'))\n"
        '    return config\n'
    )
    flags = ['--config', str(tmp_path / 'config.py'), '--config.task.name=my_lab.broken']
    flags += ['--config.step.max_skips=3', *SELDOM]
    assert main(arguments(tmp_path / 'run', *flags)) == 0
    lines = [m for m in metrics(tmp_path / 'run') if 'train/lr' in m]
    made = [m for m in lines if not m['train/skipped']]
    assert len(made) < len(lines) == TOTAL
    for m in made:
        assert m['train/update_norm'] == pytest.approx(m['train/lr'] * m['train/grad_norm'], 1e-4)
    cosine = (1 + np.cos(np.pi * (TOTAL - 3) / (TOTAL - 2))) / 2
    assert lines[-1]['train/lr'] == pytest.approx(0.5 * cosine, rel=1e-3)


@pytest.mark.fault(31)
def test_an_exploding_run_stops_and_saves_no_state_that_is_not_finite(tmp_path, one_device, capsys):
    explodes = {'optim.lr': '1e20', 'optim.schedule.warmup': '0', 'every.checkpoint': '1'}
    flags = [f'--config.{name}={value}' for name, value in explodes.items()]
    assert main(arguments(tmp_path, *flags)) == 3
    assert re.search(r'error: step \d+: .*checkpoint', capsys.readouterr().err)
    for step in steps(tmp_path):
        for item in ('variables', 'training'):
            leaves = jax.tree.leaves(read_item(tmp_path / 'checkpoints' / str(step) / item))
            assert all(np.isfinite(leaf).all() for leaf in leaves)


@pytest.mark.fault(138)
@pytest.mark.parametrize(
    ('name', 'other'),
    [
        ('jax_threefry_partitionable', False),
        pytest.param('jax_default_prng_impl', 'rbg', marks=pytest.mark.long),
        ('jax_enable_x64', True),
        pytest.param('jax_default_matmul_precision', 'bfloat16', marks=pytest.mark.long),
    ],
)
def test_a_setting_that_numbers_depend_on_is_named(tmp_path, capsys, one_device, name, other):
    before = getattr(jax.config, name)
    words = linear(tmp_path / 'run', '--config.total=2 steps')
    assert main([*words, '--stop-at=1']) == EXIT_PREEMPTED
    branch = [f'--config.branch.from={tmp_path / "run"}', '--config.branch.step=1']
    try:
        jax.config.update(name, other)
        for again in (words, [*linear(tmp_path / 'branch', '--config.total=2 steps'), *branch]):
            assert main(again) == 2
            (line,) = capsys.readouterr().err.splitlines()
            assert f'{name} is {other!r}' in line and repr(before) in line
    finally:
        jax.config.update(name, before)
    assert steps(tmp_path / 'run') == [1]
    assert main(words) == 0
