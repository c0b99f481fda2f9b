"""From images to tokens and from tokens to a vector: patches, positions, pooling."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.pictures import drawn

from vit_jax.errors import UserError
from vit_jax.nn.blocks import MapHead
from vit_jax.nn.patches import PatchEmbed, patch_grid, patchify
from vit_jax.nn.positions import sincos1d, sincos2d


def random(*shape, seed=0):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


def test_patches_run_row_by_row_and_keep_their_pixels():
    images = np.arange(2 * 4 * 6 * 3, dtype=np.float32).reshape(2, 4, 6, 3)
    patches = patchify(jnp.asarray(images), 2)
    assert patches.shape == (2, 6, 12)
    for row in range(2):
        for column in range(3):
            pixels = images[:, 2 * row : 2 * row + 2, 2 * column : 2 * column + 2]
            np.testing.assert_array_equal(patches[:, 3 * row + column], pixels.reshape(2, 12))


def test_patch_projection_is_a_strided_convolution():
    images = random(2, 8, 12, 3)
    layer = PatchEmbed(4, 5)
    variables = layer.init(jax.random.key(0), images)
    variables['params']['bias'] += 0.5
    kernel, bias = (variables['params'][k] for k in ('kernel', 'bias'))
    assert kernel.shape == (4, 4, 3, 5)
    conv = jax.lax.conv_general_dilated(
        images, kernel, (4, 4), 'VALID', dimension_numbers=('NHWC', 'HWIO', 'NHWC')
    )
    np.testing.assert_allclose(
        layer.apply(variables, images), conv.reshape(2, 6, 5) + bias, atol=1e-5
    )


@pytest.mark.parametrize(
    ('size', 'message'),
    [((31, 32), 'height'), ((32, 40), 'width'), ((8, 32), 'height'), ((32, 0), 'width')],
)
def test_images_that_patches_do_not_tile_are_refused(size, message):
    with pytest.raises(UserError, match=rf'{size[1]} x {size[0]}: their {message} .* 16'):
        patch_grid(*size, 16)


def test_sincos_has_known_values():
    table = sincos2d(2, 3, 8)
    assert table.shape == (6, 8)
    assert table.dtype == np.float32
    # Two frequencies, 1 and 1/10000; features are sin x, cos x, sin y, cos y.
    x, y = 2.0, 1.0
    expected = [f(a * w) for a in (x, y) for f in (np.sin, np.cos) for w in (1.0, 1e-4)]
    np.testing.assert_allclose(table[1 * 3 + 2], expected, rtol=1e-6)
    np.testing.assert_array_equal(table[0], [0, 0, 1, 1, 0, 0, 1, 1])


def test_sincos_tells_rows_from_columns():
    table = sincos2d(3, 4, 16).reshape(3, 4, 16)
    assert (table[:, :, :8] == table[:1, :, :8]).all()
    assert (table[:, :, 8:] == table[:, :1, 8:]).all()
    assert len(np.unique(table.reshape(12, 16), axis=0)) == 12


@pytest.mark.parametrize('dim', [4, 6, 10])
def test_sincos_refuses_widths_that_have_no_four_quarters(dim):
    with pytest.raises(UserError, match=f'not {dim}'):
        sincos2d(2, 2, dim)


@pytest.mark.slow
def test_attention_pooling_ignores_the_order_of_the_tokens():
    x = random(2, 7, 16)
    head = MapHead(num_heads=2, mlp_dim=32)
    params, apply = drawn(head, x), jax.jit(head.apply)
    others = np.asarray(x)[:, ::-1], x + random(2, 7, 16, seed=1)
    pooled, backwards, moved = (np.asarray(apply({'params': params}, y)) for y in (x, *others))
    assert pooled.shape == (2, 16)
    np.testing.assert_allclose(backwards, pooled, atol=1e-5)
    assert np.abs(moved - pooled).max() > 1e-2


def test_sincos1d_is_the_paper_s_equation():
    tokens, dim = 50, 6
    table, halves = sincos1d(tokens, dim), sincos1d(tokens, dim, 'concatenated')
    assert table.dtype == np.float32
    for p in range(tokens):
        for i in range(dim // 2):
            angle = p / 10_000 ** (2 * i / dim)
            pair = np.float32([np.sin(angle), np.cos(angle)])
            np.testing.assert_allclose(table[p, 2 * i : 2 * i + 2], pair, atol=1e-7)
            np.testing.assert_allclose(halves[p, [i, dim // 2 + i]], pair, atol=1e-7)


def test_sincos1d_needs_an_even_width_and_a_known_layout():
    with pytest.raises(UserError, match=r'width.*7'):
        sincos1d(3, 7)
    with pytest.raises(UserError, match="'interleave'"):
        sincos1d(3, 8, 'interleave')
