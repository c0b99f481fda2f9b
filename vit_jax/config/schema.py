"""The keys that sections of a config have, the values that these accept, and typed sections.

The keys of the trainer's sections are the fields of the dataclasses in `run`. The further keys of
a model, task, evaluator or optimizer are the parameters of what its section names.
"""

from __future__ import annotations

import ast
import collections.abc
import dataclasses
import inspect
import types
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar, cast

from ml_collections import ConfigDict

from vit_jax.config import objects
from vit_jax.config.run import (
    LEFT_OPEN,
    Duration,
    Evaluation,
    Model,
    Optim,
    Run,
    Task,
    parse_duration,
)
from vit_jax.errors import UserError, nearest
from vit_jax.signatures import Parameters
from vit_jax.signatures import parameters as parameters_of

Group = Mapping[str, Any]
Section = TypeVar('Section')
NONE = type(None)
EVALS = Mapping[str, Evaluation]  # the annotation of `Inference.evals`
OPTIONS = 'options'  # the field of a section for the keys that its own class does not declare

_ANY = inspect.Parameter('any', inspect.Parameter.KEYWORD_ONLY)
_BOOLS = {'true': True, '1': True, 'false': False, '0': False}
_NAMES = {dict: 'a group of keys', NONE: 'None'}
_SAYS_DURATION = typing.get_args(Duration)[1]


def fields(cls: Any) -> Parameters:
    """List the keys that a section's dataclass declares, with parameters named like its fields."""
    by_name = parameters_of(cls)
    keys = {f.metadata.get('key', f.name): f.name for f in dataclasses.fields(cls)}
    return {key: by_name[name] for key, name in keys.items() if name != OPTIONS}


def class_keys(cls: Callable) -> Parameters:
    """Return the keys of a model, task or evaluator, without Flax's own `parent` and `name`."""
    return {name: p for name, p in parameters_of(cls).items() if name not in ('parent', 'name')}


def section_class(path: str) -> Any:
    """Return the dataclass of a trainer section such as 'optim.schedule'; None for others."""
    node: Any = Run
    for key in filter(None, path.split('.')):
        parameter = fields(node).get(key) if dataclasses.is_dataclass(node) else None
        node = Evaluation if node == EVALS else parameter.annotation if parameter else None
    return node if dataclasses.is_dataclass(node) else None


def section_paths(config: Group, within: str = '') -> Iterator[str]:
    """Yield the paths of all possible sections of a config, the whole config ('') first."""
    yield within
    for key, parameter in fields(section_class(within)).items():
        path = f'{within}.{key}'.removeprefix('.')
        if dataclasses.is_dataclass(parameter.annotation):
            yield from section_paths(config, path)
        elif parameter.annotation == EVALS:
            yield from (f'{path}.{name}' for name in find_section(config, path))


def find_section(config: Group, path: str) -> Group:
    """Return the section 'optim.schedule' or the like; empty if the config lacks it."""
    node: Any = config
    for key in filter(None, path.split('.')):
        node = node.get(key, {})
    return node


def parameters(config: Group, path: str) -> Parameters:
    """Return the valid keys of a section, with their defaults and types.

    Args:
      config: Names the model, task, optimizer and evaluators.
      path: Section such as 'optim.schedule' or 'evals.test'; empty for the config itself.

    Raises:
      UserError: for an unknown model, task, optimizer or evaluator.
    """
    if path.startswith('model.'):
        return group_keys(parameters(config, path.rpartition('.')[0]), path.rpartition('.')[2])
    if (cls := section_class(path)) is None:
        return {}
    declared, group = fields(cls), find_section(config, path)
    if cls is Evaluation and not (group.get('evaluator') and _evaluator(group).learns):
        declared = {key: p for key, p in declared.items() if key != 'fit'}
    return declared | {
        key: p for key, p in options(cls, group, path).items() if key not in declared
    }


def group_keys(known: Parameters, key: str) -> Parameters:
    """List the keys of a dataclass that groups a model's options; empty for other keys."""
    group = known[key].default if key in known else None
    if not is_options(group):
        return {}
    found = parameters_of(type(group))
    return {name: p.replace(default=getattr(group, name)) for name, p in found.items()}


def is_options(default: Any) -> bool:
    """Return whether a key's default is a group of model options, not a section of `run`."""
    params = getattr(type(default), '__dataclass_params__', None)
    is_record = params is not None and params.frozen
    return is_record and type(default).__module__ != Run.__module__


def _evaluator(group: Group) -> Any:
    return objects.evaluator_class(group['evaluator'])


