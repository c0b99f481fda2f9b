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

_MANY_EPOCHS = 4  # Muennighoff et al. 2023: repeats are about as good as new data up to 4 epochs

_COLUMNS = (
    *('digest', 'parameters', 'steps', 'batch_size', 'epochs', 'optimizer', 'lr'),
    *('data_size', 'schedule', 'warmup', 'cooldown', 'parametrization', 'seed', 'hardware'),
)

Entry = dict[str, Any]


def entries(rows: Sequence[Mapping[str, Cell]]) -> list[Entry]:
    """List the settings of each run, for rows of `runs.collect`.

    Returns:
      For each run: run, digest (first 12 digits of the config's SHA-256), parameters, steps,
      batch_size, epochs, data (source and split), data_size (different examples), flops,
      optimizer, lr, weight_decay, schedule, warmup, cooldown (share of the steps),
      parametrization, dtype (of activations), seed, setting (digest without the seed), commit (of
      this package) and hardware; None where unknown.
    """
    return [_entry(row) for row in rows]


def _entry(row: Mapping[str, Cell]) -> Entry:
    folder = paths.path(str(row['run']))
    config = run_folder.read_config(folder) or {}
    data, model = config.get('data') or {}, config.get('model') or {}
    optim = config.get('optim') or {}
    schedule = optim.get('schedule') or {}
    shared = ('run', 'parameters', 'steps', 'batch_size', 'data_size', 'flops', 'hardware')
    cooldown = _cooldown(schedule, row.get('steps'))
    return {
        **{name: row.get(name) for name in shared},
        'digest': runs.digest(config),
        'epochs': runs.count_epochs(row.get('examples_seen'), row.get('data_size')),
        'data': ' '.join(str(data[key]) for key in ('source', 'split') if data.get(key)) or None,
        'optimizer': optim.get('name'),
        'lr': optim.get('lr'),
        'weight_decay': optim.get('weight_decay', 0.0),
        'schedule': f'{schedule.get("name")} with cooldown' if cooldown else schedule.get('name'),
        'warmup': schedule.get('warmup'),
        'cooldown': cooldown,
        'parametrization': optim.get('parametrization') or 'standard',
        'dtype': model.get('dtype', 'float32'),
        'seed': config.get('seed'),
        'setting': runs.setting(config),
        'commit': _read_commit(folder),
    }


def _read_commit(folder: paths.Path) -> str | None:
    """Read the commit of this package from the newest step; None if it is not recorded."""
    saved = run_folder.newest(folder)
    versions = run_folder.read_meta(saved).get('versions', {}) if saved else {}
    return versions.get('commit')


def _cooldown(schedule: Mapping[str, Any], steps: Cell) -> str | None:
    """Format the cooldown as a share of the run's steps, or as written; None without a cooldown."""
    text = str(schedule.get('cooldown') or '')
    if not re.search('[1-9]', text):
        return None
    steps_match = re.fullmatch(r'(\d+) steps?', text)
    if steps_match and isinstance(steps, (int, float)) and steps:
        return f'{int(steps_match[1]) / steps:.0%}'
    return text


def diagnostics(entries: Sequence[Entry]) -> list[str]:
    """Comment on choices that a reviewer would question."""
    return [
        *_note_copied(entries, 'lr', 'learning rate'),
        *_note_copied(entries, 'warmup', 'warm-up'),
        *_note_repeats(entries),
        *_note_differences(entries),
        *_note_seeds(entries),
        *_note_unknown(entries),
    ]


def _note_copied(entries: Sequence[Entry], key: str, noun: str) -> list[str]:
    """Report whether all sizes share one value, or how many were tried at each."""
    sizes: dict[Any, set[str]] = {}
    for entry in entries:
        if entry['parameters'] is not None and entry[key] is not None:
            sizes.setdefault(entry['parameters'], set()).add(str(entry[key]))
    if len(sizes) < 2:
        return []
    values_tried = set.union(*sizes.values())
    if len(values_tried) == 1:
        value = values_tried.pop()
        return [f'all {len(sizes)} sizes share one {noun}, {value}: copied, not tuned for each']
    counts = [len(values) for values in sizes.values()]
    if min(counts) > 1:
        return [
            f'{noun}: {min(counts)} to {max(counts)} values tried at each of {len(sizes)} sizes'
        ]
    return [f'{noun}: differs between sizes; {counts.count(1)} of {len(sizes)} have a single value']


def _note_repeats(entries: Sequence[Entry]) -> list[str]:
    all_epochs = [entry['epochs'] for entry in entries if entry['epochs'] is not None]
    many = sum(epochs > _MANY_EPOCHS for epochs in all_epochs)
    if not all_epochs or max(all_epochs) <= 1:
        return []
    return [
        f'data are repeated, up to {max(all_epochs):.3g} epochs; {many} of {len(all_epochs)} runs '
        f'see them more than {_MANY_EPOCHS} times'
    ]


def _note_differences(entries: Sequence[Entry]) -> list[str]:
    lines = []
    for key in ('parametrization', 'optimizer', 'schedule'):
        values = sorted({str(entry[key]) for entry in entries if entry[key] is not None})
        if len(values) > 1:
            lines.append(f'runs differ in {key}: {", ".join(values)}')
    copies = len(entries) - len({entry['digest'] for entry in entries})
    if copies:
        lines.append(f'{copies} run(s) repeat the config of another run, seed included')
    return lines


def _note_seeds(entries: Sequence[Entry]) -> list[str]:
    """Report whether the noise between seeds was measured."""
    seeds: dict[str, set[str]] = {}
    for entry in entries:
        seeds.setdefault(entry['setting'], set()).add(str(entry['seed']))
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


def _note_unknown(entries: Sequence[Entry]) -> list[str]:
    lines = []
    for key, noun in (('epochs', 'repetition of data'), ('lr', 'learning rate')):
        if missing := sum(entry[key] is None for entry in entries):
            lines.append(f'{noun} is unknown for {missing} of {len(entries)} runs')
    return lines


def make_table(entries: Sequence[Entry]) -> list[list[str]]:
    """Format the entries as rows of text under a header."""
    columns = [name for name in _COLUMNS if any(entry[name] is not None for entry in entries)]
    return [
        ['run', *columns],
        *([entry['run'], *(_text(entry[k]) for k in columns)] for entry in entries),
    ]


def _text(value: Any) -> str:
    if value is None:
        return '-'
    if isinstance(value, float):
        return f'{value:.4g}'
    return short(value) if isinstance(value, int) and value >= 10_000 else str(value)


def versions() -> dict[str, str]:
    """Look up the versions of Python and of the packages that fitted the curves."""
    return environment.versions() | {'scipy': importlib.metadata.version('scipy')}
