"""Resizing against SciPy, PyTorch and JAX; PI-resize keeps tokens; what stays stays."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.ndimage

from vit_jax.errors import UserError
from vit_jax.nn.patches import PatchEmbed
from vit_jax.ops import resize

SIZES = [
    ((14, 14), (24, 24)),
    ((24, 24), (14, 14)),
    ((7, 7), (12, 12)),
    ((3, 5), (8, 4)),
    ((6, 2), (6, 9)),
    ((5, 5), (1, 1)),
    ((1, 1), (3, 4)),
]


METHODS = {
    'bilinear': resize.bilinear_align_corners,
    'bicubic': resize.bicubic_half_pixel,
    'antialiased': resize.bicubic_antialiased,
}


def values(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


@pytest.mark.parametrize(('old', 'new'), SIZES)
def test_bilinear_is_that_of_scipy(old, new):
    x = values(*old, 4)
    expected = scipy.ndimage.zoom(x, (new[0] / old[0], new[1] / old[1], 1), order=1)
    np.testing.assert_allclose(resize.bilinear_align_corners(x, new), expected, atol=1e-6)


@pytest.mark.parametrize('antialias', [False, True])
@pytest.mark.parametrize(('old', 'new'), SIZES)
def test_bicubic_is_that_of_torch(old, new, antialias):
    torch = pytest.importorskip('torch')
    x = values(*old, 4)
    image = torch.from_numpy(x.transpose(2, 0, 1).astype(np.float64))[None]
    other = torch.nn.functional.interpolate(image, size=new, mode='bicubic', antialias=antialias)
    method = resize.bicubic_antialiased if antialias else resize.bicubic_half_pixel
    np.testing.assert_allclose(method(x, new), other[0].permute(1, 2, 0), atol=1e-6)


def test_the_two_methods_differ_from_one_another_and_from_jax():
    x = values(14, 14, 2)
    results = [
        resize.bilinear_align_corners(x, (24, 24)),
        resize.bicubic_half_pixel(x, (24, 24)),
        jax.image.resize(x, (24, 24, 2), 'cubic'),
        jax.image.resize(x, (24, 24, 2), 'linear'),
    ]
    for i, a in enumerate(results):
        for b in results[:i]:
            assert np.abs(a - b).max() > 0.1


def tokens(patches, kernel):
    """What a patch embedding makes of patches [B p q C]."""
    return np.einsum('bpqc,pqcd->bd', patches, kernel)


def resized_patches(patches, size):
    """As FlexiViT: the bilinear resize of tf.image and jax.image, with antialiasing."""
    shape = (len(patches), *size, patches.shape[-1])
    return np.asarray(jax.image.resize(patches, shape, 'linear'), np.float64)


@pytest.mark.parametrize(('old', 'new'), [((8, 8), (12, 12)), ((4, 4), (32, 32)), ((3, 5), (7, 6))])
def test_larger_patches_give_the_tokens_of_the_original(old, new):
    kernel, patches = values(*old, 3, 10), values(6, *old, 3, seed=1)
    larger = resize.pinv_patch_kernel(kernel, new)
    assert larger.shape == (*new, 3, 10)
    np.testing.assert_allclose(
        tokens(resized_patches(patches, new), larger), tokens(patches, kernel), atol=2e-4
    )


def test_tokens_of_a_whole_image():
    """Patches enlarged one by one, so that none sees its neighbors, by the model's own layer."""
    kernel, image = values(4, 4, 3, 5), values(1, 8, 12, 3)
    patches = image.reshape(2, 4, 3, 4, 3).swapaxes(1, 2).reshape(6, 4, 4, 3)
    enlarged = resized_patches(patches, (6, 6)).reshape(2, 3, 6, 6, 3)
    enlarged = jnp.asarray(enlarged.swapaxes(1, 2).reshape(1, 12, 18, 3), jnp.float32)

    def embed(images, size, kernel):
        params = {'kernel': jnp.asarray(kernel), 'bias': jnp.zeros(5)}
        return PatchEmbed(size, 5).apply({'params': params}, images)

    np.testing.assert_allclose(
        embed(enlarged, 6, resize.pinv_patch_kernel(kernel, (6, 6))),
        embed(jnp.asarray(image), 4, kernel),
        atol=1e-4,
    )


