"""Sliding-window segmentation of images larger than the model's input.

The image is resized so that its shorter side fits the model; the fewest windows that cover the
longer side overlap evenly, and scores are averaged in overlaps. Kerssies et al., 2025,
arXiv:2503.19108. Positions are integers; the floating-point positions of the authors' code may
miss the last row of pixels.
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
    """Join the scores of windows along the last axis, averaging overlaps.

    Args:
      scores: Scores of the pixels of each window.
      first: First pixel of each window along the longer side; -1 for padding windows.
      tall: Whether the image is taller than wide; then its rows become the last axis.
      length: Length of the result, at least the longer side; 0 where there is no window.
    """
    side = scores.shape[-1]
    scores = jnp.where(tall, scores.swapaxes(-1, -2), scores)
    total = jnp.zeros((*scores.shape[1:3], length), scores.dtype)
    count = jnp.zeros(length, scores.dtype)
    for window, start in zip(scores, first, strict=True):
        used = start >= 0
        starts = jnp.where(used, start, 0)
        part = jax.lax.dynamic_slice_in_dim(total, starts, side, axis=2)
        part += jnp.where(used, window, 0)
        total = jax.lax.dynamic_update_slice_in_dim(total, part, starts, axis=2)
        positions = starts + jnp.arange(side)
        count = count.at[positions].add(used.astype(scores.dtype))
    return total / count.clip(1)


def classes_at(
    scores: Float[Array, 'C h w'],
    size: Int[Array, '2'],
    full: Int[Array, '2'],
    frame: tuple[int, int],
) -> Int[Array, 'H W']:
    """Classify each pixel of the original image by scores interpolated to its size.

    Interpolation is bilinear between pixel centers, without antialiasing, like PyTorch's.

    Args:
      scores: Score maps; the first rows and columns, `size`, belong to the image.
      size: Height and width of the image seen by the model.
      full: Height and width of the original image.
      frame: Size of the result, at least `full`.

    Returns:
      int32; NONE outside of the original image, NOT_FINITE where a score is not finite.
    """
    rows, columns = (
        _interpolation_matrix(scores.shape[1 + axis], size[axis], full[axis], frame[axis])
        for axis in (0, 1)
    )

    def update_best(best: tuple[Array, Array], entry: tuple[Array, Array]) -> tuple[Any, None]:
        label, plane = entry
        high, best_label = best
        values = jnp.einsum('ah,hw,bw->ab', rows, plane, columns, precision='highest')
        better = values > high
        best_label = jnp.where(better, label, best_label)
        best_label = jnp.where(jnp.isfinite(values), best_label, NOT_FINITE)
        high = jnp.where(jnp.isfinite(values), jnp.where(better, values, high), jnp.inf)
        return (high, best_label), None

    start = jnp.full(frame, -jnp.inf), jnp.full(frame, NONE, jnp.int32)
    labels = jnp.arange(len(scores), dtype=jnp.int32)
    (_, classes), _ = jax.lax.scan(update_best, start, (labels, scores))
    is_inside = (jnp.arange(frame[0]) < full[0])[:, None] & (jnp.arange(frame[1]) < full[1])
    return jnp.where(is_inside, classes, NONE)


def _interpolation_matrix(
    old: int, real: Int[Array, ''], full: Int[Array, ''], new: int
) -> Float[Array, '{new} {old}']:
    """Return interpolation weights from `real` of `old` pixels to `full` of `new` pixels."""
    positions = (jnp.arange(new) + 0.5) * (real / full) - 0.5
    positions = positions.clip(0, real - 1)
    return (1 - jnp.abs(positions[:, None] - jnp.arange(old))).clip(0)


def segmentation(
    scores: Float[Array, 'B n C S S'], batch: dict[str, Any], frame: tuple[int, int] | None = None
) -> dict[str, Array]:
    """Classify each pixel of images from the scores of their windows.

    Args:
      scores: Scores of the windows of the transform `sliding_windows`.
      batch: Batch with the fields `starts`, `tall`, `scaled_size` and `full_size`.
      frame: Height and width of the largest original, to interpolate scores to the sizes of the
        originals; None to classify the pixels of the resized images.

    Returns:
      segmentation: int32 [B H W], see `classes_at`; its size is `frame`, or a square that holds all
        windows side by side.
      size: int32 [B 2], height and width of the image in it.
    """
    scores = scores.astype(jnp.float32)
    length = scores.shape[1] * scores.shape[-1]
    size = batch['scaled_size' if frame is None else 'full_size']
    frame = (length, length) if frame is None else frame
    sides = min(frame), max(frame)  # of the result, longer side last

    def segment_image(row: tuple[Array, ...]) -> Array:
        windows, first, tall, scaled, full = row
        joined_scores = average(windows, first, tall, length)
        scaled_size, full_size = (jnp.where(tall, size[::-1], size) for size in (scaled, full))
        classes = classes_at(joined_scores, scaled_size, full_size, sides)
        return jnp.where(tall, _crop_and_pad(classes.T, frame), _crop_and_pad(classes, frame))

    fields = (batch[name] for name in ('starts', 'tall', 'scaled_size'))
    return {'segmentation': jax.lax.map(segment_image, (scores, *fields, size)), 'size': size}


def _crop_and_pad(classes: Int[Array, 'h w'], frame: tuple[int, int]) -> Int[Array, 'H W']:
    """Crop a map to a frame, or pad it with NONE."""
    part = classes[: frame[0], : frame[1]]
    widths = [(0, side - had) for side, had in zip(frame, part.shape, strict=True)]
    return jnp.pad(part, widths, constant_values=NONE)
