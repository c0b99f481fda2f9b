"""A run that goes on beyond the end it was started with, as `train --extend` asks for."""

from __future__ import annotations

import pathlib

import jax
import numpy as np
from ml_collections import ConfigDict

from vit_jax.config import durations
from vit_jax.config import load as config_lib
from vit_jax.errors import UserError
from vit_jax.optim import schedules
from vit_jax.storage import run_folder
from vit_jax.trainer.build import Training


def note(training: Training, folder: pathlib.Path, step: int) -> tuple[str, ...]:
    """A line that says how much longer the run becomes; none if it has that length already.

    Its steps so far are then those of a run that had this length from the start.

    Args:
      training: of the longer run.
      folder: of the run, with the config of the shorter one.
      step: after which it goes on.

    Raises:
      UserError: if the longer run had another learning rate up to `step`, or is no longer one.
    """
    stored = run_folder.read_config(folder)
    if stored is None or run_folder.saved_nothing(folder):
        return ()
    before, total = config_lib.from_dict(stored), training.timetable.total
    data = training.data
    times = durations.of_run(before, data.plan.examples_per_step, data.num_examples)
    if times.total_steps == total:
        return ()
    if total < times.total_steps:
        raise UserError(
            f'--extend: config.total={training.config.total!r} are {total} steps, and the run has '
            f'{times.total_steps}; give a later end'
        )
    _require_same_rates(_rates(before, times, step), training, step)
    return (f'extends the run from {times.total_steps} to {total} steps',)


def forget_result(folder: pathlib.Path) -> None:
    """Remove the result of the shorter run, which is not that of the longer one; on process 0."""
    if jax.process_index() == 0:
        (folder / run_folder.RESULT).unlink(missing_ok=True)


def _rates(config: ConfigDict, times: durations.Durations, step: int) -> np.ndarray:
    """The learning rates of the first steps of a config."""
    schedule = config.optim.to_dict().get('schedule', schedules.CONSTANT)
    rate = schedules.of_config(schedule, config.optim.lr, times.total_steps, times.steps)
    return np.asarray(rate(np.arange(step)))


def _require_same_rates(before: np.ndarray, training: Training, step: int) -> None:
    now = np.asarray(training.timetable.lr(np.arange(step)))
    differ = np.flatnonzero(~np.isclose(before, now, rtol=1e-6, atol=0))
    if differ.size:
        first = differ[0]
        raise UserError(
            f'--extend: the learning rate of step {first + 1} was {before[first]:g}, and is '
            f'{now[first]:g} in a run of {training.timetable.total} steps: only a schedule that '
            'does not depend on config.total can go on, with its warm-up in steps and no cooldown; '
            'branch off from a step before they part by config.branch'
        )
