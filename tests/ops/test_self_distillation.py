"""Losses of self-distillation, against PyTorch and by what they are for."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from vit_jax.ops import self_distillation as ops

RNG = np.random.default_rng(0)
LOGITS = RNG.normal(size=(24, 5)).astype(np.float32) * 4
FEATURES = RNG.normal(size=(8, 6)).astype(np.float32)
sinkhorn, koleo = jax.jit(ops.sinkhorn, static_argnums=2), jax.jit(ops.koleo)


@pytest.mark.parity
def test_all_three_are_those_of_the_equations():
    """In PyTorch: divisions of the matrix itself, and the nearest neighbor by distance."""
    torch = pytest.importorskip('torch')
    q = torch.exp(torch.from_numpy(LOGITS).double())
    for _ in range(3):
        q = q / q.sum(0, keepdim=True)
        q = q / q.sum(1, keepdim=True)
    np.testing.assert_allclose(sinkhorn(LOGITS, np.ones(24)), q, rtol=1e-4, atol=1e-7)

    x = torch.nn.functional.normalize(torch.from_numpy(FEATURES).double())
    distances = torch.cdist(x, x) + 9 * torch.eye(8)
    np.testing.assert_allclose(
        koleo(FEATURES, np.ones(8)), -distances.min(1).values.log(), rtol=1e-5
    )

    logits = torch.from_numpy(LOGITS).double() / 0.1
    expected = torch.nn.functional.cross_entropy(logits, q, reduction='none')
    found = ops.cross_entropy(jnp.asarray(q.numpy(), jnp.float32), jnp.asarray(LOGITS), 0.1)
    np.testing.assert_allclose(found, expected, rtol=1e-4)


def test_prototypes_get_equal_shares_and_rows_stay_probabilities():
    skewed = LOGITS + np.array([9, 0, 0, 0, 0], np.float32)  # one prototype would win everything
    assert (jax.nn.softmax(skewed).argmax(1) == 0).mean() > 0.8
    targets = np.asarray(sinkhorn(skewed, np.ones(24), 50))
    np.testing.assert_allclose(targets.sum(1), 1, rtol=1e-5)
    np.testing.assert_allclose(targets.mean(0), 1 / 5, rtol=1e-2)
    np.testing.assert_allclose(targets, sinkhorn(LOGITS, np.ones(24), 50), rtol=1e-2, atol=1e-4)


def test_absent_rows_have_no_share_and_are_no_neighbors():
    real = np.arange(24) < 20
    other = np.where(real[:, None], LOGITS, 30.0).astype(np.float32)
    found = sinkhorn(other, real)[:20]
    np.testing.assert_allclose(found, sinkhorn(LOGITS[:20], np.ones(20)), rtol=1e-5)
    assert np.isfinite(sinkhorn(LOGITS, np.zeros(24))).all()

    copies = np.concatenate([FEATURES, FEATURES])  # the nearest neighbors, if they counted
    found = koleo(copies, np.arange(16) < 8)[:8]
    np.testing.assert_allclose(found, koleo(FEATURES, np.ones(8)), rtol=1e-5)
    assert koleo(copies, np.ones(16)).min() > 10


def test_koleo_spreads_features_whatever_their_length():
    expected = koleo(FEATURES, np.ones(8))
    lengths = RNG.uniform(1, 9, (8, 1)).astype(np.float32)
    np.testing.assert_allclose(koleo(lengths * FEATURES, np.ones(8)), expected, rtol=1e-4)
    step = jax.jit(jax.grad(lambda x: koleo(x, np.ones(8)).sum()))(FEATURES)
    assert koleo(FEATURES - 0.05 * step, np.ones(8)).sum() < expected.sum()


GRAM = jax.jit(ops.gram, static_argnums=(2, 3))
# By `GramLoss` of facebookresearch/dinov3 (6876159), image by image.
GRAM_LOSSES = {
    ('kept', True): [0.1688168, 0.2615518, 0.1569509],
    ('cut', True): [0.0551772, 0.0859264, 0.0693452],
    ('cut_of_teacher', True): [0.1260227, 0.1727655, 0.1640400],
    ('kept', False): [11.809967, 11.542901, 11.602350],
    ('cut', False): [7.4311433, 5.7881498, 6.1804094],
    ('cut_of_teacher', False): [10.2726488, 7.8095336, 11.7747879],
}


def test_the_gram_loss_is_that_of_the_authors_code():
    rng = np.random.default_rng(7)
    student, teacher = (rng.normal(size=(3, 9, 8)).astype(np.float32) for _ in range(2))
    for options, expected in GRAM_LOSSES.items():
        np.testing.assert_allclose(GRAM(student, teacher, *options), expected, rtol=1e-5)
    turned = student @ np.linalg.qr(rng.normal(size=(8, 8)))[0].astype(np.float32)
    np.testing.assert_allclose(GRAM(turned, student, 'kept', True), 0, atol=1e-10)
