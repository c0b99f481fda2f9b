"""One run, from its config to its last checkpoint.

build     data, model, task, optimizer, layout; nothing is compiled or written yet
begin     what a new run is to start from, if the config names a checkpoint of others
restore   the newest valid checkpoint, or a fresh state
loop      next batch -> step -> when due: log, evaluate, save
"""

from __future__ import annotations

import dataclasses
import json
import pathlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from ml_collections import ConfigDict

from vit_jax import checkpoint, manifest, optim, sharding, workdir
from vit_jax import config as config_lib
from vit_jax import evaluate as evaluate_lib
from vit_jax import step as step_lib
from vit_jax.data import pipeline, vocabulary
from vit_jax.errors import UserError
from vit_jax.interop import adapt
from vit_jax.interop import load as load_lib
from vit_jax.meter import Meter
from vit_jax.scaling import flops
from vit_jax.writer import Writer

RESULT = 'result.json'


class Preempted(Exception):
    """The run was told to stop; its state is saved."""


class Pruned(Exception):
    """`report` ended the run before its last step."""


Report = Callable[[int, dict[str, float]], bool]


@dataclasses.dataclass(frozen=True)
class Beginning:
    """What a new run starts from.

    Attributes:
      params: nested arrays; what is not there is initialised.
      notes: where they come from and what was changed to make them fit, a line each.
    """

    params: Any = dataclasses.field(default_factory=dict)
    notes: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class Parts:
    """What `build` makes of a config."""

    config: ConfigDict
    source: Any
    transforms: Any
    epoch: pipeline.Epoch
    model: Any
    task: Any
    layout: sharding.Layout
    total_steps: int
    every: dict[str, int]
    keep_every: int
    schedule: optax.Schedule
    train_step: Callable
    eval_step: Callable
    evals: dict[str, Callable]
    init: Callable[..., step_lib.TrainState]
    abstract_state: step_lib.TrainState


def build(config: ConfigDict, devices: Sequence[jax.Device] | None = None) -> Parts:
    """Opens the data and builds everything that a run needs.

    Raises:
      UserError: for any mistake in the config that needs the data or the devices to be seen.
    """
    source, transforms = evaluate_lib.open_data(config.data)
    config_lib.fill_num_classes(config, source.info.num_classes)
    config_lib.fill_vocab_size(config, source.info.vocab_size)
    epoch = pipeline.epoch(source, transforms, config.batch_size)
    model, task = config_lib.build(config)
    parallel = config_lib.keywords(config.parallel)
    layout = sharding.make_layout(**parallel, devices=devices)
    accum_steps = config.step.get('accum_steps', 1)
    pairs = getattr(task, 'pairs', False)
    for rows in epoch.rows:
        sharding.check_batch(
            layout, config.batch_size, rows=rows, accum_steps=accum_steps, pairs=pairs
        )
    durations = config_lib.durations(config, epoch.batch_size, epoch.examples)
    spec = pipeline.element_spec(source, transforms)
    example = {k: jnp.zeros((1, *s.shape), s.dtype) for k, s in spec.items()}

    def init_variables():
        return step_lib.init_variables(model, task, example, config.seed)

    tx, schedule = optim.make(
        jax.eval_shape(init_variables)['params'],
        durations.total_steps,
        durations.steps,
        **config.optim.to_dict(),
    )
    ema_decay = config.step.get('ema_decay', 0.0)

    def init(params=None):
        variables = adapt.overlay(init_variables(), {'params': params or {}})
        return step_lib.init_state(variables, tx, config.seed, ema=ema_decay > 0)

    abstract_state = jax.eval_shape(init)
    train_step = step_lib.make_train_step(
        model, task, tx, axis_name=layout.axis_name, **config_lib.keywords(config.step)
    )
    eval_steps = evaluate_lib.compile_steps(model, task, layout)
    return Parts(
        config=config,
        source=source,
        transforms=transforms,
        epoch=epoch,
        model=model,
        task=task,
        layout=layout,
        total_steps=durations.total_steps,
        every={k: durations.steps(v, f'config.every.{k}') for k, v in config.every.items()},
        keep_every=durations.steps(config.checkpoint.get('keep_every', '')),
        schedule=schedule,
        train_step=layout.compile_train(train_step, abstract_state),
        eval_step=eval_steps.evaluate,
        evals=evaluate_lib.open_evals(config, layout, eval_steps),
        init=init,
        abstract_state=abstract_state,
    )


