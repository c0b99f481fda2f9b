"""Keys that sections of a config have, the values that these accept, and typed sections.

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
from vit_jax.config.words import example
from vit_jax.errors import UserError, nearest
from vit_jax.signatures import Parameters
from vit_jax.signatures import parameters as parameters_of

Group = Mapping[str, Any]
Section = TypeVar('Section')
NONE = type(None)
EVALS = Mapping[str, Evaluation]  # the annotation of `Inference.evals`
NAMED = (Model, Task, Optim)  # sections whose `name` declares further keys
OPTIONS = 'options'  # the field of a section for the keys that its own class does not declare

ANY = inspect.Parameter('any', inspect.Parameter.KEYWORD_ONLY)  # of a key of any type
_BOOLS = {'true': True, '1': True, 'false': False, '0': False}
_NAMES = {dict: 'a group of keys', NONE: 'None'}
_SAYS_DURATION = typing.get_args(Duration)[1]
_GROUPS = (ConfigDict, dict)


def fields(cls: Any) -> Parameters:
    """List the keys that a section's dataclass declares, with parameters named like its fields."""
    by_name = parameters_of(cls)
    keys = {f.metadata.get('key', f.name): f.name for f in dataclasses.fields(cls)}
    return {key: by_name[name] for key, name in keys.items() if name != OPTIONS}


def class_keys(cls: Callable) -> Parameters:
    """Return the keys of a model, task or evaluator, without Flax's own `parent` and `name`."""
    return {name: p for name, p in parameters_of(cls).items() if name not in ('parent', 'name')}


def sections(
    config: Group, cls: Any = Run, path: str = ''
) -> Iterator[tuple[str, type[Any], Group]]:
    """Yield path, class and keys of each section, such as 'optim.schedule'; the config is first.

    The keys of a section that the config lacks are empty.

    Raises:
      UserError: for a value in place of a section.
    """
    _require_group(config, f'config.{path}'.rstrip('.'))
    yield path, cls, config
    for key, parameter in fields(cls).items():
        within = f'{path}.{key}'.removeprefix('.')
        if dataclasses.is_dataclass(parameter.annotation):
            yield from sections(config.get(key, {}), parameter.annotation, within)
        elif parameter.annotation == EVALS:
            entries = config.get(key, {})
            _require_group(entries, f'config.{within}')
            for name, entry in entries.items():
                yield from sections(entry, Evaluation, f'{within}.{name}')


def _require_group(value: Any, location: str) -> None:
    if not isinstance(value, _GROUPS):
        raise UserError(f'{location}={value!r}: expected a group of keys')


def find_section(config: Group, path: str) -> Group:
    """Return the section 'optim.schedule' or the like; empty if the config lacks it."""
    node: Any = config
    for key in filter(None, path.split('.')):
        node = node.get(key, {})
    return node


def parameters(config: Group, path: str) -> Parameters:
    """Return the valid keys of a section, with their defaults and types; none if it does not exist.

    Args:
      config: Names the model, task, optimizer and evaluators.
      path: Section such as 'optim.schedule' or 'evals.test'; empty for the config itself.

    Raises:
      UserError: for an unknown model, task, optimizer or evaluator.
    """
    if path.startswith('model.'):
        return group_keys(parameters(config, path.rpartition('.')[0]), path.rpartition('.')[2])
    for place, cls, group in sections(config):
        if place == path:
            return declared(cls, group, f'config.{path}')
    return {}


def declared(cls: type, group: Group, location: str) -> Parameters:
    """Return the valid keys of a section: the fields of its class, and the keys of what it names.

    Raises:
      UserError: for a section without a name, or with an unknown one.
    """
    declarations = fields(cls)
    if cls is Model and follows_checkpoint({'model': group}):
        return {
            **declarations,
            **dict.fromkeys(group, ANY),
            **declarations,
        }  # the model's, not read yet
    if cls in NAMED and group.get('name') is None:
        raise UserError(f"{location}: the key 'name' is missing")
    constructor = named(cls, group)
    if cls is Evaluation and not (constructor and constructor.learns):
        declarations = {key: p for key, p in declarations.items() if key != 'fit'}
    if cls is Optim:
        from vit_jax.optim import make  # here, since it imports JAX

        return {**declarations, **make.options(group['name']), **declarations}
    return (
        {**declarations, **class_keys(constructor), **declarations} if constructor else declarations
    )


def named(cls: type, group: Group) -> Any:
    """Find the class or the optimizer's function that a section names; None if it names nothing.

    Raises:
      UserError: for an unknown name.
    """
    find: dict[type, Callable] = {
        Model: objects.model_class,
        Task: objects.task_class,
        Optim: _optimizer,
    }
    if cls is Evaluation:
        return objects.evaluator_class(group['evaluator']) if group.get('evaluator') else None
    return find[cls](group['name']) if cls in find and group.get('name') else None


def _optimizer(name: str) -> Callable:
    from vit_jax.optim import make  # here, since it imports JAX

    return make.factory(name)


def group_keys(declared_keys: Parameters, key: str) -> Parameters:
    """List the keys of a dataclass that groups a model's options; empty for other keys."""
    group = declared_keys[key].default if key in declared_keys else None
    if not is_options(group):
        return {}
    keys = parameters_of(type(group))
    return {name: p.replace(default=getattr(group, name)) for name, p in keys.items()}


def is_options(default: Any) -> bool:
    """Return whether a key's default is a group of model options, not a section of `run`."""
    params = getattr(type(default), '__dataclass_params__', None)
    is_record = params is not None and params.frozen
    return is_record and type(default).__module__ != Run.__module__


