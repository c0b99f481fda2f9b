"""A section with its defaults, sizes that come from the data, and where two configs differ."""

import pathlib
from collections.abc import Callable

import pytest
from ml_collections import ConfigDict

from vit_jax.config import defaults, load, schema
from vit_jax.data.records import SourceInfo
from vit_jax.errors import UserError


@pytest.fixture
def config(repo: pathlib.Path) -> ConfigDict:
    return load.load(f'{repo}/experiments/vit/digits.py')


def test_arguments_are_complete_and_suit_the_constructor(config: ConfigDict) -> None:
    config = load.override(config, ['init.from=a.npz', 'step.max_skips=3'])
    assert defaults.arguments(config, 'init') == {
        'from_': 'a.npz',
        'posemb': '',
        'select': '',
        'classes': '',
        'into': '',
    }
    assert schema.constructor('init')(**defaults.arguments(config, 'init')).from_ == 'a.npz'
    assert defaults.arguments(config, 'branch') == {'from_': '', 'step': 0}
    step = defaults.arguments(config, 'step')
    constant = {'name': 'constant'}
    assert dict(step.pop('ema_schedule')) == dict(step.pop('sam_schedule')) == constant
    assert dict(step.pop('sam')) == {}
    assert step == {'accum_steps': 1, 'ema_decay': config.step.ema_decay, 'max_skips': 3}


def info(num_classes: int = 0, vocab_size: int = 0) -> SourceInfo:
    return SourceInfo(num_classes, (), vocab_size)


def test_classes_come_from_the_data(config: ConfigDict) -> None:
    complete = defaults.complete(config, info(num_classes=10))
    assert complete.model.num_classes == 10
    assert config.model.num_classes is None
    assert defaults.complete(complete, info(num_classes=9)).to_dict() == complete.to_dict()
    with pytest.raises(UserError, match='11 classes'):
        defaults.complete(complete, info(num_classes=11))


def test_the_vocabulary_fills_the_size_of_the_model(config: ConfigDict) -> None:
    assert 'vocab_size' not in defaults.complete(config, info(10, vocab_size=8000)).model
    with config.unlocked():
        config.model.vocab_size = None
    assert defaults.complete(config, info()).model.vocab_size is None
    complete = defaults.complete(config, info(vocab_size=8000))
    assert complete.model.vocab_size == 8000
    with pytest.raises(UserError, match=r'vocab_size=8000: .* has 8001 ids'):
        defaults.complete(complete, info(vocab_size=8001))


@pytest.mark.parametrize(
    'changed',
    [
        lambda config: load.override(config, ['optim.lr=1.0', 'init.from=a', 'seed=7']),
        lambda config: defaults.complete(config, info(num_classes=10)),
    ],
)
def test_the_config_that_is_given_stays_as_it_is(
    config: ConfigDict, changed: Callable[[ConfigDict], ConfigDict]
) -> None:
    before = load.to_json(config)
    assert load.to_json(changed(config)) != before
    assert load.to_json(config) == before


@pytest.mark.parametrize(
    ('override', 'places'),
    [
        ('seed=7', ['seed']),
        ('optim.lr=1.0', ['optim']),
        ('optim.schedule.warmup=5%', ['optim.schedule']),
        ('model.width=192', ['model']),
        ('init.from=a.npz', ['init']),
        ('evals.test.split=test[:9]', ['evals']),
        # What a constructor has by default may be said.
        ('init.posemb=', []),
        ('model.dropout=0.0', []),
        ('optim.eps=1e-8', []),
        ('optim.schedule.factor=0.1', []),
        ('data.threads=None', []),
    ],
)
def test_where_two_configs_differ(config: ConfigDict, override: str, places: list[str]) -> None:
    stored = load.from_json(load.to_json(config))
    assert defaults.differences(stored, config) == []
    assert defaults.differences(stored, load.override(config, [override])) == places