def train(
    config: ConfigDict,
    folder: str | pathlib.Path,
    *,
    stop_at: int | None = None,
    devices: Sequence[jax.Device] | None = None,
    report: Report | None = None,
) -> dict[str, float]:
    """Trains to the end, resuming whatever is in `folder`.

    Args:
      config: as from `config.load`.
      folder: the run folder; made if missing.
      stop_at: save and stop after this step, as if preempted there.
      devices: all by default.
      report: gets the step and the results of every evaluation, on every process; what it
        returns says whether the run ends there.

    Returns:
      The final evaluation, {name: value}.

    Raises:
      UserError: for a mistake in the config or the folder.
      Diverged: if the loss is not finite; the last good checkpoint stands.
      Preempted: after SIGTERM, SIGINT or at `stop_at`; the state is saved.
      Pruned: if `report` said so before the last step.
    """
    folder = pathlib.Path(folder).expanduser().resolve()
    if (result := finished(config, folder)) is not None:
        return result
    workdir.require_writable(folder)
    parts = build(config, devices)
    vocab = parts.transforms.vocab
    vocabulary.require_same(vocab, folder)
    beginning = None if started(folder) else begin(parts)
    with (
        workdir.lock(folder),
        workdir.Preemption() as preemption,
        checkpoint.Checkpointer(
            folder / 'checkpoints',
            keep_last=config.checkpoint.get('keep_last', 2),
            keep_every=parts.keep_every,
        ) as checkpointer,
    ):
        state, start, hardware_before = restore(parts, checkpointer, beginning)
        notes = beginning.notes if beginning and not start else ()
        del beginning  # frees the host's memory
        if jax.process_index() == 0:
            workdir.write_text_atomic(folder / 'config.json', config_lib.to_json(config))
            if vocab is not None:
                workdir.write_bytes_atomic(folder / vocabulary.FILE, vocab.model)
        writer = Writer(folder, parts.total_steps, start, enabled=jax.process_index() == 0)
        try:
            writer.say('\n'.join((describe(parts, folder, start, hardware_before), *notes)))
            result = loop(parts, state, start, checkpointer, writer, preemption, stop_at, report)
            if jax.process_index() == 0:
                workdir.write_text_atomic(folder / RESULT, json.dumps(result) + '\n')
            return result
        finally:
            writer.close()


def started(folder: pathlib.Path) -> bool:
    """Whether the folder holds a finished checkpoint, so that the run resumes."""
    return bool(workdir.on_process_0(lambda: int(bool(manifest.steps(folder / 'checkpoints')))))


def begin(parts: Parts) -> Beginning:
    """Reads the checkpoint that `config.init` names, if any, and fits it to the model.

    Raises:
      UserError: if there is no such checkpoint, or it holds another architecture.
    """
    section = parts.config.get('init', {})
    if not (path := section.get('from')):
        return Beginning()
    foreign = load_lib.read(path)
    try:
        params, notes = load_lib.fit(
            foreign,
            parts.model,
            parts.abstract_state.params,
            image_size(parts),
            section.get('posemb', 'bilinear'),
        )
    except UserError as e:
        raise UserError(f'config.init.from={path}: {e}') from e
    return Beginning(params, (f'from {path} ({foreign.source})', *notes))


def restore(
    parts: Parts, checkpointer: checkpoint.Checkpointer, beginning: Beginning | None
) -> tuple[step_lib.TrainState, int, str]:
    """The state to start from, its step, and the hardware that it was saved on.

    Args:
      parts: of the run.
      checkpointer: of its folder.
      beginning: of a new run; if None it is made where no checkpoint is found.
    """
    target = sharding.abstract_target(parts.layout, parts.abstract_state)
    found = checkpointer.restore_latest(target)
    if found is None:
        beginning = beginning or begin(parts)
        return parts.layout.create(parts.init, beginning.params), 0, hardware(parts)
    step, state, meta = found
    return parts.layout.from_global(state), step, meta.get('hardware', hardware(parts))


def loop(
    parts: Parts,
    state: step_lib.TrainState,
    start: int,
    checkpointer: checkpoint.Checkpointer,
    writer: Writer,
    preemption: workdir.Preemption,
    stop_at: int | None,
    report: Report | None = None,
) -> dict[str, float]:
    """Steps `start` to the end; see the module's docstring."""
    total, every = parts.total_steps, parts.every
    meter = Meter(start, parts.config.batch_size, parts.schedule, utilisation(parts))
    batches = train_batches(parts, start)
    results = evaluate_all(parts, state) if start == total else {}
    for step in range(start + 1, total + 1):
        with meter.waiting():
            batch = next(batches)
        meter.count(batch)
        state, metrics = parts.train_step(state, parts.layout.put_batch(batch))
        meter.add(step, metrics)
        writer.progress(step)
        checkpointer.check()
        stopping = preemption.reached(step) or step == stop_at
        if due(step, every['log'], total) or stopping:
            logged = meter.log()
            writer.write(step, logged)
            writer.show_train(step, logged)
        if due(step, every['eval'], total):
            with meter.paused():
                results = evaluate_all(parts, state)
                writer.write(step, results)
                writer.show_eval(step, results)
                writer.draw()
            if report and report(step, results) and step < total:
                raise Pruned(f'ended after step {step}/{total}')
        if due(step, every['checkpoint'], total) or stopping:
            with meter.paused():
                meter.check_finite()
                save(parts, checkpointer, step, state)
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


