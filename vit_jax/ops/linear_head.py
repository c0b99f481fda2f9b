"""Batch norm and a linear layer on features of patches, trained by gradients of pixels' losses."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array

from vit_jax.array_types import Float, Shaped
from vit_jax.ops.depth import UNKNOWN
from vit_jax.ops.patch_maps import Axis
from vit_jax.ops.probe_protocol import Protocol

EPS = 1e-5
DEPTH_EPS = 1e-3  # added to depths before the logarithm
LEAST = 0.1  # added to a bin's weight
MEAN_WEIGHT = 0.15  # of the squared mean of logarithmic errors
MOMENTUM = 0.1  # of the batch norm's running statistics
Loss = Callable[[Array, Array], Array]


class Head(NamedTuple):
    """Parameters: scale and shift of the batch norm, kernel [D C] and bias of the layer."""

    scale: Any
    shift: Any
    kernel: Any
    bias: Any


class Statistics(NamedTuple):
    """Running mean and variance of features."""

    mean: Any
    variance: Any


class Output(NamedTuple):
    """What the layer's values are.

    Attributes:
      loss: Function of predictions [B H W C] and truth [B H W].
      values: Outputs C of the layer.
      convert: Function from the layer's values to predictions.
      bound: Bound of uniform initial values as a factor of 1 / sqrt(D); None for a normal
        distribution of 0.01.
    """

    loss: Loss
    values: int
    convert: Callable[[Array], Array] = lambda values: values
    bound: float | None = None


def classes(count: int, unknown: int) -> Output:
    """Make the output of class scores, whose loss is the cross entropy of known pixels."""

    def loss(scores: Array, truth: Array) -> Array:
        known = truth != unknown
        losses = optax.softmax_cross_entropy_with_integer_labels(scores, jnp.where(known, truth, 0))
        return jnp.where(known, losses, 0).sum() / jnp.maximum(known.sum(), 1)

    return Output(loss, count)


def depths(bins: int, shallowest: float, deepest: float) -> Output:
    """Make the output of depths in bins, see `depth_of_bins`."""

    def loss(predicted: Array, truth: Array) -> Array:
        return sig_loss(predicted[..., 0], truth, deepest)

    def convert(values: Array) -> Array:
        return depth_of_bins(values, shallowest, deepest)[..., None]

    return Output(loss, bins, convert, bound=1.0)


def initial(width: int, output: Output, seed: int) -> Head:
    """Draw initial parameters: as PyTorch's convolution, or normal with zero bias."""
    rng, shape = np.random.default_rng(seed), (width, output.values)
    if output.bound:
        bound = output.bound / np.sqrt(width)
        kernel, bias = rng.uniform(-bound, bound, shape), rng.uniform(-bound, bound, shape[1])
    else:
        kernel, bias = rng.normal(0, 0.01, shape), np.zeros(shape[1])
    ones = np.ones(width, np.float32)
    return Head(ones, 0 * ones, *(x.astype(np.float32) for x in (kernel, bias)))


def train(
    patches: Float[np.ndarray, 'N h w D'],
    truth: Shaped[np.ndarray, 'N H W'],
    output: Output,
    protocol: Protocol,
    head: Head,
    seed: int,
) -> tuple[Head, Statistics]:
    """Train a head.

    Args:
      patches: Features of patches.
      truth: Truth of the pixels of the model's images.
      output: Loss and meaning of values.
      protocol: Optimizer and schedule.
      head: Initial parameters.
      seed: Seed of the order of images and of the choice of pixels.

    Returns:
      Parameters, and running statistics for `predict`.
    """
    tx = make_optimizer(protocol)
    width = patches.shape[-1]
    state: Any = head, Statistics(np.zeros(width, np.float32), np.ones(width, np.float32))
    state = jax.tree.map(jnp.asarray, (*state, tx.init(head)))
    step = jax.jit(functools.partial(_train_step, tx, output, protocol), donate_argnums=0)
    rng = np.random.default_rng(seed)
    sides = [
        Axis(pixels, cells * protocol.upsample, pixels, 0, pixels).weights()
        for pixels, cells in zip(truth.shape[1:], patches.shape[1:3], strict=True)
    ]
    for chosen in batches(len(patches), protocol, rng):
        rows, columns = (choose_pixels(len(side), protocol.pixels, rng) for side in sides)
        state = step(
            state,
            patches[chosen].astype(np.float32),
            truth[chosen[:, None, None], rows[:, None], columns],
            sides[0][rows],
            sides[1][columns],
        )
    trained, statistics, _ = jax.device_get(state)
    return trained, statistics


def predict(
    patches: Float[np.ndarray, 'h w D'],
    output: Output,
    protocol: Protocol,
    trained: tuple[Head, Statistics],
) -> Float[np.ndarray, 'i j C']:
    """Predict by running statistics, on the grid of patches or an upsampled one."""
    head, statistics = trained
    values = _apply(head, statistics if protocol.norm else None, jnp.asarray(patches)[None])
    values = _upsample(values, protocol.upsample)
    return np.asarray(output.convert(values)[0])


