"""MeanFlow: numbers of the authors' code, the identity by differences, flow matching as a case."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import jit_numbers, pmf_numbers
from helpers.applies import Given
from helpers.pmf_numbers import MODEL

from vit_jax import step
from vit_jax.errors import UserError
from vit_jax.nn.stochastic import example_positions
from vit_jax.ops import terms
from vit_jax.tasks import base, generate
from vit_jax.tasks.meanflow import Task

BATCH = pmf_numbers.batch()
DRAWN = {name: BATCH[name] for name in ('image', 'label')}  # everything else is drawn


def means(params):
    task = Task()
    apply = step.bind(MODEL, task, {'params': params}, BATCH)
    scores = terms.means(task.loss(task.outputs(apply, BATCH), BATCH))
    return scores['loss'] + scores['instant_loss'], scores['error']


gradient = functools.cache(lambda: jax.jit(jax.value_and_grad(means, has_aux=True)))


def norm_of(tree):
    return float(np.sqrt(sum(np.sum(np.square(leaf)) for leaf in jax.tree.leaves(tree))))


@pytest.mark.slow
def test_loss_and_gradient_equal_the_authors():
    """Of Lyy-iiis/pMF (pmf.py) for the same times, spans, guidance, intervals and noise."""
    (loss, error), grads = gradient()(pmf_numbers.params())
    assert (loss, error) == pytest.approx((1.9999663, 6.0521617), rel=1e-5)
    expected = {
        'class_embed': 0.0290574878,
        'posemb': 0.0910273716,
        'span_embed': 0.0412670262,
        'block_1': 0.1900993139,
        'final': 0.6083930731,
        'instant_final': 0.7503901720,
    }
    assert {k: norm_of(grads[k]) for k in expected} == pytest.approx(expected, rel=1e-4)
    assert norm_of(grads) == pytest.approx(1.6783070564, rel=1e-5)


@pytest.mark.slow
def test_ten_steps_equal_the_authors():
    expected = [
        *(6.0521617, 5.7665668, 5.4917026, 5.2292132, 4.9804254, 4.7463098),
        *(4.5278082, 4.3254380, 4.1388941, 3.9672709, 3.8094616),
    ]
    tx = optax.adamw(1e-3, 0.9, 0.95, weight_decay=0.0)
    params = pmf_numbers.params()
    state, errors = tx.init(params), []
    update = jax.jit(tx.update)
    for _ in expected:
        (_, error), grads = gradient()(params)
        updates, state = update(grads, state, params)
        params = optax.apply_updates(params, updates)
        errors.append(float(error))
    assert errors == pytest.approx(expected, rel=1e-4)


def test_samples_equal_the_authors():
    """Three steps with guidance 6.5 between the noise levels 0.1 and 0.7."""
    expected = [
        *(0.27488, 0.53260, -0.92311, -0.07812, 0.06618, -0.11732),
        *(0.14961, -0.02444, 0.16536, 0.32901, 0.41547, -1.03372),
    ]
    task = Task(steps=3, guidance=6.5, interval=(0.3, 0.9))
    apply = step.bind(MODEL, task, {'params': pmf_numbers.params()}, BATCH)
    images = jax.jit(lambda z: task.generate(apply, z, BATCH['label'], 2))(BATCH['noise'])
    np.testing.assert_allclose(images.images.reshape(-1)[::64], expected, atol=2e-5)
    assert images.frames.shape == (2, *BATCH['noise'].shape)


def stub(z, time, labels, conditions):
    """A smooth model of 64-bit numbers, of all its inputs."""
    numbers = time[:, None, None, None] + 2 * conditions[:, :1, None, None]
    return {'image': np.tanh(z * numbers) + np.sin(numbers) * np.cos(z)}


def traced_stub(z, time=None, labels=None, conditions=None, method=None):
    if method:
        return jax.random.split(jax.random.key(0), z)
    numbers = time[:, None, None, None] + 2 * conditions[:, :1, None, None]
    return {'image': jnp.tanh(z * numbers) + jnp.sin(numbers) * jnp.cos(z)}


@pytest.mark.long
def test_the_slope_equals_differences_in_float64_and_torch():
    """u - h du/dt along the data's velocity, with z + d v, t + d and h - d for a small d."""
    torch = pytest.importorskip('torch')
    task = Task(tangent='data', guidance_range=0.0)
    implied = task.outputs(Given(traced_stub), BATCH)['implied']
    x, e, t, h = (np.asarray(BATCH[k], np.float64) for k in ('image', 'noise', 'time', 'span'))
    t, h = (a[:, None, None, None] for a in (t, h))
    z = t * x + (1 - t) * e
    velocity = x - e

    def average(offset):
        place, now, span = z + offset * velocity, t + offset, h - offset
        image = stub(place, now.ravel(), None, span.reshape(-1, 1))['image']
        return (image - place) / (1 - now)

    slope = (average(1e-5) - average(-1e-5)) / 2e-5
    np.testing.assert_allclose(implied, average(0.0) - h * slope, rtol=1e-4, atol=1e-4)

    def in_torch(place, now, span):
        numbers = now + 2 * span
        image = torch.tanh(place * numbers) + torch.sin(numbers) * torch.cos(place)
        return (image - place) / (1 - now)

    z, t, h, velocity = map(torch.as_tensor, (z, t, h, velocity))
    ones = torch.ones_like(t)
    u, slope = torch.func.jvp(in_torch, (z, t, h), (velocity, ones, -ones))
    np.testing.assert_allclose(implied, (u - h * slope).numpy(), rtol=1e-4, atol=1e-4)


