"""Run folders as a table: a row for each run, with its size, cost and results."""

from __future__ import annotations

import csv
import hashlib
import io
import json
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from vit_jax.errors import UserError
from vit_jax.profiling import flops
from vit_jax.scaling.noise import SETTING
from vit_jax.storage import paths, run_folder
from vit_jax.storage.run_folder import Series

Cell = str | int | float | None
FlopsOf = Callable[[dict[str, Any]], float | None]
_TASK, _CLASSIFY = 'config.task.name', 'classify'
_FALLING_SCHEDULES = ('linear', 'cosine')  # schedules that fall to the end without a cooldown


def collect(folders: Sequence[str | paths.Path], flops_of: FlopsOf) -> list[dict[str, Cell]]:
    """Collect a row for every run except trunks, see `find_runs`.

    Unknown cells are None. Columns are those of `read_run` and one for each config value in which
    the runs differ, such as `config.model.width`. Runs that differ only in the seed have the same
    `setting`.

    Args:
      folders: Run folders, or folders that contain run folders at any depth.
      flops_of: `meta` of a checkpoint -> mean FLOPs of a training step, or None.

    Raises:
      UserError: A folder does not exist or does not contain a run.
    """
    different, _ = find_runs(folders)
    rows = [read_run(run, flops_of) for run in different]
    differing = zip(rows, config_differences(different), shared_settings(different), strict=True)
    return [{**row, **values, **setting} for row, values, setting in differing]


def find_runs(folders: Sequence[str | paths.Path]) -> tuple[list[paths.Path], list[str]]:
    """Find the runs in folders, without trunks, and a line for each trunk; see `collect`."""
    all_runs = [run for folder in folders for run in run_folder.find_runs(paths.path(folder))]
    different = list(dict.fromkeys(all_runs))
    left_out = trunk_notes(different)
    return [run for run in different if run not in left_out], list(left_out.values())


def trunk_notes(folders: Sequence[paths.Path]) -> dict[paths.Path, str]:
    """Describe each run that is a trunk.

    A trunk is a run without a cooldown from which other runs branch off, or whose config keeps
    steps for them. A branch may name the trunk by its path on another machine: then the run of the
    same name next to the branch counts.
    """
    configs = {folder: _config(folder) for folder in folders}
    origins = [trunk for folder, config in configs.items() for trunk in _origins(folder, config)]
    notes = {}
    for folder, config in configs.items():
        branches = origins.count(paths.absolute(folder))
        keep_steps = (config.get('checkpoint') or {}).get('keep_steps')
        if (branches or keep_steps) and not cools_down(config):
            reason = (
                f'{branches} runs branch off from it' if branches else 'it keeps steps for them'
            )
            notes[folder] = f'{folder}: a trunk, whose learning rate does not fall: {reason}'
    return notes


def _config(folder: paths.Path) -> Mapping[str, Any]:
    """Read the config of a run; {} if it is damaged, which `read_run` reports."""
    try:
        return run_folder.read_config(folder) or {}
    except ValueError:
        return {}


def _origins(folder: paths.Path, config: Mapping[str, Any]) -> Iterator[paths.Path]:
    if name := (config.get('branch') or {}).get('from'):
        trunk = paths.absolute(name)
        sibling = paths.absolute(folder).parent / trunk.name
        yield trunk if trunk == sibling or not sibling.exists() else sibling


def cools_down(config: Mapping[str, Any]) -> bool:
    """Return whether the learning rate of a run falls to the end."""
    schedule = (config.get('optim') or {}).get('schedule') or {}
    # A duration such as '500 steps', '5%' or 0: its unit does not matter.
    cooldown = re.search('[1-9]', str(schedule.get('cooldown') or ''))
    return cooldown is not None or schedule.get('name') in _FALLING_SCHEDULES


def read_run(folder: paths.Path, flops_of: FlopsOf) -> dict[str, Cell]:
    """Read the row of one run, finished or not.

    Returns:
      run, model, hardware, finished (0 or 1), steps, batch_size, parameters,
      examples_seen (steps times batch; counted if there are buckets), tokens_seen (of the
      target, without padding; only with buckets), data_size (training examples), epochs
      (examples_seen over data_size), flops (of all examples seen, forward and backward, including
      padding), chip_hours (of training, without evaluations and saving), then the last value of
      every metric.

    Raises:
      UserError: config.json is damaged; see also `flops_of`.
    """
    try:
        config = run_folder.read_config(folder) or {}
        batch_size = int(config['batch_size'])
        model = str(config['model']['name'])
        buckets = bool(config.get('data', {}).get('buckets'))
    except (ValueError, KeyError, TypeError) as e:
        raise UserError(f'{folder / run_folder.CONFIG} is not a run config ({e!r})') from e
    series, saved = run_folder.read_series(folder), run_folder.newest(folder)
    meta = run_folder.read_meta(saved) if saved else {}
    logged = [int(steps[-1]) for steps, _ in series.values()]
    steps = max([*logged, int(saved.name) if saved else 0])
    try:
        per_step = flops_of(meta) if meta else None
    except UserError as e:
        raise UserError(f'{saved}: {e}') from e
    hardware, size = meta.get('hardware'), meta.get('num_examples')
    counts = _count_examples(series) if buckets else {'examples_seen': steps * batch_size}
    return {
        'run': str(folder),
        'model': model,
        'hardware': hardware,
        'finished': int(run_folder.read_result(folder) is not None),
        'steps': steps,
        'batch_size': batch_size,
        'parameters': run_folder.count_saved_parameters(saved) if saved else None,
        **counts,
        'data_size': size,
        'epochs': count_epochs(counts['examples_seen'], size),
        'flops': None if per_step is None else round(per_step * steps),
        'chip_hours': _chip_hours(hardware, series.get('train/step_sec')),
        **{name: _finite(values[-1]) for name, (_, values) in series.items()},
    }


