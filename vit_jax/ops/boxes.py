"""Axis-aligned boxes: conversions and overlaps, with finite gradients everywhere, and matching.

Boxes have two forms, each in pixels or relative to an image's sides:

    corners  (x0, y0, x1, y1)   upper left, lower right
    centered  (x, y, w, h)       center and sides

`match` assigns objects to predictions one to one, optimally and inside of compiled programs. One
object after the other, it searches the cheapest chain of reassignments that ends at a free
prediction: the shortest augmenting paths of Jonker & Volgenant, 1987, in the form of Crouse, 2016,
doi:10.1109/TAES.2016.140952, as in scipy. All images of a batch search in parallel, without waiting
for each other. `tests/bench/matching.py` compares it with `optax.assignment` and a callback to
scipy; docs/benchmarks.md has the measurements.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from vit_jax.array_types import Bool, Float, Int


def to_corners(boxes: Float[Array, '*B 4']) -> Float[Array, '*B 4']:
    """Convert boxes from center and sides (x, y, w, h) to corners (x0, y0, x1, y1), same units."""
    center, sides = boxes[..., :2], boxes[..., 2:]
    return jnp.concatenate([center - sides / 2, center + sides / 2], axis=-1)


def to_centered(boxes: Float[Array, '*B 4']) -> Float[Array, '*B 4']:
    """Convert boxes from corners (x0, y0, x1, y1) to center and sides (x, y, w, h), same units."""
    first, last = boxes[..., :2], boxes[..., 2:]
    return jnp.concatenate([(first + last) / 2, last - first], axis=-1)


def area(boxes: Float[Array, '*B 4']) -> Float[Array, '*B']:
    """Area of boxes given by corners; 0 if the corners are out of order."""
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
    (Rezatofighi et al., 2019, arXiv:1902.09630, algorithm 1). If the hull has no area, both terms
    are 0. Shapes are broadcast as in `iou`.
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


def _ratio(part: Array, total: Array) -> Array:
    # The inner `where` keeps the gradient finite: 0 / 0 has a NaN gradient even where unused.
    empty = total <= 0
    return jnp.where(empty, 0, part / jnp.where(empty, 1, total))


# Replaces costs that are not finite. A larger value would reduce the precision of float32 sums.
WORST_COST = 1e4


def match(cost: Float[Array, '*B N Q'], real: Bool[Array, '*B N']) -> Int[Array, '*B N']:
    """Match each object with a prediction by the assignment with minimum total cost.

    Args:
      cost: Cost of object n with prediction q. Costs that are not finite count as `WORST_COST`.
      real: False in padding rows.

    Returns:
      int32 indices of distinct predictions; -1 for padding. If there are more objects than
      predictions, the objects without one, also -1, are chosen to minimize the cost of the others.
      predictions, the objects left out, also -1, are those that make the sum of the others least.
    """
    *batch, objects, predictions = cost.shape
    if not (objects and predictions):
        return jnp.full((*batch, objects), -1, jnp.int32)
    cost = jnp.nan_to_num(
        cost.astype(jnp.float32), nan=WORST_COST, posinf=WORST_COST, neginf=-WORST_COST
    )
    cost = jax.lax.stop_gradient(cost)
    flat = cost.reshape(-1, objects, predictions), real.reshape(-1, objects)
    return jax.vmap(_match_one)(*flat).reshape(*batch, objects)


class _Search(NamedTuple):
    """Search state of one image.

    Attributes:
      turn: Number of objects assigned so far.
      prices: Dual variables of the predictions. An object's dual variable is its cost with its
        prediction minus the price of the prediction.
      owner: Object of each prediction, -1 for none.
      has: Prediction of each object, -1 for none.
      row: Object at the end of the shortest chain, which is extended next.
      lowest: Length of this chain: its increase of the total cost.
      shortest: Length of the shortest chain to each prediction.
      before: Object before each prediction in this chain.
      final: Predictions whose shortest chain is final.
      least: Smallest increase of the total cost by dropping one of the visited objects.
      dropped: This object.
      place: Prediction to reassign next, -1 while chains are extended.
    """

    turn: Array
    prices: Array
    owner: Array
    has: Array
    row: Array
    lowest: Array
    shortest: Array
    before: Array
    final: Array
    least: Array
    dropped: Array
    place: Array


def _match_one(cost: Float[Array, 'N Q'], real: Bool[Array, ' N']) -> Int[Array, ' N']:
    objects, predictions = cost.shape
    order = jnp.argsort(~real, stable=True).astype(jnp.int32)
    count = real.sum()

    def begin(turn: Array, prices: Array, owner: Array, has: Array) -> _Search:
        row = order[jnp.minimum(turn, objects - 1)]
        return _Search(
            turn=turn,
            prices=prices,
            owner=owner,
            has=has,
            row=row,
            lowest=jnp.zeros(()),
            shortest=jnp.full(predictions, jnp.inf),
            before=jnp.full(predictions, -1, jnp.int32),
            final=jnp.zeros(predictions, bool),
            least=jnp.full((), jnp.inf),
            dropped=row,
            place=jnp.full((), -1, jnp.int32),
        )

    def step(s: _Search) -> _Search:
        s = _select(s.place < 0, _extend(s, cost), s)
        is_reassigning = s.place >= 0
        updated, done = _reassign(s, order[s.turn])
        gain = jnp.where(s.final, s.lowest - s.shortest, 0)
        fresh = begin(s.turn + 1, s.prices - gain, updated.owner, updated.has)
        return _select(is_reassigning, _select(done, fresh, updated), s)

    nobody = jnp.full(predictions, -1, jnp.int32)
    nothing = jnp.full(objects, -1, jnp.int32)
    first = begin(jnp.zeros((), jnp.int32), jnp.zeros(predictions), nobody, nothing)
    return jax.lax.while_loop(lambda s: s.turn < count, step, first).has


def _extend(s: _Search, cost: Float[Array, 'N Q']) -> _Search:
    """Take one step of Dijkstra's algorithm; set `place` where the search ends."""
    objects, predictions = cost.shape
    had = s.has[s.row]
    price = jnp.where(had < 0, 0, cost[s.row, had] - s.prices[had])
    length = s.lowest - price + cost[s.row] - s.prices
    shorter = ~s.final & (length < s.shortest)
    shortest = jnp.where(shorter, length, s.shortest)
    nearest = jnp.argmin(jnp.where(s.final, jnp.inf, shortest)).astype(jnp.int32)
    further = s._replace(
        row=s.owner[nearest],
        lowest=shortest[nearest],
        shortest=shortest,
        before=jnp.where(shorter, s.row, s.before),
        final=s.final.at[nearest].set(True),
        place=jnp.where(s.owner[nearest] < 0, nearest, -1),
    )
    if objects <= predictions:
        return further
    # If all predictions are taken, one object is dropped.
    better = s.lowest - price < s.least
    least = jnp.where(better, s.lowest - price, s.least)
    dropped = jnp.where(better, s.row, s.dropped)
    without = s._replace(
        has=s.has.at[dropped].set(-1),
        place=jnp.where(s.has[dropped] < 0, predictions, s.has[dropped]),
    )
    return _select(s.final.all(), without, further._replace(least=least, dropped=dropped))


def _reassign(s: _Search, first: Int[Array, '']) -> tuple[_Search, Bool[Array, '']]:
    """Assign `place` to the object before it in the chain; return whether it was the `first`
    object.

    If `place` is beyond the last prediction, the first object itself is dropped.
    """
    row, nothing = s.before[s.place], s.place == len(s.owner)
    updated = s._replace(
        owner=s.owner.at[s.place].set(row, mode='drop'),
        has=jnp.where(nothing, s.has, s.has.at[row].set(s.place)),
        place=s.has[row],
    )
    return updated, nothing | (row == first)


def _select(condition: Array, yes: _Search, no: _Search) -> _Search:
    return jax.tree.map(lambda a, b: jnp.where(condition, a, b), yes, no)
