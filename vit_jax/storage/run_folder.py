"""Run folders: file names, and reading of files.

config.json      the resolved config
metrics.jsonl    a line {step, name: value, ...} for each logged result
times.jsonl      how the run spent its time, see `times`
result.json      the final evaluation of a run that is complete or ended early
curves.png       curves of the metrics
writers.json     the run's ids at services, and the data sent to them
wandb/           files of W&B
profile/         a trace of some steps, if requested
vocab.model      the vocabulary of a run on text
statistics_0.npz a file that the task read, such as the statistics of a teacher
checkpoints/     a folder for each saved step
lock             the run's process, see `lock`

TensorBoard's event files are also in the folder, but not read by this module.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import logging
import math
import os
import pathlib
import re
import tempfile
from collections.abc import Callable
from typing import Any

import numpy as np

from vit_jax.errors import UnsuitableFile, UserError, hide_secrets
from vit_jax.storage import paths

CONFIG = 'config.json'
METRICS = 'metrics.jsonl'
TIMES = 'times.jsonl'
RESULT = 'result.json'
ENDED = 'ended'  # its key for the reason why a run ended before its last step
CURVES = 'curves.png'
PROFILE = 'profile'
WRITERS = 'writers.json'
WANDB = 'wandb'
VOCAB = 'vocab.model'
KEPT_FILE = re.compile(r'statistics_\d+\.npz')  # a name of `kept_file`
CHECKPOINTS = 'checkpoints'
REJECTED = 'rejected'  # subfolder of `checkpoints/` for rejected steps
EVENTS = 'events.out.tfevents.'
# Files in the folder of a step: its items, and two marks of a finished save.
VARIABLES, TRAINING, META = 'variables', 'training', 'meta'
MANIFEST = 'manifest.json'
COMMITTED = 'commit_success.txt'

_log = logging.getLogger(__name__)

Series = tuple[np.ndarray, np.ndarray]  # steps and values


class Unfinished(Exception):
    """A step whose save never finished."""


class Damaged(Exception):
    """A step that changed after it was saved; the message names the file and the fault."""


def find_runs(folder: paths.Path) -> list[paths.Path]:
    """Find the run folders in `folder` at any depth, including itself, sorted by name.

    Raises:
      UserError: if there are none.
    """
    names = [name for name in paths.files(folder) if name.split('/')[-1] == CONFIG]
    if not names:
        raise UserError(f'{str(folder)!r} holds no run: there is no {CONFIG} in it')
    return [(folder / name).parent for name in names]


def read_config(folder: paths.Path) -> dict[str, Any] | None:
    """Read the config as plain JSON; None if the folder holds no run.

    If the file is missing or damaged, the config of the newest checkpoint is read.

    Raises:
      UserError: if the file cannot be read, and no checkpoint has the config.
    """
    if (text := paths.read_text(folder / CONFIG, errors='replace')) is None:
        return _saved_config(folder)
    try:
        return hide_secrets(dict(paths.parse_json(text)))
    except (ValueError, TypeError) as error:
        if (saved := _saved_config(folder)) is None:
            raise UserError(f'{folder / CONFIG} is not a run config ({error!r})') from error
        _log.warning('%s is damaged: using the config of the checkpoint', folder / CONFIG)
        return saved


def kept_file(name: str) -> str:
    """Name the copy of a file that a task reads, such as `statistics[0]`."""
    return f'{name.replace("[", "_").replace("]", "")}.npz'


def _saved_config(folder: paths.Path) -> dict[str, Any] | None:
    """Read the config of the newest checkpoint, or None."""
    for step in reversed(steps(folder)):
        with contextlib.suppress(ValueError):
            saved = read_meta(folder / CHECKPOINTS / str(step)).get('config')
            if isinstance(saved, dict):
                return hide_secrets(saved)
    return None


def read_result(folder: paths.Path) -> dict[str, float] | None:
    """Read the final evaluation, {name: value}; None while the run is not complete.

    Excludes the reason why a run ended early. A damaged file counts as missing, so that the run is
    evaluated again.
    """
    result = _read_result(folder)
    if result is None:
        return None
    return {name: value for name, value in result.items() if name != ENDED}


def read_ending(folder: paths.Path) -> str:
    """Read the reason why a run ended before its last step; empty if it did not."""
    return str((_read_result(folder) or {}).get(ENDED, ''))


def _read_result(folder: paths.Path) -> dict[str, Any] | None:
    if (text := paths.read_text(folder / RESULT, errors='replace')) is None:
        return None
    try:
        return dict(paths.parse_json(text))
    except (ValueError, TypeError):
        _log.warning('%s is damaged: the run will be evaluated again', folder / RESULT)
        return None


def read_metrics(folder: paths.Path) -> list[dict[str, Any]]:
    """Read the metrics, one dict per line; see `read_lines`."""
    return read_lines(folder / METRICS, _parse_metrics)


def read_lines(
    file: paths.Path, parse: Callable[[str], dict[str, Any] | None]
) -> list[dict[str, Any]]:
    """Read the lines of a growing file, which may not exist yet.

    Damaged lines, for which `parse` returns None, are skipped with a warning; an incomplete last
    line after a crash is skipped without one.
    """
    complete, _, last = (paths.read_text(file, 'replace', paths.LOG) or '').rpartition('\n')
    lines = [parse(line) for line in complete.split('\n')] if complete else []
    if damaged := lines.count(None):
        _log.warning('%s: %d damaged lines are skipped', file, damaged)
    return [line for line in (*lines, parse(last)) if line]


def _parse_metrics(text: str) -> dict[str, Any] | None:
    """Parse a line of the metrics; None if it is damaged."""
    try:
        line = paths.parse_json(text)
    except ValueError:
        return None
    is_valid = isinstance(line, dict) and isinstance(line.get('step'), int) and '\ufffd' not in text
    return line if is_valid else None


def read_series(folder: paths.Path) -> dict[str, Series]:
    """Read every numeric metric as (steps, values), in ascending order of steps, by name.

    If a step has two lines, the later one counts.
    """
    series: dict[str, dict[int, float]] = {}
    for line in read_metrics(folder):
        step = line.pop('step')
        for name, value in line.items():
            if isinstance(value, (int, float)):
                series.setdefault(name, {})[step] = value
    return {name: _sort_points(points) for name, points in series.items()}


def _sort_points(points: dict[int, float]) -> Series:
    steps = sorted(points)
    return np.array(steps), np.array([points[s] for s in steps], float)


def steps(folder: paths.Path) -> list[int]:
    """List the steps with a finished checkpoint, ascending, without reading their files."""
    return finished_steps(folder / CHECKPOINTS)


def newest(folder: paths.Path) -> paths.Path | None:
    """Return the folder of the newest step with a finished checkpoint, or None."""
    saved = steps(folder)
    return folder / CHECKPOINTS / str(saved[-1]) if saved else None


def count_parameters(folder: paths.Path) -> int | None:
    """Count the parameters of the model; None without a checkpoint."""
    step = newest(folder)
    return None if step is None else count_saved_parameters(step)


def sync(folder: paths.Path) -> None:
    """Wait until the growing files of a local run would survive a power cut.

    All other files are written by `paths.write_atomic`, and object storage loses none.
    """
    if paths.is_remote(folder) or not folder.is_dir():
        return
    for file in folder.iterdir():
        if file.name in (METRICS, TIMES) or file.name.startswith(EVENTS):
            with contextlib.suppress(FileNotFoundError):  # just deleted
                paths.sync(file)
    paths.sync(folder)


def has_saved_nothing(folder: paths.Path) -> bool:
    """Return whether the folder has no result and no step, finished, unfinished or rejected."""
    root = folder / CHECKPOINTS
    if step_numbers(root) or (root / REJECTED).is_dir():
        return False
    return not (folder / RESULT).is_file()


def clear(folder: paths.Path) -> None:
    """Delete all files of a run except the lock, which the caller must hold."""
    names = (CONFIG, METRICS, TIMES, RESULT, CURVES, VOCAB, WRITERS)
    for file in list(folder.iterdir()):
        if file.name in names or file.name.startswith(EVENTS) or KEPT_FILE.fullmatch(file.name):
            file.unlink()
        elif file.name in (CHECKPOINTS, PROFILE, WANDB):
            paths.remove(file)


def require_writable(folder: str | os.PathLike[str]) -> None:
    """Check, without leaving any file, that a run could write to the folder.

    Raises:
      UserError: if the folder, or its nearest existing parent, is not writable, or if it is inside
        the checkpoints of another run.
    """
    if reason := reason_reserved(folder) or paths.obstacle(folder):
        raise UserError(f'cannot write to the workdir {paths.absolute(folder)}: {reason}')


def reason_reserved(file: str | os.PathLike[str]) -> str:
    """Return why only the run itself may write a file; empty if others may also write it."""
    path = paths.absolute(file)
    for folder in (path, *path.parents):
        if folder.name == CHECKPOINTS and _holds_run(folder.parent):
            return f'{folder} holds the checkpoints of a run'
    run_files = (CONFIG, METRICS, TIMES, RESULT, VOCAB, WRITERS)
    is_own = path.name in run_files or KEPT_FILE.fullmatch(path.name)
    return 'it belongs to the run itself' if is_own and _holds_run(path.parent) else ''


def _holds_run(folder: paths.Path) -> bool:
    """Return whether a run has logged or saved anything in a folder."""
    with paths.reaching(folder):
        root = folder / CHECKPOINTS
        marked = (is_marked(root / str(step)) for step in step_numbers(root))
        return (folder / METRICS).is_file() or any(marked)


def step_numbers(root: paths.Path) -> list[int]:
    """List all steps in a checkpoint folder, finished or not, ascending."""
    entries = root.iterdir() if root.is_dir() else ()
    numbers = (p for p in entries if p.name.isdecimal() and p.name == str(int(p.name)))
    return sorted(int(p.name) for p in numbers if p.is_dir())


def finished_steps(root: paths.Path) -> list[int]:
    """List the finished steps, ascending, without reading their files."""
    return [step for step in step_numbers(root) if _has_manifest(root / str(step))]


def is_finished(directory: paths.Path) -> bool:
    """Return whether the save of the step finished."""
    return all((directory / name).is_file() for name in (MANIFEST, COMMITTED))


def is_marked(directory: paths.Path) -> bool:
    """Return whether the step has one of the two marks, so that it may have been finished."""
    return any((directory / name).is_file() for name in (MANIFEST, COMMITTED))


def read_manifest(directory: paths.Path) -> dict[str, str]:
    """Read the fingerprint of every file of the step's items, by name.

    Raises:
      Unfinished: if the save of the step never finished.
      Damaged: if the manifest cannot be read, or belongs to another step.
    """
    if not is_finished(directory):
        raise Unfinished(f'no {MANIFEST} or no {COMMITTED}: the save was never finished')
    try:
        content = paths.parse_json(paths.read_bytes(directory / MANIFEST))
        step, files = content['step'], dict(content['files'])
    except (ValueError, KeyError, TypeError, UnsuitableFile) as error:
        raise Damaged(f'{MANIFEST} is unreadable ({error})') from error
    if escaping := [name for name in files if not paths.stays_inside(name)]:
        raise Damaged(f'{MANIFEST} lists {escaping[0]!r}, which is outside of the step')
    if invalid := [name for name, entry in files.items() if not isinstance(entry, str)]:
        raise Damaged(f'{MANIFEST} has no fingerprint of {invalid[0]!r}')
    if str(step) != directory.name:
        raise Damaged(f'{MANIFEST} says step {step}: a copied or renamed directory')
    return files


def read_meta(directory: paths.Path) -> dict[str, Any]:
    """Read the run's metadata at this step; {} if the file is missing."""
    text = paths.read_text(directory / META / 'metadata')
    return {} if text is None else paths.parse_json(text)


