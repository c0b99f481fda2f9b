"""Batches of cached examples, made by whole arrays instead of one example at a time.

With small images, Python's overhead per example takes most of a batch's time. Each example has the
same random numbers as if it was made separately, so the batches are the same. The numbers of all
examples are computed together from random bits, by the rules of NumPy's generators: one call per
number takes three times as long as everything else.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np

from vit_jax import signatures
from vit_jax.array_types import Int, Shaped, UInt8
from vit_jax.data.batches import ArraySpec, Batch, Spec
from vit_jax.data.records import BrokenRecord, Record, check_ids, example_rng
from vit_jax.data.transforms import Transforms
from vit_jax.errors import UserError

LARGEST = 2**30  # most bytes of all examples, which are held in addition to the cache
AGAIN = -1  # marks numbers that need more bits, about one in a billion
LOW = np.uint64(2**32 - 1)
Bits = Shaped[np.ndarray, ' B']  # uint64
Images = UInt8[np.ndarray, 'B H W C']


class Move(Protocol):
    """A random transform of images of one size that uses 64 random bits per image."""

    def draw(self, rng: np.random.Generator) -> int:
        """Draw the numbers of an example as the transform does, encoded in one integer."""

    def convert(self, bits: Bits) -> Int[np.ndarray, ' B']:
        """Compute what `draw` returns for these bits; AGAIN where it would use more bits."""

    def apply(self, images: Images, drawn: Int[np.ndarray, ' B']) -> Images:
        """Apply each image's drawn numbers."""


@dataclasses.dataclass(frozen=True)
class Flip:
    """Mirror left and right with probability 1/2, like `transforms.image.flip`."""

    def draw(self, rng: np.random.Generator) -> int:
        return rng.random() < 0.5

    def convert(self, bits: Bits) -> Int[np.ndarray, ' B']:
        return (bits < 2**63).astype(np.int64)

    def apply(self, images: Images, drawn: Int[np.ndarray, ' B']) -> Images:
        (rows,) = drawn.nonzero()
        mirrored = images[rows]
        for channel in range(images.shape[-1]):  # NumPy copies mirrored rows of pixels slowly
            images[rows, ..., channel] = mirrored[:, :, ::-1, channel]
        return images


@dataclasses.dataclass(frozen=True)
class PadAndCrop:
    """Crop a random window of a padded image, like `transforms.image.pad_and_crop`."""

    pad: int

    def draw(self, rng: np.random.Generator) -> int:
        places = 2 * self.pad + 1
        return int(rng.integers(places)) * places + int(rng.integers(places))

    def convert(self, bits: Bits) -> Int[np.ndarray, ' B']:
        # Lemire, Fast random integer generation in an interval (2019), algorithm 5.
        places = 2 * self.pad + 1
        scaled = np.stack([bits & LOW, bits >> 32]) * np.uint64(places)
        y, x = (scaled >> 32).astype(np.int64)
        again = ((scaled & LOW) < 2**32 % places).any(0)
        return np.where(again, AGAIN, y * places + x)

    def apply(self, images: Images, drawn: Int[np.ndarray, ' B']) -> Images:
        pad, (height, width) = self.pad, images.shape[1:3]
        sides = height + 2 * pad, width + 2 * pad
        padded = np.zeros((len(images), *sides, images.shape[-1]), np.uint8)
        padded[:, pad : pad + height, pad : pad + width] = images
        corners = zip(*(axis.tolist() for axis in np.divmod(drawn, 2 * pad + 1)), strict=True)
        for row, (image, (y, x)) in enumerate(zip(padded, corners, strict=True)):
            images[row] = image[y : y + height, x : x + width]
        return images


MOVES: dict[str, Callable[..., Move]] = {'flip': Flip, 'pad_and_crop': PadAndCrop}


@dataclasses.dataclass(frozen=True)
class Stacked:
    """All examples of a cache, stacked.

    Attributes:
      spec: Spec of an example's arrays.
      nbytes: Bytes per example.
      arrays: Examples before random transforms, {name: [N ...]}.
      moves: Random transforms.
    """

    spec: Spec
    nbytes: int
    arrays: Batch
    moves: Sequence[Move]

    def rows(
        self, numbers: Int[np.ndarray, ' B'], seed: int, draws: Int[np.ndarray, ' B']
    ) -> Batch:
        """Return the examples `numbers`, transformed by the random numbers of (seed, draw)."""
        rows = {name: array[numbers] for name, array in self.arrays.items()}
        if self.moves:
            columns = self._draw(seed, draws.tolist())
            for move, column in zip(self.moves, columns, strict=True):
                rows['image'] = move.apply(rows['image'], column)
        return rows

    def _draw(self, seed: int, draws: Sequence[int]) -> list[Int[np.ndarray, ' B']]:
        """Draw the numbers of every move."""
        generators = (example_rng(seed, draw).bit_generator for draw in draws)
        words = [[generator.random_raw() for _ in self.moves] for generator in generators]
        bits = np.array(words, np.uint64).reshape(-1, len(self.moves))  # also without rows
        columns = [move.convert(column) for move, column in zip(self.moves, bits.T, strict=True)]
        for row in np.flatnonzero(np.any([column == AGAIN for column in columns], 0)).tolist():
            rng = example_rng(seed, draws[row])
            for move, column in zip(self.moves, columns, strict=True):
                column[row] = move.draw(rng)
        return columns


def stack(
    records: Sequence[Record | BrokenRecord], transforms: Transforms, vocab_size: int
) -> Stacked | None:
    """Stack the examples of a cache; None if they are too large, broken or differ in shape.

    Args:
      records: All examples, transformed unless the transforms draw random numbers.
      transforms: Transforms; unless all random ones are among MOVES, None is returned.
      vocab_size: Number of ids of texts.
    """
    moves: list[Move] = []
    for node in signatures.parse_transforms(transforms.spec) if transforms.random else ():
        if (name := signatures.function_name(node)) not in MOVES:
            return None
        args, kwargs = signatures.arguments(node)
        moves.append(MOVES[name](*args, **kwargs))
    example = records[0]
    if isinstance(example, BrokenRecord):
        return None
    spec = {name: ArraySpec.from_value(value) for name, value in example.items()}
    nbytes = sum(s.dtype.itemsize * math.prod(s.shape) for s in spec.values())
    only_images = all(len(s.shape) == 3 * (name == 'image') for name, s in spec.items())
    images = only_images and 'image' in spec and spec['image'].dtype == np.uint8
    if nbytes * len(records) > LARGEST or (moves and not images):
        return None
    arrays = {name: np.empty((len(records), *s.shape), s.dtype) for name, s in spec.items()}
    try:
        for row, record in enumerate(records):
            _put(record, arrays, row, vocab_size)
    except UserError:  # reported when a batch reads the record separately
        return None
    return Stacked(spec, nbytes, arrays, moves)


def _put(record: Record | BrokenRecord, arrays: Batch, row: int, vocab_size: int) -> None:
    """Copy an example into its row; UserError if it does not fit, or cannot be in a batch."""
    if isinstance(record, BrokenRecord) or record.keys() != arrays.keys():
        raise UserError('an example lacks arrays')
    for name, value in record.items():
        target = arrays[name]
        if ArraySpec.from_value(value) != ArraySpec(target.shape[1:], target.dtype):
            raise UserError(f'{name} differs in shape or dtype')
        if target.dtype == np.int32:
            check_ids(name, np.asarray(value), vocab_size if target.ndim == 2 else 0)
        target[row] = value
        if target.dtype.kind == 'f' and not np.isfinite(target[row]).all():
            raise UserError(f'{name} is not finite')
