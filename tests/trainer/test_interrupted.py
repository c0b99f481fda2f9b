"""A run that is told to stop during an evaluation stops there, and begins with it when resumed."""

import errno
import os
import pathlib
import signal

import pytest
from helpers.messages import mentions
from helpers.runs import left_alone, linear
from tensorboard.backend.event_processing.plugin_event_accumulator import EventAccumulator

from vit_jax.__main__ import main
from vit_jax.checkpoints.best import KEPT, best_from_meta
from vit_jax.data.dataset import Dataset
from vit_jax.errors import EXIT_PREEMPTED, UserError
from vit_jax.runtime.watchdog import Interrupted
from vit_jax.storage import run_folder
from vit_jax.writers import tensorboard

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures('compiled_once')]


@pytest.fixture(autouse=True)
def one(one_device: None) -> None:
    """One device."""


@pytest.fixture(autouse=True)
def handlers():
    """The handlers of this process, put back afterward: a run that was stopped ignores more."""
    before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGHUP)
    yield
    signal.signal(signal.SIGTERM, before[0])
    signal.signal(signal.SIGHUP, before[1])


@pytest.fixture(scope='module')
def whole_run(tmp_path_factory) -> pathlib.Path:
    """The folder of a run that nobody told to stop."""
    return left_alone(tmp_path_factory.mktemp('whole'))


def train(folder: pathlib.Path, *flags: str) -> int:
    return main(linear(folder, *flags))


def evaluations(folder: pathlib.Path) -> list[dict]:
    return [line for line in run_folder.read_metrics(folder) if 'test/loss' in line]


@pytest.mark.fault(53)
@pytest.mark.parametrize('at', [10, pytest.param(20, marks=pytest.mark.long)])
def test_an_evaluation_that_is_cut_short_is_made_up_for(
    tmp_path, whole_run, monkeypatch, capsys, at
):
    passes = []
    whole = Dataset.eval_batches

    def told_to_stop(data, stopping):
        passes.append([])
        for batch in whole(data, stopping):
            passes[-1].append(batch)
            if len(passes) == at // 10 and len(passes[-1]) == 2:
                signal.raise_signal(signal.SIGTERM)
            yield batch

    with monkeypatch.context() as patch:
        patch.setattr(Dataset, 'eval_batches', told_to_stop)
        assert train(tmp_path) == EXIT_PREEMPTED
    assert len(passes[-1]) == 2
    assert mentions(capsys.readouterr().out, 'stopped', 'step', at, '/20', 'state')
    assert run_folder.steps(tmp_path)[-1] == at
    assert [line['step'] for line in evaluations(tmp_path)] == [10][: at // 10 - 1]
    assert run_folder.read_result(tmp_path) is None
    assert train(tmp_path) == 0
    assert evaluations(tmp_path) == evaluations(whole_run)
    assert run_folder.read_result(tmp_path) == run_folder.read_result(whole_run)


def stall(data, *_):
    """Batches for which a run waits until it is told to stop."""
    yield from ()
    raise Interrupted


def fail(data, *_):
    """Batches of which the first ends the run at once, as a kill does."""
    yield from ()
    raise UserError('killed')


@pytest.mark.fault(53)
@pytest.mark.parametrize(
    ('batches', 'code'), [(stall, EXIT_PREEMPTED), pytest.param(fail, 2, marks=pytest.mark.long)]
)
def test_an_evaluation_that_is_repeated_twice_is_logged_once(
    tmp_path, whole_run, monkeypatch, batches, code
):
    """The start that makes up for it ends before its next save, so that another one does, too."""
    flags = ['--config.every.log=5', '--config.checkpoint.keep_best=test/loss']
    whole = Dataset.eval_batches

    def told_to_stop(data, stopping):
        for batch in whole(data, stopping):
            signal.raise_signal(signal.SIGTERM)
            yield batch

    with monkeypatch.context() as patch:
        patch.setattr(Dataset, 'eval_batches', told_to_stop)
        assert train(tmp_path, *flags) == EXIT_PREEMPTED
    with monkeypatch.context() as patch:
        patch.setattr(Dataset, 'train_batches', batches)
        assert train(tmp_path, *flags) == code
    assert run_folder.steps(tmp_path) == [10]
    assert evaluations(tmp_path) == evaluations(whole_run)[:1]
    assert train(tmp_path, *flags) == 0
    assert evaluations(tmp_path) == evaluations(whole_run)
    trained = [line['step'] for line in run_folder.read_metrics(tmp_path) if 'train/loss' in line]
    assert trained == [5, 10, 15, 20]
    events = EventAccumulator(str(tmp_path)).Reload()
    assert [event.step for event in events.Tensors('test/loss')] == [10, 20]
    best = best_from_meta(run_folder.read_meta(tmp_path / 'checkpoints' / '20'), KEPT)
    highest = max(evaluations(whole_run), key=lambda line: line['test/loss'])
    assert (best.step, best.since) == (highest['step'], (20 - highest['step']) // 10)


@pytest.mark.fault(52)
def test_a_disk_that_fills_up_under_the_log_stops_the_run_with_its_state_saved(
    tmp_path, whole_run, monkeypatch, capsys
):
    flag = '--config.every.log=5'

    def full(events, step, values):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(tensorboard.Writer, 'scalars', full)
        assert train(tmp_path, flag) == EXIT_PREEMPTED
    said = capsys.readouterr().out
    trained = [line['step'] for line in run_folder.read_metrics(tmp_path) if 'train/loss' in line]
    assert trained == [5, 6], 'that of the step that was saved waited for the save'
    assert run_folder.steps(tmp_path) == [6]
    assert mentions(said, 'metrics.jsonl', 'stopped')
    assert train(tmp_path, flag) == 0
    assert evaluations(tmp_path) == evaluations(whole_run)
    assert run_folder.read_result(tmp_path) == run_folder.read_result(whole_run)
