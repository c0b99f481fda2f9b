"""Batches of images of mixed sizes as sequences of patches, of a few lengths."""

from __future__ import annotations

import dataclasses
import functools

import numpy as np

from vit_jax.data import batches
from vit_jax.data.batches import ArraySpec, Spec
from vit_jax.data.plans import fixed
from vit_jax.data.records import Record
from vit_jax.data.transforms import geometry
from vit_jax.data.transforms.image import cut_patches, grid_within
from vit_jax.errors import UserError

LARGEST = 4096  # patches of a sequence, whose attention has 16 million weights a head


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Plan(fixed.Plan):
    """The order of `fixed`, with the patches of an image in each row, after SigLIP 2's NaFlex.

    Each training batch draws a length, and its images are resized to as many patches as possible
    up to it, see the transform `fit_patches`; evaluation uses the last length. The record has
    `patches` [length, patch_size^2 channels], row by row and then padding, and `grid`, the rows and
    columns of patches [2], instead of `image`.

    Patches of several sizes, as FlexiViT's (arXiv:2212.08013), are drawn with the lengths: images
    of 48 x 48 pixels give `patches(patch_size=(16, 8), lengths=(9, 36))`.

    Attributes:
      patch_size: side of a patch in pixels, or a side for each of `lengths`.
      lengths: of the sequences, in patches, growing; each is drawn equally often.
    """

    patch_size: int | tuple[int, ...]
    lengths: tuple[int, ...]

    unit = 'images'

    def __post_init__(self) -> None:
        super().__post_init__()
        lengths = self.lengths if isinstance(self.lengths, tuple) else ()
        whole = all(isinstance(n, int) and 0 < n <= LARGEST for n in lengths)
        if not lengths or not whole or list(lengths) != sorted(set(lengths)):
            raise UserError(
                f'lengths={self.lengths}: write growing numbers of patches of at most {LARGEST}, '
                'such as (128, 256)'
            )
        sides = self._sides
        if len(sides) != len(lengths) or not all(isinstance(n, int) and n > 0 for n in sides):
            raise UserError(
                f'patch_size={self.patch_size}: write the side of a patch in pixels, or one for '
                f'each of lengths={self.lengths}'
            )

    @property
    def _sides(self) -> tuple[int, ...]:
        """The side of the patches of each length."""
        if isinstance(self.patch_size, tuple):
            return self.patch_size
        return (self.patch_size,) * len(self.lengths)

    @functools.cached_property
    def specs(self) -> tuple[Spec, ...]:
        kept, channels = self._kept(self.example), self._image().shape[2]
        grid = {'grid': ArraySpec((2,), np.dtype(np.int32))}
        dtype = ArraySpec.from_value(self._image()).dtype
        return tuple(
            self.spec_of(kept) | grid | {'patches': ArraySpec((length, side**2 * channels), dtype)}
            for length, side in zip(self.lengths, self._sides, strict=True)
        )

    def pad(self, record: Record, spec: Spec) -> Record:
        """Resize the image to whole patches, as many as the length of `spec` allows, and cut it.

        Returns:
          `patches` [N, P * P * C], row by row, and `grid`, their rows and columns, instead of the
          image; padded, with a mask.

        Raises:
          UserError: if the image has other channels than the first.
        """
        length, values = spec['patches'].shape
        height, width = record['image'].shape[:2]
        rows, columns = grid_within(height, width, length)
        side = self._sides[self.lengths.index(length)]
        record = geometry.resize(record, rows * side, columns * side)
        cut = cut_patches(record['image'], side)
        if cut.shape[1] != values:
            raise UserError(
                f'an image with {record["image"].shape[2]} channels among others; convert all to '
                'color or to gray'
            )
        sequence = {'patches': cut, 'grid': np.array((rows, columns), np.int32)}
        return batches.pad({**self._kept(record), **sequence}, spec)

    def _image(self) -> np.ndarray:
        if np.ndim(image := self.example.get('image', ())) != 3:
            raise UserError(f'{self.examples.source.title}: has no image to cut into patches')
        return np.asarray(image)

    def _kept(self, record: Record) -> Record:
        return {name: value for name, value in record.items() if name != 'image'}
