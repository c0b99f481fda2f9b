"""`coco_masks:PATH`: boxes and masks of objects in COCO format; same files as `coco:PATH`.

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
MOST = 2**20  # most pixels of a polygon's perimeter: pycocotools needs 160 bytes for each
LONGEST = 8  # most characters of a compressed run length


class Source(coco.Source):
    """Records of `coco` plus `masks`, bool [N H W].

    An object whose mask has no pixel is dropped from records, but kept in `annotations`.
    """

    kind = 'coco_masks'

    def __init__(self, path: str, split: str):
        with needed_by('a source of masks', EXTRA):
            import pycocotools.mask  # noqa: F401  a one-line error before the file is read
        super().__init__(path, split)

    def __getitem__(self, index: int, /) -> Record:
        record = super().__getitem__(index)
        if 'ids' not in record:
            return record
        image, masks = record.pop('image'), self._masks(index, record['ids'])
        has_pixels = masks.any((1, 2))
        return {'image': image, **{k: x[has_pixels] for k, x in {**record, 'masks': masks}.items()}}

    def annotations(self, index: int) -> Record:
        record = super().annotations(index)
        if 'ids' not in record:
            return record
        return {**record, 'masks': self._masks(index, record['ids'])}

    def _masks(self, index: int, ids: np.ndarray) -> np.ndarray:
        """Decode the masks of an image's annotations, bool [N H W]; BrokenRecord if malformed."""
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
                '%s: %d of %d objects have no mask: records ignore them, evaluations count misses',
                self._file,
                maskless,
                len(annotations),
            )
        return super()._sort_objects(annotations, categories)


def _check_shapes(annotation: dict[str, Any]) -> list[Any]:
    """Return an annotation's polygons and run lengths, if any; ValueError for other values."""
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
    """Decode polygons and run lengths to a mask, bool [H W]; ValueError if they are malformed.

    pycocotools checks nothing: it reads four numbers as a box, crashes on coordinates that exceed
    its integers, and leaves pixels that no run covers uninitialized.
    """
    if size[0] * size[1] > images.MAX_PIXELS:
        raise ValueError(f'the image has more than {images.MAX_PIXELS:,} pixels')
    mask = np.zeros(size, bool)
    for shape in shapes:
        if isinstance(shape, dict):
            mask |= _from_run_lengths(shape, size)
    polygons = [_check_polygon(shape) for shape in shapes if isinstance(shape, list)]
    polygons = [polygon for polygon in polygons if len(polygon) >= 6]  # two points have no area
    if polygons:
        from pycocotools import mask as coco_mask

        runs = coco_mask.merge(coco_mask.frPyObjects(polygons, *size))
        mask |= coco_mask.decode(runs).astype(bool)
    return mask


def _check_polygon(polygon: list[Any]) -> list[float]:
    """Return a polygon's coordinates; ValueError if they are not points, or too large."""
    try:
        numbers = np.asarray(polygon, np.float64)
    except TypeError as error:
        raise ValueError(POLYGON) from error
    if numbers.ndim != 1 or len(numbers) % 2 or not np.isfinite(numbers).all():
        raise ValueError(POLYGON)
    points = numbers.reshape(-1, 2)
    perimeter = np.abs(points - np.roll(points, 1, 0)).max(1, initial=0).sum()
    if np.abs(points).max(initial=0) > MOST or perimeter > MOST:
        raise ValueError(f'a polygon has coordinates or a perimeter above {MOST:,} pixels')
    return numbers.tolist()


def _from_run_lengths(shape: dict[str, Any], size: tuple[int, int]) -> np.ndarray:
    """Decode column-wise run lengths to a mask, bool [H W]; ValueError if malformed."""
    height, width = map(int, shape['size'])
    if (height, width) != size:
        raise ValueError(f'the mask has {width} x {height} pixels, the image {size[1]} x {size[0]}')
    counts = shape['counts']
    runs = _decompress(counts) if isinstance(counts, str) else np.asarray(counts, np.float64)
    if runs.ndim != 1 or (runs != np.floor(runs)).any():
        raise ValueError('the run lengths are not integers')
    if (runs < 0).any() or runs.sum() != size[0] * size[1]:
        raise ValueError(f'the run lengths do not add up to {size[0] * size[1]} pixels')
    flat = np.repeat(np.arange(len(runs)) % 2 == 1, runs.astype(np.int64))
    return flat.reshape(size[::-1]).T


def _decompress(counts: str) -> np.ndarray:
    """Decompress run lengths, int64 [N], from pycocotools' text.

    A character has 5 bits of a number, lowest first, and a sixth that is set if the number
    continues; the fifth bit of the last character is the sign. From the fourth number on, each is
    the difference to the number two places before.
    """
    codes = np.frombuffer(counts.encode(), np.uint8).astype(np.int64) - 48
    continues = codes & 32 > 0
    if not len(codes) or (codes < 0).any() or (codes > 63).any() or continues[-1]:
        raise ValueError('the compressed run lengths are truncated or malformed')
    ends = np.flatnonzero(~continues)
    starts = np.concatenate([[0], ends[:-1] + 1])
    digits = ends - starts + 1
    if digits.max() > LONGEST:
        raise ValueError('the compressed run lengths are too large')
    positions = np.arange(len(codes)) - np.repeat(starts, digits)
    runs = np.add.reduceat((codes & 31) << 5 * positions, starts)
    runs -= np.where(codes[ends] & 16, 1 << 5 * digits, 0)
    runs[1::2] = np.cumsum(runs[1::2])
    runs[2::2] = np.cumsum(runs[2::2])
    return runs
