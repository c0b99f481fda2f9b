"""Batches of examples that a cache holds as arrays, made by array instead of one by one.

For small images most of a batch's time is spent between the examples' few bytes. The random numbers
are those that each example draws by itself, and so the batches are the same. Numbers of all
examples are made at once of random bits, by the rules of NumPy's generators: a call for each number
takes three times as long as all else.
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

LARGEST = 2**30  # bytes of all examples, which the cache holds a second time
AGAIN = -1  # numbers for which the bits at hand are too few, one time in a billion
LOW = np.uint64(2**32 - 1)
Bits = Shaped[np.ndarray, ' B']  # uint64
Images = UInt8[np.ndarray, 'B H W C']


class Move(Protocol):
    """A random transform of images of one size, which takes 64 random bits of each."""

    def draw(self, rng: np.random.Generator) -> int:
        """Draw the numbers of an example as the transform does, encoded as one."""

    def drawn(self, bits: Bits) -> Int[np.ndarray, ' B']:
        """What `draw` makes of these bits; AGAIN if it would take more of them."""

    def apply(self, images: Images, drawn: Int[np.ndarray, ' B']) -> Images:
        """Move every image by what was drawn for it."""


@dataclasses.dataclass(frozen=True)
class Flip:
    """Mirror left and right with probability 1/2, as `transforms.image.flip`."""

    def draw(self, rng: np.random.Generator) -> int:
        return rng.random() < 0.5

    def drawn(self, bits: Bits) -> Int[np.ndarray, ' B']:
        return (bits < 2**63).astype(np.int64)

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

    def drawn(self, bits: Bits) -> Int[np.ndarray, ' B']:
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
      nbytes: of an example.
      arrays: the examples before random transforms, {name: [N ...]}.
      moves: the random transforms.
    """

    spec: Spec
    nbytes: int
    arrays: Batch
    moves: Sequence[Move]

    def rows(
        self, numbers: Int[np.ndarray, ' B'], seed: int, draws: Int[np.ndarray, ' B']
    ) -> Batch:
        """The examples `numbers`, transformed by the random numbers of (seed, draw)."""
        rows = {name: array[numbers] for name, array in self.arrays.items()}
        if self.moves:
            drawn = self._drawn(seed, draws.tolist())
            for move, column in zip(self.moves, drawn, strict=True):
                rows['image'] = move.apply(rows['image'], column)
        return rows

    def _drawn(self, seed: int, draws: Sequence[int]) -> list[Int[np.ndarray, ' B']]:
        """The numbers of every move."""
        generators = (example_rng(seed, draw).bit_generator for draw in draws)
        words = [[one.random_raw() for _ in self.moves] for one in generators]
        bits = np.array(words, np.uint64).reshape(-1, len(self.moves))  # also of no rows
        drawn = [move.drawn(column) for move, column in zip(self.moves, bits.T, strict=True)]
        for row in np.flatnonzero(np.any([column == AGAIN for column in drawn], 0)).tolist():
            rng = example_rng(seed, draws[row])
            for move, column in zip(self.moves, drawn, strict=True):
                column[row] = move.draw(rng)
        return drawn


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
    return Stacked(spec, each, arrays, moves)


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
