"""Batches of examples that have one shape after the transforms."""

from __future__ import annotations

import dataclasses

import numpy as np

from vit_jax.data import order
from vit_jax.data.batches import Shape, Spec
from vit_jax.data.plans import base
from vit_jax.data.records import Record
from vit_jax.errors import UserError


@dataclasses.dataclass(frozen=True, eq=False)
class Plan(base.Plan):
    """Row r of batch k is example `order.stream` of k * batch_size + r: epochs, each shuffled."""

    @property
    def shapes(self) -> tuple[Shape, ...]:
        """The only kind of training batches.

        Raises:
          UserError: if there are fewer examples than rows.
        """
        self.check_batch_size()
        return (Shape(self.batch_size, 1, self.spec),)

    def check_batch_size(self) -> None:
        """Raises UserError if there are fewer examples than rows."""
        if self.batch_size > len(self.examples):
            raise UserError(
                f'{self.examples.source.title}: {len(self.examples)} examples are fewer than '
                f'batch_size={self.batch_size}; lower it or take a larger split'
            )

    def batch(self, k: int) -> tuple[Spec, base.Rows]:
        return self.spec, self.rows(k)

    def rows(self, k: int) -> base.Rows:
        """The examples of batch k; it may span epochs."""
        places = k * self.batch_size + np.arange(self.batch_size)
        return order.stream(places, size=len(self.examples), seed=self.seed)

    def fit(self, record: Record, spec: Spec) -> Record:
        """The record as it is: another shape is a mistake."""
        del spec
        return record
