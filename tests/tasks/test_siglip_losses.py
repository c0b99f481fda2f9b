"""Losses of all pairs: equal to their definitions, in blocks as at once, alike for all orders."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from vit_jax.tasks import siglip
from vit_jax.tasks.siglip import Pairs

# Compiled, since each operation by itself would be a program.
LOSSES = {
    'sigmoid': jax.jit(siglip.sigmoid, static_argnums=1),
    'softmax': jax.jit(siglip.softmax, static_argnums=1),
}
ROWS = 7
REAL = np.array([1, 1, 1, 0, 1, 1, 0], np.float32)


def make_pairs(rows=ROWS, mask=None, keys=None, seed=0):
    rng = np.random.default_rng(seed)
    image, text = (rng.normal(size=(rows, 5)).astype(np.float32) for _ in range(2))
    mask = np.ones(rows, np.float32) if mask is None else np.asarray(mask)
    keys = np.arange(rows)[:, None] if keys is None else np.asarray(keys)[:, None]
    return Pairs(*map(jnp.asarray, (image, text, np.float32(2), np.float32(-1), mask, keys)))


def logits(made):
    return made.scale * made.image @ made.text.T + made.bias


def total(name, made, chunk=100):
    found = LOSSES[name](made, chunk)
    return found.image_losses.sum() + found.text_losses.sum()


def test_sigmoid_is_its_definition():
    made = make_pairs()
    signs = 2 * np.eye(ROWS) - 1
    expected = np.log1p(np.exp(-signs * np.asarray(logits(made)))).sum(1)
    found = LOSSES['sigmoid'](made, 100)
    np.testing.assert_allclose(found.image_losses, expected, rtol=1e-5)
    assert not np.any(found.text_losses)


def test_softmax_is_its_definition():
    made, found = make_pairs(), LOSSES['softmax'](make_pairs(), 100)
    entropy = optax.softmax_cross_entropy_with_integer_labels
    for scores, losses in ((logits(made), found.image_losses), (logits(made).T, found.text_losses)):
        np.testing.assert_allclose(losses, entropy(scores, jnp.arange(ROWS)), rtol=1e-5)


def test_the_best_match():
    made = make_pairs()
    scores = np.asarray(logits(made))
    found = LOSSES['sigmoid'](made, 3)
    np.testing.assert_array_equal(found.right_text, scores.argmax(1) == np.arange(ROWS))
    np.testing.assert_array_equal(found.right_image, scores.argmax(0) == np.arange(ROWS))


@pytest.mark.fault(111)
@pytest.mark.parametrize('chunk', [3, 100])
@pytest.mark.parametrize('name', LOSSES)
def test_a_tie_is_no_match_and_what_is_not_finite_has_none(name, chunk):
    made = make_pairs(mask=REAL)
    same = made._replace(image=jnp.ones_like(made.image), text=jnp.ones_like(made.text))
    found = LOSSES[name](same, chunk)
    assert not np.any(found.right_text) and not np.any(found.right_image)
    for value in (np.nan, np.inf):
        for rows in ([0], [0, 2, 4], [0, 1, 2, 4, 5]):
            text = np.array(made.text)
            text[rows] = value
            found = LOSSES[name](made._replace(text=text), chunk)
            assert np.isnan(found.right_text.sum()) and np.isnan(found.right_image.sum())
    alone = make_pairs(rows=1)
    assert LOSSES[name](alone, chunk).right_text == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ('name', 'keys'),
    [
        pytest.param(name, keys, marks=[pytest.mark.long] * (name == dear))
        for keys, dear in ((None, 'softmax'), ([0, 1, 1, 2, 0, 3, 1], 'sigmoid'))
        for name in LOSSES
    ],
)
def test_blocks_are_the_whole(name, keys):
    made = make_pairs(mask=REAL, keys=keys)

    def run(chunk):
        def loss(image, text, scale, bias):
            return total(name, Pairs(image, text, scale, bias, made.mask, made.keys), chunk)

        return jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2, 3)))(*made[:4])

    expected = run(ROWS)
    for chunk in (3, 1):
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), run(chunk), expected)
        whole, parts = LOSSES[name](made, ROWS), LOSSES[name](made, chunk)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), parts, whole)


@pytest.mark.slow
@pytest.mark.parametrize('name', LOSSES)
def test_padding_changes_nothing(name):
    made, real = make_pairs(mask=REAL), REAL > 0
    few = make_pairs()._replace(
        image=made.image[real], text=made.text[real], mask=jnp.ones(5), keys=made.keys[real]
    )
    found, expected = LOSSES[name](made, 4), LOSSES[name](few, 4)
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_allclose(a[real], b, atol=1e-5)
        assert not np.any(a[~real])
    grad = jax.jit(jax.grad(lambda x: total(name, made._replace(text=x))))(made.text)
    assert not np.any(grad[~real]) and np.any(grad[real])


@pytest.mark.slow
@pytest.mark.parametrize('name', LOSSES)
def test_permuted_pairs_have_permuted_gradients(name):
    made, order = make_pairs(), np.array([3, 0, 6, 1, 5, 2, 4])
    rows = {k: getattr(made, k)[order] for k in ('image', 'text')}

    @jax.jit
    def grads(made):
        return jax.grad(lambda x: total(name, made._replace(image=x), 3))(made.image)

    np.testing.assert_allclose(grads(made._replace(**rows)), grads(made)[order], atol=1e-5)
    # Texts that move without their images make other pairs.
    moved = made._replace(text=made.text[order])
    loss = jax.jit(functools.partial(total, name))
    assert float(loss(moved)) != pytest.approx(float(loss(made)), rel=1e-3)


@pytest.mark.parametrize('name', LOSSES)
def test_equal_texts_share_their_images(name):
    """If all texts are equal, all match every image."""
    made = make_pairs(keys=[0] * ROWS)
    made = made._replace(text=jnp.broadcast_to(made.text[:1], made.text.shape))
    found = LOSSES[name](made, 100)
    assert np.all(found.right_text == 1) and np.all(found.right_image == 1)
    if name == 'softmax':
        np.testing.assert_allclose(found.image_losses, np.log(ROWS), rtol=1e-5)
    else:
        expected = np.log1p(np.exp(-np.asarray(logits(made)))).sum(1)
        np.testing.assert_allclose(found.image_losses, expected, rtol=1e-5)


def test_the_matrix_of_a_large_batch_is_never_whole():
    """The largest temporary of the gradient: with blocks it is a fraction of all logits."""
    rows, chunk = 2048, 64

    def memory(chunk):
        shapes = jax.eval_shape(lambda: make_pairs(rows))

        def loss(made):
            return total('sigmoid', made, chunk)

        def grads(image, text, scale, bias, mask, keys):
            made = Pairs(image, text, scale, bias, mask, keys)
            return jax.grad(lambda x: loss(made._replace(image=x)))(image)

        return jax.jit(grads).lower(*shapes).compile().memory_analysis().temp_size_in_bytes

    matrix = 4 * rows**2
    assert memory(rows) >= matrix
    assert memory(chunk) < matrix / 8
