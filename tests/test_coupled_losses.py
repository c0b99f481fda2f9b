"""A loss that couples rows is the same on any devices and in any microbatches.

Its gradient too: the model drops units, is called twice, and has a scalar among its outputs.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import contrastive

from vit_jax.config.run import Durations, Parallel, Schedule, Step
from vit_jax.errors import UserError
from vit_jax.nn import stochastic
from vit_jax.ops import terms
from vit_jax.runtime import sharding
from vit_jax.step import (
    Optimizer,
    TrainApply,
    init_state,
    init_variables,
    make_predict_step,
    make_train_step,
    step_keys,
)

pytestmark = pytest.mark.slow

MODEL, TASK, TX = contrastive.Model(), contrastive.Task(), optax.sgd(1.0)
LAYOUTS = {
    'one': {},
    'jit': {},
    'fsdp': {'fsdp': 8, 'min_split_size': 8},
    'pmap': {'strategy': 'pmap'},
    'slices': {'slices': 2, 'fsdp': 2, 'min_split_size': 8},
}


def init():
    example = {k: jnp.asarray(x[:1]) for k, x in contrastive.make_batch().items()}
    variables = init_variables(MODEL, TASK, example, seed=0)
    return init_state(variables, TX, seed=0, ema=False)


@functools.cache
def expected():
    """Loss and gradients of the whole batch, differentiated in one piece."""
    state = jax.jit(init)()
    batch = {k: jnp.asarray(x) for k, x in contrastive.make_batch().items()}
    keys = {'dropout': step_keys(state, ('augment', 'dropout'))['dropout']}

    def loss(params):
        apply = TrainApply(MODEL, params, {}, keys, None, state.step)
        with stochastic.example_positions(jnp.arange(contrastive.ROWS)):
            found = TASK.loss(TASK.outputs(apply, batch), batch)
        return terms.means(found)['pairs']

    return jax.jit(jax.value_and_grad(loss))(state.params)


def stepped(name, accum_steps):
    """The metrics of a step and the gradients, which it takes as they are."""
    layout = sharding.make_layout(
        jax.devices()[: 1 if name == 'one' else 8], Parallel(**LAYOUTS[name])
    )
    train_step = make_train_step(MODEL, TASK, TX, Step(accum_steps=accum_steps), layout)
    step = layout.compile_train(train_step, jax.eval_shape(init))
    state = layout.create(init)
    before = jax.tree.map(np.asarray, layout.to_global(state).params)
    state, metrics = step(state, layout.put_batch(contrastive.make_batch()))
    after = layout.to_global(state).params
    return metrics, jax.tree.map(lambda a, b: a - np.asarray(b), before, after)


@pytest.mark.parametrize(
    ('name', 'accum_steps'),
    [('fsdp', 2), ('pmap', 2)]
    + [
        pytest.param(*case, marks=pytest.mark.long)
        for case in [
            ('one', 1),
            ('one', 2),
            ('one', 4),
            ('jit', 1),
            ('jit', 2),
            ('jit', 4),
            ('fsdp', 1),
            ('fsdp', 4),
            ('pmap', 1),
            ('pmap', 4),
            ('slices', 2),
        ]
    ],
)
def test_loss_and_gradients_are_those_of_the_whole_batch(name, accum_steps):
    metrics, grads = stepped(name, accum_steps)
    loss, wanted = expected()
    assert float(metrics['loss']) == pytest.approx(float(loss), rel=1e-6)
    assert float(metrics['grad_norm']) == pytest.approx(float(optax.tree.norm(wanted)), rel=1e-5)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-6), grads, wanted)
    assert abs(wanted['scale']) > 1e-3


@pytest.mark.parametrize('name', ['pmap', pytest.param('jit', marks=pytest.mark.long)])
def test_predictions_compare_all_rows_of_the_batch(name):
    class Others(contrastive.Task):
        def predict(self, apply, batch):
            z = apply(*self.inputs(batch))['z']
            return {'products': z @ z.T}

    layout = sharding.make_layout(jax.devices(), Parallel(**LAYOUTS[name]))
    step = make_predict_step(MODEL, Others(), axis_name=layout.axis_name)
    variables = layout.create(lambda: {'params': init().params})
    batch = contrastive.make_batch()
    found, rest = layout.compile_eval(step)(variables, layout.put_batch(batch))
    np.testing.assert_array_equal(rest['index'], batch['index'])
    z = MODEL.apply({'params': jax.jit(init)().params}, jnp.asarray(batch['x'][:, 0]))['z']
    np.testing.assert_allclose(found['products'], z @ z.T, atol=1e-6)


def test_each_call_of_the_model_draws_for_itself():
    state = jax.jit(init)()
    apply = TrainApply(MODEL, state.params, {}, {'dropout': jax.random.key(0)}, None, state.step)
    ones = jnp.ones((8, contrastive.WIDTH))
    first, second = (apply(ones, method='embed', train=True) for _ in range(2))
    assert not np.allclose(first, second)


def test_an_average_has_no_gradient_and_needs_one_to_be_kept():
    state = jax.jit(init)()
    ones = jnp.ones((2, contrastive.WIDTH))

    def summed(params, average):
        apply = TrainApply(MODEL, params, {}, {'dropout': jax.random.key(0)}, average, state.step)
        return apply.average(ones)['z'].sum()

    # Even where the average is the parameters themselves.
    value, grads = jax.value_and_grad(lambda params: summed(params, params))(state.params)
    assert value != 0 and not any(map(np.any, jax.tree.leaves(grads)))
    plain = MODEL.apply({'params': state.params}, ones)['z'].sum()
    assert float(value) == pytest.approx(float(plain))
    with pytest.raises(UserError, match=r'config.step.ema_decay=0.*schedule-free'):
        summed(state.params, None)


def test_outputs_without_rows_are_refused_by_name():
    class Summed(contrastive.Task):
        def outputs(self, apply, batch):
            return {**super().outputs(apply, batch), 'extra': jnp.ones((3, 2))}

    step = make_train_step(MODEL, Summed(), TX, Step(accum_steps=2))
    with pytest.raises(ValueError, match=r'extra.*row.*32 examples'):
        jax.eval_shape(step, jax.eval_shape(init), contrastive.make_batch())


def test_the_average_follows_its_schedule():
    average = Step(ema_decay=0.5, ema_schedule=Schedule(name='linear', final=1.0))
    step = jax.jit(make_train_step(MODEL, TASK, Optimizer(TX, times=Durations(1, 1, 4)), average))
    state = jax.jit(init)()
    state = state.replace(ema=state.params)
    for k, decay in enumerate([0.5, 0.625, 0.75]):
        before, (state, _) = state, step(state, contrastive.make_batch(k))
        jax.tree.map(
            lambda old, new, ema, d=decay: np.testing.assert_allclose(
                ema, d * old + (1 - d) * new, atol=1e-6
            ),
            before.ema,
            state.params,
            state.ema,
        )
