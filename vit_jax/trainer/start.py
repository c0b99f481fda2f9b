"""Start of a run: from its own newest checkpoint, or from its origin."""

from __future__ import annotations

import dataclasses
import json
import pathlib
from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

import jax
import numpy as np

from vit_jax.checkpoints.checkpointer import Checkpointer
from vit_jax.config.load import from_dict, to_run
from vit_jax.config.run import Durations, Optim
from vit_jax.data import numbering
from vit_jax.data.records import SourceInfo
from vit_jax.errors import UserError
from vit_jax.inference import fine_tune
from vit_jax.optim import schedules
from vit_jax.runtime import compile_cache
from vit_jax.step import TrainState
from vit_jax.storage import paths, run_folder, times
from vit_jax.trainer import compatibility, workdir
from vit_jax.trainer.build import Training
from vit_jax.trainer.early_stopping import Bests
from vit_jax.trainer.guards import Guard
from vit_jax.trainer.program import Origin
from vit_jax.trainer.remarks import Remarks

if TYPE_CHECKING:
    from vit_jax.interop.trained import TrainedModel
    from vit_jax.optim.lora import Adapters


@dataclasses.dataclass(frozen=True)
class ResumePoint:
    """State and step at which a run starts or resumes.

    Attributes:
      state: State on the devices.
      step: Step of `state`.
      hardware: The devices on which `state` was saved.
      unevaluated: Whether the run was stopped before the evaluations after `step` were finished.
      broken: Records of the training data that could not be read, with the reasons.
      bests: The best results up to `step`.
      notes: Changes of the data, a line each.
    """

    state: TrainState
    step: int
    hardware: str
    unevaluated: bool = False
    broken: Mapping[int, str] = dataclasses.field(default_factory=dict)
    bests: Bests = dataclasses.field(default_factory=dict)
    notes: tuple[str, ...] = ()


def read_origin(
    training: Training,
    folder: pathlib.Path,
    allowed: Sequence[str] = (),
    checkpoint: TrainedModel | None = None,
) -> tuple[Training, Origin | None]:
    """Read the parameters or the state that a run starts from, before its folder is locked.

    There are four ways: `config.lora` adapts a base, which every start reads; `config.branch`
    continues another run's state; `config.init` takes a checkpoint's parameters; and all that
    remain are initialized. A run that resumes needs only the first.

    Args:
      training: Run without checkpoints of others.
      folder: Run folder.
      allowed: User's modules, see `find_origin`.
      checkpoint: Checkpoint of `config.init`, if it was read before.

    Returns:
      The run with the base of its adapters, and the origin of a new run; None for one that resumes.
    """
    if training.program.adapters:
        training = hold_base(training, training.program.adapters, allowed, checkpoint)
    if workdir.has_checkpoint(folder):
        return training, None
    return training, find_origin(training, allowed, checkpoint)


def restore(training: Training, guard: Guard, origin: Origin | None) -> ResumePoint:
    """Restore the newest intact checkpoint of the run, or start from its origin.

    Args:
      training: Run to start.
      guard: Guard with the checkpoints of its folder.
      origin: Origin of a new run; if None, it is read if there is no intact checkpoint.

    Raises:
      UserError: if the checkpoint does not suit the run, or `stop_at` has been passed.
    """
    options = guard.options
    with guard.clock.during(times.RESTORE):
        point = _resume(training, guard.checkpointer, options.strict)
        if point is None:
            origin = origin or find_origin(training, options.allowed)
            point = _begin(training, origin)
    if options.stop_at is not None and options.stop_at <= point.step:
        raise UserError(
            f'--stop-at {options.stop_at}: the run has already passed step {point.step}; give a '
            'later step, or leave it out to train to the end'
        )
    return point


