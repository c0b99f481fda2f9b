"""Trust in the code that a config names."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ml_collections import ConfigDict

from vit_jax.config.run import Run
from vit_jax.config.schema import to_group
from vit_jax.errors import UserError
from vit_jax.signatures import function_name, parse_call, parse_sources, transform_names
from vit_jax.storage.model_ref import ModelRef

PACKAGE = __name__.partition('.')[0]


def require_allowed(config: Mapping[str, Any], allowed: Sequence[str], where: str) -> None:
    """Refuse a stored config that names code outside of this package; nothing is imported.

    Args:
      config: The config, or a part of it.
      allowed: Outside modules and packages whose code it may name.
      where: The config's file, for the message.

    Raises:
      UserError: for a name that is not allowed, or transforms that cannot be read.
    """
    for key, name in dotted_names(config):
        require_name(name, allowed, f'config.{key} in {where}')


def require_name(name: str, allowed: Sequence[str], what: str) -> None:
    """Raise UserError if `name`, found in `what`, is outside of this package and not allowed."""
    if not any(_within(name, package) for package in (PACKAGE, *allowed)):
        raise UserError(
            f'{what} names {name!r}, code from outside of {PACKAGE}: '
            f'if you trust it, add --allow {name.partition(".")[0]}'
        )


def dotted_names(config: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Return the keys and values of a config whose values are dotted names of modules."""
    return ((key, name) for key, name in _names(_plain(config)) if '.' in name)


def trusted_names(run: Run) -> list[str]:
    """Return the dotted names of modules in a config that the user gives, and so trusts."""
    return [name for _, name in dotted_names(to_group(run))]


def _names(config: dict[str, Any]) -> Iterator[tuple[str, str]]:
    yield 'model.name', _text(_group(config, 'model'), 'name')
    yield 'task.name', _text(_group(config, 'task'), 'name')
    yield 'task.loss_name', _text(_group(config, 'task'), 'loss_name')
    for key, value in _group(config, 'task').items():  # a teacher of a family of one's own
        if key == 'teacher':
            yield 'task.teacher', _family(value)
    yield 'init.from', _family(_group(config, 'init').get('from'))
    writers = config.get('writers')
    for writer in writers if isinstance(writers, (list, tuple)) else ():
        yield 'writers', writer if isinstance(writer, str) else ''
    evals = _group(config, 'evals')
    sections = {'data': _group(config, 'data')} | {f'evals.{k}': _group(evals, k) for k in evals}
    for key, section in sections.items():
        for source, _ in parse_sources(_text(section, 'source')):
            yield f'{key}.source', source.partition(':')[0]
        yield f'{key}.evaluator', _text(section, 'evaluator')
        if plan := _text(section, 'plan'):
            yield f'{key}.plan', function_name(parse_call(plan, f'config.{key}.plan'))
        for name in transform_names(_text(section, 'transforms')):
            yield f'{key}.transforms', name


def _family(reference: Any) -> str:
    return ModelRef.parse(reference).family if isinstance(reference, str) else ''


def _within(name: str, package: str) -> bool:
    return name == package or name.startswith(f'{package}.')


def _plain(config: Mapping[str, Any]) -> dict[str, Any]:
    return config.to_dict() if isinstance(config, ConfigDict) else dict(config)


def _group(config: dict[str, Any], key: str) -> dict[str, Any]:
    group = config.get(key)
    return group if isinstance(group, dict) else {}


def _text(section: dict[str, Any], key: str) -> str:
    text = section.get(key)
    return text if isinstance(text, str) else ''
