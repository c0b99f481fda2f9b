"""Sections completed with their defaults and with sizes of the data, and comparison of configs."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

from ml_collections import ConfigDict

from vit_jax.config import schema
from vit_jax.config.schema import Group
from vit_jax.errors import UserError
from vit_jax.signatures import keyword_only

# Keys of a data section that determine inputs and labels, with their defaults.
PREPARATION: Group = {
    'transforms': '',
    **dict.fromkeys(('vocab', 'classes', 'buckets', 'sizes', 'plan')),
}
Change = tuple[str, Any, Any]  # a key such as 'model.posemb', and its old and new values


def keywords(section: Group) -> dict[str, Any]:
    """A section as keywords of its constructor, plain and hashable, without `name`."""
    return {key: _plain(value) for key, value in section.items() if key != 'name'}


def _plain(value: Any) -> Any:
    if isinstance(value, (ConfigDict, dict)):
        return {key: _plain(v) for key, v in value.items()}
    if isinstance(value, (list, tuple)):
        return tuple(_plain(v) for v in value)
    return value


def find_section(config: ConfigDict, section: str) -> Group:
    """The section 'optim.schedule' or the like; empty if the config lacks it."""
    node: Any = config
    for key in section.split('.'):
        node = node.get(key, {})
    return node


def arguments(config: ConfigDict, section: str) -> dict[str, Any]:
    """A section as keywords of its constructor, completed by the defaults."""
    given, known = find_section(config, section), schema.parameters(config, section)
    return {p.name: _plain(given.get(key, p.default)) for key, p in known.items()}


def differences(before: ConfigDict, now: ConfigDict) -> list[str]:
    """The sections and keys in which two configs differ, such as 'optim.schedule' and 'seed'.

    A missing key equals its default. `before` is not trusted: its model and task are imported only
    if `now` has the same.
    """
    sections = keyword_only(schema.Config)
    names = [key for name in sections for key in (name, *schema.nested_sections(name))]
    return [name for name in names if _differ(before, now, name)]


def _differ(before: ConfigDict, now: ConfigDict, name: str) -> bool:
    if name in ('model', 'task') and find_section(before, name).get('name') != find_section(
        now, name
    ).get('name'):
        return True
    return _complete(before, name) != _complete(now, name)


def _complete(config: ConfigDict, name: str) -> Any:
    """The keys of one section with their defaults, without nested sections."""
    given = find_section(config, name)
    if not isinstance(given, (ConfigDict, dict)):
        return given
    known = {} if name == 'evals' else schema.parameters(config, name)
    found = {key: p.default for key, p in known.items()}
    found |= {key: _plain(value) for key, value in given.items()}
    return {k: value for k, value in found.items() if f'{name}.{k}' not in schema.SECTIONS}


def function_changes(before: ConfigDict, now: ConfigDict) -> Iterator[Change]:
    """The changed keys of model and task with which the same weights compute another function.

    A missing key equals its default, and an open size equals any. `inert` fields may differ, and
    so may the name of code outside of this package. Only `now` is imported.
    """
    for section, find in (('model', schema.model_class), ('task', schema.task_class)):
        old, new = find_section(before, section), find_section(now, section)
        was, name = str(old.get('name')), str(new.get('name'))
        if was != name and not ('.' in was and '.' in name):
            yield f'{section}.name', was, name
            continue
        free = {'name', *find(now).inert}
        known = {key: p.default for key, p in schema.parameters(now, section).items()}
        for key in [key for key in {**known, **old, **new} if key not in free]:
            theirs, ours = (_plain(group.get(key, known.get(key))) for group in (old, new))
            is_open = section == 'model' and key in schema.LEFT_OPEN and None in (theirs, ours)
            if theirs != ours and not is_open:
                yield f'{section}.{key}', theirs, ours


def preparation_changes(before: ConfigDict, now: ConfigDict) -> Iterator[Change]:
    """The changed keys in how evaluation and prediction prepare examples.

    Compares evaluations of the same name, and the first ones, which prediction follows.
    """
    old, new = _preparations(before), _preparations(now)
    pairs = {name: name for name in new if name in old} | {next(iter(new)): next(iter(old))}
    for name, other in pairs.items():
        for key in PREPARATION:
            if old[other][key] != new[name][key]:
                yield f'{name}.{key}', old[other][key], new[name][key]


def _preparations(config: ConfigDict) -> dict[str, Group]:
    """The `PREPARATION` of every evaluation, or of training if there is no evaluation."""
    entries = {f'evals.{name}': entry for name, entry in config.evals.items()}
    training = {key: config.data.get(key) for key in ('vocab', 'buckets')}
    return {
        name: {
            key: _plain(entry.get(key) or training.get(key) or default)
            for key, default in PREPARATION.items()
        }
        for name, entry in (entries or {'data': config.data}).items()
    }


def complete(config: ConfigDict, info: Any) -> ConfigDict:
    """Copy a config and fill in the model's sizes that depend on the data.

    Args:
      config: not changed.
      info: `num_classes` and `vocab_size` of the data; 0 for none.

    Raises:
      UserError: if the data have more classes or ids than the model.
    """
    config = copy.deepcopy(config)
    for key, unit in schema.LEFT_OPEN.items():
        size = getattr(info, key)
        if key not in config.model or not size:
            continue
        if config.model[key] is None:
            config.model[key] = size
        if config.model[key] < size:
            raise UserError(
                f'config.model.{key}={config.model[key]}: {config.data.source} has {size} '
                f'{unit}; leave it unset or raise it'
            )
    return config


def precision(arg: str | None) -> tuple[str, dict[str, str]]:
    """The dtypes requested by the argument of an experiment.

    Matmuls are in bfloat16, the default precision of TPUs for float32, and the residual stream is
    in float32 as in the authors' code, or with `fast` also in bfloat16.

    Args:
      arg: of `get_config`, as `S/16,fast`.

    Returns:
      The argument without `fast`, and keywords of `config.model`.
    """
    words = (arg or '').split(',')
    rest = ','.join(word for word in words if word != 'fast')
    residual = {} if 'fast' in words else {'residual_dtype': 'float32'}
    return rest, {'dtype': 'bfloat16', **residual}
