"""Masks are made of blocks, keep their counts, and belong to their key."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from vit_jax.ops import self_distillation as ops

GRID = (8, 10)
crop_masks = jax.jit(ops.crop_masks, static_argnums=(1, 2, 3, 4))
block_mask = jax.jit(ops.block_mask, static_argnums=1)
COUNTS = np.array([0, 1, 3, 8, 20, 40], np.int32)


@pytest.fixture(scope='module')
def masks():
    """200 masks for each count."""
    keys = jax.random.split(jax.random.key(0), 200)
    one = jax.vmap(ops.block_mask, (None, None, 0))
    return np.asarray(jax.jit(jax.vmap(one, (0, None, None)), static_argnums=1)(keys, GRID, COUNTS))


def test_no_mask_hides_more_than_asked_for_and_most_hide_as_many(masks):
    found = masks.sum((2, 3))
    assert (found <= COUNTS).all()
    np.testing.assert_array_equal(found[:, 0], 0)
    assert (found[:, 2:].mean(0) > 0.9 * COUNTS[2:]).all()


def test_hidden_patches_lie_together(masks):
    """A hidden patch has more hidden neighbors than in a random mask with as many."""
    hidden = masks[:, 4]
    pairs = (hidden[:, 1:] & hidden[:, :-1]).sum() + (hidden[..., 1:] & hidden[..., :-1]).sum()
    share = hidden.mean()
    alone = share**2 * 200 * (7 * 10 + 8 * 9)
    assert pairs > 2 * alone


def test_blocks_reach_every_patch(masks):
    share = masks[:, 4].mean(0)
    assert share.min() > 0 and share.max() < 0.45  # corners are hidden least


@pytest.fixture(scope='module')
def crops():
    keys = jax.random.split(jax.random.key(1), 100)
    make = jax.vmap(lambda key: ops.crop_masks(key, GRID, 3, 2, (0.1, 0.5)))
    return jax.tree.map(np.asarray, jax.jit(make)(keys))


def test_places_are_the_hidden_patches_and_weights_their_shares(crops):
    assert crops.hidden.shape == (100, 3, 80) and crops.places.shape == (100, 2 * 40)
    np.testing.assert_array_equal((crops.hidden.any(2)).sum(1), 2)
    np.testing.assert_allclose(crops.weights.sum(1), 2, rtol=1e-5)
    for hidden, places, weights in zip(*crops, strict=True):
        listed = np.zeros(240)
        listed[places[weights > 0]] = weights[weights > 0]
        expected = np.where(hidden, 1 / hidden.sum(1, keepdims=True).clip(1), 0)
        np.testing.assert_allclose(listed.reshape(3, 80), expected, rtol=1e-6)


def test_crops_and_ratios_are_drawn_evenly(crops):
    chosen = crops.hidden.any(2).mean(0)
    assert (np.abs(chosen - 2 / 3) < 0.15).all()
    share = crops.hidden.mean(2)[crops.hidden.any(2)]
    assert share.min() < 0.16 and 0.24 < share.mean() < 0.34 and 0.42 < share.max() <= 0.5


def test_a_mask_belongs_to_its_key(crops):
    again = crop_masks(jax.random.split(jax.random.key(1), 100)[7], GRID, 3, 2, (0.1, 0.5))
    np.testing.assert_array_equal(again.hidden, crops.hidden[7])
    assert (crops.hidden[7] != crops.hidden[8]).any()


def test_a_grid_too_small_for_a_block_hides_nothing():
    found = crop_masks(jax.random.key(0), (1, 1), 2, 1, (0.1, 0.5))
    assert not found.hidden.any() and found.places.shape == (0,)
    mask = block_mask(jax.random.key(0), (2, 2), jnp.int32(2))
    assert mask.sum() <= 2
