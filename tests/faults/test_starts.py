"""A start that fails leaves nothing that stands in the way of the next one."""

import json
import pathlib
import shutil

import numpy as np
import pytest
from helpers.messages import mentions
from PIL import Image

from vit_jax.__main__ import main
from vit_jax.config import load
from vit_jax.errors import EXIT_PREEMPTED


@pytest.fixture(autouse=True)
def one(one_device: None) -> None:
    """One device."""


@pytest.fixture
def images(tmp_path: pathlib.Path) -> pathlib.Path:
    """A folder of images, the last of which is of another size."""
    folder = tmp_path / 'images'
    for name in ('a', 'b'):
        (folder / name).mkdir(parents=True)
        for i in range(8):
            Image.fromarray(np.zeros((8, 8, 3), np.uint8)).save(folder / name / f'{i}.png')
    Image.fromarray(np.zeros((10, 10, 3), np.uint8)).save(folder / 'b' / '8.png')
    return folder


@pytest.fixture
def finished(smoke_run: pathlib.Path, tmp_path: pathlib.Path) -> pathlib.Path:
    """A copy of a finished run."""
    return pathlib.Path(shutil.copytree(smoke_run, tmp_path / 'finished'))


# Where a run gets as far as to compile its model.
LINEAR = 'tests/helpers/linear.py'


def train(
    repo: pathlib.Path,
    workdir: object,
    *flags: str,
    config: str = 'experiments/vit/digits.py:smoke',
) -> int:
    return main(['train', '--config', f'{repo}/{config}', '--workdir', str(workdir), *flags])


def of_images(folder: pathlib.Path) -> list[str]:
    """Flags for training on a folder of images."""
    source = f'folder:{folder}'
    keys = {'data.source': source, 'evals.test.source': source, 'evals.test.split': 'train'}
    return [f'--config.{key}={value}' for key, value in {**keys, 'batch_size': 16}.items()]


@pytest.mark.slow
@pytest.mark.fault(40)
@pytest.mark.parametrize('existed', [False, True])
def test_a_start_that_fails_late_leaves_no_trace(repo, images, tmp_path, capsys, existed):
    run = tmp_path / 'run'
    if existed:
        run.mkdir()
    assert train(repo, run, *of_images(images), config=LINEAR) == 2
    printed = capsys.readouterr()
    assert 'starts in' in printed.out
    assert mentions(printed.err, 'size')
    assert run.exists() == existed
    assert not existed or not list(run.iterdir())


@pytest.mark.fault(40)
def test_what_else_lies_in_the_folder_stays(repo, images, tmp_path):
    run = tmp_path / 'run'
    run.mkdir()
    (run / 'vocab.model').write_text('of the user')
    assert train(repo, run, *of_images(images), config=LINEAR) == 2
    assert (run / 'vocab.model').read_text() == 'of the user'


@pytest.mark.slow
@pytest.mark.fault(40)
def test_a_config_without_checkpoint_is_replaced(repo, tmp_path, capsys):
    config = load.load(f'{repo}/{LINEAR}', ['seed=5'])
    (tmp_path / 'config.json').write_text(load.to_json(config))
    assert train(repo, tmp_path, '--stop-at=1', config=LINEAR) == EXIT_PREEMPTED
    lines = [x for x in capsys.readouterr().out.splitlines() if x.startswith('replaces ')]
    assert len(lines) == 1
    assert 'config.seed' in lines[0]
    assert json.loads((tmp_path / 'config.json').read_text())['seed'] == 0
    assert train(repo, tmp_path, '--config.seed=5', config=LINEAR) == 2
    assert 'config.seed differs' in capsys.readouterr().err


@pytest.mark.fault(42)
def test_another_programs_config_is_refused(repo, tmp_path, capsys):
    (tmp_path / 'config.json').write_text('{"model_type": "vit"}')
    assert train(repo, tmp_path) == 2
    assert mentions(capsys.readouterr().err, 'config')
    assert (tmp_path / 'config.json').read_text() == '{"model_type": "vit"}'


