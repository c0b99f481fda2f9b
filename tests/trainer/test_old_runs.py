"""Run folders that older code wrote are read, evaluated and continued by this one.

`golden/run_digits` was stopped at step 10 of 20, every other folder holds a complete run of a tiny
model: `golden/run_NAME` one of each system. The numbers below, and those of each `result.json`, are
those that the code of that time came to, on one CPU device.
"""

import json
import pathlib
import shutil

import pytest

import vit_jax.models
from vit_jax.__main__ import main
from vit_jax.inference.load import read_config
from vit_jax.storage import run_folder

pytestmark = pytest.mark.usefixtures('one_device')

GOLDEN = pathlib.Path(__file__).parents[1] / 'golden'
# In `make test`; `test_doors` loads the others there.
EVALUATED = (
    *('run_agglomerate', 'run_colorize', 'run_lejepa', 'run_naflex', 'run_pmf', 'run_seq2seq'),
    *('run_siglip', 'run_swin_v2', 'run_text_encoder', 'run_vit', 'run_vit_factorized'),
)
COMPLETE = sorted(path.parent.name for path in GOLDEN.glob('run_*/result.json'))
DIGITS = {
    'total': '20 steps',
    'model.width': 16,
    'model.mlp_dim': 32,
    'model.num_heads': 2,
    'optim.lr': 0.03,
    'every.checkpoint': 10,
    'every.eval': 10,
}
REVERSE = {
    'total': '10 steps',
    'model.width': 8,
    'model.num_heads': 2,
    'model.mlp_dim': 8,
    'model.depth': 1,
    'optim.lr': 0.03,
    'data.split': 'train',
}


def test_every_model_has_a_run():
    models = pathlib.Path(vit_jax.models.__path__[0]).glob('[!_]*.py')
    found = {read_config(GOLDEN / name).model.name for name in COMPLETE}
    without = {
        'base',
        'dpt',
        'inception',
        'rf_detr',
        'sam_encoder',
        'tips',
    }  # rows in helpers/doors
    assert found == {path.stem for path in models} - without


@pytest.mark.slow
@pytest.mark.parametrize(
    'name',
    [pytest.param(name, marks=[pytest.mark.long] * (name not in EVALUATED)) for name in COMPLETE],
)
def test_a_complete_old_run_is_evaluated(name, tmp_path, capsys):
    """To the numbers that were written when it ended."""
    folder = shutil.copytree(GOLDEN / name, tmp_path / 'run')
    result = evaluated(folder, capsys)
    assert result.pop('step') == run_folder.steps(folder)[-1]
    # AP of sizes of which there is no object was -1.
    measured = {k: v for k, v in run_folder.read_result(folder).items() if v != -1}
    assert result == pytest.approx(measured, abs=1e-5)


@pytest.fixture
def digits(tmp_path: pathlib.Path) -> pathlib.Path:
    return shutil.copytree(GOLDEN / 'run_digits', tmp_path / 'digits')


@pytest.fixture
def reverse(tmp_path: pathlib.Path) -> pathlib.Path:
    return shutil.copytree(GOLDEN / 'run_reverse', tmp_path / 'reverse')


def train(config: pathlib.Path, flags: dict[str, object], workdir: pathlib.Path) -> None:
    words = [f'--config.{name}={value}' for name, value in flags.items()]
    assert main(['train', '--config', f'{config}:smoke', *words, '--workdir', str(workdir)]) == 0


def evaluated(workdir: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> dict[str, float]:
    assert main(['evaluate', '--workdir', str(workdir), '--json']) == 0
    return json.loads(capsys.readouterr().out)


def last(workdir: pathlib.Path, name: str) -> tuple[int, float]:
    """The step and the value of the newest line that has the metric."""
    lines = map(json.loads, (workdir / 'metrics.jsonl').read_text().splitlines())
    return [(line['step'], line[name]) for line in lines if name in line][-1]


def test_the_config_of_an_old_run_is_read(digits, reverse):
    assert read_config(digits).model.mlp_dim == 32
    assert read_config(digits).task.mixup == 0.2
    assert read_config(reverse).data.buckets == (8, 13)


@pytest.mark.slow
def test_an_old_run_is_evaluated(digits, capsys):
    result = evaluated(digits, capsys)
    assert result['step'] == 10
    assert result['test/loss'] == pytest.approx(2.302735424041748, abs=1e-5)


@pytest.mark.slow
def test_an_old_run_goes_on_where_it_stopped(digits, repo, capsys):
    train(repo / 'experiments/vit/digits.py', DIGITS, digits)
    assert 'resumes after step 10' in capsys.readouterr().out
    assert last(digits, 'test/loss') == (20, pytest.approx(2.3043349107106526, abs=1e-5))
    assert last(digits, 'train/loss') == (20, pytest.approx(2.323788952827454, abs=1e-5))


@pytest.mark.slow
def test_an_old_run_that_is_complete_says_so(reverse, repo, capsys):
    train(repo / 'experiments/translate/synthetic.py', REVERSE, reverse)
    assert 'complete: test/loss 2.5516' in capsys.readouterr().out
    assert evaluated(reverse, capsys)['test/loss'] == pytest.approx(2.551556253285469, abs=1e-5)
