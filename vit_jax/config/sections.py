"""What a config consists of: its sections, the keys of each, and a section as keywords."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from typing import Any

from ml_collections import ConfigDict

from vit_jax.errors import UserError, nearest

SECTIONS = ('model', 'task', 'data', 'evals', 'optim', 'step', 'every', 'checkpoint', 'parallel')
KEYS = ('seed', 'total', 'batch_size', *SECTIONS)
# Sections that a config may leave out, and what they then hold. init: the checkpoint that a new run
# starts from, another code base's or a run folder, and how its position embedding is resized.
# branch: the run folder and the kept step of which a new run continues the whole state.
OPTIONAL: dict[str, dict[str, Any]] = {
    'init': {'from': '', 'posemb': 'bilinear'},
    'branch': {'from': '', 'step': 0},
}
# Keys that a section has to have.
REQUIRED = {
    'model': ('name',),
    'task': ('name',),
    'optim': ('name', 'lr'),
}
# All the keys of the trainer's own sections, and what one that is left out means. max_skips: how
# many steps in a row may be skipped because they are not finite.
FIELDS: dict[str, dict[str, Any]] = {
    'every': {'log': '1%', 'eval': '10%', 'checkpoint': '10%'},
    'step': {'accum_steps': 1, 'ema_decay': 0.0, 'max_skips': 0},
    'checkpoint': {'keep_last': 2, 'keep_every': ''},
    'parallel': {'strategy': 'jit', 'fsdp': 1, 'tensor': 1, 'rules': (), 'small': 2**14},
}
POSEMBS = ('bilinear', 'bicubic')
# What a section of data says of its examples, and of how to load them.
EXAMPLES = ('source', 'split', 'classes', 'transforms', 'vocab', 'buckets')
LOADING = ('workers', 'threads', 'cache', 'stall_seconds')


def keywords(section: ConfigDict) -> dict[str, Any]:
    """A section as keywords of its constructor: plain and hashable, without `name`."""
    plain = section.to_dict() if isinstance(section, ConfigDict) else dict(section)
    return {k: _freeze(v) for k, v in plain.items() if k != 'name'}


def fields(config: ConfigDict, name: str) -> dict[str, Any]:
    """A section of FIELDS as keywords, complete."""
    return FIELDS[name] | keywords(config[name])


def _freeze(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return tuple(_freeze(v) for v in value)
    return value


def check_keywords(constructor: Callable, keywords: ConfigDict, where: str) -> None:
    """Raises UserError if `keywords` (less `name`) are not those of `constructor`."""
    valid = set(inspect.signature(constructor).parameters) - {'parent', 'name'}
    for key in keywords:
        if key != 'name' and key not in valid:
            raise UserError(f'{where}: ' + nearest('key', key, valid))


def check_data(section: ConfigDict, where: str, more: Iterable[str] = ()) -> None:
    """Raises UserError for a section without source or split, or with unknown keys.

    Args:
      section: `config.data`, or an entry of `config.evals`.
      where: its name, for the message.
      more: further keys that it may have.
    """
    valid = {*EXAMPLES, *LOADING, *more}
    for key in section:
        if key not in valid:
            raise UserError(f'{where}: ' + nearest('key', key, valid))
    for key in ('source', 'split'):
        if key not in section:
            raise UserError(f'{where}: the key {key!r} is missing')
