"""The first lines of a run, and how well it uses its chips."""

from __future__ import annotations

import pathlib
from collections.abc import Callable
from functools import partial

import jax

from vit_jax.config import defaults
from vit_jax.profiling import flops, task_flops
from vit_jax.runtime import compile_cache
from vit_jax.trainer.build import Training
from vit_jax.trainer.start import Beginning


def describe(training: Training, folder: pathlib.Path, beginning: Beginning) -> str:
    """Describe the run and its devices in a few lines."""
    start, data, hardware = beginning.step, training.data, training.program.hardware
    count = sum(x.size for x in jax.tree.leaves(training.program.abstract_state.params))
    lines = [
        f'{training.config.model.name}: {count:,} parameters, {data.num_examples:,} examples, '
        f'{training.timetable.total:,} steps of {data.batch_size} {data.unit} on {hardware}',
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
