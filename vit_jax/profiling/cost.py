"""Training cost of a config, computed from shapes without training."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
from ml_collections import ConfigDict

from vit_jax import step
from vit_jax.config import defaults, objects
from vit_jax.config.load import from_dict, model_and_task, section, to_run
from vit_jax.config.origin import require_allowed
from vit_jax.config.run import Data, Durations, Run, Step, parse_duration
from vit_jax.data.batches import Shape, kinds_from_checkpoint
from vit_jax.data.dataset import Dataset, open_dataset
from vit_jax.data.plans import Plan
from vit_jax.data.splits import Subset
from vit_jax.errors import UserError
from vit_jax.inference import frozen
from vit_jax.profiling import benchmark, flops, task_flops
from vit_jax.profiling.batch_spec import Spec, open_source, plan_of, row_of
from vit_jax.storage.model_ref import ModelRef
from vit_jax.tasks.base import Task

SMALLEST = 0.001  # of hours and days in a table of costs
CORE = 'TPU v3'  # the papers count its core-days; JAX calls such a core a device


@dataclasses.dataclass(frozen=True)
class DataFacts:
    """Data properties that determine costs.

    Attributes:
      run: Config with the sizes that depend on the data.
      kinds: Kinds of training batches, the largest last.
      epoch: Examples per epoch.
      examples_per_step: Examples per step, averaged over buckets.
      tokens: Mean target tokens per step, without padding; 0 without text.
      size: Number of distinct training examples; None for `epoch`, 0 if unknown.
    """

    run: Run
    kinds: tuple[Shape, ...]
    epoch: int
    examples_per_step: float
    tokens: float = 0
    size: int | None = None

    @property
    def times(self) -> Durations:
        """Durations of the run."""
        return Durations.of(self.run.total, self.examples_per_step, self.epoch)

    @property
    def steps(self) -> int:
        """Steps of this run, without steps before its branch point."""
        branch = self.run.branch
        start = branch.step or ModelRef.parse(branch.folder).named_step
        return self.times.total_steps - (start if isinstance(start, int) else 0)


@dataclasses.dataclass(frozen=True)
class PlannedRun:
    """Planned runs of the same cost.

    Attributes:
      point: Overrides that distinguish these runs, {'model.width': 64}.
      parameters: Parameter count of the model.
      steps: Steps of each run, without steps before its branch point.
      batch_size: Examples per step, averaged over buckets.
      forward: FLOPs of the forward passes on one example, including padding.
      train: FLOPs of forward and backward passes on one example.
      count: Number of runs; an upper bound for a search.
      tokens: Mean target tokens per step, without padding; 0 without text.
      data_size: Number of distinct training examples; 0 if unknown.
    """

    point: Mapping[str, Any]
    parameters: int
    steps: int
    batch_size: float
    forward: float
    train: float
    count: int = 1
    tokens: float = 0
    data_size: int = 0

    @property
    def examples(self) -> float:
        """Number of examples that each run sees, with repetitions."""
        return self.steps * self.batch_size

    @property
    def flops(self) -> float:
        """FLOPs of all runs together, forward and backward."""
        return self.count * self.examples * self.train


@dataclasses.dataclass(frozen=True)
class Machine:
    """Training device, and its utilization.

    Attributes:
      device: JAX's name of the device, such as `TPU v3`.
      mfu: Share of the peak reached by training, in (0, 1].

    Raises:
      UserError: for a device with unknown peak, or a share out of range.
    """

    device: str
    mfu: float

    def __post_init__(self) -> None:
        if flops.peak_flops(self.device) is None:
            devices = ', '.join(flops.PEAK_FLOPS)
            raise UserError(f'--device {self.device!r}: unknown peak; choose from {devices}')
        if not 0 < self.mfu <= 1:
            raise UserError(f'--mfu {self.mfu}: must be more than 0 and at most 1')

    def device_hours(self, operations: float) -> float:
        """Hours of a JAX device, which is a core on TPU v2 and v3."""
        peak = flops.peak_flops(self.device)
        assert peak
        return operations / (peak * self.mfu) / 3600

    def chip_hours(self, operations: float) -> float:
        """Hours of a chip, as clouds bill them."""
        return self.device_hours(operations) * flops.chips(1, self.device)


def price(
    config: ConfigDict,
    examples: float | None = None,
    image_size: int | None = None,
    *,
    point: Mapping[str, Any] | None = None,
    count: int = 1,
) -> PlannedRun:
    """Compute the cost of runs of a config; open data only if needed.

    Args:
      config: Config, which is not changed.
      examples: Examples per epoch, instead of the data's number.
      image_size: Side of square images in pixels, instead of the data's size.
      point: Overrides that distinguish the config, {'model.width': 64}.
      count: Number of runs.

    Raises:
      UserError: if the data are not available, or text gets `examples` or `image_size`.
    """
    facts = data_facts(config, examples, image_size)
    run, examples_per_step = facts.run, facts.examples_per_step
    model, task = objects.make_model(run.model), objects.make_task(run.task)
    task = frozen.attach(task).task
    measured = [_measure(model, task, tuple(sorted(kind.spec.items()))) for kind in facts.kinds]
    flops_by_kind = [
        (k.rows * k.share / examples_per_step, f)
        for k, (_, f) in zip(facts.kinds, measured, strict=True)
    ]
    return PlannedRun(
        point=point or {},
        parameters=measured[0][0],
        steps=facts.steps,
        batch_size=examples_per_step,
        forward=sum(n * f.forward for n, f in flops_by_kind),
        train=run.step.sam.gradients * sum(n * f.total for n, f in flops_by_kind),
        count=count,
        tokens=facts.tokens,
        data_size=facts.epoch if facts.size is None else facts.size,
    )


def data_facts(
    config: ConfigDict, examples: float | None = None, image_size: int | None = None
) -> DataFacts:
    """Find the properties of a config's data, which are opened only if needed.

    Args, Raises: see `price`.
    """
    run = to_run(config)
    if run.data.plan and image_size is None:
        plan = _plan_of(run.data, run.batch_size)
        epoch = len(plan.members) if examples is None else round(examples)
        run = to_run(defaults.fill_sizes(config, plan.info))
        examples_per_step = plan.examples_per_step
        return DataFacts(run, plan.shapes, epoch, examples_per_step, plan.tokens_per_step)
    if run.data.buckets:
        data = _open_text(run, examples, image_size)
        run = to_run(defaults.fill_sizes(config, data.info))
        examples_per_step = data.plan.examples_per_step
        return DataFacts(
            run, data.shapes, data.num_examples, examples_per_step, data.plan.tokens_per_step
        )
    config, spec = _image_spec(config, image_size)
    kinds = (Shape(run.batch_size, 1, spec),)
    epoch = _epoch_size(run, examples)
    size = epoch if epoch > 1 else 0 if image_size is not None else len(_open_source(run.data))
    return DataFacts(to_run(config), kinds, epoch, run.batch_size, size=size)


def train_flops(meta: Mapping[str, Any], allowed: Sequence[str] = ()) -> float | None:
    """Compute the mean FLOPs of a training step from a checkpoint's metadata.

    Return None if the metadata lack the shapes of examples.

    Args:
      meta: Checkpoint metadata.
      allowed: User modules that its config may name.

    Raises:
      UserError: if its config names code from outside this package.
    """
    if not (kinds := kinds_from_checkpoint(meta)):
        return None
    require_allowed(meta['config'], allowed, 'the checkpoint')
    config = from_dict(meta['config'])
    model, task = model_and_task(config)
    task = frozen.attach(task, allowed).task
    gradients = section(config, Step).sam.gradients
    measured = ((n, _measure(model, task, tuple(sorted(spec.items())))[1]) for n, spec in kinds)
    return gradients * sum(n * flops.total for n, flops in measured)


def _open_text(run: Run, examples: float | None, image_size: int | None) -> Dataset:
    """Open the bucketed text data.

    Raises:
      UserError: if the data or the vocabulary, which determine the lengths, are not available.
    """
    if examples is not None or image_size is not None:
        raise UserError('--examples and --image-size apply to images, and this config to text')
    return _read_text(run.data, run.batch_size)


@functools.cache
def _read_text(data: Data, batch_size: int) -> Any:
    try:
        return open_dataset(data, batch_size)
    except UserError as e:
        raise UserError(f'{e}; the cost depends on the lengths of all sentences') from e


def _image_spec(config: ConfigDict, image_size: int | None) -> tuple[ConfigDict, Spec]:
    """Return the config with its number of classes, and the spec of an example."""
    if image_size is not None:
        row = row_of(config, image_size)
        return row.config, row.example
    plan = _plan_of(to_run(config).data, 1)
    return defaults.fill_sizes(config, plan.info), dict(plan.spec)


def _plan_of(data: Data, batch_size: int) -> Plan:
    return plan_of(data, batch_size, _open_source(data))


def _epoch_size(run: Run, examples: float | None) -> int:
    """Return the number of training examples if the training length depends on it, else 1."""
    if examples is not None:
        return round(examples)
    _, unit = parse_duration(run.total, 'config.total')
    return len(_open_source(run.data)) if unit == 'epochs' else 1


def _open_source(data: Data) -> Subset:
    try:
        return open_source(data)
    except UserError as e:
        raise UserError(f'{e}; or give --examples and --image-size to run without data') from e


@functools.cache
def _measure(
    model: Any, task: Task, spec: tuple[tuple[str, Any], ...]
) -> tuple[int, task_flops.TrainingFlops]:
    """Return a model's parameter count, and its training FLOPs per example."""
    example = benchmark.blank_example(dict(spec))
    params = jax.eval_shape(lambda: step.init_variables(model, task, example, 0))['params']
    count = sum(leaf.size for leaf in jax.tree.leaves(params))
    return count, task_flops.training_flops(model, task, dict(spec))


