"""What must hold of boxes, whatever boxes they are."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from vit_jax.ops import boxes

rng = np.random.default_rng(0)
CENTERED = jnp.asarray(rng.uniform(0.05, 1, (64, 4)), jnp.float32)
A, B = boxes.to_corners(CENTERED[:32]), boxes.to_corners(CENTERED[32:])
# Two boxes each: points, lines, boxes that touch, and corners out of order.
DEGENERATE = {
    'the same point': ([0.5, 0.5, 0.5, 0.5], [0.5, 0.5, 0.5, 0.5]),
    'two points': ([0.0, 0.0, 0.0, 0.0], [1.0, 1.0, 1.0, 1.0]),
    'two points on a line': ([0.0, 0.0, 0.0, 0.0], [1.0, 0.0, 1.0, 0.0]),
    'two lines': ([0.0, 0.0, 1.0, 0.0], [0.5, 0.0, 1.5, 0.0]),
    'a point in a box': ([0.5, 0.5, 0.5, 0.5], [0.0, 0.0, 1.0, 1.0]),
    'a line in a box': ([0.2, 0.5, 0.8, 0.5], [0.0, 0.0, 1.0, 1.0]),
    'boxes that touch': ([0.0, 0.0, 1.0, 1.0], [1.0, 0.0, 2.0, 1.0]),
    'the same box': ([0.0, 0.0, 1.0, 1.0], [0.0, 0.0, 1.0, 1.0]),
    'corners out of order': ([1.0, 1.0, 0.0, 0.0], [0.0, 0.0, 0.0, 0.0]),
}


def test_forms_are_inverse():
    np.testing.assert_allclose(boxes.to_centered(boxes.to_corners(CENTERED)), CENTERED, atol=1e-6)
    corners = boxes.to_corners(jnp.array([0.5, 0.4, 0.2, 0.6]))
    np.testing.assert_allclose(corners, [0.4, 0.1, 0.6, 0.7], atol=1e-6)
    np.testing.assert_allclose(boxes.area(corners), 0.12, atol=1e-6)


def test_values_of_a_known_pair():
    a, b = jnp.array([0.0, 0.0, 2.0, 2.0]), jnp.array([1.0, 1.0, 3.0, 4.0])
    assert boxes.iou(a, b) == pytest.approx(1 / 9)
    assert boxes.giou(a, b) == pytest.approx(1 / 9 - 3 / 12)


def test_pixels_of_a_grid_count_alike():
    """Boxes of whole pixels overlap as sets of pixels do."""
    corners = np.sort(rng.integers(0, 12, (40, 2, 2)), axis=1).reshape(40, 4)
    y, x = np.mgrid[:12, :12]
    x0, y0, x1, y1 = corners.T[..., None, None]
    sets = (x >= x0) & (x < x1) & (y >= y0) & (y < y1)
    both = (sets[:20] & sets[20:]).sum((1, 2))
    either = (sets[:20] | sets[20:]).sum((1, 2))
    found = boxes.iou(jnp.float32(corners[:20]), jnp.float32(corners[20:]))
    np.testing.assert_allclose(found, both / np.maximum(either, 1), atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize('overlap', [boxes.iou, boxes.giou])
def test_overlaps_are_symmetric_and_know_neither_place_nor_scale(overlap):
    overlap, a, b = jax.jit(overlap), np.asarray(A), np.asarray(B)
    found = overlap(a, b)
    np.testing.assert_allclose(overlap(b, a), found, atol=1e-6)
    np.testing.assert_allclose(overlap(3 * a + 2, 3 * b + 2), found, atol=1e-4)
    np.testing.assert_allclose(overlap(a, a), 1, atol=1e-6)
    pairs = np.asarray(overlap(a[:, None], b[None]))
    assert pairs.shape == (32, 32)
    np.testing.assert_allclose(np.diagonal(pairs), found, atol=1e-6)


@pytest.mark.slow
def test_giou_is_at_most_iou_and_tells_near_from_far():
    iou, giou = (f(A[:, None], B[None]) for f in (boxes.iou, boxes.giou))
    assert (giou <= iou + 1e-6).all()
    assert (giou >= -1).all()
    square = jnp.array([0.0, 0.0, 1.0, 1.0])
    apart = jnp.stack([boxes.giou(square, square + d) for d in (1.0, 2.0, 5.0, 100.0)])
    assert (jnp.diff(apart) < 0).all()
    assert apart[-1] == pytest.approx(-1, abs=1e-3)


@functools.cache
def slopes(overlap):
    return jax.jit(jax.value_and_grad(overlap, argnums=(0, 1)))


@pytest.mark.parametrize('overlap', [boxes.iou, boxes.giou])
@pytest.mark.parametrize('pair', DEGENERATE.values(), ids=DEGENERATE)
def test_degenerate_boxes_have_finite_overlaps_and_gradients(overlap, pair):
    a, b = (np.array(x, np.float32) for x in pair)
    for x, y in ((a, b), (b, a)):
        value, grads = slopes(overlap)(x, y)
        assert -1 <= value <= 1
        assert np.isfinite(np.asarray(grads)).all()
