"""Batches of examples that a cache holds as arrays, made by array instead of one by one.

For small images most of a batch's time is spent between the examples' few bytes. The random numbers
are those that each example draws by itself, and so the batches are the same.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np

from vit_jax import signatures
from vit_jax.array_types import Int, UInt8
from vit_jax.data.batches import ArraySpec, Batch, Spec
from vit_jax.data.records import BrokenRecord, Record, check_ids, example_rng
from vit_jax.data.transforms import Transforms
from vit_jax.errors import UserError

LARGEST = 2**30  # bytes of all examples, which the cache holds a second time
Images = UInt8[np.ndarray, 'B H W C']


class Move(Protocol):
    """A random transform of images of one size."""

    def draw(self, rng: np.random.Generator) -> int:
        """Draw the numbers of an example as the transform does, encoded as one."""

    def apply(self, images: Images, drawn: Int[np.ndarray, ' B']) -> Images:
        """Move every image by what was drawn for it."""


@dataclasses.dataclass(frozen=True)
class Flip:
    """Mirror left and right with probability 1/2, as `transforms.image.flip`."""

    def draw(self, rng: np.random.Generator) -> int:
        return rng.random() < 0.5

    def apply(self, images: Images, drawn: Int[np.ndarray, ' B']) -> Images:
        (rows,) = drawn.nonzero()
        mirrored = images[rows]
        for channel in range(images.shape[-1]):  # NumPy copies mirrored rows of pixels slowly
            images[rows, ..., channel] = mirrored[:, :, ::-1, channel]
        return images


@dataclasses.dataclass(frozen=True)
class PadAndCrop:
    """Crop a random window of a padded image, as `transforms.image.pad_and_crop`."""

    pad: int

    def draw(self, rng: np.random.Generator) -> int:
        places = 2 * self.pad + 1
        return int(rng.integers(places)) * places + int(rng.integers(places))

    def apply(self, images: Images, drawn: Int[np.ndarray, ' B']) -> Images:
        pad, (height, width) = self.pad, images.shape[1:3]
        sides = height + 2 * pad, width + 2 * pad
        padded = np.zeros((len(images), *sides, images.shape[-1]), np.uint8)
        padded[:, pad : pad + height, pad : pad + width] = images
        corners = zip(*(at.tolist() for at in np.divmod(drawn, 2 * pad + 1)), strict=True)
        for row, (image, (y, x)) in enumerate(zip(padded, corners, strict=True)):
            images[row] = image[y : y + height, x : x + width]
        return images


MOVES: dict[str, Callable[..., Move]] = {'flip': Flip, 'pad_and_crop': PadAndCrop}


@dataclasses.dataclass(frozen=True)
class Stacked:
    """All examples of a cache.

    Attributes:
      spec: the arrays of an example.
      arrays: the examples before random transforms, {name: [N ...]}.
      moves: the random transforms.
    """

    spec: Spec
    arrays: Batch
    moves: Sequence[Move]

    def rows(
        self, numbers: Int[np.ndarray, ' B'], seed: int, draws: Int[np.ndarray, ' B']
    ) -> Batch:
        """The examples `numbers`, transformed by the random numbers of (seed, draw)."""
        rows = {name: array[numbers] for name, array in self.arrays.items()}
        if self.moves:
            rngs = (example_rng(seed, draw) for draw in draws.tolist())
            drawn = np.array([[move.draw(rng) for move in self.moves] for rng in rngs], np.int64)
            columns = drawn.reshape(-1, len(self.moves)).T  # also of no rows
            for move, column in zip(self.moves, columns, strict=True):
                rows['image'] = move.apply(rows['image'], column)
        return rows


def stack(
    records: Sequence[Record | BrokenRecord], transforms: Transforms, vocab_size: int
) -> Stacked | None:
    """Stack the examples of a cache; None if they are too large, broken or of several shapes.

    Args:
      records: all examples, after the transforms unless these draw random numbers.
      transforms: None is returned if any is random, but not among MOVES.
      vocab_size: bounds the ids of texts.
    """
    moves: list[Move] = []
    for node in signatures.parse_transforms(transforms.spec) if transforms.random else ():
        if (name := signatures.function_name(node)) not in MOVES:
            return None
        args, kwargs = signatures.arguments(node)
        moves.append(MOVES[name](*args, **kwargs))
    first = records[0]
    if isinstance(first, BrokenRecord):
        return None
    spec = {name: ArraySpec.from_value(value) for name, value in first.items()}
    each = sum(s.dtype.itemsize * math.prod(s.shape) for s in spec.values())
    alone = all(len(s.shape) == 3 * (name == 'image') for name, s in spec.items())
    images = alone and 'image' in spec and spec['image'].dtype == np.uint8
    if each * len(records) > LARGEST or (moves and not images):
        return None
    arrays = {name: np.empty((len(records), *s.shape), s.dtype) for name, s in spec.items()}
    try:
        for row, record in enumerate(records):
            _put(record, arrays, row, vocab_size)
    except UserError:  # which a batch that reads the record by itself explains
        return None
    return Stacked(spec, arrays, moves)


def _put(record: Record | BrokenRecord, arrays: Batch, row: int, vocab_size: int) -> None:
    """Copy an example into its row; UserError if it does not fit, or cannot be in a batch."""
    if isinstance(record, BrokenRecord) or record.keys() != arrays.keys():
        raise UserError('an example lacks arrays')
    for name, value in record.items():
        to = arrays[name]
        if ArraySpec.from_value(value) != ArraySpec(to.shape[1:], to.dtype):
            raise UserError(f'{name} differs in shape or dtype')
        if to.dtype == np.int32:
            check_ids(name, np.asarray(value), vocab_size if to.ndim == 2 else 0)
        to[row] = value
        if to.dtype.kind == 'f' and not np.isfinite(to[row]).all():
            raise UserError(f'{name} is not finite')
