"""Checkpoints: saved by Orbax in the background, complete or absent, verified when read.

A step is a directory `checkpoints/STEP` of Orbax items (`format`).
`manifest.json` is written after everything else and before Orbax commits the step: a directory
without it was never finished.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import math
import os
import re
import sys
import traceback
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NoReturn

import jax
import numpy as np

from vit_jax.checkpoints import format as checkpoint_format
from vit_jax.checkpoints import manifest
from vit_jax.errors import UserError, nearest
from vit_jax.runtime.processes import lost_another, on_process_0
from vit_jax.signatures import Steps
from vit_jax.storage import paths, run_folder

PyTree = Any
_log = logging.getLogger(__name__)


class Checkpointer:
    """Saver and restorer of the steps of one run; every process of the run makes one.

    The caller must hold the workdir's lock, as the remains of killed runs are removed.

    Args:
      directory: has one directory a step; made by the first save.
      keep_last: number of newest steps to keep, at least 1.
      keep_every: multiples of it are kept for good; 0 for none.
      keep_steps: further steps that are saved and kept for good, as for other runs to branch off.
      keep_best: a number of an evaluation, as `test/accuracy`, or `min:test/loss` if lower is
        better: the step with the best one is saved when it is evaluated, and kept until another is
        better; `--step best` reads it. Empty for none.

    Attributes:
      is_lost: whether the last save was deleted while it was written, so that another is due at
        once. In a job of several processes this is an error.
      keep_steps: as given.
    """

    def __init__(
        self,
        directory: str | Path,
        *,
        keep_last: int = 2,
        keep_every: Steps = 0,
        keep_steps: Sequence[Steps] = (),
        keep_best: str = '',
    ) -> None:
        if keep_last < 1 or keep_every < 0:
            wrong = f'{keep_last} and {keep_every}'
            raise UserError(f'checkpoint: keep_last must be >= 1 and keep_every >= 0, not {wrong}')
        logging.getLogger('absl').addFilter(not_of_a_failed_save)
        silence_failed_saves()
        self.directory = paths.absolute(directory)
        self._staging = checkpoint_format.Staging(self.directory)
        self._keep, self.keep_steps = (keep_last, keep_every), frozenset(keep_steps)
        self._keeps_best = bool(keep_best)
        self._best: int | None = None
        self._saving: int | None = None
        self._place: FolderHandle | None = None  # that is written to
        self._newest: int | None = None  # of those that this process has saved
        self.is_lost = False
        self._saved: checkpoint_format.Items = {}
        import orbax.checkpoint as ocp  # takes a quarter of a second

        self._writer = ocp.AsyncCheckpointer(
            checkpoint_format.handler(),
            async_options=ocp.options.AsyncOptions(
                post_finalization_callback=self._list_files,
                # A directory that cannot be made fails at once, not by a timeout.
                create_directories_asynchronously=False,
            ),
            temporary_path_class=self._staging.path_class(),
        )

    def __enter__(self) -> Checkpointer:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        # A save waits for all processes, and one that is lost does not come. Ctrl-C waits for none.
        lost = isinstance(error, Exception) and lost_another(error)
        if not (lost or isinstance(error, KeyboardInterrupt)):
            self.close()

    def steps(self) -> list[int]:
        """The finished steps in ascending order; their files are not verified."""
        return run_folder.finished_steps(self.directory)

    def save(self, step: int, state: PyTree, meta: dict[str, Any]) -> None:
        """Start writing a step; return once the arrays are copied from the devices.

        Waits for the save before, which may be lost. A step that is already there is left alone.

        Args:
          step: the directory's name.
          state: a dataclass or dict of pytrees of arrays; `load_variables` reads its `params`,
            `collections` and `ema`.
          meta: JSON values; records the best step, see `best`.

        Raises:
          UserError: if the disk is full or not writable, in this save or the one before.
        """
        self._finish(self._lose)
        self.is_lost = False
        if on_process_0(lambda: step in self._there()):
            return
        self._saving, self._saved = step, checkpoint_format.shapes(state)
        if self._keeps_best:
            known = best_from_meta(meta, KEPT)
            self._best = known.step if known else None
        try:
            args = checkpoint_format.save_args(state, meta)
            self._writer.save(
                checkpoint_format.orbax_path(self._staging.folder / str(step)), args=args
            )
            if not paths.is_remote(self._staging.folder):
                self._leave_place()
                self._place = FolderHandle(self._staging.folder)
        except Exception as error:
            self._fail(error)

    def _there(self) -> list[int]:
        """The finished steps, with a warning if the newest of this run is no longer among them."""
        steps = self.steps()
        if self._newest is not None and self._newest not in steps:
            _log.warning('%s/%d was deleted during the run', self.directory, self._newest)
        return steps

    def check(self) -> None:
        """Raise as `save` does if the save in the background has failed; call it often."""
        try:
            self._writer.check_for_errors()
        except Exception as error:
            self._lose(error)

    def wait(self) -> None:
        """Block until the background save is finished; raise as `save` does, or if it is lost."""
        self._finish(self._fail)

    def _finish(self, failed: Callable[[Exception], None]) -> None:
        if self._saving is None:
            return
        try:
            self._writer.wait_until_finished()
        except Exception as error:
            failed(error)
            return
        self._newest, self._saving = self._saving, None
        self._staging.clear()
        if jax.process_index() == 0:
            manifest.prune(self.directory, *self._keep, {self._best, *self.keep_steps})

    def close(self) -> None:
        """Wait for the save in the background and end Orbax's threads."""
        try:
            self.wait()
        finally:
            with contextlib.suppress(OSError):  # a failed save, which `wait` has reported before
                self._writer.close()
            self._staging.close()
            self._leave_place()

    def restore_latest(
        self, target: PyTree, *, strict: bool = False
    ) -> tuple[int, PyTree, dict[str, Any]] | None:
        """Restore the newest intact step; None if no save was ever finished.

        Newer steps are moved to `rejected/` with a warning, so that the run can save them again;
        only Orbax's temporary folders are deleted.

        Args:
          target: the state with a `jax.ShapeDtypeStruct` with sharding for each array;
            the device layout of the run that saved it does not matter.
          strict: raise if a newer step is damaged instead of going back.

        Returns:
          The step, the state, and the `meta` given to `save`.

        Raises:
          UserError: if there are steps but none is intact, or if the step does not fit `target`;
            names the arrays with both shapes or dtypes.
        """
        self.wait()
        step = on_process_0(lambda: self._select(strict))
        return None if step < 0 else _read(self.directory, step, target)

    def _list_files(self) -> None:
        """Write the manifest: on process 0, when all processes have written, before the commit.

        It certifies only arrays that can be opened: without it the step counts as unfinished.
        """
        assert self._saving is not None
        written = manifest.uncommitted_step(self._staging.folder, self._saving)
        checkpoint_format.require_written(checkpoint_format.orbax_path(written), self._saved)
        manifest.write(self._staging.folder, self._saving)
        self._staging.put(self._saving)

    def _leave_place(self) -> None:
        if self._place:
            self._place.close()
        self._place = None

    def _lose(self, error: Exception) -> None:
        """Leave it to the next save if this one was deleted while it was written; else fail."""
        if jax.process_count() > 1 or not (self._place and self._place.is_gone()):
            self._fail(error)
        _log.warning('%s/%d was deleted while it was written', self.directory, self._saving)
        self._saving, self.is_lost = None, True

    def _fail(self, error: Exception) -> NoReturn:
        step, self._saving = self._saving, None
        reason = str(error) if isinstance(error, UserError) else disk_reason(error)
        if self._place and self._place.is_gone():
            reason = 'it was deleted while it was written'
        if reason is None and paths.is_remote(self.directory):
            reason = paths.first_line(error)
        if step is None or reason is None:
            raise error
        with paths.reaching(self.directory):
            if jax.process_index() == 0:
                manifest.discard(self.directory, step)
            finished = self.steps() or 'none'
        raise UserError(
            f'the checkpoint of step {step} could not be written to {self.directory}: {reason}. '
            f'Finished steps: {finished}; once that is fixed, the same command continues from '
            'the last of them'
        ) from error

    def _select(self, strict: bool) -> int:
        """The step to restore, or -1."""
        step, damaged = manifest.newest_intact(self.directory)
        if damaged and (strict or step is None):
            raise _damage(self.directory, damaged)
        if step is None and (names := manifest.remains(self.directory)):
            raise UserError(
                f'{self.directory} has no finished checkpoint, but {", ".join(names)}: restore '
                f'what is missing ({run_folder.MANIFEST}, {run_folder.COMMITTED}), or start over '
                'by --restart, which moves these folders aside'
            )
        manifest.clear_newer(self.directory, step)
        return -1 if step is None else step


