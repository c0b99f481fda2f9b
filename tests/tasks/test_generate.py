"""Generation: numbers of the authors' code, the table of losses, randomness by example, samples."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import jit_numbers
from helpers.applies import Given
from helpers.jit_numbers import MODEL

from vit_jax import step
from vit_jax.errors import UserError
from vit_jax.nn.stochastic import example_positions
from vit_jax.ops import terms
from vit_jax.tasks import base
from vit_jax.tasks.generate import SPACES, Task, conversion

BATCH = jit_numbers.batch()
DRAWN = {name: BATCH[name] for name in ('image', 'label')}  # times and noise are drawn


def bind(params, batch=None, seed=0):
    return step.bind(MODEL, Task(), {'params': params}, batch or BATCH, seed=seed)


def loss(params):
    return terms.means(Task().loss(Task().outputs(bind(params), BATCH), BATCH))['loss']


gradient = functools.cache(lambda: jax.jit(jax.value_and_grad(loss)))


@pytest.mark.slow
def test_loss_and_gradient_are_those_of_the_authors_code():
    """Of king398/DiffusionFusion (JiT/denoiser.py) for the same times and noise."""
    found, grads = gradient()(jit_numbers.params())
    assert found == pytest.approx(89.319176, rel=1e-5)
    parts = {name: norm_of(grads[name]) for name in grads}
    norms = {
        'patch_embed': 9.9423351,
        'class_embed': 22.96957779,
        'context_embed': 2.11606097,
        'final': np.hypot(144.960739, norm_of(grads['final']['bias'])),
    }
    assert {name: parts[name] for name in norms} == pytest.approx(norms, rel=1e-5)
    assert norm_of(parts) == pytest.approx(298.06012, rel=1e-5)


def norm_of(tree):
    """The norm of a tree, on the host."""
    leaves = [np.ravel(leaf) for leaf in jax.tree.leaves(tree)]
    return float(np.linalg.norm(np.concatenate(leaves)))


@pytest.mark.slow
@pytest.mark.long
def test_ten_steps_are_those_of_torch():
    expected = [
        *(89.319176, 78.190086, 70.544853, 63.679909, 57.513874, 52.607716),
        *(49.014277, 46.401070, 44.418751, 42.873237, 41.639557),
    ]
    tx = optax.adamw(1e-3, 0.9, 0.95, weight_decay=0.0)
    params = jit_numbers.params()
    state, found = tx.init(params), []

    @jax.jit
    def update(params, state):
        value, grads = gradient()(params)
        updates, state = tx.update(grads, state, params)
        return value, optax.apply_updates(params, updates), state

    for _ in expected:
        value, params, state = update(params, state)
        found.append(float(value))
    assert found == pytest.approx(expected, rel=1e-5)


def other(space, made, z, t):
    """Image, noise and velocity by the equations, from one of them."""
    x, e, v = {
        'x': lambda: (made, (z - t * made) / (1 - t), (made - z) / (1 - t)),
        'epsilon': lambda: ((z - (1 - t) * made) / t, made, (z - made) / t),
        'v': lambda: (z + (1 - t) * made, z - t * made, made),
    }[space]()
    return {'x': x, 'epsilon': e, 'v': v}


@pytest.mark.parametrize('prediction', SPACES)
@pytest.mark.parametrize('space', SPACES)
def test_each_prediction_has_each_loss(prediction, space):
    """By the equations z = t x + (1 - t) e and v = x - e."""
    rng = np.random.default_rng(3)
    x, e = BATCH['image'], 2 * BATCH['noise']
    made = rng.normal(size=x.shape).astype(np.float32)
    time = np.array([0.1, 0.4, 0.7, 0.9], np.float32)
    t = time[:, None, None, None]
    z = t * x + (1 - t) * e
    truth = {'x': x, 'epsilon': e, 'v': x - e}[space]
    expected = np.square(other(prediction, made, z, t)[space] - truth).mean()

    def apply(images, *rest, method=None):
        if method:
            return jax.random.split(jax.random.key(0), images)
        np.testing.assert_allclose(images, z, atol=1e-6)
        return {'image': jnp.asarray(made)}

    task = Task(prediction=prediction, loss_space=space, noise_scale=2.0)
    batch = {**BATCH, 'time': jnp.asarray(time)}
    found = terms.means(task.loss(task.outputs(Given(apply), batch), batch))['loss']
    assert found == pytest.approx(float(expected), rel=1e-5)


def test_divisors_are_at_least_one_twentieth():
    time = jnp.array([0.99])
    assert conversion('x', 'v', time, 0.05) == pytest.approx(20)
    assert conversion('epsilon', 'x', 1 - time, 0.05) == pytest.approx(0.99 * 20)
    assert conversion('x', 'v', time) == pytest.approx(100, rel=1e-4)


@functools.cache
def _outputs(task, train):
    def outputs(batch, positions, key):
        variables = jit_numbers.params()
        with example_positions(positions):
            if train:
                keys = step.stream_keys(key, task.rngs)
                apply = step.TrainApply(MODEL, variables, {}, keys, None, jnp.zeros((), jnp.int32))
                return task.outputs(apply, batch)
        return task.outputs(step.bind(MODEL, task, {'params': variables}, batch), batch)

    return jax.jit(outputs)


def outputs(batch, positions, train=True, seed=0):
    return _outputs(Task(), train)(batch, jnp.asarray(positions), jax.random.key(seed))


@pytest.mark.slow
def test_times_and_noise_are_those_of_the_example_on_any_device():
    every = outputs(DRAWN, [0, 1, 2, 3])
    turned = outputs({name: x[::-1] for name, x in DRAWN.items()}, [3, 2, 1, 0])
    for name in ('prediction', 'target', 'factor'):
        np.testing.assert_allclose(turned[name], every[name][::-1], atol=1e-5)
    assert not np.allclose(outputs(DRAWN, [0, 1, 2, 3], seed=1)['factor'], every['factor'])


def test_the_index_alone_decides_in_evaluation():
    batch = DRAWN | {'index': jnp.array([5, 6, 7, 8])}
    swapped = {name: x[::-1] for name, x in batch.items()}
    one, two = (outputs(b, [0, 1, 2, 3], train=False) for b in (batch, swapped))
    np.testing.assert_allclose(two['factor'], one['factor'][::-1], rtol=1e-6)


@pytest.mark.slow
def test_times_are_logit_normal_and_noise_has_its_scale():
    task = Task(noise_scale=2.0, prediction='epsilon')
    many = {'image': jnp.zeros((2000, 2, 2, 1)), 'label': jnp.zeros(2000, jnp.int32)}
    keys = jax.random.split(jax.random.key(0), 2000)

    def apply(images, time=None, labels=None, method=None):
        return keys if method else {'image': images, 'time': time}

    found = task.outputs(Given(apply), many)
    np.testing.assert_allclose(found['target'].std(), 2.0, rtol=0.03)
    time = task._draw(Given(apply), many['image'])[0]
    logit = np.log(time / (1 - time))
    assert logit.mean() == pytest.approx(-0.8, abs=0.06)
    assert logit.std() == pytest.approx(0.8, abs=0.04)


def test_a_tenth_of_the_classes_is_hidden_in_training_and_none_in_evaluation():
    seen = {}

    class Recorded(Given):
        train = False

    def apply(images, time=None, labels=None, method=None):
        if method:
            return jax.random.split(jax.random.key(1), images)
        seen['labels'] = labels
        return {'image': images}

    batch = {'image': jnp.zeros((4000, 1, 1, 1)), 'label': jnp.ones(4000, jnp.int32)}
    Task().outputs(Recorded(apply), batch)
    assert (seen['labels'] == 1).all()
    Recorded.train = True
    Task().outputs(Recorded(apply), batch)
    assert set(np.unique(seen['labels'])) == {-1, 1}
    assert (seen['labels'] == -1).mean() == pytest.approx(0.1, abs=0.02)


def test_images_without_a_class():
    images = DRAWN['image']
    assert (Task().inputs({'image': images})[2] == -1).all()


def test_rows_are_separable():
    rng = np.random.default_rng(0)
    images = jnp.asarray(rng.normal(size=(2, 3, 4, 4, 1)), jnp.float32)
    made = {'prediction': images[0], 'target': images[1], 'factor': jnp.array([1.0, 2, 3])}
    base.check_rows_are_separable(Task(), made, {'mask': jnp.array([1.0, 0, 1])})


SAMPLES = {
    'heun': [
        *(1.32018, 0.25607, 0.75292, 1.45011, -1.52205, 0.2235),
        *(-0.82047, -0.42751, 1.22269, 1.67484, -0.90763, 0.1623),
    ],
    'euler': [
        *(1.26354, 0.27283, 0.75979, 1.41882, -1.5102, 0.21711),
        *(-0.77016, -0.42863, 1.22509, 1.61041, -0.89056, 0.17336),
    ],
}


@functools.partial(jax.jit, static_argnums=(0, 2))
def generate(task, labels, frames=0):
    return task.generate(bind(jit_numbers.params()), jnp.asarray(BATCH['noise']), labels, frames)


@pytest.mark.slow
@pytest.mark.parametrize('sampler', SAMPLES)
def test_samples_are_those_of_the_authors_code(sampler):
    """Six steps, guidance 2.9 between times 0.1 and 1."""
    task = Task(steps=6, guidance=2.9, sampler=sampler)
    found = generate(task, jnp.asarray(BATCH['label'])).images
    np.testing.assert_allclose(found.reshape(-1)[::64], SAMPLES[sampler], atol=2e-5)


@pytest.mark.slow
def test_guidance_acts_within_its_interval_and_on_classes_alone():
    labels, none = jnp.asarray(BATCH['label']), jnp.full(4, -1)
    task = Task(steps=4, sampler='euler')
    plain, guided = (generate(t, labels).images for t in (task, guidance(task, 3.0)))
    moved = np.abs(plain - guided).max((1, 2, 3))
    assert (moved[[0, 1, 3]] > 1e-2).all() and moved[2] < 1e-4  # row 2 has no class
    late = guidance(task, 3.0, interval=(0.9, 1.0))  # after the last of the times 0, 1/4, 1/2, 3/4
    np.testing.assert_allclose(generate(late, labels).images, plain, atol=1e-4)
    free = generate(guidance(task, 0.0, interval=(0.0, 1.0)), labels).images
    np.testing.assert_allclose(free, generate(task, none).images, atol=1e-4)


def guidance(task, w, **fields):
    return dataclasses.replace(task, guidance=w, **fields)


@pytest.mark.parametrize('prediction', SPACES)
@pytest.mark.parametrize('sampler', ['heun', 'euler'])
def test_a_perfect_model_leads_every_noise_to_its_image(prediction, sampler):
    """The velocity to one image is that of a straight line, which any number of steps follows."""
    image, task = BATCH['image'][:1], Task(prediction=prediction, sampler=sampler, steps=40)

    def apply(z, time, labels):
        t = time[:, None, None, None]
        noise = (z - t * image) / jnp.maximum(1 - t, 1e-6)
        return {'image': {'x': image + 0 * z, 'epsilon': noise, 'v': image - noise}[prediction]}

    made = jax.jit(lambda noise: task.generate(Given(apply), noise, jnp.zeros(4, int), 3))(
        BATCH['noise']
    )
    # Divisors of at least 0.05 stop the first steps of epsilon and the last one of x short.
    slack = {'x': 0.3, 'epsilon': 1.5, 'v': 1e-4}[prediction]
    assert np.abs(made.images - image).max() < slack
    if prediction == 'x':
        np.testing.assert_allclose(made.frames, np.broadcast_to(image, (3, *BATCH['noise'].shape)))


@pytest.mark.long
def test_frames_are_the_images_predicted_on_the_way():
    task, labels = Task(steps=5, sampler='euler'), jnp.asarray(BATCH['label'])
    made = generate(task, labels, 4)
    first = bind(jit_numbers.params())(BATCH['noise'], jnp.zeros(4), labels)['image']
    assert made.frames.shape[0] == 4
    np.testing.assert_allclose(made.frames[0], first, atol=1e-5)
    np.testing.assert_allclose(made.images, generate(task, labels).images, atol=1e-5)


@pytest.mark.slow
def test_samples_depend_on_the_example_and_not_on_its_place():
    task = Task(steps=2, samples=2)
    batch = DRAWN | {'index': jnp.array([5, 6, 7, 8])}
    predict = jax.jit(step.make_predict_step(MODEL, task))
    variables = {'params': jit_numbers.params()}
    (every, _), (turned, _) = (
        predict(variables, {k: v[rows] for k, v in batch.items()})
        for rows in (slice(None), slice(None, None, -1))
    )
    assert every['samples'].shape == (4, 2, 8, 8, 3) and every['samples'].dtype == jnp.uint8
    assert np.abs(every['samples'].astype(int) - turned['samples'][::-1]).max() <= 1
    assert (every['samples'][:, 0] != every['samples'][:, 1]).any()
    bytes_ = np.round((np.asarray(DRAWN['image']) + 1) * 127.5)
    np.testing.assert_array_equal(every['image'], bytes_)
    diverged = jax.tree.map(lambda x: x * np.nan, variables)
    assert every['finite'].all() and not predict(diverged, batch)[0]['finite'].any()


def test_mistakes():
    for fields, message in (
        ({'prediction': 'noise'}, "unknown config.task.prediction 'noise'"),
        ({'sampler': 'rk4'}, "unknown config.task.sampler 'rk4'"),
        ({'interval': (0.5, 0.2)}, r'interval=\(0.5, 0.2\):'),
        ({'steps': 0}, r'config.task.steps=0: .* 1'),
        ({'class_dropout': 1.0}, r'must be in \[0, 1\)'),
    ):
        with pytest.raises(UserError, match=message):
            Task(**fields)
    with pytest.raises(UserError, match=r'class.*image'):
        Task().inputs({'image': DRAWN['image'], 'label': jnp.zeros((4, 5))})
