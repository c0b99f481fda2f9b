"""FIFOs, devices and sparse giants in place of files: a command neither waits nor fills memory."""

from __future__ import annotations

import os
import pathlib
import shutil
import signal

import pytest

from vit_jax.__main__ import main
from vit_jax.data import images
from vit_jax.data.records import BrokenRecord
from vit_jax.storage import paths

pytestmark = [pytest.mark.fault(127), pytest.mark.usefixtures('one_device')]

KINDS = ('fifo', 'zero', 'sparse')
SMOKE = 'experiments/vit/digits.py:smoke'


@pytest.fixture(autouse=True)
def bounded(repo, tmp_path, monkeypatch):
    """What waits for a FIFO is ended after a minute."""
    monkeypatch.chdir(repo)
    monkeypatch.setenv('XDG_CACHE_HOME', str(tmp_path / 'cache'))

    def late(*_):
        raise AssertionError('it waits')

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(60)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


def put(kind: str, path: pathlib.Path) -> pathlib.Path:
    """No regular file, or one of 2 TB of which nothing is on the disk, in place of any other."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    if kind == 'fifo':
        os.mkfifo(path)
    elif kind == 'zero':
        path.symlink_to('/dev/zero')
    else:
        path.touch()
        os.truncate(path, 2 * 10**12)
    return path


def data(source: str) -> list[str]:
    changes = {'source': source, 'split': 'train', 'transforms': ''}
    return ['data', '--config', SMOKE, *(f'--config.data.{k}={v}' for k, v in changes.items())]


# What the file is called, and the command that is given it, or its folder.
FILES = {
    'a.safetensors': ['inspect', '--checkpoint', '{file}'],
    'a.npz': ['inspect', '--checkpoint', '{file}'],
    'config.json': ['inspect', '--checkpoint', '{folder}'],
    'a.csv': ['scaling', 'fit', '--csv', '{file}', '--x', 'a', '--y', 'b'],
    'a.tsv': ['vocab', 'text:{file}', '--size', '100', '--output', '{folder}/v.model'],
    'a.py': ['train', '--config', '{file}', '--workdir', '{folder}/run'],
    'a.log': ['sweep', 'status', 'a', '--storage', 'journal:{file}'],
    'sweep.json': ['sweep', 'status', 'a', '--workdir', '{folder}'],
    'manifest.json': data('packed:{folder}'),
    'instances_train.json': data('coco:{folder}'),
    'a.xml': data('voc:{folder}'),
    'train.parquet': data('hf:{folder}'),
    'train.tar': data('tar:{folder}'),
}


@pytest.mark.parametrize('kind', KINDS)
@pytest.mark.parametrize('name', FILES)
def test_it_is_one_line(tmp_path, capsys, kind, name):
    file = put(kind, tmp_path / name)
    words = [word.format(file=file, folder=tmp_path) for word in FILES[name]]
    assert main(words) == 2
    (line,) = (line for line in capsys.readouterr().err.splitlines() if line.startswith('error: '))
    assert str(tmp_path) in line or '/dev/zero' in line


@pytest.mark.slow
@pytest.mark.parametrize('kind', KINDS)
def test_in_a_run_folder(smoke_run, tmp_path, capsys, kind):
    for name, command in (
        ('config.json', ['inspect', '--workdir']),
        ('metrics.jsonl', ['report', '--out', str(tmp_path / 'a.html')]),
        ('times.jsonl', ['goodput']),
        ('result.json', ['scaling', 'collect']),
    ):
        run = shutil.copytree(smoke_run, tmp_path / name)
        put(kind, run / name)
        assert main([*command, str(run)]) == 2
        assert f'{name}: it ' in capsys.readouterr().err
    run = shutil.copytree(smoke_run, tmp_path / 'run')
    manifest = run / 'checkpoints' / '20' / 'manifest.json'
    whole = manifest.read_bytes()
    put(kind, manifest)
    assert main(['inspect', '--verify', str(run)]) == 1
    manifest.unlink()
    manifest.write_bytes(whole)
    put(kind, run / 'checkpoints' / '20' / 'meta' / 'metadata')
    assert main(['inspect', '--verify', str(run)]) == 1
    assert main(['predict', '--workdir', str(smoke_run), str(put(kind, tmp_path / 'a.png'))]) == 2
    assert 'a.png' in capsys.readouterr().err


@pytest.mark.parametrize('kind', KINDS)
def test_an_image_counts_as_broken(tmp_path, kind):
    with pytest.raises(BrokenRecord, match=r'7\.png: it '):
        images.read_file(put(kind, tmp_path / '7.png'))


def test_what_is_opened(tmp_path):
    file = tmp_path / 'a'
    file.write_bytes(b'abc')
    (tmp_path / 'link').symlink_to(file)
    assert paths.read_bytes(tmp_path / 'link', 3) == b'abc'
    with pytest.raises(OSError, match=r'3 bytes.*2'):
        paths.read_bytes(file, 2)
    with pytest.raises(IsADirectoryError):
        paths.read_bytes(tmp_path)
    with pytest.raises(FileNotFoundError):
        paths.read_bytes(tmp_path / 'b')
