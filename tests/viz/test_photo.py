"""What the model sees of a file, with the detail of the file."""

import pathlib

import numpy as np

from vit_jax.viz.photo import Photo

FILE = np.random.default_rng(0).integers(0, 256, (40, 60, 3), np.uint8)


def photo(image, affine):
    return Photo(pathlib.Path('a.png'), FILE, {'image': image}, '', affine)


def test_a_view_has_the_pixels_of_the_file():
    # The model sees the 40 x 40 pixels from x = 10 on, four times smaller.
    seen = photo(np.zeros((10, 10, 3), np.uint8), np.array([[0.25, 0, -2.5], [0, 0.25, 0]]))
    np.testing.assert_array_equal(seen.view(40), FILE[:, 10:50])
    assert seen.view(35).shape == (40, 40, 3)


def test_a_flip_is_seen():
    flipped = photo(np.zeros((40, 60, 3), np.uint8), np.array([[-1.0, 0, 60], [0, 1, 0]]))
    np.testing.assert_array_equal(flipped.view(1), FILE[:, ::-1])


def test_a_large_file_is_averaged_and_padding_is_black():
    seen = photo(np.zeros((20, 20, 3), np.uint8), np.array([[0.25, 0, 0], [0, 0.25, 0]]))
    view = seen.view(20)
    assert not view[10:].any() and not view[:, 15:].any()
    blocks = FILE.reshape(10, 4, 15, 4, 3).mean(axis=(1, 3))
    np.testing.assert_allclose(view[:10, :15], blocks, atol=1)


def test_where_pixels_come_from_nobody_knows_the_models_are_enlarged():
    image = np.arange(12, dtype=np.uint8).reshape(2, 2, 3)
    np.testing.assert_array_equal(photo(image, None).view(4), image.repeat(2, 0).repeat(2, 1))


def test_of_windows_the_first_is_seen():
    seen = photo(np.zeros((4, 40, 40, 3), np.uint8), np.array([[1.0, 0, 0], [0, 1, 0]]))
    np.testing.assert_array_equal(seen.view(40), FILE[:, :40])
