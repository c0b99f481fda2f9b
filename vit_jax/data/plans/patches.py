"""Batches of mixed-size images as patch sequences of a few lengths."""

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

LARGEST = 4096  # patches per sequence; attention then has 16 million weights per head


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Plan(fixed.Plan):
    """Order of `fixed`, with an image's patches in each row, following SigLIP 2's NaFlex.

    Each training batch draws a length, and its images are resized to at most as many patches, see
    the transform `fit_patches`; evaluation uses the last length. Instead of `image`, the record has
    `patches` [length, patch_size^2 channels], row by row and then padding, and `grid`, the rows and
    columns of patches [2].

    Patches of several sizes, as in FlexiViT (arXiv:2212.08013), are drawn with the lengths: for
    images of 48 x 48 pixels write `patches(patch_size=(16, 8), lengths=(9, 36))`.

    Attributes:
      patch_size: Patch side in pixels, or one side for each of `lengths`.
      lengths: Increasing sequence lengths in patches, drawn equally often.
    """

    patch_size: int | tuple[int, ...]
    lengths: tuple[int, ...]

    unit = 'images'

    def __post_init__(self) -> None:
        super().__post_init__()
        lengths = self.lengths if isinstance(self.lengths, tuple) else ()
        are_valid = all(isinstance(n, int) and 0 < n <= LARGEST for n in lengths)
        if not lengths or not are_valid or list(lengths) != sorted(set(lengths)):
            raise UserError(
                f'lengths={self.lengths}: write increasing numbers of patches up to {LARGEST}, '
                'such as (128, 256)'
            )
        sides = self._sides
        if len(sides) != len(lengths) or not all(isinstance(n, int) and n > 0 for n in sides):
            raise UserError(
                f'patch_size={self.patch_size}: write the patch side in pixels, or one side for '
                f'each of lengths={self.lengths}'
            )

    @property
    def _sides(self) -> tuple[int, ...]:
        """Patch side for each length."""
        if isinstance(self.patch_size, tuple):
            return self.patch_size
        return (self.patch_size,) * len(self.lengths)

    @functools.cached_property
    def specs(self) -> tuple[Spec, ...]:
        other_fields, channels = self._without_image(self.example), self._image().shape[2]
        grid = {'grid': ArraySpec((2,), np.dtype(np.int32))}
        dtype = ArraySpec.from_value(self._image()).dtype
        return tuple(
            self.spec_of(other_fields)
            | grid
            | {'patches': ArraySpec((length, side**2 * channels), dtype)}
            for length, side in zip(self.lengths, self._sides, strict=True)
        )

    def pad(self, record: Record, spec: Spec) -> Record:
        """Resize the image to as many whole patches as `spec` allows, and cut it.

        Returns:
          The record with `patches` [N, P * P * C], row by row, and `grid`, their rows and columns,
          instead of the image; padded, with a mask.

        Raises:
          UserError: if the number of channels differs from the first image's.
        """
        length, values = spec['patches'].shape
        height, width = record['image'].shape[:2]
        rows, columns = grid_within(height, width, length)
        side = self._sides[self.lengths.index(length)]
        record = geometry.resize(record, rows * side, columns * side)
        cut = cut_patches(record['image'], side)
        if cut.shape[1] != values:
            raise UserError(
                f'this image has {record["image"].shape[2]} channels, unlike others; convert all '
                'images to color or gray'
            )
        sequence = {'patches': cut, 'grid': np.array((rows, columns), np.int32)}
        return batches.pad({**self._without_image(record), **sequence}, spec)

    def _image(self) -> np.ndarray:
        if np.ndim(image := self.example.get('image', ())) != 3:
            raise UserError(f'{self.examples.source.title}: has no image to cut into patches')
        return np.asarray(image)

    def _without_image(self, record: Record) -> Record:
        return {name: value for name, value in record.items() if name != 'image'}
