"""A run most of whose checkpoints are damaged, each otherwise: it goes on from the intact one."""

import os
import pathlib
import shutil

import pytest
from helpers.messages import mentions
from helpers.runs import digest, linear, steps, undrawn  # noqa: F401

from vit_jax.__main__ import main
from vit_jax.errors import EXIT_PREEMPTED

pytestmark = [pytest.mark.process, pytest.mark.slow]

INTACT, LAST = 2, 9


def data_file(step: pathlib.Path) -> pathlib.Path:
    return max(step.glob('variables/**/d/*'), key=lambda path: path.stat().st_size)


def truncate(path: pathlib.Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def flip_bit(path: pathlib.Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


# What is done to the folder of each step, and what is said of it.
DAMAGE = {
    9: (lambda step: truncate(data_file(step)), 'changed'),
    8: (lambda step: data_file(step).unlink(), 'is missing'),
    7: (lambda step: flip_bit(data_file(step)), 'changed'),
    6: (lambda step: truncate(step / 'variables/_METADATA'), 'variables/_METADATA'),
    5: (lambda step: truncate(step / 'manifest.json'), 'manifest.json is unreadable'),
    4: (lambda step: (step / 'manifest.json').unlink(), 'finished'),
    3: (lambda step: (step / 'commit_success.txt').unlink(), 'finished'),
}


def arguments(folder: pathlib.Path, *flags: str) -> list[str]:
    often = ['--config.every.checkpoint=1', '--config.checkpoint.keep_last=20']
    return linear(folder, *often, *flags)


@pytest.fixture(scope='module')
def stopped(tmp_path_factory, run_cli) -> pathlib.Path:
    """A run with all of its first steps."""
    folder = tmp_path_factory.mktemp('stopped')
    done = run_cli(*arguments(folder, f'--stop-at={LAST}'))
    assert done.returncode == EXIT_PREEMPTED, done.stderr
    assert steps(folder) == list(range(1, LAST + 1))
    return folder


@pytest.fixture(scope='module')
def resumed(tmp_path_factory, run_cli, stopped):
    """The folder of the same run, whose steps were damaged, after it went on; and what it said."""
    folder = shutil.copytree(stopped, tmp_path_factory.mktemp('damaged') / 'run')
    root = folder / 'checkpoints'
    shutil.copytree(root / str(LAST), root / '999999')
    (root / '10').mkdir()
    for step, (damage, _) in DAMAGE.items():
        damage(root / str(step))
    os.utime(root / '1', (4e9, 4e9))  # the clock was wrong when the oldest was written
    os.utime(root / str(INTACT), (0, 0))
    done = run_cli(*arguments(folder, f'--stop-at={LAST}'))
    assert done.returncode == EXIT_PREEMPTED, done.stderr
    return folder, done.stdout + done.stderr


@pytest.mark.parametrize(
    'step',
    [
        pytest.param(9, marks=pytest.mark.fault(9), id='truncated'),
        pytest.param(8, marks=pytest.mark.fault(9), id='deleted'),
        pytest.param(7, marks=pytest.mark.fault(10), id='one bit flipped'),
        pytest.param(6, marks=pytest.mark.fault(11), id='metadata truncated'),
        pytest.param(5, marks=pytest.mark.fault(11), id='manifest truncated'),
        pytest.param(4, marks=pytest.mark.fault(11), id='manifest deleted'),
        pytest.param(3, marks=pytest.mark.fault(14), id='commit'),
    ],
)
def test_a_damaged_step_is_named_and_set_aside(resumed, step):
    folder, said = resumed
    (line,) = (line for line in said.splitlines() if f'checkpoints/{step} ignored: ' in line)
    assert DAMAGE[step][1] in line
    assert (folder / 'checkpoints' / 'rejected' / str(step)).is_dir()


@pytest.mark.fault(12)
def test_an_empty_folder_is_no_step(resumed):
    folder, said = resumed
    assert 'checkpoints/10 ignored' in said
    assert not (folder / 'checkpoints' / '10').exists()


@pytest.mark.fault(13)
def test_a_copy_under_another_number_is_not_the_newest_step(resumed):
    folder, said = resumed
    assert mentions(said, 'manifest.json', 'step', LAST, 'renamed', 'directory')
    assert (folder / 'checkpoints' / 'rejected' / '999999').is_dir()


@pytest.mark.fault(22)
def test_the_newest_intact_step_is_taken_whatever_the_clock_said(resumed):
    assert f'resumes after step {INTACT}' in resumed[1]


@pytest.mark.fault(9)
def test_what_is_trained_again_is_bit_for_bit_what_was_lost(resumed, stopped):
    folder, _ = resumed
    assert steps(folder) == steps(stopped)
    assert [digest(folder, step) for step in (3, LAST)] == [digest(stopped, s) for s in (3, LAST)]


@pytest.mark.fault(9, 10)
@pytest.mark.parametrize('step', [7, 8])
def test_a_step_that_is_asked_for_must_be_intact(stopped, tmp_path, capsys, step):
    folder = shutil.copytree(stopped, tmp_path / 'run')
    DAMAGE[step][0](folder / 'checkpoints' / str(step))
    for command in (['evaluate'], ['predict', 'a.png']):
        words = [*command, '--workdir', str(folder), '--step', str(step), '--allow', 'helpers']
        assert main(words) == 2
        allowed, line = capsys.readouterr().err.splitlines()
        assert '--allow helpers' in allowed
        assert f'checkpoints/{step}: variables/' in line
        assert DAMAGE[step][1] in line


@pytest.mark.fault(9)
def test_a_run_all_of_whose_steps_are_damaged_does_not_start_anew(stopped, tmp_path, capsys):
    folder = shutil.copytree(stopped, tmp_path / 'run')
    for step in steps(folder):
        data_file(folder / 'checkpoints' / str(step)).unlink()
    assert main(arguments(folder)) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert 'damaged checkpoint in' in line
    assert 'step 1: ' in line
    assert 'train --restart' in line
    assert steps(folder) == steps(stopped)
