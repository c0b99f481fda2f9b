"""Signatures of constructors, which define the keys of a config, and durations in them.

A config gives durations as text, such as '5%' or '3 epochs'; a constructor wants steps.
"""

from __future__ import annotations

import functools
import inspect
import types
import typing
from collections.abc import Callable, Mapping
from typing import Annotated, Any

_DURATION = 'a duration'
Duration = Annotated[str, _DURATION]  # still text
Steps = Annotated[int, _DURATION]  # in steps of the run

Parameters = dict[str, inspect.Parameter]


def parameters(constructor: Callable) -> Parameters:
    """The parameters of a function or class, their annotations evaluated.

    An annotation that only a type checker can evaluate becomes `Any`.
    """
    return dict(_parameters(constructor))


@functools.cache  # a config asks for them many times, and a sweep has many configs
def _parameters(constructor: Callable) -> Parameters:
    function = constructor.__init__ if inspect.isclass(constructor) else constructor
    scope = getattr(inspect.unwrap(function), '__globals__', {})
    found = inspect.signature(constructor).parameters
    return {name: p.replace(annotation=_evaluated(p, scope)) for name, p in found.items()}


def _evaluated(parameter: inspect.Parameter, scope: dict[str, Any]) -> Any:
    if parameter.annotation is parameter.empty:
        return Any
    one = types.SimpleNamespace(__annotations__={'it': parameter.annotation})
    try:
        return typing.get_type_hints(one, scope, include_extras=True)['it']
    except NameError:
        return Any


def keyword_only(constructor: Callable) -> Parameters:
    """The parameters after the `*` of a signature."""
    found = parameters(constructor).items()
    return {name: p for name, p in found if p.kind is p.KEYWORD_ONLY}


def is_duration(annotation: Any) -> bool:
    """Whether an annotation is `Duration` or `Steps`, or one of these or None."""
    optional = type(None) in typing.get_args(annotation)
    members = typing.get_args(annotation) if optional else (annotation,)
    return any(_DURATION in getattr(member, '__metadata__', ()) for member in members)


def are_durations(annotation: Any) -> bool:
    """Whether an annotation is a sequence of durations, such as `Sequence[Steps]`."""
    return not is_duration(annotation) and any(map(is_duration, typing.get_args(annotation)))


def in_steps(
    constructor: Callable, keywords: Mapping[str, Any], to_steps: Callable[[str], int]
) -> dict[str, Any]:
    """Keywords of a constructor with each duration in steps.

    Args:
      constructor: a function or class that annotates its durations with `Steps`.
      keywords: some of its keywords, from a config.
      to_steps: '5%' -> number of steps.
    """
    known, converted = parameters(constructor), dict(keywords)
    for name, value in keywords.items():
        annotation = known[name].annotation
        if is_duration(annotation):
            converted[name] = to_steps(str(value))
        elif are_durations(annotation):
            converted[name] = tuple(to_steps(str(text)) for text in value)
    return converted
