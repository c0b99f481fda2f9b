"""Segmentation of images larger than the model's input, by windows along the longer side.

The shorter side of the image is the model's; the fewest windows that cover the longer one overlap
evenly, and scores are averaged where windows overlap. Kerssies et al., 2025, arXiv:2503.19108, as
in the authors' code, whose floating-point positions may miss the last row of pixels; these are
integers.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from vit_jax.array_types import Bool, Float, Int

NONE, NOT_FINITE = -1, -2  # instead of a class


def average(
    scores: Float[Array, 'n C S S'], first: Int[Array, ' n'], tall: Bool[Array, ''], length: int
) -> Float[Array, 'C S {length}']:
    """Put the scores of windows side by side along the last axis, and average where they overlap.

    Args:
      scores: of the pixels of each window.
      first: pixel of each window along the longer side; -1 where there is no window.
      tall: whether the image is higher than wide; then its rows become the last axis.
      length: pixels of the result, at least those of the longer side; 0 where there is no window.
    """
    side = scores.shape[-1]
    scores = jnp.where(tall, scores.swapaxes(-1, -2), scores)
    total = jnp.zeros((*scores.shape[1:3], length), scores.dtype)
    count = jnp.zeros(length, scores.dtype)
    for window, start in zip(scores, first, strict=True):
        used = start >= 0
        at = jnp.where(used, start, 0)
        part = jax.lax.dynamic_slice_in_dim(total, at, side, axis=2)
        part += jnp.where(used, window, 0)
        total = jax.lax.dynamic_update_slice_in_dim(total, part, at, axis=2)
        place = at + jnp.arange(side)
        count = count.at[place].add(used.astype(scores.dtype))
    return total / count.clip(1)


def classes_at(
    scores: Float[Array, 'C h w'],
    size: Int[Array, '2'],
    full: Int[Array, '2'],
    frame: tuple[int, int],
) -> Int[Array, 'H W']:
    """The class of each pixel of the original image, by scores that are interpolated to its size.

    Interpolation is bilinear between the centers of pixels, without antialiasing, as PyTorch's.

    Args:
      scores: their first rows and columns, `size`, are those of the image.
      size: height and width of the image that was predicted.
      full: height and width of the original.
      frame: of the result, at least `full`.

    Returns:
      int32; NONE outside of the original, NOT_FINITE where a score is not finite.
    """
    rows, columns = (
        _interpolation(scores.shape[1 + axis], size[axis], full[axis], frame[axis])
        for axis in (0, 1)
    )

    def take(best: tuple[Array, Array], one: tuple[Array, Array]) -> tuple[Any, None]:
        label, plane = one
        high, found = best
        values = jnp.einsum('ah,hw,bw->ab', rows, plane, columns, precision='highest')
        better = values > high
        found = jnp.where(better, label, found)
        found = jnp.where(jnp.isfinite(values), found, NOT_FINITE)
        high = jnp.where(jnp.isfinite(values), jnp.where(better, values, high), jnp.inf)
        return (high, found), None

    start = jnp.full(frame, -jnp.inf), jnp.full(frame, NONE, jnp.int32)
    labels = jnp.arange(len(scores), dtype=jnp.int32)
    (_, found), _ = jax.lax.scan(take, start, (labels, scores))
    inside = (jnp.arange(frame[0]) < full[0])[:, None] & (jnp.arange(frame[1]) < full[1])
    return jnp.where(inside, found, NONE)


def _interpolation(
    old: int, real: Int[Array, ''], full: Int[Array, ''], new: int
) -> Float[Array, '{new} {old}']:
    """Weights of `old` pixels, of which the first are `real`, for `full` of `new` ones."""
    at = (jnp.arange(new) + 0.5) * (real / full) - 0.5
    at = at.clip(0, real - 1)
    return (1 - jnp.abs(at[:, None] - jnp.arange(old))).clip(0)


def segmentation(
    scores: Float[Array, 'B n C S S'], batch: dict[str, Any], frame: tuple[int, int] | None = None
) -> dict[str, Array]:
    """The class of each pixel of images, of the scores of their windows.

    Args:
      scores: of the windows that the transform `sliding_windows` has made.
      batch: its fields `starts`, `tall`, `scaled_size` and `full_size`.
      frame: interpolate scores to the sizes of the originals, of which the largest has this height
        and width; None for classes of the pixels of the resized images.

    Returns:
      segmentation: int32 [B H W], see `classes_at`; of `frame`, or of squares that hold all windows
        side by side.
      size: int32 [B 2], height and width of the image in it.
    """
    scores = scores.astype(jnp.float32)
    length = scores.shape[1] * scores.shape[-1]
    size = batch['scaled_size' if frame is None else 'full_size']
    frame = (length, length) if frame is None else frame
    sides = min(frame), max(frame)  # of the result with the longer side last

    def one(row: tuple[Array, ...]) -> Array:
        windows, first, tall, scaled, full = row
        joined = average(windows, first, tall, length)
        turned, whole = (jnp.where(tall, size[::-1], size) for size in (scaled, full))
        found = classes_at(joined, turned, whole, sides)
        return jnp.where(tall, _fitted(found.T, frame), _fitted(found, frame))

    fields = (batch[name] for name in ('starts', 'tall', 'scaled_size'))
    return {'segmentation': jax.lax.map(one, (scores, *fields, size)), 'size': size}


def _fitted(classes: Int[Array, 'h w'], frame: tuple[int, int]) -> Int[Array, 'H W']:
    """The upper left of a map, and NONE beyond it."""
    part = classes[: frame[0], : frame[1]]
    widths = [(0, side - had) for side, had in zip(frame, part.shape, strict=True)]
    return jnp.pad(part, widths, constant_values=NONE)
