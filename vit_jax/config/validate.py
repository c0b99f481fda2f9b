"""Validation of a config before anything is built or written."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from ml_collections import ConfigDict

from vit_jax.checkpoints.best import EarlyStop, parse_goal
from vit_jax.config import defaults, durations, objects, schema
from vit_jax.config.durations import Every
from vit_jax.config.origin import Branch, Init
from vit_jax.errors import UserError
from vit_jax.signatures import keyword_only

# Lower bounds of model sizes, for every model; a stack may have no blocks.
_LEAST = {
    'patch_size': 1,
    'width': 1,
    'mlp_dim': 1,
    'embed_dim': 1,
    'num_heads': 1,
    'representation_size': 1,
    'depth': 0,
}
# Lower bounds for reading data, from any source.
_LEAST_OF_DATA = {'batch_size': 1, 'workers': 0, 'threads': 0, 'stall_seconds': 0}
_SEEDS = 2**63  # JAX takes a signed number of 64 bits


def validate(config: ConfigDict) -> None:
    """Checks a config before anything is built or written.

    Raises:
      UserError: for a key that is missing, unknown or has a value of the wrong type or range; a
        number that is not finite; a length that is no duration.
    """
    schema.check_known(config, schema.parameters(config, ''), 'config')
    schema.check_complete(config)
    schema.check(config, schema.parameters(config, ''), 'config')
    for place in _places(config):
        if not place.startswith('evals'):
            schema.check(
                defaults.at(config, place), schema.parameters(config, place), f'config.{place}'
            )
    for name, section in config.evals.items():
        objects.make_evaluator(section, f'config.evals.{name}')
    _check_finite(config, 'config')
    if durations.parse_duration(config.total, 'config.total')[0] <= 0:
        raise UserError(f'config.total={config.total!r}: must be positive')
    if config.batch_size < 1:
        raise UserError(f'config.batch_size={config.batch_size}: must be at least 1')
    if not 0 <= config.seed < _SEEDS:
        raise UserError(f'config.seed={config.seed}: must be 0 or more, and less than 2**63')
    _check_sizes(config)
    _check_ranges(config)


def _check_sizes(config: ConfigDict) -> None:
    _check_least(config.model, _LEAST, 'config.model')
    _check_least(config.data, _LEAST_OF_DATA, 'config.data')
    for name, section in config.evals.items():
        _check_least(section, _LEAST_OF_DATA, f'config.evals.{name}')


def _check_least(section: ConfigDict, least: dict[str, int], where: str) -> None:
    for key, smallest in least.items():
        value = section.get(key)
        if isinstance(value, (int, float)) and value < smallest:
            raise UserError(f'{where}.{key}={value}: must be at least {smallest}')


def _places(config: ConfigDict) -> Iterator[str]:
    """The sections of a config, including nested ones."""
    for section in keyword_only(schema.Config):
        if section not in config or not isinstance(config[section], ConfigDict):
            continue
        yield section
        if section == 'evals':
            yield from (f'evals.{name}' for name in config.evals)
        yield from (place for place in schema.within(section) if defaults.at(config, place))


def _check_ranges(config: ConfigDict) -> None:
    """Calls the constructors that check ranges, so that they refuse now; nothing is computed."""
    _check_model(config)
    Every(**defaults.arguments(config, 'every'))
    init, branch = (
        cls(**defaults.arguments(config, place))
        for cls, place in ((Init, 'init'), (Branch, 'branch'))
    )
    if branch.from_ and init.from_:
        raise UserError('config: a run starts from config.branch or config.init, not both')
    EarlyStop(**defaults.arguments(config, 'early_stop'))
    if keep_best := defaults.arguments(config, 'checkpoint')['keep_best']:
        parse_goal(keep_best, 'config.checkpoint.keep_best')
    for name in config.get('writers', ()):
        if not isinstance(name, str):
            raise UserError(f'config.writers: {name!r} is no name')
        schema.writer_class(name)
    step = defaults.arguments(config, 'step') | {'ema_schedule': {'name': 'constant'}}
    schema.constructor('step')(None, None, None, **step)  # a schedule needs the length of the run


def _check_model(config: ConfigDict) -> None:
    """Makes the model, with some number of classes or ids where that of the data is left open."""
    if schema.follows(config):
        return
    model = config.model.to_dict()
    open_ = {key: 1000 for key in schema.LEFT_OPEN if key in model and model[key] is None}
    objects.make_model(ConfigDict({'model': model | open_}))


def _check_finite(node: Any, path: str) -> None:
    if isinstance(node, (ConfigDict, dict)):
        for key, value in node.items():
            _check_finite(value, f'{path}.{key}')
    elif isinstance(node, (tuple, list)):
        for i, value in enumerate(node):
            _check_finite(value, f'{path}.{i}')
    elif isinstance(node, float) and not math.isfinite(node):
        raise UserError(f'{path}={node}: must be a finite number')
