"""`my_lab.sources.spots:`: gray images of two sizes with up to two colored spots."""

from __future__ import annotations

import numpy as np

from vit_jax.data.records import Record, SourceInfo
from vit_jax.errors import UserError

SIZES = {'train': 64, 'test': 24}
COLORS = np.array([[255, 0, 0], [0, 0, 255]], np.uint8)


class Source:
    """Records {image, boxes, labels}; record i is a function of the split and i."""

    info = SourceInfo(2, ('red', 'blue'))

    def __init__(self, path: str, split: str):
        assert not path
        self._split = split

    def __len__(self) -> int:
        return SIZES[self._split]

    def __getitem__(self, index: int, /) -> Record:
        rng = np.random.default_rng((len(self), index))
        height, width = ((16, 12), (12, 16))[index % 2]
        image = rng.integers(100, 150, (height, width, 1), np.uint8).repeat(3, axis=2)
        labels = rng.integers(2, size=index % 3)
        boxes = np.zeros((len(labels), 4), np.float32)
        for box, label in zip(boxes, labels, strict=True):
            x, y = rng.integers(width - 4), rng.integers(height - 4)
            image[y : y + 4, x : x + 4] = COLORS[label]
            box[:] = x, y, x + 4, y + 4
        return {'image': image, 'boxes': boxes, 'labels': labels.astype(np.int32)}

    def labels(self) -> np.ndarray:
        raise UserError('an image has several spots, or none')

    def record_name(self, index: int, /) -> str:
        return f'spots {self._split} record {index}'
