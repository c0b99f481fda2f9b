"""Rows of several sequences: each is encoded and pooled as alone, and padding changes nothing."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from vit_jax.models import vit
from vit_jax.nn.blocks import Block, Encoder, MapHead, segment_mean
from vit_jax.nn.patches import PatchEmbed, patchify
from vit_jax.nn.positions import sincos2d

WIDTH, TOKENS = 16, 10
# Two sequences, and two tokens of padding; another row holds one alone.
SEGMENTS = np.array([[1, 1, 1, 2, 2, 2, 2, 2, 0, 0], [1, 1, 1, 1, 1, 1, 1, 1, 1, 0]])
BLOCK = functools.partial(Block, num_heads=2, mlp_dim=32)
ENCODERS = {'unrolled': {}, 'scanned': {'scan': True, 'remat': 'dots'}}


def random(*shape, seed=0):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


def drawn(layer, *inputs, seed=1):
    """Parameters none of which is zero or one."""
    shapes = jax.eval_shape(layer.init, jax.random.key(0), *inputs)
    rng = np.random.default_rng(seed)
    arrays = jax.tree.map(lambda p: 0.25 * rng.standard_normal(p.shape, np.float32), shapes)
    return jax.tree.map(jnp.asarray, arrays)


def sequences(x):
    """(row, number, tokens) of each sequence, as a row of its own."""
    x = np.asarray(x)
    return [
        (row, number, x[row : row + 1, SEGMENTS[row] == number])
        for row in range(2)
        for number in range(1, SEGMENTS[row].max() + 1)
    ]


@pytest.mark.slow
@pytest.mark.parametrize('fields', ENCODERS.values(), ids=ENCODERS)
def test_sequences_that_share_a_row_are_encoded_as_alone(fields):
    encoder, x = Encoder(BLOCK, 2, **fields), random(2, TOKENS, WIDTH)
    variables = drawn(encoder, x)
    packed = jax.jit(lambda x: encoder.apply(variables, x, segments=jnp.asarray(SEGMENTS)))(x)
    packed = np.asarray(packed)
    for row, number, alone in sequences(x):
        expected = jax.jit(lambda x: encoder.apply(variables, x))(alone)
        found = packed[row : row + 1, SEGMENTS[row] == number]
        np.testing.assert_allclose(found, expected, atol=1e-6, rtol=1e-6)


def test_sequences_that_share_a_row_are_pooled_as_alone():
    head, x = MapHead(num_heads=2, mlp_dim=32), random(2, TOKENS, WIDTH)
    variables = drawn(head, x)
    apply = jax.jit(head.apply, static_argnames='num_segments')
    vectors = apply(variables, x, segments=jnp.asarray(SEGMENTS), num_segments=3)
    means = jax.jit(segment_mean, static_argnums=2)(x, jnp.asarray(SEGMENTS), 3)
    vectors, means = np.asarray(vectors), np.asarray(means)
    assert vectors.shape == means.shape == (2, 3, WIDTH)
    for row, number, alone in sequences(x):
        expected = apply(variables, alone)[0]
        np.testing.assert_allclose(vectors[row, number - 1], expected, atol=1e-6)
        np.testing.assert_allclose(means[row, number - 1], alone[0].mean(0), atol=1e-6)
    assert np.isfinite(vectors).all() and not means[0, 2].any()


@pytest.mark.slow
@pytest.mark.parametrize(
    'pool', [*(pytest.param(x, marks=pytest.mark.long) for x in ('cls', 'patches')), 'gap', 'map']
)
def test_padding_of_an_image_changes_nothing_and_gets_no_gradient(pool):
    model = vit.Model(
        num_classes=3, patch_size=2, width=16, depth=1, mlp_dim=32, num_heads=2, pool=pool,
        posemb='sincos2d',
    )  # fmt: skip
    images, mask = random(2, 4, 6, 1), jnp.arange(6) < 4
    variables = drawn(model, images)

    @jax.jit
    def run(images):
        def loss(images):
            logits = model.apply(variables, images, mask=jnp.stack([mask, mask]))['logits']
            return jnp.sin(logits).sum(), logits

        return jax.grad(loss, has_aux=True)(images)

    gradient, logits = run(images)
    gradient_of_patches = np.abs(patchify(gradient, 2)).max(-1)
    assert not gradient_of_patches[:, 4:].any() and gradient_of_patches[:, :4].all()
    # The last two patches are the right two thirds of the second row of patches.
    other = run(images.at[:, 2:, 2:].add(1.0))[1]
    np.testing.assert_allclose(other, logits, atol=1e-6)
    free = jax.jit(lambda x: model.apply(variables, x)['logits'])(images)
    assert np.abs(free - logits).max() > 1e-3


class Packed(nn.Module):
    """A ViT on rows of patches of several images, from the parts of the package."""

    @nn.compact
    def __call__(self, patches, places, segments, num_segments):
        batch, tokens, _ = patches.shape
        pixels = patches.reshape(batch * tokens, 2, 2, -1)
        x = PatchEmbed(2, WIDTH, name='patch_embed')(pixels).reshape(batch, tokens, WIDTH)
        side = 8
        table = jnp.asarray(sincos2d(side, side, WIDTH)).reshape(side, side, WIDTH)
        x = x + table[places[..., 0], places[..., 1]]
        x = Encoder(BLOCK, 2, name='encoder')(x, segments=segments)
        vectors = segment_mean(x, segments, num_segments)
        return nn.Dense(3, name='head')(vectors)


@pytest.mark.slow
def test_images_of_mixed_sizes_in_one_row_are_classified_as_alone():
    fields = {'width': WIDTH, 'depth': 2, 'mlp_dim': 32, 'num_heads': 2}
    model = vit.Model(num_classes=3, patch_size=2, pool='gap', posemb='sincos2d', **fields)
    images = [random(1, *size, 3, seed=i) for i, size in enumerate([(4, 6), (8, 2), (2, 2)])]
    variables = drawn(model, images[0])
    grids = [(x.shape[1] // 2, x.shape[2] // 2) for x in images]
    places = np.concatenate([np.indices(grid).reshape(2, -1).T for grid in grids])
    segments = np.repeat([1, 2, 3], [rows * columns for rows, columns in grids])
    patches = np.concatenate([patchify(x, 2)[0] for x in images])

    def row(x):
        """With two tokens of padding."""
        return jnp.asarray(np.pad(x, [(0, 2), *[(0, 0)] * (x.ndim - 1)]))[None]

    apply = jax.jit(functools.partial(Packed().apply, num_segments=3))
    found = apply(variables, row(patches), row(places), row(segments))
    for i, image in enumerate(images):
        expected = jax.jit(model.apply)(variables, image)['logits'][0]
        np.testing.assert_allclose(found[0, i], expected, atol=1e-6)
