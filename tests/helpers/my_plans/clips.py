"""Clips of varying length, padded in batches to the same number of frames."""

import dataclasses
import functools

import numpy as np

from vit_jax.data.batches import ArraySpec
from vit_jax.data.plans import fixed


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Plan(fixed.Plan):
    """Pad clips to `frames`; `image_mask` is true for real frames."""

    frames: int

    @functools.cached_property
    def spec(self):
        spec = self.spec_of(self.example)
        image = spec['image']
        return {
            **spec,
            'image': ArraySpec((self.frames, *image.shape[1:]), image.dtype),
            'image_mask': ArraySpec((self.frames,), np.dtype(bool)),
        }

    def pad(self, record, spec):
        return super(fixed.Plan, self).pad(record, spec)
