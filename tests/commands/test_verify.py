"""Saved steps are what was written: `inspect --verify` asks, `train --strict` insists."""

import json
import pathlib
import shutil

import pytest
from helpers.messages import mentions

from vit_jax.__main__ import main
from vit_jax.storage import run_folder


@pytest.fixture
def run(smoke_run: pathlib.Path, tmp_path: pathlib.Path) -> pathlib.Path:
    """A copy of a finished run that has kept two steps."""
    return pathlib.Path(shutil.copytree(smoke_run, tmp_path / 'run'))


def damage(run: pathlib.Path, step: int) -> str:
    """Flips a bit of the largest file of a step and returns the file's name."""
    folder = run / 'checkpoints' / str(step)
    file = max(folder.rglob('d/*'), key=lambda path: path.stat().st_size)
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    return file.relative_to(folder).as_posix()


def test_intact_steps_are_listed(run, capsys):
    assert main(['inspect', '--verify', str(run)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split() for line in lines] == [
        ['step', 'state'],
        ['10', 'intact'],
        ['20', 'intact'],
    ]


@pytest.mark.fault(55)
def test_a_damaged_step_and_one_without_its_mark_are_told(run, capsys):
    file = damage(run, 10)
    (run / 'checkpoints' / '20' / 'commit_success.txt').unlink()
    assert main(['inspect', '--verify', str(run), '--json']) == 1
    steps = json.loads(capsys.readouterr().out)['steps']
    assert mentions(steps['10'], 'damaged', file, 'changed', 'xxh3_128')
    assert mentions(steps['20'], 'manifest.json', 'commit_success.txt')
    assert run_folder.steps(run) == [10]  # nothing was moved


@pytest.mark.fault(62)
def test_arrays_that_were_never_listed_are_told(run, capsys):
    step = run / 'checkpoints' / '20'
    content = json.loads((step / 'manifest.json').read_text())
    del content['files']['variables/manifest.ocdbt']
    (step / 'manifest.json').write_text(json.dumps(content))
    (step / 'variables' / 'manifest.ocdbt').unlink()
    assert main(['inspect', '--verify', str(run), '--json']) == 1
    steps = json.loads(capsys.readouterr().out)['steps']
    assert mentions(steps['20'], 'damaged', 'variables/manifest.ocdbt')


def test_a_folder_without_steps_is_one_line(tmp_path, capsys):
    assert main(['inspect', '--verify', str(tmp_path)]) == 2
    assert '/checkpoints' in capsys.readouterr().err


@pytest.mark.fault(55)
def test_a_strict_run_does_not_go_back_to_an_older_step(repo, run, capsys):
    file = damage(run, 20)
    (run / 'result.json').unlink()
    config = f'{repo}/experiments/vit/digits.py:smoke'
    assert main(['train', '--config', config, '--workdir', str(run), '--strict']) == 2
    assert mentions(capsys.readouterr().err, 'step 20', file, 'changed')
    assert (run / 'checkpoints' / '20').is_dir()


@pytest.mark.fault(55)
def test_a_strict_start_of_a_complete_run_looks_at_its_newest_step(repo, run, capsys):
    argv = ['train', '--config', f'{repo}/experiments/vit/digits.py:smoke', '--workdir', str(run)]
    assert main([*argv, '--strict']) == 0
    file = damage(run, 20)
    assert main(argv) == 0
    assert main([*argv, '--strict']) == 1
    assert mentions(capsys.readouterr().err, 'step 20', file, 'changed')
