"""`coco_masks:PATH`: boxes and masks of objects in the format of COCO; the files are those of
`coco:PATH`.

Masks are polygons or run lengths, Lin et al., 2014, arXiv:1405.0312; pycocotools decodes them.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from vit_jax.data.records import BrokenRecord, Record
from vit_jax.data.sources import coco
from vit_jax.extras import needed_by

EXTRA = 'detection'


class Source(coco.Source):
    """Records of `coco` with `masks`, bool [N H W].

    An object whose mask has no pixel is left out of records, and stays in `annotations`.
    """

    kind = 'coco_masks'

    def __init__(self, path: str, split: str):
        with needed_by('a source of masks', EXTRA):
            import pycocotools.mask  # noqa: F401  an error of one line, before the file is read
        super().__init__(path, split)

    def __getitem__(self, index: int, /) -> Record:
        record = super().__getitem__(index)
        if 'ids' not in record:
            return record
        image, masks = record.pop('image'), self._masks(index, record['ids'])
        kept = masks.any((1, 2))
        return {'image': image, **{k: x[kept] for k, x in {**record, 'masks': masks}.items()}}

    def annotations(self, index: int) -> Record:
        record = super().annotations(index)
        if 'ids' not in record:
            return record
        return {**record, 'masks': self._masks(index, record['ids'])}

    def _masks(self, index: int, ids: np.ndarray) -> np.ndarray:
        """The masks of annotations of an image, bool [N H W]; BrokenRecord for a malformed one."""
        size = self._size(index)
        masks = np.zeros((len(ids), *size), bool)
        for mask, number in zip(masks, ids.tolist(), strict=True):
            try:
                mask[:] = _decoded(self._shapes[number], size)
            except (ValueError, TypeError) as error:
                raise BrokenRecord(f'{self._file}: annotation {number}: {error}') from error
        return masks

    def _sort_objects(
        self, annotations: Iterable[dict[str, Any]], categories: list[dict[str, Any]]
    ) -> tuple[dict[Any, Record], bool]:
        annotations = list(annotations)
        self._shapes = {one['id']: _checked(one) for one in annotations}
        if len(self._shapes) < len(annotations):
            raise ValueError('two annotations have the same id')
        return super()._sort_objects(annotations, categories)


def _checked(annotation: dict[str, Any]) -> Any:
    """The polygons, or the size and the run lengths of an annotation; ValueError without these."""
    shape = annotation.get('segmentation')
    if isinstance(shape, dict) and {'size', 'counts'} <= shape.keys():
        return shape
    if isinstance(shape, list) and shape and all(isinstance(one, list) for one in shape):
        return shape
    raise ValueError(
        f'annotation {annotation["id"]} has no polygons or run lengths in its segmentation; coco:'
        'PATH reads boxes alone'
    )


def _decoded(shape: Any, size: tuple[int, int]) -> np.ndarray:
    """The mask of polygons or run lengths, uint8 [H W]; ValueError if they are malformed.

    All is checked here: pycocotools reads four numbers as a box, and takes other memory for runs
    that are longer than the image.
    """
    from pycocotools import mask

    if isinstance(shape, list):
        polygons = [np.asarray(one, np.float64) for one in shape]
        if any(one.ndim != 1 or len(one) % 2 or not np.isfinite(one).all() for one in polygons):
            raise ValueError('a polygon is not a list of x, y, x, y, ...')
        polygons = [one.tolist() for one in polygons if len(one) >= 6]  # fewer have no area
        if not polygons:
            return np.zeros(size, np.uint8)
        return mask.decode(mask.merge(mask.frPyObjects(polygons, *size)))
    if tuple(shape['size']) != size:
        height, width = shape['size']
        raise ValueError(f'the mask has {width} x {height} pixels, the image {size[1]} x {size[0]}')
    if isinstance(shape['counts'], str | bytes):
        return mask.decode(shape)
    counts = np.asarray(shape['counts'])
    if counts.dtype.kind != 'i' or (counts < 0).any() or counts.sum() != size[0] * size[1]:
        raise ValueError(f'the run lengths do not add up to {size[0] * size[1]} pixels')
    return mask.decode(mask.frPyObjects(shape, *size))
