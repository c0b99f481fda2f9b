"""The start of a run: from its own newest checkpoint, or from its origin."""

from __future__ import annotations

import dataclasses
import json
import pathlib
import shlex
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import jax
import numpy as np
from ml_collections import ConfigDict

from vit_jax.checkpoints.checkpointer import Checkpointer, restore_step
from vit_jax.config import defaults, durations
from vit_jax.config.load import from_dict
from vit_jax.config.origin import Branch, Init, dotted_names
from vit_jax.data import splits
from vit_jax.data.records import SourceInfo
from vit_jax.errors import UserError
from vit_jax.inference import fine_tune
from vit_jax.interop.trained import TrainedModel
from vit_jax.optim import schedules, sharpness
from vit_jax.profiling import flops, task_flops
from vit_jax.runtime import compile_cache
from vit_jax.step import TrainState
from vit_jax.storage import paths, run_folder
from vit_jax.trainer import compatibility
from vit_jax.trainer.build import Program, Training
from vit_jax.trainer.early_stopping import Bests
from vit_jax.trainer.workdir import FREE, SCHEDULES


@dataclasses.dataclass(frozen=True)
class ResumePoint:
    """The state and step at which a run starts or resumes.

    Attributes:
      state: on the devices.
      step: of `state`.
      hardware: the devices on which `state` was saved.
      unevaluated: whether the run was stopped before the evaluations after `step` were finished.
      broken: records of the training data that could not be read, with the reasons.
      bests: the best results up to `step`.
      notes: on the data, a line each.
    """

    state: TrainState
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
) -> ResumePoint:
    """Restore the newest intact checkpoint of the run, or start from its origin.

    Args:
      training: of the run.
      checkpointer: of its folder.
      origin: of a new run; if None, it is found if there is no checkpoint.
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
        if program.frozen:
            program.frozen.require_same(meta.get('frozen', {}))
        if training.program.task.weighs_classes:
            compatibility.require_same_class_counts(meta.get('class_counts'), training.data)
        notes = compatibility.require_same_listing(meta.get('listing'), training.data)
        return ResumePoint(
            _placed(program, saved),
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
        return ResumePoint(origin.state, origin.step, origin.hardware, bests=bests)
    held = (program.frozen.variables,) if program.frozen else ()
    state = program.layout.create(program.init, origin.params, *held)
    return ResumePoint(state, 0, program.hardware, bests=bests)


def _placed(program: Program, saved: TrainState) -> TrainState:
    """A restored state on the devices, with the frozen models, which it does not hold."""
    state = program.layout.from_global(dataclasses.replace(saved, frozen=None))
    return program.frozen.join(state, program.layout) if program.frozen else state


def check_stop(stop_at: int | None, start: int) -> None:
    """Raise UserError if the run is already past `--stop-at`."""
    if stop_at is not None and stop_at <= start:
        raise UserError(
            f'--stop-at {stop_at}: the run is after step {start} already; give a later step, or '
            'leave it out to train to the end'
        )


# What a branch is there to change.
BRANCHED = (*FREE, *SCHEDULES, 'total', 'early_stop', 'init', 'branch')
COLORS = {1: 'gray', 3: 'color'}  # kinds of images by channels


@dataclasses.dataclass(frozen=True)
class Origin:
    """The state or parameters that a new run starts from.

    Attributes:
      params: nested arrays; missing ones are initialized.
      state: complete, of the run that this one branches from; None without a branch.
      step: of `state`.
      hardware: the devices on which `state` was saved.
      history: the metrics of the run that this one branches from, up to `step`.
      notes: its source and the changes that make it fit, a line each.
    """

    params: Any = dataclasses.field(default_factory=dict)
    state: TrainState | None = None
    step: int = 0
    hardware: str = ''
    history: tuple[dict[str, Any], ...] = ()
    notes: tuple[str, ...] = ()


def find_origin(
    training: Training, allowed: Sequence[str] = (), known: TrainedModel | None = None
) -> Origin:
    """Read the checkpoint that `config.branch` or `config.init` names, and adapt it to the run.

    Args:
      training: of the run.
      allowed: the user's modules that the config of the other run may name, besides those that
        this run's config names.
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
    from vit_jax.inference import load  # here, as most runs start from nothing
    from vit_jax.interop import adapt, trained

    own = [name for _, name in dotted_names(training.config)]
    imported = known or load.read(path, allowed=[*allowed, *own])
    if init.classes:
        chosen = trained.read_classes(init.classes)
        imported = trained.take_classes(imported, training.program.model, chosen)
    try:
        params, notes = adapt.adapt_checkpoint(
            imported,
            training.program.model,
            training.program.abstract_state.params,
            training.data.image_size,
            init.posemb,
            init.select,
            None if init.classes else training.data.info,
            training.program.task,
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
    """The complete state of another run at a kept step, to be continued with another schedule.

    With a later cooldown it is bit for bit what a run with that cooldown would have come to: one
    long run at a schedule that does not depend on its end gives a finished model of every length
    (Zhai et al. 2022, "Scaling Vision Transformers", section 3.4).

    Raises:
      UserError: if there is no such run or checkpoint, or its state does not fit.
    """
    from vit_jax.inference import load

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
        before = load.stored_config(trunk)
        _, state, meta = restore_step(trunk / run_folder.CHECKPOINTS, step, program.target)
    except UserError as e:
        raise UserError(f'config.branch: {e}') from e
    if 'config' in meta:  # the file may have been edited
        before = from_dict(meta['config'])
    named = meta.get('class_names', ())
    compatibility.require_same_classes(named, training.data.info, 'config.branch')
    history = tuple(line for line in run_folder.read_metrics(trunk) if line['step'] <= step)
    return Origin(
        state=_placed(program, state),
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
    return [*lines, *_other_rate(before, training, history)]


def _other_rate(
    before: ConfigDict, training: Training, history: tuple[dict[str, Any], ...]
) -> list[str]:
    """A line for the first step before the cooldown at which the trunk's learning rate differs."""
    rates = {line['step']: line['train/lr'] for line in history if 'train/lr' in line}
    rates |= _later_rates(before, training, max(rates, default=0))
    now = np.asarray(training.timetable.lr(np.array([*rates]) - 1))
    differ = np.flatnonzero(~np.isclose([*rates.values()], now, rtol=1e-5, atol=0))
    if not differ.size:
        return []
    step, rate = [*rates.items()][differ[0]]
    here = training.config.optim.to_dict().get('schedule', {})
    shape = _without_cooldown(before)
    flags = [
        f'--config.optim.schedule.{key}={shlex.quote(str(value))}'
        for key, value in shape.items()
        if value != here.get(key)
    ]
    remedy = (
        f"for the trunk's schedule, {' '.join(flags)}"
        if flags
        else 'give the warm-up in steps, and no shape that depends on config.total'
    )
    first = f'there, the learning rate of step {step} is {rate:g}, not {now[differ[0]]:g}'
    return [f'{first}: {remedy}']


def _later_rates(before: ConfigDict, training: Training, start: int) -> dict[int, float]:
    """The trunk's learning rate of each step from `start` to the cooldown of the branch."""
    size, epoch = training.data.plan.examples_per_step, training.data.num_examples
    times, here = (durations.from_config(c, size, epoch) for c in (before, training.config))
    schedule = training.config.optim.to_dict().get('schedule', {})
    cooldown = here.steps(schedule.get('cooldown', 0), 'config.optim.schedule.cooldown')
    steps = np.arange(start, min(times.total_steps, here.total_steps - cooldown))
    rate = schedules.from_config(
        _without_cooldown(before), before.optim.lr, times.total_steps, times.steps
    )
    return dict(zip((steps + 1).tolist(), np.asarray(rate(steps)).tolist(), strict=True))


def _without_cooldown(config: ConfigDict) -> dict[str, Any]:
    """The keys of a config's schedule that shape it before its cooldown."""
    schedule = dict(config.optim.to_dict().get('schedule', schedules.CONSTANT))
    ends = schedule.get('name') in ('linear', 'cosine')  # at `final`, without a cooldown too
    unused = ('cooldown', 'cooldown_form', *(() if ends else ('final',)))
    return {key: value for key, value in schedule.items() if key not in unused}


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
    """Start the metrics with those of the run that is continued; on process 0."""
    if origin.state is not None and jax.process_index() == 0:
        text = ''.join(json.dumps(line) + '\n' for line in origin.history)
        paths.write_text_atomic(folder / run_folder.METRICS, text)


def extension_note(training: Training, folder: pathlib.Path, step: int) -> tuple[str, ...]:
    """A line on how much longer the run becomes; none if its length stays.

    Its steps so far equal those of a run that has this length from the start.

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
    before, total = from_dict(stored), training.timetable.total
    data = training.data
    times = durations.from_config(before, data.plan.examples_per_step, data.num_examples)
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
    """Remove the result of the shorter run; on process 0."""
    if jax.process_index() == 0:
        (folder / run_folder.RESULT).unlink(missing_ok=True)


def _rates(config: ConfigDict, times: durations.Durations, step: int) -> np.ndarray:
    """The learning rates of the first steps of a config."""
    schedule = config.optim.to_dict().get('schedule', schedules.CONSTANT)
    rate = schedules.from_config(schedule, config.optim.lr, times.total_steps, times.steps)
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


LISTED = 5  # classes that are all listed with their counts


def describe(training: Training, folder: pathlib.Path, point: ResumePoint) -> str:
    """Describe the run and its devices in a few lines."""
    start, data, hardware = point.step, training.data, training.program.hardware
    count = sum(x.size for x in jax.tree.leaves(training.program.abstract_state.params))
    lines = [
        f'{training.config.model.name}: {count:,} parameters, {data.num_examples:,} examples, '
        f'{training.timetable.total:,} steps of {data.batch_size} {data.unit} on {hardware}',
        *_classes(training),
        f'batches are made by {data.loading}',
        *data.plan.notes,
        *data.plan.examples.remarks(),
        *_evaluates(training),
        *training.judge.notes,
        f'{f"resumes after step {start}" if start else "starts"} in {folder}',
        compile_cache.describe(),
        *point.notes,
    ]
    if sam := defaults.arguments(training.config, 'step')['sam']:
        lines += sharpness.remarks(sam)
    if (before := point.hardware) != hardware:
        lines.append(
            f'so far on {before}: the examples stay the same, numbers agree up to rounding'
        )
    signed = {name: e.signature for name, e in training.evaluations.items()}
    return '\n'.join([*lines, *(f'{name}: {text}' for name, text in signed.items() if text)])


def _classes(training: Training) -> list[str]:
    """Lines about the classes that the model learns, if it learns any."""
    data = training.data
    if not (data.info.num_classes and training.config.model.get('num_classes')):
        return []
    return class_lines(data.info, data.class_counts, data.source.has_annotations)


def class_lines(info: SourceInfo, counts: np.ndarray | None, of_objects: bool = False) -> list[str]:
    """A line about the classes of training data, and one about those without an example.

    Args:
      info: of the data.
      counts: the examples of each class, [num_classes]; None where they are not known.
      of_objects: whether they are numbers of objects.
    """
    line = f'{info.num_classes:,} class{"es" if info.num_classes > 1 else ""}'
    if counts is None:
        return [f'{line}: {splits.first_names(info.class_names)}' if info.has_names else line]
    is_short = info.has_names and len(counts) <= LISTED
    if not is_short:
        low, high = int(counts.min()), int(counts.max())
        span = f'{low:,} to {high:,}' if low < high else f'{low:,}'
        line += f', {span} {"objects" if of_objects else "examples"} each'
    if info.has_names:
        pairs = list(zip(info.class_names, counts.tolist(), strict=True))
        shown = pairs if is_short else pairs[: splits.LISTED]
        words = [f'{splits.first_names([name])} {count:,}' for name, count in shown]
        line += f': {", ".join(words)}{"" if is_short else ", ..."}'
    if not (lacking := np.flatnonzero(counts == 0).tolist()):
        return [line]
    names = [info.class_names[label] if info.has_names else str(label) for label in lacking]
    them = 'class has' if len(names) == 1 else 'classes have'
    return [line, f'{len(names):,} {them} no example: {splits.first_names(names)}']


def _evaluates(training: Training) -> list[str]:
    """A line about the interval of evaluations if the config leaves it open."""
    config, timetable = training.config, training.timetable
    names = [name for name, section in config.evals.items() if section.get('every') is None]
    if not names or defaults.arguments(config, 'every')['eval'] is not None:
        return []
    steps = timetable.evals[names[0]]
    when = 'every step' if steps == 1 else f'every {steps:,} steps'
    when = when if steps < timetable.total else 'at the end alone'
    return [f'evaluates {when}: at most a tenth of the time; config.every.eval gives another']


def utilization(training: Training) -> float | None:
    """Model FLOPs utilization at one step a second; None if the chip's peak is not known."""
    program = training.program
    mesh = program.layout.mesh
    kind = mesh.devices.flat[0].device_kind
    if flops.peak_flops(kind) is None:
        return None
    count = partial(task_flops.step_flops, training.config, program.model, program.task)
    step = sum(s.rows * s.share * count(s.spec) for s in training.data.shapes)
    return flops.mfu(step, 1.0, mesh.size, kind)
