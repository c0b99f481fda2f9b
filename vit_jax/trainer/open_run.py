"""Everything that is open while a run trains: its folder, signals, checkpoints and metrics."""

from __future__ import annotations

import contextlib
import dataclasses
import pathlib
from collections.abc import Iterator
from functools import partial

from vit_jax.checkpoints.checkpointer import Checkpointer
from vit_jax.runtime.preemption import Preemption
from vit_jax.runtime.watchdog import Watchdog
from vit_jax.storage import lock, paths, run_folder
from vit_jax.trainer import ownership, workdir
from vit_jax.trainer.build import Training
from vit_jax.trainer.clock import Clock
from vit_jax.trainer.loop import Hooks, Report
from vit_jax.trainer.profile import Profile
from vit_jax.trainer.start import Beginning
from vit_jax.trainer.writer import Writer


@dataclasses.dataclass(frozen=True)
class OpenRun:
    """A locked run folder, with what writes to it.

    Attributes:
      folder: the run folder.
      held: the check of its lock.
      checkpointer: of the folder.
      preemption: signals that stop the run.
      watchdog: of the process.
    """

    folder: pathlib.Path
    held: lock.Check
    checkpointer: Checkpointer
    preemption: Preemption
    watchdog: Watchdog

    @contextlib.contextmanager
    def hooks(
        self,
        training: Training,
        beginning: Beginning,
        traced: range,
        stop_at: int | None,
        report: Report | None,
        clock: Clock,
    ) -> Iterator[Hooks]:
        """Open the metrics, and the profile of the `traced` steps, for the loop.

        `clock` begins to write the record of the run's time.
        """
        start = beginning.step
        with paths.writing(self.folder):
            writer = Writer(
                self.folder,
                training.timetable.total,
                start,
                training.data.unit,
                training.config.to_dict(),
                failed=self.preemption.request,
                held=self.held,
                evaluates_again=beginning.unevaluated,
            )
        if writer.enabled:
            with paths.writing(self.folder):
                clock.record(writer.mirror, self.held, writer.say, start)
        profile = Profile(self.folder, traced, writer.say)
        require_own = partial(ownership.require, training, self.folder, self.held, writer.say)
        try:
            yield Hooks(
                self.checkpointer,
                writer,
                self.watchdog,
                stop_requested=self.preemption.reached,
                stop_at=stop_at,
                report=report,
                profile=profile,
                require_own=require_own,
                clock=clock,
            )
        finally:
            profile.close()
            writer.close(clock.close)


@contextlib.contextmanager
def opened(
    training: Training, folder: pathlib.Path, step_timeout: float | None
) -> Iterator[OpenRun]:
    """Lock the run folder and open what needs it; a start that fails leaves nothing there."""
    existed = folder.is_dir()
    with (
        lock.lock(folder) as held,
        workdir.cleared_on_error(folder, existed),
        Preemption() as preemption,
        Watchdog(step_timeout) as watchdog,
        Checkpointer(folder / run_folder.CHECKPOINTS, **training.retention) as checkpointer,
    ):
        yield OpenRun(folder, held, checkpointer, preemption, watchdog)
