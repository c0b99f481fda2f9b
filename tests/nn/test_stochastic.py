"""Dropout and stochastic depth: masks that belong to the example."""

import contextlib
import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from vit_jax.errors import UserError
from vit_jax.nn.stochastic import Dropout, DropPath, example_positions

BATCH, TOKENS, WIDTH = 8, 5, 16
RNGS = {'dropout': jax.random.key(3)}


def dropout(x, rngs=RNGS):
    return Dropout(0.4).apply({}, x, True, rngs=rngs)


def drop_path(x, rngs=RNGS):
    return DropPath().apply({}, x, 0.4, True, rngs=rngs)


@functools.partial(jax.jit, static_argnums=0)
def applied(layer, x, positions=None, rngs=RNGS):
    """The layer's result, for examples at these positions, by one program."""
    with contextlib.nullcontext() if positions is None else example_positions(positions):
        return layer(x, rngs)


def result(layer, shape, positions=None, **rngs):
    """The layer's result for ones of a shape, as an array of the host."""
    positions = None if positions is None else np.array(positions)
    return np.asarray(applied(layer, np.ones(shape, np.float32), positions, **rngs))


@pytest.mark.slow
@pytest.mark.parametrize('layer', [dropout, drop_path])
def test_masks_do_not_depend_on_how_the_batch_is_split(layer):
    whole = result(layer, (BATCH, TOKENS, WIDTH))
    for positions in ([0, 1, 2, 3], [4, 5, 6, 7], [6, 1]):
        part = result(layer, (len(positions), TOKENS, WIDTH), positions)
        np.testing.assert_array_equal(part, whole[positions])


@pytest.mark.parametrize('layer', [dropout, drop_path])
def test_masks_of_a_batch_that_is_spread_over_devices(layer):
    x = jnp.ones((BATCH, TOKENS, WIDTH))
    mesh = jax.make_mesh((4,), ('data',), axis_types=(jax.sharding.AxisType.Auto,))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec('data'))
    spread = jax.jit(layer, in_shardings=sharding, out_shardings=sharding)(x)
    assert len(spread.sharding.device_set) == 4
    np.testing.assert_array_equal(spread, result(layer, x.shape))


@pytest.mark.parametrize('layer', [dropout, drop_path])
def test_masks_differ_between_examples_and_between_keys(layer):
    shape = (64, TOKENS, WIDTH)
    kept = result(layer, shape) != 0
    assert kept.any(axis=(1, 2)).sum() > 0 and not kept.all()
    assert (kept != kept[:1]).any()
    other = result(layer, shape, rngs={'dropout': jax.random.key(4)})
    assert ((other != 0) != kept).any()


def test_positions_are_forgotten_after_the_context():
    x = jnp.ones((2, TOKENS, WIDTH))
    before = dropout(x)
    with example_positions(jnp.array([10, 11])):
        inside = dropout(x)
    assert (before != inside).any()
    np.testing.assert_array_equal(before, dropout(x))


def test_a_jitted_function_follows_positions_that_are_entered_around_it():
    """Its caches have the positions in their keys, inside of traces, too."""
    x, compiled = jnp.ones((2, TOKENS, WIDTH)), jax.jit(dropout)
    expected = {}
    for positions in ((0, 1), (2, 3), (0, 1)):
        with example_positions(jnp.array(positions)):
            found = compiled(x)
            expected[positions] = dropout(x)
        np.testing.assert_array_equal(found, expected[positions])

    @jax.jit
    def twice(first, second):
        with example_positions(first):
            one = compiled(x)
        with example_positions(second):
            return one, compiled(x)

    for found, wanted in zip(twice(*map(jnp.array, expected)), expected.values(), strict=True):
        np.testing.assert_array_equal(found, wanted)
    np.testing.assert_array_equal(compiled(x), dropout(x))


def test_positions_of_another_batch_are_refused():
    with example_positions(jnp.arange(3)), pytest.raises(ValueError, match='example_positions'):
        dropout(jnp.ones((2, TOKENS, WIDTH)))