def restore(directory: str | Path, step: int, target: PyTree) -> tuple[int, PyTree, dict[str, Any]]:
    """Restore a kept step of any run's `checkpoints`, as `Checkpointer.restore_latest`.

    No file is changed.

    Raises:
      UserError: if there is no such step, it is damaged, or does not fit `target`.
    """
    directory = paths.absolute(directory)
    on_process_0(lambda: _require_intact(directory, step))
    return _read(directory, step, target)


def _read(directory: Path, step: int, target: PyTree) -> tuple[int, PyTree, dict[str, Any]]:
    with checkpoint_format.readable_path(directory / str(step)) as here:
        state, meta = checkpoint_format.read(here, target)
    return step, state, meta


def load_variables(
    directory: str | Path, step: Step = None
) -> tuple[int, dict[str, PyTree], dict[str, Any]]:
    """Read the variables for inference into numpy arrays, without the optimizer state.

    The parameters are the averaged ones if the run kept them.

    Args:
      directory: a run's `checkpoints` directory; not changed.
      step: the step to read, or 'best'; by default the newest intact one.

    Returns:
      The step, `{'params': ..., other collections}` and the `meta` given to `save`.

    Raises:
      UserError: if there is no such step, or it is damaged.
    """
    directory, items = paths.absolute(directory), checkpoint_format.ITEMS_OF_INFERENCE
    step = find_best(directory) if step == BEST else step
    if step is None:
        step, damaged = manifest.newest_intact(directory, items)
        if step is None:
            raise _damage(directory, damaged)
    else:
        _require_intact(directory, step, items)
    with checkpoint_format.readable_path(directory / str(step)) as here:
        variables, meta = checkpoint_format.read_variables(here)
    return step, variables, meta


