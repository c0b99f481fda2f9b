"""Checks of the record's fields that geometric transforms move or refuse; frames of clips.

Numbers, strings and one-dimensional arrays pass. So do images of one size, and `boxes`, `masks`,
`points` and `segments`, which `geometry` moves. An image of another size, such as a small view,
another array of two or more dimensions, or a nested list such as polygons, is refused: left
unmoved, it would be silently wrong.

Images are `image` and fields named `NAME_image`. Their last three axes are [H, W, C]; along earlier
axes, for example the frames of a clip or the views of an image, all get the same transform.

If there are boxes or masks, the rows of `OBJECTS` belong to them one by one; arrays of other names
are facts about the whole image. `areas` follow a change of scale, and are refused if objects are
cut, since the remaining area is unknown; so are `segments`, which hold the objects' rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np

from vit_jax.array_types import Shaped
from vit_jax.data.records import OBJECTS, Record
from vit_jax.errors import UserError

T = TypeVar('T')
S = TypeVar('S')


def image_size(record: Record) -> tuple[int, int]:
    """Height and width of the record's image; UserError if it has none."""
    shape: tuple[int, ...] = getattr(record.get('image'), 'shape', ())
    if len(shape) < 3:
        raise UserError("the record has no 'image' of shape [H, W, C]")
    return shape[-3], shape[-2]


def is_image(name: str) -> bool:
    """Whether a field is an image by its name."""
    return name == 'image' or name.endswith('_image')


def check(record: Record, *, padded: bool = True, cut: bool = False) -> None:
    """Raise UserError unless everything in the record can be moved with its image.

    Args:
      record: has an image.
      padded: whether rows that `pad_objects` has added may stay where they are.
      cut: whether objects are cut; then neither these rows nor areas nor segments are allowed.
    """
    height, width = image_size(record)
    forms = {'boxes': (4,), 'points': (2,), 'masks': (height, width), 'segments': (width,)}
    for name, value in record.items():
        if name in forms:
            if np.shape(value)[1:] != forms[name]:
                rows = height if name == 'segments' else 'N'
                expected = ', '.join(map(str, (rows, *forms[name])))
                raise UserError(f'{name!r} has shape {np.shape(value)}; it must be [{expected}]')
        elif is_image(name):
            if np.shape(value)[-3:-1] != (height, width):
                raise UserError(
                    f'{name!r} has shape {np.shape(value)}, the image {height} x {width} pixels: '
                    'put the transform that makes views of other sizes last'
                )
        elif _lies_in_image(value):
            raise UserError(f'{name!r} cannot be moved with the image; {_without(record, name)}')
    check_objects(record)
    if 'object_mask' in record and (cut or not padded):
        raise UserError('cannot move the rows that pad_objects has added; put pad_objects last')
    if cut and 'areas' in record:
        raise UserError(f"'areas' of cut objects are unknown; {_without(record, 'areas')}")
    if cut and 'segments' in record:
        raise UserError('segments cannot be cut; put number_masks after transforms that cut')


def check_image_is_alone(record: Record) -> None:
    """Raise UserError if the record has other fields that lie in the image."""
    for name, value in record.items():
        if name != 'image' and _lies_in_image(value):
            raise UserError(
                f'changes the size of the image but not {name!r}; take the record instead of the '
                f'image, or {_without(record, name)}'
            )


def check_annotations_stay(record: Record) -> None:
    """Raise UserError if replacing the image would leave annotations of it behind."""
    for name, value in record.items():
        if not is_image(name) and _lies_in_image(value):
            raise UserError(f'replaces the image but not {name!r}; {_without(record, name)}')


def check_only_image(record: Record) -> None:
    """Raise UserError if there are images besides `image`."""
    for name in record:
        if name != 'image' and is_image(name):
            raise UserError(f'cannot move {name!r} along; put what makes it last')


def check_objects(record: Record) -> None:
    """Raise UserError unless all fields of objects have one row for each object."""
    if 'boxes' not in record and 'masks' not in record:
        return
    counts = {name: len(record[name]) for name in OBJECTS if name in record}
    if len(set(counts.values())) > 1:
        listed = ', '.join(f'{count} {name}' for name, count in counts.items())
        raise UserError(f'{listed}: each must have one row an object')


def _lies_in_image(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return any(isinstance(item, list | tuple | np.ndarray) for item in value)
    return getattr(value, 'ndim', 0) >= 2


def _without(record: Record, name: str) -> str:
    others = ', '.join(repr(other) for other in record if other != name)
    return f'leave it out by keep({others}) before'


def split_frames(image: Shaped[np.ndarray, '*T H W C']) -> Shaped[np.ndarray, 'F H W C']:
    """The frames of an image; a single one for [H, W, C]."""
    return image.reshape(-1, *image.shape[-3:])


def with_same_draws(
    change: Callable[[S], T], frames: Sequence[S], *rng: np.random.Generator
) -> list[T]:
    """Apply `change` to each frame, with the same draws from the generator, if given."""
    if len(frames) == 1:
        return [change(frames[0])]
    states = [one.bit_generator.state for one in rng]
    made = []
    for frame in frames:
        for one, state in zip(rng, states, strict=True):
            one.bit_generator.state = state
        made.append(change(frame))
    return made


def map_frames(
    change: Callable[..., np.ndarray],
    image: Shaped[np.ndarray, '*T H W C'],
    *rng: np.random.Generator,
) -> Shaped[np.ndarray, '*T H2 W2 C2']:
    """Apply a function of (frame, *rng) to each frame of an image, with the same draws for all."""
    if image.ndim == 3:
        return change(image, *rng)
    made = np.stack(
        with_same_draws(lambda frame: change(frame, *rng), list(split_frames(image)), *rng)
    )
    return made.reshape(*image.shape[:-3], *made.shape[1:])