@pytest.mark.parametrize('layer', [dropout, drop_path])
def test_views_that_are_folded_into_the_batch_draw_for_themselves(layer):
    """Row r of B * V is view r % V of example r // V, wherever the example is computed."""
    views = 6
    whole = result(layer, (BATCH * views, TOKENS, WIDTH), range(BATCH))
    whole = whole.reshape(BATCH, views, TOKENS, WIDTH)
    assert (whole[:, 0] != whole[:, 1]).any()
    assert (whole[0] != whole[1]).any()
    for positions in ([4, 5, 6, 7], [6, 1]):
        part = result(layer, (len(positions) * views, TOKENS, WIDTH), positions)
        expected = whole[positions].reshape(part.shape)
        np.testing.assert_array_equal(part, expected)


def test_a_row_of_several_examples_draws_as_its_first():
    x = jnp.ones((2, TOKENS, WIDTH))
    with example_positions(jnp.array([7, 3])):
        alone = dropout(x)
    with example_positions(jnp.array([[7, 8], [3, 0]])):
        np.testing.assert_array_equal(dropout(x), alone)


def test_dropout_keeps_the_expectation_and_its_rate():
    y = result(dropout, (BATCH, 100, 100))
    np.testing.assert_allclose(y.max(), 1 / 0.6, rtol=1e-6)
    # 80,000 draws: the standard error of the mean is 0.0029.
    assert y.mean() == pytest.approx(1.0, abs=0.012)
    assert (y == 0).mean() == pytest.approx(0.4, abs=0.01)


def test_drop_path_drops_whole_examples_and_keeps_the_expectation():
    y = result(drop_path, (20_000, 3))
    assert set(np.unique(y[:, 0])) == {np.float32(0), np.float32(1) / np.float32(0.6)}
    np.testing.assert_array_equal(y, np.repeat(y[:, :1], 3, axis=1))
    assert y.mean() == pytest.approx(1.0, abs=0.023)  # four standard errors


@pytest.mark.parametrize('rate', [0.3, jnp.float32(0.3)])
def test_a_traced_rate_of_drop_path_equals_a_plain_one(rate):
    y = DropPath().apply({}, jnp.ones((BATCH, 2)), rate, True, rngs=RNGS)
    expected = DropPath().apply({}, jnp.ones((BATCH, 2)), 0.3, True, rngs=RNGS)
    np.testing.assert_allclose(y, expected, rtol=1e-6)


def test_nothing_is_dropped_nor_drawn_in_evaluation_or_at_rate_zero():
    x = jnp.arange(6.0).reshape(2, 3)
    # No random stream is given: drawing from one would raise.
    np.testing.assert_array_equal(Dropout(0.5).apply({}, x), x)
    np.testing.assert_array_equal(Dropout(0.0).apply({}, x, True), x)
    np.testing.assert_array_equal(DropPath().apply({}, x, 0.5), x)
    np.testing.assert_array_equal(DropPath().apply({}, x, 0.0, True), x)
    with pytest.raises(Exception, match='dropout'):
        Dropout(0.5).apply({}, x, True)


@pytest.mark.parametrize('dtype', [jnp.bfloat16, jnp.float32])
def test_the_dtype_is_kept(dtype):
    x = jnp.ones((BATCH, WIDTH), dtype)
    assert dropout(x).dtype == dtype
    assert drop_path(x).dtype == dtype
    rate = jnp.float32(0.5)
    assert DropPath().apply({}, x, rate, True, rngs=RNGS).dtype == dtype


@pytest.mark.parametrize('rate', [-0.1, 1.0, 1.5])
def test_impossible_rates_are_refused(rate):
    with pytest.raises(UserError, match='dropout'):
        Dropout(rate).apply({}, jnp.ones((2, 2)))


def test_two_layers_of_one_model_draw_different_masks():
    class Twice(nn.Module):
        @nn.compact
        def __call__(self, x):
            return Dropout(0.5)(x, True), Dropout(0.5)(x, True)

    first, second = Twice().apply({}, jnp.ones((BATCH, WIDTH)), rngs=RNGS)
    assert (first != second).any()
