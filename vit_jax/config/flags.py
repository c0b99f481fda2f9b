"""`--config.a.b=v`: flags that set a value of a config."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from ml_collections import ConfigDict

from vit_jax.config import schema, values
from vit_jax.errors import UserError, nearest
from vit_jax.signatures import Parameters


def split(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """`--config.a=1` and `--config.a 1` as overrides `a=1`, and all other words."""
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
    """Sets one value of a config, given as `a.b=v`, of the type that its constructor wants.

    The config file may have left out the key and its group.

    Raises:
      UserError: no such key, no value, or one of another type.
    """
    dotted, equals, text = override.partition('=')
    if not equals:
        raise UserError(f'--config.{dotted}: give a value, as in --config.{dotted}=VALUE')
    *parents, leaf = dotted.split('.')
    node = config
    for i in range(len(parents)):
        node = _group(config, node, parents[: i + 1], dotted)
    allowed: tuple[type, ...] = ()  # any, of a model that is not known yet
    if parents != ['model'] or not schema.follows(config):
        known = schema.parameters(config, '.'.join(parents))
        allowed = _allowed(node, known, leaf, dotted, '.'.join(['config', *parents]))
    try:
        value = values.parse(text, allowed)
    except ValueError as e:
        raise UserError(f'--config.{dotted}={text}: expected {values.names(allowed)}') from e
    _set(config, node, leaf, value)


def _group(config: ConfigDict, node: ConfigDict, path: Sequence[str], dotted: str) -> ConfigDict:
    """The group at `path` of a config, with parent `node`; created if its constructor knows it."""
    *parents, key = path
    where, known = '.'.join(['config', *parents]), schema.parameters(config, '.'.join(parents))
    if key not in node:
        if key not in known or values.kinds(known[key]) != (dict,):
            raise _unknown(dotted, where, key, {*node, *known})
        _set(config, node, key, ConfigDict())
    if not isinstance(node[key], ConfigDict):
        raise UserError(f'--config.{dotted}: {where}.{key} is a value and has no keys')
    return node[key]


def _allowed(
    node: ConfigDict, known: Parameters, leaf: str, dotted: str, where: str
) -> tuple[type, ...]:
    """The types of a value, from the constructor or else from the value that the file gives."""
    if leaf not in node and leaf not in known:
        raise _unknown(dotted, where, leaf, {*node, *known})
    allowed = values.kinds(known[leaf]) if leaf in known else ()
    value = node.get(leaf)
    if allowed == (dict,) or isinstance(value, ConfigDict):
        keys = value or (schema.parameters(node, leaf) if where == 'config' else ())
        hint = f'; set one of its keys: {", ".join(keys)}' if keys else ''
        raise UserError(f'--config.{dotted} is a group{hint}')
    return allowed or (() if value is None else (type(value),))


def _unknown(dotted: str, where: str, key: str, valid: Iterable[str]) -> UserError:
    return UserError(f'--config.{dotted}: ' + nearest(f'key of {where}', key, valid))


def _set(config: ConfigDict, node: ConfigDict, key: str, value: Any) -> None:
    """Sets a checked value, which may have another type than the present one."""
    with config.unlocked(), config.ignore_type():
        node[key] = value