@pytest.mark.slow
def test_spans_of_zero_are_flow_matching():
    """The same error as JiT's own task, on the model of that task."""
    batch = jit_numbers.batch()
    model = jit_numbers.MODEL
    zeros = {'span': jnp.zeros(4), 'guidance': jnp.ones(4)}
    task = Task(guidance_range=0.0, loss_power=0.0)

    @jax.jit
    def both(params, batch, zeros):
        given = step.bind(model, generate.Task(), {'params': params}, batch)
        plain = generate.Task().outputs(given, batch)

        def apply(*inputs, method=None, conditions=None):
            if method:
                return given(*inputs, method=method)
            poison = jnp.where((conditions[:, 0] == 0).all(), 0.0, jnp.nan)
            return jax.tree.map(lambda x: x + poison, given(*inputs))

        found = task.loss(task.outputs(Given(apply), batch | zeros), batch | zeros)
        return terms.means(generate.Task().loss(plain, batch))['loss'], terms.means(found)

    expected, scores = both(jit_numbers.params(), batch, zeros)
    assert float(scores['error']) == pytest.approx(float(expected), rel=1e-6)
    pixels = batch['image'][0].size
    assert float(scores['loss']) == pytest.approx(pixels * float(expected), rel=1e-6)


@pytest.mark.slow
def test_jit_takes_conditions():
    """Its parameters without conditions stay what they were."""
    batch, model = jit_numbers.batch(), jit_numbers.MODEL
    inputs = batch['image'], batch['time'], batch['label']
    conditions = jnp.zeros((4, 4)).at[:, 0].set(jnp.array([0.0, 0.1, 0.2, 0.3]))
    init = functools.partial(model.init, jax.random.key(0), *inputs)
    plain, conditioned = (
        jax.eval_shape(f)['params'] for f in (init, lambda: init(None, conditions))
    )
    assert {f'condition_embed_{i}' for i in range(4)} == set(conditioned) - set(plain)
    rng = np.random.default_rng(0)
    params = jax.tree.map(
        lambda s: (0.1 * rng.standard_normal(s.shape)).astype(np.float32), conditioned
    )
    apply = jax.jit(lambda *given: model.apply({'params': given[0]}, *inputs, conditions=given[1]))
    images, others = (apply(params, given)['image'] for given in (conditions, conditions + 0.1))
    assert np.abs(images - others).min(axis=(1, 2, 3)).max() > 1e-5


