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
from vit_jax.ops import depth
from vit_jax.ops.patch_maps import Axis
from vit_jax.ops.probe_protocol import Protocol

EPS = 1e-5
LEAST = 0.1  # added to a bin's weight
MOMENTUM = 0.1  # of the batch norm's running statistics
Loss = Callable[[Array, Array, Array], Array]


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
      loss: Function of predictions [B H W C], truth [B H W], and the weight of their spread.
      values: Outputs C of the layer.
      convert: Function from the layer's values to predictions.
    """

    loss: Loss
    values: int
    convert: Callable[[Array], Array] = lambda values: values


def classes(count: int, unknown: int) -> Output:
    """Make the output of class scores, whose loss is the cross entropy of known pixels."""

    def loss(scores: Array, truth: Array, spread: Array) -> Array:
        del spread
        valid = truth != unknown
        losses = optax.softmax_cross_entropy_with_integer_labels(scores, jnp.where(valid, truth, 0))
        return jnp.where(valid, losses, 0).sum() / jnp.maximum(valid.sum(), 1)

    return Output(loss, count)


def depths(bins: int, shallowest: float, deepest: float) -> Output:
    """Make the output of depths in bins, see `depth_of_bins`."""

    def loss(predicted: Array, truth: Array, spread: Array) -> Array:
        valid = (truth > depth.UNKNOWN) & (truth <= deepest)
        return depth.sig_loss(predicted[..., 0], truth, valid, (0, 1, 2), True, spread)

    def convert(values: Array) -> Array:
        return depth_of_bins(values, shallowest, deepest)[..., None]

    return Output(loss, bins, convert)


def initial(width: int, output: Output, protocol: Protocol, seed: int) -> Head:
    """Draw initial parameters, see `Protocol.uniform`."""
    rng, shape = np.random.default_rng(seed), (width, output.values)
    if protocol.uniform:
        bound = 1 / np.sqrt(width)
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
    for number, chosen in enumerate(batches(len(patches), protocol, rng)):
        rows, columns = (choose_pixels(len(side), protocol.pixels, rng) for side in sides)
        state = step(
            state,
            patches[chosen].astype(np.float32),
            truth[chosen[:, None, None], rows[:, None], columns],
            sides[0][rows],
            sides[1][columns],
            float(number >= protocol.mean_steps),
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

    adamw = optax.adamw(learning_rate, b2=protocol.b2, weight_decay=protocol.weight_decay)
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
    spread: Float[Array, ''],
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
        return output.loss(at_pixels, truth, spread)

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
