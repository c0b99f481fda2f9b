"""Colorization: soft labels of the true colors, luminance that is kept, sums without padding."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.applies import Given

from vit_jax.errors import UserError
from vit_jax.ops import colors, terms
from vit_jax.tasks import colorize
from vit_jax.tasks.colorize import Task

RNG = np.random.default_rng(0)
IMAGE = jnp.asarray(RNG.integers(0, 256, (2, 8, 12, 3), dtype=np.uint8))
LOGITS = jnp.asarray(RNG.normal(size=(2, 4, 6, 313)), jnp.float32)
BATCH = {'image': IMAGE, 'mask': jnp.ones(2)}


@jax.jit
def evaluate(logits, batch):
    return Task().evaluate(Given(lambda gray: {'logits': logits}), batch)


rgb_to_lab = jax.jit(colors.rgb_to_lab)


@jax.jit
def gray_bytes(image):
    return colors.to_bytes(colors.to_gray(image / 255.0))


def loss_of(task, logits):
    return jax.jit(task.loss)({'logits': logits}, BATCH)


def true_cells():
    """(a, b) of cells of 2 x 2 pixels."""
    ab = np.asarray(rgb_to_lab(IMAGE / 255.0))[..., 1:]
    return ab.reshape(2, 4, 2, 6, 2, 2).mean(axis=(2, 4))


def expected_losses(weights):
    bins, shares = (np.asarray(x) for x in jax.jit(colors.soft_encode)(true_cells()))
    dense = np.zeros((2, 4, 6, 313))
    np.put_along_axis(dense, bins, shares, axis=-1)
    entropy = -(dense * np.asarray(jax.nn.log_softmax(LOGITS))).sum(-1)
    return entropy * weights[bins[..., 0]]


@pytest.fixture
def prior(tmp_path):
    """A file of colors, and their weights."""
    counts = RNG.integers(0, 1000, 313)
    colorize.write_color_counts(tmp_path / 'colors.json', counts, 'here')
    return str(tmp_path / 'colors.json'), colors.class_weights(counts, 0.3)


@pytest.mark.slow
def test_the_loss_is_a_weighted_cross_entropy_of_soft_labels(prior):
    path, weights = prior
    for task, by in ((Task(), np.ones(313)), (Task(prior=path, rebalance=0.3), weights)):
        losses = expected_losses(by)
        found = loss_of(task, LOGITS)
        np.testing.assert_allclose(terms.means(found)['loss'], losses.mean(), rtol=1e-4)
        assert found['loss'].count == losses.size and found['accuracy'].weight == 0


def test_padding_counts_for_nothing():
    whole = evaluate(LOGITS, BATCH)
    first = evaluate(LOGITS, {**BATCH, 'mask': jnp.array([1.0, 0.0])})
    other = {'image': IMAGE.at[1].set(7), 'mask': jnp.array([1.0, 0.0])}
    again = evaluate(LOGITS, other)
    for name in first:
        np.testing.assert_array_equal(first[name], again[name])
        assert float(first[name][1]) == float(whole[name][1]) / 2


def test_accuracy_is_that_of_the_likeliest_bin():
    nearest = colors.nearest_bin(true_cells())
    right = 20 * jax.nn.one_hot(nearest, 313)
    assert terms.means(loss_of(Task(), right))['accuracy'] == 1
    assert terms.means(loss_of(Task(), -right))['accuracy'] == 0


def test_a_prediction_keeps_the_luminance():
    found = jax.jit(lambda batch: Task().predict(Given(lambda gray: {'logits': LOGITS}), batch))(
        BATCH
    )
    assert found['ab'].shape == (2, 4, 6, 2) and found['image'].dtype == jnp.uint8
    gray, again = (np.asarray(gray_bytes(x)).astype(int) for x in (IMAGE, found['image']))
    assert np.abs(gray - again).max() <= 1


@pytest.mark.slow
def test_a_gray_image_is_its_own_input():
    """A gray file, by one channel or by three that are equal, is what its color image became."""
    (color,) = Task().inputs(BATCH)
    assert color.shape == (2, 8, 12, 1)
    gray = jnp.round((color + 1) * 127.5).astype(jnp.uint8)
    for image in (gray, jnp.repeat(gray, 3, axis=-1), jnp.repeat(color, 3, axis=-1)):
        np.testing.assert_allclose(Task().inputs({'image': image})[0], color, atol=1e-6)


def test_what_is_measured_of_images():
    """By the true colors, PSNR is limited by the bins alone; gray images are not colorful."""
    smooth = jnp.broadcast_to(jnp.array([180, 120, 90], jnp.uint8), IMAGE.shape)
    batch = {**BATCH, 'image': smooth}
    ab = rgb_to_lab(smooth / 255.0)[:, ::2, ::2, 1:]
    logits = 50 * jax.nn.one_hot(colors.nearest_bin(ab), 313)
    found = {k: float(s / n) for k, (s, n) in evaluate(logits, batch).items()}
    assert found['psnr'] > 30 > found['psnr_of_grey']
    assert found['colorfulness'] == pytest.approx(found['true_colorfulness'], rel=0.1)
    gray = jnp.zeros_like(logits).at[..., colors.nearest_bin(np.zeros(2, np.float32))].set(50)
    sums = evaluate(gray, batch)
    assert float(sums['colorfulness'][0]) == pytest.approx(0, abs=0.5)
    assert sums['psnr'][0] == pytest.approx(float(sums['psnr_of_grey'][0]), abs=0.05)


@pytest.mark.slow
def test_mistakes(tmp_path):
    with pytest.raises(UserError, match=r'rebalance=0: must be in \(0, 1\]'):
        Task(rebalance=0)
    with pytest.raises(UserError, match='temperature=0: must be positive'):
        Task(temperature=0)
    with pytest.raises(UserError, match='3 channels, not 1'):
        Task().loss({'logits': LOGITS}, {'image': IMAGE[..., :1]})
    with pytest.raises(UserError, match=r"prior: .*'gone\.json'"):
        Task(prior='gone.json').loss({'logits': LOGITS}, BATCH)
    other = tmp_path / 'other.json'
    for text in ('{}', '[', json.dumps({'counts': [-1, 2]}), json.dumps({'counts': [0.5]})):
        other.write_text(text)
        with pytest.raises(UserError, match='counts'):
            Task(prior=str(other)).loss({'logits': LOGITS}, BATCH)


def test_a_prior_of_other_colors_is_one_line(tmp_path):
    colorize.write_color_counts(tmp_path / 'colors.json', np.ones(300, np.int64), 'here')
    with pytest.raises(UserError, match=r'300 .* 313'):
        Task(prior=str(tmp_path / 'colors.json')).loss({'logits': LOGITS}, BATCH)


@pytest.mark.parametrize('content', [b'[]', b'\xff\xfe{', b'{"counts": []}', b'{"counts": [-1]}'])
def test_a_prior_of_another_kind_is_one_line(tmp_path, content):
    (tmp_path / 'colors.json').write_bytes(content)
    with pytest.raises(UserError, match=r'config.task.prior: .*colors.json'):
        colorize.read_color_counts(tmp_path / 'colors.json')
