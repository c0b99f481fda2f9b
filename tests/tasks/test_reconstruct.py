import jax.numpy as jnp
import numpy as np
import pytest
from helpers.applies import Given

from vit_jax.errors import UserError
from vit_jax.nn.patches import patchify
from vit_jax.ops import terms
from vit_jax.tasks.reconstruct import Task

SIDE = 4
IMAGENET = {'mean': (0.485, 0.456, 0.406), 'std': (0.229, 0.224, 0.225)}
RNG = np.random.default_rng(0)
IMAGE = jnp.asarray(RNG.integers(0, 256, (2, 8, 12, 3), dtype=np.uint8))
MASK = jnp.asarray([[1, 0, 1, 1, 0, 1], [0, 0, 1, 1, 1, 1]], jnp.float32)
PATCHES = jnp.asarray(RNG.normal(size=(2, 6, 48)), jnp.float32)
OUTPUTS = {'patches': PATCHES, 'mask': MASK}
BATCH = {'image': IMAGE}


def expected_target(target, mean=0.5, std=0.5):
    patches = np.asarray(patchify((IMAGE / 255.0 - jnp.asarray(mean)) / jnp.asarray(std), SIDE))
    if target == 'pixels':
        return patches
    variance = patches.var(-1, keepdims=True, ddof=1)
    return (patches - patches.mean(-1, keepdims=True)) / np.sqrt(variance + 1e-6)


@pytest.mark.parametrize('colors', [{}, IMAGENET], ids=['ours', 'imagenet'])
@pytest.mark.parametrize('target', ['normalized', 'pixels'])
def test_the_loss_is_the_error_of_hidden_patches(target, colors):
    errors = np.square(PATCHES - expected_target(target, **colors)).mean(-1)
    found = terms.means(Task(target=target, **colors).loss(OUTPUTS, BATCH))
    assert found.keys() == {'loss'}
    expected = (errors * MASK).sum() / MASK.sum()
    np.testing.assert_allclose(found['loss'], expected, rtol=1e-5)


def test_padding_counts_for_nothing():
    batch = {**BATCH, 'mask': jnp.asarray([1.0, 0.0])}
    sums = Task().evaluate(Given(lambda image: OUTPUTS), batch)
    errors = np.square(PATCHES - expected_target('normalized')).mean(-1)
    np.testing.assert_allclose(sums['loss'], ((errors * MASK)[0].sum(), 4), rtol=1e-5)


def test_noise_of_the_batch_goes_to_the_model():
    noise = jnp.zeros((2, 6))
    assert len(Task().inputs(BATCH)) == 1
    assert Task().inputs({**BATCH, 'noise': noise})[1] is noise


@pytest.mark.parametrize('colors', [{}, IMAGENET], ids=['ours', 'imagenet'])
@pytest.mark.parametrize('target', ['normalized', 'pixels'])
@pytest.mark.parametrize('host', [False, True], ids=['bytes', 'floats'])
def test_a_perfect_prediction_is_the_image(target, colors, host):
    """Whatever was taken from the target and divided out of it comes back."""
    outputs = {'patches': jnp.asarray(expected_target(target, **colors)), 'mask': MASK}
    tokens = jnp.asarray(RNG.normal(size=(2, 7, 5)), jnp.float32)
    batch = {'image': IMAGE / 127.5 - 1} if host else BATCH

    def apply(image, method=None):
        return tokens if method == 'features' else outputs

    found = Task(target=target, **colors).predict(Given(apply), batch)
    np.testing.assert_allclose(found['reconstruction'], IMAGE / 255.0, atol=1e-5)
    np.testing.assert_array_equal(found['mask'], MASK.reshape(2, 2, 3))
    np.testing.assert_allclose(found['features'], tokens[:, 1:].mean(1), rtol=1e-6)


def test_mistakes():
    with pytest.raises(UserError, match=r"unknown config.task.target 'pixel'"):
        Task(target='pixel')
    with pytest.raises(UserError, match=r'config.task.std=\(0.0,\)'):
        Task(std=(0.0,))
