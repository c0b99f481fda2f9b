"""Sizes of masks and losses of their pixels: those of PyTorch and of transformers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from vit_jax.ops import masks


@pytest.fixture
def rng():
    return np.random.default_rng(0)


def test_interpolation_is_that_of_torch(rng):
    torch = pytest.importorskip('torch')
    x = rng.normal(size=(2, 13, 25)).astype(np.float32)
    found = jax.jit(lambda x: masks.resize_bilinear(x, (42, 49)))(x)
    wanted = torch.nn.functional.interpolate(torch.from_numpy(x)[None], (42, 49), mode='bilinear')
    np.testing.assert_allclose(found, wanted[0], atol=1e-5)


@pytest.mark.slow
def test_losses_are_those_of_transformers(rng):
    torch = pytest.importorskip('torch')
    pytest.importorskip('transformers')
    from transformers.loss import loss_for_object_detection as theirs

    logits = rng.normal(size=(3, 6, 7)).astype(np.float32) * 4
    targets = rng.random((3, 6, 7)) < 0.3
    targets[2] = False
    inputs = torch.from_numpy(logits).flatten(1).requires_grad_()
    wanted = torch.from_numpy(targets).flatten(1).float()
    real = np.ones((1, 6, 7), bool)
    for ours, function in (
        (masks.focal_loss, theirs.sigmoid_focal_loss),
        (masks.dice_loss, theirs.dice_loss),
    ):
        expected = function(inputs, wanted, 5)
        (slope,) = torch.autograd.grad(expected, inputs)
        slopes = jax.jit(jax.value_and_grad(lambda *x, f=ours: f(*x).sum() / 5))
        found, mine = slopes(logits, targets, real)
        assert float(found) == pytest.approx(expected.item(), rel=1e-5)
        np.testing.assert_allclose(mine, slope.reshape(logits.shape), atol=1e-6)


@pytest.mark.slow
def test_padding_does_not_count(rng):
    logits, targets = rng.normal(size=(2, 5, 6)), rng.random((2, 5, 6)) < 0.5
    padded = [np.pad(x, [(0, 0), (0, 3), (0, 1)], mode='wrap') for x in (logits, targets)]
    real = np.pad(np.ones((1, 5, 6), bool), [(0, 0), (0, 3), (0, 1)])
    for loss in map(jax.jit, (masks.focal_loss, masks.dice_loss)):
        expected = loss(logits, targets, np.ones((1, 5, 6), bool))
        np.testing.assert_allclose(loss(*padded, real), expected, rtol=1e-5)


def test_sure_and_right_is_no_loss():
    targets = np.arange(24).reshape(1, 4, 6) % 3 == 0
    for loss in map(jax.jit, (masks.focal_loss, masks.dice_loss)):
        assert loss(np.where(targets, 30.0, -30.0), targets, np.ones_like(targets)) < 1e-6


@pytest.mark.slow
def test_losses_and_gradients_are_finite_where_nothing_is_real_or_all_is_sure():
    far = np.full((6, 2, 2), 1e4, np.float32) * np.array([[1, -1], [-1, 1]], np.float32)
    targets = np.concatenate([far[:2] > 0, far[:2] < 0, np.zeros((2, 2, 2), bool)])
    real = np.zeros((6, 2, 2), bool)
    real[::2] = True
    for loss in (masks.focal_loss, masks.dice_loss):
        slopes = jax.jit(jax.value_and_grad(lambda *x, f=loss: f(*x).sum()))
        found = slopes(far, targets, real)
        assert all(np.isfinite(x).all() for x in found)


def test_masks_of_numbered_segments():
    segments = jnp.asarray(np.array([[[0, 1], [3, 3]]]))
    expected = [[[0, 1], [0, 0]], [[0, 0], [0, 0]], [[0, 0], [1, 1]]]
    np.testing.assert_array_equal(masks.from_segments(segments, 3)[0], expected)
