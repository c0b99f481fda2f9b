"""What all figures share."""

import numpy as np

from vit_jax.viz import figures


def test_pictures_for_people():
    grey = np.random.default_rng(0).integers(0, 256, (4, 6, 1), np.uint8)
    picture = figures.as_picture(grey, side=10)
    assert picture.shape == (12, 18, 3)
    np.testing.assert_array_equal(picture[1::3, 1::3], grey.repeat(3, axis=2))
    floats = np.linspace(-1, 1, 48, dtype=np.float32).reshape(4, 4, 3)
    picture = figures.as_picture(floats)
    assert (picture.dtype, picture.min(), picture.max()) == (np.uint8, 0, 255)
    assert (np.diff(picture.ravel().astype(int)) > 0).all()
