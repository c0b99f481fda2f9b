"""The iterator that reads ahead, and says where it hangs."""

import itertools
import threading

import pytest

from vit_jax.data.read_ahead import MANY, Loading, Watched
from vit_jax.runtime import environment, watchdog
from vit_jax.runtime.watchdog import Interrupted, Stalled


@pytest.fixture(autouse=True)
def abandoned(monkeypatch):
    """Counts the threads that are left behind, of which the process of the tests learns nothing."""
    counted = []
    monkeypatch.setattr(watchdog, 'abandon', lambda: counted.append(1))
    return counted


def readers():
    return {t for t in threading.enumerate() if t.name == 'data-reader'}


def test_passes_items_and_the_end():
    assert list(Watched(iter(range(100)), 5)) == list(range(100))


def test_passes_errors_after_the_items_before_them():
    def failing():
        yield 1
        raise KeyError('lost')

    items = Watched(failing(), 5)
    assert next(items) == 1
    with pytest.raises(KeyError, match='lost'):
        next(items)


def test_a_hang_is_named_by_its_stack():
    release = threading.Event()

    def hangs_in_the_reader():
        yield 1
        release.wait(20)

    items = Watched(hangs_in_the_reader(), 0.2)
    assert next(items) == 1
    with pytest.raises(Stalled, match=r'(?s)no batch in 0\.2 s.*hangs_in_the_reader'):
        next(items)
    release.set()


def test_a_wait_ends_when_a_stop_is_requested(abandoned):
    release, asked = threading.Event(), []

    def hangs_in_the_reader():
        yield 1
        release.wait(20)

    def stopping(*, waiting=False):
        asked.append(waiting)
        return len(asked) == 2

    items = Watched(hangs_in_the_reader(), 20, stopping)
    assert next(items) == 1
    assert not asked, 'there was no wait'
    with pytest.raises(Interrupted):
        next(items)
    assert asked == [True, True]
    assert abandoned
    release.set()


def test_dropping_it_is_closing_it():
    others = readers()
    items = Watched(itertools.count(), 5)
    assert next(items) == 0
    (reader,) = readers() - others
    del items
    assert reader not in readers()


def test_the_end_stays_the_end():
    items = Watched(iter([1]), 5)
    assert list(items) == [1]
    assert list(items) == []


def test_slow_but_in_time_is_fine():
    tick = threading.Event()

    def slow():
        for i in range(3):
            tick.wait(0.1)
            yield i

    assert list(Watched(slow(), 5)) == [0, 1, 2]


def test_closing_ends_the_thread_and_the_source():
    closed = []

    def endless():
        try:
            yield from itertools.count()
        finally:
            closed.append(True)

    others = readers()
    items = Watched(endless(), 5)
    assert next(items) == 0
    (reader,) = readers() - others
    items.close()
    assert closed == [True]
    assert reader not in readers()


def test_reads_at_most_two_ahead():
    taken = []
    items = Watched((taken.append(i) or i for i in range(100)), 5)
    for _ in range(10):
        next(items)
    items.close()
    assert len(taken) <= 13


@pytest.mark.parametrize(
    ('available', 'examples', 'given', 'words'),
    [
        (1, MANY, {}, '1 thread'),
        (4, MANY, {}, '4 threads'),
        (8, MANY, {}, '2 processes of 4 threads'),
        (64, MANY - 1, {}, '16 threads'),
        (64, MANY, {}, '16 processes of 4 threads'),
        (10, MANY, {}, '3 processes of 3 threads'),
        (64, MANY, {'cached': True}, '16 threads'),
        (64, MANY, {'workers': 0, 'threads': 3}, '3 threads'),
        (64, 1, {'workers': 16}, '16 processes of 4 threads'),
        (4, MANY, {'workers': 16}, '16 processes of 1 thread'),
        (64, MANY, {'threads': 2}, '16 processes of 2 threads'),
    ],
)
def test_threads_and_processes_are_those_of_the_cores_unless_given(
    monkeypatch, available, examples, given, words
):
    monkeypatch.setattr(environment, 'available_cores', lambda: available)
    cached = given.pop('cached', False)
    assert str(Loading(**given).resolved(examples, cached)) == words
