"""The modules that a stored config may name: those of this package, and those the user allows.

A dotted name imports a module, which is code. The file of `--config` is code as well, but the user
chose to run it; a run folder may come from anybody.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ml_collections import ConfigDict

from vit_jax.calls import function_name, parse_call, transform_names
from vit_jax.config.origin import split_family
from vit_jax.errors import UserError

PACKAGE = __name__.partition('.')[0]


def require_allowed(config: Mapping[str, Any], allowed: Sequence[str], where: str) -> None:
    """Refuse a stored config that names code from outside of this package; nothing is imported.

    Args:
      config: the config, or a part of it.
      allowed: modules and packages whose code it may name all the same.
      where: where the config is stored, for the message.

    Raises:
      UserError: for a name that is not allowed, or transforms that cannot be read.
    """
    for key, name in dotted_names(config):
        require_name(name, allowed, f'config.{key} in {where}')


def require_name(name: str, allowed: Sequence[str], what: str) -> None:
    """Raise UserError if `name`, found in `what`, is outside of this package and not allowed."""
    if not any(_within(name, one) for one in (PACKAGE, *allowed)):
        raise UserError(
            f'{what} names {name!r}, code from outside of {PACKAGE}: '
            f'if you trust it, add --allow {name.partition(".")[0]}'
        )


def dotted_names(config: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """The keys and values of a config that are dotted paths of modules."""
    return ((key, name) for key, name in _names(_plain(config)) if '.' in name)


def _names(config: dict[str, Any]) -> Iterator[tuple[str, str]]:
    yield 'model.name', _text(_group(config, 'model'), 'name')
    yield 'task.name', _text(_group(config, 'task'), 'name')
    yield 'init.from', split_family(_text(_group(config, 'init'), 'from'))[0]
    writers = config.get('writers')
    for writer in writers if isinstance(writers, (list, tuple)) else ():
        yield 'writers', writer if isinstance(writer, str) else ''
    evals = _group(config, 'evals')
    places = {'data': _group(config, 'data')} | {f'evals.{k}': _group(evals, k) for k in evals}
    for place, section in places.items():
        yield f'{place}.source', _text(section, 'source').partition(':')[0]
        yield f'{place}.evaluator', _text(section, 'evaluator')
        if plan := _text(section, 'plan'):
            yield f'{place}.plan', function_name(parse_call(plan, f'config.{place}.plan'))
        for name in transform_names(_text(section, 'transforms')):
            yield f'{place}.transforms', name


def _within(name: str, package: str) -> bool:
    return name == package or name.startswith(f'{package}.')


def _plain(config: Mapping[str, Any]) -> dict[str, Any]:
    return config.to_dict() if isinstance(config, ConfigDict) else dict(config)


def _group(config: dict[str, Any], key: str) -> dict[str, Any]:
    found = config.get(key)
    return found if isinstance(found, dict) else {}


def _text(section: dict[str, Any], key: str) -> str:
    found = section.get(key)
    return found if isinstance(found, str) else ''
