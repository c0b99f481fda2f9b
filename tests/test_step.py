"""The pure train step, on one device.

The numbers in `golden/step.json` are those of one training of a tiny ViT. After a change
that is meant to move them: REGENERATE_GOLDEN=1 pytest tests/test_step.py -k golden
"""

import functools
import json
import os
import pathlib

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import toys
from helpers.sections import optimizer

from vit_jax.config.run import Step
from vit_jax.models import vit
from vit_jax.ops import terms
from vit_jax.profiling import flops
from vit_jax.runtime import sharding
from vit_jax.step import init_state, init_variables, make_eval_step, make_train_step
from vit_jax.tasks import classify
from vit_jax.trainer.meter import Diverged, Meter
from vit_jax.tree_paths import param_paths

CLASSES = 4
GOLDEN = pathlib.Path(__file__).parent / 'golden' / 'step.json'
DROPS = {'dropout': 0.2, 'attention_dropout': 0.1, 'drop_path': 0.1}
MIXING = {'label_smoothing': 0.1, 'mixup': 0.8, 'cutmix': 1.0}


def tiny_vit(**fields):
    shape = {'patch_size': 4, 'width': 16, 'depth': 1, 'mlp_dim': 32, 'num_heads': 2}
    return vit.Model(**{'num_classes': CLASSES, 'pool': 'gap'} | shape | fields)


def make_batch(step=0, size=8):
    rng = np.random.default_rng(step)
    return {
        'image': jnp.asarray(rng.integers(0, 256, (size, 8, 8, 3), dtype=np.uint8)),
        'label': jnp.asarray(rng.integers(0, CLASSES, size), jnp.int32),
    }


@functools.cache
def variables_of(model, task):
    """Variables whose zero-initialized parameters are not zero, so that all gradients flow."""
    variables = jax.jit(lambda: init_variables(model, task, make_batch(size=1), seed=0))()
    rng = np.random.default_rng(0)
    params = jax.tree.map(
        lambda x: x + np.float32(0.05) * rng.normal(size=x.shape).astype(np.float32),
        jax.device_get(variables['params']),
    )
    return {**variables, 'params': jax.tree.map(jnp.asarray, params)}


def start(model, task, tx, *, ema=False):
    return init_state(variables_of(model, task), tx, 0, ema)


class Training:
    """The states before and after each of some steps, and the metrics of every step."""

    def __init__(self, model, task, tx, *, steps=3, ema=False, **options):
        self.step = jax.jit(make_train_step(model, task, tx, Step(**options)))
        self.states, self.metrics = [start(model, task, tx, ema=ema)], []
        for i in range(steps):
            state, numbers = self.step(self.states[-1], make_batch(i))
            self.states.append(state)
            self.metrics.append(as_floats(numbers))


def as_floats(metrics):
    return {name: float(value) for name, value in metrics.items()}


@functools.cache
def random_training(accum_steps=1, **fields):
    """With dropout, stochastic depth, mixup and cutmix on."""
    model = tiny_vit(**DROPS | fields)
    tx = optax.sgd(0.5, momentum=0.9)
    options = {'accum_steps': accum_steps, 'ema_decay': 0.75}
    return Training(model, classify.Task(**MIXING), tx, ema=True, **options)


@functools.cache
def plain_training(dtype='float32'):
    return Training(tiny_vit(dtype=dtype), classify.Task(), optax.adamw(1e-3))


def assert_trees_close(a, b, atol):
    for path, x in param_paths(a).items():
        np.testing.assert_allclose(x, param_paths(b)[path], rtol=0, atol=atol, err_msg=path)


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize(
    ('accum_steps', 'fields'),
    [(2, {}), (4, {'scan': True, 'depth': 2})],
    ids=['blocks', 'scan'],
)
def test_accumulation_is_the_large_batch(accum_steps, fields):
    whole, parts = random_training(**fields), random_training(accum_steps, **fields)
    for a, b in zip(whole.metrics, parts.metrics, strict=True):
        assert a == pytest.approx(b, rel=1e-5)
    assert_trees_close(whole.states[-1], parts.states[-1], atol=2e-6)


@pytest.mark.slow
def test_randomness_depends_on_the_step_and_the_seed_alone():
    training = random_training()
    state = training.states[0]
    key = jax.random.key_data(jax.random.key(1))
    states = [state, state, state.replace(step=state.step + 1), state.replace(key=key)]
    losses = [float(training.step(state, make_batch())[1]['loss']) for state in states]
    assert losses[0] == losses[1]
    # Other masks and mixes change the loss by far more than rounding does.
    assert min(abs(np.diff(losses[1:]))) > 1e-3


@pytest.mark.slow
def test_a_state_that_went_through_numpy_continues_bit_for_bit():
    training = random_training()
    state = jax.tree.map(np.asarray, training.states[1])
    for i in (1, 2):
        state, metrics = training.step(state, make_batch(i))
        assert as_floats(metrics) == training.metrics[i]
    assert_trees_close(state, training.states[3], atol=0)


