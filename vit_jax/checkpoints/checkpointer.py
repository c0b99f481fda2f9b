"""Checkpoints: saved by Orbax in the background, complete or absent, verified when read.

A step is a directory `checkpoints/STEP` of Orbax items (`format`).
`manifest.json` is written after everything else and before Orbax commits the step: a directory
without it was never finished.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

import jax
import numpy as np

from vit_jax.checkpoints import best, manifest, staging, troubles
from vit_jax.checkpoints import format as checkpoint_format
from vit_jax.checkpoints.best import BEST, Step
from vit_jax.errors import UserError
from vit_jax.runtime.processes import lost_another, on_process_0
from vit_jax.signatures import Steps
from vit_jax.storage import paths, step_folder

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
        logging.getLogger('absl').addFilter(troubles.not_of_a_failed_save)
        troubles.hide_late_writes()
        self.directory = paths.absolute(directory)
        self._staging = staging.Staging(self.directory)
        self._keep, self.keep_steps = (keep_last, keep_every), frozenset(keep_steps)
        self._keeps_best = bool(keep_best)
        self._best: int | None = None
        self._saving: int | None = None
        self._place: troubles.Place | None = None  # that is written to
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
        return step_folder.finished(self.directory)

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
            known = best.of_meta(meta, best.KEPT)
            self._best = known.step if known else None
        try:
            args = checkpoint_format.save_args(state, meta)
            self._writer.save(staging.literal(self._staging.folder / str(step)), args=args)
            if not paths.is_remote(self._staging.folder):
                self._leave_place()
                self._place = troubles.Place(self._staging.folder)
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
        written = manifest.written(self._staging.folder, self._saving)
        checkpoint_format.require_written(staging.literal(written), self._saved)
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
        reason = str(error) if isinstance(error, UserError) else troubles.of_the_disk(error)
        if self._place and self._place.is_gone():
            reason = 'it was deleted while it was written'
        if reason is None and paths.is_remote(self.directory):
            reason = paths.why(error)
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
                f'what is missing ({step_folder.MANIFEST}, {step_folder.COMMITTED}), or start over '
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
    with staging.here(directory / str(step)) as here:
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
    step = best.find(directory) if step == BEST else step
    if step is None:
        step, damaged = manifest.newest_intact(directory, items)
        if step is None:
            raise _damage(directory, damaged)
    else:
        _require_intact(directory, step, items)
    with staging.here(directory / str(step)) as here:
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
    steps = [kept for kept in step_folder.finished(directory) if kept <= step][-count:]
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
    except (step_folder.Unfinished, step_folder.Damaged) as fault:
        finished = step_folder.finished(directory) or 'none'
        there = (directory / str(step)).is_dir()
        raise UserError(
            f'checkpoint {directory}/{step}: {fault if there else "there is no such step"} '
            f'(finished steps: {finished})'
        ) from fault


def _damage(directory: Path, damaged: dict[int, step_folder.Damaged]) -> UserError:
    if not damaged:
        return UserError(f'no finished checkpoint in {directory}')
    listed = '; '.join(f'step {step}: {fault}' for step, fault in damaged.items())
    return UserError(
        f'damaged checkpoint in {directory}: {listed}. Restore the files, delete these '
        'directories to go on without them, or start over by train --restart'
    )
