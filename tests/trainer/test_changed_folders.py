"""What others delete or replace in the folder of a run at work: it is told, and nothing is lost."""

import contextlib
import json
import pathlib
import shutil
import time
from collections.abc import Callable

import pytest
from helpers.messages import mentions
from helpers.runs import digest, left_alone, linear

from vit_jax.__main__ import main
from vit_jax.checkpoints import format as checkpoint_format
from vit_jax.checkpoints.checkpointer import Checkpointer
from vit_jax.data.dataset import Dataset
from vit_jax.storage import lock, run_folder
from vit_jax.trainer import train as training

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures('compiled_once', 'one_device')]

FLAGS = ('--config.checkpoint.keep_last=3',)


def train(folder: pathlib.Path) -> int:
    return main(linear(folder, *FLAGS))


@pytest.fixture(scope='module')
def whole_run(tmp_path_factory) -> pathlib.Path:
    """The folder of a run that was left alone."""
    return left_alone(tmp_path_factory.mktemp('whole'), *FLAGS)


@pytest.fixture
def during(monkeypatch) -> Callable[[int, Callable[[], object]], None]:
    """`during(N, ACT)`: ACT is done in the middle of the Nth evaluation, after step 10 * N."""
    whole = Dataset.eval_batches

    def schedule(number: int, act: Callable[[], object]) -> None:
        passes = []

        def batches(data, stopping):
            passes.append(data)
            if len(passes) == number:
                act()
            return whole(data, stopping)

        monkeypatch.setattr(Dataset, 'eval_batches', batches)

    return schedule


def require_same(folder: pathlib.Path, whole_run: pathlib.Path) -> None:
    """All that a run leaves behind, but for the seconds that its steps took."""
    assert digest(folder) == digest(whole_run)
    for name in (run_folder.CONFIG, run_folder.RESULT):
        assert (folder / name).read_text() == (whole_run / name).read_text()
    for name in ('train/loss', 'test/loss'):
        found, expected = (run_folder.read_series(x)[name] for x in (folder, whole_run))
        assert [x.tolist() for x in found] == [x.tolist() for x in expected]


@pytest.mark.fault(73)
@pytest.mark.parametrize(
    ('name', 'words', 'content'),
    [
        pytest.param(name, words, content, marks=[pytest.mark.long] * (name == dear))
        for content, dear in ((None, 'config.json'), ('{"seed": 5}\n', 'metrics.jsonl'))
        for name, words in (
            ('metrics.jsonl', ('metrics.jsonl', 'written again')),
            ('config.json', ('config.json', 'written again')),
        )
    ],
)
def test_a_small_file_is_written_again(tmp_path, whole_run, during, capsys, name, words, content):
    def meddle() -> None:
        (tmp_path / name).unlink()
        if content is not None:
            (tmp_path / name).write_text(content)

    during(1, meddle)
    assert train(tmp_path) == 0
    assert sum(mentions(line, words) for line in capsys.readouterr().out.splitlines()) == 1
    require_same(tmp_path, whole_run)


@pytest.mark.fault(83)
@pytest.mark.parametrize('size', [0, pytest.param(30, marks=pytest.mark.long), None])
def test_a_log_that_is_cut_off_or_added_to_is_written_again(
    tmp_path, whole_run, during, capsys, size
):
    def meddle() -> None:
        with (tmp_path / 'metrics.jsonl').open('a') as file:
            file.write('{"step": 5}\n') if size is None else file.truncate(size)

    during(2, meddle)
    assert train(tmp_path) == 0
    assert capsys.readouterr().out.count('written again') == 1
    require_same(tmp_path, whole_run)


@pytest.mark.fault(73)
def test_checkpoints_that_are_deleted_are_told_and_the_state_is_saved(
    tmp_path, whole_run, during, caplog
):
    def delete() -> None:
        while not run_folder.steps(tmp_path):  # it is saved in the background
            time.sleep(0.01)
        shutil.rmtree(tmp_path / 'checkpoints')

    during(2, delete)
    assert train(tmp_path) == 0
    assert any(mentions(line, 'checkpoints/10', 'deleted') for line in caplog.messages)
    assert run_folder.steps(tmp_path) == [20]
    require_same(tmp_path, whole_run)


