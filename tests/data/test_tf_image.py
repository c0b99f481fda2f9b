"""Crops and sizes as TensorFlow makes them, against its published definitions."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from vit_jax.data import native
from vit_jax.data.records import example_rng
from vit_jax.data.transforms import parse_transforms, tf_image
from vit_jax.data.transforms.windows import distorted_window, random_window
from vit_jax.errors import UserError

SIZES = [(9, 14), (24, 34), (12, 17), (31, 5)]


def picture(height=12, width=17, channels=3):
    return np.random.default_rng(0).integers(0, 256, (height, width, channels), np.uint8)


def apply(spec, image, example=0):
    return parse_transforms(spec)({'image': image, 'label': 3}, example_rng(0, example))['image']


def floor_agrees(actual, expected):
    """Bytes are the floats with their fractions cut off, but for rounding near whole numbers."""
    assert actual.dtype == np.uint8
    assert ((actual <= expected + 1e-3) & (actual > expected - 1 - 1e-3)).all()


@pytest.mark.parametrize('size', SIZES)
def test_bilinear_is_that_of_jax_without_antialiasing(size):
    image = picture()
    expected = jax.image.resize(image.astype(np.float32), (*size, 3), 'linear', antialias=False)
    floor_agrees(tf_image.bilinear(image, *size), np.asarray(expected))


@pytest.mark.parametrize('size', SIZES)
def test_area_is_the_mean_of_what_a_pixel_covers(size):
    """Each pixel as a square of small ones, of which every new pixel has a whole number."""
    image, (height, width) = picture(), size
    fine = np.repeat(np.repeat(image.astype(float), height, 0), width, 1)
    expected = fine.reshape(height, 12, width, 17, 3).mean((1, 3))
    floor_agrees(tf_image.area(image, *size), expected)


@pytest.mark.parametrize(
    'window', [(slice(3, 50), slice(9, 40)), (slice(0, 40), slice(None, None, -1))]
)
@pytest.mark.parametrize('method', tf_image.METHODS)
def test_windows_and_mirrored_images_are_resized_as_they_are(method, window):
    """Views of other memory, whose rows are not one after the other."""
    view = picture(60, 70)[window]
    found = tf_image.METHODS[method](view, 24, 24)
    np.testing.assert_array_equal(found, tf_image.METHODS[method](view.copy(), 24, 24))


@pytest.mark.parametrize('method', tf_image.METHODS)
@pytest.mark.parametrize('value', [0, 1, 127, 255])
def test_one_color_stays_what_it_is(method, value):
    image = np.full((375, 500, 1), value, np.uint8)
    for size in ((256, 341), (224, 224), (448, 600)):
        np.testing.assert_array_equal(tf_image.METHODS[method](image, *size), value)


@pytest.mark.parametrize('method', tf_image.METHODS)
@pytest.mark.parametrize('channels', [1, 2, 3, 4, 5])
def test_compiled_loops_give_the_same_bytes(monkeypatch, method, channels):
    if not native.can_resample(picture()):
        pytest.skip('vit_jax/data/_native.c was not compiled')
    resize = tf_image.METHODS[method]
    image = picture(33, 57, channels)
    kinds = image, image[3:30, 5:40], image[:, ::-1], image.swapaxes(0, 1)
    found = [resize(kind, *size) for kind in kinds for size in SIZES]
    assert native.can_resample(image) == (channels <= 4)
    assert not native.can_resample(picture().astype(np.float32))
    monkeypatch.setattr(native, '_load_native', lambda: None)
    expected = [resize(kind, *size) for kind in kinds for size in SIZES]
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_array_equal(a, b)


def test_the_transforms_resize_by_them():
    image = picture()
    for spec, method, size in (
        ('resize_tf((5, 7))', 'bilinear', (5, 7)),
        ("resize_tf(8, 'area')", 'area', (8, 8)),
        ('resize_small_tf(6)', 'area', (6, 8)),  # 17 / 2 is rounded to the even number
        ("resize_small_tf(24, 'bilinear')", 'bilinear', (24, 34)),
    ):
        expected = tf_image.METHODS[method](image, *size)
        np.testing.assert_array_equal(apply(spec, image), expected, err_msg=spec)


def test_a_crop_is_a_window_that_is_resized():
    image, spec = picture(60, 80), 'inception_crop_tf(16)'
    for example in range(5):
        y, x, h, w = distorted_window(example_rng(0, example), (60, 80), (0.05, 1.0))
        expected = tf_image.bilinear(image[y : y + h, x : x + w], 16, 16)
        np.testing.assert_array_equal(apply(spec, image, example), expected)


def published(rng, height, width, least=0.05):
    """Shares of the area that `sample_distorted_bounding_box` draws, without its rounding.

    Aspect ratio uniform in 0.75 to 1.33; height uniform between that of the least area and that of
    the whole, cut down to what the image has room for.
    """
    ratio = rng.uniform(0.75, 1.33, 20_000)
    lowest = np.sqrt(least * height * width / ratio)
    highest = np.minimum(np.minimum(np.sqrt(height * width / ratio), width / ratio), height)
    h = rng.uniform(lowest, highest)
    return h * h * ratio / (height * width)


@pytest.mark.parametrize('size', [(375, 500), (640, 480), (300, 300)])
def test_windows_have_the_distribution_of_tensorflow(size):
    rng = np.random.default_rng(0)
    windows = np.array([distorted_window(rng, size, (0.05, 1.0)) for _ in range(20_000)])
    y, x, h, w = windows.T
    assert (h * w >= 0.05 * size[0] * size[1]).all()
    assert (y + h <= size[0]).all() and (x + w <= size[1]).all()
    assert (w / h > 0.73).all() and (w / h < 1.36).all()
    drawn, expected = np.sort(h * w / (size[0] * size[1])), np.sort(published(rng, *size))
    # Kolmogorov and Smirnov: the largest distance of the two distributions; 0.018 at p = 0.3 %.
    grid = np.linspace(0, 1, 501)
    apart = np.searchsorted(drawn, grid) - np.searchsorted(expected, grid)
    assert np.abs(apart).max() / len(drawn) < 0.018
    # Places are uniform, but the last one is left out.
    spare = size[0] - h
    assert np.mean(y[spare > 50] / spare[spare > 50]) == pytest.approx(0.5, abs=0.02)
    assert (y < spare)[spare > 0].all()


def test_small_windows_are_more_likely_than_in_ours():
    """On 500 x 375 pixels: the mean area, and the share of windows below a quarter of the image."""
    rng, whole = np.random.default_rng(0), 375 * 500
    theirs = [distorted_window(rng, (375, 500), (0.05, 1.0)) for _ in range(5_000)]
    ours = [random_window(rng, (375, 500), (0.05, 1.0), (3 / 4, 4 / 3)) for _ in range(5_000)]
    for windows, mean, small in ((theirs, 0.34, 0.42), (ours, 0.42, 0.27)):
        area = np.array([w[2] * w[3] for w in windows if w]) / whole
        assert area.mean() == pytest.approx(mean, abs=0.012)
        assert (area < 0.25).mean() == pytest.approx(small, abs=0.02)


@pytest.mark.parametrize('size', [(1, 1), (1, 300), (300, 1), (2, 2)])
def test_an_image_without_room_is_taken_whole_or_within_its_borders(size):
    for example in range(20):
        y, x, h, w = distorted_window(example_rng(0, example), size, (0.9, 1.0))
        assert 0 < h <= size[0] - y and 0 < w <= size[1] - x


def test_mistakes_are_refused():
    for spec in ("resize_tf(8, 'lanczos')", 'inception_crop_tf(8, 0)', 'resize_small_tf(0)'):
        with pytest.raises(UserError, match='must be'):
            parse_transforms(spec)
