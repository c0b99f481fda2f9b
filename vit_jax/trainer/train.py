"""One run, from its config to its last checkpoint.

build     data, model, task, optimizer, layout; nothing is compiled or written yet
begin     what a new run is to start from, if the config names another's checkpoint
restore   the newest valid checkpoint, or what `begin` found, or a fresh state
loop      next batch -> step -> when due: log, evaluate, save
"""

from __future__ import annotations

import json
import pathlib
from collections.abc import Callable, Iterator, Sequence

import jax
import numpy as np
from ml_collections import ConfigDict

from vit_jax import step as step_lib
from vit_jax.checkpoints import checkpointer as checkpoint_lib
from vit_jax.config import load as config_lib
from vit_jax.config import sections
from vit_jax.data import pipeline, vocabulary
from vit_jax.profiling import flops
from vit_jax.runtime.preemption import Preemption
from vit_jax.runtime.watchdog import Watchdog
from vit_jax.storage import lock as workdir
from vit_jax.storage import paths as storage
from vit_jax.storage import run_folder
from vit_jax.trainer import build as build_lib
from vit_jax.trainer import evaluate as evaluate_lib
from vit_jax.trainer import start as start_lib
from vit_jax.trainer.build import Parts
from vit_jax.trainer.meter import Meter
from vit_jax.trainer.writer import Writer


class Preempted(Exception):
    """The run was told to stop; its state is saved."""


class Pruned(Exception):
    """`report` ended the run before its last step."""


Report = Callable[[int, dict[str, float]], bool]


def train(
    config: ConfigDict,
    folder: str | pathlib.Path,
    *,
    stop_at: int | None = None,
    devices: Sequence[jax.Device] | None = None,
    report: Report | None = None,
    step_timeout: float | None = None,
) -> dict[str, float]:
    """Trains to the end, resuming whatever is in `folder`.

    Args:
      config: as from `config.load`.
      folder: the run folder; made if missing.
      stop_at: save and stop after this step, as if preempted there.
      devices: all by default.
      report: gets the step and the results whenever evaluations were due, on every process; what it
        returns says whether the run ends there.
      step_timeout: seconds, see `Watchdog`.

    Returns:
      The final evaluation, {name: value}.

    Raises:
      UserError: for a mistake in the config or the folder.
      Diverged: if the loss is not finite; the last good checkpoint stands.
      Preempted: after SIGTERM, SIGINT or at `stop_at`; the state is saved.
      Pruned: if `report` said so before the last step.
    """
    folder = storage.absolute(folder)
    if (result := start_lib.finished(config, folder)) is not None:
        return result
    storage.require_writable(folder)
    parts = build_lib.build(config, devices)
    vocab = parts.transforms.vocab
    vocabulary.require_same(vocab, folder)
    beginning = None if start_lib.started(folder) else start_lib.begin(parts)
    with (
        workdir.lock(folder),
        Preemption() as preemption,
        Watchdog(step_timeout) as watchdog,
        checkpoint_lib.Checkpointer(
            folder / run_folder.CHECKPOINTS,
            keep_last=sections.fields(config, 'checkpoint')['keep_last'],
            keep_every=parts.keep_every,
        ) as checkpointer,
    ):
        state, start, hardware_before = start_lib.restore(parts, checkpointer, beginning)
        notes: tuple[str, ...] = ()
        if beginning is not None and start == beginning.step:
            notes = beginning.notes
            start_lib.write_history(folder, beginning)
        del beginning  # frees the memory
        if jax.process_index() == 0:
            storage.write_text_atomic(folder / run_folder.CONFIG, config_lib.to_json(config))
            if vocab is not None:
                storage.write_atomic(folder / run_folder.VOCAB, vocab.model)
        writer = Writer(folder, parts.total_steps, start, enabled=jax.process_index() == 0)
        try:
            writer.say('\n'.join((describe(parts, folder, start, hardware_before), *notes)))
            result = loop(
                parts, state, start, checkpointer, writer, watchdog, preemption, stop_at, report
            )
            if jax.process_index() == 0:
                storage.write_text_atomic(folder / run_folder.RESULT, json.dumps(result) + '\n')
            return result
        finally:
            writer.close()