def evaluate_all(parts: Parts, state: step_lib.TrainState) -> dict[str, float]:
    """All evaluations of the config: {'test/accuracy': ...}."""
    results: dict[str, float] = {}
    for name, evaluate in parts.evals.items():
        results |= {f'{name}/{k}': v for k, v in evaluate(state.variables).items()}
    return results


def save(
    parts: Parts, checkpointer: checkpoint.Checkpointer, step: int, state: step_lib.TrainState
) -> None:
    """Starts an asynchronous save of everything that a resumed run needs."""
    meta = {
        'config': parts.config.to_dict(),
        'data': {'step': step},
        'hardware': hardware(parts),
        'class_names': list(parts.source.info.class_names),
        'image': evaluate_lib.image_format(parts.source),
        'input_size': image_size(parts),
        'num_examples': parts.epoch.examples,
    }
    if parts.transforms.vocab is not None:
        meta['vocab'] = parts.transforms.vocab.digest
    checkpointer.save(step, parts.layout.to_global(state), meta)


def utilisation(parts: Parts) -> Callable[[float], float | None]:
    """Steps a second -> model FLOPs utilisation; None where the chip's peak is not known."""
    device = parts.layout.mesh.devices.flat[0]
    if flops.peak_flops(device.device_kind) is None:
        return lambda rate: None
    per_step = 3 * sum(
        rows * flops.forward_flops(parts.model, *model_inputs(parts, spec))
        for rows, spec in parts.epoch.shapes
    )
    size = parts.layout.mesh.size
    return lambda rate: flops.mfu(per_step * rate, 1.0, size, device.device_kind)


def model_inputs(
    parts: Parts, spec: dict[str, pipeline.ArraySpec]
) -> tuple[jax.ShapeDtypeStruct, ...]:
    """Shapes of what the model gets for one training example of the shapes `spec`."""
    one = {k: jax.ShapeDtypeStruct((1, *s.shape), s.dtype) for k, s in spec.items()}
    return jax.eval_shape(parts.task.inputs, one)


def image_size(parts: Parts) -> tuple[int, int] | None:
    """Height and width in pixels of the images that the model gets; None if it gets none."""
    images = model_inputs(parts, parts.epoch.shapes[-1][1])[0]
    return images.shape[1:3] if len(images.shape) == 4 else None


def hardware(parts: Parts) -> str:
    """What the run computes on, as `8 x TPU v4 (jit)`."""
    mesh, layout = parts.layout.mesh, type(parts.layout).__name__.lower()
    return f'{mesh.size} x {mesh.devices.flat[0].device_kind} ({layout})'


def describe(parts: Parts, folder: pathlib.Path, start: int, hardware_before: str) -> str:
    """Two lines: what runs, and where."""
    count = sum(x.size for x in jax.tree.leaves(parts.abstract_state.params))
    begins = f'resumes after step {start}' if start else 'starts'
    unit = ' tokens' if 'buckets' in parts.config.data else ''
    if long := len(parts.source) - parts.epoch.examples:
        begins = f'{long:,} examples are longer than the last bucket: left out\n{begins}'
    moved = (
        f'\nso far on {hardware_before}: the examples stay the same, numbers agree up to rounding'
        if hardware_before != hardware(parts)
        else ''
    )
    return (
        f'{parts.config.model.name}: {count:,} parameters, {parts.epoch.examples:,} examples, '
        f'{parts.total_steps:,} steps of {parts.config.batch_size}{unit} on {hardware(parts)}\n'
        f'{begins} in {folder}{moved}'
    )


# What may differ between two starts of one run: it changes no example and no update.
FREE = ('evals', 'every', 'checkpoint', 'parallel')


def finished(config: ConfigDict, folder: pathlib.Path) -> dict[str, float] | None:
    """The final evaluation of a run that is complete; None if there is something to do.

    Raises:
      UserError: if the folder holds a run of another config.
    """
    stored = folder / 'config.json'
    if not stored.is_file():
        return None
    before, now = json.loads(stored.read_text()), json.loads(config_lib.to_json(config))
    for size in ('num_classes', 'vocab_size'):  # an open one was filled from the data
        if before['model'].get(size) and not now['model'].get(size):
            before['model'][size] = now['model'].get(size)
    keys = [*now, *before.keys() - now.keys()]
    if changed := [k for k in keys if k not in FREE and now.get(k) != before.get(k)]:
        raise UserError(
            f'{folder} holds a run of another config (config.{changed[0]} differs): '
            'choose another --workdir'
        )
    result = folder / RESULT
    return json.loads(result.read_text()) if result.is_file() else None
