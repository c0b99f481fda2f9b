"""The lock of a folder in object storage, in stores that hold to the same conditions."""

import concurrent.futures
import contextlib
import threading
import time

import pytest
import tensorstore
from helpers.messages import mentions

from vit_jax.storage import lock

SILENT = 0.3


class Alive(Exception):
    """The owner lives."""


@pytest.fixture(params=['memory', 'file'])
def store(request, tmp_path):
    spec = {'driver': request.param, 'path': f'{tmp_path}/' if request.param == 'file' else ''}
    return tensorstore.KvStore.open(spec).result()


def take(store, host: str = 'here', silent_seconds: float = SILENT) -> lock.Lease:
    def refused(owner: lock.Record) -> Exception:
        return Alive(owner['host'])

    return lock.Lease(store, 'lock', {'host': host}, silent_seconds, refused)


def test_a_released_lease_is_free_at_once(store):
    for _ in range(2):
        take(store, silent_seconds=60).release()
    assert store.read('lock').result().state == 'missing'


@pytest.mark.slow
def test_an_owner_that_renews_keeps_it(store, tmp_path):
    with contextlib.ExitStack() as held:
        lock.keep_renewed(held, take(store), tmp_path, seconds=0.05)
        with pytest.raises(Alive, match='here'):
            take(store, silent_seconds=10)
    take(store, silent_seconds=60).release()


def test_a_silent_owner_is_replaced_and_learns_it(store):
    first = take(store)
    start = time.monotonic()
    second = take(store, 'there')
    assert time.monotonic() - start >= SILENT
    assert not first.renew()
    assert second.renew()


def test_one_who_lost_it_takes_nothing_from_the_next(store):
    first = take(store)
    second = take(store, 'there')
    first.release()
    assert second.renew()


class Repeating:
    """A store to which the client writes again, as the answer to its first write got lost."""

    def __init__(self, store):
        self.read, self.first = store.read, store.write

    def write(self, name, content, **conditions):
        self.first(name, content, **conditions).result()
        return self.first(name, content, **conditions)


def test_an_answer_that_got_lost_is_no_loss(store):
    mine = take(Repeating(store))
    assert mine.renew()
    assert mine.renew()


@pytest.mark.parametrize('silent', [False, True])
def test_of_many_one_gets_it(store, tmp_path, silent):
    if silent:
        take(store, 'dead')
    ready = threading.Barrier(6)

    def attempt(i: int) -> bool:
        ready.wait()
        with contextlib.suppress(Alive):
            lock.keep_renewed(held, take(store, str(i)), tmp_path, seconds=0.02)
            return True
        return False

    with contextlib.ExitStack() as held, concurrent.futures.ThreadPoolExecutor(6) as pool:
        assert sum(pool.map(attempt, range(6))) == 1


def test_a_damaged_record_blocks_only_while_it_changes(store):
    store.write('lock', b'{"host": "els').result()
    take(store)


def test_a_suspended_owner_ends(store, tmp_path, monkeypatch, capsys):
    ended, codes = threading.Event(), []

    def end(code: int) -> None:
        codes.append(code)
        ended.set()

    monkeypatch.setattr(lock.os, '_exit', end)
    with contextlib.ExitStack() as held:
        suspended = take(store)
        take(store, 'there')
        lock.keep_renewed(held, suspended, tmp_path, seconds=0.05)
        assert ended.wait(10)
    assert codes[0] == 2  # as on disks
    assert mentions(capsys.readouterr().err, 'taken', 'over', tmp_path)