def count_epochs(examples: Cell, size: Cell) -> float | None:
    """Divide the examples seen by the training examples; None if one is unknown."""
    if not isinstance(examples, (int, float)) or not isinstance(size, (int, float)) or not size:
        return None
    return examples / size


def _chip_hours(hardware: str | None, step_sec: Series | None) -> float | None:
    """Multiply the number of chips by the hours of training."""
    described = re.fullmatch(r'(\d+) x (.+?)(?: on \d+ slices)? \(\w+\)', hardware or '')
    if described is None or step_sec is None:
        return None
    chips = flops.chips(int(described[1]), described[2])
    return float(chips * _seconds(step_sec).sum() / 3600)


def _seconds(step_sec: Series) -> np.ndarray:
    """Compute the seconds of training between each line of metrics and the line before."""
    steps, seconds = step_sec
    return np.diff(steps, prepend=0) * seconds


def _count_examples(series: Mapping[str, Series]) -> dict[str, Cell]:
    """Count sentences and tokens of training: logged rates times the seconds between log lines."""
    names = {'examples_seen': 'train/sentences_per_sec', 'tokens_seen': 'train/tokens_per_sec'}
    if 'train/step_sec' not in series:
        return dict.fromkeys(names)
    seconds = _seconds(series['train/step_sec'])
    return {name: round(float(series[rate][1] @ seconds)) for name, rate in names.items()}


def _finite(value: float) -> float | None:
    return float(value) if math.isfinite(value) else None


def config_differences(folders: Sequence[paths.Path]) -> list[dict[str, Cell]]:
    """List, for every run, the config values that differ, such as `config.model.width`."""
    configs = [_flatten(run_folder.read_config(folder) or {}) for folder in folders]
    keys = list(dict.fromkeys(key for config in configs for key in config))
    differing = [k for k in keys if len({json.dumps(config.get(k)) for config in configs}) > 1]
    return [{f'config.{key}': config.get(key) for key in differing} for config in configs]


def _flatten(tree: Mapping[str, Any], prefix: str = '') -> dict[str, Any]:
    """Flatten {'model': {'width': 64}} to {'model.width': 64}."""
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, Mapping):
            flat |= _flatten(value, f'{prefix}{key}.')
        else:
            flat[prefix + key] = json.dumps(value) if isinstance(value, list) else value
    return flat


def shared_settings(folders: Sequence[paths.Path]) -> list[dict[str, str]]:
    """List, for every run, `{'setting': digest}`; {} if all runs have different settings."""
    configs = [run_folder.read_config(folder) or {} for folder in folders]
    digests = [setting(config) for config in configs]
    seeds = [config.get('seed') for config in configs]
    pairs = set(zip(digests, seeds, strict=True))
    if len(pairs) == len(set(digests)):
        return [{} for _ in folders]
    return [{SETTING: digest} for digest in digests]


def setting(config: Mapping[str, Any]) -> str:
    """Compute the digest of a config without its seed; a branch includes its trunk's config."""
    values = _seedless(config)
    branch = dict(config.get('branch') or {})
    if branch.get('from') and (trunk := _trunk(branch['from'])) is not None:
        # The trunk may train longer for other branches and keep their checkpoints.
        common = {key: trunk[key] for key in trunk if key not in ('total', 'checkpoint')}
        values['branch'] = branch | {'from': digest(_seedless(common))}
    return digest(values)


def _seedless(config: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in config.items() if key != 'seed'}


def _trunk(folder: str) -> dict[str, Any] | None:
    """Read the config of a trunk; None if it is missing or unreachable."""
    try:
        return run_folder.read_config(paths.path(folder))
    except UserError:
        return None


def digest(config: Mapping[str, Any]) -> str:
    """Compute the first 12 digits of the SHA-256 of a config's JSON with sorted keys."""
    text = json.dumps(config, sort_keys=True, separators=(',', ':'))
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def select_classification(
    rows: Sequence[dict[str, str]], by: Sequence[str]
) -> tuple[list[dict[str, str]], list[str]]:
    """Select the rows of classification runs; all rows if there are none.

    Metrics of the same name, such as accuracy or loss, differ between tasks.

    Args:
      rows: Rows of runs, read from the table of `collect`.
      by: Columns whose values distinguish curves; with the task among them, all rows are kept.

    Returns:
      Rows, and a line for each row left out.
    """
    tasks = [row.get(_TASK, '') for row in rows]
    if _TASK in by or _CLASSIFY not in tasks:
        return list(rows), []
    pairs = list(zip(rows, tasks, strict=True))
    left_out = [f'{row["run"]}: its task is {task}' for row, task in pairs if task != _CLASSIFY]
    return [row for row, task in pairs if task == _CLASSIFY], left_out


def to_csv(rows: Sequence[Mapping[str, Cell]]) -> str:
    """Format rows as CSV with a header; columns in the order in which they first appear."""
    columns = list(dict.fromkeys(name for row in rows for name in row))
    text = io.StringIO()
    writer = csv.DictWriter(text, columns, restval='', lineterminator='\n')
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()
