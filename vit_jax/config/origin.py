"""Trust in the code that a config names."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from vit_jax.config.run import Run
from vit_jax.config.schema import to_group, to_plain
from vit_jax.errors import UserError
from vit_jax.signatures import function_name, parse_call, parse_sources, transform_names
from vit_jax.storage.model_ref import ModelRef

PACKAGE = __name__.partition('.')[0]


def require_allowed(config: Mapping[str, Any], allowed: Sequence[str], file: str) -> None:
    """Refuse a stored config that names code outside of this package; nothing is imported.

    Args:
      config: The config, or a part of it.
      allowed: Outside modules and packages whose code it may name.
      file: The config's file, for the message.

    Raises:
      UserError: for a name that is not allowed, or transforms that cannot be read.
    """
    for key, name in dotted_names(config):
        require_name(name, allowed, f'config.{key} in {file}')


def require_name(name: str, allowed: Sequence[str], source: str) -> None:
    """Raise UserError if `name`, found in `source`, is outside of this package and not allowed."""
    if not any(_within(name, package) for package in (PACKAGE, *allowed)):
        raise UserError(
            f'{source} names {name!r}, code from outside of {PACKAGE}: '
            f'if you trust it, add --allow {name.partition(".")[0]}'
        )


def dotted_names(config: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Return the keys and values of a config whose values are dotted names of modules."""
    return ((key, name) for key, name in _names(to_plain(config)) if '.' in name)


def trusted_names(run: Run) -> list[str]:
    """Return the dotted names of modules in a config that the user gives, and so trusts."""
    return [name for _, name in dotted_names(to_group(run))]


def _names(config: dict[str, Any]) -> Iterator[tuple[str, str]]:
    for path in (('model', 'name'), ('task', 'name'), ('task', 'loss_name')):
        yield '.'.join(path), _text(config, *path)
    for path in (('task', 'teacher'), ('init', 'from')):  # of a family of the user's
        if reference := _text(config, *path):
            yield '.'.join(path), ModelRef.parse(reference).family
    task = config.get('task')
    teachers = task.get('teachers') if isinstance(task, dict) else ()
    for i, reference in enumerate(teachers if isinstance(teachers, tuple) else ()):
        if isinstance(reference, str) and reference:
            yield f'task.teachers[{i}]', ModelRef.parse(reference).family
    writers, evals = config.get('writers'), config.get('evals')
    for writer in writers if isinstance(writers, tuple) else ():
        yield 'writers', writer if isinstance(writer, str) else ''
    entries = evals if isinstance(evals, dict) else {}
    for section in (['data'], *(['evals', name] for name in entries)):
        key = '.'.join(section)
        for source, _ in parse_sources(_text(config, *section, 'source')):
            yield f'{key}.source', source.partition(':')[0]
        yield f'{key}.evaluator', _text(config, *section, 'evaluator')
        if plan := _text(config, *section, 'plan'):
            yield f'{key}.plan', function_name(parse_call(plan, f'config.{key}.plan'))
        for name in transform_names(_text(config, *section, 'transforms')):
            yield f'{key}.transforms', name


def _within(name: str, package: str) -> bool:
    return name == package or name.startswith(f'{package}.')


def _text(config: Any, *path: str) -> str:
    """Return the text at a path of a config, which may be malformed; empty for anything else."""
    for key in path:
        config = config.get(key) if isinstance(config, dict) else None
    return config if isinstance(config, str) else ''
