"""Several images of different sizes in one sequence (Dehghani et al. 2023, arXiv:2307.06304)."""

import dataclasses
import functools

import numpy as np

from vit_jax.data import order
from vit_jax.data.batches import ArraySpec
from vit_jax.data.plans import base


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Plan(base.Plan):
    """Rows of `length` patches that hold up to `most` images, those of a row neighbours."""

    length: int
    most: int = 4

    @functools.cached_property
    def packs(self):
        """The examples of each row of training, [rows, most]."""
        rows, free = [], 0
        for index in range(len(self.examples)):
            count = len(self.examples.read(index)['patches'])
            if count > free or len(rows[-1]) == self.most:
                rows.append([])
                free = self.length
            rows[-1].append(index)
            free -= count
        return np.array([row + [base.NONE] * (self.most - len(row)) for row in rows])

    @functools.cached_property
    def spec(self):
        example = {k: ArraySpec.of(value) for k, value in self.example.items()}
        tokens = {k: (self.length, s.shape[1]) for k, s in example.items() if len(s.shape) == 2}
        return {
            **{k: ArraySpec(shape, example[k].dtype) for k, shape in tokens.items()},
            'segment': ArraySpec((self.length,), np.dtype(np.int32)),
            'label': ArraySpec((self.most,), np.dtype(np.int32)),
        }

    @property
    def examples_per_step(self):
        return self.batch_size * len(self.examples) / len(self.packs)

    def batch(self, k):
        places = k * self.batch_size + np.arange(self.batch_size)
        return self.spec, self.packs[order.stream(places, size=len(self.packs), seed=self.seed)]

    def join(self, records, spec):
        counts = [len(record['patches']) for record in records]
        joined = {k: np.concatenate([r[k] for r in records]) for k in ('patches', 'positions')}
        joined['segment'] = np.repeat(np.arange(1, len(records) + 1), counts)
        joined['label'] = np.array([record['label'] for record in records])
        return self.fit(joined, spec)
