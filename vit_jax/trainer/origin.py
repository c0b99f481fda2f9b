"""The origin of a new run: another run's state or parameters, or nothing."""

from __future__ import annotations

import dataclasses
import json
import math
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import jax
from ml_collections import ConfigDict

from vit_jax import step as step_lib
from vit_jax.checkpoints import checkpointer as checkpointer_lib
from vit_jax.config import defaults
from vit_jax.config import load as config_lib
from vit_jax.config.allowed import dotted_names
from vit_jax.config.origin import Branch, Init
from vit_jax.errors import UserError
from vit_jax.inference import fine_tune
from vit_jax.interop.trained import TrainedModel
from vit_jax.storage import paths, run_folder
from vit_jax.trainer import compatibility
from vit_jax.trainer.build import Training
from vit_jax.trainer.workdir import FREE, SCHEDULES

# What a branch is there to change.
BRANCHED = (*FREE, *SCHEDULES, 'total', 'early_stop', 'init', 'branch')
COLORS = {1: 'gray', 3: 'color'}  # kinds of images by channels


@dataclasses.dataclass(frozen=True)
class Origin:
    """The state or parameters that a new run starts from.

    Attributes:
      params: nested arrays; what is not there is initialized.
      state: whole, of the run that this one branches from; None if it branches from none.
      step: of `state`.
      hardware: that `state` was saved on.
      history: the metrics of the run that this one branches from, up to `step`.
      notes: where it comes from and what was changed to make it fit, a line each.
    """

    params: Any = dataclasses.field(default_factory=dict)
    state: step_lib.TrainState | None = None
    step: int = 0
    hardware: str = ''
    history: tuple[dict[str, Any], ...] = ()
    notes: tuple[str, ...] = ()


def find_origin(
    training: Training, allowed: Sequence[str] = (), known: TrainedModel | None = None
) -> Origin:
    """Reads what `config.branch` or `config.init` names, if any, and fits it to the run.

    Args:
      training: of the run.
      allowed: modules of the user's own that the config of the other run may name, besides those
        that this one's names itself.
      known: the checkpoint of `config.init`, if it was read before.

    Raises:
      UserError: if there is no such checkpoint, it does not fit, it names code that is not
        allowed, or one has to be named.
    """
    if defaults.arguments(training.config, 'branch')['from_']:
        return branch(training)
    init = Init(**defaults.arguments(training.config, 'init'))
    if not (path := fine_tune.init_path(training.config)):
        return Origin()
    from vit_jax.inference import load as inference_lib  # here, as most runs start from nothing
    from vit_jax.interop import adapt, head_classes

    own = [name for _, name in dotted_names(training.config)]
    imported = known or inference_lib.read(path, allowed=[*allowed, *own])
    if init.classes:
        chosen = head_classes.read_classes(init.classes)
        imported = head_classes.take_classes(imported, training.program.model, chosen)
    try:
        params, notes = adapt.fit(
            imported,
            training.program.model,
            training.program.abstract_state.params,
            training.data.image_size,
            init.posemb,
            init.select,
            None if init.classes else training.data.info,
        )
    except UserError as e:
        raise UserError(f'config.init.from={path}: {e}{_channels(imported, training)}') from e
    return Origin(params, notes=(f'from {path} ({imported.source})', *notes))


def _channels(checkpoint: TrainedModel, training: Training) -> str:
    """A hint for a checkpoint of gray images and data in color, or vice versa; else empty."""
    image = training.data.spec.get('image')
    theirs = checkpoint.channels
    if image is None or len(image.shape) != 3 or (ours := image.shape[-1]) == theirs:
        return ''
    words = [COLORS.get(count, f'{count}-channel') for count in (theirs, ours)]
    return '; the checkpoint is of {} images, and the data have {} images'.format(*words)


def branch(training: Training) -> Origin:
    """The whole state of another run at a kept step, to be continued with another schedule.

    With a later cooldown it is bit for bit what a run with that cooldown would have come to: one
    long run at a schedule that does not depend on its end gives a finished model of every length
    (Zhai et al. 2022, "Scaling Vision Transformers", section 3.4).

    Raises:
      UserError: if there is no such run or checkpoint, or its state does not fit.
    """
    from vit_jax.inference import load as inference_lib

    section, program = Branch(**defaults.arguments(training.config, 'branch')), training.program
    trunk, step = paths.absolute(section.from_), section.step
    if step < 1:
        raise UserError('config.branch.step: name the kept step to branch off, from 1 on')
    if step >= training.timetable.total:
        raise UserError(
            f'config.branch.step={step}: the run ends at step {training.timetable.total}; give a '
            'later config.total'
        )
    try:
        before = inference_lib.stored_config(trunk)
        _, state, meta = checkpointer_lib.restore(
            trunk / run_folder.CHECKPOINTS, step, program.target
        )
    except UserError as e:
        raise UserError(f'config.branch: {e}') from e
    if 'config' in meta:  # the file may have been edited
        before = config_lib.from_dict(meta['config'])
    named = meta.get('class_names', ())
    compatibility.require_same_classes(named, training.data.info, 'config.branch')
    history = tuple(line for line in run_folder.read_metrics(trunk) if line['step'] <= step)
    return Origin(
        state=program.layout.from_global(state),
        step=step,
        hardware=meta.get('hardware', program.hardware),
        history=history,
        notes=(
            f'branches off {trunk} after step {step}',
            *changes(before, training, history),
            *_other_data(before, meta.get('listing'), training),
        ),
    )


def changes(
    before: ConfigDict, training: Training, history: tuple[dict[str, Any], ...]
) -> list[str]:
    """A line for each thing that makes a branch something else than that run cooled down."""
    changed = defaults.differences(before, training.config)
    lines = [f'there, config.{name} is another' for name in changed if name not in BRANCHED]
    for line in history:
        rate, now = line.get('train/lr'), float(training.timetable.lr(line['step'] - 1))
        if rate is not None and not math.isclose(rate, now, rel_tol=1e-5):
            lines.append(
                f'there, the learning rate of step {line["step"]} was {rate:g}, not {now:g}: '
                'give the warm-up in steps, and no shape that depends on config.total'
            )
            break
    return lines


def _other_data(
    before: ConfigDict, listing: Mapping[str, str] | None, training: Training
) -> list[str]:
    """A line if the same data had other examples, as far as the checkpoint's listing knows."""
    if listing is None or 'data' in defaults.differences(before, training.config):
        return []
    if listing == training.data.listing._asdict():
        return []
    return [f'there, {training.data.source.title} had examples of other names, labels or sizes']


def write_history(folder: pathlib.Path, origin: Origin) -> None:
    """Puts the metrics of the run that is continued before those to come; on process 0."""
    if origin.state is not None and jax.process_index() == 0:
        text = ''.join(json.dumps(line) + '\n' for line in origin.history)
        paths.write_text_atomic(folder / run_folder.METRICS, text)
