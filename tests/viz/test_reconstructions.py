"""What is shown of a masked autoencoder: four pictures of an image, and how close the guess is."""

import argparse
import pathlib

import numpy as np
import pytest

from vit_jax.errors import UserError
from vit_jax.viz import reconstruct
from vit_jax.viz.photo import Context, Photo

CONTEXT = Context((), argparse.Namespace(mask_ratio=None))
IMAGE = np.random.default_rng(0).integers(0, 256, (8, 12, 3), dtype=np.uint8)
MASK = np.array([[1, 0, 1], [0, 1, 0]], np.float32)
HIDDEN = np.kron(MASK, np.ones((4, 4)))[..., None] > 0


def photo(image=IMAGE):
    return Photo(pathlib.Path('a.png'), IMAGE, {'image': image}, '')


def test_the_four_pictures():
    guess = np.full((8, 12, 3), 0.2)
    guess[0, 0] = (-3, 0.5, 7)  # out of the range of pixels
    made = {'reconstruction': guess, 'mask': MASK}
    original, seen, reconstruction, pasted = reconstruct.panels(made, photo())
    np.testing.assert_array_equal(original, IMAGE)
    np.testing.assert_array_equal(seen, np.where(HIDDEN, 128, IMAGE))
    assert reconstruction[0, 0].tolist() == [0, 128, 255] and reconstruction[7, 11, 0] == 51
    np.testing.assert_array_equal(pasted, np.where(HIDDEN, reconstruction, IMAGE))


def test_the_error_is_that_of_what_was_hidden():
    guess = np.where(HIDDEN, IMAGE / 255 + 0.1 * np.where(IMAGE > 127, -1, 1), 9.0)
    (row,) = reconstruct.Viz().rows({'reconstruction': guess, 'mask': MASK}, photo(), CONTEXT)
    assert row == {'patches': 6, 'hidden': 3, 'psnr': pytest.approx(20.0)}
    shown = {'reconstruction': guess, 'mask': 0 * MASK}
    assert reconstruct.Viz().rows(shown, photo(), CONTEXT)[0]['psnr'] is None


def test_a_line_of_pictures_an_image():
    made = {'reconstruction': IMAGE / 255, 'mask': MASK}
    figure = reconstruct.Viz().draw([made, made], [photo(), photo()], CONTEXT)
    titles = [axes.get_title() for axes in figure.axes]
    assert titles == ['a.png: original', *reconstruct.TITLES[1:]] * 2


def test_bytes_are_needed():
    with pytest.raises(UserError, match=r'a.png: .* float32.*uint8'):
        reconstruct.panels({'mask': MASK}, photo(IMAGE.astype(np.float32)))