@pytest.mark.fault(42)
def test_a_lost_config_does_not_let_a_run_go_on_with_another(repo, finished, capsys):
    (finished / 'config.json').unlink()
    (finished / 'result.json').unlink()
    assert train(repo, finished, '--config.optim.lr=0.5', '--config.seed=5') == 2
    assert 'config.seed, config.optim differs' in capsys.readouterr().err
    assert not (finished / 'config.json').exists()


@pytest.mark.fault(43)
def test_damaged_small_files_do_not_stop_a_run_that_is_complete(repo, finished, caplog):
    expected = {name: (finished / name).read_bytes() for name in ('config.json', 'metrics.jsonl')}
    result = json.loads((finished / 'result.json').read_text())
    (finished / 'config.json').write_bytes(b'{"seed": \xff')
    (finished / 'result.json').write_bytes(b'')
    broken = b'{"train/loss": 1}\n\xff\n5\n{"step": 3, "a\xff": 1}\n\n'
    (finished / 'metrics.jsonl').write_bytes(broken + expected['metrics.jsonl'] + b'{"st')
    assert train(repo, finished) == 0
    for name, content in expected.items():
        assert (finished / name).read_bytes() == content
        assert sum(f'{name}' in line for line in caplog.messages) >= 1
    assert caplog.text.count('5 damaged lines') == 1
    assert json.loads((finished / 'result.json').read_text()) == result
    assert any('result.json is damaged' in line for line in caplog.messages)


@pytest.mark.fault(24)
@pytest.mark.parametrize(
    'flag',
    [
        'model.patch_size=0',
        'model.width=-4',
        'model.num_heads=0',
        'model.mlp_dim=0',
        'model.depth=-1',
        'total=1e30',
        'seed=1e30',
        'step.ema_decay=1.5',
    ],
)
def test_impossible_numbers_are_one_line(repo, tmp_path, capsys, flag):
    assert train(repo, tmp_path / 'run', f'--config.{flag}') == 2
    error = capsys.readouterr().err
    assert error.startswith(f'error: config.{flag.partition("=")[0]}=')
    assert error.count('\n') == 1
    assert not (tmp_path / 'run').exists()


@pytest.mark.fault(44)
@pytest.mark.parametrize(('workdir', 'words'), [('', 'folder'), ('a' * 300, '255 bytes')])
def test_names_that_are_no_folder(repo, tmp_path, capsys, monkeypatch, workdir, words):
    monkeypatch.chdir(tmp_path)
    assert train(repo, workdir) == 2
    assert mentions(capsys.readouterr().err, words)
    assert not list(tmp_path.iterdir())


def test_how_a_finished_run_is_made_longer_is_said(repo, finished, capsys):
    assert train(repo, finished, '--config.total=30 steps') == 2
    flags = f'--config.branch.from={finished} --config.branch.step=20'
    error = capsys.readouterr().err
    assert error.endswith(f'another --workdir {flags}\n')
    assert train(repo, finished, '--config.batch_size=16') == 2
    error = capsys.readouterr().err
    assert 'config.batch_size differs' in error and flags in error and '--extend' not in error


@pytest.mark.slow
@pytest.mark.fault(45)
@pytest.mark.parametrize('step', [5, 20])
def test_a_stop_in_the_past_is_refused(repo, finished, capsys, step):
    (finished / 'result.json').unlink()
    assert train(repo, finished, f'--stop-at={step}') == 2
    assert 'step 20' in capsys.readouterr().err


@pytest.mark.fault(44)
@pytest.mark.parametrize('command', [['evaluate'], ['predict', 'image.png']])
def test_a_step_that_never_was(smoke_run, repo, capsys, command):
    assert main([*command, '--workdir', str(smoke_run), '--step', '5']) == 2
    error = capsys.readouterr().err
    assert mentions(error, 'checkpoints/5', '[10, 20]')
    assert error.count('\n') == 1


@pytest.mark.fault(44)
def test_a_config_that_is_no_python_file(repo, tmp_path, capsys):
    flags = ['--config', f'{repo}/README.md', '--workdir', str(tmp_path / 'run')]
    assert main(['train', *flags]) == 2
    error = capsys.readouterr().err
    assert mentions(error, 'Python', 'file')
    assert error.count('\n') == 1
