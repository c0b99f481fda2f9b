"""Batches of images padded to one of a few sizes."""

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
    """Order of `fixed`, with images padded to the batch's size; larger ones are shrunk.

    `pixel_mask` marks real pixels. Evaluation pads to the last size.

    Attributes:
      sizes: Heights and widths in pixels to which images are padded.
    """

    sizes: tuple[Size, ...]

    def __post_init__(self) -> None:
        super().__post_init__()
        if any(len(size) != 2 or min(size) < 1 for size in self.sizes):
            raise UserError(
                f'sizes={self.sizes}: write heights and widths of at least 1, such as ((480, 640),)'
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
    """Pad a record's image to `size`, and add `pixel_mask`; `size` None changes nothing."""
    return record if size is None else geometry.shrink_and_pad(record, size)