def load_mean(
    directory: str | Path, step: Step, count: int
) -> tuple[int, dict[str, PyTree], dict[str, Any]]:
    """Load the mean of the variables over `step` and the `count` - 1 kept steps before it.

    Vaswani et al. 2017, section 6.1, take the last 5 checkpoints, 10 minutes apart, or the last 20.

    Raises:
      UserError: as `load_variables`, or if fewer steps have been kept.
    """
    directory = paths.absolute(directory)
    step, variables, meta = load_variables(directory, step)
    if count == 1:
        return step, variables, meta
    steps = [kept for kept in run_folder.finished_steps(directory) if kept <= step][-count:]
    if not 1 <= count <= len(steps):
        raise UserError(
            f'average of {count} checkpoints: {directory} has {len(steps)} up to step {step} '
            f'({", ".join(map(str, steps))}); train with a larger config.checkpoint.keep_last'
        )
    for other in steps[:-1]:
        added = load_variables(directory, other)[1]
        variables = jax.tree.map(np.add, variables, added)
    return step, jax.tree.map(lambda x: x / np.asarray(count, x.dtype), variables), meta


def _require_intact(directory: Path, step: int, items: tuple[str, ...] = ()) -> None:
    try:
        manifest.verify(directory / str(step), items)
    except (run_folder.Unfinished, run_folder.Damaged) as fault:
        finished = run_folder.finished_steps(directory) or 'none'
        there = (directory / str(step)).is_dir()
        raise UserError(
            f'checkpoint {directory}/{step}: {fault if there else "there is no such step"} '
            f'(finished steps: {finished})'
        ) from fault