@functools.cache
def _outputs(train):
    task = Task()

    def outputs(batch, positions, key):
        params = pmf_numbers.params()
        with example_positions(positions):
            if not train:
                return task.outputs(step.bind(MODEL, task, {'params': params}, batch), batch)
            keys = step.stream_keys(key, task.rngs)
            apply = step.TrainApply(MODEL, params, {}, keys, None, jnp.zeros((), jnp.int32))
            return task.outputs(apply, batch)

    return jax.jit(outputs)


@pytest.mark.slow
def test_randomness_belongs_to_the_example_on_any_device():
    outputs, key = _outputs(True), jax.random.key(0)
    every = outputs(DRAWN, jnp.arange(4), key)
    turned = {name: x[::-1] for name, x in DRAWN.items()}
    found = outputs(turned, jnp.arange(4)[::-1], key)
    for name in every:
        np.testing.assert_allclose(found[name], every[name][::-1], atol=1e-4)
    other = outputs(DRAWN, jnp.arange(4), jax.random.key(1))
    assert not np.allclose(other['target'], every['target'])


@pytest.mark.long
@pytest.mark.slow
def test_the_index_decides_in_evaluation():
    batch = DRAWN | {'index': jnp.array([5, 6, 7, 8])}
    swapped = {name: x[::-1] for name, x in batch.items()}
    first, second = (_outputs(False)(b, jnp.arange(4), jax.random.key(0)) for b in (batch, swapped))
    np.testing.assert_allclose(second['target'], first['target'][::-1], atol=1e-5)


@pytest.mark.slow
def test_draws_have_their_distributions():
    rows = 4000
    keys = jax.random.split(jax.random.key(3), rows)
    apply = Given(lambda count, method=None: keys)
    images = jnp.zeros((rows, 1, 1, 1))
    time, _, _, conditions = Task()._draw_path(apply, {}, images)
    is_instant = conditions.span == 0
    assert is_instant.mean() == pytest.approx(0.5, abs=0.03)
    assert (time + conditions.span <= 1).all() and (conditions.span >= 0).all()
    assert (conditions.low[is_instant] == 0).all() and (conditions.high[is_instant] == 1).all()
    assert (conditions.low <= 0.5).all() and (conditions.high >= 0.5).all()
    # Of the density 1 / w from 1 to 8, the logarithm is uniform.
    assert np.log(conditions.guidance).mean() == pytest.approx(np.log(8) / 2, abs=0.04)
    square = Task(guidance_power=2.0)._draw_path(apply, {}, images)[3].guidance
    assert (1 / square).mean() == pytest.approx((1 + 1 / 8) / 2, abs=0.01)
    assert square.min() >= 1 and square.max() <= 8


def test_a_perfect_average_needs_one_step():
    image = BATCH['image'][:1]

    def apply(z, time, labels, conditions):
        return {'image': jnp.broadcast_to(image, z.shape)}

    for steps in (1, 2, 4):
        images = Task(steps=steps).generate(Given(apply), BATCH['noise'], BATCH['label']).images
        np.testing.assert_allclose(images, jnp.broadcast_to(image, images.shape), atol=1e-5)


def test_rows_are_separable():
    rng = np.random.default_rng(0)
    arrays = jnp.asarray(rng.normal(size=(3, 3, 4, 4, 1)), jnp.float32)
    outputs = dict(zip(('implied', 'instant', 'target'), arrays, strict=True))
    base.check_rows_are_separable(Task(), outputs, {'mask': jnp.array([1.0, 0, 1])})


@pytest.mark.parametrize(
    ('field', 'value'),
    [('prediction', 'epsilon'), ('sampler', 'heun'), ('guidance', 0.5), ('instant_share', 1.5)],
)
def test_impossible_fields_are_refused(field, value):
    with pytest.raises(UserError) as error:
        dataclasses.replace(Task(), **{field: value})
    assert f'task.{field}' in str(error.value)
