"""Pictures of depth have a bar of the scale with its unit."""

import pathlib

import numpy as np
import pytest

from vit_jax.viz import depth
from vit_jax.viz.photo import Context, Photo

IMAGE = np.zeros((8, 12, 3), np.uint8)
PHOTO = Photo(pathlib.Path('a.png'), IMAGE, {'image': IMAGE}, '')
RAMP = np.linspace(1, 9, 96, dtype=np.float32).reshape(8, 12)


@pytest.mark.parametrize(('name', 'unit'), [('depth', 'm'), ('inverse_depth', '')])
def test_rows_and_pictures(name, unit):
    viz = depth.Viz()
    (row,) = viz.rows({name: RAMP}, PHOTO, Context())
    assert row == {'map': name, 'min': 1.0, 'median': 5.0, 'max': 9.0, 'unit': unit}
    figure = viz.draw([{name: RAMP}, {name: 0 * RAMP}], [PHOTO, PHOTO], Context())
    labels = [axes.get_ylabel() for axes in figure.axes]
    assert labels.count(depth.LABELS[name]) == 2
    low, high = figure.axes[1].images[0].get_clim()
    assert 1 < low < 2 and 8 < high < 9


def test_walls_have_a_scale_around_them():
    """Also with one pixel in front, which no percentile sees."""
    wall = np.full((8, 12), 8.0, np.float32)
    for first, expected in ((8.0, (7.92, 8.08)), (2.0, (2.0, 8.0))):
        wall[0, 0] = first
        figure = depth.Viz().draw([{'depth': wall}], [PHOTO], Context())
        assert figure.axes[1].images[0].get_clim() == pytest.approx(expected)


def test_unknown_depth_of_data_is_masked():
    truth = np.where(RAMP < 3, 0, RAMP)
    figure = depth.Viz().draw_batch([IMAGE], [{'image': IMAGE, 'depth': truth}], Context())
    shown = figure.axes[1].images[0].get_array()
    np.testing.assert_array_equal(np.ma.getmaskarray(shown), truth == 0)
