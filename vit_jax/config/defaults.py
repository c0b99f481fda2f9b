"""Values that a config leaves out: constructors' defaults, and sizes that depend on the data."""

from __future__ import annotations

import copy
from typing import Any

from ml_collections import ConfigDict

from vit_jax.config import schema
from vit_jax.config.schema import Group
from vit_jax.errors import UserError
from vit_jax.signatures import keyword_only


def keywords(section: Group) -> dict[str, Any]:
    """A section as keywords of its constructor: plain and hashable, without `name`."""
    return {key: _plain(value) for key, value in section.items() if key != 'name'}


def _plain(value: Any) -> Any:
    if isinstance(value, (ConfigDict, dict)):
        return {key: _plain(v) for key, v in value.items()}
    if isinstance(value, (list, tuple)):
        return tuple(_plain(v) for v in value)
    return value


def at(config: ConfigDict, section: str) -> Group:
    """The section at a place such as 'optim.schedule'; empty if the config has none."""
    node: Any = config
    for key in section.split('.'):
        node = node.get(key, {})
    return node


def arguments(config: ConfigDict, section: str) -> dict[str, Any]:
    """A section as keywords of its constructor, completed with the constructor's defaults."""
    given, known = at(config, section), schema.parameters(config, section)
    return {p.name: _plain(given.get(key, p.default)) for key, p in known.items()}


def differences(before: ConfigDict, now: ConfigDict) -> list[str]:
    """The places in which two configs differ, such as 'seed' and 'optim.schedule'.

    A missing key equals its default. `before` may come from anybody: its model and task are
    imported only if `now` names the same.
    """
    sections = keyword_only(schema.Config)
    names = [place for name in sections for place in (name, *schema.within(name))]
    return [name for name in names if _differ(before, now, name)]


def _differ(before: ConfigDict, now: ConfigDict, name: str) -> bool:
    if name in ('model', 'task') and at(before, name).get('name') != at(now, name).get('name'):
        return True
    return _complete(before, name) != _complete(now, name)


def _complete(config: ConfigDict, name: str) -> Any:
    """The keys of one place with their defaults; a group in it is a place of its own."""
    said = at(config, name)
    if not isinstance(said, (ConfigDict, dict)):
        return said
    known = {} if name == 'evals' else schema.parameters(config, name)
    found = {key: p.default for key, p in known.items()}
    found |= {key: _plain(value) for key, value in said.items()}
    return {k: value for k, value in found.items() if f'{name}.{k}' not in schema.SECTIONS}


def complete(config: ConfigDict, info: Any) -> ConfigDict:
    """A copy of a config in which the model has the sizes that depend on the data.

    Args:
      config: not changed.
      info: `num_classes` and `vocab_size` of the data; 0 if they have none.

    Raises:
      UserError: if the data have more classes or ids than the config's model.
    """
    config = copy.deepcopy(config)
    for key, what in schema.LEFT_OPEN.items():
        size = getattr(info, key)
        if key not in config.model or not size:
            continue
        if config.model[key] is None:
            config.model[key] = size
        if config.model[key] < size:
            raise UserError(
                f'config.model.{key}={config.model[key]}: {config.data.source} has {size} '
                f'{what}; leave it unset or raise it'
            )
    return config
