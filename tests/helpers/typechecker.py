"""The type checker of annotations in tests; jaxtyping requires the dotted name of a module."""

from __future__ import annotations

import contextlib
import inspect
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any, get_args

import jaxtyping
from beartype import BeartypeConf, beartype
from jaxtyping import AbstractArray, config, install_import_hook, jaxtyped

# As for a static checker, an int may stand where a float is asked for.
check = beartype(conf=BeartypeConf(is_pep484_tower=True))


def check_shapes(modules: Sequence[str]) -> None:
    """Check annotated shapes at every call of the functions of these modules, once imported.

    Functions and dataclasses whose annotations hold no shape are left to the static type checker:
    checking them as well, and those made at every call of another, takes longer than all shapes.
    """
    jaxtyping.jaxtyped = _where_shapes_are
    install_import_hook(modules, 'helpers.typechecker.check')


def _where_shapes_are(*, typechecker: Any) -> Callable[[Any], Any]:
    decorate = jaxtyped(typechecker=typechecker)
    return lambda made: decorate(made) if _has_shapes(made) else made


def _has_shapes(made: Any) -> bool:
    function = made.fget if isinstance(made, property) else getattr(made, '__func__', made)
    within = vars(sys.modules[function.__module__])
    texts = map(str, inspect.get_annotations(function).values())
    names = {name for text in texts for name in re.findall(r'[A-Za-z_]\w*', text)}
    return any(_holds_shapes(within.get(name)) for name in names)


def _holds_shapes(value: Any) -> bool:
    """Whether it is one of jaxtyping's types, or holds one."""
    if isinstance(value, type) and issubclass(value, AbstractArray):
        return True
    return getattr(value, '__module__', '') == 'jaxtyping' or any(
        map(_holds_shapes, get_args(value))
    )


@contextlib.contextmanager
def unchecked() -> Iterator[None]:
    """Check no annotations, as outside of tests: callers may give arrays of NumPy."""
    config.update('jaxtyping_disable', True)
    try:
        yield
    finally:
        config.update('jaxtyping_disable', False)
