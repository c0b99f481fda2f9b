"""The first lines of a run, and how well it uses its chips."""

from __future__ import annotations

import pathlib
from collections.abc import Callable
from functools import partial

import jax
import numpy as np

from vit_jax.config import defaults
from vit_jax.data import class_ids
from vit_jax.data.records import SourceInfo
from vit_jax.profiling import flops, task_flops
from vit_jax.runtime import compile_cache
from vit_jax.trainer.build import Training
from vit_jax.trainer.start import Beginning

LISTED = 5  # classes that are all listed with their counts


def describe(training: Training, folder: pathlib.Path, beginning: Beginning) -> str:
    """Describe the run and its devices in a few lines."""
    start, data, hardware = beginning.step, training.data, training.program.hardware
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
        compile_cache.note(),
        *beginning.notes,
    ]
    if (before := beginning.hardware) != hardware:
        lines.append(
            f'so far on {before}: the examples stay the same, numbers agree up to rounding'
        )
    signed = {name: e.signature for name, e in training.evaluations.items()}
    return '\n'.join([*lines, *(f'{name}: {text}' for name, text in signed.items() if text)])


def _classes(training: Training) -> list[str]:
    """Lines about the classes that the model learns; none if it learns no classes."""
    data = training.data
    if not (data.info.num_classes and training.config.model.get('num_classes')):
        return []
    return of_classes(data.info, data.class_counts, data.source.has_annotations)


def of_classes(info: SourceInfo, counts: np.ndarray | None, of_objects: bool = False) -> list[str]:
    """A line about the classes of training data, and one about those without an example.

    Args:
      info: of the data.
      counts: the examples of each class, [num_classes]; None where they are not known.
      of_objects: whether they are numbers of objects.
    """
    line = f'{info.num_classes:,} class{"es" if info.num_classes > 1 else ""}'
    if counts is None:
        return [f'{line}: {class_ids.some(info.class_names)}' if info.has_names else line]
    is_short = info.has_names and len(counts) <= LISTED
    if not is_short:
        low, high = int(counts.min()), int(counts.max())
        span = f'{low:,} to {high:,}' if low < high else f'{low:,}'
        line += f', {span} {"objects" if of_objects else "examples"} each'
    if info.has_names:
        pairs = list(zip(info.class_names, counts.tolist(), strict=True))
        shown = pairs if is_short else pairs[: class_ids.LISTED]
        words = [f'{class_ids.some([name])} {count:,}' for name, count in shown]
        line += f': {", ".join(words)}{"" if is_short else ", ..."}'
    if not (lacking := np.flatnonzero(counts == 0).tolist()):
        return [line]
    names = [info.class_names[label] if info.has_names else str(label) for label in lacking]
    them = 'class has' if len(names) == 1 else 'classes have'
    return [line, f'{len(names):,} {them} no example: {class_ids.some(names)}']


def _evaluates(training: Training) -> list[str]:
    """A line about the interval of evaluations where the config leaves it open."""
    config, timetable = training.config, training.timetable
    names = [name for name, section in config.evals.items() if section.get('every') is None]
    if not names or defaults.arguments(config, 'every')['eval'] is not None:
        return []
    steps = timetable.evals[names[0]]
    when = 'every step' if steps == 1 else f'every {steps:,} steps'
    when = when if steps < timetable.total else 'at the end alone'
    return [f'evaluates {when}: at most a tenth of the time; config.every.eval gives another']


def utilization(training: Training) -> Callable[[float], float | None]:
    """Steps a second -> model FLOPs utilization; None where the chip's peak is not known."""
    program = training.program
    mesh = program.layout.mesh
    kind = mesh.devices.flat[0].device_kind
    if flops.peak_flops(kind) is None:
        return lambda rate: None
    count = partial(task_flops.of_training, program.model, program.task)
    step = sum(s.rows * s.share * count(s.spec).total for s in training.data.shapes)
    return lambda rate: flops.mfu(step * rate, 1.0, mesh.size, kind)
