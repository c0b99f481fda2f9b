"""Base class of tasks: inputs, loss, metrics and predictions."""

from __future__ import annotations

import abc
import dataclasses
import functools
import re
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from vit_jax.array_types import Float, Int
from vit_jax.errors import UserError
from vit_jax.ops.sequences import Normalization
from vit_jax.ops.terms import Term

if TYPE_CHECKING:
    from vit_jax.config.run import Durations
    from vit_jax.ops.search import Search

Batch = dict[str, Any]
Sums = dict[str, tuple[Any, Any]]
NO_AVERAGE = (
    'config.step.ema_decay=0: the task needs an average, such as 0.996, which schedule-free '
    'optimizers and config.lora do not keep'
)


@runtime_checkable
class Apply(Protocol):
    """Model with its variables and random keys.

    A call without `method` calls the model itself, in the mode of the step. Other methods only get
    the keywords of the call, such as `train=apply.train`. Each call draws from different random
    keys.

    Attributes:
      train: Whether the step trains.
      frozen: Frozen models by name, as functions of their inputs without gradient, in evaluation
        mode; empty outside of training.
      step: Number of completed steps, int32, for schedules of the task. In evaluation and at
        initialization, where it is unknown, it is `apply.AFTER_TRAINING`, so that schedules have
        their final value. To use it in `loss`, add it to the outputs.
    """

    train: bool
    step: Int[Array, '']
    frozen: Mapping[str, Callable[..., Any]]

    def __call__(self, *inputs: Any, method: str | None = None, **options: Any) -> Any: ...

    def average(self, *inputs: Any, method: str | None = None, **options: Any) -> Any:
        """Call the model at the running average of its parameters, without gradient.

        It runs in evaluation mode unless `train=True` is given.

        Raises:
          UserError: in training, if the run keeps no average.
        """
        ...


class FrozenModel(NamedTuple):
    """A model that a task reads and never trains.

    Attributes:
      module: Linen module.
      size: Height and width of its images; None for any size.
      value_range: Range of its images, unless they are normalized.
      normalization: Mean and standard deviation of its images in [0, 1].
    """

    module: Any
    size: tuple[int, int] | None = None
    value_range: tuple[float, float] | None = None
    normalization: Normalization | None = None

    def view(self, images: Float[Array, 'B H W C']) -> Float[Array, 'B h w C']:
        """Resize images in [0, 1] to the model's size, and scale or normalize them for it."""
        if self.size and images.shape[1:3] != self.size:
            shape = (len(images), *self.size, images.shape[-1])
            images = jax.image.resize(images, shape, 'bilinear')
        if self.normalization:
            mean, std = self.normalization
            return (images - jnp.asarray(mean)) / jnp.asarray(std)
        low, high = self.value_range or (-1.0, 1.0)
        return low + (high - low) * images

    def call(self, variables: Any, *inputs: Any) -> Any:
        """Compute the outputs in evaluation mode, without gradient."""
        return jax.lax.stop_gradient(self.module.apply(variables, *inputs))


class Snapshot(NamedTuple):
    """A copy of the averaged parameters, which a task reads as a further frozen model.

    Attributes:
      name: Name in `Apply.frozen`.
      first: Number of completed steps at which the first copy is taken.
      every: Number of steps from each copy to the next; 0 to keep the first.
      method: Method of the model that the task calls.
      omitted: Pattern of parameters, by their top-level name, that the method does not need.
    """

    name: str
    first: int
    every: int
    method: str
    omitted: str

    def select(self, params: Mapping[str, Any]) -> dict[str, Any]:
        """Select the parameters that are copied."""
        return {name: tree for name, tree in params.items() if not re.search(self.omitted, name)}

    def due(self, step: Int[Array, '']) -> Array:
        """Whether a copy is taken before the next step."""
        since = step - self.first
        return (since >= 0) & (since % self.every == 0) if self.every else since == 0

    def wrap(self, train_step: Callable[..., Any]) -> Callable[..., Any]:
        """Copy the average before the steps at which this is due, even skipped ones."""

        @functools.wraps(train_step)
        def copying_step(state: Any, batch: Batch) -> Any:
            if state.ema is None:
                raise UserError(NO_AVERAGE)
            due, copies = self.due(state.step), dict(state.other_emas)
            copies[self.name] = jax.tree.map(
                functools.partial(jnp.where, due), self.select(state.ema), copies[self.name]
            )
            return train_step(dataclasses.replace(state, other_emas=copies), batch)

        return copying_step

    def bind(self, model: Any, variables: Any) -> Callable[..., Any]:
        """Return the method at the copied parameters, without gradient."""
        apply = functools.partial(model.apply, variables, method=self.method)
        return lambda *inputs: jax.lax.stop_gradient(apply(*inputs))


