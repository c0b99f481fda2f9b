"""What a run writes: each step once, whole lines, and the same numbers as TensorBoard events."""

import contextlib
import errno
import json
import math
import os
import pathlib
import resource
import threading
import time
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.summary.writer.record_writer import RecordWriter

from vit_jax.errors import UserError
from vit_jax.storage import paths
from vit_jax.storage.run_folder import read_metrics
from vit_jax.trainer.loop import due
from vit_jax.trainer.meter import Diverged, Meter
from vit_jax.trainer.writer import Lines, Writer, clock

TRAIN = {
    'train/loss': 1.5,
    'train/images_per_sec': 10.0,
    'train/step_sec': 0.1,
    'train/input_bound': 0.0,
    'train/lock_bound': 0.0,
}


def write(folder: pathlib.Path, start: int, steps: list[int]) -> None:
    writer = Writer(folder, 10, start, 'images')
    for step in steps:
        writer.write(step, TRAIN)
        writer.show_train(step, TRAIN)
    writer.close()


def test_a_resumed_run_has_every_step_once(tmp_path: pathlib.Path) -> None:
    write(tmp_path, 0, [1, 2, 3, 4])
    write(tmp_path, 2, [3, 4, 5])
    assert [line['step'] for line in read_metrics(tmp_path)] == [1, 2, 3, 4, 5]


def test_a_line_cut_off_by_a_crash_is_dropped(tmp_path: pathlib.Path) -> None:
    write(tmp_path, 0, [1, 2])
    with (tmp_path / 'metrics.jsonl').open('a') as file:
        file.write('{"step": 3, "train/lo')
    write(tmp_path, 2, [3])
    lines = (tmp_path / 'metrics.jsonl').read_text().splitlines()
    assert [json.loads(line)['step'] for line in lines] == [1, 2, 3]


def test_events_hold_the_same_scalars(tmp_path: pathlib.Path) -> None:
    write(tmp_path, 0, [1, 2])
    events = EventAccumulator(str(tmp_path)).Reload()
    assert [(e.step, e.value) for e in events.Scalars('train/loss')] == [(1, 1.5), (2, 1.5)]


def test_other_processes_write_nothing(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jax, 'process_index', lambda: 1)
    writer = Writer(tmp_path, 10, 0, 'images')
    writer.write(1, TRAIN)
    writer.draw()
    writer.close()
    assert not list(tmp_path.iterdir())


def test_a_line_for_each_interval_without_a_terminal(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture
) -> None:
    write(tmp_path, 0, [4])
    assert 'step 4/10  loss 1.5000  10 images/s  ETA 0:01' in capsys.readouterr().out


