"""Batches of examples with equal shapes after the transforms."""

from __future__ import annotations

import dataclasses
import functools

import numpy as np

from vit_jax.data import batches
from vit_jax.data.batches import Shape, Spec
from vit_jax.data.plans import base
from vit_jax.data.records import Record
from vit_jax.errors import UserError


@dataclasses.dataclass(frozen=True, eq=False)
class Plan(base.Plan):
    """Shuffled epochs: row r of batch k has position k * batch_size + r.

    Each source of a mixture has its own epochs, see `batches.Mixture`.
    """

    mixes = True

    @functools.cached_property
    def specs(self) -> tuple[Spec, ...]:
        """Specs of the kinds of batches; (seed, k) draws one for batch k, all equally likely."""
        return (super().spec,)

    @property
    def spec(self) -> Spec:
        # Evaluation results must not depend on the batch.
        return self.specs[-1]

    @property
    def shapes(self) -> tuple[Shape, ...]:
        if self.batch_size > len(self.examples):
            raise UserError(
                f'{self.examples.source.title}: has only {len(self.examples)} examples for '
                f'batch_size={self.batch_size}; lower it or use a larger split'
            )
        share = 1 / len(self.specs)
        return tuple(Shape(self.batch_size, share, spec, self.slots) for spec in self.specs)

    def batch(self, k: int) -> tuple[Spec, base.Rows]:
        kind = 0
        if len(self.specs) > 1:
            kind = int(np.random.default_rng((self.seed, k)).integers(len(self.specs)))
        positions = k * self.batch_size + np.arange(self.batch_size)
        mixture = self.examples.source.mixture
        if mixture is not None:
            return self.specs[kind], mixture.examples(positions, self.seed)
        numbers = batches.shuffled_epochs(positions, size=len(self.rows), seed=self.seed)
        return self.specs[kind], self.rows[numbers]

    @property
    def notes(self) -> tuple[str, ...]:
        if (mixture := self.examples.source.mixture) is None:
            return ()
        sources = zip(mixture.names, mixture.shares, mixture.sizes, strict=True)
        return tuple(
            f'{share:.1%} of the examples are from {name}, which has {size:,}'
            for name, share, size in sources
        )

    def pad(self, record: Record, spec: Spec) -> Record:
        """Return the record unchanged; batching refuses a wrong shape."""
        del spec
        return record
