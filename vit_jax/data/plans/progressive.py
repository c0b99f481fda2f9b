"""Progressive resizing: batches of small images first, larger ones later in training.

Howard, 2018 (fast.ai's entry to DAWNBench), and Tan and Le, 2021, arXiv:2104.00298, section 4.
"""

from __future__ import annotations

import bisect
import dataclasses
import functools
import itertools

from vit_jax.data.batches import Shape, Spec
from vit_jax.data.plans import base, fixed
from vit_jax.data.records import Record
from vit_jax.data.transforms import geometry
from vit_jax.errors import UserError


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Plan(fixed.Plan):
    """Order of `fixed`, with images of the transforms resized to a side that grows by stages.

    The model has to take images of several sizes, such as a ViT with `posemb='sincos2d'`; it is
    compiled once for each. Evaluation keeps its transforms.

    Attributes:
      sizes: Sides in pixels, one for each stage.
      starts: Numbers of steps taken before each later stage.
    """

    sizes: tuple[int, ...]
    starts: tuple[int, ...]

    def __post_init__(self) -> None:
        super().__post_init__()
        where = f'config.data.plan: sizes={self.sizes}, starts={self.starts}'
        if len(self.sizes) != len(self.starts) + 1 or min(self.sizes, default=0) < 1:
            raise UserError(
                f'{where}: give a side for each stage, and a start for all but the first'
            )
        if any(b <= a for a, b in itertools.pairwise((0, *self.starts))):
            raise UserError(f'{where}: starts must rise from 1 on')

    @functools.cached_property
    def specs(self) -> tuple[Spec, ...]:
        return tuple(self.spec_of(geometry.resize(self.example, side, side)) for side in self.sizes)

    @functools.cached_property
    def _whole(self) -> Spec:
        return self.spec_of(self.example)

    @property
    def spec(self) -> Spec:
        return self._whole

    @property
    def shapes(self) -> tuple[Shape, ...]:
        by_size = sorted(zip(self.sizes, super().shapes, strict=True), key=lambda pair: pair[0])
        return tuple(shape for _, shape in by_size)

    def batch(self, k: int) -> tuple[Spec, base.Rows]:
        _, rows = super().batch(k)
        return self.specs[bisect.bisect_right(self.starts, k)], rows

    def pad(self, record: Record, spec: Spec) -> Record:
        height, width = spec['image'].shape[:2]
        return geometry.resize(record, height, width)