def cost_table(runs: Sequence[PlannedRun], machine: Machine) -> list[list[str]]:
    """Make a table: headings, one row per run, and the sum."""
    core = Machine(CORE, machine.mfu)
    names = [
        name for name in dict.fromkeys(n for run in runs for n in run.point) if name != 'total'
    ]
    several, text = any(run.count > 1 for run in runs), any(run.tokens for run in runs)
    headings = [*_short_names(names), *(['runs'] if several else [])]
    headings += ['parameters', 'steps', 'examples', *(['tokens'] if text else [])]
    headings += ['GFLOPs', 'exaFLOPs', 'chip-hours', 'core-days']

    def costs(operations: float) -> list[str]:
        days = core.device_hours(operations) / 24
        times = machine.chip_hours(operations), days
        return [
            _number(operations / 1e18),
            *(f'<{SMALLEST}' if 0 < time < SMALLEST else _number(time) for time in times),
        ]

    table = [headings]
    for run in runs:
        point = [str(run.point.get(name, '')) for name in names]
        sizes = [f'{x:,.0f}' for x in (run.parameters, run.steps, run.examples)]
        sizes += [f'{run.steps * run.tokens:,.0f}'] if text else []
        count = [str(run.count)] if several else []
        forward = _number(run.forward / 1e9)
        table.append([*point, *count, *sizes, forward, *costs(run.flops)])
    total = costs(sum(run.flops for run in runs))
    table.append(['sum', *[''] * (len(headings) - len(total) - 1), *total])
    return table


def _short_names(names: Sequence[str]) -> list[str]:
    """Shorten `model.width` to `width` unless another name has the same ending."""
    leaves = [name.rpartition('.')[2] for name in names]
    return [
        leaf if leaves.count(leaf) == 1 else name for name, leaf in zip(names, leaves, strict=True)
    ]


def _number(value: float) -> str:
    return f'{value:,.0f}' if value >= 1000 else f'{value:.4g}'
