"""Values of a config: the types that a parameter accepts, and parsing from the command line."""

from __future__ import annotations

import ast
import collections.abc
import inspect
import types
import typing
from typing import Any

from ml_collections import ConfigDict

from vit_jax.config import durations
from vit_jax.errors import UserError
from vit_jax.signatures import are_durations, is_duration

BOOLS = {'true': True, '1': True, 'false': False, '0': False}
NONE = type(None)
_NAMES = {dict: 'a group of keys', NONE: 'None'}


def kinds(parameter: inspect.Parameter) -> tuple[type, ...]:
    """The types that a parameter accepts: bool, int, float, str, tuple, dict, NoneType.

    They come from the annotation, or from the default if the annotation is nothing that a config
    could hold, such as `Any` and types of arrays. Empty if the default decides nothing either.
    """
    annotation, default = parameter.annotation, parameter.default
    if is_duration(annotation):
        return (str, int, NONE) if default is None else (str, int)
    union = typing.get_origin(annotation) in (typing.Union, types.UnionType)
    members = typing.get_args(annotation) if union else (annotation,)
    found = tuple(_plain(member) for member in members)
    if None not in found:
        return typing.cast(tuple[type, ...], found)
    known = default is not parameter.empty and default is not None
    kind = _plain(type(default)) if known else None
    return () if kind is None else (kind, *((NONE,) if NONE in found else ()))


def _plain(annotation: Any) -> type | None:
    """The plain type of a config's value for an annotation."""
    kind = typing.get_origin(annotation) or annotation
    if kind in (bool, int, float, str, NONE):
        return kind
    for abstract, plain in ((collections.abc.Mapping, dict), (collections.abc.Sequence, tuple)):
        if isinstance(kind, type) and issubclass(kind, abstract):
            return plain
    return None


def check(parameter: inspect.Parameter, value: Any, where: str) -> None:
    """Raises UserError if a parameter does not accept a value of a config."""
    allowed = kinds(parameter)
    if allowed and not any(_is(value, kind) for kind in allowed):
        raise UserError(f'{where}={value!r}: expected {names(allowed)}')
    texts = (value,) if is_duration(parameter.annotation) else ()
    for text in value if are_durations(parameter.annotation) else texts:
        if text is not None:
            durations.parse_duration(text, where)


def names(allowed: tuple[type, ...]) -> str:
    """Types in words, as 'float or None'."""
    return ' or '.join(_NAMES.get(kind, kind.__name__) for kind in allowed)


def _is(value: Any, kind: type) -> bool:
    wider = {float: (int, float), tuple: (list, tuple), dict: (dict, ConfigDict)}
    return isinstance(value, wider.get(kind, kind))


def parse(text: str, allowed: tuple[type, ...]) -> Any:
    """`text` as a value of the first type that fits; raises ValueError if none does."""
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
        if text.lower() not in BOOLS:
            raise ValueError(text)
        return BOOLS[text.lower()]
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
