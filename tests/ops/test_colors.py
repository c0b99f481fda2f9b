"""Color arithmetic: published values, exact inverses, luminance that no color changes."""

import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from vit_jax.ops import colors as lib
from vit_jax.ops import fidelity

NAMES = ('to_linear', 'from_linear', 'to_gray', 'rgb_to_lab', 'lab_to_linear')
NAMES += ('colorize', 'to_bytes')
colors = types.SimpleNamespace(**{name: jax.jit(getattr(lib, name)) for name in NAMES})
RNG = np.random.default_rng(0)
RGB = RNG.uniform(size=(500, 3)).astype(np.float32)

# CIE Lab under D65 of sRGB's primaries and secondaries, and of a gray, as widely published
# (brucelindbloom.com; https://www.easyrgb.com).
PUBLISHED = {
    (255, 255, 255): (100.0, 0.0, 0.0),
    (0, 0, 0): (0.0, 0.0, 0.0),
    (255, 0, 0): (53.2408, 80.0925, 67.2032),
    (0, 255, 0): (87.7347, -86.1827, 83.1793),
    (0, 0, 255): (32.2970, 79.1875, -107.8602),
    (0, 255, 255): (91.1132, -48.0875, -14.1312),
    (255, 0, 255): (60.3242, 98.2343, -60.8249),
    (255, 255, 0): (97.1393, -21.5537, 94.4780),
    (119, 119, 119): (50.0344, 0.0, 0.0),
}


def by_definition(rgb):
    """Lab of one color, one number after the other, by IEC 61966-2-1 and CIE 15:2004."""
    light = [v / 12.92 if v <= 0.04045 else ((v + 0.055) / 1.055) ** 2.4 for v in rgb]
    matrix = (
        (0.4124564, 0.3575761, 0.1804375),
        (0.2126729, 0.7151522, 0.0721750),
        (0.0193339, 0.1191920, 0.9503041),
    )
    xyz = [sum(m * v for m, v in zip(row, light, strict=True)) for row in matrix]
    ratios = [v / w for v, w in zip(xyz, (0.95047, 1.0, 1.08883), strict=True)]
    x, y, z = (t ** (1 / 3) if t > 216 / 24389 else (24389 / 27 * t + 16) / 116 for t in ratios)
    return 116 * y - 16, 500 * (x - y), 200 * (y - z)


@pytest.mark.parametrize('rgb', PUBLISHED)
def test_lab_has_its_published_values(rgb):
    found = colors.rgb_to_lab(np.array(rgb, np.float32) / 255)
    np.testing.assert_allclose(found, PUBLISHED[rgb], atol=2e-3)


def test_lab_is_that_of_the_definition():
    dark = RGB[:50] / 40  # where both curves are lines
    some = np.concatenate([RGB[:50], dark])
    expected = [by_definition(rgb.astype(np.float64)) for rgb in some]
    np.testing.assert_allclose(colors.rgb_to_lab(some), expected, atol=1e-3)


def test_conversions_have_inverses():
    np.testing.assert_allclose(colors.from_linear(colors.to_linear(RGB)), RGB, atol=1e-5)
    back = colors.from_linear(colors.lab_to_linear(colors.rgb_to_lab(RGB)))
    np.testing.assert_allclose(back, RGB, atol=1e-4)


def test_every_gray_is_its_own_gray():
    values = np.repeat(np.arange(256, dtype=np.uint8)[:, None], 3, axis=1)
    np.testing.assert_array_equal(
        np.asarray(colors.to_bytes(colors.to_gray(values / 255)))[:, 0], values[:, 0]
    )
    np.testing.assert_allclose(np.asarray(colors.rgb_to_lab(values / 255))[:, 1:], 0, atol=1e-3)


def test_colors_come_back_on_their_own_gray():
    ab = np.asarray(colors.rgb_to_lab(RGB))[:, 1:]
    np.testing.assert_allclose(colors.colorize(colors.to_gray(RGB), ab), RGB, atol=1e-3)


@pytest.mark.slow
def test_no_color_changes_the_luminance():
    """Of any gray in bytes and any (a, b), most of which are beyond the gamut; to one level."""
    gray = np.repeat(np.arange(256), 200)[:, None]
    ab = RNG.uniform(-128, 128, (len(gray), 2)).astype(np.float32)
    made = colors.to_bytes(colors.colorize(gray / 255, ab))
    again = np.asarray(colors.to_bytes(colors.to_gray(np.asarray(made) / 255))).astype(int)
    assert np.abs(again - gray).max() <= 1


@pytest.mark.slow
def test_beyond_the_gamut_only_saturation_is_lost():
    """Linear light moves straight toward the gray, and no further than the gamut."""
    gray, ab = np.full((1, 1), 0.5), np.array([[120.0, -110.0]])

    @jax.jit
    def run(gray, ab):
        lightness = lib.rgb_to_lab(gray.repeat(3, 1))[:, :1]
        wanted = lib.lab_to_linear(jnp.concatenate([lightness, ab], 1))
        return lib.to_linear(gray), wanted, lib.to_linear(lib.colorize(gray, ab))

    light, wanted, found = jax.device_get(run(gray, ab))
    assert wanted.max() > 1 and wanted.min() < 0
    shares = (found - light) / (wanted - light)
    np.testing.assert_allclose(shares, shares[0, 0] * np.ones((1, 3)), rtol=1e-4)
    edge = np.minimum(found, 1 - found).min()
    assert 0 < shares[0, 0] < 1 and edge == pytest.approx(0, abs=1e-5)


def test_gradients_are_finite():
    ab = jnp.asarray(RNG.uniform(-128, 128, (300, 2)), jnp.float32)
    gray = jnp.asarray(np.linspace(0, 1, 300, dtype=np.float32)[:, None])
    grads = jax.jit(jax.grad(lambda x: lib.colorize(gray, x).sum()))(ab)
    assert np.isfinite(grads).all()


def test_colorfulness():
    """By hand: rg = (255, -255), yb = 127.5 in both halves of a red and green image."""
    image = np.zeros((4, 4, 3), np.float32)
    image[:, :2, 0], image[:, 2:, 1] = 1, 1
    assert fidelity.colorfulness(image) == pytest.approx(255 + 0.3 * 127.5)
    assert fidelity.colorfulness(np.full((2, 4, 4, 3), 0.3, np.float32)).tolist() == [0, 0]


@pytest.mark.parametrize('xp', [np, jnp])
def test_psnr(xp):
    image = RNG.uniform(size=(2, 4, 4, 3)).astype(np.float32)
    noisy = image + np.array([0, 0.1], np.float32)[:, None, None, None]
    ratios = fidelity.psnr(xp.asarray(image), xp.asarray(noisy))
    assert isinstance(ratios, np.ndarray if xp is np else jax.Array)
    np.testing.assert_allclose(ratios, [100, 20], rtol=1e-4)
    scaled = fidelity.psnr(255 * xp.asarray(image), 255 * xp.asarray(noisy), peak=255, floor=0)
    np.testing.assert_allclose(scaled, [np.inf, 20], rtol=1e-4)
    left = np.arange(4)[:, None] < 2
    noisy[1, :, 2:] = image[1, :, 2:] + 0.2
    halves = fidelity.psnr(xp.asarray(image), xp.asarray(noisy), where=xp.asarray(left))
    np.testing.assert_allclose(halves, [100, 20], rtol=1e-4)
