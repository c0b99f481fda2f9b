"""`coco_masks:PATH`: boxes and masks of objects in the format of COCO; the files are those of
`coco:PATH`.

Masks are polygons or run lengths, Lin et al., 2014, arXiv:1405.0312; pycocotools decodes them.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any

import numpy as np

from vit_jax.data import images
from vit_jax.data.records import BrokenRecord, Record
from vit_jax.data.sources import coco
from vit_jax.extras import needed_by

log = logging.getLogger(__name__)

EXTRA = 'detection'
READ_BOXES = 'coco:PATH reads only boxes'
POLYGON = 'a polygon is not a list of x, y, x, y, ...'
MOST = 2**20  # pixels around a polygon: pycocotools takes 160 bytes for each
LONGEST = 8  # characters of a compressed run length


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
                mask[:] = _decode(self._shapes[number], size)
            except (ValueError, TypeError, OverflowError) as error:
                raise BrokenRecord(f'{self._file}: annotation {number}: {error}') from error
        return masks

    def _sort_objects(
        self, annotations: Iterable[dict[str, Any]], categories: list[dict[str, Any]]
    ) -> tuple[dict[Any, Record], bool]:
        annotations = list(annotations)
        self._shapes = {
            coco.read_number(row, 'id', 'an annotation'): _check_shapes(row) for row in annotations
        }
        if len(self._shapes) < len(annotations):
            raise ValueError('two annotations have the same id')
        if maskless := sum(not shape for shape in self._shapes.values()):
            if maskless == len(annotations):
                raise ValueError(f'no annotation has a mask; {READ_BOXES}')
            log.warning(
                '%s: %d of %d objects have no mask: left out of records, missed in evaluations',
                self._file,
                maskless,
                len(annotations),
            )
        return super()._sort_objects(annotations, categories)


def _check_shapes(annotation: dict[str, Any]) -> list[Any]:
    """The polygons and run lengths of an annotation, empty without any; ValueError for others."""
    shape = annotation.get('segmentation')
    shapes = [shape] if isinstance(shape, dict) else shape or []
    if isinstance(shapes, list):
        shapes = [shapes] if all(isinstance(x, int | float) for x in shapes) else shapes
        if all(isinstance(part, list) or _is_run_lengths(part) for part in shapes):
            return [part for part in shapes if part]
    raise ValueError(
        f'annotation {annotation["id"]} has no polygons or run lengths in its segmentation; '
        f'{READ_BOXES}'
    )


def _is_run_lengths(shape: Any) -> bool:
    return isinstance(shape, dict) and {'size', 'counts'} <= shape.keys()


def _decode(shapes: list[Any], size: tuple[int, int]) -> np.ndarray:
    """The mask of polygons and run lengths, bool [H W]; ValueError if they are malformed.

    All is checked here: pycocotools reads four numbers as a box, crashes on coordinates that exceed
    its integers, and leaves pixels that no run covers as they are in memory.
    """
    if size[0] * size[1] > images.MAX_PIXELS:
        raise ValueError(f'the image has more than {images.MAX_PIXELS:,} pixels')
    mask = np.zeros(size, bool)
    for shape in shapes:
        if isinstance(shape, dict):
            mask |= _from_run_lengths(shape, size)
    polygons = [_check_polygon(shape) for shape in shapes if isinstance(shape, list)]
    polygons = [polygon for polygon in polygons if len(polygon) >= 6]  # fewer have no area
    if polygons:
        from pycocotools import mask as coco_mask

        runs = coco_mask.merge(coco_mask.frPyObjects(polygons, *size))
        mask |= coco_mask.decode(runs).astype(bool)
    return mask


def _check_polygon(polygon: list[Any]) -> list[float]:
    """The numbers of a polygon; ValueError if they are not points, or too far away."""
    try:
        numbers = np.asarray(polygon, np.float64)
    except TypeError as error:
        raise ValueError(POLYGON) from error
    if numbers.ndim != 1 or len(numbers) % 2 or not np.isfinite(numbers).all():
        raise ValueError(POLYGON)
    points = numbers.reshape(-1, 2)
    perimeter = np.abs(points - np.roll(points, 1, 0)).max(1, initial=0).sum()
    if np.abs(points).max(initial=0) > MOST or perimeter > MOST:
        raise ValueError(f'a polygon has coordinates or a perimeter of more than {MOST:,} pixels')
    return numbers.tolist()


def _from_run_lengths(shape: dict[str, Any], size: tuple[int, int]) -> np.ndarray:
    """The mask of run lengths down the columns, bool [H W]; ValueError if they are malformed."""
    height, width = map(int, shape['size'])
    if (height, width) != size:
        raise ValueError(f'the mask has {width} x {height} pixels, the image {size[1]} x {size[0]}')
    counts = shape['counts']
    runs = _decompress(counts) if isinstance(counts, str) else np.asarray(counts, np.float64)
    if runs.ndim != 1 or (runs != np.floor(runs)).any():
        raise ValueError('the run lengths are not whole numbers')
    if (runs < 0).any() or runs.sum() != size[0] * size[1]:
        raise ValueError(f'the run lengths do not add up to {size[0] * size[1]} pixels')
    flat = np.repeat(np.arange(len(runs)) % 2 == 1, runs.astype(np.int64))
    return flat.reshape(size[::-1]).T


def _decompress(counts: str) -> np.ndarray:
    """Run lengths, int64 [N], of the text in which pycocotools writes them.

    A character has 5 bits of a number, the lowest first, and a sixth that is set if the number goes
    on; the fifth bit of the last character is the sign. From the fourth number on, each is the
    difference to the one before the last.
    """
    codes = np.frombuffer(counts.encode(), np.uint8).astype(np.int64) - 48
    goes_on = codes & 32 > 0
    if not len(codes) or (codes < 0).any() or (codes > 63).any() or goes_on[-1]:
        raise ValueError('the compressed run lengths are cut off, or not run lengths')
    ends = np.flatnonzero(~goes_on)
    starts = np.concatenate([[0], ends[:-1] + 1])
    digits = ends - starts + 1
    if digits.max() > LONGEST:
        raise ValueError('the compressed run lengths are too large')
    places = np.arange(len(codes)) - np.repeat(starts, digits)
    runs = np.add.reduceat((codes & 31) << 5 * places, starts)
    runs -= np.where(codes[ends] & 16, 1 << 5 * digits, 0)
    runs[1::2] = np.cumsum(runs[1::2])
    runs[2::2] = np.cumsum(runs[2::2])
    return runs
