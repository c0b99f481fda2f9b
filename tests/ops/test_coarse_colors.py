import jax.numpy as jnp
import numpy as np
import pytest

from vit_jax.ops import colors as colors_lib
from vit_jax.ops.colors import NUM_COARSE_BINS, from_coarse_bins, to_coarse_bins, to_luma

RNG = np.random.default_rng(0)
IMAGE = RNG.integers(0, 256, (2, 4, 6, 3), dtype=np.uint8)


def test_a_bin_is_64r_8g_b_of_three_bits_each():
    red, green, blue = (IMAGE[..., c].astype(int) >> 5 for c in range(3))
    np.testing.assert_array_equal(to_coarse_bins(jnp.asarray(IMAGE)), 64 * red + 8 * green + blue)


def test_every_bin_comes_back_from_the_color_in_its_middle():
    bins = jnp.arange(NUM_COARSE_BINS)
    colors = from_coarse_bins(bins)
    np.testing.assert_array_equal(to_coarse_bins(colors), bins)
    np.testing.assert_array_equal(colors[0b101_000_111], [5 * 32 + 16, 16, 7 * 32 + 16])


def test_no_byte_is_more_than_16_from_that_color():
    distance = np.abs(np.asarray(from_coarse_bins(to_coarse_bins(jnp.asarray(IMAGE))), int) - IMAGE)
    assert distance.max() <= 16


def test_gray_is_luma_and_a_gray_pixel_keeps_its_value():
    values = np.arange(256, dtype=np.uint8)
    np.testing.assert_array_equal(to_luma(jnp.asarray(values)[:, None].repeat(3, 1)), values)
    luma = IMAGE @ np.array([0.2989, 0.587, 0.114])
    assert np.abs(np.asarray(to_luma(jnp.asarray(IMAGE))) - luma).max() <= 0.501


def test_blocks_are_means_and_come_back():
    small = colors_lib.downsample(jnp.asarray(IMAGE), 2)
    np.testing.assert_allclose(small[1, 0, 2], IMAGE[1, :2, 4:].mean((0, 1)), rtol=1e-6)
    large = colors_lib.upsample(jnp.asarray(IMAGE), 3)
    assert large.shape == (2, 12, 18, 3)
    np.testing.assert_array_equal(colors_lib.downsample(large, 3), IMAGE)
    with pytest.raises(ValueError, match='blocks of 4 pixels do not tile 4 x 6 pixels'):
        colors_lib.downsample(jnp.asarray(IMAGE), 4)
