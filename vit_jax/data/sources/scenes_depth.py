"""`scenes_depth`: the images of `scenes` with the distance of every pixel.

Depth without a download: digits of equal height stand upright before a camera, so that a small one
is far, in front of a floor, a ceiling or a wall, depending on the kind of background. Clouds are
sky, whose depth is unknown. `scenes_depth:N` has N training images.
"""

from __future__ import annotations

import numpy as np

from vit_jax.array_types import Float
from vit_jax.data.records import Record, SourceInfo
from vit_jax.data.sources import scenes
from vit_jax.ops.depth import UNKNOWN

FOCAL = 100.0  # pixels; a digit of 1 m is 2 to 5 m away
# Distances in meters of the top and the bottom row of a background; None if unknown.
GROUNDS = {'stripes': (10.0, 5.5), 'checks': (5.5, 10.0), 'rings': (8.0, 8.0), 'clouds': None}


class Source(scenes.Source):
    """Records {image, depth}: float32 [H W] in meters, 0 where it is unknown."""

    info = SourceInfo(0, ())

    def __getitem__(self, index: int, /) -> Record:
        record, ground, heights = self.draw(index)
        depth = _draw_plane(record['image'].shape[:2], GROUNDS[ground])
        for mask, height in zip(record['masks'], heights, strict=True):
            depth[mask] = FOCAL / height
        return {'image': record['image'], 'depth': depth}


def _draw_plane(
    size: tuple[int, int], ends: tuple[float, float] | None
) -> Float[np.ndarray, 'H W']:
    """Draw a plane: along the rows its inverse depth is linear, as through a pinhole."""
    if ends is None:
        return np.full(size, UNKNOWN, np.float32)
    rows = 1 / np.linspace(1 / ends[0], 1 / ends[1], size[0])
    return np.repeat(rows.astype(np.float32)[:, None], size[1], axis=1)