@pytest.mark.slow
def test_ema_is_the_weighted_mean_and_what_is_evaluated():
    p0, p1, p2 = (state.params for state in random_training().states[:3])
    mean = jax.tree.map(lambda a, b, c: 0.75**2 * a + 0.75 * 0.25 * b + 0.25 * c, p0, p1, p2)
    state = random_training().states[2]
    assert_trees_close(state.ema, mean, atol=1e-6)
    assert state.variables['params'] is state.ema


@pytest.mark.slow
def test_without_ema_the_parameters_are_evaluated():
    state = plain_training().states[1]
    assert state.ema is None
    assert state.variables['params'] is state.params


@pytest.mark.slow
def test_metrics_are_of_the_gradient_the_update_and_the_new_parameters():
    model, task = tiny_vit(), classify.Task()
    before, after = plain_training().states[:2]
    metrics = plain_training().metrics[0]

    def loss(params):
        outputs = model.apply({'params': params}, *task.inputs(make_batch()), train=False)
        return terms.means(task.loss(outputs, make_batch()))['loss']

    value, grads = jax.jit(jax.value_and_grad(loss))(before.params)
    assert metrics['loss'] == pytest.approx(float(value), rel=1e-6)
    assert metrics['grad_norm'] == pytest.approx(norm(grads), rel=1e-5)
    update = jax.tree.map(jnp.subtract, after.params, before.params)
    assert metrics['update_norm'] == pytest.approx(norm(update), rel=1e-4)
    assert metrics['param_norm'] == pytest.approx(norm(after.params), rel=1e-6)
    assert int(after.step) == 1


def norm(tree):
    return float(jnp.sqrt(sum(jnp.sum(x**2) for x in jax.tree.leaves(tree))))


@pytest.mark.slow
def test_bfloat16_computes_near_float32_and_keeps_float32_states():
    exact, half = plain_training(), plain_training('bfloat16')
    leaves = jax.tree.leaves((half.states[-1].params, half.states[-1].opt_state))
    assert {leaf.dtype.name for leaf in leaves} == {'float32', 'int32'}
    assert half.metrics[2]['loss'] == pytest.approx(exact.metrics[2]['loss'], rel=0.02)
    assert half.metrics[2]['loss'] != exact.metrics[2]['loss']


class Normalized(nn.Module):
    """A linear model after batch normalization, whose running mean is no parameter."""

    @nn.compact
    def __call__(self, images, train=False):
        x = nn.BatchNorm(use_running_average=not train, momentum=0.5)(images.mean((1, 2)))
        return {'logits': nn.Dense(CLASSES)(x)}


@pytest.mark.slow
@pytest.mark.parametrize('accum_steps', [1, 2])
def test_other_collections_are_updated_by_every_microbatch(accum_steps):
    task, tx = classify.Task(), optax.sgd(0.1)
    model = Normalized()
    state = start(model, task, tx)
    step = jax.jit(make_train_step(model, task, tx, Step(accum_steps=accum_steps)))
    after, _ = step(state, make_batch())
    (image,) = task.inputs(make_batch())
    expected = np.zeros(3)
    for j in range(accum_steps):
        expected = 0.5 * expected + 0.5 * np.asarray(image[j::accum_steps]).mean((0, 1, 2))
    running = after.variables['batch_stats']['BatchNorm_0']['mean']
    np.testing.assert_allclose(running, expected, atol=1e-6)


@pytest.mark.slow
def test_eval_step_leaves_padding_and_dropout_out():
    model, task = tiny_vit(**DROPS), classify.Task(**MIXING)
    variables = random_training().states[0].variables
    batch = {**make_batch(), 'mask': jnp.array([1.0, 1, 1, 0, 1, 1, 1, 0])}
    sums = jax.jit(make_eval_step(model, task))(variables, batch)
    logits = jax.jit(tiny_vit().apply)(variables, *task.inputs(batch))['logits']
    correct = np.asarray(logits.argmax(-1) == batch['label'])[batch['mask'] == 1]
    np.testing.assert_allclose(sums['accuracy'], (correct.sum(), 6))


@pytest.mark.slow
def test_the_old_state_is_donated():
    layout = sharding.make_layout(jax.devices()[:1])
    model, task, tx = tiny_vit(), classify.Task(), optax.adamw(1e-3)

    def init():
        return start(model, task, tx, ema=True)

    state = layout.create(init)
    train_step = make_train_step(model, task, tx, Step(ema_decay=0.9))
    step = layout.compile_train(train_step, jax.eval_shape(init))
    new, _ = step(state, layout.put_batch(make_batch()))
    large = [x for x in jax.tree.leaves((state.params, state.opt_state, state.ema)) if x.ndim]
    assert all(x.is_deleted() for x in large)
    assert not any(x.is_deleted() for x in jax.tree.leaves(new))