def follows_checkpoint(config: Group) -> bool:
    """Return whether the model comes from the checkpoint `config.init.from`, not read yet."""
    model = config.get('model')
    return isinstance(model, _GROUPS) and model.get('name', '') is None


def require_complete(config: ConfigDict) -> None:
    """Raise UserError if a config has unknown sections, or its sections lack required keys."""
    _check_known(config, fields(Run), 'config')
    lacking = [
        f'{path}.{key}'.removeprefix('.')
        for path, cls, group in sections(config)
        for key in _lacking(
            group, declared(cls, group, f'config.{path}') if 'name' in group else fields(cls)
        )
    ]
    if follows_checkpoint(config) and not config.get('init', {}).get('from'):
        lacking.append('init.from')
    _require_none(lacking, 'config')


def _check_keys(group: Group, valid: Parameters, location: str) -> None:
    """Check the keys of a section, or of a group of a model's options, and their values."""
    _check_known(group, valid, location)
    for key, value in group.items():
        if not (value is None and key in LEFT_OPEN):
            check_value(valid[key], value, f'{location}.{key}')
        if inner := group_keys(valid, key):
            _check_keys(value, inner, f'{location}.{key}')


def _check_known(group: Group, valid: Parameters, location: str) -> None:
    for key in group:
        if key not in valid:
            raise UserError(f'{location}: {nearest("key", key, valid)}')


def _lacking(group: Group, valid: Parameters) -> list[str]:
    """List the required keys that a section lacks; a placeholder does not count as a value.

    A key of a nested section is lacking, not the section.
    """
    required = {
        key: p
        for key, p in valid.items()
        if p.default is p.empty and not dataclasses.is_dataclass(p.annotation)
    }
    may_be_none = {
        key for key, p in required.items() if NONE in (accepted_types(p) or (NONE,))
    } | LEFT_OPEN.keys()
    return [
        key
        for key in required
        if key not in group or (group[key] is None and key not in may_be_none)
    ]


def _require_none(lacking: Sequence[str], location: str) -> None:
    """Raise UserError if any keys are lacking."""
    if lacking:
        names = ', '.join(map(repr, lacking))
        are = f'keys {names} are' if len(lacking) > 1 else f'key {names} is'
        section = location.removeprefix('config').lstrip('.')
        flags = ' '.join(example(f'{section}.{key}'.lstrip('.')) for key in lacking)
        raise UserError(f'{location}: the {are} missing; for example {flags}')


def make_section(cls: type[Section], group: Group, location: str, strict: bool = False) -> Section:
    """Make the typed section of a group of keys.

    Args:
      cls: a dataclass of `run`.
      group: the keys and their values.
      location: the section's name, such as 'config.optim'.
      strict: whether keys and types are checked, which imports what the section names. Otherwise
        keys that neither the section nor its `options` know, as of an earlier version, are left
        out.

    Raises:
      UserError: for a value that is out of range, a missing key, or no group in place of a section;
        if `strict`, for an unknown key, or a value of another type.
    """
    _require_group(group, location)
    if strict:
        valid = declared(cls, group, location)
        _check_keys(group, valid, location)
        _require_none(_lacking(group, valid), location)
    defaults, values, remaining = fields(cls), {}, {}
    for key, value in group.items():
        if key not in defaults:
            remaining[key] = to_plain(value)
            continue
        kind: Any = defaults[key].annotation
        if dataclasses.is_dataclass(kind):
            value = make_section(cast(Any, kind), value, f'{location}.{key}', strict)
        elif kind == EVALS:
            value = {
                k: make_section(Evaluation, v, f'{location}.{key}.{k}', strict)
                for k, v in value.items()
            }
        values[defaults[key].name] = to_plain(value)
    if OPTIONS in getattr(cls, '__dataclass_fields__', {}):
        values[OPTIONS] = remaining
    required = [key for key, p in defaults.items() if p.default is p.empty]
    if missing := [key for key in required if defaults[key].name not in values]:
        _require_none(missing, location)
    try:
        return cls(**values)
    except UserError as e:
        raise UserError(f'{location}.{e}') from e


def to_group(section: Any) -> dict[str, Any]:
    """Convert a typed section to a group of keys with all defaults; inverts `make_section`."""
    group: dict[str, Any] = {}
    for key, parameter in fields(type(section)).items():
        value = getattr(section, parameter.name)
        if dataclasses.is_dataclass(value):
            value = to_group(value)
        elif parameter.annotation == EVALS:
            value = {name: to_group(entry) for name, entry in value.items()}
        group[key] = value
    return group | dict(getattr(section, OPTIONS, {}))


def to_plain(value: Any) -> Any:
    """Return a value without `ConfigDict`s and lists, which become dicts and tuples."""
    if isinstance(value, _GROUPS):
        return {key: to_plain(v) for key, v in value.items()}
    if isinstance(value, (list, tuple)):
        return tuple(to_plain(v) for v in value)
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
    for abstract, concrete in ((collections.abc.Mapping, dict), (collections.abc.Sequence, tuple)):
        if isinstance(kind, type) and issubclass(kind, abstract):
            return concrete
    return None


def check_value(parameter: inspect.Parameter, value: Any, location: str) -> None:
    """Raise UserError if a parameter does not accept a value."""
    allowed = accepted_types(parameter)
    if allowed and not any(_is(value, kind) for kind in allowed):
        raise UserError(f'{location}={value!r}: expected {type_names(allowed)}')
    texts = (value,) if is_duration(parameter.annotation) else ()
    for text in value if are_durations(parameter.annotation) else texts:
        if text is not None:
            parse_duration(text, location)


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
