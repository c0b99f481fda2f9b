"""The assignment is scipy's in cost, whatever the costs, the padding and the order."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.optimize import linear_sum_assignment

from vit_jax.ops.boxes import WORST_COST, match

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