def options(cls: type, group: Group, path: str) -> Parameters:
    """Find the keys that the model, task, evaluator or optimizer named by a section declares.

    Raises:
      UserError: for an unknown name, or a section without one.
    """
    if cls is Evaluation:
        return class_keys(_evaluator(group)) if group.get('evaluator') else {}
    if cls not in (Model, Task, Optim):
        return {}
    name = group.get('name')
    if cls is Model and name is None and 'name' in group:
        return dict.fromkeys(group, _ANY)  # the checkpoint's, which is not read yet
    if name is None:
        raise UserError(f"config.{path}: the key 'name' is missing")
    if cls is Optim:
        from vit_jax.optim import make  # here, since it imports JAX

        return make.options(str(name))
    return class_keys(objects.model_class(name) if cls is Model else objects.task_class(name))


def follows_checkpoint(config: Group) -> bool:
    """Return whether the model comes from the checkpoint `config.init.from`, not read yet."""
    model = config.get('model')
    return isinstance(model, (ConfigDict, dict)) and model.get('name', '') is None


def check(config: ConfigDict) -> None:
    """Check the keys of a config and the types of their values.

    Raises:
      UserError: for a missing or unknown key, a value of another type, or an invalid duration.
    """
    _check_known(config, fields(Run), 'config')
    if lacking := list(_lacking(config)):
        raise UserError(f'config: {_missing(lacking)}')
    for path in section_paths(config):
        check_section(config, path)


def check_section(config: Group, path: str) -> None:
    """Raise UserError if a section lacks a required key, or has an unknown or ill-typed one."""
    section, where = find_section(config, path), f'config.{path}'.rstrip('.')
    if not isinstance(section, (ConfigDict, dict)):
        raise UserError(f'{where}={section!r}: expected a group of keys')
    valid = parameters(config, path) if section or section_class(path) is Run else {}
    _check_known(section, valid, where)
    if lacking := [key for key in required_keys(valid) if key not in section]:
        example = f'set it, for example by --{where}.{lacking[0]}=VALUE'
        raise UserError(f'{where}: {_missing(lacking)}; {example}')
    for key, value in section.items():
        if not (value is None and key in LEFT_OPEN):
            check_value(valid[key], value, f'{where}.{key}')
        if isinstance(value, (ConfigDict, dict)) and path.partition('.')[0] == 'model':
            check_section(config, f'{path}.{key}')


def _check_known(section: Group, valid: Parameters, where: str) -> None:
    for key in section:
        if key not in valid:
            owner = f'; the recipe sets {key}={section[key]!r} for another optimizer'
            remedy = (
                f'{owner}: leave it out of a copy of the recipe' if where.endswith('.optim') else ''
            )
            raise UserError(f'{where}: {nearest("key", key, valid)}{remedy}')


def _missing(keys: Sequence[str]) -> str:
    names = ', '.join(map(repr, keys))
    return f'the keys {names} are missing' if len(keys) > 1 else f'the key {names} is missing'


def _lacking(config: ConfigDict) -> Iterator[str]:
    """Yield the required keys that a config lacks; a placeholder does not count as a value."""
    for key, parameter in required_keys(fields(Run)).items():
        group = config.get(key, {})
        if not dataclasses.is_dataclass(parameter.annotation):
            if key not in config:
                yield key
        elif isinstance(group, (ConfigDict, dict)):
            named = key == 'data' or 'name' in group
            declared = parameters(config, key) if named else fields(parameter.annotation)
            for name, p in required_keys(declared).items():
                takes_none = name in LEFT_OPEN or NONE in (accepted_types(p) or (NONE,))
                if name not in group or (group[name] is None and not takes_none):
                    yield f'{key}.{name}'
    if follows_checkpoint(config) and not config.get('init', {}).get('from'):
        yield 'init.from'


def required_keys(declared: Parameters) -> Parameters:
    """Return the keys without a default."""
    return {key: p for key, p in declared.items() if p.default is p.empty}


def make(cls: type[Section], group: Group, where: str) -> Section:
    """Return the typed section of a group of keys, whose types are not checked.

    Keys that neither the section nor its `options` know, as of an earlier version, are left out.

    Args:
      cls: A dataclass of `run`.
      group: The keys and their values.
      where: The section's name, such as 'config.optim'.

    Raises:
      UserError: for a value that is out of range, or no group in place of a section.
    """
    if not isinstance(group, (ConfigDict, dict)):
        raise UserError(f'{where}={group!r}: expected a group of keys')
    declared, values, remaining = fields(cls), {}, {}
    for key, value in group.items():
        if key not in declared:
            remaining[key] = plain(value)
            continue
        nested: Any = declared[key].annotation
        if dataclasses.is_dataclass(nested):
            value = make(cast(Any, nested), value, f'{where}.{key}')
        elif nested == EVALS:
            value = {k: make(Evaluation, v, f'{where}.{key}.{k}') for k, v in value.items()}
        values[declared[key].name] = plain(value)
    if OPTIONS in getattr(cls, '__dataclass_fields__', {}):
        values[OPTIONS] = remaining
    try:
        return cls(**values)
    except UserError as e:
        raise UserError(f'{where}.{e}') from e