def make_optimizer(protocol: Protocol) -> optax.GradientTransformation:
    """Make AdamW with warm-up and decay."""

    def learning_rate(step: Any) -> Any:
        share = step / protocol.steps
        left = 1 - share if protocol.decay == 'linear' else 0.5 * (1 + jnp.cos(jnp.pi * share))
        warm = jnp.minimum(1, (step + 1) / (protocol.warmup + 1))
        return protocol.learning_rate * left * warm

    adamw = optax.adamw(learning_rate, weight_decay=protocol.weight_decay)
    if np.isinf(protocol.clip):
        return adamw
    return optax.chain(optax.clip_by_global_norm(protocol.clip), adamw)


def batches(count: int, protocol: Protocol, rng: np.random.Generator) -> Iterator[np.ndarray]:
    """Yield the images of each step: every image once in a random order, then again."""
    size, waiting = min(protocol.images, count), np.zeros(0, int)
    for _ in range(protocol.steps):
        if len(waiting) < size:
            waiting = np.concatenate([waiting, rng.permutation(count)])
        chosen, waiting = waiting[:size], waiting[size:]
        yield chosen


def choose_pixels(count: int, most: int, rng: np.random.Generator) -> np.ndarray:
    """Choose rows or columns of pixels; all of them if `most` is 0."""
    if not most or most >= count:
        return np.arange(count)
    return rng.choice(count, most, replace=False)


def _train_step(
    tx: optax.GradientTransformation,
    output: Output,
    protocol: Protocol,
    state: Any,
    patches: Float[Array, 'B h w D'],
    truth: Shaped[Array, 'B R S'],
    rows: Float[Array, 'R i'],
    columns: Float[Array, 'S j'],
) -> Any:
    """Take one step; `rows` and `columns` interpolate predictions to the pixels of `truth`."""
    head, running, opt_state = state
    axes = (0, 1, 2)
    current = None
    if protocol.norm:
        current = Statistics(patches.mean(axes), patches.var(axes))
        count = patches[..., 0].size
        unbiased = current._replace(variance=current.variance * count / (count - 1))
        running = jax.tree.map(lambda a, b: (1 - MOMENTUM) * a + MOMENTUM * b, running, unbiased)

    def loss(head: Head) -> Array:
        values = _upsample(_apply(head, current, patches), protocol.upsample)
        predictions = output.convert(values)
        at_pixels = jnp.einsum('ri,bijc,sj->brsc', rows, predictions, columns)
        return output.loss(at_pixels, truth)

    updates, opt_state = tx.update(jax.grad(loss)(head), opt_state, head)
    return optax.apply_updates(head, updates), running, opt_state


def _apply(head: Head, statistics: Statistics | None, patches: Array) -> Array:
    if statistics is not None:
        patches = (patches - statistics.mean) / jnp.sqrt(statistics.variance + EPS)
        patches = patches * head.scale + head.shift
    return patches @ head.kernel + head.bias


def _upsample(values: Float[Array, 'B h w C'], factor: int) -> Float[Array, 'B i j C']:
    if factor == 1:
        return values
    rows, columns = (
        Axis(cells * factor, cells, cells * factor, 0, cells * factor).weights()
        for cells in values.shape[1:3]
    )
    return jnp.einsum('ih,bhwc,jw->bijc', rows, values, columns)


def depth_of_bins(
    logits: Float[Array, '*B K'], shallowest: float, deepest: float
) -> Float[Array, '*B']:
    """Average K depths, evenly spaced, with weights relu(logit) + 0.1.

    As DINOv2's linear probe, after AdaBins (Bhat et al., 2021, arXiv:2011.14141).
    """
    weights = jnp.maximum(logits, 0) + LEAST
    depths = jnp.linspace(shallowest, deepest, logits.shape[-1])
    return (weights @ depths) / weights.sum(-1)


def sig_loss(
    depth: Float[Array, '*B'], truth: Float[Array, '*B'], deepest: float
) -> Float[Array, '']:
    """Compute the scale-invariant loss, sqrt(var(g) + 0.15 mean(g)^2) of logarithmic errors g.

    Eigen et al., 2014, arXiv:1406.2283, as in AdaBins; the variance is unbiased.

    Args:
      depth: Predicted depths.
      truth: True depths; only those above 0 and up to `deepest` count.
      deepest: Largest depth that counts.
    """
    real = (truth > UNKNOWN) & (truth <= deepest)
    error = jnp.where(real, jnp.log(depth + DEPTH_EPS) - jnp.log(truth + DEPTH_EPS), 0)
    count = real.sum()
    mean = error.sum() / jnp.maximum(count, 1)
    spread = jnp.where(real, jnp.square(error - mean), 0).sum() / jnp.maximum(count - 1, 1)
    total = spread + MEAN_WEIGHT * jnp.square(mean)
    return jnp.where(total > 0, jnp.sqrt(jnp.where(total > 0, total, 1)), 0)
