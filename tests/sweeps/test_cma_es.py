"""CMA-ES: as Optuna's own, but for its state, which no storage can forge."""

import io
import pickle

import numpy as np
import pytest

pytest.importorskip('optuna')
pytest.importorskip('cmaes')

import optuna
from helpers.studies import ids, make
from optuna.distributions import FloatDistribution, IntDistribution
from optuna.trial import TrialState

from vit_jax.__main__ import main
from vit_jax.sweeps import search, space
from vit_jax.sweeps.space import log_uniform

RANGES = {  # in the order of the alphabet, as Optuna has them
    'depth': IntDistribution(1, 20),
    'lr': FloatDistribution(1e-6, 1.0, log=True),
    'momentum': FloatDistribution(-0.5, 0.5),
    'width': IntDistribution(1, 1000, log=True),
}


def height(trial):
    """Highest at lr = 0.001, momentum = 0.1, depth = 7, width = 100."""
    lr = np.log10(trial.suggest_float('lr', 1e-6, 1.0, log=True)) + 3
    momentum = trial.suggest_float('momentum', -0.5, 0.5) - 0.1
    depth = trial.suggest_int('depth', 1, 20) / 10 - 0.7
    width = np.log10(trial.suggest_int('width', 1, 1000, log=True)) - 2
    return -float(lr**2 + momentum**2 + depth**2 + width**2)


@pytest.mark.slow
@pytest.mark.parametrize('direction', ['minimize', 'maximize'])
def test_samples_are_drawn_as_by_optunas_sampler(direction):
    theirs = optuna.samplers.CmaEsSampler(seed=0)
    study = optuna.create_study(sampler=theirs, direction=direction)
    study.optimize(height, n_trials=1 + 3 * 8 + 1)  # a random one, three generations, and one more
    found = search.replay(study, RANGES, seed=0)
    assert found.generation == 3
    asked = [study.ask(RANGES).params for _ in range(1000)]
    expected = np.array([[search.to_unit(d, p[name]) for name, d in RANGES.items()] for p in asked])
    drawn = np.array([found.ask() for _ in range(1000)])
    deviation = expected.std(0)
    assert (np.abs(drawn.mean(0) - expected.mean(0)) < 0.2 * deviation).all()
    np.testing.assert_allclose(drawn.std(0), deviation, rtol=0.1)
    np.testing.assert_allclose(np.corrcoef(drawn.T), np.corrcoef(expected.T), atol=0.15)


def test_every_value_of_a_range_comes_back():
    for distribution, values in {
        RANGES['lr']: [1e-6, 0.003, 1.0],
        RANGES['momentum']: [-0.5, 0.1, 0.5],
        RANGES['depth']: range(1, 21),
        RANGES['width']: range(1, 1001),
    }.items():
        back = [search.from_unit(distribution, search.to_unit(distribution, v)) for v in values]
        assert back == pytest.approx(list(values), rel=1e-12)
        for unit in (0.0, 1.0):
            assert distribution.low <= search.from_unit(distribution, unit) <= distribution.high


def test_samples_of_one_generation_differ_and_are_the_same_again():
    found = []
    for _ in range(2):
        storage = optuna.storages.InMemoryStorage()
        study = optuna.create_study(
            storage=storage, sampler=search.CmaEs(3, storage), direction='maximize'
        )
        study.optimize(height, n_trials=7)
        found.append([trial.params for trial in study.trials])
    assert found[0] == found[1]
    assert len({params['lr'] for params in found[0]}) == 7
    assert [t.system_attrs.get(search.GENERATION) for t in study.trials] == [None, *[0] * 6]


class Payload:
    """Makes a file when it is unpickled."""

    def __init__(self, file):
        self.file = str(file)

    def __reduce__(self):
        return open, (self.file, 'w')


@pytest.mark.slow
@pytest.mark.fault(61)
@pytest.mark.parametrize(
    ('storage', 'first'),
    [
        ('journal', 'cmaes'),
        ('journal', 'tpe'),
        ('sqlite', 'cmaes'),
        pytest.param('sqlite', 'tpe', marks=pytest.mark.long),
    ],
)
def test_a_pickle_in_a_storage_is_never_read(tmp_path, fake_training, storage, first):
    dimensions = {'optim.lr': log_uniform(1e-6, 1.0), 'optim.weight_decay': log_uniform(1e-8, 1e-2)}
    study = make(tmp_path, storage, space=dimensions, trials=3, search=first)
    mark = tmp_path / 'unpickled'
    poison = pickle.dumps(Payload(mark)).hex()
    of_study, first = ids(study, 0)
    study.storage.set_trial_system_attr(first, 'cma:optimizer:0', poison)
    stored = space.to_json(study.sweep) | {'search': 'cmaes'}
    study.storage.set_study_user_attr(of_study, 'sweep', stored)
    fake_training(lambda config, step: config.optim.lr)
    assert main(['sweep', 'work', 'name', '--workdir', str(tmp_path)]) == 0
    assert [trial.state for trial in study.trials()] == [TrialState.COMPLETE] * 3
    assert [t.system_attrs.get(search.GENERATION) for t in study.trials()] == [None, 0, 0]
    assert not mark.exists()
    pickle.load(io.BytesIO(bytes.fromhex(poison)))  # it would have
    assert mark.exists()


@pytest.mark.fault(61)
@pytest.mark.parametrize('url', ['redis://127.0.0.1:1/0', 'journal+redis://127.0.0.1:1/0'])
def test_storages_that_keep_pickles_are_not_opened(tmp_path, capsys, url):
    words = ['sweep', 'work', 'name', '--storage', url, '--workdir', str(tmp_path)]
    assert main(words) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert 'cannot be opened' in line