def _damage(directory: Path, damaged: dict[int, run_folder.Damaged]) -> UserError:
    if not damaged:
        return UserError(f'no finished checkpoint in {directory}')
    listed = '; '.join(f'step {step}: {fault}' for step, fault in damaged.items())
    return UserError(
        f'damaged checkpoint in {directory}: {listed}. Restore the files, delete these '
        'directories to go on without them, or start over by train --restart'
    )


class FolderHandle:
    """A local folder, held open to detect that it was deleted, and perhaps made again."""

    def __init__(self, folder: Path):
        self._folder, self._file = folder, os.open(folder, os.O_RDONLY)

    def is_gone(self) -> bool:
        try:
            return not os.path.samestat(os.fstat(self._file), self._folder.stat())
        except FileNotFoundError:
            return True

    def close(self) -> None:
        os.close(self._file)


def disk_reason(error: BaseException | None) -> str | None:
    """The disk's reason for refusing a write, or None if the error is about something else."""
    while error is not None:
        if isinstance(error, OSError) and error.strerror:
            return error.strerror
        if number := re.search(r"os_error_code='(\d+)'", str(error)):  # TensorStore's wording
            return os.strerror(int(number[1]))
        error = error.__cause__ or error.__context__
    return None


def silence_failed_saves() -> None:
    """Keep quiet about writes that end after another of the same save has failed.

    Nobody waits for these any more, and each would print a traceback, most of them before the
    failure is known here.
    """
    before = sys.unraisablehook
    if getattr(before, 'func', None) is not _not_of_late_writes:
        sys.unraisablehook = functools.partial(_not_of_late_writes, before)
    for name in ('asyncio', 'concurrent.futures'):
        logging.getLogger(name).addFilter(_not_unheard)
    never_begun = r"coroutine '\S*(serialize|write)\S*' was never awaited"
    warnings.filterwarnings('ignore', never_begun, RuntimeWarning)


def _not_of_late_writes(before: Callable[[Any], Any], unraisable: Any) -> None:
    """Pass on to the hook `before` what is about anything else."""
    if 'Event loop is closed' not in str(unraisable.exc_value):
        before(unraisable)


def _not_unheard(record: logging.LogRecord) -> bool:
    """Logging filter that drops messages on such a write, of its task or its future.

    A task names its code in the message. A future does not, so its traceback is searched.
    """
    _, error, trace = record.exc_info or (None, None, None)
    if 'Event loop is closed' in str(error):
        return False
    told = record.getMessage()
    files = (frame.f_code.co_filename for frame, _ in traceback.walk_tb(trace))
    of_orbax = any('orbax' in text for text in (told, *files))
    return not (of_orbax and ('was never retrieved' in told or 'was destroyed but' in told))


def not_of_a_failed_save(record: logging.LogRecord) -> bool:
    """Logging filter that drops what Orbax says of a save that fails.

    Orbax logs the exception with a traceback at every layer, several hundred lines, and may miss
    metadata in the unfinished folder; the same exception is then raised to `Checkpointer`.
    """
    of_orbax, said = f'{os.sep}orbax{os.sep}' in record.pathname, record.getMessage()
    unfinished = 'Metadata file' in said and 'orbax-checkpoint-tmp' in said
    return not (of_orbax and (record.exc_info or unfinished))


BEST: Literal['best'] = 'best'  # in place of a step's number
Step = int | Literal['best'] | None

BESTS, KEPT = 'bests', 'keep_best'  # a key of the metadata, and a key in its value
_KEY = 'config.checkpoint.keep_best'
DIRECTIONS = ('max', 'min')


