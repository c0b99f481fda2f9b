"""`scenes_panoptic`: the images of `scenes`, whose grounds are segments too.

Panoptic segmentation without any download: digits are things, and the ground behind them is stuff
of one of four classes. `scenes_panoptic:N` has N images for training.
"""

from __future__ import annotations

import numpy as np

from vit_jax.data.records import Record, SourceInfo
from vit_jax.data.sources import scenes
from vit_jax.data.sources.panoptic import boxes_around


class Source(scenes.Source):
    """Records as those of `scenes`, in which each pixel belongs to one object; the ground is the
    last.
    """

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
