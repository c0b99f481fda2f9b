"""What a run writes of its own time."""

from __future__ import annotations

import types

import jax
import pytest

from vit_jax.storage import lock, times
from vit_jax.storage.run_folder import Mirror
from vit_jax.trainer import meter
from vit_jax.trainer.meter import Clock


@pytest.fixture
def now(monkeypatch):
    """The time, which passes only as the test says."""
    at = types.SimpleNamespace(seconds=50.0)
    fake = types.SimpleNamespace(perf_counter=lambda: at.seconds, time=lambda: at.seconds + 1000)
    monkeypatch.setattr(meter, 'time', fake)
    silent = types.SimpleNamespace(start=lambda: None)  # signs of life come by the real time
    monkeypatch.setattr(meter.threading, 'Thread', lambda **_: silent)
    return at


def start(folder, *, held=lambda: None, step=0, began=None):
    clock = Clock(began)
    clock.record(Mirror(folder), held, lambda text: None, step)
    return clock


def test_every_second_is_in_one_part(tmp_path, now):
    clock = start(tmp_path, began=1040.0)
    clock.enter(times.COMPILE)
    now.seconds += 3
    clock.stepped(1)
    now.seconds += 4
    clock.waited += 1.5
    clock.stepped(2)
    with clock.during(times.EVALUATION):
        now.seconds += 5
    now.seconds += 1
    clock.close()
    account = times.read(tmp_path)
    assert account.wall == pytest.approx(10 + 3 + 4 + 5 + 1)
    assert {name: x for name, x in account.seconds.items() if x} == pytest.approx(
        {'start': 10, 'compile': 3, 'steps': 3.5, 'data': 1.5, 'evaluation': 5}
    )


def test_compilations_count_once_wherever_they_happen(tmp_path, now):
    clock = start(tmp_path)
    with clock, clock.during(times.EVALUATION):
        now.seconds += 6
        for event, seconds in (('jaxpr_trace', 1), ('jaxpr_trace', 3), ('backend_compile', 2)):
            now.seconds += 2 * (event == 'backend_compile')
            name = f'{meter.COMPILATION}{event}_duration'
            jax.monitoring.record_event_duration_secs(name, seconds)
        jax.monitoring.record_event_duration_secs('/jax/other', 100)
    account = times.read(tmp_path)
    assert account.seconds['compile'] == pytest.approx(5)
    assert account.seconds['evaluation'] == pytest.approx(3)


def test_a_line_now_and_then_more_seldom_with_age(tmp_path, now):
    clock = start(tmp_path)
    for step in range(1, 101):
        now.seconds += 0.1
        clock.stepped(step)
    young = len((tmp_path / 'times.jsonl').read_text().splitlines())
    assert 15 <= young <= 25
    now.seconds += 1e6
    for step in range(101, 201):
        now.seconds += 1
        clock.stepped(step)
    assert len((tmp_path / 'times.jsonl').read_text().splitlines()) <= young + 2


def test_fewer_lines_where_each_is_an_upload(tmp_path, now):
    mirror = Mirror(tmp_path)
    mirror.uploads, mirror.publish = True, lambda: None
    mirror.fetch = lambda name: None
    clock = Clock()
    clock.record(mirror, lambda: None, lambda text: None, 0)
    for step in range(1, 301):
        now.seconds += 0.1
        clock.stepped(step)
    assert len((tmp_path / 'times.jsonl').read_text().splitlines()) <= 2 + 3


@pytest.mark.parametrize('error', [OSError(28, 'No space left on device'), lock.Taken('taken')])
def test_a_record_that_cannot_be_written_does_not_end_the_run(tmp_path, now, error):
    fails = []

    def held():
        if fails:
            raise error

    clock = start(tmp_path, held=held)
    before = (tmp_path / 'times.jsonl').read_text()
    fails.append(True)
    now.seconds += 5
    clock.mark()
    assert (tmp_path / 'times.jsonl').read_text() == before
    fails.clear()
    now.seconds += 5
    clock.close()
    assert times.read(tmp_path).seconds['start'] == pytest.approx(10)


def test_rates_leave_out_compilation(now):
    with Clock() as clock:
        measured = meter.Meter(0, schedule=lambda step: 0.1, clock=clock)
        clock.enter(times.COMPILE)
        now.seconds += 9  # of which JAX reports 4; the rest is its way to and from the compiler
        jax.monitoring.record_event_duration_secs(f'{meter.COMPILATION}backend_compile', 4)
        clock.stepped(1)
        now.seconds += 1
        measured.add(1, {}, {'images': 8})
        with measured.paused():
            now.seconds += 3
            jax.monitoring.record_event_duration_secs(f'{meter.COMPILATION}backend_compile', 2)
        clock.mark()
        now.seconds += 1
        assert measured.log()['train/images_per_sec'] == pytest.approx(8 / 2)
        now.seconds += 2
        measured.add(2, {}, {'images': 8})
        assert measured.log()['train/images_per_sec'] == pytest.approx(8 / 2)
