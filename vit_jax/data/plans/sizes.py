"""Batches of images that are padded to one of a few sizes."""

from __future__ import annotations

import dataclasses
import functools

from vit_jax.data.batches import Spec
from vit_jax.data.plans import fixed
from vit_jax.data.records import Record
from vit_jax.data.transforms import geometry
from vit_jax.errors import UserError

Size = tuple[int, int]  # height and width in pixels


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Plan(fixed.Plan):
    """The order of `fixed`, with images padded to the batch's size; larger ones are shrunk.

    `pixel_mask` marks real pixels. Evaluation pads to the last size.

    Attributes:
      sizes: heights and widths in pixels that images are padded to.
    """

    sizes: tuple[Size, ...]

    def __post_init__(self) -> None:
        super().__post_init__()
        if any(len(size) != 2 or min(size) < 1 for size in self.sizes):
            raise UserError(
                f'sizes={self.sizes}: write heights and widths of at least 1, as ((480, 640),)'
            )

    @functools.cached_property
    def specs(self) -> tuple[Spec, ...]:
        return tuple(
            self.spec_of(geometry.shrink_and_pad(self.example, size)) for size in self.sizes
        )

    def pad(self, record: Record, spec: Spec) -> Record:
        height, width = spec['pixel_mask'].shape
        return geometry.shrink_and_pad(record, (height, width))


def pad_image(record: Record, size: Size | None) -> Record:
    """The record with its image padded to `size`, and `pixel_mask`; unchanged if `size` is None."""
    return record if size is None else geometry.shrink_and_pad(record, size)
