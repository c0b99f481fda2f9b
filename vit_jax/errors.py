"""The one exception for a user's mistake, exit codes, and names resolved to what they stand for."""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import pkgutil
from collections.abc import Iterable
from typing import Any

EXIT_FAILED = 1
EXIT_PREEMPTED = 75  # EX_TEMPFAIL of sysexits.h: the same command, started again, continues


class UserError(Exception):
    """A mistake of the user's: one line that says what is wrong, where, and what to do.

    The command line prints it without a traceback and exits with code 2.
    """


def nearest(what: str, name: str, choices: Iterable[str]) -> str:
    """Words for an unknown `name`: the closest of `choices` first, then all of them."""
    valid = sorted(choices)
    close = difflib.get_close_matches(name, valid, n=1, cutoff=0.5)
    hint = f'; did you mean {close[0]!r}?' if close else ''
    return f'unknown {what} {name!r}{hint} (valid: {", ".join(valid)})'


def check_choice(field: str, value: str, choices: Iterable[str]) -> None:
    """Raises UserError unless `value` of `field` is one of `choices`."""
    if value not in choices:
        raise UserError(nearest(field, value, choices))


def resolve(package: str, name: str, attribute: str) -> Any:
    """The class that a config names.

    Args:
      package: where plain names live, for example `vit_jax.models`.
      name: a module of that package (`vit`), or a dotted module path of the
        user's own (`my_lab.models.foo`).
      attribute: what to take from the module, for example `Model`.

    Raises:
      UserError: if there is no such module, or it lacks the attribute.
    """
    path = name if '.' in name else f'{package}.{name}'
    kind = f'{package.rsplit(".", 1)[-1].rstrip("s")} name'
    if '.' not in name and name not in (known := _modules(package)):
        raise UserError(nearest(kind, name, known))
    try:
        found = importlib.util.find_spec(path) is not None
    except ModuleNotFoundError:
        found = False
    if not found:
        raise UserError(f'{kind} {name!r}: no module {path!r} can be imported; check PYTHONPATH')
    module = importlib.import_module(path)
    if not hasattr(module, attribute):
        raise UserError(f'{kind} {name!r}: module {path!r} has no {attribute!r}')
    return getattr(module, attribute)


def _modules(package: str) -> list[str]:
    """The names that a config may choose from; `base` is what the others are derived from."""
    paths = importlib.import_module(package).__path__
    names = [m.name for m in pkgutil.iter_modules(paths)]
    return [name for name in names if name != 'base' and not name.startswith('_')]
