"""Geometry of a record: boxes, masks, depth and points move with the image, or it is refused.

    image     uint8 [H, W, C], or [T, H, W, C] for a clip; also NAME_image of the same size
    boxes     float32 [N, 4], (x0, y0, x1, y1) in pixels, from the image's upper left corner
    masks     [N, H, W], true or nonzero inside the object
    points    float32 [P, 2], (x, y) in pixels
    segments  int16 [H, W], 1 + the row of a pixel's object, 0 for no object, or `VOID` if
              unknown, such as in padding
    depth     float32 [H, W] in meters, 0 where it is unknown, such as in padding
    normals   float32 [H, W, 3] of length 1, x right, y down, z away; 0 where they are unknown

Each function takes a record with some of these besides `image`, and returns a new one. All frames
of a clip, or views of an image, get the same transform. Numbers, strings and one-dimensional arrays
pass. UserError is raised for anything that would be wrong if it did not move: an image of a
different size, such as a small view; another array of two or more dimensions; a nested list such as
polygons.

With boxes, masks or segments, the arrays in `OBJECTS` have one row per object; other arrays are
facts about the whole image. A cut (`crop`, `follow`) clips boxes to the image and drops the objects
outside, with their rows of all `OBJECTS`: with segments the objects without a pixel, else those
without a box, or without a mask. Points keep their number and order, which may identify them: those
outside of the image keep their coordinates. Depth stays in meters at any scale. `areas` follow a
change of scale, and are refused if objects are cut, because the remaining area is unknown.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np
from PIL import Image

from vit_jax.array_types import Float, Shaped
from vit_jax.data.records import MAPS, OBJECTS, Record
from vit_jax.data.transforms.pillow import Fill, Matrix, resample, transform
from vit_jax.data.transforms.pixels import mirror
from vit_jax.errors import UserError
from vit_jax.ops.panoptic import VOID, keep_rows

CORNERS = [[0, 1], [2, 1], [0, 3], [2, 3]]  # columns of a box

Points = Float[np.ndarray, '*N 2']
Method = str | Callable[[np.ndarray, int, int], np.ndarray]
T = TypeVar('T')
S = TypeVar('S')


def resize(record: Record, height: int, width: int, method: Method = 'bilinear') -> Record:
    """Scale to `height` and `width`; masks and depth by nearest pixels.

    `method` is one of `pillow.METHODS`, or a function (image, height, width) -> image.
    """
    check_movable(record)
    old_height, old_width = image_size(record)
    if (old_height, old_width) == (height, width):
        return record
    scale = np.array([width / old_width, height / old_height])

    def nearest(masks: np.ndarray) -> np.ndarray:
        rows, columns = _nearest(old_height, height)[:, None], _nearest(old_width, width)
        return masks[:, rows, columns]

    moved = _move(
        record,
        lambda image: (
            resample(image, height, width, method)
            if isinstance(method, str)
            else method(image, height, width)
        ),
        nearest,
        lambda points: points * scale,
    )
    if 'areas' in record:
        moved['areas'] = np.asarray(record['areas'], np.float32) * np.float32(scale.prod())
    return moved


def _nearest(old: int, new: int) -> np.ndarray:
    """Return the old pixel that contains the center of each new pixel."""
    return ((2 * np.arange(new) + 1) * old) // (2 * new)


def crop(record: Record, y: int, x: int, height: int, width: int) -> Record:
    """Take the window of this size with its upper left corner at (y, x)."""
    check_movable(record, cut=True)
    rows, columns = slice(y, y + height), slice(x, x + width)
    moved = _move(
        record,
        lambda image: image[rows, columns],
        lambda masks: masks[:, rows, columns],
        lambda points: points - [x, y],
    )
    return _drop_outside(moved)


def flip(record: Record) -> Record:
    """Mirror left and right."""
    check_movable(record, padded=False)
    moved = _move(
        record,
        mirror,
        lambda masks: masks[:, :, ::-1],
        lambda points: points * [-1, 1] + [image_size(record)[1], 0],
    )
    if 'normals' in moved:
        moved['normals'] = moved['normals'] * np.array([-1, 1, 1], np.float32)
    return moved


def pad(
    record: Record,
    top: int,
    bottom: int,
    left: int,
    right: int,
    fill: Fill = 0,
    segment: int = VOID,
) -> Record:
    """Add rows and columns: `fill` in images, zeros in masks and depth, `segment` in segments."""
    check_movable(record)
    rows, columns = (top, bottom), (left, right)
    return _move(
        record,
        lambda image: _pad(image, rows, columns, (0, 0), fill=fill),
        lambda masks: _pad(masks, (0, 0), rows, columns),
        lambda points: points + np.array([left, top]),
        lambda segments: _pad(segments, rows, columns, fill=segment),
    )


def follow(record: Record, matrix: Matrix) -> Record:
    """Move boxes, masks, depth and points by `matrix`, after `pillow.transform` moved the image.

    A box becomes the bounding box of its moved corners, which may be wider than the object.
    """
    check_movable(record, cut=True)
    if 'normals' in record:
        raise UserError(f"'normals' cannot be rotated; {_suggest_keep(record, 'normals')}")
    a, b, c, d, e, f = matrix
    moved = _move(
        record,
        lambda image: image,
        lambda masks: _map_masks(lambda mask: transform(mask, matrix, fill=0), masks),
        lambda points: (points - [c, f]) @ np.linalg.inv([[a, b], [d, e]]).T,
        lambda segments: _follow_numbers(segments, matrix),
        lambda depth: np.asarray(transform(Image.fromarray(depth), matrix, fill=0)),
    )
    return _drop_outside(moved)


def _follow_numbers(segments: np.ndarray, matrix: Matrix) -> np.ndarray:
    """Move a segment map by `matrix`; fill with `VOID` from outside."""
    above_void = Image.fromarray((segments - VOID).astype(np.int32))
    return np.asarray(transform(above_void, matrix, fill=0)).astype(segments.dtype) + VOID


def _map_masks(change: Callable[[Image.Image], Image.Image], masks: np.ndarray) -> np.ndarray:
    """Apply a function of gray images to each mask."""
    moved = np.empty_like(masks)
    for row, mask in zip(moved, masks != 0, strict=True):
        row[:] = np.asarray(change(Image.fromarray(mask.astype(np.uint8))))
    return moved


def shrink_and_pad(record: Record, size: tuple[int, int]) -> Record:
    """Shrink and pad an image of any size to a common size for batching.

    A larger image is scaled down, keeping its aspect ratio; then it is padded with zeros at the
    right and bottom.

    Args:
      record: Transformed record.
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
        # Segments are padded with 0 because `pixel_mask` marks the padding.
        record = pad(record, 0, size[0] - height, 0, size[1] - width, segment=0)
    except UserError as error:
        raise UserError(f'padding images to {size[1]} x {size[0]}: {error}') from error
    mask = np.zeros(size, bool)
    mask[:height, :width] = True
    return {**record, 'pixel_mask': mask}


