"""What is shown of a colorizer: the file in its own luminance, of any size."""

import argparse
import pathlib

import numpy as np
import pytest

from vit_jax.ops import colors
from vit_jax.viz import colorize, figures
from vit_jax.viz.photo import Context, Photo

CONTEXT = Context((), argparse.Namespace())
RNG = np.random.default_rng(0)
COLOR = RNG.integers(0, 256, (30, 50, 3), dtype=np.uint8)
GRAY = np.repeat(RNG.integers(0, 256, (30, 50, 1), dtype=np.uint8), 3, axis=2)
SEEN = RNG.integers(0, 256, (8, 12, 3), dtype=np.uint8)
MADE = {'ab': RNG.uniform(-60, 60, (4, 6, 2)).astype(np.float32), 'image': SEEN // 2}


def photo(original):
    return Photo(pathlib.Path('a.png'), original, {'image': SEEN}, '')


def gray_of(image):
    return np.asarray(colors.to_bytes(colors.to_gray(image / 255))).astype(int)


@pytest.mark.slow
@pytest.mark.parametrize('original', [COLOR, GRAY], ids=['color', 'gray'])
def test_the_file_keeps_its_size_and_luminance(original, monkeypatch):
    monkeypatch.setattr(colorize, 'CHUNK', 400)  # 1,500 pixels are three chunks and a part
    made = colorize.color_file(MADE['ab'], photo(original))
    assert made.shape == (30, 50, 3) and made.dtype == np.uint8
    assert np.abs(gray_of(made) - gray_of(original)).max() <= 1
    if original is GRAY:
        np.testing.assert_array_equal(gray_of(GRAY), GRAY[..., :1])


def test_colors_are_enlarged_between_the_centers_of_cells():
    """One color everywhere is that color in every pixel; another half shows in its half."""
    flat = np.full((30, 50, 3), 128, np.uint8)
    ab = np.zeros((2, 2, 2), np.float32)
    ab[:, 1] = 30, 20
    made = colorize.color_file(ab, photo(flat))
    lab = np.asarray(colors.rgb_to_lab(made / 255))
    np.testing.assert_allclose(lab[:, :12, 1:], 0, atol=1)
    np.testing.assert_allclose(lab[:, 38:, 1:], np.broadcast_to([30, 20], (30, 12, 2)), atol=1)


def test_the_original_is_shown_where_it_has_colors():
    assert [p.shape for p in colorize.panels(MADE['ab'], photo(COLOR))] == [(30, 50, 3)] * 3
    gray, made = colorize.panels(MADE['ab'], photo(GRAY))
    np.testing.assert_array_equal(gray, GRAY)
    assert figures.has_colors(made) and not figures.has_colors(gray)
    (row,) = colorize.Viz().rows(MADE, photo(COLOR), CONTEXT)
    assert row.keys() == {'colorfulness', 'true_colorfulness', 'psnr'}
    error = np.square(SEEN / 255 - MADE['image'] / 255).mean()
    assert row['psnr'] == pytest.approx(-10 * np.log10(error))
    assert colorize.Viz().rows(MADE, photo(GRAY), CONTEXT)[0].keys() == {'colorfulness'}


def test_a_line_of_pictures_an_image():
    figure = colorize.Viz().draw([MADE, MADE], [photo(GRAY), photo(COLOR)], CONTEXT)
    titles = [axes.get_title() for axes in figure.axes]
    assert titles == ['a.png: gray', 'colorized', '', 'a.png: gray', 'colorized', 'original']
    assert [len(axes.images) for axes in figure.axes] == [1, 1, 0, 1, 1, 1]
