"""What must hold of boxes, whatever boxes they are."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.optimize import linear_sum_assignment

from vit_jax.ops import boxes
from vit_jax.ops.boxes import WORST_COST, match

rng = np.random.default_rng(0)
CENTERED = jnp.asarray(rng.uniform(0.05, 1, (64, 4)), jnp.float32)
iou, giou = jax.jit(boxes.iou), jax.jit(boxes.giou)  # by itself, each operation would be a program
A, B = np.split(np.asarray(jax.jit(boxes.to_corners)(CENTERED)), 2)
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
    a, b = np.float32([0, 0, 2, 2]), np.float32([1, 1, 3, 4])
    assert iou(a, b) == pytest.approx(1 / 9)
    assert giou(a, b) == pytest.approx(1 / 9 - 3 / 12)


def test_pixels_of_a_grid_count_alike():
    """Boxes of whole pixels overlap as sets of pixels do."""
    corners = np.sort(rng.integers(0, 12, (40, 2, 2)), axis=1).reshape(40, 4)
    y, x = np.mgrid[:12, :12]
    x0, y0, x1, y1 = corners.T[..., None, None]
    sets = (x >= x0) & (x < x1) & (y >= y0) & (y < y1)
    both = (sets[:20] & sets[20:]).sum((1, 2))
    either = (sets[:20] | sets[20:]).sum((1, 2))
    found = iou(np.float32(corners[:20]), np.float32(corners[20:]))
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
    plain, generalized = (np.asarray(f(A[:, None], B[None])) for f in (iou, giou))
    assert (generalized <= plain + 1e-6).all()
    assert (generalized >= -1).all()
    square = np.float32([0, 0, 1, 1])
    apart = np.array([giou(square, square + np.float32(d)) for d in (1, 2, 5, 100)])
    assert (np.diff(apart) < 0).all()
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


jitted = jax.jit(match)


def optimum(cost, real):
    """The least sum for the real rows, by scipy."""
    rows = np.asarray(cost, np.float64)[np.asarray(real)]
    return rows[linear_sum_assignment(rows)].sum()


def check(cost, real):
    """Every image's assignment is valid and optimal; returns it."""
    found = np.asarray(jitted(cost, real))
    assert found.dtype == np.int32
    for places, costs, rows in zip(found, np.asarray(cost), np.asarray(real), strict=True):
        placed = places >= 0
        assert not placed[~rows].any()
        assert placed.sum() == min(rows.sum(), costs.shape[1])
        assert len(set(places[placed])) == placed.sum()
        assert places.max(initial=-1) < costs.shape[1]
        total = costs[placed, places[placed]].sum(dtype=np.float64)
        np.testing.assert_allclose(total, optimum(costs, rows), rtol=1e-5, atol=1e-4)
    return found


def images(shape, kind, seed=0):
    """Costs [B N Q] and which rows are real: none in the first image, all in the last."""
    rng = np.random.default_rng(seed)
    if kind == 'random':
        cost = rng.normal(size=shape)
    elif kind == 'ties':
        cost = rng.integers(3, size=shape)
    elif kind == 'equal':
        cost = np.ones(shape)
    elif kind == 'alike objects':
        cost = np.repeat(rng.normal(size=(shape[0], 1, shape[2])), shape[1], axis=1)
    elif kind == 'far apart':
        cost = 10.0 ** rng.integers(-2, 4, size=shape)
    else:  # every object wants the same predictions, so that chains are long
        cost = rng.uniform(0.9, 1, size=shape[:2])[..., None] * np.arange(shape[2]) / shape[2]
    real = rng.random(shape[:2]) < 0.6
    real[0], real[-1] = False, True
    return cost.astype(np.float32), real


@pytest.mark.slow
@pytest.mark.parametrize(
    'kind', ['random', 'ties', 'equal', 'alike objects', 'far apart', 'long chains']
)
@pytest.mark.parametrize(('objects', 'predictions'), [(7, 20), (12, 12), (20, 7), (1, 1)])
def test_optimal(kind, objects, predictions):
    for seed in range(4):
        check(*images((8, objects, predictions), kind, seed))


def test_objects_without_which_the_rest_is_cheapest_stay_without():
    cost = np.array([[[5.0, 6.0], [1.0, 9.0], [2.0, 3.0], [0.5, 4.0]]], np.float32)
    assert check(cost, np.ones((1, 4), bool)).tolist() == [[-1, -1, 1, 0]]


def test_order_of_objects_and_predictions_does_not_matter():
    cost, real = images((8, 7, 20), 'random')
    rng = np.random.default_rng(1)
    rows, columns = rng.permutation(7), rng.permutation(20)
    moved = check(cost[:, rows][:, :, columns], real[:, rows])
    expected = check(cost, real)[:, rows]
    np.testing.assert_array_equal(np.where(moved < 0, -1, columns[moved]), expected)


@pytest.mark.slow
def test_padding_changes_nothing():
    cost, real = images((8, 7, 12), 'random')
    padded = np.pad(cost, [(0, 0), (0, 5), (0, 0)], constant_values=np.nan)
    found = np.asarray(jitted(padded, np.pad(real, [(0, 0), (0, 5)])))
    np.testing.assert_array_equal(found[:, :7], jitted(cost, real))
    assert (found[:, 7:] == -1).all()


def test_costs_that_are_not_finite_are_the_last_choice():
    cost = np.array([[[np.nan, 3.0, np.inf], [1.0, 2.0, -np.inf]]], np.float32)
    assert jitted(cost, np.ones((1, 2), bool)).tolist() == [[1, 2]]
    assert np.nan_to_num(cost, nan=WORST_COST, posinf=WORST_COST).max() == WORST_COST


@pytest.mark.parametrize('shape', [(2, 0, 3), (2, 3, 0)])
def test_nothing_to_match(shape):
    found = jitted(np.zeros(shape, np.float32), np.ones(shape[:2], bool))
    assert found.shape == shape[:2]
    assert (np.asarray(found) == -1).all()


@pytest.mark.slow
def test_axes_before_objects_are_images_of_their_own():
    cost, real = images((8, 7, 20), 'random')
    nested = np.asarray(jitted(cost.reshape(2, 4, 7, 20), real.reshape(2, 4, 7)))
    np.testing.assert_array_equal(nested.reshape(8, 7), jitted(cost, real))


@pytest.mark.slow
def test_no_gradient_flows_through_the_choice():
    cost, real = images((2, 3, 5), 'random')

    def chosen(cost):
        places = match(cost, jnp.asarray(real))[..., None]
        return jnp.take_along_axis(cost, places, axis=-1).sum()

    grads = np.asarray(jax.jit(jax.grad(chosen))(cost))
    assert set(np.unique(grads)) <= {0.0, 1.0, 2.0, 3.0}
    assert grads.sum() == 6