def count_saved_parameters(directory: paths.Path) -> int | None:
    """Count parameters from the shapes in Orbax's metadata; None if that file is missing."""
    text = paths.read_text(directory / VARIABLES / '_METADATA')
    if text is None:
        return None
    shapes = [
        entry['value_metadata']['write_shape']
        for entry in paths.parse_json(text)['tree_metadata'].values()
        if entry['key_metadata'][0]['key'] == 'params'
    ]
    return sum(math.prod(shape) for shape in shapes)


def _has_manifest(directory: paths.Path) -> bool:
    try:
        read_manifest(directory)
    except (Unfinished, Damaged):
        return False
    return True


class Mirror:
    """A local folder for growing files, with copies in a remote folder.

    A thread uploads complete files. A local folder is used directly, without uploads.

    Attributes:
      folder: Local folder to write to.
      uploads: Whether it mirrors a remote folder.
    """

    def __init__(self, remote: paths.Path):
        self.folder, self._remote = remote, remote
        self.uploads = paths.is_remote(remote)
        if not self.uploads:
            return
        self._spool = tempfile.TemporaryDirectory(prefix='vit_jax-')
        self.folder = pathlib.Path(self._spool.name) / remote.name
        self.folder.mkdir()
        self._thread = concurrent.futures.ThreadPoolExecutor(1, 'mirror')
        self._sent: dict[str, tuple[int, int]] = {}
        self._last: concurrent.futures.Future[None] | None = None

    def fetch(self, name: str) -> None:
        """Download a file of the remote folder if it exists."""
        if not self.uploads:
            return
        if (text := paths.read_text(self._remote / name, errors='replace')) is not None:
            (self.folder / name).write_text(text, encoding='utf-8')

    def publish(self) -> None:
        """Start uploading changed files, unless an upload is still running."""
        if not self.uploads or (self._last and not self._last.done()):
            return
        self._last = self._thread.submit(self._try_to_put)

    def flush(self) -> None:
        """Upload changed files and wait."""
        if self.uploads:
            self._thread.submit(self._try_to_put).result()

    def close(self) -> None:
        """Upload the last changes and stop.

        Raises:
          UserError: if object storage cannot be reached.
        """
        if not self.uploads:
            return
        self._thread.shutdown()
        with self._spool:
            self._put()

    def _try_to_put(self) -> None:
        try:
            self._put()
        except UserError as error:
            _log.warning('%s; trying again later', error)

    def _put(self) -> None:
        for file in self.folder.iterdir():
            status = file.stat()
            state = status.st_size, status.st_mtime_ns
            if self._sent.get(file.name) != state:
                paths.write_atomic(self._remote / file.name, file.read_bytes())
                self._sent[file.name] = state
