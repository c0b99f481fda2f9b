"""Parameters that start to learn later than the others."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from vit_jax.errors import UserError
from vit_jax.optim import make as optim

PARAMS = {'body': jnp.ones(3), 'head': {'prototypes': jnp.ones(2), 'fc': jnp.ones(2)}}


def run(steps, **config):
    """The parameters after each step of AdamW on gradients that differ from step to step."""
    options = {'name': 'adamw', 'lr': 0.1, 'weight_decay': 0.1, 'decay_mask': ''} | config
    to_steps = {'10%': 2, '0': 0}.__getitem__
    tx, _ = optim.make(PARAMS, 20, to_steps, **options)

    @jax.jit
    def step(params, state, k):
        grads = jax.tree.map(lambda x: x * jnp.sin(k + 1.0), PARAMS)
        updates, state = tx.update(grads, state, params)
        return jax.tree.map(jnp.add, params, updates), state

    params, state, found = PARAMS, tx.init(PARAMS), []
    for k in range(steps):
        params, state = step(params, state, float(k))
        found.append(jax.device_get(params))
    return found


def test_delayed_parameters_stay_and_then_learn_as_if_their_rate_had_been_zero():
    plain, late = run(4), run(4, lr_delays=(('prototypes', '10%'),))
    for before, after in zip(plain, late, strict=True):
        np.testing.assert_array_equal(before['body'], after['body'])
        np.testing.assert_array_equal(before['head']['fc'], after['head']['fc'])
    waiting = [each['head']['prototypes'] for each in late]
    np.testing.assert_array_equal(waiting[:2], 1)
    # Adam's moments know the gradients of the first two steps: the third update is the same but for
    # the decay of another value.
    third = waiting[2] - waiting[1]
    free = plain[2]['head']['prototypes'] - plain[1]['head']['prototypes']
    decay = 0.1 * 0.1 * (plain[1]['head']['prototypes'] - 1)
    np.testing.assert_allclose(third, free + decay, rtol=1e-4)


def test_mistakes():
    with pytest.raises(UserError, match=r"config.optim.lr_delays: 'heads' matches no parameter"):
        run(1, lr_delays=(('heads', '10%'),))
    with pytest.raises(UserError, match=r'config.optim.lr_delays=.* write'):
        run(1, lr_delays=('prototypes',))
