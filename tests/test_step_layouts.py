"""What the steps do is the same on one device and on eight, whole or in microbatches.

Of a loss whose terms have counts of their own, which most parts of the batch do not contribute to,
and of a model that draws in evaluation.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import toys

from vit_jax.config.run import Parallel, Step
from vit_jax.runtime import sharding
from vit_jax.step import (
    init_state,
    init_variables,
    make_eval_step,
    make_predict_step,
    make_train_step,
    step_keys,
)

MODEL, TASK, TX = toys.Model(), toys.Task(), optax.sgd(1.0)
LAYOUTS = {
    'one': {},
    'jit': {},
    'fsdp': {'fsdp': 8, 'min_split_size': 8},
    'pmap': {'strategy': 'pmap'},
    'slices': {'slices': 2, 'fsdp': 2, 'min_split_size': 8},
}

# These compile as `fsdp` does, which splits more.
DEAR = ('jit', 'slices')


def marked(name, *rest):
    return pytest.param(name, *rest, marks=[pytest.mark.long] * (name in DEAR))


def make_layout(name):
    return sharding.make_layout(
        jax.devices()[: 1 if name == 'one' else 8], Parallel(**LAYOUTS[name])
    )


def init():
    example = {k: jnp.asarray(x[:1]) for k, x in toys.make_batch().items()}
    variables = init_variables(MODEL, TASK, example, seed=0)
    return init_state(variables, TX, seed=0, ema=False)


@functools.cache
def expected():
    """Loss, terms and gradients of the whole batch, by the formula."""
    state, batch = jax.jit(init)(), toys.make_batch()
    keys = step_keys(state, ('augment', *TASK.rngs))

    def loss(params):
        x = jnp.asarray(batch['x'])
        return toys.plain_loss(MODEL.apply({'params': params}, x, train=True, rngs=keys), batch)

    return jax.jit(jax.value_and_grad(loss, has_aux=True))(state.params)


@pytest.mark.slow
@pytest.mark.parametrize(
    ('name', 'accum_steps'),
    [marked(name, 4) for name in LAYOUTS]
    + [pytest.param(name, 1, marks=pytest.mark.long) for name in LAYOUTS],
)
def test_every_term_is_divided_by_its_count_over_the_global_batch(name, accum_steps):
    layout = make_layout(name)
    train_step = make_train_step(MODEL, TASK, TX, Step(accum_steps=accum_steps), layout)
    step = layout.compile_train(train_step, jax.eval_shape(init))
    state = layout.create(init)
    before = jax.tree.map(np.asarray, layout.to_global(state).params)
    state, metrics = step(state, layout.put_batch(toys.make_batch()))
    grads = jax.tree.map(lambda a, b: a - np.asarray(b), before, layout.to_global(state).params)

    (loss, means), wanted = expected()
    found = {k: float(v) for k, v in metrics.items() if not k.endswith('_norm')}
    terms = {k: float(v) for k, v in means.items()} | {'never': 0.0, 'loss': float(loss)}
    assert found == pytest.approx(terms, rel=1e-5)
    assert float(metrics['grad_norm']) == pytest.approx(float(optax.tree.norm(wanted)), rel=1e-5)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-6), grads, wanted)


def eval_batches(order, size):
    """All rows in this order; the last batch may be padded."""
    rows = toys.make_batch()
    for first in range(0, len(order), size):
        index = order[first : first + size]
        padded = np.concatenate([index, np.zeros(size - len(index), int)])
        mask = (np.arange(size) < len(index)).astype(np.float32)
        yield {**{name: x[padded] for name, x in rows.items()}, 'mask': mask}


def draws(name, order, size, seed=0):
    """What the model masked in every row, in the rows' own order; and the evaluation's sums."""
    layout = make_layout(name)
    options = {'seed': seed, 'axis_name': layout.axis_name}
    predict = layout.compile_eval(make_predict_step(MODEL, TASK, **options))
    evaluate = layout.compile_eval(make_eval_step(MODEL, TASK, **options))
    variables = layout.create(lambda: init().variables)
    found, total, count = {}, 0.0, 0.0
    for batch in eval_batches(order, size):
        placed = layout.put_batch(batch)
        predictions, rest = jax.device_get(predict(variables, placed))
        np.testing.assert_array_equal(predictions['masked'], predictions['method'])
        assert set(rest) == {'there', 'index', 'mask'}
        real = rest['mask'] > 0
        found |= dict(zip(rest['index'][real], predictions['masked'][real], strict=True))
        one, rows = evaluate(variables, placed)['masked']
        total, count = total + float(one), count + float(rows)
    return np.stack([found[i] for i in range(toys.ROWS)]), total, count


@functools.cache
def in_order():
    return draws('one', np.arange(toys.ROWS), toys.ROWS)


@pytest.mark.slow
@pytest.mark.parametrize('name', [marked(name) for name in LAYOUTS])
def test_what_is_drawn_in_evaluation_depends_on_the_seed_and_the_example_alone(name):
    """In another order, in batches of 24 of which the second is padded."""
    order = np.random.default_rng(0).permutation(toys.ROWS)
    masked, total, count = draws(name, order, 24)
    wanted, of_order, _ = in_order()
    np.testing.assert_array_equal(masked, wanted)
    assert (total, count) == (pytest.approx(of_order, abs=1e-4), toys.ROWS)
    dropped = wanted == 0
    assert 0.3 < dropped.mean() < 0.7
    assert (dropped != dropped[:1]).any(axis=(1, 2))[1:].all()


@pytest.mark.slow
def test_another_seed_draws_anew():
    masked, _, _ = draws('one', np.arange(toys.ROWS), toys.ROWS, seed=1)
    assert ((masked == 0) != (in_order()[0] == 0)).mean() > 0.3


@pytest.mark.slow
@pytest.mark.parametrize('name', [pytest.param('one', marks=pytest.mark.long), 'pmap'])
def test_without_an_index_an_example_is_its_position_in_the_global_batch(name):
    layout = make_layout(name)
    step = make_predict_step(MODEL, TASK, axis_name=layout.axis_name)
    batch = {k: x for k, x in toys.make_batch().items() if k != 'index'}
    variables = layout.create(lambda: init().variables)
    predictions, _ = layout.compile_eval(step)(variables, layout.put_batch(batch))
    np.testing.assert_array_equal(predictions['masked'], in_order()[0])