def _resume(training: Training, checkpointer: Checkpointer, strict: bool) -> ResumePoint | None:
    """Restore the newest intact checkpoint; None if the run has none."""
    program = training.program
    target = program.adapters.own(program.target) if program.adapters else program.target
    checkpoint = checkpointer.restore_latest(
        target, strict=strict, check=compatibility.require_same_numerics
    )
    if checkpoint is None:
        return None
    step, saved, meta = checkpoint
    compatibility.require_same_function(meta.get('config'), training.config)
    compatibility.require_same_classes(meta.get('class_names', ()), training.data.info)
    compatibility.require_same_count(meta.get('num_examples'), training.data)
    if program.frozen:
        program.frozen.require_same(meta.get('frozen', {}))
    if training.program.task.weighs_classes:
        compatibility.require_same_class_counts(meta.get('class_counts'), training.data)
    notes = compatibility.require_same_listing(meta.get('listing'), training.data)
    return ResumePoint(
        program.place(saved),
        step,
        meta.get('hardware', program.hardware),
        meta.get('unevaluated', False),
        dict(meta.get('broken', ())),
        training.judge.begin(meta),
        notes,
    )


def _begin(training: Training, origin: Origin) -> ResumePoint:
    """Place the origin's state on the devices, or make one from its parameters."""
    program, bests = training.program, training.judge.begin({})
    if origin.state is not None:
        return ResumePoint(origin.state, origin.step, origin.hardware, bests=bests)
    frozen = (program.frozen.variables,) if program.frozen else ()
    state = program.layout.create(program.init, origin.params, *frozen)
    return ResumePoint(state, 0, program.hardware, bests=bests)


def write_start(
    training: Training,
    folder: pathlib.Path,
    point: ResumePoint,
    origin: Origin | None,
    extend: bool,
) -> tuple[str, ...]:
    """Write the config, and the history of a branch, into the folder; return notes for people."""
    if point.broken:
        training.data.source.record_broken(point.broken)
    notes = workdir.replaced_config_note(training, folder)
    if extend:
        notes += extension_note(training, folder, point.step)
    with paths.writing(folder):
        if origin is not None and point.step == origin.step:
            notes += origin.notes
            if origin.state is not None:
                write_history(folder, origin)
        if extend:
            forget_result(folder)
        workdir.write_config(training, folder)
    return notes


COLORS = {1: 'gray', 3: 'color'}  # kinds of images by channels


def find_origin(
    training: Training, allowed: Sequence[str] = (), checkpoint: TrainedModel | None = None
) -> Origin:
    """Read the checkpoint that `config.branch` or `config.init` names, and adapt it to the run.

    Args:
      training: Run to start.
      allowed: User's modules that the config of the other run may name; it may also name the
        modules that this run's config names.
      checkpoint: Checkpoint of `config.init`, if it was read before.

    Raises:
      UserError: if there is no such checkpoint, it does not fit, it names code that is not
        allowed, or one has to be named.
    """
    if training.run.branch.folder:
        from vit_jax.trainer.branch import branch  # here, as few runs branch off

        return branch(training)
    init = training.run.init
    if not (path := fine_tune.init_path(init)):
        return Origin()
    from vit_jax.config.origin import trusted_names  # here, as most runs start from nothing
    from vit_jax.inference import load
    from vit_jax.interop import adapt, trained

    allowed = [*allowed, *trusted_names(training.run)]
    imported = checkpoint or load.read(path, allowed=allowed)
    adapters, target = training.program.adapters, training.program.abstract_state.params
    if init.classes:
        classes = trained.read_classes(init.classes)
        imported = trained.take_classes(imported, training.program.model, classes)
    try:
        params, notes = adapt.adapt_checkpoint(
            imported,
            training.program.model,
            adapters.without(target) if adapters else target,
            training.data.image_size,
            init.posemb,
            init.select,
            None if init.classes else training.data.info,
            training.program.task,
        )
    except UserError as e:
        raise UserError(f'config.init.from={path}: {e}{_channels(imported, training)}') from e
    return Origin(params, notes=(f'from {path} ({imported.source})', *notes))


