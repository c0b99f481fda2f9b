"""What can be seen to be wrong with a config before anything is built or written."""

from __future__ import annotations

import math
from typing import Any

from ml_collections import ConfigDict

from vit_jax.config import construct, durations
from vit_jax.config.sections import (
    FIELDS,
    KEYS,
    OPTIONAL,
    POSEMBS,
    REQUIRED,
    SECTIONS,
    check_data,
    check_keywords,
    fields,
    keywords,
)
from vit_jax.errors import UserError, nearest

LEAST = {'batch_size': 1, 'step.accum_steps': 1, 'step.max_skips': 0, 'checkpoint.keep_last': 1}


def validate(config: ConfigDict) -> None:
    """Rejects what can be seen to be wrong before anything is built or written.

    Raises:
      UserError: a missing section, a NaN, a batch or duration that is not
        positive, a keyword that a constructor does not take.
    """
    _check_keys(config)
    _check_sections(config)
    _check_numbers(config)
    check_keywords(construct.model_class(config), config.model, 'config.model')
    check_keywords(construct.task_class(config), config.task, 'config.task')
    _check_optional(config)
    check_data(config.data, 'config.data')
    for name, section in config.evals.items():
        construct.make_evaluator(section, f'config.evals.{name}')


def _check_keys(config: ConfigDict) -> None:
    for key in KEYS:
        if key not in config:
            raise UserError(f'config: the key {key!r} is missing')
    for key in config:
        if key not in (*KEYS, *OPTIONAL):
            raise UserError('config: ' + nearest('key', key, (*KEYS, *OPTIONAL)))


def _check_sections(config: ConfigDict) -> None:
    for name in SECTIONS:
        _check_type(f'config.{name}', config[name], ConfigDict)
    for name, section in config.evals.items():
        _check_type(f'config.evals.{name}', section, ConfigDict)
    if 'schedule' in config.optim:
        _check_type('config.optim.schedule', config.optim.schedule, ConfigDict)
    for name in ('seed', 'batch_size'):
        _check_type(f'config.{name}', config[name], int)
    for name, keys in REQUIRED.items():
        for key in keys:
            if key not in config[name]:
                raise UserError(f'config.{name}: the key {key!r} is missing')
    for name, defaults in FIELDS.items():
        for key, value in keywords(config[name]).items():
            if key not in defaults:
                raise UserError(f'config.{name}: ' + nearest('key', key, defaults))
            _check_type(f'config.{name}.{key}', value, type(defaults[key]))


def _check_type(where: str, value: Any, kind: type) -> None:
    if not isinstance(value, (int, float) if kind is float else kind):
        what = {ConfigDict: 'a group of keys'}.get(kind, kind.__name__)
        raise UserError(f'{where}={value!r}: expected {what}')


def _check_numbers(config: ConfigDict) -> None:
    for path, value in _leaves(config):
        if isinstance(value, float) and not math.isfinite(value):
            raise UserError(f'config.{path}={value}: must be a finite number')
    for path, least in LEAST.items():
        if (value := _at(config, path, least)) < least:
            raise UserError(f'config.{path}={value}: must be at least {least}')
    lengths = {'total': config.total, 'every.log': fields(config, 'every')['log']}
    for path, value in lengths.items():
        if durations.parse_duration(value, f'config.{path}')[0] <= 0:
            raise UserError(f'config.{path}={value!r}: must be positive')


def _leaves(node: Any, prefix: str = '') -> list[tuple[str, Any]]:
    if isinstance(node, (ConfigDict, dict)):
        return [x for k, v in node.items() for x in _leaves(v, f'{prefix}{k}.')]
    if isinstance(node, (tuple, list)):
        return [x for i, v in enumerate(node) for x in _leaves(v, f'{prefix}{i}.')]
    return [(prefix[:-1], node)]


def _at(config: ConfigDict, dotted: str, default: Any) -> Any:
    node: Any = config
    for key in dotted.split('.'):
        if key not in node:
            return default
        node = node[key]
    return node


def _check_optional(config: ConfigDict) -> None:
    for name, default in OPTIONAL.items():
        for key in config.get(name, {}):
            if key not in default:
                raise UserError(f'config.{name}: ' + nearest('key', key, default))
    init, branch = ({**OPTIONAL[k], **config.get(k, {})} for k in ('init', 'branch'))
    if init['posemb'] not in POSEMBS:
        raise UserError('config.init.posemb: ' + nearest('method', init['posemb'], POSEMBS))
    if branch['from'] and init['from']:
        raise UserError('config: a run starts from config.branch or config.init, not both')
