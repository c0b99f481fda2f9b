"""Bits of a pixel, samples that hang on seed and example alone, and the upsamplers' channels."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.applies import Given

from vit_jax import step
from vit_jax.errors import UserError
from vit_jax.models.coltran import Model
from vit_jax.ops import colors, terms
from vit_jax.tasks import coltran_upsampler
from vit_jax.tasks.coltran import Task

RNG = np.random.default_rng(0)
IMAGE = jnp.asarray(RNG.integers(0, 256, (3, 4, 4, 3)), jnp.uint8)
BATCH = {'image': IMAGE, 'mask': jnp.array([1.0, 1.0, 0.0])}


def outputs(logits):
    return {'logits': logits, 'parallel_logits': jnp.zeros_like(logits)}


@pytest.mark.slow
def test_bits_are_nine_for_one_who_knows_nothing_and_none_for_one_who_knows():
    knows = 50 * jax.nn.one_hot(colors.to_coarse_bins(IMAGE), colors.NUM_COARSE_BINS)
    sums = Task().evaluate(Given(lambda gray, bins: outputs(knows)), BATCH)
    np.testing.assert_allclose(sums['loss'], (0, 32), atol=1e-3)
    np.testing.assert_allclose(sums['parallel_bits_per_dim'], (32 * 9, 32), rtol=1e-6)
    means = terms.means(found := Task().loss(outputs(0 * knows), BATCH))
    np.testing.assert_allclose(terms.total(found, means), 9, rtol=1e-6)
    found = Task(parallel_weight=0.25).loss(outputs(knows), BATCH)
    np.testing.assert_allclose(terms.total(found, terms.means(found)), 9 / 4, rtol=1e-5)


def test_a_gray_image_of_one_channel_is_its_own_luma():
    gray, _ = Task().inputs({'image': IMAGE[..., :1]})
    np.testing.assert_array_equal(gray, IMAGE[..., 0])
    with pytest.raises(UserError, match=r'bytes.*float32.*3'):
        Task().inputs({'image': IMAGE / 255.0})


@pytest.fixture(scope='module')
def predict():
    """The predictions for a batch, by seed."""
    task = Task(samples=2)
    model = Model(width=8, num_heads=1, mlp_dim=8, encoder_depth=1, outer_depth=1, inner_depth=1)
    variables = jax.jit(lambda: step.init_variables(model, task, BATCH, 0))()

    @jax.jit
    def predict(seed, batch):
        return step.make_predict_step(model, task, seed=seed)(variables, batch)[0]

    return lambda seed, **batch: predict(seed, {**BATCH, **batch})


@pytest.mark.long
@pytest.mark.slow
def test_samples_belong_to_the_seed_and_the_example(predict):
    first = predict(0, index=jnp.array([5, 6, 7]))
    moved = predict(0, index=jnp.array([7, 5, 6]), image=IMAGE[jnp.array([2, 0, 1])])
    samples = np.asarray(first['samples'])
    assert samples.shape == (3, 2, 4, 4, 3) and samples.dtype == np.uint8
    np.testing.assert_array_equal(samples[[2, 0, 1]], moved['samples'])
    other = predict(1, index=jnp.array([5, 6, 7]))
    assert (samples != other['samples']).any() and (samples[:, 0] != samples[:, 1]).any()
    # Untrained, every color is about as likely.
    assert np.abs(first['bits_per_dim'] - 9).max() < 1.5


@pytest.mark.slow
def test_an_upsampler_learns_one_channel_and_is_judged_by_all():
    task = coltran_upsampler.Task(factor=2)
    shown = task.augment(jax.random.key(0), {'image': IMAGE})
    _, coarse, channels = task.inputs(shown)
    assert coarse.shape == (3, 4, 4, 1) and channels.shape == (3, 1)
    small = colors.downsample(IMAGE, 2)
    for one, found, channel in zip(small, coarse, channels[:, 0], strict=True):
        expected = np.kron(np.round(one[..., channel]), np.ones((2, 2)))
        np.testing.assert_array_equal(found[..., 0], expected)
    _, every, channels = task.inputs(BATCH)
    assert every.shape == (3, 4, 4, 3)
    np.testing.assert_array_equal(channels, [[0, 1, 2]] * 3)

    def apply(gray, coarse, channels):
        return {'logits': jnp.zeros((*coarse.shape, 256))}

    np.testing.assert_allclose(task.evaluate(Given(apply), BATCH)['loss'], (96 * 8, 96), rtol=1e-6)
    (term,) = task.loss(apply(*task.inputs(shown)), shown).values()
    np.testing.assert_allclose(tuple(term)[:2], (48 * 8, 48), rtol=1e-6)


def test_an_upsampler_starts_from_the_coarse_image_that_it_is_given():
    task = coltran_upsampler.Task(factor=2)
    coarse = colors.from_coarse_bins(jnp.arange(12).reshape(3, 2, 2))
    _, found, _ = task.inputs({'image': IMAGE[..., :1], 'coarse': coarse})
    np.testing.assert_array_equal(found[:, ::2, 1::2], coarse)


@pytest.mark.parametrize(
    ('make', 'message'),
    [
        (lambda: Task(parallel_weight=1.0), r'parallel_weight=1.0: must be in \[0, 1\)'),
        (lambda: Task(samples=0), r'samples .* 1, not 0'),
        (lambda: coltran_upsampler.Task(factor=0), 'factor=0.*1'),
    ],
)
def test_mistakes(make, message):
    with pytest.raises(UserError, match=message):
        make()
