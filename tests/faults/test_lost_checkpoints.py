"""A run whose checkpoints lost a mark: nothing is deleted, nothing begins anew unasked."""

import pathlib
import shutil

import pytest
from helpers.messages import mentions
from helpers.runs import left_alone, linear

from vit_jax.__main__ import main
from vit_jax.errors import EXIT_PREEMPTED
from vit_jax.storage import paths, run_folder

pytestmark = pytest.mark.usefixtures('one_device')

MARKS = ('commit_success.txt', 'manifest.json')


@pytest.fixture(scope='module')
def finished(tmp_path_factory) -> pathlib.Path:
    """A finished run; do not write to it."""
    return left_alone(tmp_path_factory.mktemp('finished') / 'run')


@pytest.fixture
def run(finished, tmp_path) -> pathlib.Path:
    """A copy of the finished run, as if it had been killed just before its end."""
    folder = shutil.copytree(finished, tmp_path / 'run')
    (folder / 'result.json').unlink()
    assert run_folder.steps(folder) == [10, 20]
    return folder


def train(folder: pathlib.Path, *flags: str) -> int:
    return main(linear(folder, *flags))


def saved(folder: pathlib.Path) -> list[str]:
    return paths.files(folder / 'checkpoints')


@pytest.mark.fault(41)
@pytest.mark.parametrize('mark', MARKS)
def test_marks_lost_in_every_step_are_refused_and_nothing_is_moved(run, capsys, mark):
    for path in run.glob(f'checkpoints/*/{mark}'):
        path.unlink()
    before = saved(run)
    assert train(run) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert mentions(line, 'checkpoint', '10, 20')
    assert '--restart' in line
    assert saved(run) == before


@pytest.mark.fault(41)
def test_steps_that_were_set_aside_are_named(run, capsys):
    shutil.rmtree(run / 'checkpoints' / '10')
    (run / 'checkpoints' / 'rejected').mkdir()
    (run / 'checkpoints' / '20').rename(run / 'checkpoints' / 'rejected' / '20')
    assert train(run) == 2
    assert 'but rejected/20: restore' in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.fault(41)
def test_a_restart_moves_what_was_there_aside_and_resumes_when_given_again(
    finished, tmp_path, capsys
):
    folder = shutil.copytree(finished, tmp_path / 'run')
    for path in folder.glob('checkpoints/*/manifest.json'):
        path.unlink()
    before = saved(folder)
    assert train(folder, '--restart', '--stop-at=1') == EXIT_PREEMPTED
    aside = folder / 'checkpoints' / 'rejected' / 'restart-1'
    assert set(paths.files(aside)) == {*before, 'metrics.jsonl', 'result.json'}
    assert not (folder / 'result.json').exists()
    assert 'starts in' in capsys.readouterr().out

    assert train(folder, '--restart', '--stop-at=2') == EXIT_PREEMPTED
    assert 'resumes after step 1' in capsys.readouterr().out
    assert run_folder.steps(folder) == [1, 2]


@pytest.mark.slow
@pytest.mark.fault(14)
@pytest.mark.parametrize('mark', MARKS)
def test_a_step_without_its_mark_is_set_aside_whole(run, capsys, mark):
    root = run / 'checkpoints'
    (root / '20' / mark).unlink()
    files = paths.files(root / '20')
    earlier = root / 'rejected' / '20' / 'file'
    earlier.parent.mkdir(parents=True)
    earlier.write_text('of an earlier fault')
    (root / 'my.orbax-checkpoint-tmp.notes').mkdir()
    assert train(run, '--stop-at=11') == EXIT_PREEMPTED
    assert 'resumes after step 10' in capsys.readouterr().out
    assert paths.files(root / 'rejected' / '20-2') == files
    assert earlier.read_text() == 'of an earlier fault'
    assert (root / 'my.orbax-checkpoint-tmp.notes').is_dir()