def _move(
    record: Record,
    image: Callable[[np.ndarray], np.ndarray],
    masks: Callable[[Shaped[np.ndarray, 'N H W']], Shaped[np.ndarray, 'N H2 W2']],
    points: Callable[[Points], Points],
    segments: Callable[[np.ndarray], np.ndarray] | None = None,
    depth: Callable[[np.ndarray], np.ndarray] | None = None,
) -> Record:
    """Move each field of a record by the function for its kind.

    Segments and depth are moved like masks by default.
    """

    def as_mask(values: np.ndarray) -> np.ndarray:
        return masks(values[None])[0]

    images = {name: map_frames(image, record[name]) for name in record if is_image(name)}
    moved = {**record, **images}
    if 'masks' in record:
        moved['masks'] = masks(np.asarray(record['masks']))
    if 'segments' in record:
        moved['segments'] = (segments or as_mask)(np.asarray(record['segments']))
    if 'depth' in record:
        moved['depth'] = (depth or as_mask)(np.asarray(record['depth'], np.float32))
    if 'normals' in record:
        planes = np.moveaxis(np.asarray(record['normals'], np.float32), -1, 0)
        moved['normals'] = np.moveaxis(masks(planes), 0, -1)
    if 'points' in record:
        moved['points'] = points(np.asarray(record['points'])).astype(np.float32)
    if 'boxes' in record:
        corners = points(np.asarray(record['boxes'])[:, CORNERS])
        boxes = np.concatenate([corners.min(1), corners.max(1)], 1)
        moved['boxes'] = boxes.astype(np.float32)
    return moved


