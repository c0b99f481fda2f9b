"""Sizes of a model that come from the data, and comparison of configs."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

from ml_collections import ConfigDict

from vit_jax.config import objects, schema
from vit_jax.config.run import LEFT_OPEN, Run
from vit_jax.config.schema import Group, find_section, to_plain
from vit_jax.errors import UserError

# Keys of a data section that determine inputs and labels, with their defaults.
PREPARATION: Group = {
    'transforms': '',
    **dict.fromkeys(('vocab', 'classes', 'buckets', 'sizes', 'plan')),
}
Change = tuple[str, Any, Any]  # a key such as 'model.dropout', and its old and new values


def differences(before: ConfigDict, after: ConfigDict) -> list[str]:
    """List sections and keys in which two configs differ, such as 'optim.schedule' and 'seed'.

    A missing key equals its default. `before` is not trusted: its model and task are imported only
    if `after` has the same.
    """
    nested = [path for path, _, _ in schema.sections({}) if '.' in path]
    names = [
        name
        for key in schema.fields(Run)
        for name in (key, *(path for path in nested if path.startswith(f'{key}.')))
    ]
    return [name for name in names if _differ(before, after, name)]


def _differ(before: ConfigDict, after: ConfigDict, name: str) -> bool:
    if name in ('model', 'task') and find_section(before, name).get('name') != find_section(
        after, name
    ).get('name'):
        return True
    return _complete(before, name) != _complete(after, name)


def _complete(config: ConfigDict, name: str) -> Any:
    """Return the keys of one section with their defaults, without nested sections."""
    group = find_section(config, name)
    if name == 'evals' or not isinstance(group, (ConfigDict, dict)):
        return to_plain(group)
    declared = schema.parameters(config, name)
    if name == 'model' and group.get('name'):
        return _flat(objects.model_class(group['name']), name, group)
    values = {key: p.default for key, p in declared.items()}
    values |= {key: to_plain(value) for key, value in group.items()}
    nested = {path for path, _, _ in schema.sections({})}
    return {k: v for k, v in values.items() if f'{name}.{k}' not in nested}


def function_changes(before: ConfigDict, after: ConfigDict) -> Iterator[Change]:
    """Yield changed keys of model and task that alter the function the weights compute.

    A missing key equals its default, and an open size equals any. Inert fields may differ, and
    so may the name of code outside of this package. Only `after` is imported.
    """
    for section, find in (('model', objects.model_class), ('task', objects.task_class)):
        old, new = find_section(before, section), find_section(after, section)
        was, name = str(old.get('name')), str(new.get('name'))
        if was != name and not ('.' in was and '.' in name):
            yield f'{section}.name', was, name
            continue
        cls = find(name)
        old_values, new_values = (_flat(cls, section, group) for group in (old, new))
        for key in [
            key for key in {**new_values, **old_values} if not _is_inert(cls, section, key)
        ]:
            old_value, new_value = old_values.get(key), new_values.get(key)
            is_open = section == 'model' and key in LEFT_OPEN and None in (old_value, new_value)
            if old_value != new_value and not is_open:
                yield f'{section}.{key}', old_value, new_value


def _flat(cls: Any, section: str, group: Group) -> dict[str, Any]:
    """Collect the keys of a task, or of a model, such as 'block.gelu', with their defaults."""
    values = {key: to_plain(value) for key, value in group.items()}
    if section == 'model':
        from vit_jax.nn import options  # here, since it imports JAX

        return options.flatten_fields(cls, values)
    return {key: p.default for key, p in schema.class_keys(cls).items()} | values


def _is_inert(cls: Any, section: str, key: str) -> bool:
    if key == 'name':
        return True
    return cls.effect_of(key) == 'none' if section == 'model' else key in cls.inert


def preparation_changes(before: ConfigDict, after: ConfigDict) -> Iterator[Change]:
    """Yield the changed keys in how evaluation and prediction prepare examples.

    Compares evaluations of the same name, and the first ones, which prediction follows.
    """
    old, new = _preparations(before), _preparations(after)
    pairs = {name: name for name in new if name in old} | {next(iter(new)): next(iter(old))}
    for name, other in pairs.items():
        for key in PREPARATION:
            if old[other][key] != new[name][key]:
                yield f'{name}.{key}', old[other][key], new[name][key]


def _preparations(config: ConfigDict) -> dict[str, Group]:
    """Return the `PREPARATION` of every evaluation, or of training if there is no evaluation."""
    entries = {f'evals.{name}': entry for name, entry in config.evals.items()}
    training = {key: config.data.get(key) for key in ('vocab', 'buckets')}
    return {
        name: {
            key: to_plain(entry.get(key) or training.get(key) or default)
            for key, default in PREPARATION.items()
        }
        for name, entry in (entries or {'data': config.data}).items()
    }


def fill_sizes(config: ConfigDict, info: Any) -> ConfigDict:
    """Copy a config and fill in the model's sizes that depend on the data.

    Args:
      config: Not changed.
      info: `num_classes` and `vocab_size` of the data; 0 for none.

    Raises:
      UserError: if the data have more classes or ids than the model.
    """
    config = copy.deepcopy(config)
    for key, unit in LEFT_OPEN.items():
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
