"""Branches: runs that continue the whole state of another run with a different schedule."""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Mapping
from typing import Any

import numpy as np
from ml_collections import ConfigDict

from vit_jax.checkpoints.best import find_best
from vit_jax.checkpoints.checkpointer import restore_step
from vit_jax.config import defaults
from vit_jax.config.load import from_dict, section
from vit_jax.config.run import Branch, Durations, Optim, Schedule
from vit_jax.errors import UserError
from vit_jax.optim import schedules
from vit_jax.storage import paths, run_folder
from vit_jax.storage.model_ref import BEST, ModelRef
from vit_jax.trainer import compatibility
from vit_jax.trainer.build import Training
from vit_jax.trainer.program import Origin
from vit_jax.trainer.workdir import FREE, SCHEDULES

# What a branch is there to change.
BRANCHED = (*FREE, *SCHEDULES, 'total', 'early_stop', 'init', 'branch')


def branch(training: Training) -> Origin:
    """Load the complete state of another run at a saved step, for a different schedule.

    With a later cooldown it is bit for bit what a run with that cooldown would have come to: one
    long run at a schedule that does not depend on its end gives a finished model of every length
    (Zhai et al. 2022, "Scaling Vision Transformers", section 3.4).

    Raises:
      UserError: if there is no such run or checkpoint, or its state does not fit.
    """
    program, target = training.program, training.program.target
    from vit_jax.inference import load  # here, as few runs branch off

    trunk, step = _find_trunk(training.run.branch)
    if step >= training.timetable.total:
        raise UserError(
            f'config.branch.step={step}: the run ends at step {training.timetable.total}; give a '
            'later config.total'
        )
    try:
        before = load.stored_config(trunk)
        _, state, meta = restore_step(
            trunk / run_folder.CHECKPOINTS,
            step,
            program.adapters.own(target) if program.adapters else target,
            compatibility.require_same_numerics,
        )
    except UserError as e:
        raise UserError(f'config.branch: {e}') from e
    if 'config' in meta:  # the file may have been edited
        before = from_dict(meta['config'])
    named = meta.get('class_names', ())
    compatibility.require_same_classes(named, training.data.info, 'config.branch')
    history = tuple(line for line in run_folder.read_metrics(trunk) if line['step'] <= step)
    return Origin(
        state=program.place(state),
        step=step,
        hardware=meta.get('hardware', program.hardware),
        history=history,
        notes=(
            f'branches off {trunk} after step {step}',
            *changes(before, training, history),
            *_other_data(before, meta.get('listing'), training),
        ),
    )


def _find_trunk(config: Branch) -> tuple[paths.Path, int]:
    """Return the folder and the step of the run that `config.branch` names."""
    try:
        run = ModelRef.parse(config.folder).find_run(config.step or None)
        trunk, step = (
            (paths.absolute(config.folder), config.step)
            if run is None
            else (paths.absolute(run.folder).parent, run.step)
        )
        step = find_best(trunk / run_folder.CHECKPOINTS) if step == BEST else step
    except UserError as e:
        raise UserError(f'config.branch: {e}') from e
    if step is None or step < 1:
        raise UserError('config.branch.step: name the kept step to branch off, from 1 on')
    return trunk, step


def changes(
    before: ConfigDict, training: Training, history: tuple[dict[str, Any], ...]
) -> list[str]:
    """Return a line for each thing that makes a branch something else than that run cooled down."""
    changed = defaults.differences(before, training.config)
    lines = [
        f'note: config.{name} differs from the trunk' for name in changed if name not in BRANCHED
    ]
    return [*lines, *_other_rate(before, training, history)]


def _other_rate(
    before: ConfigDict, training: Training, history: tuple[dict[str, Any], ...]
) -> list[str]:
    """Describe the first step before the cooldown at which the trunk's rate differs."""
    rates = {line['step']: line['train/lr'] for line in history if 'train/lr' in line}
    rates |= _later_rates(before, training, max(rates, default=0))
    planned = np.asarray(training.program.lr(np.array([*rates]) - 1))
    differ = np.flatnonzero(~np.isclose([*rates.values()], planned, rtol=1e-5, atol=0))
    if not differ.size:
        return []
    step, rate = [*rates.items()][differ[0]]
    schedule, trunk_schedule = map(_without_cooldown, (training.run.optim, section(before, Optim)))
    flags = [
        f'--config.optim.schedule.{key}={shlex.quote(str(value))}'
        for key, value in dataclasses.asdict(trunk_schedule).items()
        if value != getattr(schedule, key)
    ]
    remedy = (
        f"for the trunk's schedule, add {' '.join(flags)}"
        if flags
        else 'give the warm-up in steps, and no shape that depends on config.total'
    )
    difference = (
        f'the learning rate of step {step} is {planned[differ[0]]:g}, of the trunk {rate:g}'
    )
    return [f'note: {difference}; {remedy}']


def _later_rates(before: ConfigDict, training: Training, start: int) -> dict[int, float]:
    """Return the trunk's learning rate of each step from `start` to the cooldown of the branch."""
    size, epoch = training.data.plan.examples_per_step, training.data.num_examples
    trunk_durations, durations = Durations.of(before.total, size, epoch), training.times
    cooldown = durations.steps(
        training.run.optim.schedule.cooldown, 'config.optim.schedule.cooldown'
    )
    steps = np.arange(start, min(trunk_durations.total_steps, durations.total_steps - cooldown))
    optim = section(before, Optim)
    rate = schedules.make_schedule(_without_cooldown(optim), optim.lr, trunk_durations)
    return dict(zip((steps + 1).tolist(), np.asarray(rate(steps)).tolist(), strict=True))


def _without_cooldown(optim: Optim) -> Schedule:
    """Return the learning rate's schedule as it is before the cooldown."""
    ends = optim.schedule.name in ('linear', 'cosine')  # at `final`, without a cooldown too
    return dataclasses.replace(
        optim.schedule,
        cooldown=Schedule.cooldown,
        cooldown_form=Schedule.cooldown_form,
        final=optim.schedule.final if ends else Schedule.final,
    )


def _other_data(
    before: ConfigDict, listing: Mapping[str, str] | None, training: Training
) -> list[str]:
    """Return a line if the data's examples differ from the checkpoint's listing."""
    if listing is None or 'data' in defaults.differences(before, training.config):
        return []
    if listing == training.data.listing._asdict():
        return []
    return [f'there, {training.data.source.title} had examples of other names, labels or sizes']
