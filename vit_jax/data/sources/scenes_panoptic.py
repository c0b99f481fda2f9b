"""`scenes_panoptic`: the images of `scenes`, with the background as a segment.

Panoptic segmentation without a download: digits are things, and the background is stuff of one of
four classes. Unlike in `scenes`, each kind of background has typical colors, like grass and water.
`scenes_panoptic:N` has N training images.
"""

from __future__ import annotations

import numpy as np

from vit_jax.data.records import Record, SourceInfo
from vit_jax.data.sources import scenes
from vit_jax.data.sources.panoptic import boxes_around

# Red, green and blue shares of each background.
TINTS = {
    'stripes': (1.0, 0.35, 0.35),
    'checks': (0.35, 1.0, 0.35),
    'rings': (0.35, 0.35, 1.0),
    'clouds': (1.0, 1.0, 0.35),
}


class Source(scenes.Source):
    """Records as in `scenes`, but every pixel belongs to an object; the background is the last."""

    info = SourceInfo(
        10 + len(scenes.GROUNDS),
        (*map(str, range(10)), *scenes.GROUNDS),
        stuff=tuple(range(10, 10 + len(scenes.GROUNDS))),
    )

    def __getitem__(self, index: int, /) -> Record:
        record, ground = self.with_ground(index)
        masks = np.concatenate([record['masks'], ~record['masks'].any(0, keepdims=True)])
        label = np.int32(10 + scenes.GROUNDS.index(ground))
        return {
            'image': record['image'],
            'boxes': boxes_around(masks),
            'labels': np.append(record['labels'], label),
            'masks': masks,
            'areas': masks.sum((1, 2)).astype(np.float32),
        }

    def _colors(self, rng: np.random.Generator, ground: str) -> np.ndarray:
        """Draw two dark colors [2 3] of a background, with its typical channels emphasized."""
        return rng.uniform(40, 120, (2, 3)) * TINTS[ground]
