"""Disks that are full, read-only, or in the way of what is to be written."""

import os
import pathlib
import shutil
import subprocess
import sys
import time

import pytest
from helpers.messages import mentions
from helpers.mounts import read_only, small_disk
from helpers.runs import digest

from vit_jax.__main__ import main

pytestmark = pytest.mark.usefixtures('one_device')
PAGE = 4096  # bytes, of a file system in memory


def train(repo: pathlib.Path, folder: pathlib.Path, *flags: str) -> int:
    config = f'{repo}/experiments/vit/digits.py:smoke'
    return main(['train', '--config', config, '--workdir', str(folder), *flags])


def on_disk(folder: pathlib.Path) -> int:
    """Bytes that the files of a folder take in memory, in whole pages."""
    files = (path for path in folder.rglob('*') if path.is_file())
    return sum(-(-path.stat().st_size // PAGE) * PAGE for path in files)


def leave_room(disk: pathlib.Path, size: int, ballast: pathlib.Path) -> None:
    """Fill a disk but for `size` bytes."""
    ballast.write_bytes(bytes(shutil.disk_usage(disk).free - size))


@pytest.mark.slow
@pytest.mark.fault(18)
def test_a_full_disk_is_told_at_once_and_the_same_command_goes_on(
    repo, smoke_run, tmp_path, capsys
):
    """Two checkpoints fit, but no third."""
    with small_disk(tmp_path / 'disk', 3 * 2**20) as disk:
        folder, ballast = disk / 'run', disk / 'ballast'
        flags = ['--config.every.checkpoint=5', '--config.every.eval=20']
        leave_room(disk, 5 * on_disk(smoke_run / 'checkpoints' / '20') // 2, ballast)
        assert train(repo, folder, *flags) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert mentions(line, 'step 15')
        assert mentions(line, 'No space left on device', '[5, 10]')
        assert {path.name for path in (folder / 'checkpoints').iterdir()} == {'5', '10'}
        ballast.unlink()
        assert train(repo, folder, *flags) == 0
        assert 'resumes after step 10' in capsys.readouterr().out
        assert digest(folder, 20) == digest(smoke_run, 20)


@pytest.mark.slow
@pytest.mark.process
@pytest.mark.fault(18)
@pytest.mark.long
def test_a_full_disk_takes_one_line(repo, smoke_run, run_cli, tmp_path):
    """Writes that fail after the first one in other threads say nothing."""
    config = f'{repo}/experiments/vit/digits.py:smoke'
    with small_disk(tmp_path / 'disk', 3 * 2**20) as disk:
        leave_room(disk, on_disk(smoke_run / 'checkpoints' / '20') // 2, disk / 'ballast')
        full = run_cli('train', '--config', config, '--workdir', disk / 'run')
    assert full.returncode == 2, full.stderr
    assert len(full.stderr.splitlines()) == 1, full.stderr
    assert mentions(full.stderr, 'No space left on device', 'none')


@pytest.mark.fault(19)
@pytest.mark.parametrize('name', ['', 'runs/a'])
def test_a_read_only_folder_is_refused_at_once(repo, tmp_path, capsys, name):
    with read_only(tmp_path):
        start = time.monotonic()
        assert train(repo, tmp_path / name) == 2
        assert time.monotonic() - start < 1
    assert 'is read-only' in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.fault(19)
def test_what_only_reads_a_run_works_on_a_read_only_disk(smoke_run, tmp_path, capsys):
    folder = shutil.copytree(smoke_run, tmp_path / 'run')
    with read_only(folder):
        for command in ('evaluate', 'inspect'):
            assert main([command, '--workdir', str(folder)]) == 0
    assert 'test/accuracy' in capsys.readouterr().out


@pytest.mark.fault(19)
def test_a_file_in_the_way_is_refused(repo, tmp_path, capsys):
    (tmp_path / 'file').write_text('')
    assert train(repo, tmp_path / 'file' / 'run') == 2
    assert mentions(capsys.readouterr().err, 'folder')
    assert os.listdir(tmp_path) == ['file']


@pytest.mark.slow
@pytest.mark.process
@pytest.mark.fault(71)
@pytest.mark.parametrize(
    ('size', 'transforms'),
    [('64k', ''), pytest.param('1M', 'resize(128)', marks=pytest.mark.long)],
)
def test_shared_memory_that_is_too_small_for_workers(repo, tmp_path, size, transforms):
    """Of 64 kB there is no room for semaphores, of a megabyte none for a batch."""
    changes = {'data.cache': False, 'data.workers': 1, 'batch_size': 256, 'evals.test.cache': False}
    changes |= {'data.transforms': transforms, 'evals.test.transforms': transforms}
    words = ['train', '--config', 'tests/helpers/linear.py', '--workdir', str(tmp_path / 'run')]
    words += [f'--config.{name}={value}' for name, value in changes.items()]
    private = f'mount -t tmpfs -o size={size} none /dev/shm && exec "$@"'
    start = ['unshare', '-m', 'sh', '-c', private, 'sh', sys.executable, '-m', 'vit_jax', *words]
    path = {'PYTHONPATH': f'{repo}:{repo}/tests'}
    done = subprocess.run(start, cwd=repo, env=os.environ | path, capture_output=True, text=True)
    if 'unshare' in done.stderr or 'mount' in done.stderr:
        pytest.skip(f'mounting takes root and the capability to: {done.stderr}')
    (line,) = [line for line in done.stderr.splitlines() if line.startswith('error: ')]
    assert done.returncode == 2
    assert mentions(line, 'error:', 'data.workers', '/dev/shm')
    assert 'Traceback' not in done.stderr
    assert not (tmp_path / 'run').exists()
