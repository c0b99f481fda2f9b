"""One run, from its config to its last checkpoint."""

from __future__ import annotations

import dataclasses
import pathlib
from typing import Any

from ml_collections import ConfigDict

from vit_jax.errors import forbid_exit
from vit_jax.runtime import memory
from vit_jax.trainer.build import Training, build
from vit_jax.trainer.guards import Guard, Report, RunOptions, Window, guards
from vit_jax.trainer.loop import Loop, Outcome, Preempted, Pruned, count_broken_records
from vit_jax.trainer.start import describe_run, read_origin, restore, write_start
from vit_jax.trainer.workdir import write_result

__all__ = ['Preempted', 'Pruned', 'Report', 'RunOptions', 'Window', 'train']


@forbid_exit()
def train(
    config: ConfigDict,
    folder: str | pathlib.Path,
    options: RunOptions = RunOptions(),  # noqa: B008  frozen
    **flags: Any,
) -> dict[str, float]:
    """Train to the end; resume the run in `folder` if there is one.

    Args:
      config: Config from `config.load`.
      folder: Run folder; made if missing.
      options: Options of this start.
      **flags: Fields of `options` by name, such as `stop_at=100`.

    Returns:
      The final evaluation, {name: value}, and the number of broken records if there are any. A run
      that `config.early_stop` ends is complete.

    Raises:
      UserError: for a mistake in the config or the folder; if processes of the job differ in their
        config, code or data; or as `mesh.usable_devices`.
      DamagedRun: if `strict` and the run is complete, but its newest checkpoint is damaged.
      OutOfMemory: if the run does not fit into the memory of its devices or host.
      Diverged: if the loss is not finite; the last good checkpoint stays.
      Preempted: after SIGTERM, SIGINT, SIGHUP, at `stop_at` or if the metrics can no longer be
        written; the state is saved.
      Pruned: if `report` ended the run before the last step.
    """
    options = dataclasses.replace(options, **flags)
    with (
        guards(config, folder, options) as guard,  # equal processes, the config completed
        memory.report_exhaustion(),
    ):
        if guard.result is not None:  # complete already
            return guard.result
        training = guard.check(build(guard.config, guard.devices))
        training, origin = read_origin(training, guard.folder, options.allowed, guard.checkpoint)
        guard.checkpoint = None  # frees the memory
        guard.lock(training)  # the folder, signals, the watchdog and checkpoints
        if guard.result is not None:
            return guard.result
        point = restore(training, guard, origin)
        notes = (*guard.notes, *write_start(training, guard.folder, point, origin, options.extend))
        del origin
        training.data.facts()  # reads records, for which no save may wait
        guard.open_metrics(training, point.step, point.unevaluated)
        guard.writer.say('\n'.join((describe_run(training, guard.folder, point), *notes)))
        return conclude(training, guard, Loop(training, point, guard).run())


def conclude(training: Training, guard: Guard, outcome: Outcome) -> dict[str, float]:
    """Write the result of a complete run, and return it.

    Raises:
      Preempted: if metrics are missing from the folder, so that the run is not complete.
    """
    result = outcome.results | count_broken_records(training)
    if guard.writer.trouble:
        raise Preempted(f'{guard.writer.trouble}; the state is saved')
    if outcome.why:
        guard.writer.say(outcome.why)
    write_result(guard.folder, result, outcome.why)
    return result
