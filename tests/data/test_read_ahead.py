"""The iterator that reads ahead, and says where it hangs."""

import itertools
import multiprocessing
import subprocess
import sys
import threading

import pytest
from helpers.messages import mentions

from vit_jax.config.run import Data
from vit_jax.data.dataset import open_dataset
from vit_jax.data.read_ahead import CHEAP, WORTHWHILE, Loading, Watched, Work
from vit_jax.errors import UserError
from vit_jax.runtime import environment, watchdog
from vit_jax.runtime.watchdog import Interrupted, Stalled


@pytest.fixture(autouse=True)
def abandoned(monkeypatch):
    """Counts the threads that are left behind, of which the process of the tests learns nothing."""
    counted = []
    monkeypatch.setattr(watchdog, 'abandon_thread', lambda: counted.append(1))
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
    with pytest.raises(Stalled, match=r'(?s)batch.*0\.2.*hangs_in_the_reader'):
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
    ('available', 'given', 'work', 'words'),
    [
        (1, {}, {}, '1 thread'),
        (3, {}, {}, '3 threads'),
        (4, {}, {}, '3 processes of 1 thread'),
        (16, {}, {}, '15 processes of 1 thread'),
        (64, {}, {'examples': WORTHWHILE / 2e-3 - 1}, '8 threads'),
        (64, {}, {'seconds': CHEAP / 2}, '8 threads'),
        (64, {}, {'batch_bytes': 10**9}, ('19 processes', '1 thread')),
        (64, {}, {'batch_bytes': 5 * 10**8, 'shared': 10**10}, '5 processes of 1 thread (/dev/shm'),
        (64, {}, {'batch_bytes': 4 * 10**7, 'shared': 2**26}, '8 threads (/dev/shm'),
        (64, {}, {'listing_bytes': None}, '8 threads (processes cannot'),
        (64, {'workers': 0, 'threads': 3}, {}, '3 threads'),
        (64, {'workers': 16}, {'examples': 1}, '16 processes of 4 threads'),
        (4, {'workers': 16}, {}, '16 processes of 1 thread'),
        (64, {'threads': 2}, {}, '31 processes of 2 threads'),
    ],
)
def test_threads_and_processes_suit_the_cores_and_the_work_unless_given(
    monkeypatch, available, given, work, words
):
    shared = work.pop('shared', None)
    monkeypatch.setattr(environment, 'available_cores', lambda: available)
    monkeypatch.setattr(environment, 'available_memory', lambda: 256 * 10**9)
    monkeypatch.setattr(environment, 'shared_memory', lambda: shared)
    least = {'seconds': 2e-3, 'examples': 5e3, 'batch_bytes': 1000, 'listing_bytes': 1000}
    assert mentions(str(Loading(**given).resolve(lambda: Work(**least | work))), words)
    if 'workers' not in given:
        assert Loading(**given).resolve().workers == 0, 'processes share no cache'
        monkeypatch.setattr(multiprocessing.current_process(), 'daemon', True)
        assert Loading(**given).resolve(lambda: Work(**least | work)).workers == 0


def test_processes_are_chosen_by_the_measured_time_of_an_example(monkeypatch):
    monkeypatch.setattr(environment, 'available_cores', lambda: 8)
    digits = {'source': 'digits', 'split': 'train'}
    large = digits | {'transforms': 'resize(512)'}
    slow = open_dataset(Data(**large), 64)
    assert slow.reading().workers
    assert not slow.reading(batches=1).workers
    assert not open_dataset(Data(**large, cache=True), 64).reading().workers
    assert not open_dataset(Data(**digits), 64).reading().workers


def test_data_that_cannot_be_sent_are_read_by_threads_unless_processes_are_asked_for(monkeypatch):
    monkeypatch.setattr(environment, 'available_cores', lambda: 8)
    digits = {'source': 'digits', 'split': 'train', 'transforms': 'resize(512)'}
    for given, workers in ({}, 0), ({'workers': 1}, 1):
        data = open_dataset(Data(**digits, **given), 64)
        data.source.lock = threading.Lock()
        assert data.reading().workers == workers
    with pytest.raises(UserError, match=r'data\.workers'):
        next(data.train_batches())


SCRIPT = """
import sys
from vit_jax.config.run import Data
from vit_jax.data.dataset import open_dataset

print('runs')

def double(record):
    return record | {'image': 2 * record['image']}

data = open_dataset(Data(source='digits', split='test', workers=1), 8)
steps = (lambda record, rng: double(record),)
object.__setattr__(data.plan.examples.transforms, 'steps', steps)
print(next(data.eval_batches())['image'].max())
"""


@pytest.mark.slow
def test_a_script_without_a_guard_is_not_run_again_in_its_reading_processes(tmp_path, repo):
    """Its own functions reach them all the same."""
    (script := tmp_path / 'script.py').write_text(SCRIPT)
    options = {'capture_output': True, 'text': True, 'timeout': 100, 'check': True}
    done = subprocess.run([sys.executable, str(script)], cwd=repo, **options)
    before, after = done.stdout.split()
    assert (before, int(after) > 255 // 16) == ('runs', True)
