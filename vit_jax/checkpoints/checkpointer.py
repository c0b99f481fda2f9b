"""Checkpoints: saved by Orbax in the background, complete or absent, verified when read.

A step is a directory `checkpoints/STEP` of Orbax items (`format`).
`manifest.json` is written after everything else and before Orbax commits the step: a directory
without it was never finished.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import re
import sys
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import jax
import numpy as np

from vit_jax.checkpoints import averages, manifest
from vit_jax.checkpoints import format as checkpoint_format
from vit_jax.checkpoints.averages import Average
from vit_jax.checkpoints.best import KEPT, best_from_meta, find_best
from vit_jax.config.run import Checkpoint, Duration
from vit_jax.errors import UserError, causes
from vit_jax.runtime.processes import on_process_0, reports_lost_peer
from vit_jax.storage import paths, run_folder
from vit_jax.storage.model_ref import BEST, Step

PyTree = Any
CheckMeta = Callable[[dict[str, Any]], None]  # raises UserError for a step that does not suit
_log = logging.getLogger(__name__)


class Checkpointer:
    """Checkpointer of one run; every process of the run makes one.

    The caller must hold the workdir's lock, since leftovers of killed runs are removed.

    Args:
      directory: Folder with a subfolder for each step; created by the first save.
      keep: `config.checkpoint`.
      to_steps: Function that converts a duration to steps of the run.

    Attributes:
      is_lost: Whether the last save was deleted while it was written, so that another is due
        immediately. With several processes, this is an error.
      keep_steps: The steps of `keep.keep_steps`.
    """

    def __init__(
        self,
        directory: str | Path,
        keep: Checkpoint = Checkpoint(),  # noqa: B008  frozen
        to_steps: Callable[[Duration], int] = int,
    ) -> None:
        silence_late_requests()
        self.directory = paths.absolute(directory)
        self._staging = checkpoint_format.Staging(self.directory)
        self._keep = keep.keep_last, to_steps(keep.keep_every)
        self.keep_steps = frozenset(map(to_steps, keep.keep_steps))
        self._keeps_best = bool(keep.keep_best)
        self._best: int | None = None
        self._saving: int | None = None
        self._handle: FolderHandle | None = None  # of the folder being written to
        self._newest: int | None = None  # saved by this process
        self.is_lost = False
        self._saved: checkpoint_format.Items = {}
        import orbax.checkpoint as ocp  # takes a quarter of a second

        self._writer = ocp.AsyncCheckpointer(
            checkpoint_format.handler(),
            async_options=ocp.options.AsyncOptions(
                post_finalization_callback=self._list_files,
                # If a directory cannot be made, fail at once instead of by a timeout.
                create_directories_asynchronously=False,
            ),
            temporary_path_class=self._staging.path_class(),
        )

    def __enter__(self) -> Checkpointer:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        # A save waits for all processes, and would wait forever for a lost one; Ctrl-C never waits.
        peer_lost = isinstance(error, Exception) and reports_lost_peer(error)
        if not (peer_lost or isinstance(error, KeyboardInterrupt)):
            self.close()

    def steps(self) -> list[int]:
        """Return the finished steps in ascending order; their files are not verified."""
        return run_folder.finished_steps(self.directory)

    def save(self, step: int, state: PyTree, meta: dict[str, Any]) -> None:
        """Start writing a step; return once the arrays are copied from the devices.

        Waits for the previous save, which may be lost. An existing step is not changed.

        Args:
          step: Step, which becomes the directory's name.
          state: A dataclass or dict of pytrees of arrays; `load_variables` reads its `params`,
            `collections` and `ema`.
          meta: JSON values; records the best step, see `best`.

        Raises:
          UserError: if the disk is full or not writable, in this save or the previous one.
        """
        self._finish(self._lose)
        self.is_lost = False
        if on_process_0(lambda: self._is_saved(step)):
            return
        self._saving, self._saved = step, checkpoint_format.shapes(state)
        if self._keeps_best:
            best = best_from_meta(meta, KEPT)
            self._best = best.step if best else None
        try:
            args = checkpoint_format.save_args(state, meta)
            self._writer.save(
                checkpoint_format.orbax_path(self._staging.folder / str(step)), args=args
            )
            if not paths.is_remote(self._staging.folder):
                self._close_handle()
                self._handle = FolderHandle(self._staging.folder)
        except Exception as error:
            self._fail(error)

    def _is_saved(self, step: int) -> bool:
        """Return whether the step is finished; warns if this run's newest step has disappeared."""
        steps = self.steps()
        if self._newest is not None and self._newest not in steps:
            _log.warning('%s/%d was deleted during the run', self.directory, self._newest)
        return step in steps

    def check(self) -> None:
        """Raise as `save` does if the background save has failed; call this often."""
        try:
            self._writer.check_for_errors()
        except Exception as error:
            self._lose(error)

    def wait(self) -> None:
        """Wait for the background save; raise as `save` does, or if it is lost."""
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
        """Wait for the background save and end Orbax's threads."""
        try:
            self.wait()
        finally:
            with contextlib.suppress(OSError):  # `wait` has already reported the failed save
                self._writer.close()
            self._staging.close()
            self._close_handle()

    def restore_latest(
        self, target: PyTree, *, strict: bool = False, check: CheckMeta = lambda meta: None
    ) -> tuple[int, PyTree, dict[str, Any]] | None:
        """Restore the newest intact step; None if no save was ever finished.

        Newer steps are moved to `rejected/` with a warning, so that the run can save them again;
        only Orbax's temporary folders are deleted.

        Args:
          target: The state with a sharded `jax.ShapeDtypeStruct` for each array; the run that
            saved it may have had another device layout.
          strict: Whether to raise if a newer step is damaged, instead of restoring an older one.
          check: Called with the step's `meta` before its arrays are read; may raise.

        Returns:
          The step, the state, and the `meta` given to `save`.

        Raises:
          UserError: if no step is intact although there are some, or if the step does not fit
            `target`; names the arrays with both shapes or dtypes.
        """
        self.wait()
        step = on_process_0(lambda: self._select(strict))
        return None if step < 0 else _read(self.directory, step, target, check)

    def _list_files(self) -> None:
        """Write the manifest on process 0, after all processes have written and before the commit.

        Only arrays that can be opened are certified; without a manifest the step is unfinished.
        """
        assert self._saving is not None
        folder = manifest.uncommitted_step(self._staging.folder, self._saving)
        checkpoint_format.require_written(checkpoint_format.orbax_path(folder), self._saved)
        manifest.write(self._staging.folder, self._saving)
        self._staging.upload(self._saving)

    def _close_handle(self) -> None:
        if self._handle:
            self._handle.close()
        self._handle = None

    def _lose(self, error: Exception) -> None:
        """Mark the save as lost if its folder was deleted during the write; otherwise fail."""
        if jax.process_count() > 1 or not (self._handle and self._handle.is_gone()):
            self._fail(error)
        _log.warning('%s/%d was deleted while it was written', self.directory, self._saving)
        self._saving, self.is_lost = None, True

    def _fail(self, error: Exception) -> NoReturn:
        step, self._saving = self._saving, None
        reason = str(error) if isinstance(error, UserError) else disk_reason(error)
        if self._handle and self._handle.is_gone():
            reason = 'it was deleted while it was written'
        if reason is None and paths.is_remote(self.directory):
            reason = paths.first_line(error)
        if step is None or reason is None:
            raise error
        with paths.reaching(self.directory):
            if jax.process_index() == 0:
                manifest.discard(self.directory, step)
            finished = self.steps() or 'none'
        kind = paths.WriteError if disk_reason(error) else UserError
        raise kind(
            f'the checkpoint of step {step} could not be written to {self.directory}: {reason}. '
            f'Finished steps: {finished}; once that is fixed, the same command continues from '
            'the last of them'
        ) from error

    def _select(self, strict: bool) -> int:
        """Return the step to restore, or -1."""
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


