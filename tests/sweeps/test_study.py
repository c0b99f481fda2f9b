"""A study is created whole or not at all, and found again."""

import json

import pytest

pytest.importorskip('optuna')

from helpers.studies import METRIC, make

from vit_jax.errors import UserError
from vit_jax.sweeps import study
from vit_jax.sweeps.space import Sweep, uniform


@pytest.mark.parametrize(
    ('fields', 'message'),
    [
        ({'points': [{'optim.lrr': 0.1}]}, "did you mean 'lr'"),
        ({'points': [{'batch_size': 'x'}]}, 'expected int'),
        ({'space': {'batch_size': uniform(0, 4)}, 'trials': 2}, 'at least 1'),
        ({'points': [{'seed': 1}], 'overrides': {'no': 1}}, "config.*'no'"),
        ({'points': [{'seed': 1}], 'pruner_options': {'x': 1}}, 'pruner_options'),
    ],
)
def test_what_no_trial_could_run_is_refused_at_once(tmp_path, fields, message):
    with pytest.raises(UserError, match=message):
        make(tmp_path / 'study', **fields)
    assert not (tmp_path / 'study').exists()


def test_the_metric_has_to_be_evaluated(tmp_path):
    sweep = Sweep(config='experiments/vit/digits.py', metric='val/loss', points=[{'seed': 0}])
    with pytest.raises(UserError, match=r'unknown evaluation .val. .valid: test'):
        study.create(sweep, 'name', folder=tmp_path)


def test_a_study_is_created_once(tmp_path):
    make(tmp_path, points=[{'seed': 0}])
    with pytest.raises(UserError, match="'name' exists"):
        make(tmp_path, points=[{'seed': 0}])


def test_a_creation_that_was_cut_off_is_made_again(tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(study.space, 'to_json', lambda sweep: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            make(tmp_path, points=[{'seed': 0}])
    with pytest.raises(UserError, match="the study 'name'"):
        study.open_study('name', f'journal:{tmp_path}/journal.log', tmp_path)
    assert len(make(tmp_path, points=[{'seed': 0}]).trials()) == 1


@pytest.mark.slow
def test_workers_need_the_folder_of_the_study(tmp_path):
    url = f'sqlite:///{tmp_path}/a.db'
    sweep = Sweep(config='experiments/vit/digits.py', metric=METRIC, points=[{'seed': 0}])
    made = study.create(sweep, 'name', url, tmp_path / 'here')
    study.require_shared_folder(study.open_study('name', url))
    (tmp_path / 'here').rename(tmp_path / 'there')
    with pytest.raises(UserError, match=r'workers.*share'):
        study.require_shared_folder(study.open_study('name', url))
    moved = study.open_study('name', url, tmp_path / 'there')
    study.require_shared_folder(moved)
    assert moved.run_folder(0) == tmp_path / 'there' / '0001'
    assert made.sweep.metric == moved.sweep.metric


def test_run_folders_count_from_1_and_those_of_earlier_versions_from_0(tmp_path):
    assert make(tmp_path, points=[{'seed': 0}]).run_folder(0).name == '0001'
    log = tmp_path / 'journal.log'
    lines = [line for line in log.read_text().splitlines(True) if '"first"' not in line]
    log.write_text(''.join(lines))
    assert study.open_study('name', '', tmp_path).run_folder(0).name == '0000'


def test_the_marker_names_study_and_storage(tmp_path):
    make(tmp_path, points=[{'seed': 0}])
    marker = json.loads((tmp_path / 'sweep.json').read_text())
    assert marker['study'] == 'name'
    assert marker['storage'] == f'journal:{tmp_path}/journal.log'