def hold_base(
    training: Training,
    adapters: Adapters,
    allowed: Sequence[str] = (),
    checkpoint: TrainedModel | None = None,
) -> Training:
    """Attach the parameters that adapters adapt; takes the arguments of `find_origin`."""
    from vit_jax.config.origin import trusted_names  # here, as few runs have adapters
    from vit_jax.inference import adapted, frozen, load

    run, program = training.run, training.program
    allowed = [*allowed, *trusted_names(run)]
    base = adapted.read_base(
        checkpoint or load.read(fine_tune.init_path(run.init), allowed=allowed),
        run.init,
        adapters,
        (program.model, program.task),
        program.abstract_state.params,
        training.data.image_size,
    )
    models = program.frozen or frozen.Frozen(program.task)
    program = dataclasses.replace(program, frozen=models.with_base(base))
    return dataclasses.replace(training, program=program)


def _channels(checkpoint: TrainedModel, training: Training) -> str:
    """Hint at a checkpoint of gray images with data in color, or vice versa; else ''."""
    image = training.data.spec.get('image')
    if image is None or len(image.shape) != 3 or image.shape[-1] == checkpoint.channels:
        return ''
    counts = checkpoint.channels, image.shape[-1]
    kinds = [COLORS.get(count, f'{count}-channel') for count in counts]
    return '; the checkpoint is for {} images, and the data have {} images'.format(*kinds)


def write_history(folder: pathlib.Path, origin: Origin) -> None:
    """Start the metrics with the history of the run that is continued; on process 0."""
    if jax.process_index() == 0:
        text = ''.join(json.dumps(line) + '\n' for line in origin.history)
        paths.write_text_atomic(folder / run_folder.METRICS, text)


def extension_note(training: Training, folder: pathlib.Path, step: int) -> tuple[str, ...]:
    """Return a line on how much longer the run becomes; none if its length stays.

    The steps so far are the same as in a run that has this length from the start.

    Args:
      training: Longer run.
      folder: Run folder, with the config of the shorter run.
      step: Step after which it continues.

    Raises:
      UserError: if the longer run had another learning rate up to `step`, or is no longer one.
    """
    stored = run_folder.read_config(folder)
    if stored is None or run_folder.has_saved_nothing(folder):
        return ()
    before, total = to_run(from_dict(stored)), training.timetable.total
    data = training.data
    before_times = Durations.of(before.total, data.plan.examples_per_step, data.num_examples)
    steps = before_times.total_steps
    if steps == total:
        return ()
    if total < steps:
        raise UserError(
            f'--extend: config.total={training.run.total!r} are {total} steps, and the run has '
            f'{steps}; give a later end'
        )
    _require_same_rates(_rates(before.optim, before_times, step), training, step)
    return (f'extends the run from {steps} to {total} steps',)


def forget_result(folder: pathlib.Path) -> None:
    """Remove the result of the shorter run; on process 0."""
    if jax.process_index() == 0:
        (folder / run_folder.RESULT).unlink(missing_ok=True)


def _rates(optim: Optim, durations: Durations, step: int) -> np.ndarray:
    """Return the learning rates of the first steps of a run."""
    return np.asarray(schedules.make_schedule(optim.schedule, optim.lr, durations)(np.arange(step)))


def _require_same_rates(before: np.ndarray, training: Training, step: int) -> None:
    after = np.asarray(training.program.lr(np.arange(step)))
    differ = np.flatnonzero(~np.isclose(before, after, rtol=1e-6, atol=0))
    if differ.size:
        first = differ[0]
        raise UserError(
            f'--extend: the learning rate of step {first + 1} was {before[first]:g}, and is '
            f'{after[first]:g} in a run of {training.timetable.total} steps: only a schedule that '
            'does not depend on config.total can continue, with its warm-up in steps and no '
            'cooldown; '
            'branch off from a step before they part by config.branch'
        )


LISTED = 5  # classes that are all listed with their counts


