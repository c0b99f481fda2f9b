"""Pruning and searches without training: they find what is better, and the same again."""

import math

import pytest

pytest.importorskip('optuna')

from helpers.studies import make
from optuna.trial import TrialState

from vit_jax.errors import UserError
from vit_jax.sweeps import picture, search, worker
from vit_jax.sweeps.space import choice, grid, log_uniform, uniform


@pytest.mark.slow
@pytest.mark.parametrize('pruner', ['median', pytest.param('hyperband', marks=pytest.mark.long)])
def test_the_pruner_ends_runs_that_are_behind(tmp_path, pruner, fake_training):
    options = {
        'median': {'n_startup_trials': 2},
        'hyperband': {'min_resource': 1, 'max_resource': 3},
    }
    seeds = grid({'seed': list(range(12))})
    made = make(tmp_path, points=seeds, pruner=pruner, pruner_options=options[pruner])
    fake_training(lambda config, step: 1 - 0.01 * config.seed)
    assert worker.work(made).failures == []
    counts = picture.counts(made)
    assert counts['pruned'] and counts['complete'] and counts['pruned'] + counts['complete'] == 12
    ended = next(t for t in made.trials() if t.state == TrialState.PRUNED)
    assert len(ended.intermediate_values) < 3
    assert picture.best(made).params == {'seed': 0}


@pytest.mark.slow
def test_a_search_takes_the_number_of_trials_and_its_seed(tmp_path, fake_training):
    fake_training(lambda config, step: -abs(math.log10(config.optim.lr) + 2))
    found = []
    for folder, pieces in (('a', (5,)), ('b', (2, 3))):
        dimensions = {
            'optim.lr': log_uniform(1e-4, 1e-1),
            'model.depth': uniform(1, 3),
            'task.mixup': choice(0.0, 0.5),
        }
        made = make(tmp_path / folder, space=dimensions, trials=5, search='random')
        for limit in pieces:
            worker.work(made, limit)
        assert worker.work(made).finished == 0
        found.append([trial.params for trial in made.trials()])
    assert found[0] == found[1]
    assert len({params['optim.lr'] for params in found[0]}) == 5
    assert all(isinstance(params['model.depth'], int) for params in found[0])


@pytest.mark.slow
def test_tpe_goes_where_it_is_better(tmp_path, fake_training):
    fake_training(lambda config, step: -abs(math.log10(config.optim.lr) + 2))
    made = make(tmp_path, space={'optim.lr': log_uniform(1e-5, 1.0)}, trials=25)
    worker.work(made)
    values = [trial.value for trial in made.trials()]
    assert sum(values[15:]) / 10 > sum(values[:10]) / 10


@pytest.mark.slow
def test_cmaes_goes_where_it_is_better(tmp_path, fake_training):
    pytest.importorskip('cmaes')

    def height(config, step):
        lr, decay = config.optim.lr, config.optim.weight_decay
        return -abs(math.log10(lr) + 3) - abs(math.log10(decay) + 5)

    fake_training(height)
    dimensions = {'optim.lr': log_uniform(1e-6, 1.0), 'optim.weight_decay': log_uniform(1e-8, 1e-2)}
    made = make(tmp_path, space=dimensions, trials=40, search='cmaes')
    assert worker.work(made).finished == 40
    values = [trial.value for trial in made.trials()]
    assert sum(values[25:]) / 15 > sum(values[:10]) / 10 + 0.5


def test_without_cmaes_one_line_says_what_to_install(monkeypatch):
    monkeypatch.setattr(search.importlib.util, 'find_spec', lambda name: None)
    with pytest.raises(UserError, match=r"pip install -e '.\[sweep\]'"):
        search.require_package('cmaes')
