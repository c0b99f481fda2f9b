"""Repeated augmentation: several differently augmented copies of an example in one batch.

Hoffer et al., 2020, arXiv:1901.09335. As in DeiT (arXiv:2012.12877), a batch keeps its size and an
epoch its number of batches, so an epoch has fewer different examples.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from vit_jax.data import batches
from vit_jax.data.batches import Spec
from vit_jax.data.plans import base, fixed
from vit_jax.errors import UserError


@dataclasses.dataclass(frozen=True, eq=False)
class Plan(fixed.Plan):
    """Shuffled epochs of examples, each `times` in a batch.

    Copies are batch_size / times rows apart, so that neighbors, which mixup mixes, differ.

    Attributes:
      times: Number of copies of an example in a batch.
    """

    mixes = False

    times: int = dataclasses.field(default=3, kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.times < 1 or self.batch_size % self.times:
            raise UserError(
                f"config.data.plan='repeated(times={self.times})': batch_size={self.batch_size} "
                'must be a multiple of times'
            )

    def batch(self, k: int) -> tuple[Spec, base.Rows]:
        count = self.batch_size // self.times
        numbers = batches.shuffled_epochs(
            k * count + np.arange(count), size=len(self.rows), seed=self.seed
        )
        return self.spec, np.tile(self.rows[numbers], self.times)
