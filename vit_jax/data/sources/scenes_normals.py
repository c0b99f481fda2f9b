"""`scenes_normals`: the images of `scenes` with the normals of their surfaces.

Surfaces as in `scenes_depth`: digits, walls, floors and ceilings face a camera with a focal
length of 100 pixels. The sky has no normals. `scenes_normals:N` has N training images.
"""

from __future__ import annotations

import numpy as np

from vit_jax.array_types import Float
from vit_jax.data.records import Record
from vit_jax.data.sources import scenes_depth
from vit_jax.data.sources.scenes_depth import FOCAL, GROUNDS


class Source(scenes_depth.Source):
    """Records {image, normals}: float32 [H W 3], x right, y down, z away; 0 where unknown."""

    def __getitem__(self, index: int, /) -> Record:
        record, ground, _ = self.draw(index)
        size = record['image'].shape[:2]
        normals = np.broadcast_to(_plane_normal(size[0], GROUNDS[ground]), (*size, 3)).copy()
        normals[record['masks'].any(0)] = (0, 0, -1)
        return {'image': record['image'], 'normals': normals}


def _plane_normal(height: int, ends: tuple[float, float] | None) -> Float[np.ndarray, ' 3']:
    """Compute the normal of a plane by the depths of its top and bottom row."""
    if ends is None:
        return np.zeros(3, np.float32)
    top, bottom = (1 / depth for depth in ends)
    # 1 / z = a + b y in the image is a z + b f Y = 1 in space; the normal points to the camera.
    normal = np.array([0, FOCAL * (bottom - top) / (height - 1), (top + bottom) / 2])
    return (-normal / np.linalg.norm(normal)).astype(np.float32)
