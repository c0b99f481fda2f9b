"""A section with its defaults, sizes that come from the data, and where two configs differ."""

import pathlib
from collections.abc import Callable

import pytest
from ml_collections import ConfigDict

from vit_jax.config import defaults, load, schema
from vit_jax.config.run import Branch, Init, Run, Step
from vit_jax.data.records import SourceInfo
from vit_jax.errors import UserError
from vit_jax.nn import options


@pytest.fixture
def config(repo: pathlib.Path) -> ConfigDict:
    return load.load(f'{repo}/experiments/vit/digits.py')


def test_sections_are_complete(config: ConfigDict) -> None:
    config = load.override(config, ['init.from=a.npz', 'step.max_skips=3', 'optim.b2=0.9'])
    run = load.to_run(config)
    assert run.init == Init(checkpoint='a.npz')
    assert run.branch == Branch()
    assert run.step == Step(ema_decay=config.step.ema_decay, max_skips=3)
    assert run.optim.options == {'b2': 0.9}
    assert run.model.options['width'] == config.model.width
    assert run.evals['test'].split == 'test'
    assert load.section(config, Init) == run.init
    assert schema.make_section(Run, schema.to_group(run), 'config') == run


def test_an_evaluation_has_the_vocabulary_of_training_unless_it_names_another(
    config: ConfigDict,
) -> None:
    data = {'vocab': 'a', 'source': 'text:x', 'split': 'train'}
    entry = {'source': 'text:x', 'split': 'test'}
    evals = {'same': entry, 'other': {**entry, 'vocab': 'b'}, 'none': {**entry, 'vocab': None}}
    groups = config.to_dict() | {'data': data, 'evals': evals}
    found = load.to_run(ConfigDict(groups)).evals
    assert [found[name].vocab for name in evals] == ['a', 'b', None]


def info(num_classes: int = 0, vocab_size: int = 0) -> SourceInfo:
    return SourceInfo(num_classes, (), vocab_size)


def test_classes_come_from_the_data(config: ConfigDict) -> None:
    complete = defaults.fill_sizes(config, info(num_classes=10))
    assert complete.model.num_classes == 10
    assert config.model.num_classes is None
    assert defaults.fill_sizes(complete, info(num_classes=9)).to_dict() == complete.to_dict()
    with pytest.raises(UserError, match='11 classes'):
        defaults.fill_sizes(complete, info(num_classes=11))


def test_the_vocabulary_fills_the_size_of_the_model(config: ConfigDict) -> None:
    assert 'vocab_size' not in defaults.fill_sizes(config, info(10, vocab_size=8000)).model
    with config.unlocked():
        config.model.vocab_size = None
    assert defaults.fill_sizes(config, info()).model.vocab_size is None
    complete = defaults.fill_sizes(config, info(vocab_size=8000))
    assert complete.model.vocab_size == 8000
    with pytest.raises(UserError, match=r'vocab_size=8000: .* has 8001 ids'):
        defaults.fill_sizes(complete, info(vocab_size=8001))


@pytest.mark.parametrize(
    'changed',
    [
        lambda config: load.override(config, ['optim.lr=1.0', 'init.from=a', 'seed=7']),
        lambda config: defaults.fill_sizes(config, info(num_classes=10)),
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


def test_flat_fields_of_earlier_versions_are_no_difference(config: ConfigDict) -> None:
    new = load.override(config, ['model.pool.kind=map', 'model.positions.std=0.1'])
    old = ConfigDict(new.to_dict())
    groups = old.model.to_dict()
    flat = {key: groups.pop(key) for key in ('pool', 'positions', 'head', 'block') if key in groups}
    old.model = ConfigDict(options.flat_fields({**groups, **flat}))
    assert old.model.pool == 'map' and old.model.posemb_std == 0.1
    assert defaults.differences(old, new) == []
    assert list(defaults.function_changes(old, new)) == []
    assert load.override(old, ()).model.to_dict() == new.model.to_dict()
    other = load.override(new, ['model.gelu=erf', 'model.posemb_std=0.2'])
    assert defaults.differences(old, other) == ['model']
    assert [*defaults.function_changes(old, other)] == [('model.block.gelu', 'tanh', 'erf')]


@pytest.mark.parametrize(
    'override',
    ['model.pool.knd=map', 'model.block=1', 'model.block.norm_pre=2', 'model.pool.x.y=1'],
)
def test_mistakes_in_groups_of_the_model(config: ConfigDict, override: str) -> None:
    with pytest.raises(UserError, match=r'config\.model'):
        load.override(config, [override])


@pytest.mark.parametrize(('place', 'key'), [('evals', 'test'), ('data', ''), ('optim', '')])
def test_a_damaged_config_names_the_place_of_a_missing_key(
    config: ConfigDict, place: str, key: str
) -> None:
    groups = config.to_dict()
    section = groups[place][key] if key else groups[place]
    missing = 'name' if place == 'optim' else 'split'
    del section[missing]
    with pytest.raises(UserError, match=rf"config.{place}.*'{missing}'"):
        load.to_run(ConfigDict(groups))


def test_a_number_in_place_of_a_group_of_the_model_is_refused(config: ConfigDict) -> None:
    damaged = ConfigDict(config.to_dict())
    damaged.model.block = 0.5
    with pytest.raises(UserError, match=r'config\.model\.block'):
        list(defaults.function_changes(config, damaged))
