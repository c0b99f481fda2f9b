"""Axis-aligned boxes as pure functions; every one has a finite gradient at every box.

Boxes have two forms, each in pixels or as shares of an image's sides:

    corners  (x0, y0, x1, y1)   upper left, lower right
    centered  (x, y, w, h)       center and sides
"""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array

from vit_jax.array_types import Float


def to_corners(boxes: Float[Array, '*B 4']) -> Float[Array, '*B 4']:
    """Convert centers and sides to corners."""
    center, sides = boxes[..., :2], boxes[..., 2:]
    return jnp.concatenate([center - sides / 2, center + sides / 2], axis=-1)


def to_centered(boxes: Float[Array, '*B 4']) -> Float[Array, '*B 4']:
    """Convert corners to centers and sides."""
    first, last = boxes[..., :2], boxes[..., 2:]
    return jnp.concatenate([(first + last) / 2, last - first], axis=-1)


def area(boxes: Float[Array, '*B 4']) -> Float[Array, '*B']:
    """The area of boxes given by corners; 0 where these are out of order."""
    width, height = _sides(boxes)
    return width * height


def iou(a: Float[Array, '*B 4'], b: Float[Array, '*C 4']) -> Float[Array, '*D']:
    """Intersection over union of boxes given by corners; 0 for two boxes without area.

    The shapes before the last axis are broadcast: `iou(a[:, None], b[None])` compares every pair.
    """
    return _ratio(*_intersection_and_union(a, b))


def giou(a: Float[Array, '*B 4'], b: Float[Array, '*C 4']) -> Float[Array, '*D']:
    """Generalized intersection over union, in [-1, 1], of boxes given by corners.

    IoU - |hull without the union| / |hull|, where the hull is the smallest box around both
    (Rezatofighi et al., 2019, arXiv:1902.09630, algorithm 1). Where the hull has no area, both
    parts are 0. Shapes are broadcast as in `iou`.
    """
    intersection, union = _intersection_and_union(a, b)
    first = jnp.minimum(a[..., :2], b[..., :2])
    last = jnp.maximum(a[..., 2:], b[..., 2:])
    hull = area(jnp.concatenate([first, last], axis=-1))
    return _ratio(intersection, union) - _ratio(hull - union, hull)


def _sides(boxes: Array) -> tuple[Array, Array]:
    sides = jnp.maximum(boxes[..., 2:] - boxes[..., :2], 0)
    return sides[..., 0], sides[..., 1]


def _intersection_and_union(a: Array, b: Array) -> tuple[Array, Array]:
    first = jnp.maximum(a[..., :2], b[..., :2])
    last = jnp.minimum(a[..., 2:], b[..., 2:])
    intersection = area(jnp.concatenate([first, last], axis=-1))
    return intersection, area(a) + area(b) - intersection


def _ratio(part: Array, whole: Array) -> Array:
    # The inner `where` keeps the gradient finite: that of 0 / 0 is NaN even where not chosen.
    empty = whole <= 0
    return jnp.where(empty, 0, part / jnp.where(empty, 1, whole))