def _drop_outside(record: Record) -> Record:
    """Clip boxes to the image, and drop objects outside of it."""
    if 'boxes' in record:
        height, width = image_size(record)
        boxes = np.clip(record['boxes'], 0, np.array([width, height] * 2, np.float32))
        record = {**record, 'boxes': boxes}
    if 'segments' in record:
        return _keep_visible(record)
    if 'boxes' in record:
        is_inside = (boxes[:, 2:] > boxes[:, :2]).all(1)
    elif 'masks' in record:
        is_inside = record['masks'].any((1, 2))
    else:
        return record
    return _select_objects(record, is_inside)


def _keep_visible(record: Record) -> Record:
    """Drop objects that have no pixel in `segments`, and renumber the others."""
    segments = np.asarray(record['segments'])
    count = next((len(record[name]) for name in OBJECTS if name in record), 0)
    is_visible = np.bincount(segments[segments > 0], minlength=count + 1)[1 : count + 1] > 0
    if is_visible.all():
        return record
    return {**_select_objects(record, is_visible), 'segments': keep_rows(segments, is_visible)}


def _select_objects(record: Record, selection: np.ndarray) -> Record:
    rows = {name: np.asarray(record[name])[selection] for name in OBJECTS if name in record}
    return {**record, **rows}


def _pad(array: np.ndarray, *widths: tuple[int, int], fill: Fill = 0) -> np.ndarray:
    # np.pad takes ten times as long for small images.
    axes = list(zip(array.shape, widths, strict=True))
    padded = np.zeros([side + before + after for side, (before, after) in axes], array.dtype)
    if fill != 0:
        if isinstance(fill, tuple) and len(fill) != array.shape[-1]:
            raise UserError(f'{fill=} has {len(fill)} values, the image {array.shape[-1]} channels')
        padded[:] = fill
    padded[tuple(slice(before, before + side) for side, (before, _) in axes)] = array
    return padded


def image_size(record: Record) -> tuple[int, int]:
    """Return height and width of the record's image; UserError if it has none."""
    shape: tuple[int, ...] = getattr(record.get('image'), 'shape', ())
    if len(shape) < 3:
        raise UserError("the record has no 'image' of shape [H, W, C]")
    return shape[-3], shape[-2]


def is_image(name: str) -> bool:
    """Return whether a field is an image by its name."""
    return name == 'image' or name.endswith('_image')