def to_group(section: Any) -> dict[str, Any]:
    """Return a typed section as a group of keys, with all defaults: the inverse of `make`."""
    group: dict[str, Any] = {}
    for key, parameter in fields(type(section)).items():
        value = getattr(section, parameter.name)
        if dataclasses.is_dataclass(value):
            value = to_group(value)
        elif parameter.annotation == EVALS:
            value = {name: to_group(entry) for name, entry in value.items()}
        group[key] = value
    return group | dict(getattr(section, OPTIONS, {}))


def plain(value: Any) -> Any:
    """Return a value without `ConfigDict`s and lists, which become dicts and tuples."""
    if isinstance(value, (ConfigDict, dict)):
        return {key: plain(v) for key, v in value.items()}
    if isinstance(value, (list, tuple)):
        return tuple(plain(v) for v in value)
    return value


def is_duration(annotation: Any) -> bool:
    """Return whether an annotation is `Duration`, optional or not."""
    optional = NONE in typing.get_args(annotation)
    members = typing.get_args(annotation) if optional else (annotation,)
    return any(_SAYS_DURATION in getattr(member, '__metadata__', ()) for member in members)


def are_durations(annotation: Any) -> bool:
    """Return whether an annotation is a sequence of durations, `Sequence[Duration]`."""
    return not is_duration(annotation) and any(map(is_duration, typing.get_args(annotation)))


def accepted_types(parameter: inspect.Parameter) -> tuple[type, ...]:
    """Return the types that a parameter accepts: bool, int, float, str, tuple, dict, NoneType.

    They come from the annotation, or from the default if the annotation is not a type for configs,
    such as `Any` or an array type. Empty if the default does not tell either.
    """
    annotation, default = parameter.annotation, parameter.default
    if is_duration(annotation):
        return (str, int, NONE) if default is None else (str, int)
    union = typing.get_origin(annotation) in (typing.Union, types.UnionType)
    members = typing.get_args(annotation) if union else (annotation,)
    kinds = tuple(_plain_type(member) for member in members)
    if None not in kinds:
        return cast(tuple[type, ...], kinds)
    has_value = default is not parameter.empty and default is not None
    kind = _plain_type(type(default)) if has_value else None
    return () if kind is None else (kind, *((NONE,) if NONE in kinds else ()))


def _plain_type(annotation: Any) -> type | None:
    """Return the config type of an annotation's values; None if it has none."""
    kind = typing.get_origin(annotation) or annotation
    if kind in (bool, int, float, str, NONE):
        return kind
    if dataclasses.is_dataclass(kind):
        return dict
    for abstract, shown in ((collections.abc.Mapping, dict), (collections.abc.Sequence, tuple)):
        if isinstance(kind, type) and issubclass(kind, abstract):
            return shown
    return None


def check_value(parameter: inspect.Parameter, value: Any, where: str) -> None:
    """Raise UserError if a parameter does not accept a value."""
    allowed = accepted_types(parameter)
    if allowed and not any(_is(value, kind) for kind in allowed):
        raise UserError(f'{where}={value!r}: expected {type_names(allowed)}')
    texts = (value,) if is_duration(parameter.annotation) else ()
    for text in value if are_durations(parameter.annotation) else texts:
        if text is not None:
            parse_duration(text, where)


def type_names(allowed: tuple[type, ...]) -> str:
    """Describe types in words, such as 'float or None'."""
    return ' or '.join(_NAMES.get(kind, kind.__name__) for kind in allowed)


def _is(value: Any, kind: type) -> bool:
    wider = {float: (int, float), tuple: (list, tuple), dict: (dict, ConfigDict)}
    return isinstance(value, wider.get(kind, kind))


def parse_value(text: str, allowed: tuple[type, ...]) -> Any:
    """Parse `text` as the first type that fits; raise ValueError if none does."""
    if not allowed:
        return _literal_or_text(text)
    if text == 'None' and NONE in allowed:
        return None
    for kind in allowed:
        try:
            return _parse(text, kind)
        except ValueError:
            pass
    raise ValueError(text)


def _parse(text: str, kind: type) -> Any:
    if kind is str:
        return text
    if kind is bool:
        if text.lower() not in _BOOLS:
            raise ValueError(text)
        return _BOOLS[text.lower()]
    if kind in (int, float):
        number = float(text)
        if kind is int and not number.is_integer():
            raise ValueError(text)
        return kind(number)
    value = _literal_or_text(text)
    if isinstance(value, str) or not _is(value, kind):
        raise ValueError(text)
    return tuple(value) if kind is tuple else value


def _literal_or_text(text: str) -> Any:
    try:
        return ast.literal_eval(text)
    except (SyntaxError, ValueError):
        return text
