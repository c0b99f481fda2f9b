"""Batches of images that are padded to one of a few sizes."""

from __future__ import annotations

import dataclasses
import functools

import numpy as np

from vit_jax.data.batches import Shape, Spec
from vit_jax.data.plans import base, fixed
from vit_jax.data.records import Record
from vit_jax.data.transforms import geometry
from vit_jax.errors import UserError

Size = tuple[int, int]  # height and width in pixels


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Plan(fixed.Plan):
    """The order of `fixed`; every image is shrunk if need be and padded to the batch's size.

    Its real pixels are marked by `pixel_mask`. The size of batch k of training is drawn by (seed,
    k); evaluation takes the last one, so that no result depends on the batch.

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
    def _specs(self) -> tuple[Spec, ...]:
        return tuple(self.spec_of(geometry.fit(self.example, size)) for size in self.sizes)

    @functools.cached_property
    def spec(self) -> Spec:
        return self._specs[-1]

    @property
    def shapes(self) -> tuple[Shape, ...]:
        self.check_batch_size()
        return tuple(Shape(self.batch_size, 1 / len(self.sizes), spec) for spec in self._specs)

    def batch(self, k: int) -> tuple[Spec, base.Rows]:
        kind = 0
        if len(self.sizes) > 1:
            kind = int(np.random.default_rng((self.seed, k)).integers(len(self.sizes)))
        return self._specs[kind], self.rows(k)

    def fit(self, record: Record, spec: Spec) -> Record:
        height, width = spec['pixel_mask'].shape
        return geometry.fit(record, (height, width))


def fitted(record: Record, size: Size | None) -> Record:
    """The record with its image padded to `size`, and `pixel_mask`; None leaves it as it is."""
    return record if size is None else geometry.fit(record, size)