@dataclasses.dataclass(frozen=True)
class Task(abc.ABC):
    """Base class of tasks; a subclass needs `loss`, and `inputs` if its input is not an image.

    Attributes:
      rngs: Names of the model's random streams.
      couples_rows: Whether the loss of a row depends on other rows, as in contrastive learning.
        Then `loss` gets the outputs of the whole global batch at once, from all microbatches and
        devices. Each output has a row per example or is a scalar; over microbatches and devices,
        scalar floats are averaged, and the largest integer is taken.
      classifies: Whether the task needs at least two classes.
      multiple_reason: Reason why `multiple` is not 1, for messages.
      inert: Fields that are paths of files, or do not change predictions or metrics of a trained
        model.
      snapshot: Copy of the averaged parameters that the task reads in training; None for none.
      durations: Fields that are durations, such as '80%'; in a run they are numbers of steps.
      headline: Metrics of `evaluate` and `derive` shown in one line of text; empty for all.
    """

    rngs: ClassVar[tuple[str, ...]] = ()
    couples_rows: ClassVar[bool] = False
    classifies: ClassVar[bool] = False
    multiple_reason: ClassVar[str] = ''
    inert: ClassVar[tuple[str, ...]] = ('mixup', 'cutmix', 'locked_image', 'chunk', 'prior')
    durations: ClassVar[tuple[str, ...]] = ()
    headline: ClassVar[tuple[str, ...]] = ()
    snapshot: ClassVar[Any] = None

    def require(self, name: str, is_valid: bool, span: str) -> None:
        """Raise UserError unless a field's value is valid; `span` describes the valid values."""
        if not is_valid:
            raise UserError(f'config.task.{name}={getattr(self, name)}: must be {span}')

    def in_steps(self, times: Durations) -> Task:
        """Return the task with its `durations` in steps of the run."""
        texts = {name: getattr(self, name) for name in self.durations}
        steps = {name: times.steps(text, f'config.task.{name}') for name, text in texts.items()}
        return dataclasses.replace(self, **steps) if steps else self

    def for_data(self, num_classes: int, shares: np.ndarray | None) -> Task:
        """Return the task adapted to the training data; itself by default.

        Args:
          num_classes: Number of classes of the training data.
          shares: Share of the training examples in each class; None if unknown.

        Raises:
          UserError: if the data lack something the task needs.
        """
        del num_classes, shares
        return self

    @property
    def frozen(self) -> Mapping[str, str]:
        """Checkpoints of frozen models, by task field."""
        return {}

    @property
    def frozen_sizes(self) -> Mapping[str, tuple[int, int]]:
        """Height and width of the images for models of `frozen`; the checkpoint's by default."""
        return {}

    @property
    def frozen_files(self) -> Mapping[str, Callable[[Mapping[str, np.ndarray]], FrozenModel]]:
        """Files of `frozen` that hold other arrays than a checkpoint's, by task field: functions
        that make the model whose parameters these are.
        """
        return {}

    @property
    def frozen_models(self) -> Mapping[str, FrozenModel]:
        """Models of `frozen`, if they were loaded."""
        return getattr(self, '_frozen_models', {})

    def with_frozen(self, models: Mapping[str, FrozenModel]) -> Task:
        """Return the task with the models of `frozen`."""
        task = dataclasses.replace(self)
        object.__setattr__(task, '_frozen_models', models)
        return task

    def bind_frozen(self, variables: Mapping[str, Any] | None) -> dict[str, Callable[..., Any]]:
        """Return the frozen models as functions of their inputs."""
        variables = variables or {}
        return {k: functools.partial(m.call, variables[k]) for k, m in self.frozen_models.items()}

    @property
    def weighs_classes(self) -> bool:
        """Whether the loss depends on how many training examples each class has."""
        return False

    @property
    def multiple(self) -> int:
        """Required divisor of the rows per device."""
        return 1

    @property
    def normalization(self) -> Normalization | None:
        """Mean and standard deviation that `inputs` normalizes images with; None for a range."""
        return None

    @property
    def predicts(self) -> bool:
        """Whether the task has predictions."""
        return type(self).predict is not Task.predict

    @property
    def decoding(self) -> Search:
        """Search that decodes sequences, for generative models."""
        from vit_jax.ops.search import Search  # here, as few tasks decode

        return Search()

    def inputs(self, batch: Batch) -> tuple[Any, ...]:
        """Return the model's arguments; by default only the images."""
        return (batch['image'],)

    def attention_inputs(self, apply: Apply, batch: Batch) -> tuple[Any, ...]:
        """Return the model's arguments for pictures of attention; `inputs` by default.

        A task whose attention belongs to a generated sequence generates it here.
        """
        del apply
        return self.inputs(batch)

    def mask(self, batch: Batch) -> Float[Array, 'B *n']:
        """1 for a real example and 0 for padding, [B n] where a row holds up to n examples.

        All ones where the batch has no padding.
        """
        if 'mask' in batch:
            return batch['mask']
        return jnp.ones(len(jax.tree.leaves(batch)[0]), jnp.float32)

    def augment(self, key: jax.Array, batch: Batch) -> Batch:
        """Augment a training batch on the devices; the identity by default."""
        del key
        return batch

    def outputs(self, apply: Apply, batch: Batch) -> dict[str, Any]:
        """Compute the arrays that `loss` reads, by one or more calls of `apply`."""
        return apply(*self.inputs(batch))

    @abc.abstractmethod
    def loss(self, outputs: dict[str, Any], batch: Batch) -> dict[str, Term]:
        """Terms of the loss: sums over the real rows, and their counts.

        The loss is the sum of weight * sum / count over the terms, with sums and counts of the
        whole global batch; a term with weight 0 is a metric. Counts that only depend on the batch
        save a forward pass under accumulation and pmap.
        """

    def evaluate(self, apply: Apply, batch: Batch) -> Sums:
        """Sums and counts over the real rows, {name: (sum, count)}; here the terms of the loss."""
        terms = self.loss(self.outputs(apply, batch), batch)
        return {name: (term.sum, term.count) for name, term in terms.items()}

    def derive(self, means: dict[str, float]) -> dict[str, float]:
        """Compute further metrics from the means of `evaluate` over all data."""
        del means
        return {}

    def predict(self, apply: Apply, batch: Batch) -> dict[str, jax.Array]:
        """Return predictions, {name: array with a row per example}; none by default."""
        del apply, batch
        return {}