def restore_step(
    directory: str | Path, step: int, target: PyTree, check: CheckMeta = lambda meta: None
) -> tuple[int, PyTree, dict[str, Any]]:
    """Restore a kept step of any run's `checkpoints`, as `Checkpointer.restore_latest` does.

    No file is changed.

    Raises:
      UserError: if the step does not exist, is damaged, or does not fit `target`.
    """
    directory = paths.absolute(directory)
    on_process_0(lambda: _require_intact(directory, step))
    return _read(directory, step, target, check)


def _read(
    directory: Path, step: int, target: PyTree, check: CheckMeta
) -> tuple[int, PyTree, dict[str, Any]]:
    check(run_folder.read_meta(directory / str(step)))
    silence_late_requests()
    with checkpoint_format.readable_path(directory / str(step)) as folder:
        state, meta = checkpoint_format.read(folder, target)
    return step, state, meta


def load_variables(
    directory: str | Path, step: Step = None, average: Average = 1
) -> tuple[int, dict[str, PyTree], dict[str, Any]]:
    """Read the variables for inference into numpy arrays, without the optimizer state.

    If the run kept averaged parameters, these are read, of several the first.

    Args:
      directory: A run's `checkpoints`; not changed.
      step: Step to read, or 'best'; by default the newest intact one.
      average: Another average, see `checkpoints.averages`.

    Returns:
      The step, `{'params': ..., other collections}` and the `meta` given to `save`.

    Raises:
      UserError: if the step does not exist, is damaged or lacks the average.
    """
    directory, items = paths.absolute(directory), checkpoint_format.ITEMS_OF_INFERENCE
    step = find_best(directory) if step == BEST else step
    if step is None:
        step, damaged = manifest.newest_intact(directory, items)
        if step is None:
            raise _damage(directory, damaged)
    else:
        _require_intact(directory, step, items)
    silence_late_requests()
    path = averages.stored_path(
        average, run_folder.read_meta(directory / str(step)), str(directory / str(step))
    )
    with checkpoint_format.readable_path(directory / str(step)) as folder:
        variables, meta = checkpoint_format.read_variables(folder, path)
    return step, variables, meta