def test_the_time_left_is_not_reckoned_from_the_step_that_compiled(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [60.0]
    writer = Writer(tmp_path, 105, 0, 'images')
    assert writer.bar.tasks[0].fields['summary'] == 'compiling'
    timer = SimpleNamespace(perf_counter=lambda: now[0])
    monkeypatch.setattr('vit_jax.trainer.writer.time', timer)
    for step in range(1, 6):
        writer.progress(step)
    now[0] = 62.0
    assert writer.bar.tasks[0].fields['summary'] == ''
    writer.show_train(5, {**TRAIN, 'train/step_sec': 12.4})
    writer.show_train(10, TRAIN)
    monkeypatch.undo()
    writer.close()
    said = capsys.readouterr().out.splitlines()
    assert [line.rpartition('  ')[2] for line in said] == ['ETA 0:50', 'ETA 0:10']


def test_the_bar_moves_ten_times_a_second_at_most(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [60.0]
    writer = Writer(tmp_path, 100, 0, 'images')
    timer = SimpleNamespace(perf_counter=lambda: now[0])
    monkeypatch.setattr('vit_jax.trainer.writer.time', timer)
    seen = set()
    for step in range(1, 51):
        now[0] += 0.01
        writer.progress(step)
        seen.add(writer.bar.tasks[0].completed)
    monkeypatch.undo()
    writer.close()
    assert 5 <= len(seen) <= 6 and max(seen) > 40


def test_a_first_step_alone_tells_no_time(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture
) -> None:
    writer = Writer(tmp_path, 1000, 0, 'images')
    writer.progress(1)
    writer.show_train(1, {**TRAIN, 'train/step_sec': 60.0})
    writer.close()
    assert capsys.readouterr().out.endswith('ETA -:--\n')


def test_the_rates_are_of_what_was_counted(tmp_path: pathlib.Path) -> None:
    meter = Meter(0, lambda step: 0.1, 1.0)
    for step in (1, 2):
        meter.add(step, {'loss': jnp.float32(1)}, {'sentences': 2, 'tokens': 5})
    logged = meter.log()
    assert 'train/images_per_sec' not in logged
    seconds = 2 * logged['train/step_sec']
    assert logged['train/tokens_per_sec'] * seconds == pytest.approx(10)
    assert logged['train/sentences_per_sec'] * seconds == pytest.approx(4)
    assert logged['train/mfu'] * seconds == pytest.approx(2), 'of steps a second'


def meter() -> Meter:
    return Meter(0, lambda step: 0.1 * step, None)


def test_the_interval_means_all_of_its_steps() -> None:
    m = meter()
    for step, loss in enumerate([1.0, 2.0, 6.0], start=1):
        m.add(step, {'loss': jnp.float32(loss)}, {'images': 4})
    logged = m.log()
    assert logged['train/loss'] == 3.0
    assert logged['train/lr'] == pytest.approx(0.2)  # of the update that made step 3
    assert logged['train/images_per_sec'] == pytest.approx(4 / logged['train/step_sec'])
    m.add(4, {'loss': jnp.float32(5.0)}, {})
    assert m.log()['train/loss'] == 5.0


class Running:
    """A metric of a step that devices still work on until `finish` is called."""

    def __init__(self) -> None:
        self._event = threading.Event()
        self.finish, self.is_ready = self._event.set, self._event.is_set

    def block_until_ready(self) -> None:
        self._event.wait()

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        self._event.wait()
        return np.ones((), np.float32)


def test_waiting_for_data_is_input_bound_only_while_the_devices_are_idle() -> None:
    idle, busy, step = meter(), meter(), Running()
    idle.add(1, {'loss': jnp.float32(1)}, {})
    idle.check_finite()  # the step is over before data are waited for
    busy.add(1, {'loss': step}, {})
    for m in (idle, busy):
        with m.waiting():
            time.sleep(0.2)
    step.finish()
    idle, busy = idle.log(), busy.log()
    assert idle['train/input_bound'] * idle['train/step_sec'] >= 0.2
    assert busy['train/input_bound'] == 0
    assert busy['train/data_wait_sec'] >= 0.2


@pytest.mark.parametrize(('apart', 'is_over', 'counts'), [(1, 1, 1), (0, 1, 0), (1, 0, 0)])
def test_a_late_start_of_a_step_is_input_bound_if_the_devices_are_idle(
    apart: bool, is_over: bool, counts: bool
) -> None:
    """A sleep stands for the wait for Python's lock, in which this thread does not run either."""
    m, step = Meter(0, lambda step: 0.1, None, has_own_cores=bool(apart)), Running()
    m.add(1, {'loss': step}, {})
    if is_over:
        step.finish()
    with m.starting(1):
        time.sleep(0.2)
    step.finish()
    logged = m.log()
    # The thread's own work between the two clocks, some tenths of a millisecond, does not count.
    assert (logged['train/lock_bound'] * logged['train/step_sec'] > 0.15) == counts
    assert logged['train/lock_bound'] == logged['train/input_bound']


def test_a_run_that_waits_for_data_says_so_and_advises_once(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture
) -> None:
    writer = Writer(tmp_path, 10, 0, 'images')
    for step, share, locked in ((1, 0.9, 0), (2, 0.05, 0), (3, 0.25, 0), (4, 0.25, 0.14)):
        writer.progress(step)
        shares = {'train/input_bound': share, 'train/lock_bound': locked}
        writer.show_train(step, {**TRAIN, **shares})
    writer.close()
    said = capsys.readouterr().out
    assert said.count('25% waiting for data') == 2
    assert said.count('14% for the threads') == 1
    assert '5% waiting' not in said.replace('25% waiting', '')
    assert said.count('set config.data.workers') == 1
    assert said.index('step 3/10') < said.index('set config.data.workers') < said.index('step 4/10')


@pytest.mark.parametrize('bad', [math.nan, math.inf])
def test_what_is_not_finite_stops_the_run_and_names_the_step(bad: float) -> None:
    m = meter()
    m.add(1, {'loss': jnp.float32(1), 'grad_norm': jnp.float32(1)}, {})
    m.add(2, {'loss': jnp.float32(1), 'grad_norm': jnp.float32(bad)}, {})
    with pytest.raises(Diverged, match='step 2: grad_norm') as error:
        m.check_finite()
    assert error.value.exit_code == 3


def test_few_steps_in_a_row_may_be_not_finite() -> None:
    m = Meter(0, lambda step: 0.1, None, max_skips=2)
    for step, loss in enumerate([math.nan, 1, math.inf, math.nan, 3, math.nan, math.nan], start=1):
        m.add(step, {'loss': jnp.float32(loss)}, {})
    logged = m.log()
    assert (logged['train/loss'], logged['train/skipped']) == (2.0, 5)
    m.add(8, {'loss': jnp.float32(math.nan)}, {})
    with pytest.raises(Diverged, match=r'step 8: .* 2'):
        m.check_finite()


def test_an_interval_whose_steps_were_all_skipped_has_no_means(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture
) -> None:
    m = Meter(0, lambda step: 0.1, None, max_skips=2)
    m.add(1, {'loss': jnp.float32(math.nan)}, {'images': 4})
    logged = m.log()
    assert 'train/loss' not in logged
    writer = Writer(tmp_path, 10, 0, 'images')
    writer.show_train(1, logged)
    writer.close()
    assert '1 steps skipped' in capsys.readouterr().out


def test_due_every_so_often_and_at_the_end() -> None:
    assert [step for step in range(1, 11) if due(step, 4, 10)] == [4, 8, 10]
    assert [step for step in range(1, 11) if due(step, 0, 10)] == [10]


def test_clock() -> None:
    assert [clock(s) for s in (0, 75, 3661)] == ['0:00', '1:15', '1:01:01']


def full(*args):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize('what', ['metrics.jsonl', 'events'])
def test_a_full_disk_is_told_once_and_nothing_more_is_tried(tmp_path, monkeypatch, what):
    told = []
    writer = Writer(tmp_path, 10, 0, 'images', failed=lambda: told.append(1))
    writer.write(1, TRAIN)
    if what == 'events':
        monkeypatch.setattr(RecordWriter, 'flush', full)
    else:
        writer.lines = Lines(pathlib.Path('/dev/full'))
    for step in (2, 3):
        writer.write(step, TRAIN)
        writer.draw()
    writer.close()
    monkeypatch.undo()
    assert told == [1]
    assert 'metrics.jsonl' in writer.trouble and 'No space left' in writer.trouble
    assert read_metrics(tmp_path)[0]['step'] == 1
    write(tmp_path, 1, [2])
    assert [line['step'] for line in read_metrics(tmp_path)] == [1, 2]


@contextlib.contextmanager
def largest_file(size):
    """No file of this process grows beyond so many bytes; writes are cut off there."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_lines_that_a_full_disk_cut_off_are_whole_once_there_is_room(tmp_path):
    lines = Lines(tmp_path / 'lines')
    lines.add('first')
    with largest_file(4), pytest.raises(OSError, match='too large'):
        lines.write()
    assert (tmp_path / 'lines').read_text() == 'firs'
    lines.add('second')
    lines.write()
    assert (tmp_path / 'lines').read_text() == 'first\nsecond\n'


def test_a_disk_that_is_full_from_the_start_is_one_line(tmp_path, monkeypatch):
    monkeypatch.setattr(os, 'fsync', full)
    said = r'cannot write.*No space left on device'
    with pytest.raises(UserError, match=said), paths.writing(tmp_path):
        Writer(tmp_path, 10, 0, 'images')
    assert not list(tmp_path.iterdir())


def test_a_run_that_stops_before_its_first_evaluation_has_curves(tmp_path, drawn_curves):
    for lines, drawn in ((1, False), (2, True)):
        folder = tmp_path / str(lines)
        folder.mkdir()
        writer = Writer(folder, 10, 0, 'images', writers=())
        for step in range(1, lines + 1):
            writer.write(step, {'train/loss': 2.0 / step, 'train/step_sec': 1.0})
        writer.close()
        assert (folder / 'curves.png').exists() == drawn
