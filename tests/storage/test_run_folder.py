"""A run folder tells its config, its metrics, its result and its checkpoints, and nothing more."""

import json
import pathlib
import shutil

import numpy as np
import pytest
from etils import epath

from vit_jax.checkpoints import manifest
from vit_jax.errors import UserError
from vit_jax.storage import run_folder

GOLDEN = pathlib.Path(__file__).parents[1] / 'golden'


@pytest.fixture
def folder(tmp_path: pathlib.Path) -> pathlib.Path:
    return shutil.copytree(GOLDEN / 'run_digits', tmp_path / 'lr=[0.1]')


@pytest.mark.parametrize('kind', [pathlib.Path, epath.Path])
def test_what_a_stopped_run_tells(folder, kind):
    folder = kind(folder)
    config = run_folder.read_config(folder)
    assert (config['model']['width'], config['total']) == (16, '20 steps')
    assert run_folder.read_result(folder) is None
    assert [line['step'] for line in run_folder.read_metrics(folder)] == [10, 10]
    assert run_folder.steps(folder) == [10]
    assert run_folder.count_parameters(folder) == 80 + 2224 + 32 + 170  # patches, block, norm, head
    assert run_folder.read_meta(run_folder.newest(folder))['num_examples'] == 1437


def test_what_an_empty_folder_tells(tmp_path):
    assert run_folder.read_config(tmp_path) is None
    assert run_folder.read_result(tmp_path) is None
    assert run_folder.read_series(tmp_path) == {}
    assert run_folder.steps(tmp_path) == []
    assert run_folder.count_parameters(tmp_path) is None


def test_a_series_has_every_step_once_and_in_order(tmp_path):
    lines = [{'step': s, 'loss': v, 'note': 'x'} for s, v in ((2, 3.0), (1, 4.0), (2, 2.5))]
    text = ''.join(json.dumps(line) + '\n' for line in lines)
    (tmp_path / run_folder.METRICS).write_text(text + '{"step": 3, "lo')
    series = run_folder.read_series(tmp_path)
    assert series.keys() == {'loss'}
    np.testing.assert_array_equal(series['loss'], [[1, 2], [4.0, 2.5]])


def test_a_config_that_cannot_be_read_is_named(tmp_path):
    (tmp_path / run_folder.CONFIG).write_text('{')
    with pytest.raises(UserError, match=r'config\.json'):
        run_folder.read_config(tmp_path)


def test_runs_are_found_at_any_depth(tmp_path):
    with pytest.raises(UserError, match='holds no run'):
        run_folder.find_runs(tmp_path)
    runs = [tmp_path / 'a', tmp_path / 'b' / '0001']
    for run in runs:
        run.mkdir(parents=True)
        (run / run_folder.CONFIG).write_text('{}')
    assert run_folder.find_runs(tmp_path) == runs
    assert run_folder.find_runs(runs[0]) == runs[:1]


@pytest.mark.parametrize('name', [run_folder.MANIFEST, run_folder.COMMITTED])
def test_a_step_without_manifest_or_mark_is_not_finished(folder, name):
    (run_folder.newest(folder) / name).unlink()
    assert run_folder.steps(folder) == []
    assert run_folder.step_numbers(folder / run_folder.CHECKPOINTS) == [10]


@pytest.mark.parametrize('kind', [pathlib.Path, epath.Path])
def test_what_a_killed_save_left_is_found_whatever_the_folder_is_called(folder, kind):
    checkpoints = kind(folder) / run_folder.CHECKPOINTS
    left = checkpoints / '20.orbax-checkpoint-tmp-7'
    left.mkdir()
    assert manifest.uncommitted_step(checkpoints, 20) == left
    manifest.clear_newer(checkpoints, 10)
    assert not left.exists()
    assert run_folder.steps(kind(folder)) == [10]


def test_a_manifest_without_fingerprints_is_damaged(tmp_path):
    step = tmp_path / '3'
    step.mkdir()
    (step / run_folder.COMMITTED).touch()
    (step / run_folder.MANIFEST).write_text('{"step": 3, "files": {"meta": 7}}')
    with pytest.raises(run_folder.Damaged, match="no fingerprint of 'meta'"):
        run_folder.read_manifest(step)