def check_rows_are_separable(
    task: Task, outputs: dict[str, Any], batch: Batch, *, rtol: float = 1e-4
) -> None:
    """Check that `task` may leave `couples_rows` false.

    Args:
      task: Task to check.
      outputs: Model outputs, scalars or with a row per example; may be random numbers.
      batch: Batch with at least two rows.
      rtol: Relative tolerance of sums and counts.

    Raises:
      AssertionError: if a term's sum or count over all rows is not the sum over the single rows,
        for example because the loss compares rows or takes a mean.
    """
    given = jax.tree.map(_on_host, (outputs, batch))

    @jax.jit
    def sums_and_counts(given: tuple) -> dict[str, tuple]:
        return {name: (term.sum, term.count) for name, term in task.loss(*given).items()}

    totals = jax.device_get(sums_and_counts(given))
    rows = range(len(jax.tree.leaves(batch)[0]))
    parts = [jax.device_get(sums_and_counts(_row(given, i))) for i in rows]
    for name, total in totals.items():
        parts_sum = np.sum([part[name] for part in parts], axis=0)
        np.testing.assert_allclose(
            parts_sum,
            total,
            rtol=rtol,
            atol=1e-6,
            err_msg=f'{type(task).__module__}: the term {name!r} of the loss couples the rows of a '
            'batch: set couples_rows = True, or turn it into a sum over rows',
        )


def _on_host(x: Any) -> Any:
    """Fetch an array, whose rows are then taken without compiling a program for each."""
    is_key = isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
    return x if is_key else np.asarray(x)


def _row(given: Any, i: int) -> Any:
    """Take one row of every array that has rows."""
    return jax.tree.map(lambda x: x[i : i + 1] if np.ndim(x) else x, given)
