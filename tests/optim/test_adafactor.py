"""The optimizer of Zhai et al., 2022, against its equations in NumPy."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers.sections import optimizer

from vit_jax.config import load
from vit_jax.errors import UserError
from vit_jax.tree_paths import param_paths

STEPS = 50
SHAPES = {
    'head/kernel': (48, 40),  # factored
    'attention/qkv/kernel': (48, 3, 2, 33),  # over its two longest axes, head by head
    'patch_embed/kernel': (4, 4, 3, 48),  # two long axes are not there
    'norm/scale': (48,),
}


def heavy_tailed(step):
    """Gradients of Student's t with two degrees of freedom, whose square has no mean."""
    rng = np.random.default_rng(step)
    return {k: 1e-3 * rng.standard_t(2, shape).astype(np.float32) for k, shape in SHAPES.items()}


def start():
    rng = np.random.default_rng(99)
    return {k: rng.normal(size=shape).astype(np.float32) for k, shape in SHAPES.items()}


def reference(gradients, lr, decay, cap=0.999, momentum=0.9, first=0):
    """The equations in float64, one parameter at a time, second moments factored by hand."""
    parameters = {k: v.astype(np.float64) for k, v in start().items()}
    rows, columns, second, moment = {}, {}, {}, {}
    for step in range(first, first + STEPS):
        beta = min(cap, 1 - (step + 1.0) ** -0.8)
        for name, gradient in gradients(step).items():
            g = gradient.astype(np.float64)
            square = g**2 + 1e-30
            long = sorted(np.argsort(g.shape)[-2:]) if g.ndim > 1 else []
            if len(long) == 2 and min(g.shape[a] for a in long) >= 32:
                a, b = long
                # Means over either axis, kept as axes of length one.
                r, c = square.mean(b, keepdims=True), square.mean(a, keepdims=True)
                rows[name] = beta * rows.get(name, 0) + (1 - beta) * r
                columns[name] = beta * columns.get(name, 0) + (1 - beta) * c
                v = rows[name] * columns[name] / rows[name].mean(a, keepdims=True)
            else:
                second[name] = v = beta * second.get(name, 0) + (1 - beta) * square
            moment[name] = momentum * moment.get(name, 0) + (1 - momentum) * g / np.sqrt(v)
            strength = decay.get(name, 0.0)
            parameters[name] -= lr(step) * (moment[name] + strength * parameters[name])
    return parameters


def train(first=0, **options):
    params = jax.tree.map(jnp.asarray, dict(start()))
    options = {'schedule': {'name': 'linear', 'warmup': '10'}, 'weight_decay': 0.03} | options
    tx, lr = optimizer(
        params, 100, name='adafactor_zhai', lr=8e-3,
        decay_mults=(('^head/kernel$', 100.0),), **options,
    )  # fmt: skip

    def step(carried, gradients):
        params, state = carried
        updates, state = tx.update(gradients, state, params)
        return (optax.apply_updates(params, updates), state), None

    @jax.jit
    def run(params, gradients):
        state = tx.init(params)
        if first:
            state = optax.tree.set(state, count=jnp.int32(first))
        return jax.lax.scan(step, (params, state), gradients)[0]

    every = [heavy_tailed(step) for step in range(first, first + STEPS)]
    params, state = run(params, jax.tree.map(lambda *x: np.stack(x), *every))
    return jax.device_get(params), state, lr


DECAY = {'head/kernel': 3.0, 'attention/qkv/kernel': 0.03, 'patch_embed/kernel': 0.03}


@pytest.mark.slow
def test_fifty_steps_are_those_of_the_equations():
    params, _, lr = train(dtype_momentum='float32')
    expected = reference(heavy_tailed, lambda step: float(lr(step)), DECAY)
    for name, value in params.items():
        moved = expected[name] - start()[name]
        np.testing.assert_allclose(value - start()[name], moved, rtol=2e-3, atol=2e-6, err_msg=name)


@pytest.mark.slow
def test_the_momentum_is_kept_in_bfloat16():
    params, state, lr = train()
    expected = reference(heavy_tailed, lambda step: float(lr(step)), DECAY)
    for name, value in params.items():
        moved = np.linalg.norm(expected[name] - start()[name])
        assert np.linalg.norm(value - expected[name]) < 0.03 * moved, name
    kept = [leaf for path, leaf in param_paths(state).items() if '/ema/' in path]
    assert len(kept) == len(SHAPES)
    assert {leaf.dtype for leaf in kept} == {jnp.dtype('bfloat16')}


def test_the_memory_of_second_moments_ends_at_a_thousand_steps():
    """At step 10^6 the uncapped rate would hardly learn anything of the new gradients."""
    options = dict(weight_decay=0.0, schedule={'name': 'constant'}, dtype_momentum='float32')
    capped, _, _ = train(first=1_000_000, **options)
    expected = reference(heavy_tailed, lambda step: 8e-3, {}, first=1_000_000)
    for name, value in capped.items():
        moved = expected[name] - start()[name]
        np.testing.assert_allclose(value - start()[name], moved, rtol=2e-3, atol=2e-4, err_msg=name)


@pytest.mark.slow
def test_a_fused_projection_is_factored_as_separate_ones():
    """[D 3 H K] has the second moments of three kernels [D H K]."""
    gradient = heavy_tailed(0)['attention/qkv/kernel']
    tx, _ = optimizer({'kernel': jnp.zeros(gradient.shape)}, 100, name='adafactor_zhai', lr=1.0)

    @jax.jit
    def update(gradient):
        params = {'kernel': jnp.zeros_like(gradient)}
        return tx.update({'kernel': gradient}, tx.init(params), params)[0]['kernel']

    together = np.asarray(update(gradient))
    for i in range(3):
        np.testing.assert_allclose(together[:, i], update(gradient[:, i]), rtol=1e-6)


def test_every_keyword_is_reached_from_the_command_line():
    flags = ('clipping_threshold=1.0', 'clipping_threshold=None', 'beta2_cap=0.95', 'momentum=None')
    flags += ('dtype_momentum=float32', 'decay_rate=0.7', 'min_dim_size_to_factor=64', 'eps=1e-20')
    config = load.load('experiments/scaling/zhai.py', [f'optim.{f}' for f in flags])
    assert config.optim.clipping_threshold is None and config.optim.momentum is None
    assert (config.optim.beta2_cap, config.optim.eps) == (0.95, 1e-20)


@pytest.mark.parametrize('option', [{'beta2_cap': 1.5}, {'momentum': -0.1}, {'beta2': 0.9}])
def test_mistakes_are_refused(option):
    with pytest.raises(UserError, match=next(iter(option))):
        train(**option)