@dataclasses.dataclass(frozen=True)
class Goal:
    """One number of one evaluation, to be maximized or minimized.

    Attributes:
      metric: an entry of `config.evals` and one of its numbers, as `test/accuracy`.
      lower: whether lower is better.
    """

    metric: str
    lower: bool = False

    def is_better(self, value: float, than: float | None, by: float = 0.0) -> bool:
        """Whether a value is better than another by more than `by`; NaN never is."""
        if math.isnan(value) or than is None:
            return not math.isnan(value)
        return (than - value if self.lower else value - than) > by

    def __str__(self) -> str:
        return f'{"lowest" if self.lower else "highest"} {self.metric}'


def parse_goal(text: str, where: str) -> Goal:
    """Parse `'test/accuracy'` or `'max:test/accuracy'` (higher is better) or `'min:test/loss'`.

    Args:
      text: of a config.
      where: its place, for the message.

    Raises:
      UserError: for another direction, or a name that is not ENTRY/NUMBER.
    """
    direction, colon, metric = text.rpartition(':')
    if colon and direction not in DIRECTIONS:
        raise UserError(f'{where}={text!r}: {nearest("direction", direction, DIRECTIONS)}')
    entry, _, number = metric.partition('/')
    if not (entry and number):
        raise UserError(
            f'{where}={text!r}: name an evaluation and its number, as test/accuracy, or '
            'min:test/loss where lower is better'
        )
    return Goal(metric, direction == 'min')


@dataclasses.dataclass(frozen=True, kw_only=True)
class EarlyStop:
    """`config.early_stop`: the run ends before its total if its evaluations no longer improve.

    Attributes:
      metric: a number of an evaluation, as `test/accuracy`, or `min:test/loss` if lower is better;
        empty for no early stop.
      patience: number of evaluations in a row that are no better than the best; the last of them
        ends the run.
      min_delta: least improvement that counts, in the units of the metric.
    """

    metric: str = ''
    patience: int = 5
    min_delta: float = 0.0

    def __post_init__(self) -> None:
        if self.metric:
            parse_goal(self.metric, 'config.early_stop.metric')
        if self.patience < 1:
            raise UserError(f'config.early_stop.patience={self.patience}: must be at least 1')
        if self.min_delta < 0:
            raise UserError(f'config.early_stop.min_delta={self.min_delta}: must be 0 or more')


@dataclasses.dataclass(frozen=True)
class Best:
    """The best result so far by some goal.

    Attributes:
      goal: as the config gives it, see `parse_goal`.
      step: of that result; None before the first.
      value: of the metric.
      since: number of later evaluations, none of which was better.
    """

    goal: str
    step: int | None = None
    value: float | None = None
    since: int = 0


def best_from_meta(meta: Mapping[str, Any], key: str) -> Best | None:
    """The best result that a checkpoint records under `key`, or None."""
    found = meta.get(BESTS, {}).get(key)
    return None if found is None else Best(**found)


def find_best(directory: Path) -> int:
    """The best evaluated step of the checkpoints in a run's folder, as the newest of them records.

    The newest checkpoint of a run that was stopped during an evaluation lacks its result: that is
    read from the log.

    Raises:
      UserError: if the run keeps none, or has evaluated none yet.
    """
    newest, _ = manifest.newest_intact(directory, (run_folder.META,))
    meta = {} if newest is None else run_folder.read_meta(directory / str(newest))
    best = best_from_meta(meta, KEPT)
    if newest is None or best is None:
        raise UserError(f'{directory} keeps no best step: train with {_KEY}')
    goal, step, value = parse_goal(best.goal, _KEY), best.step, best.value
    if meta.get('unevaluated'):
        for line in run_folder.read_metrics(directory.parent):
            result = line.get(goal.metric)
            if line['step'] == newest and result is not None and goal.is_better(result, value):
                step, value = newest, result
    if step is None:
        raise UserError(f'{directory} has no best step yet: none with {goal.metric} is saved')
    return step
