"""LeJEPA: views of an image agree, and projections are an isotropic Gaussian.

Balestriero and LeCun, 2025, arXiv:2511.08544. There is no teacher, stop-gradient or schedule: the
Gaussian keeps representations from collapsing.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from vit_jax.array_types import Float
from vit_jax.ops.terms import Term
from vit_jax.tasks import _views
from vit_jax.tasks._views import fold, unfold
from vit_jax.tasks.base import Apply, Batch, Sums


@dataclasses.dataclass(frozen=True)
class Task(_views.Views):
    """Distance of views to the mean of the global ones, and SIGReg of their projections.

    See `Views` for the batch.

    Attributes:
      sigreg: Weight of SIGReg, and one minus the weight of the distance.
      directions: Number of random directions, new at each step.
      knots: Number of points in [0, span] at which characteristic functions are compared.
      span: Largest argument of the characteristic functions.
    """

    sigreg: float = 0.02
    directions: int = 1024
    knots: int = 17
    span: float = 3.0

    rngs = ('dropout', 'directions')

    def __post_init__(self) -> None:
        self.require('sigreg', 0 <= self.sigreg <= 1, 'from 0 to 1')
        self.require('directions', self.directions >= 1, 'at least 1')
        self.require('knots', self.knots >= 2, 'at least 2')
        self.require('span', self.span > 0, 'positive')
        super().__post_init__()

    def outputs(self, apply: Apply, batch: Batch) -> dict[str, Any]:
        """Project all views, and the projections onto random directions.

        Returns:
          projected: Projections of G global and L local views, [B G+L P].
          center: Mean projection of the global views, [B P].
          slices: Projections along the random directions, [B G+L S].

        Raises:
          UserError: if local crops were cut from global ones.
        """
        crops, local = self.global_views(batch), self.local_views(batch)
        rows, count = len(crops), crops.shape[1]
        projected = [unfold(apply(fold(crops))['projected'], rows)]
        if local is not None:
            projected.append(unfold(apply(fold(local))['projected'], rows))
        all_projected = jnp.concatenate(projected, axis=1)
        directions = apply(self.directions, method='directions')
        slices = jnp.matmul(all_projected, directions, precision='highest')
        return {
            'projected': all_projected,
            'center': all_projected[:, :count].mean(1),
            'slices': slices,
        }

    def loss(self, outputs: dict[str, Any], batch: Batch) -> dict[str, Term]:
        """Compute the distance to the center, and SIGReg over the global batch."""
        mask, all_projected = self.mask(batch), outputs['projected']
        distances = jnp.square(all_projected - outputs['center'][:, None]).mean((1, 2))
        count = mask.sum()
        statistic = sigreg(outputs['slices'], mask, self.knots, self.span)
        return {
            'invariance': Term((distances * mask).sum(), count, 1 - self.sigreg),
            'sigreg': Term(statistic * count, count, self.sigreg),
        }

    def evaluate(self, apply: Apply, batch: Batch) -> Sums:
        """Measure how normal the projections of whole images are, image by image.

        `second_moment` is the mean square of coordinates, which should become 1, and `loss` their
        negative log likelihood as standard normals, in nats per coordinate.
        """
        mask, projected = self.mask(batch), apply(*self.inputs(batch))['projected']
        squares = jnp.square(projected).mean(-1)
        metrics = {'loss': (squares + math.log(2 * math.pi)) / 2, 'second_moment': squares}
        return {name: ((values * mask).sum(), mask.sum()) for name, values in metrics.items()}


def sigreg(
    slices: Float[Array, 'B V S'], mask: Float[Array, ' B'], knots: int = 17, span: float = 3.0
) -> Float[Array, '']:
    """Compute the sliced Epps-Pulley statistic of each view, averaged over views and directions.

    N times the integral over t of |mean_i exp(i t x_i) - exp(-t^2 / 2)|^2 exp(-t^2 / 2), by the
    trapezoidal rule on [0, span], doubled by symmetry (section 4.2). It is 0 for a standard normal
    distribution of infinitely many examples.

    Args:
      slices: Projections of each example and view along the directions.
      mask: 1 for real examples.
      knots: Number of points of the trapezoidal rule.
      span: Largest t.
    """
    points = jnp.linspace(0.0, span, knots)
    window = jnp.exp(-jnp.square(points) / 2)
    weights = (jnp.full(knots, 2.0).at[0].set(1.0).at[-1].set(1.0)) * span / (knots - 1) * window
    count = mask.sum()

    def error(point: Array, normal: Array) -> Float[Array, 'V S']:
        angles = slices.astype(jnp.float32) * point
        cosine, sine = (jnp.einsum('bvs,b->vs', f(angles), mask) for f in (jnp.cos, jnp.sin))
        return jnp.square(cosine / count - normal) + jnp.square(sine / count)

    # One knot at a time: cosines of all knots would be the largest array of the step.
    def add(total: Array, knot: tuple[Array, Array, Array]) -> tuple[Array, None]:
        point, normal, weight = knot
        return total + weight * jax.checkpoint(error)(point, normal), None

    start = jnp.zeros(slices.shape[1:], jnp.float32)
    integral, _ = jax.lax.scan(add, start, (points, window, weights))
    return integral.mean() * count