@pytest.mark.fault(72)
def test_a_lock_that_is_deleted_is_made_again(tmp_path, whole_run, during):
    during(1, (tmp_path / 'lock').unlink)
    assert train(tmp_path) == 0
    assert (tmp_path / 'lock').is_file()
    require_same(tmp_path, whole_run)


@pytest.mark.fault(72)
def test_who_finds_another_run_in_the_folder_ends_and_leaves_it_alone(
    tmp_path, whole_run, during, capsys
):
    with contextlib.ExitStack() as other:

        def take_over() -> None:
            (tmp_path / 'lock').unlink()
            other.enter_context(lock.hold(tmp_path))
            (tmp_path / 'metrics.jsonl').unlink()
            (tmp_path / 'metrics.jsonl').write_text("the other's")

        during(1, take_over)
        assert train(tmp_path) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert mentions(line, 'taken', 'over')
        assert (tmp_path / 'metrics.jsonl').read_text() == "the other's"
        assert run_folder.steps(tmp_path) == []
        assert json.loads((tmp_path / 'lock').read_text())['pid']
    (tmp_path / 'metrics.jsonl').unlink()
    assert train(tmp_path) == 0
    require_same(tmp_path, whole_run)


@pytest.mark.fault(72)
def test_a_save_that_fails_as_another_run_took_the_folder_says_so(tmp_path, monkeypatch, capsys):
    """The process slept between the check of its lock and the save."""
    with contextlib.ExitStack() as other:

        def save(*args, **options):
            (tmp_path / 'lock').unlink()
            other.enter_context(lock.hold(tmp_path))
            raise ValueError('Destination 10 already exists')

        monkeypatch.setattr(Checkpointer, 'save', save)
        assert train(tmp_path) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert mentions(line, 'taken', 'over')


@pytest.mark.fault(73)
def test_checkpoints_that_are_deleted_during_a_save_are_one_line(tmp_path, monkeypatch, capsys):
    whole = checkpoint_format.require_written

    def deleted(*args) -> None:
        shutil.rmtree(tmp_path / 'checkpoints')
        whole(*args)

    monkeypatch.setattr(checkpoint_format, 'require_written', deleted)
    assert train(tmp_path) == 2
    (line,) = [x for x in capsys.readouterr().err.splitlines() if x.startswith('error: ')]
    assert mentions(line, 'step 20')
    assert mentions(line, 'deleted')


@pytest.mark.fault(84)
def test_a_save_that_is_deleted_while_it_is_written_is_made_again_at_once(
    tmp_path, whole_run, monkeypatch, caplog
):
    check, count, deleted, steps = checkpoint_format.require_written, Dataset.count, [], []

    def delete_once(*args) -> None:
        if not deleted:
            shutil.rmtree(tmp_path / 'checkpoints')
            deleted.append(True)
        check(*args)

    def wait_for_it(data, batch):
        steps.append(len(steps) + 1)
        if len(steps) == 12:
            while not deleted:
                time.sleep(0.01)
            time.sleep(1)  # until Orbax has told of it
        return count(data, batch)

    monkeypatch.setattr(checkpoint_format, 'require_written', delete_once)
    monkeypatch.setattr(Dataset, 'count', wait_for_it)
    assert train(tmp_path) == 0
    (line,) = [line for line in caplog.messages if 'deleted' in line]
    assert mentions(line, 'checkpoints/10', 'deleted')
    assert run_folder.steps(tmp_path) in ([11, 20], [12, 20])
    require_same(tmp_path, whole_run)


@pytest.mark.fault(20)
@pytest.mark.parametrize(('flag', 'code'), [('seed=0', 0), ('optim.lr=1e-4', 2)])
def test_a_run_that_used_the_folder_before_it_was_locked_is_found(
    tmp_path, monkeypatch, capsys, flag, code
):
    """The second run lists its data while the first one trains."""
    build, left = training.build, {}

    def build_slowly(*args):
        monkeypatch.setattr(training, 'build', build)
        assert main(linear(tmp_path, f'--config.{flag}', '--config.total=2 steps')) == 0
        left.update({file: file.read_bytes() for file in tmp_path.iterdir() if file.is_file()})
        return build(*args)

    monkeypatch.setattr(training, 'build', build_slowly)
    assert main(linear(tmp_path, '--config.total=2 steps')) == code
    assert {file: file.read_bytes() for file in left} == left
    assert ('config.optim' in capsys.readouterr().err) == bool(code)