@pytest.mark.slow
def test_training_that_is_not_finite_is_noticed():
    meter = Meter(0, optax.constant_schedule(0.1), None)
    broken = {**make_batch(), 'image': jnp.full((8, 8, 8, 3), jnp.nan)}
    training = plain_training()
    state = training.states[0]
    for i, batch in enumerate([make_batch(), broken, make_batch()], start=1):
        state, metrics = training.step(state, batch)
        meter.add(i, metrics, {})
    with pytest.raises(Diverged, match=r'step 2: .* is nan'):
        meter.check_finite()


@pytest.mark.slow
@pytest.mark.parametrize('accum_steps', [1, 2])
def test_a_step_that_is_not_finite_can_be_skipped_and_leaves_no_trace(accum_steps):
    model, task, tx = Normalized(), classify.Task(), optax.adam(1e-2)
    make = functools.partial(make_train_step, model, task, tx)
    options = {'ema_decay': 0.9, 'accum_steps': accum_steps}
    step = jax.jit(make(Step(**options, max_skips=1)))
    broken = {**make_batch(), 'image': jnp.full((8, 8, 8, 3), jnp.nan)}
    state = start(model, task, tx, ema=True)
    before, _ = step(state, make_batch(1))
    skipped, metrics = step(before, broken)
    assert np.isnan(metrics['loss'])
    assert int(skipped.step) == 2
    assert_same(skipped.replace(step=before.step), before)
    careless = jax.jit(make(Step(**options)))
    assert_trees_close(before.params, careless(state, make_batch(1))[0].params, atol=1e-7)
    assert np.isnan(careless(before, broken)[0].params['Dense_0']['kernel']).any()


@pytest.mark.slow
def test_schedules_follow_the_step_where_steps_are_skipped_and_moments_the_updates():
    model, task, batch = tiny_vit(), classify.Task(), make_batch()
    broken = {**batch, 'image': jnp.full((8, 8, 8, 3), jnp.nan)}
    options = {'name': 'adam', 'lr': 1e-4, 'schedule': {'name': 'linear'}}
    options |= {'lr_delays': (('head/bias', '4'),)}
    tx, rate = optimizer(start(model, task, optax.identity()).params, 6, **options)
    training = Training(model, task, tx, steps=0, max_skips=5)
    state = training.states[0]
    for i in range(5):
        before = state
        state, _ = training.step(state, broken if i in (1, 2, 3) else batch)
    moments = optax.tree_utils.tree_get_all_with_path(state.opt_state, 'count')
    assert sorted(int(count) for _, count in moments) == [2, 5], 'of Adam, of the schedule'
    # After two gradients that are nearly equal an update of Adam is the rate and the sign of each.
    moved = state.params['head']['bias'] - before.params['head']['bias']
    np.testing.assert_allclose(np.abs(moved), float(rate(4)), rtol=1e-2)


@pytest.mark.slow
def test_counting_first_costs_no_second_forward_pass():
    """Unless a count is made of the outputs, which are then needed."""
    model, tx, batch = toys.Model(hidden=64), optax.sgd(1.0), toys.make_batch()

    def cost(task):
        variables = init_variables(model, task, batch, seed=0)
        step = jax.jit(make_train_step(model, task, tx, Step(accum_steps=4)))
        compiled = step.lower(init_state(variables, tx, 0, ema=False), batch).compile()
        return compiled.cost_analysis()['flops']

    microbatch = jnp.zeros((len(batch['x']) // 4, *batch['x'].shape[1:]))
    forward = flops.forward_flops(model, microbatch, rngs=toys.Task.rngs)
    assert cost(toys.Task(counts_outputs=True)) - cost(toys.Task()) > 0.9 * forward > 0


def assert_same(a, b):
    jax.tree.map(np.testing.assert_array_equal, a, b)


@pytest.mark.slow
def test_golden_step():
    config = {'name': 'adamw', 'lr': 0.01, 'eps': 1e-4, 'weight_decay': 0.1, 'clip_norm': 1.0}
    model, task = tiny_vit(depth=2, **DROPS), classify.Task(**MIXING)
    params = start(model, task, optax.identity()).params
    schedule = {'name': 'cosine', 'warmup': '2'}
    order = model.layer_order()
    tx, _ = optimizer(params, 10, order, **config, layer_decay=0.8, schedule=schedule)
    metrics = Training(model, task, tx).metrics
    if os.environ.get('REGENERATE_GOLDEN'):
        GOLDEN.write_text(json.dumps(metrics, indent=1) + '\n')
    for got, expected in zip(metrics, json.loads(GOLDEN.read_text()), strict=True):
        assert got == pytest.approx(expected, rel=2e-5)