def describe_run(training: Training, folder: pathlib.Path, point: ResumePoint) -> str:
    """Describe the run and its devices in a few lines."""
    start, data, hardware = point.step, training.data, training.program.hardware
    count = sum(x.size for x in jax.tree.leaves(training.program.abstract_state.params))
    lines = [
        f'{training.run.model.name}: {count:,} parameters, {data.num_examples:,} examples, '
        f'{training.timetable.total:,} steps of {data.batch_size} {data.plan.unit} on {hardware}',
        *_classes(training),
        f'batches are made by {data.reading(training.timetable.total - start)}',
        *data.plan.notes,
        *data.plan.examples.remarks(),
        *_evaluates(training),
        *training.judge.notes,
        *Remarks(training).at_start(),
        f'{f"resumes after step {start}" if start else "starts"} in {folder}',
        compile_cache.describe_cache(),
        *point.notes,
    ]
    if (sam := training.run.step.sam).rho:
        from vit_jax.optim import sharpness  # here, as few runs need two gradients

        lines += sharpness.remarks(sam)
    if adapters := training.program.adapters:
        lines += adapters.remarks(training.program.abstract_state.params)
    if (before := point.hardware) != hardware:
        lines.append(
            f'so far on {before}: the examples stay the same, numbers agree up to rounding'
        )
    signed = {name: e.signature for name, e in training.evaluations.items()}
    return '\n'.join([*lines, *(f'{name}: {text}' for name, text in signed.items() if text)])


def _classes(training: Training) -> list[str]:
    """Lines about the classes that the model learns, if it learns any."""
    data = training.data
    if not (data.info.num_classes and training.run.model.options.get('num_classes')):
        return []
    return class_lines(data.info, data.class_counts, data.source.has_annotations)


def class_lines(info: SourceInfo, counts: np.ndarray | None, of_objects: bool = False) -> list[str]:
    """Return a line about the classes of training data, and one about those without an example.

    Args:
      info: Facts about the data.
      counts: Number of examples of each class, [num_classes]; None where they are not known.
      of_objects: Whether they are numbers of objects.
    """
    line = f'{info.num_classes:,} class{"es" if info.num_classes > 1 else ""}'
    if counts is None:
        return [f'{line}: {numbering.first_names(info.class_names)}' if info.has_names else line]
    is_short = info.has_names and len(counts) <= LISTED
    if not is_short:
        low, high = int(counts.min()), int(counts.max())
        span = f'{low:,} to {high:,}' if low < high else f'{low:,}'
        line += f', {span} {"objects" if of_objects else "examples"} each'
    if info.has_names:
        pairs = list(zip(info.class_names, counts.tolist(), strict=True))
        listed_pairs = pairs if is_short else pairs[: numbering.LISTED]
        labels = [f'{numbering.first_names([name])} {count:,}' for name, count in listed_pairs]
        line += f': {", ".join(labels)}{"" if is_short else ", ..."}'
    if not (lacking := np.flatnonzero(counts == 0).tolist()):
        return [line]
    names = [info.class_names[label] if info.has_names else str(label) for label in lacking]
    them = 'class has' if len(names) == 1 else 'classes have'
    return [line, f'{len(names):,} {them} no example: {numbering.first_names(names)}']


def _evaluates(training: Training) -> list[str]:
    """Return a line about the interval of evaluations if the config leaves it open."""
    run, timetable = training.run, training.timetable
    names = [name for name, entry in run.evals.items() if entry.every is None]
    if not names or run.every.eval is not None:
        return []
    steps = timetable.evals[names[0]]
    when = 'every step' if steps == 1 else f'every {steps:,} steps'
    when = when if steps < timetable.total else 'only at the end'
    return [f'evaluates {when}: at most a tenth of the time; config.every.eval gives another']


def utilization(training: Training) -> float | None:
    """Model FLOPs utilization at one step a second; None if the chip's peak is not known."""
    from vit_jax.profiling import flops, task_flops  # here, as the peak of CPUs is unknown

    program = training.program
    mesh = program.layout.mesh
    kind = mesh.devices.flat[0].device_kind
    if flops.peak_flops(kind) is None:
        return None
    count = partial(task_flops.step_flops, training.run.step.sam, program.model, program.task)
    step = sum(s.rows * s.share * count(s.spec) for s in training.data.shapes)
    return flops.mfu(step, 1.0, mesh.size, kind)
