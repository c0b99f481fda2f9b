"""Manifest of a study: config, data and schedule of each run, and diagnostics."""

from __future__ import annotations

import importlib.metadata
import re
from collections.abc import Mapping, Sequence
from typing import Any

from vit_jax.runtime import environment
from vit_jax.scaling import runs
from vit_jax.scaling.rows import short
from vit_jax.scaling.runs import Cell
from vit_jax.storage import paths, run_folder

_MANY_EPOCHS = 4  # Muennighoff et al. 2023: up to about 4 epochs, repeated data are as good as new

_COLUMNS = (
    *('digest', 'parameters', 'steps', 'batch_size', 'epochs', 'optimizer', 'lr'),
    *('data_size', 'schedule', 'warmup', 'cooldown', 'parametrization', 'seed', 'hardware'),
)

Entry = dict[str, Any]


def entries(rows: Sequence[Mapping[str, Cell]]) -> list[Entry]:
    """The settings of each run, for rows of `runs.collect`.

    Returns:
      For each run: run, digest (the first 12 digits of the config's SHA-256), parameters, steps,
      batch_size, epochs, data_size (different examples), optimizer, lr, schedule, warmup, cooldown
      (its share of the steps), parametrization, seed, setting (digest without the seed) and
      hardware; None where unknown.
    """
    return [_entry(row) for row in rows]


def _entry(row: Mapping[str, Cell]) -> Entry:
    config = run_folder.read_config(paths.path(str(row['run']))) or {}
    optim = config.get('optim') or {}
    schedule = optim.get('schedule') or {}
    shared = ('run', 'parameters', 'steps', 'batch_size', 'data_size', 'hardware')
    cooldown = _cooldown(schedule, row.get('steps'))
    return {
        **{name: row.get(name) for name in shared},
        'digest': runs.digest(config),
        'epochs': _epochs(row),
        'optimizer': optim.get('name'),
        'lr': optim.get('lr'),
        'schedule': f'{schedule.get("name")} with cooldown' if cooldown else schedule.get('name'),
        'warmup': schedule.get('warmup'),
        'cooldown': cooldown,
        'parametrization': optim.get('parametrization') or 'standard',
        'seed': config.get('seed'),
        'setting': runs.setting(config),
    }


def _cooldown(schedule: Mapping[str, Any], steps: Cell) -> str | None:
    """The cooldown as a share of the run's steps, or as it is written; None without one."""
    text = str(schedule.get('cooldown') or '')
    if not re.search('[1-9]', text):
        return None
    counted = re.fullmatch(r'(\d+) steps?', text)
    if counted and isinstance(steps, (int, float)) and steps:
        return f'{int(counted[1]) / steps:.0%}'
    return text


def _epochs(row: Mapping[str, Cell]) -> float | None:
    seen, size = row.get('examples_seen'), row.get('data_size')
    if not isinstance(seen, (int, float)) or not isinstance(size, (int, float)) or not size:
        return None
    return seen / size


def diagnostics(found: Sequence[Entry]) -> list[str]:
    """Lines on choices that a reviewer would question."""
    return [
        *_copied(found, 'lr', 'learning rate'),
        *_copied(found, 'warmup', 'warm-up'),
        *_repeated(found),
        *_mixed(found),
        *_seeds(found),
        *_unknown(found),
    ]


def _copied(found: Sequence[Entry], key: str, noun: str) -> list[str]:
    """Whether one value serves all sizes, or how many were tried at each."""
    sizes: dict[Any, set[str]] = {}
    for one in found:
        if one['parameters'] is not None and one[key] is not None:
            sizes.setdefault(one['parameters'], set()).add(str(one[key]))
    if len(sizes) < 2:
        return []
    every = set.union(*sizes.values())
    if len(every) == 1:
        same = f'one {noun}, {every.pop()}, serves all {len(sizes)} sizes: copied, not tuned'
        return [f'{same} for each of them']
    tried = [len(values) for values in sizes.values()]
    if min(tried) > 1:
        return [f'{noun}: {min(tried)} to {max(tried)} values tried at each of {len(sizes)} sizes']
    return [f'{noun}: differs between sizes; {tried.count(1)} of {len(sizes)} have one value alone']


def _repeated(found: Sequence[Entry]) -> list[str]:
    known = [one['epochs'] for one in found if one['epochs'] is not None]
    many = sum(epochs > _MANY_EPOCHS for epochs in known)
    if not known or max(known) <= 1:
        return []
    return [
        f'data are repeated, up to {max(known):.3g} epochs; {many} of {len(known)} runs see them '
        f'more than {_MANY_EPOCHS} times'
    ]


def _mixed(found: Sequence[Entry]) -> list[str]:
    lines = []
    for key in ('parametrization', 'optimizer', 'schedule'):
        values = sorted({str(one[key]) for one in found if one[key] is not None})
        if len(values) > 1:
            lines.append(f'runs differ in {key}: {", ".join(values)}')
    copies = len(found) - len({one['digest'] for one in found})
    if copies:
        lines.append(f'{copies} run(s) have the same config, seed included, as another')
    return lines


def _seeds(found: Sequence[Entry]) -> list[str]:
    """Whether the noise between seeds was measured."""
    seeds: dict[str, set[str]] = {}
    for one in found:
        seeds.setdefault(one['setting'], set()).add(str(one['seed']))
    counts = [len(values) for values in seeds.values()]
    several = [count for count in counts if count > 1]
    if not counts:
        return []
    if not several:
        return [f'one seed for each of {len(counts)} settings: noise between seeds is not measured']
    low, high = min(several), max(several)
    number = f'{low}' if low == high else f'{low} to {high}'
    lines = [f'{len(several)} of {len(counts)} settings have {number} seeds, the others one']
    return lines if len(several) < len(counts) else [f'{number} seeds for every setting']


def _unknown(found: Sequence[Entry]) -> list[str]:
    lines = []
    for key, noun in (('epochs', 'repetition of data'), ('lr', 'learning rate')):
        if missing := sum(one[key] is None for one in found):
            lines.append(f'{noun} is not known of {missing} of {len(found)} runs')
    return lines


def table(found: Sequence[Entry]) -> list[list[str]]:
    """The entries as rows of text under a header."""
    kept = [name for name in _COLUMNS if any(one[name] is not None for one in found)]
    return [['run', *kept], *([one['run'], *(_text(one[k]) for k in kept)] for one in found)]


def _text(value: Any) -> str:
    if value is None:
        return '-'
    if isinstance(value, float):
        return f'{value:.4g}'
    return short(value) if isinstance(value, int) and value >= 10_000 else str(value)


def versions() -> dict[str, str]:
    """Versions of Python and of the packages that fitted the curves."""
    return environment.versions() | {'scipy': importlib.metadata.version('scipy')}