def loop(
    parts: Parts,
    state: step_lib.TrainState,
    start: int,
    checkpointer: checkpoint_lib.Checkpointer,
    writer: Writer,
    watchdog: Watchdog,
    preemption: Preemption,
    stop_at: int | None,
    report: Report | None = None,
) -> dict[str, float]:
    """Steps `start` to the end; see the module's docstring."""
    total, every = parts.total_steps, parts.every
    meter = Meter(
        start,
        parts.config.batch_size,
        parts.schedule,
        utilisation(parts),
        sections.fields(parts.config, 'step')['max_skips'],
    )
    batches = train_batches(parts, start)
    results = evaluate_all(parts, state, start) if start == total else {}
    for step in range(start + 1, total + 1):
        with meter.waiting():
            batch = next(batches)
        meter.count(batch)
        state, metrics = parts.train_step(state, parts.layout.put_batch(batch))
        meter.add(step, metrics)
        writer.progress(step)
        checkpointer.check()
        stopping = preemption.reached() or step == stop_at
        watchdog.beat(f'step {step}')
        if due(step, every['log'], total) or stopping:
            logged = meter.log()
            writer.write(step, logged)
            writer.show_train(step, logged)
        if due_evals(parts, step):
            with meter.paused():
                results = evaluate_all(parts, state, step)
                writer.write(step, {**results, **signatures(parts, step)})
                writer.show_eval(step, results)
                writer.draw()
            watchdog.beat(f'the evaluation after step {step}')
            if report and report(step, results) and step < total:
                raise Pruned(f'ended after step {step}/{total}')
        if due(step, every['checkpoint'], total) or stopping:
            with meter.paused():
                meter.check_finite()
                writer.flush()
                save(parts, checkpointer, step, state)
            watchdog.beat(f'the save of step {step}')
        if stopping and step < total:
            checkpointer.wait()
            raise Preempted(f'stopped after step {step}/{total}; the state is saved')
    checkpointer.wait()
    return results


def due(step: int, every: int, total: int) -> bool:
    """The one predicate for log, evaluate and save: every so often, and at the end."""
    return step == total or (every > 0 and step % every == 0)


def train_batches(parts: Parts, start: int) -> Iterator[dict[str, np.ndarray]]:
    """This process's rows of the global batches from step `start` on."""
    return pipeline.train_batches(
        parts.source,
        parts.transforms,
        batch_size=parts.config.batch_size,
        seed=parts.config.seed,
        start_step=start,
        process_index=jax.process_index(),
        process_count=jax.process_count(),
        **evaluate_lib.loading(parts.config.data),
    )


def evaluate_all(parts: Parts, state: step_lib.TrainState, step: int) -> dict[str, float]:
    """All evaluations of the config that are due after `step`: {'test/accuracy': ...}."""
    results: dict[str, float] = {}
    for name, evaluate in due_evals(parts, step).items():
        results |= {f'{name}/{k}': v for k, v in evaluate(state.variables).items()}
    return results


def signatures(parts: Parts, step: int) -> dict[str, str]:
    """How the numbers of the evaluations after `step` are made, of those that say so."""
    every = due_evals(parts, step)
    return {f'{name}/signature': e.signature for name, e in every.items() if e.signature}


def due_evals(parts: Parts, step: int) -> dict[str, evaluate_lib.Evaluation]:
    """The evaluations that are due after `step`."""
    return {
        name: evaluate
        for name, evaluate in parts.evals.items()
        if due(step, parts.every_eval[name], parts.total_steps)
    }


def save(
    parts: Parts, checkpointer: checkpoint_lib.Checkpointer, step: int, state: step_lib.TrainState
) -> None:
    """Starts an asynchronous save of everything that a resumed run needs."""
    meta = {
        'config': parts.config.to_dict(),
        'data': {'step': step},
        'hardware': build_lib.hardware(parts),
        'class_names': list(parts.source.info.class_names),
        'image': evaluate_lib.image_format(parts.source),
        'input_size': build_lib.image_size(parts),
        'num_examples': parts.epoch.examples,
    }
    if 'buckets' in parts.config.data:
        meta['sequences'] = [
            (rows, {name: array.shape for name, array in spec.items()})
            for rows, spec in parts.epoch.shapes
        ]
    if parts.transforms.vocab is not None:
        meta['vocab'] = parts.transforms.vocab.digest
    checkpointer.save(step, parts.layout.to_global(state), meta)


def utilisation(parts: Parts) -> Callable[[float], float | None]:
    """Steps a second -> model FLOPs utilisation; None where the chip's peak is not known."""
    device = parts.layout.mesh.devices.flat[0]
    if flops.peak_flops(device.device_kind) is None:
        return lambda rate: None
    per_step = 3 * sum(
        rows * flops.forward_flops(parts.model, *build_lib.model_inputs(parts, spec))
        for rows, spec in parts.epoch.shapes
    )
    size = parts.layout.mesh.size
    return lambda rate: flops.mfu(per_step * rate, 1.0, size, device.device_kind)


def describe(parts: Parts, folder: pathlib.Path, start: int, hardware_before: str) -> str:
    """Two lines: what runs, and where."""
    count = sum(x.size for x in jax.tree.leaves(parts.abstract_state.params))
    begins = f'resumes after step {start}' if start else 'starts'
    signed = [f'\n{k}: {e.signature}' for k, e in parts.evals.items() if e.signature]
    unit = ' tokens' if 'buckets' in parts.config.data else ''
    if long := len(parts.source) - parts.epoch.examples:
        begins = f'{long:,} examples are longer than the last bucket: left out\n{begins}'
    moved = (
        f'\nso far on {hardware_before}: the examples stay the same, numbers agree up to rounding'
        if hardware_before != build_lib.hardware(parts)
        else ''
    )
    return (
        f'{parts.config.model.name}: {count:,} parameters, {parts.epoch.examples:,} examples, '
        f'{parts.total_steps:,} steps of {parts.config.batch_size}{unit} on '
        f'{build_lib.hardware(parts)}\n'
        f'{begins} in {folder}{moved}{"".join(signed)}'
    )
