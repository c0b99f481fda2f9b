"""Variants of Adam: steps against PyTorch, or against the equations of their papers."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.sections import optimizer

from vit_jax.errors import UserError

STEPS, RATE, DECAY = 6, 0.02, 0.1
START = np.random.default_rng(0).normal(size=(3, 4))
GRADS = np.random.default_rng(1).normal(size=(STEPS, 3, 4))


def steps(name: str, lr: float = RATE, grads: np.ndarray = GRADS, **options) -> list[np.ndarray]:
    """The parameter after each of our steps."""
    params = {'kernel': jnp.asarray(START, jnp.float32)}
    tx, _ = optimizer(params, 100, (), name=name, lr=lr, **options)
    state, found, update = tx.init(params), [], jax.jit(tx.update)
    for grad in grads:
        updates, state = update({'kernel': jnp.asarray(grad, jnp.float32)}, state, params)
        params = {'kernel': params['kernel'] + updates['kernel']}
        found.append(np.asarray(params['kernel']))
    return found


@pytest.mark.parametrize(('name', 'decoupled'), [('nadam', False), ('nadamw', True)])
def test_nadam_is_torchs_with_its_last_momentum(name, decoupled):
    """PyTorch's momentum grows to b1; here it has arrived."""
    torch = pytest.importorskip('torch')
    theirs = torch.nn.Parameter(torch.tensor(START, dtype=torch.float32))
    optim = torch.optim.NAdam(
        *([theirs], RATE),
        weight_decay=DECAY,
        momentum_decay=1e6,
        decoupled_weight_decay=decoupled,
    )
    for grad, found in zip(GRADS, steps(name, weight_decay=DECAY), strict=True):
        theirs.grad = torch.tensor(grad, dtype=torch.float32)
        optim.step()
        np.testing.assert_allclose(found, theirs.detach().numpy(), rtol=2e-5, atol=1e-6)


def test_adopt_follows_algorithm_2():
    """With clipping (section 4); the first step only begins the second moment."""
    x, m, v = START.copy(), 0.0, None
    for t, (grad, found) in enumerate(
        zip(GRADS, steps('adopt', weight_decay=DECAY, b2=0.9), strict=True)
    ):
        update = 0.0
        if t:
            bound = t**0.25
            m = 0.9 * m + 0.1 * np.clip(grad / np.maximum(np.sqrt(v), 1e-6), -bound, bound)
            update = m
        v = grad**2 if v is None else 0.9 * v + 0.1 * grad**2
        x = x - RATE * (update + DECAY * x)
        np.testing.assert_allclose(found, x, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize('mix_steps', [0, 4])
def test_ademamix_follows_its_equations(mix_steps):
    """Equations of section 3, with the schedules of appendix A.1."""
    x, m1, m2, v, b1, b2, b3, alpha = START.copy(), 0.0, 0.0, 0.0, 0.9, 0.999, 0.99, 5.0
    found = steps('ademamix', weight_decay=DECAY, b3=b3, alpha=alpha, mix_steps=mix_steps)
    for t, grad in enumerate(GRADS):
        share = min(t / mix_steps, 1.0) if mix_steps else 1.0
        first, last = math.log(b1), math.log(b3)
        slow = math.exp(first * last / ((1 - share) * last + share * first))
        m1, m2 = b1 * m1 + (1 - b1) * grad, slow * m2 + (1 - slow) * grad
        v = b2 * v + (1 - b2) * grad**2
        fast, scale = m1 / (1 - b1 ** (t + 1)), np.sqrt(v / (1 - b2 ** (t + 1))) + 1e-8
        x = x - RATE * ((fast + share * alpha * m2) / scale + DECAY * x)
        np.testing.assert_allclose(found[t], x, rtol=2e-5, atol=2e-6)


def test_prodigy_follows_algorithm_4():
    """With bias correction, and decay by the rate of the step."""
    x, m, v, s, r, d, d0, b1, b2 = START.copy(), 0.0, 0.0, 0.0, 0.0, 0.01, 0.01, 0.9, 0.999
    b3, estimates, grads = b2**0.5, [], GRADS + 3.0  # mostly downhill, so that the estimate grows
    for t, (grad, found) in enumerate(
        zip(grads, steps('prodigy', 1.0, grads, weight_decay=DECAY, d0=d0), strict=True), 1
    ):
        rate = d * np.sqrt(1 - b2**t) / (1 - b1**t)
        m, v = b1 * m + (1 - b1) * d * grad, b2 * v + (1 - b2) * (d * grad) ** 2
        r = b3 * r + d / d0 * rate * np.vdot(grad, START - x)
        s = b3 * s + d / d0 * rate * grad
        d = max(d, r / np.abs(s).sum())
        x = x - rate * (m / (np.sqrt(v) + d * 1e-8) + DECAY * x)
        estimates.append(d)
        np.testing.assert_allclose(found, x, rtol=2e-5, atol=2e-6)
    assert estimates[-1] > d0


def test_prodigy_survives_a_rate_of_zero_and_zero_gradients():
    """A warm-up begins at 0."""
    warm = {'schedule': {'name': 'linear', 'warmup': '3'}}
    assert np.isfinite(steps('prodigy', 1.0, **warm)).all()
    assert np.isfinite(steps('prodigy', 1.0, np.zeros_like(GRADS))).all()


def test_a_muon_whose_pattern_matches_nothing_is_refused():
    with pytest.raises(UserError, match='matrices'):
        steps('muon')
    assert np.abs(steps('muon', matrices='kernel')[0] - START).max() > 0
