"""Parameters that start to learn later than the others."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.sections import optimizer

from vit_jax.errors import UserError

PARAMS = {'body': jnp.ones(3), 'head': {'prototypes': jnp.ones(2), 'fc': jnp.ones(2)}}


def run(steps, **config):
    """The parameters after each step of AdamW on gradients that differ from step to step."""
    options = {'name': 'adamw', 'lr': 0.1, 'weight_decay': 0.1, 'decay_mask': ''} | config
    tx, _ = optimizer(PARAMS, 20, **options)

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


def test_two_stages_of_warm_up_are_those_of_eomt():
    """The rates of TwoStageWarmupPolySchedule of its authors, restated."""
    schedule = {'name': 'polynomial', 'warmup': '10%'}
    options = {'name': 'sgd', 'weight_decay': 0.0, 'schedule': schedule}
    found = run(20, **options, lr_delays=(('body', '10%', '5'),))
    before, rates = {'body': 1.0, 'fc': 1.0}, []
    for k, params in enumerate(found):
        now = {'body': params['body'][0], 'fc': params['head']['fc'][0]}
        rates.append([(before[name] - now[name]) / np.sin(k + 1.0) for name in ('fc', 'body')])
        before = now

    def rate(step, delay, warmup):
        first = delay + warmup
        if step < first:
            return max(step - delay, 0) / warmup
        return (1 - (step - first) / (20 - first)) ** 0.9

    wanted = [[0.1 * rate(k, 0, 2), 0.1 * rate(k, 2, 5)] for k in range(20)]
    np.testing.assert_allclose(rates, wanted, rtol=1e-4, atol=2e-6)


def test_mistakes():
    with pytest.raises(UserError, match=r"config.optim.lr_delays: 'heads'"):
        run(1, lr_delays=(('heads', '10%'),))
    for rules in ('prototypes',), (('prototypes', '0', '0', '0'),):
        with pytest.raises(UserError, match=r'config.optim.lr_delays=.* write'):
            run(1, lr_delays=rules)
