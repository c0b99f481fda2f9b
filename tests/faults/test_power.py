"""A power cut: what counts as written is on the disk, and was before what it replaces went."""

from __future__ import annotations

import os
import pathlib
import shutil
import subprocess

import pytest
from helpers.mounts import mounted
from helpers.runs import linear, steps

from vit_jax.__main__ import main
from vit_jax.checkpoints import manifest
from vit_jax.storage import paths, run_folder

pytestmark = pytest.mark.usefixtures('one_device', 'synced_disks')


class Disk:
    """The order of what Python asks of the disk.

    Attributes:
      events: ('fsync', path, size), ('rename', from, to) and ('unlink', path).
    """

    def __init__(self, patch: pytest.MonkeyPatch):
        self.events: list[tuple] = []
        for name in ('rename', 'replace', 'unlink', 'fsync'):
            patch.setattr(os, name, self._recorded(name, getattr(os, name)))

    def _recorded(self, name, call):
        def recorded(*args, **options):
            result = call(*args, **options)
            if name == 'fsync':
                path = os.readlink(f'/proc/self/fd/{args[0]}')
                self.events.append((name, path, os.fstat(args[0]).st_size))
            elif name == 'unlink':
                self.events.append((name, str(args[0])))
            else:
                self.events.append(('rename', *map(str, args)))
            return result

        return recorded

    def renamed(self, to: pathlib.Path) -> tuple[int, str]:
        """The place in the order of the rename to a path, and the name before."""
        ((at, source),) = [
            (at, event[1])
            for at, event in enumerate(self.events)
            if event[0] == 'rename' and event[2] == str(to)
        ]
        return at, source

    def synced(self, path: str | pathlib.Path, begin: int, end: int) -> list[int]:
        """The sizes that a file or folder had when it was synced between two places."""
        some = self.events[begin:end]
        return [event[2] for event in some if event[:2] == ('fsync', str(path))]


@pytest.fixture
def disk(monkeypatch) -> Disk:
    return Disk(monkeypatch)


def train(folder: pathlib.Path, **changes: object) -> int:
    return main(linear(folder, **changes))


@pytest.mark.slow
@pytest.mark.fault(109)
def test_a_step_is_on_the_disk_before_it_has_its_name_and_an_older_one_goes(tmp_path, disk):
    folder = tmp_path / 'run'
    every = {'every.checkpoint': 10, 'every.eval': 20, 'every.log': 5}
    assert train(folder, **every, **{'checkpoint.keep_last': 1}) == 0

    saved = folder / 'checkpoints'
    begin, (named, temporary) = disk.renamed(saved / '10')[0], disk.renamed(saved / '20')
    gone, _ = disk.renamed(saved / '10.orbax-checkpoint-tmp-deleted')
    files = [*manifest.run_folder.read_manifest(saved / '20'), 'manifest.json']
    inside = {str(pathlib.PurePosixPath(name).parent) for name in files}
    for name in files:
        assert (saved / '20' / name).stat().st_size in disk.synced(
            f'{temporary}/{name}', begin, named
        ), name
    for name in inside:
        assert disk.synced(pathlib.Path(temporary, name), begin, named), name
    log = folder / 'metrics.jsonl'
    assert log.stat().st_size in disk.synced(log, begin, named)
    for place in (saved / '20' / 'commit_success.txt', saved / '20', saved, folder):
        assert disk.synced(place, named, gone), place
    assert begin < named < gone
    result, _ = disk.renamed(folder / 'result.json')
    assert disk.synced(folder, result, len(disk.events))


@pytest.mark.slow
@pytest.mark.fault(109)
def test_after_a_power_cut_the_run_goes_on_from_its_newest_step(tmp_path):
    """On a journaling file system, of which a copy is taken at once, without what is not synced."""
    image, copy = tmp_path / 'image', tmp_path / 'copy'
    with image.open('wb') as file:
        file.truncate(24 << 20)
    try:
        subprocess.run(['mkfs.ext4', '-q', image], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f'there is no ext4 here: {error}')
    flags = {'every.checkpoint': 10, 'every.eval': 20, 'checkpoint.keep_last': 1}
    with mounted(tmp_path / 'disk', '-o', 'loop', str(image)) as disk:
        subprocess.run(['sync', '-f', disk], check=True)
        assert train(disk / 'run', **flags) == 0
        log = run_folder.read_metrics(disk / 'run')
        shutil.copyfile(image, copy)
    with mounted(tmp_path / 'later', '-o', 'loop', str(copy)) as disk:
        shutil.copytree(disk / 'run', tmp_path / 'run')
    assert steps(tmp_path / 'run') == [20]
    manifest.verify(tmp_path / 'run' / 'checkpoints' / '20')
    assert run_folder.read_metrics(tmp_path / 'run') == log
    assert run_folder.read_result(tmp_path / 'run')


@pytest.mark.fault(109)
def test_a_small_file_is_on_the_disk_before_and_after_it_gets_its_name(tmp_path, disk):
    target = tmp_path / 'new' / 'folder' / 'file.json'
    paths.make_folder(target.parent)
    assert disk.synced(tmp_path, 0, len(disk.events))
    assert disk.synced(tmp_path / 'new', 0, len(disk.events))
    paths.write_text_atomic(target, 'text')
    named, partial = disk.renamed(target)
    assert disk.synced(partial, 0, named) == [4]
    assert disk.synced(target.parent, named, len(disk.events))


@pytest.mark.slow
@pytest.mark.fault(109)
def test_what_convert_and_pack_write_is_on_the_disk_before_it_has_its_name(
    smoke_run, tmp_path, disk
):
    assert main(['convert', str(smoke_run), str(tmp_path / 'hf')]) == 0
    assert main(['pack', 'digits', str(tmp_path / 'packed'), '--workers', '0']) == 0
    for folder in (tmp_path / 'hf', tmp_path / 'packed'):
        for file in folder.iterdir():
            named, partial = disk.renamed(file)
            assert file.stat().st_size in disk.synced(partial, 0, named), file
            assert disk.synced(folder, named, len(disk.events)), file


def test_a_folder_that_cannot_be_synced_is_left_to_its_file_system(tmp_path):
    paths.sync(pathlib.Path('/proc'))
    with pytest.raises(FileNotFoundError):
        paths.sync(tmp_path / 'none')
