"""The keys of a config are those of the constructors, and sizes left open come from the data."""

import dataclasses
import pathlib
from collections.abc import Callable

import pytest
from ml_collections import ConfigDict

from vit_jax.config import load as config_lib
from vit_jax.config import schema
from vit_jax.data.records import SourceInfo
from vit_jax.errors import UserError

DIGITS = 'experiments/vit/digits.py'
KEYS = {
    'optim.schedule': 'name warmup cooldown timescale boundaries factor init final',
    'step': 'accum_steps ema_decay max_skips',
    'every': 'log eval checkpoint',
    'checkpoint': 'keep_last keep_every',
    'parallel': 'strategy fsdp tensor rules min_split_size',
    'data': 'source split classes transforms vocab buckets sizes workers threads cache '
    'stall_seconds',
    'init': 'from posemb',
    'branch': 'from step',
}


@pytest.fixture
def config(repo: pathlib.Path) -> ConfigDict:
    return config_lib.load(f'{repo}/{DIGITS}')


@pytest.mark.parametrize('section', KEYS)
def test_what_the_trainer_passes_is_no_key(config: ConfigDict, section: str) -> None:
    assert set(schema.parameters(config, section)) == set(KEYS[section].split())


def test_keys_of_an_optimizer_are_those_of_optax(config: ConfigDict) -> None:
    keys = set(schema.parameters(config, 'optim'))
    assert {'name', 'lr', 'weight_decay', 'schedule', 'layer_decay', 'b1', 'b2', 'eps'} <= keys
    assert not keys & {'params', 'total_steps', 'to_steps', 'learning_rate', 'mask', 'kwargs'}


def test_keys_of_model_and_task_are_their_fields(config: ConfigDict) -> None:
    for section, cls in (('model', schema.model_class), ('task', schema.task_class)):
        fields = {f.name for f in dataclasses.fields(cls(config))} - {'parent'}
        assert set(schema.parameters(config, section)) == fields | {'name'}


def test_keys_of_an_entry_depend_on_its_evaluator() -> None:
    plain, learning = ({'evaluator': name} if name else {} for name in (None, 'knn'))
    data = set(KEYS['data'].split())
    entry = data | {'evaluator', 'every', 'batch_size'}
    assert set(schema.entry_parameters(plain)) == entry
    assert set(schema.entry_parameters(learning)) == entry | {'fit', 'k', 'temperature'}
    assert set(schema.entry_parameters({'evaluator': 'bleu'})) == entry | {'edges'}


def test_arguments_are_complete_and_suit_the_constructor(config: ConfigDict) -> None:
    config = config_lib.override(config, ['init.from=a.npz', 'step.max_skips=3'])
    assert schema.arguments(config, 'init') == {'from_': 'a.npz', 'posemb': 'bilinear'}
    assert schema.constructor('init')(**schema.arguments(config, 'init')).from_ == 'a.npz'
    assert schema.arguments(config, 'branch') == {'from_': '', 'step': 0}
    step = {'accum_steps': 1, 'ema_decay': config.step.ema_decay, 'max_skips': 3}
    assert schema.arguments(config, 'step') == step


def info(num_classes: int = 0, vocab_size: int = 0) -> SourceInfo:
    return SourceInfo(num_classes, (), vocab_size)


def test_classes_come_from_the_data(config: ConfigDict) -> None:
    complete = schema.complete(config, info(num_classes=10))
    assert complete.model.num_classes == 10
    assert config.model.num_classes is None
    assert schema.complete(complete, info(num_classes=9)).to_dict() == complete.to_dict()
    with pytest.raises(UserError, match='11 classes'):
        schema.complete(complete, info(num_classes=11))


def test_the_vocabulary_fills_the_size_of_the_model(config: ConfigDict) -> None:
    assert 'vocab_size' not in schema.complete(config, info(10, vocab_size=8000)).model
    with config.unlocked():
        config.model.vocab_size = None
    assert schema.complete(config, info()).model.vocab_size is None
    complete = schema.complete(config, info(vocab_size=8000))
    assert complete.model.vocab_size == 8000
    with pytest.raises(UserError, match=r'vocab_size=8000: .* has 8001 ids'):
        schema.complete(complete, info(vocab_size=8001))


@pytest.mark.parametrize(
    'changed',
    [
        lambda config: config_lib.override(config, ['optim.lr=1.0', 'init.from=a', 'seed=7']),
        lambda config: schema.complete(config, info(num_classes=10)),
    ],
)
def test_the_config_that_is_given_stays_as_it_is(
    config: ConfigDict, changed: Callable[[ConfigDict], ConfigDict]
) -> None:
    before = config_lib.to_json(config)
    assert config_lib.to_json(changed(config)) != before
    assert config_lib.to_json(config) == before