def test_smaller_patches_give_the_least_squares_tokens():
    """The defining property: over patches of independent pixels no kernel comes closer."""
    old, new = (8, 8), (5, 5)
    kernel = values(*old, 1, 3)
    basis = np.eye(64, dtype=np.float32).reshape(64, *old, 1)
    matrix = resized_patches(basis, new).reshape(64, 25)
    expected = np.linalg.lstsq(matrix, kernel.reshape(64, 3), rcond=None)[0]
    smaller = resize.pinv_patch_kernel(kernel, new)
    np.testing.assert_allclose(smaller.reshape(25, 3), expected, atol=1e-4)


def test_positions_come_back_where_the_grid_lies_in_the_finer_one():
    table = values(1, 2 * 3 + 1, 5)
    there = resize.position_embedding(table, (2, 3), (7, 9), num_prefix=1)
    back = resize.position_embedding(there, (7, 9), (2, 3), num_prefix=1)
    assert there.shape == (1, 64, 5)
    np.testing.assert_allclose(back, table, atol=1e-6)


@pytest.mark.parametrize('method', METHODS)
@pytest.mark.parametrize('prefix', [0, 1, 2])
def test_positions_of_other_grids(method, prefix):
    table = values(1, 3 * 4 + prefix, 6)
    new = resize.position_embedding(table, (3, 4), (6, 5), method, prefix)
    assert new.shape == (1, 30 + prefix, 6) and new.dtype == np.float32
    np.testing.assert_array_equal(new[:, :prefix], table[:, :prefix])
    expected = METHODS[method](table[0, prefix:].reshape(3, 4, 6), (6, 5))
    np.testing.assert_array_equal(new[0, prefix:].reshape(6, 5, 6), expected)
    same = resize.position_embedding(table, (3, 4), (3, 4), method, prefix)
    np.testing.assert_array_equal(same, table)


def test_a_constant_stays_constant():
    x = np.full((4, 6, 2), 3.0, np.float32)
    for method in METHODS.values():
        np.testing.assert_allclose(method(x, (9, 5)), 3.0, atol=1e-6)


@pytest.mark.parametrize(
    ('change', 'words'),
    [
        ({'method': 'bilinaer'}, "did you mean 'bilinear'"),
        ({'old_grid': (4, 4)}, '12 patches .* 4 x 4'),
        ({'num_prefix': 1}, '11 patches .* 4 x 3'),
        ({'new_grid': (0, 4)}, 'at least 1 x 1'),
    ],
)
def test_mistakes(change, words):
    good = {'old_grid': (3, 4), 'new_grid': (2, 2), 'method': 'bilinear', 'num_prefix': 0}
    with pytest.raises(UserError, match=words):
        resize.position_embedding(values(1, 12, 4), **{**good, **change})


def test_biases_by_offset_are_those_of_timm():
    """Near ones stay, and far ones move to the new border; the numbers are timm's."""
    table = np.arange(25.0).reshape(5, 5, 1) ** 1.5
    larger, smaller = (resize.grid(table, (n, n), 'geometric')[..., 0] for n in (9, 3))
    row = [31.622774, 31.622776, 33.242805, 36.482872, 41.569218]
    np.testing.assert_allclose(larger[4, :5], row, rtol=1e-5)
    np.testing.assert_allclose(smaller[0], [14.696939, 18.520260, 22.627417], rtol=1e-6)


@pytest.mark.parametrize(
    ('method', 'options'),
    [
        ('linear_cropped', {'mode': 'bilinear'}),
        ('bilinear_cropped', {'mode': 'bilinear', 'align_corners': True}),
        ('antialiased_cropped', {'mode': 'bicubic', 'antialias': True}),
    ],
)
def test_a_grid_that_keeps_its_aspect_ratio_is_that_of_timm(method, options):
    """As in timm's NaFlexVit with pos_embed_ar_preserving."""
    torch = pytest.importorskip('torch')
    table = np.random.default_rng(0).normal(size=(3, 3, 4)).astype(np.float32)
    wide = torch.nn.functional.interpolate(
        torch.from_numpy(table.transpose(2, 0, 1))[None], size=(5, 5), **options
    )
    expected = wide[0, :, :2, :5].numpy().transpose(1, 2, 0)
    np.testing.assert_allclose(resize.grid(table, (2, 5), method), expected, atol=1e-5)