def check_movable(record: Record, *, padded: bool = True, cut: bool = False) -> None:
    """Raise UserError unless everything in the record can be moved with its image.

    Args:
      record: Record with an image.
      padded: Whether rows added by `pad_objects` may stay unmoved.
      cut: Whether objects are cut, which forbids both these rows and `areas`.
    """
    height, width = image_size(record)
    forms = {'boxes': (4,), 'points': (2,), 'masks': (height, width)}
    forms |= {**dict.fromkeys(MAPS, (height, width)), 'normals': (height, width, 3)}
    for name, value in record.items():
        if name in forms:
            rows = () if name in (*MAPS, 'normals') else ('N',)
            if np.shape(value)[len(rows) :] != forms[name]:
                expected = ', '.join(map(str, (*rows, *forms[name])))
                raise UserError(f'{name!r} has shape {np.shape(value)}; it must be [{expected}]')
        elif is_image(name):
            if np.shape(value)[-3:-1] != (height, width):
                raise UserError(
                    f'{name!r} has shape {np.shape(value)}, the image {width} x {height} pixels: '
                    'put the transform that makes views of different sizes last'
                )
        elif _lies_in_image(value):
            raise UserError(
                f'{name!r} cannot be moved with the image; {_suggest_keep(record, name)}'
            )
    check_objects(record)
    if 'object_mask' in record and (cut or not padded):
        raise UserError('cannot move the rows added by pad_objects; put pad_objects last')
    if cut and 'areas' in record:
        raise UserError(f"'areas' of cut objects are unknown; {_suggest_keep(record, 'areas')}")


def check_objects(record: Record) -> None:
    """Raise UserError unless all fields of objects have one row for each object."""
    if not {'boxes', 'masks', 'segments'} & record.keys():
        return
    counts = {name: len(record[name]) for name in OBJECTS if name in record}
    if len(set(counts.values())) > 1:
        counts_text = ', '.join(f'{count} {name}' for name, count in counts.items())
        raise UserError(f'{counts_text}: all must have one row per object')


def check_image_is_alone(record: Record) -> None:
    """Raise UserError if the record has other fields with pixel positions."""
    for name, value in record.items():
        if name != 'image' and _lies_in_image(value):
            raise UserError(
                f'changes the size of the image but not {name!r}; write it as a function of the '
                f'record, or {_suggest_keep(record, name)}'
            )


def check_annotations_stay(record: Record) -> None:
    """Raise UserError if annotations would no longer match a replaced image."""
    for name, value in record.items():
        if not is_image(name) and _lies_in_image(value):
            raise UserError(f'replaces the image but not {name!r}; {_suggest_keep(record, name)}')


def check_only_image(record: Record) -> None:
    """Raise UserError if there are images besides `image`."""
    for name in record:
        if name != 'image' and is_image(name):
            raise UserError(f'cannot move {name!r}; put the transform that makes it last')


def _lies_in_image(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return any(isinstance(item, list | tuple | np.ndarray) for item in value)
    return getattr(value, 'ndim', 0) >= 2


def _suggest_keep(record: Record, name: str) -> str:
    fields = ', '.join(repr(other) for other in record if other != name)
    return f'drop it first with keep({fields})'


def map_frames(
    change: Callable[..., np.ndarray],
    image: Shaped[np.ndarray, '*T H W C'],
    *rng: np.random.Generator,
) -> Shaped[np.ndarray, '*T H2 W2 C2']:
    """Apply a function of (frame, *rng) to each frame of an image, with equal draws for all."""
    if image.ndim == 3:
        return change(image, *rng)
    frames = np.stack(
        with_same_draws(lambda frame: change(frame, *rng), list(split_frames(image)), *rng)
    )
    return frames.reshape(*image.shape[:-3], *frames.shape[1:])


def with_same_draws(
    change: Callable[[S], T], frames: Sequence[S], *rng: np.random.Generator
) -> list[T]:
    """Apply `change` to each frame, with equal draws from the generator, if given."""
    if len(frames) == 1:
        return [change(frames[0])]
    states = [generator.bit_generator.state for generator in rng]
    changed = []
    for frame in frames:
        for generator, state in zip(rng, states, strict=True):
            generator.bit_generator.state = state
        changed.append(change(frame))
    return changed


def split_frames(image: Shaped[np.ndarray, '*T H W C']) -> Shaped[np.ndarray, 'F H W C']:
    """Split an image into frames; [H, W, C] is one frame."""
    return image.reshape(-1, *image.shape[-3:])
