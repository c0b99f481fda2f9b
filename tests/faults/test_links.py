"""Links where a run writes: what they point to is not written to, cut off or deleted."""

import os
import pathlib

import pytest
from helpers.runs import linear

from vit_jax.__main__ import main
from vit_jax.errors import EXIT_PREEMPTED
from vit_jax.storage import paths

pytestmark = [pytest.mark.usefixtures('one_device'), pytest.mark.fault(63)]

PRECIOUS = 'what somebody else has written'


@pytest.fixture
def precious(tmp_path: pathlib.Path) -> pathlib.Path:
    """A folder with a file, both of somebody else."""
    file = tmp_path / 'precious' / 'file'
    file.parent.mkdir()
    file.write_text(PRECIOUS)
    return file


def train(folder: pathlib.Path, *flags: str) -> int:
    return main(linear(folder, *flags))


@pytest.mark.parametrize('link', [os.symlink, os.link])
def test_a_lock_that_is_a_link_is_refused(tmp_path, precious, capsys, link):
    (tmp_path / 'run').mkdir()
    link(precious, tmp_path / 'run' / 'lock')
    assert train(tmp_path / 'run') == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert f'{tmp_path}/run/lock' in line and 'link' in line
    assert precious.read_text() == PRECIOUS


def test_a_lock_that_is_a_pipe_is_refused(tmp_path, capsys):
    (tmp_path / 'run').mkdir()
    os.mkfifo(tmp_path / 'run' / 'lock')
    assert train(tmp_path / 'run') == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert f'{tmp_path}/run/lock' in line


@pytest.mark.slow
def test_links_in_the_place_of_what_a_run_writes(tmp_path, precious):
    folder = tmp_path / 'run'
    assert train(folder, '--stop-at=1') == EXIT_PREEMPTED
    for name in ('config.json', 'metrics.jsonl', 'result.json'):
        (folder / name).unlink(missing_ok=True)
        (folder / name).symlink_to(precious)
    root = folder / 'checkpoints'
    (root / '1').rename(precious.parent / '1')
    (root / '1').symlink_to(precious.parent / '1')
    (root / '7.orbax-checkpoint-tmp').symlink_to(precious.parent)
    before = paths.files(precious.parent)
    assert train(folder, '--config.checkpoint.keep_last=1') == 0
    assert precious.read_text() == PRECIOUS
    assert paths.files(precious.parent) == before
    assert sorted(path.name for path in root.iterdir()) == ['20']
    assert not [path for path in folder.iterdir() if path.is_symlink()]
