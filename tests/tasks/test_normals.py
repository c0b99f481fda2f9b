"""Normals: angles by hand, drawn planes against their depth, mirrored images."""

import jax.numpy as jnp
import numpy as np
import pytest

from vit_jax.data.sources import scenes_depth, scenes_normals
from vit_jax.data.transforms import geometry
from vit_jax.errors import UserError
from vit_jax.tasks import normals
from vit_jax.tasks.base import check_rows_are_separable

ANGLES = np.radians([0.0, 10.0, 90.0, 180.0])


def make_batch():
    """Four pixels, of which predictions differ by these angles, and two unknown ones."""
    truth = np.zeros((2, 1, 6, 3), np.float32)
    truth[0, 0, :4] = (0, 0, -1)
    guess = np.ones((2, 1, 6, 3), np.float32)
    guess[0, 0, :4, 0], guess[0, 0, :4, 1] = 5 * np.sin(ANGLES), 0
    guess[0, 0, :4, 2] = -5 * np.cos(ANGLES)
    image = jnp.zeros((2, 1, 6, 3), jnp.uint8)
    return guess, {'image': image, 'normals': jnp.asarray(truth), 'mask': jnp.ones(2)}


def test_measures_are_those_of_angles():
    guess, data = make_batch()
    task, outputs = normals.Task(), {'normals': jnp.asarray(guess)}
    sums = task.evaluate(lambda *images: outputs, data)
    assert {name: float(count) for name, (_, count) in sums.items()} == dict.fromkeys(sums, 1)
    assert float(sums['angle'][0]) == pytest.approx(70, abs=0.1)
    assert float(sums['within_11'][0]) == 0.5
    assert float(sums['loss'][0]) == pytest.approx(1 - np.cos(ANGLES).mean(), abs=1e-6)
    check_rows_are_separable(task, outputs, data)
    predicted = task.predict(lambda *images: outputs, data)['normals']
    np.testing.assert_allclose(np.linalg.norm(predicted, axis=-1), 1, atol=1e-6)
    with pytest.raises(UserError, match='normals'):
        task.loss(outputs, {'image': data['image']})


def test_drawn_normals_are_orthogonal_to_the_drawn_surfaces():
    depths, source = scenes_depth.Source('', 'test'), scenes_normals.Source('', 'test')
    for i in range(8):
        depth, found = depths[i]['depth'], source[i]['normals']
        height, width = depth.shape
        center = np.array([height - 1, width - 1])[:, None, None] / 2
        y, x = np.mgrid[:height, :width] - center
        rays = np.stack([x, y, np.full_like(x, scenes_depth.FOCAL)], -1) / scenes_depth.FOCAL
        points, known = rays * depth[..., None], depth > 0
        np.testing.assert_array_equal((found != 0).any(-1), known)
        below = np.abs((found[1:] * (points[1:] - points[:-1])).sum(-1))
        same = known[1:] & known[:-1] & (np.abs(depth[1:] - depth[:-1]) < 0.15)
        assert below[same].max(initial=0) < 1e-3
        right = np.abs((found[:, 1:] * (points[:, 1:] - points[:, :-1])).sum(-1))
        same = known[:, 1:] & known[:, :-1] & (depth[:, 1:] == depth[:, :-1])
        assert right[same].max(initial=0) < 1e-3
        assert ((found * points).sum(-1)[known] < 0).all()  # towards the camera


def test_mirrored_normals_point_the_other_way():
    record = {'image': np.zeros((2, 3, 3), np.uint8), 'normals': np.zeros((2, 3, 3), np.float32)}
    record['normals'][:, 0] = (0.6, 0, -0.8)
    moved = geometry.flip(record)['normals']
    np.testing.assert_allclose(moved[:, 2], [[-0.6, 0, -0.8]] * 2)
    assert not moved[:, :2].any()
