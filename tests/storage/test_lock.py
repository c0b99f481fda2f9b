"""A run's folder: one owner, atomic files."""

import contextlib
import errno
import json
import os
import pathlib
import re
import socket
import subprocess
import sys
import threading
import time

import pytest

from vit_jax.errors import UserError
from vit_jax.storage import lock, paths, run_folder

HOLD = """
import sys, time
from vit_jax.storage import lock
with lock.lock(sys.argv[1]):
    print('held', flush=True)
    time.sleep(60)
"""


@pytest.fixture
def holder(tmp_path, repo):
    """Another process that holds `tmp_path`."""
    command = [sys.executable, '-c', HOLD, tmp_path]
    with subprocess.Popen(command, cwd=repo, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == 'held\n'
        yield process
        process.kill()


def record(path: pathlib.Path) -> dict:
    return json.loads((path / lock.LOCK).read_text())


def take(path: pathlib.Path, **options) -> dict:
    """Holds the folder for a moment; what its record then said."""
    with lock.lock(path, **options):
        return record(path)


# --- the lock ---


@pytest.mark.slow
def test_a_second_run_is_refused_and_a_killed_one_is_replaced(tmp_path, holder):
    owner = f'host {socket.gethostname()}, pid {holder.pid}, since '
    with pytest.raises(UserError, match=f'in use.*{re.escape(owner)}'):
        take(tmp_path)
    assert record(tmp_path)['pid'] == holder.pid
    holder.kill()
    holder.wait()
    assert record(tmp_path)['pid'] == holder.pid
    assert take(tmp_path)['pid'] == os.getpid()


def test_the_folder_is_made_and_free_afterwards(tmp_path):
    folder = tmp_path / 'a' / 'b'
    for _ in range(2):
        assert take(folder)['pid'] == os.getpid()
    with pytest.raises(ZeroDivisionError), lock.lock(folder):
        raise ZeroDivisionError
    take(folder)


def leave_record_of_another_host(folder: pathlib.Path) -> pathlib.Path:
    file = folder / lock.LOCK
    file.write_text(json.dumps({'host': 'elsewhere', 'pid': 1, 'since': 'yesterday'}))
    return file


def test_a_silent_owner_on_another_host_is_replaced(tmp_path):
    leave_record_of_another_host(tmp_path)
    start = time.monotonic()
    assert take(tmp_path, silent_seconds=0.3)['host'] == socket.gethostname()
    assert time.monotonic() - start >= 0.3


@pytest.mark.slow
@pytest.mark.fault(20)
@pytest.mark.parametrize('clock', [0, 4e9])
def test_a_living_owner_on_another_host_is_not(tmp_path, clock):
    file = leave_record_of_another_host(tmp_path)
    os.utime(file, (clock, clock))
    beat = threading.Timer(0.2, os.utime, (file, (clock + 5, clock + 5)))
    beat.start()
    with pytest.raises(UserError, match='host elsewhere, pid 1, since yesterday'):
        take(tmp_path, silent_seconds=5)
    beat.join()


def test_the_owner_shows_that_it_lives(tmp_path, monkeypatch):
    monkeypatch.setattr(lock, '_HEARTBEAT_SECONDS', 0.02)
    with lock.lock(tmp_path):
        os.utime(tmp_path / lock.LOCK, (0, 0))
        deadline = time.monotonic() + 5
        while (tmp_path / lock.LOCK).stat().st_mtime == 0 and time.monotonic() < deadline:
            time.sleep(0.01)
        assert (tmp_path / lock.LOCK).stat().st_mtime > 0


@pytest.mark.parametrize(
    'text',
    ['{"host": "else', '{}', '[]', '{"host": 5}', '{"host": "x", "pid": 99999999999999999999}'],
)
def test_an_unreadable_record_does_not_block(tmp_path, text):
    (tmp_path / lock.LOCK).write_text(text)
    assert lock.holder(tmp_path) is None
    assert take(tmp_path, silent_seconds=0.1)['pid'] == os.getpid()


def test_a_process_id_that_was_given_to_another_process_is_no_owner(tmp_path):
    with lock.lock(tmp_path):
        owner = record(tmp_path)
        assert lock.holder(tmp_path) == owner
        assert lock.is_held(tmp_path)
    with subprocess.Popen(['sleep', '60']) as other:
        for change in ({'pid': other.pid}, {'started': 1}):
            (tmp_path / lock.LOCK).write_text(json.dumps(owner | change))
            assert lock.holder(tmp_path) is None
            assert not lock.is_held(tmp_path)
        other.kill()


@pytest.mark.parametrize('change', [{'host': 'elsewhere'}, {'boot': 'before'}])
def test_an_owner_elsewhere_is_shown_while_it_renews_its_lock(tmp_path, change):
    with lock.lock(tmp_path):
        owner = record(tmp_path) | change
    (tmp_path / lock.LOCK).write_text(json.dumps(owner))
    assert lock.holder(tmp_path) == owner
    os.utime(tmp_path / lock.LOCK, (0, 0))
    assert lock.holder(tmp_path) is None


@pytest.fixture
def host(monkeypatch):
    """`host(NAME)`: this process is on that host, whose locks no other one sees."""
    monkeypatch.setattr(lock.fcntl, 'flock', lambda *args: None)

    def use(name: str) -> None:
        monkeypatch.setattr(socket, 'gethostname', lambda: name)

    return use


@pytest.mark.slow
@pytest.mark.fault(20)
def test_an_owner_that_sleeps_finds_the_folder_taken_over(tmp_path, monkeypatch, host):
    """On a file system that does not share locks between hosts."""
    host('a')
    with lock.lock(tmp_path) as first:
        host('b')  # before the first heartbeat of a
        monkeypatch.setattr(lock, '_HEARTBEAT_SECONDS', 0.05)
        with lock.lock(tmp_path, silent_seconds=0.2) as second:
            with pytest.raises(lock.Taken, match='host b'):
                first()
            second()
            host('c')
            with pytest.raises(lock.InUse, match='host b'):
                take(tmp_path, silent_seconds=2)
            assert record(tmp_path)['host'] == 'b'
    assert (tmp_path / lock.LOCK).read_text() == ''
    assert [path.name for path in tmp_path.iterdir()] == [lock.LOCK]


def test_one_who_lost_the_folder_leaves_the_record_of_the_next(tmp_path, host):
    host('a')
    with lock.lock(tmp_path) as first, contextlib.ExitStack() as later:
        host('b')
        (tmp_path / lock.LOCK).write_text('')  # both saw a folder that was free
        later.enter_context(lock.lock(tmp_path))
        with pytest.raises(lock.Taken):
            first()
        owner = record(tmp_path)
        kept = later.pop_all()
    assert record(tmp_path) == owner
    kept.close()


@pytest.mark.fault(20)
def test_a_file_system_without_locks_is_named(tmp_path, monkeypatch):
    def unsupported(*args):
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.setattr(lock.fcntl, 'flock', unsupported)
    with pytest.raises(UserError, match=f'{tmp_path}.*flock'):
        take(tmp_path)


def test_colleagues_of_a_group_may_use_the_lock(tmp_path):
    before = os.umask(0o002)
    try:
        take(tmp_path / 'new')
        (tmp_path / 'old').mkdir()
        leave_record_of_another_host(tmp_path / 'old').chmod(0o600)
        take(tmp_path / 'old', silent_seconds=0.1)
    finally:
        os.umask(before)
    assert {(tmp_path / x / lock.LOCK).stat().st_mode & 0o777 for x in ('new', 'old')} == {0o664}


def test_asking_leaves_no_trace(tmp_path):
    run_folder.require_writable(tmp_path / 'a' / 'b')
    assert list(tmp_path.iterdir()) == []


# --- files that appear whole ---


def test_text_is_written_over_and_no_partial_file_stays(tmp_path):
    for text in ('first', 'zweites, länger'):
        paths.write_text_atomic(tmp_path / 'file', text)
        assert (tmp_path / 'file').read_text(encoding='utf-8') == text
    assert [path.name for path in tmp_path.iterdir()] == ['file']


def test_a_write_that_fails_keeps_the_old_text(tmp_path, monkeypatch):
    paths.write_text_atomic(tmp_path / 'file', 'old')

    def full_disk(_):
        raise OSError(28, 'No space left on device')

    monkeypatch.setattr(os, 'fsync', full_disk)
    with pytest.raises(OSError, match='No space'):
        paths.write_text_atomic(tmp_path / 'file', 'new')
    assert (tmp_path / 'file').read_text() == 'old'
    assert [path.name for path in tmp_path.iterdir()] == ['file']
