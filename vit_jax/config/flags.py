"""`--config.a.b=v`: flags that replace a value of a config."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from ml_collections import ConfigDict
from ml_collections.config_dict import placeholder

from vit_jax.config import construct
from vit_jax.config.sections import FIELDS, OPTIONAL
from vit_jax.errors import UserError, nearest
from vit_jax.optim import make as optim
from vit_jax.optim import schedules

BOOLS = {'true': True, '1': True, 'false': False, '0': False}


def split(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """`--config.a=1` and `--config.a 1` as overrides `a=1`; and all the other words."""
    overrides, rest, words = [], [], list(argv)
    while words:
        word = words.pop(0)
        if not word.startswith('--config.'):
            rest.append(word)
        elif '=' in word or not words:
            overrides.append(word.removeprefix('--config.'))
        else:
            overrides.append(f'{word.removeprefix("--config.")}={words.pop(0)}')
    return overrides, rest


def apply(config: ConfigDict, override: str) -> None:
    """Sets one value of a locked config, given as `a.b=v`, in the type that it has.

    Raises:
      UserError: no such key, no value, or one of another type.
    """
    dotted, equals, text = override.partition('=')
    if not equals:
        raise UserError(f'--config.{dotted}: give a value, as in --config.{dotted}=VALUE')
    *parents, leaf = dotted.split('.')
    if (section := dotted.partition('.')[0]) in OPTIONAL:
        with config.unlocked():
            config[section] = {**OPTIONAL[section], **config.get(section, {})}
    node, path = _descend(config, parents, dotted)
    defaults = _defaults(config, parents)
    if leaf in defaults and leaf not in node:
        with config.unlocked():
            node[leaf] = defaults[leaf]
    if isinstance(_child(node, leaf, path, dotted, defaults), ConfigDict):
        raise UserError(
            f'--config.{dotted} is a group; set one of its keys: {", ".join(node[leaf])}'
        )
    kind = node.get_type(leaf)
    try:
        node[leaf] = parse_value(text, kind)
    except (TypeError, ValueError) as e:
        raise UserError(f'--config.{dotted}={text}: expected {kind.__name__}') from e


def _descend(config: ConfigDict, parents: list[str], dotted: str) -> tuple[ConfigDict, str]:
    """The group of keys that `parents` lead to, and its name."""
    node, path = config, 'config'
    for key in parents:
        node, path = _child(node, key, path, dotted), f'{path}.{key}'
        if not isinstance(node, ConfigDict):
            raise UserError(f'--config.{dotted}: {path} is a value and has no keys')
    return node, path


def _child(node: ConfigDict, key: str, path: str, dotted: str, more: Iterable[str] = ()) -> Any:
    if key not in node:
        raise UserError(f'--config.{dotted}: ' + nearest(f'key of {path}', key, {*node, *more}))
    return node[key]


def _defaults(config: ConfigDict, parents: list[str]) -> dict[str, Any]:
    """What the constructor of a section has by default: a flag may set what the file leaves out."""
    constructors: dict[str, Callable[[], Callable]] = {
        'model': lambda: construct.model_class(config),
        'task': lambda: construct.task_class(config),
        'optim': lambda: optim.make,
        'optim.schedule': lambda: schedules.make,
    }
    section = '.'.join(parents)
    if section in FIELDS:
        return FIELDS[section]
    if section not in constructors:
        return {}
    fields = inspect.signature(constructors[section]()).parameters
    defaults = {
        name: _unset(field.annotation) if field.default is None else field.default
        for name, field in fields.items()
        if name not in ('name', 'parent') and field.default is not field.empty
    }
    if section == 'optim.schedule':
        defaults |= {name: str(defaults[name]) for name in optim.DURATIONS}
    return defaults


def _unset(annotation: Any) -> Any:
    """A value that is None until a flag sets it, of the type in `int | None` or `float | None`."""
    return placeholder(float if 'float' in str(annotation) else int)


def parse_value(text: str, kind: type) -> Any:
    """`text` as a value of `kind`; raises ValueError if it is none."""
    if kind is str:
        return text
    if kind is bool:
        if text.lower() not in BOOLS:
            raise ValueError(text)
        return BOOLS[text.lower()]
    if kind in (int, float):
        number = float(text)
        if kind is int and not number.is_integer():
            raise ValueError(text)
        return kind(number)
    try:
        value = ast.literal_eval(text)
    except (SyntaxError, ValueError) as e:
        raise ValueError(text) from e
    return tuple(value) if kind is tuple else value
