"""Features without labels are shown as prototypes, and as colors of patches."""

import argparse
import pathlib

import numpy as np

from vit_jax.tasks.dinov2 import Task
from vit_jax.viz import dinov2
from vit_jax.viz.photo import Context, Photo

CONTEXT = Context((), argparse.Namespace())
RNG = np.random.default_rng(0)
IMAGE = RNG.integers(0, 256, (8, 12, 3), dtype=np.uint8)
PHOTO = Photo(pathlib.Path('a.png'), IMAGE, {'image': IMAGE}, '')


def test_prototypes_are_rows():
    made = {'prototype': np.array([7, 2]), 'probability': np.array([0.75, 0.25])}
    rows = dinov2.Viz().rows(made, PHOTO, CONTEXT)
    assert rows == [
        {'prototype': 7, 'probability': 0.75},
        {'prototype': 2, 'probability': 0.25},
    ]


def test_colors_are_principal_components_over_all_images():
    axes = np.linalg.qr(RNG.normal(size=(5, 5)))[0]
    values = RNG.normal(size=(300, 5)) * (9, 5, 2, 0.01, 0.01)
    first, second = dinov2.principal_colors([(values @ axes)[:6], (values @ axes)[6:]])
    colors = np.concatenate([first, second]).astype(float)
    for found, value in zip(colors.T, values.T, strict=False):
        assert found.min() == 0 and found.max() == 255
        assert abs(np.corrcoef(found, value)[0, 1]) > 0.98
    same = dinov2.principal_colors([np.ones((4, 5))])
    np.testing.assert_array_equal(same, 0)


def test_a_patch_has_its_place():
    patches = np.zeros((6, 4))
    patches[4] = 1  # row 1, column 1 of 2 x 3
    figure = dinov2.Viz().draw([{'patches': patches}], [PHOTO], CONTEXT)
    assert [axes.get_title() for axes in figure.axes] == ['a.png: image', 'patches']
    shown = np.asarray(figure.axes[1].get_images()[0].get_array())
    scale = len(shown) // 8
    bright = np.argwhere((shown != shown[0, 0]).any(-1))
    assert bright.min(0).tolist() == [4 * scale, 4 * scale]
    assert bright.max(0).tolist() == [8 * scale - 1, 8 * scale - 1]


def test_a_picture_without_patches_has_prototypes():
    made = {'prototype': np.array([7]), 'probability': np.array([0.75])}
    (axes,) = dinov2.Viz().draw([made], [PHOTO], CONTEXT).axes
    assert axes.get_title() == 'a.png\n7  0.750'
    assert dinov2.Viz().adapt_task(Task(), CONTEXT).patches
