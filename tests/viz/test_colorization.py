"""What is shown of a colorizer: the file in its own luminance, of any size."""

import argparse
import pathlib

import numpy as np
import pytest

from vit_jax.ops import colors
from vit_jax.viz import colorize
from vit_jax.viz.photo import Context, Photo

CONTEXT = Context((), argparse.Namespace())
RNG = np.random.default_rng(0)
COLOUR = RNG.integers(0, 256, (30, 50, 3), dtype=np.uint8)
GREY = np.repeat(RNG.integers(0, 256, (30, 50, 1), dtype=np.uint8), 3, axis=2)
SEEN = RNG.integers(0, 256, (8, 12, 3), dtype=np.uint8)
MADE = {'ab': RNG.uniform(-60, 60, (4, 6, 2)).astype(np.float32), 'image': SEEN // 2}


def photo(original):
    return Photo(pathlib.Path('a.png'), original, {'image': SEEN}, '')


def grey_of(image):
    return np.asarray(colors.to_bytes(colors.to_grey(image / 255))).astype(int)


@pytest.mark.parametrize('original', [COLOUR, GREY], ids=['colour', 'grey'])
def test_the_file_keeps_its_size_and_luminance(original, monkeypatch):
    monkeypatch.setattr(colorize, 'CHUNK', 400)  # 1,500 pixels are three chunks and a part
    made = colorize.colored(MADE['ab'], photo(original))
    assert made.shape == (30, 50, 3) and made.dtype == np.uint8
    assert np.abs(grey_of(made) - grey_of(original)).max() <= 1
    if original is GREY:
        np.testing.assert_array_equal(grey_of(GREY), GREY[..., :1])


def test_colours_are_enlarged_between_the_centres_of_cells():
    """One colour everywhere is that colour in every pixel; another half shows in its half."""
    flat = np.full((30, 50, 3), 128, np.uint8)
    ab = np.zeros((2, 2, 2), np.float32)
    ab[:, 1] = 30, 20
    made = colorize.colored(ab, photo(flat))
    lab = np.asarray(colors.rgb_to_lab(made / 255))
    np.testing.assert_allclose(lab[:, :12, 1:], 0, atol=1)
    np.testing.assert_allclose(lab[:, 38:, 1:], np.broadcast_to([30, 20], (30, 12, 2)), atol=1)


def test_the_original_is_shown_where_it_has_colours():
    assert [p.shape for p in colorize.panels(MADE['ab'], photo(COLOUR))] == [(30, 50, 3)] * 3
    grey, made = colorize.panels(MADE['ab'], photo(GREY))
    np.testing.assert_array_equal(grey, GREY)
    assert colorize.has_colors(made) and not colorize.has_colors(grey)
    (row,) = colorize.Viz().rows(MADE, photo(COLOUR), CONTEXT)
    assert row.keys() == {'colorfulness', 'true_colorfulness', 'psnr'}
    error = np.square(SEEN / 255 - MADE['image'] / 255).mean()
    assert row['psnr'] == pytest.approx(-10 * np.log10(error))
    assert colorize.Viz().rows(MADE, photo(GREY), CONTEXT)[0].keys() == {'colorfulness'}


def test_a_line_of_pictures_an_image():
    figure = colorize.Viz().draw([MADE, MADE], [photo(GREY), photo(COLOUR)], CONTEXT)
    titles = [axes.get_title() for axes in figure.axes]
    assert titles == ['a.png: grey', 'colorized', '', 'a.png: grey', 'colorized', 'original']
    assert [len(axes.images) for axes in figure.axes] == [1, 1, 0, 1, 1, 1]
