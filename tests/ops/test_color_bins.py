"""Colors as classes: how many, who is whose neighbor, and what rare ones weigh."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from vit_jax.ops import colors
from vit_jax.ops.colors import NUM_COARSE_BINS, from_coarse_bins, to_coarse_bins, to_luma

RNG = np.random.default_rng(0)
AB = np.asarray(colors.rgb_to_lab(RNG.uniform(size=(400, 3)).astype(np.float32)))[:, 1:]


def test_there_are_as_many_as_in_the_paper():
    bins = colors.bin_centers()
    assert bins.shape == (colors.NUM_BINS, 2) == (313, 2)
    assert not (bins % 10).any() and len(np.unique(bins, axis=0)) == 313
    assert not bins.flags.writeable


@pytest.mark.slow
def test_what_the_docstring_says_of_the_gamut():
    """229 bins are colors of sRGB at some lightness, and colors fall into 261."""
    lightness = np.arange(0, 100, 0.25, np.float32)[:, None, None]
    lab = np.broadcast_to(colors.bin_centers(), (len(lightness), 313, 2))
    lab = np.concatenate([np.broadcast_to(lightness, (*lab.shape[:2], 1)), lab], axis=-1)
    light = np.asarray(colors.lab_to_linear(lab))
    assert ((light >= 0) & (light <= 1)).all(-1).any(0).sum() == pytest.approx(229, abs=3)
    steps = np.linspace(0, 1, 86, dtype=np.float32)
    cube = np.stack(np.meshgrid(steps, steps, [0, 1], indexing='ij'), -1).reshape(-1, 3)
    faces = np.concatenate([np.roll(cube, i, axis=1) for i in range(3)])
    ab = np.asarray(colors.rgb_to_lab(faces))[:, 1:]
    rounded = np.unique(np.rint(ab / 10), axis=0)
    assert len(rounded) == 261
    assert {*map(tuple, 10 * rounded)} <= {*map(tuple, colors.bin_centers())}


def test_the_nearest_bin_is_the_rounded_color():
    found = colors.bin_centers()[np.asarray(colors.nearest_bin(AB))]
    np.testing.assert_array_equal(found, 10 * np.rint(AB / 10))


def test_soft_labels_are_gaussians_of_the_five_nearest():
    bins, weights = (np.asarray(x) for x in colors.soft_encode(AB))
    distances = np.linalg.norm(AB[:, None] - colors.bin_centers(), axis=-1)
    for i, row in enumerate(distances):
        expected = np.argsort(row)[:5]
        np.testing.assert_allclose(row[bins[i]], row[expected], rtol=1e-4)
        gaussian = np.exp(-(row[bins[i]] ** 2) / 50)
        np.testing.assert_allclose(weights[i], gaussian / gaussian.sum(), atol=1e-4)
    np.testing.assert_array_equal(bins[:, 0], colors.nearest_bin(AB))


def test_who_takes_the_nearest_alone_does_not_make_xla_sort_all_bins():
    def nearest_and_weights(ab):
        bins, weights = colors.soft_encode(ab)
        return bins[..., 0], bins, weights

    program = jax.jit(nearest_and_weights).lower(AB).compile().as_text()
    assert 'custom_call_target="TopK"' in program and ' sort(' not in program


@pytest.mark.fault(74)
def test_several_devices_under_pmap_find_the_bins_of_one():
    parts = jnp.asarray(AB).reshape(2, -1, 2)
    found = jax.pmap(colors.soft_encode, devices=jax.devices()[:2])(parts)
    expected = jax.jit(jax.vmap(colors.soft_encode))(parts)
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_array_equal(a, b)


def test_the_annealed_mean_goes_from_the_mean_to_the_mode():
    logits = jnp.asarray(RNG.normal(size=(20, 313)), jnp.float32)
    probs = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    mean = colors.annealed_mean(logits, 1.0)
    np.testing.assert_allclose(mean, probs @ colors.bin_centers(), atol=1e-3)
    mode = colors.annealed_mean(logits, 1e-3)
    np.testing.assert_allclose(mode, colors.bin_centers()[logits.argmax(-1)], atol=1e-3)
    sharper = probs ** (1 / 0.38)
    annealed = (sharper / sharper.sum(-1, keepdims=True)) @ colors.bin_centers()
    np.testing.assert_allclose(colors.annealed_mean(logits), annealed, atol=1e-3)


def test_weights_are_one_on_average_and_larger_for_rare_colors():
    counts = np.zeros(313)
    common, rare = colors.nearest_bin(np.array([[0, 0], [50, 50]], np.float32)).tolist()
    counts[common], counts[rare] = 999, 1
    for mix in (0.0, 0.5, 1.0):
        weights = colors.class_weights(counts + 1e-9, mix)
        # Smoothed shares, by a sum over all pairs.
        centers = colors.bin_centers().astype(float)
        kernel = np.exp(-((centers[:, None] - centers) ** 2).sum(-1) / 50)
        shares = (kernel / kernel.sum(0) * ((counts + 1e-9) / counts.sum())).sum(1)
        assert (shares * weights).sum() == pytest.approx(1, rel=1e-4)
        ratio = ((1 - mix) * shares[common] + mix / 313) / ((1 - mix) * shares[rare] + mix / 313)
        assert weights[rare] / weights[common] == pytest.approx(ratio, rel=1e-4)
    np.testing.assert_allclose(weights, 1, rtol=1e-5)


IMAGE = np.random.default_rng(0).integers(0, 256, (2, 4, 6, 3), dtype=np.uint8)


def test_a_bin_is_64r_8g_b_of_three_bits_each():
    red, green, blue = (IMAGE[..., c].astype(int) >> 5 for c in range(3))
    np.testing.assert_array_equal(to_coarse_bins(jnp.asarray(IMAGE)), 64 * red + 8 * green + blue)


def test_every_bin_comes_back_from_the_color_in_its_middle():
    bins = jnp.arange(NUM_COARSE_BINS)
    middles = from_coarse_bins(bins)
    np.testing.assert_array_equal(to_coarse_bins(middles), bins)
    np.testing.assert_array_equal(middles[0b101_000_111], [5 * 32 + 16, 16, 7 * 32 + 16])


def test_no_byte_is_more_than_16_from_that_color():
    distance = np.abs(np.asarray(from_coarse_bins(to_coarse_bins(jnp.asarray(IMAGE))), int) - IMAGE)
    assert distance.max() <= 16


def test_gray_is_luma_and_a_gray_pixel_keeps_its_value():
    values = np.arange(256, dtype=np.uint8)
    np.testing.assert_array_equal(to_luma(jnp.asarray(values)[:, None].repeat(3, 1)), values)
    luma = IMAGE @ np.array([0.2989, 0.587, 0.114])
    assert np.abs(np.asarray(to_luma(jnp.asarray(IMAGE))) - luma).max() <= 0.501


def test_blocks_are_means_and_come_back():
    small = colors.downsample(jnp.asarray(IMAGE), 2)
    np.testing.assert_allclose(small[1, 0, 2], IMAGE[1, :2, 4:].mean((0, 1)), rtol=1e-6)
    large = colors.upsample(jnp.asarray(IMAGE), 3)
    assert large.shape == (2, 12, 18, 3)
    np.testing.assert_array_equal(colors.downsample(large, 3), IMAGE)
    with pytest.raises(ValueError, match=r'4 pixels.* 6 x 4'):
        colors.downsample(jnp.asarray(IMAGE), 4)