def load_mean(
    directory: str | Path, step: Step, average: Average
) -> tuple[int, dict[str, PyTree], dict[str, Any]]:
    """Load the mean of the variables over `step` and the kept steps before it.

    Vaswani et al. 2017, section 6.1, take the last 5 checkpoints, 10 minutes apart, or the last 20.

    Args:
      directory, step: See `load_variables`.
      average: The number of steps, or the average of one step; a single best step has the average
        that its evaluation measured.

    Raises:
      UserError: as `load_variables`, or if fewer steps were kept.
    """
    directory, count = paths.absolute(directory), averages.checkpoint_count(average)
    if step == BEST and average == 1:
        step = find_best(directory)
        average = averages.measured_average(run_folder.read_meta(directory / str(step)))
    step, variables, meta = load_variables(directory, step, average)
    if count == 1:
        return step, variables, meta
    steps = [
        variables_of_step
        for variables_of_step in run_folder.finished_steps(directory)
        if variables_of_step <= step
    ][-count:]
    if not 1 <= count <= len(steps):
        raise UserError(
            f'average of {count} checkpoints: {directory} has {len(steps)} up to step {step} '
            f'({", ".join(map(str, steps))}); train with a larger config.checkpoint.keep_last'
        )
    for averaged_step in steps[:-1]:
        total = load_variables(directory, averaged_step)[1]
        variables = jax.tree.map(np.add, variables, total)
    return step, jax.tree.map(lambda x: x / np.asarray(count, x.dtype), variables), meta


def _require_intact(directory: Path, step: int, items: tuple[str, ...] = ()) -> None:
    try:
        manifest.verify(directory / str(step), items)
    except (run_folder.Unfinished, run_folder.Damaged) as fault:
        finished = run_folder.finished_steps(directory) or 'none'
        exists = (directory / str(step)).is_dir()
        raise UserError(
            f'checkpoint {directory}/{step}: {fault if exists else "there is no such step"} '
            f'(finished steps: {finished})'
        ) from fault


def _damage(directory: Path, damaged: dict[int, run_folder.Damaged]) -> UserError:
    if not damaged:
        return UserError(f'no finished checkpoint in {directory}')
    reasons = '; '.join(f'step {step}: {fault}' for step, fault in damaged.items())
    return UserError(
        f'damaged checkpoint in {directory}: {reasons}. Restore the files, delete these '
        'directories to continue without them, or start over by train --restart'
    )


class FolderHandle:
    """Local folder, kept open to detect its deletion even if it was created again."""

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
    """Return the disk's reason for refusing a write; None if the error has another cause."""
    for cause in causes(error):
        if isinstance(cause, OSError) and cause.strerror:
            return cause.strerror
        if number := re.search(r"os_error_code='(\d+)'", str(cause)):  # TensorStore's wording
            return os.strerror(int(number[1]))
    return None


def silence_late_requests() -> None:
    """Silence Orbax's logs of a failed save or read, whose exception is raised here.

    Orbax logs a traceback at every layer, several hundred lines. Other requests for arrays end
    later, and each would print another traceback.
    """
    previous = sys.unraisablehook
    if getattr(previous, 'func', None) is not _report_unraisable:
        sys.unraisablehook = functools.partial(_report_unraisable, previous)
    logging.getLogger('absl').addFilter(_is_not_of_failed_save)
    for name in ('asyncio', 'concurrent.futures'):
        logging.getLogger(name).addFilter(_is_not_of_late_write)
    never_begun = r"coroutine '\S*(serialize|write)\S*' was never awaited"
    warnings.filterwarnings('ignore', never_begun, RuntimeWarning)


def _report_unraisable(previous: Callable[[Any], Any], unraisable: Any) -> None:
    """Call the `previous` hook, except for late writes."""
    if 'Event loop is closed' not in str(unraisable.exc_value):
        previous(unraisable)


def _is_not_of_failed_save(record: logging.LogRecord) -> bool:
    """Logging filter that drops Orbax's errors, and warnings about metadata not written yet."""
    is_orbax, message = f'{os.sep}orbax{os.sep}' in record.pathname, record.getMessage()
    is_unfinished = 'Metadata file' in message and 'orbax-checkpoint-tmp' in message
    return not (is_orbax and (record.exc_info or is_unfinished))


def _is_not_of_late_write(record: logging.LogRecord) -> bool:
    """Logging filter that drops messages about the task or future of a late write.

    The message of a task names its code; for a future, the traceback is searched.
    """
    _, error, trace = record.exc_info or (None, None, None)
    if 'Event loop is closed' in str(error):
        return False
    message = record.getMessage()
    files = (frame.f_code.co_filename for frame, _ in traceback.walk_tb(trace))
    is_orbax = any('orbax' in text for text in (message, *files))
    return not (is_orbax and ('was never retrieved' in message or 'was destroyed but' in message))
