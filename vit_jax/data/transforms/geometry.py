"""Geometry of a record: boxes, masks and points move with the image.

    image     uint8 [H, W, C], or [T, H, W, C] of a clip; so are NAME_image of the same size
    boxes     float32 [N, 4], (x0, y0, x1, y1) in pixels, from the image's upper left corner
    masks     [N, H, W], true or not 0 where the object is
    points    float32 [P, 2], (x, y) in pixels
    segments  int16 [H, W], 1 + the row of the object that a pixel belongs to, or 0

Each function takes a record that has some of these besides `image`, and returns a new one. It
raises UserError if it cannot move a field of the record, see `movable`.

A cut (`crop`, `follow`) clips boxes to the image and drops the objects that are outside of it, with
their rows of all `OBJECTS`; objects without boxes are judged by their masks. Points keep their
number and order, which may name them: those outside of the image keep their coordinates.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from PIL import Image

from vit_jax.array_types import Float, Shaped
from vit_jax.data.records import OBJECTS, Record
from vit_jax.data.transforms import movable
from vit_jax.data.transforms.movable import (
    check,
    image_size,
    is_image,
)
from vit_jax.data.transforms.pillow import Fill, Matrix, resample, transform
from vit_jax.errors import UserError

CORNERS = [[0, 1], [2, 1], [0, 3], [2, 3]]  # columns of a box

Points = Float[np.ndarray, '*N 2']
Method = str | Callable[[np.ndarray, int, int], np.ndarray]


def resize(record: Record, height: int, width: int, method: Method = 'bilinear') -> Record:
    """Scale to `height` and `width`; masks by their nearest pixels.

    `method` is one of `pillow.METHODS`, or a function (image, height, width) -> image.
    """
    check(record)
    old_height, old_width = image_size(record)
    if (old_height, old_width) == (height, width):
        return record
    rows, columns = _nearest(old_height, height), _nearest(old_width, width)
    scale = np.array([width / old_width, height / old_height])
    moved = _move(
        record,
        lambda image: (
            resample(image, height, width, method)
            if isinstance(method, str)
            else method(image, height, width)
        ),
        lambda masks: masks[:, rows[:, None], columns],
        lambda points: points * scale,
    )
    if 'areas' in record:
        moved['areas'] = np.asarray(record['areas'], np.float32) * np.float32(scale.prod())
    return moved


def crop(record: Record, y: int, x: int, height: int, width: int) -> Record:
    """Take the window of this size with its upper left corner at (y, x)."""
    check(record, cut=True)
    rows, columns = slice(y, y + height), slice(x, x + width)
    moved = _move(
        record,
        lambda image: image[rows, columns],
        lambda masks: masks[:, rows, columns],
        lambda points: points - [x, y],
    )
    return _cut(moved)


def flip(record: Record) -> Record:
    """Mirror left and right."""
    check(record, padded=False)
    return _move(
        record,
        _mirrored,
        lambda masks: masks[:, :, ::-1],
        lambda points: points * [-1, 1] + [image_size(record)[1], 0],
    )


def pad(record: Record, top: int, bottom: int, left: int, right: int, fill: Fill = 0) -> Record:
    """Add rows and columns, of the color `fill` in images and of zeros in masks."""
    check(record)
    rows, columns = (top, bottom), (left, right)
    return _move(
        record,
        lambda image: _pad(image, rows, columns, (0, 0), fill=fill),
        lambda masks: _pad(masks, (0, 0), rows, columns),
        lambda points: points + np.array([left, top]),
    )


def follow(record: Record, matrix: Matrix) -> Record:
    """Move boxes, masks and points by `matrix`, as `pillow.transform` has moved the image.

    A box becomes the bounding box of its moved corners, which may be wider than the object.
    """
    check(record, cut=True)
    a, b, c, d, e, f = matrix
    inverse = np.linalg.inv([[a, b], [d, e]])
    moved = _move(
        record,
        lambda image: image,
        lambda masks: _each(lambda mask: transform(mask, matrix, fill=0), masks),
        lambda points: (points - [c, f]) @ inverse.T,
    )
    return _cut(moved)


def shrink_and_pad(record: Record, size: tuple[int, int]) -> Record:
    """Bring an image of any size to one size for batching.

    If it is larger than `size` it is scaled down, keeping its aspect ratio; then it is padded with
    zeros at the right and the bottom.

    Args:
      record: after the transforms.
      size: (height, width).

    Returns:
      The record with `pixel_mask`, bool [height, width], true for real pixels.

    Raises:
      UserError: if a field of the record cannot be moved with the image.
    """
    height, width = image_size(record)
    scale = min(1, size[0] / height, size[1] / width)
    height, width = (max(1, round(side * scale)) for side in (height, width))
    try:
        record = resize(record, height, width)
        record = pad(record, 0, size[0] - height, 0, size[1] - width)
    except UserError as error:
        raise UserError(f'padding images to {size[0]} x {size[1]}: {error}') from error
    mask = np.zeros(size, bool)
    mask[:height, :width] = True
    return {**record, 'pixel_mask': mask}


def _move(
    record: Record,
    image: Callable[[np.ndarray], np.ndarray],
    masks: Callable[[Shaped[np.ndarray, 'N H W']], Shaped[np.ndarray, 'N H2 W2']],
    points: Callable[[Points], Points],
) -> Record:
    """The record with each field moved by the function for its kind."""
    images = {name: movable.map_frames(image, record[name]) for name in record if is_image(name)}
    moved = {**record, **images}
    if 'masks' in record:
        moved['masks'] = masks(np.asarray(record['masks']))
    if 'segments' in record:
        moved['segments'] = masks(np.asarray(record['segments'])[None])[0]
    if 'points' in record:
        moved['points'] = points(np.asarray(record['points'])).astype(np.float32)
    if 'boxes' in record:
        corners = points(np.asarray(record['boxes'])[:, CORNERS])
        boxes = np.concatenate([corners.min(1), corners.max(1)], 1)
        moved['boxes'] = boxes.astype(np.float32)
    return moved


def _mirrored(image: Shaped[np.ndarray, 'H W C']) -> Shaped[np.ndarray, 'H W C']:
    """The image from right to left; by channel, as NumPy copies a mirrored row of pixels slowly."""
    made = np.empty_like(image)
    for channel in range(image.shape[2]):
        made[..., channel] = image[:, ::-1, channel]
    return made


def _cut(record: Record) -> Record:
    """Clip boxes to the image, and drop the objects outside of it."""
    if 'boxes' in record:
        height, width = image_size(record)
        boxes = np.clip(record['boxes'], 0, np.array([width, height] * 2, np.float32))
        record = {**record, 'boxes': boxes}
        kept = (boxes[:, 2:] > boxes[:, :2]).all(1)
    elif 'masks' in record:
        kept = record['masks'].any((1, 2))
    else:
        return record
    rows = {name: np.asarray(record[name])[kept] for name in OBJECTS if name in record}
    return {**record, **rows}


def _nearest(old: int, new: int) -> np.ndarray:
    """The old pixel that contains the center of each new one."""
    return ((2 * np.arange(new) + 1) * old) // (2 * new)


def _pad(array: np.ndarray, *widths: tuple[int, int], fill: Fill = 0) -> np.ndarray:
    # np.pad takes ten times as long, which matters for small images.
    axes = list(zip(array.shape, widths, strict=True))
    padded = np.zeros([side + before + after for side, (before, after) in axes], array.dtype)
    if fill != 0:
        if isinstance(fill, tuple) and len(fill) != array.shape[-1]:
            raise UserError(f'{fill=} has {len(fill)} values, the image {array.shape[-1]} channels')
        padded[:] = fill
    padded[tuple(slice(before, before + side) for side, (before, _) in axes)] = array
    return padded


def _each(change: Callable[[Image.Image], Image.Image], masks: np.ndarray) -> np.ndarray:
    """Apply a function of gray images to each mask."""
    moved = np.empty_like(masks)
    for row, mask in zip(moved, masks != 0, strict=True):
        row[:] = np.asarray(change(Image.fromarray(mask.astype(np.uint8))))
    return moved
