"""The start of a run: from its own newest checkpoint, or from its origin."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from vit_jax import step as step_lib
from vit_jax.checkpoints.checkpointer import Checkpointer
from vit_jax.errors import UserError
from vit_jax.trainer import compatibility
from vit_jax.trainer.build import Training
from vit_jax.trainer.judge import Bests
from vit_jax.trainer.origin import Origin, find_origin


@dataclasses.dataclass(frozen=True)
class Beginning:
    """The state and step at which a run goes on, or starts.

    Attributes:
      state: on the devices.
      step: of `state`.
      hardware: that `state` was saved on.
      unevaluated: whether the run was stopped before the evaluations after `step` were finished.
      broken: records of the training data that could not be read, and why.
      bests: the best results up to `step`.
      notes: on the data, a line each.
    """

    state: step_lib.TrainState
    step: int
    hardware: str
    unevaluated: bool = False
    broken: Mapping[int, str] = dataclasses.field(default_factory=dict)
    bests: Bests = dataclasses.field(default_factory=dict)
    notes: tuple[str, ...] = ()


def restore(
    training: Training,
    checkpointer: Checkpointer,
    origin: Origin | None,
    allowed: Sequence[str] = (),
    strict: bool = False,
) -> Beginning:
    """The newest intact checkpoint of the run, or what a new one starts from.

    Args:
      training: of the run.
      checkpointer: of its folder.
      origin: of a new run; if None it is looked for where no checkpoint is found.
      allowed: as for `find_origin`.
      strict: as for `Checkpointer.restore_latest`.
    """
    program = training.program
    found = checkpointer.restore_latest(program.target, strict=strict)
    if found is not None:
        step, saved, meta = found
        compatibility.require_same_function(meta.get('config'), training.config)
        compatibility.require_same_classes(meta.get('class_names', ()), training.data.info)
        compatibility.require_same_count(meta.get('num_examples'), training.data)
        notes = compatibility.require_same_listing(meta.get('listing'), training.data)
        return Beginning(
            program.layout.from_global(saved),
            step,
            meta.get('hardware', program.hardware),
            meta.get('unevaluated', False),
            dict(meta.get('broken', ())),
            training.judge.begin(meta),
            notes,
        )
    origin = origin or find_origin(training, allowed)
    bests = training.judge.begin({})
    if origin.state is not None:
        return Beginning(origin.state, origin.step, origin.hardware, bests=bests)
    state = program.layout.create(program.init, origin.params)
    return Beginning(state, 0, program.hardware, bests=bests)


def check_stop(stop_at: int | None, start: int) -> None:
    """Raise UserError if the run is past the step after which it is to stop."""
    if stop_at is not None and stop_at <= start:
        raise UserError(
            f'--stop-at {stop_at}: the run is after step {start} already; give a later step, or '
            'leave it out to train to the end'
        )
