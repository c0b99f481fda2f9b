"""Generation in one or a few steps: a model learns the average velocity over a span of time.

Between noise e at time 0 and an image x at time 1 lies z = t x + (1 - t) e, whose velocity is
v = x - e. The average velocity over the span h from t on is u(z, t, h) = (1/h) times the integral
of v from t to t + h, so that one step of any length is z + h u. Differentiating h u at a fixed end
gives the MeanFlow identity v = u - h du/dt, in which du/dt is the derivative along the path: a
Jacobian-vector product of the model with the tangent (v, 1, -1) for (z, t, h).

Geng et al., 2025, arXiv:2505.13447 (MeanFlow); Geng et al., 2025, arXiv:2512.02012 (iMF: the loss
of v, predicted tangents, guidance as an input); Lu et al., 2026, arXiv:2601.22158 (pMF: pixels and
prediction of x). These papers count time from the image to the noise.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from vit_jax.array_types import Float, Int
from vit_jax.errors import check_choice
from vit_jax.ops.terms import Term
from vit_jax.tasks import generate
from vit_jax.tasks.base import Apply, Batch
from vit_jax.tasks.generate import NO_CLASS, Generated, Images, Times

PREDICTIONS = ('x', 'v')
TANGENTS = ('predicted', 'data')
EXTRA_DRAWS = 16  # folded into an example's key; `generate` splits the key itself


class Conditions(NamedTuple):
    """Numbers that condition the average velocity of each example.

    Attributes:
      span: H, from 0 to 1 - t.
      guidance: W, at least 1.
      low, high: Times between which guidance acts.
    """

    span: Times
    guidance: Times
    low: Times
    high: Times

    def as_inputs(self) -> Float[Array, 'B 4']:
        """Stack h, 1 - 1/w and the noise levels 1 - high and 1 - low for the model."""
        strength = 1 - 1 / self.guidance
        return jnp.stack([self.span, strength, 1 - self.high, 1 - self.low], axis=1)


@dataclasses.dataclass(frozen=True)
class Task(generate.Task):
    """Error of the velocity that an average velocity implies, and sampling in few steps.

    The model is called as `model(images, time, labels, conditions=...)`, with the columns of
    `Conditions.as_inputs`. If it has the output `instant`, a second prediction, this one learns the
    velocity at t and gives tangents and guidance; otherwise the average over a span of 0 does.

    Attributes:
      prediction: Output of the model: 'x' or 'v'.
      sampler: 'euler'.
      steps: Number of steps from noise to image.
      instant_share: Share of the examples with a span of 0, which learn the velocity itself.
      tangent: Velocity along which the model is differentiated: 'predicted' (iMF) or 'data', x - e
        (MeanFlow).
      guidance_range: Largest w - 1 of an example; 0 trains without guidance. pMF has 7.
      guidance_power: Exponent p of the density w^-p of guidance.
      loss_power: Power of an example's squared error that divides its loss; 0 for none.
      loss_eps: Number added to the squared error before.
    """

    sampler: str = 'euler'
    steps: int = 1
    instant_share: float = 0.5
    tangent: str = 'predicted'
    guidance_range: float = 7.0
    guidance_power: float = 1.0
    loss_power: float = 1.0
    loss_eps: float = 0.01

    headline = ('loss', 'error')
    inert = (*generate.Task.inert, 'instant_share', 'guidance_range', 'guidance_power')

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice('config.task.prediction', self.prediction, PREDICTIONS)
        check_choice('config.task.sampler', self.sampler, ('euler',))
        check_choice('config.task.tangent', self.tangent, TANGENTS)
        self.require('guidance', self.guidance >= 1, 'at least 1')
        self.require('instant_share', 0 <= self.instant_share <= 1, 'from 0 to 1')
        for name in ('guidance_range', 'guidance_power', 'loss_power'):
            self.require(name, getattr(self, name) >= 0, 'at least 0')
        self.require('loss_eps', self.loss_eps > 0, 'positive')

    def outputs(self, apply: Apply, batch: Batch) -> dict[str, Array]:
        """Predict velocities of noisy images, and the guided velocity that they should be.

        The batch may hold `time` [B], `noise` [B H W C], `span` [B], `guidance` [B] and `interval`
        [B 2]; by default they are drawn from the random stream 'noise'.
        """
        images, _, labels, *_ = self.inputs(batch)
        time, noise, coin, conditions = self._draw_path(apply, batch, images)
        z = _by_row(time) * images + (1 - _by_row(time)) * noise
        velocity = self._velocity_of(images, z, time, 'x')
        guided, tangent = self._guide(apply, z, time, labels, conditions, velocity)
        if apply.train:
            is_hidden = coin < self.class_dropout
            labels = jnp.where(is_hidden, NO_CLASS, labels)
            guided = jnp.where(_by_row(is_hidden), velocity, guided)

        def average(z: Images, time: Times, span: Times) -> tuple[Images, dict[str, Images]]:
            predictions = self._predict(apply, z, time, labels, conditions._replace(span=span))
            return predictions.pop('average'), predictions

        primals = (z, time, conditions.span)
        directions = (tangent, jnp.ones_like(time), -jnp.ones_like(time))
        u, slope, instant = jax.jvp(average, primals, directions, has_aux=True)
        implied = u - _by_row(conditions.span) * jax.lax.stop_gradient(slope)
        return {'implied': implied, **instant, 'target': jax.lax.stop_gradient(guided)}

    def loss(self, outputs: dict[str, Any], batch: Batch) -> dict[str, Term]:
        """Compute adaptively weighted squared errors, and the mean squared error as a metric."""
        mask = self.mask(batch)
        names = {'implied': 'loss', 'instant': 'instant_loss'}
        errors = {
            names[k]: jnp.square(outputs[k] - outputs['target']).sum((1, 2, 3))
            for k in names
            if k in outputs
        }
        terms = {
            name: Term((self._weigh(error) * mask).sum(), mask.sum())
            for name, error in errors.items()
        }
        pixels = outputs['target'][0].size
        return {**terms, 'error': Term((errors['loss'] / pixels * mask).sum(), mask.sum(), 0.0)}

    def generate(
        self, apply: Apply, noise: Images, labels: Int[Array, ' B'], frames: int = 0
    ) -> Generated:
        """Follow the average velocity from noise to images; see `generate.Task.generate`."""
        rows, (low, high) = len(noise), self.interval
        fill = functools.partial(jnp.full, rows)
        times = jnp.linspace(0.0, 1.0, self.steps + 1)

        def step(z: Images, ends: tuple[Array, Array]) -> tuple[Images, Any]:
            start, end = ends
            conditions = Conditions(
                fill(end - start), fill(self.guidance), fill(float(low)), fill(float(high))
            )
            velocity = self._predict(apply, z, fill(start), labels, conditions)['average']
            return z + (end - start) * velocity, z + (1 - start) * velocity if frames else None

        z, passed = jax.lax.scan(step, noise, (times[:-1], times[1:]))
        frames_shown = passed[self.frame_steps(frames)] if frames else jnp.zeros((0, *noise.shape))
        return Generated(z, frames_shown)

    def _draw_path(
        self, apply: Apply, batch: Batch, images: Images
    ) -> tuple[Times, Images, Times, Conditions]:
        """Draw times, noise, numbers from 0 to 1 that hide classes, and conditions."""
        time, noise, coin = self._draw(apply, images)

        def draw(key: Array) -> tuple[Array, ...]:
            keys = jax.random.split(jax.random.fold_in(key, EXTRA_DRAWS), 5)
            other = jax.nn.sigmoid(jax.random.normal(keys[0]) * self.time_std + self.time_mean)
            return other, *(jax.random.uniform(k) for k in keys[1:])

        keys = apply(len(images), method='example_keys')
        other, instant, guidance, low, high = jax.vmap(draw)(keys)
        is_instant = instant < self.instant_share
        start = jnp.where(is_instant, time, jnp.minimum(time, other))
        span = jnp.where(is_instant, 0.0, jnp.abs(time - other))
        # Guidance of the velocity itself has no interval.
        interval = jnp.stack(
            [jnp.where(is_instant, 0.0, low / 2), jnp.where(is_instant, 1.0, 0.5 + high / 2)], 1
        )
        low, high = batch.get('interval', interval).T
        conditions = Conditions(
            batch.get('span', span), batch.get('guidance', self._scale(guidance)), low, high
        )
        noise = batch.get('noise', noise) * self.noise_scale
        return batch.get('time', start), noise, coin, conditions

    def _scale(self, uniform: Times) -> Times:
        """Map uniform numbers to guidance with the density w^-p from 1 to 1 + guidance_range."""
        remaining, log_range = 1 - self.guidance_power, jnp.log1p(self.guidance_range)
        if remaining == 0:
            return jnp.exp(uniform * log_range)
        return jnp.exp(jnp.log1p(uniform * jnp.expm1(remaining * log_range)) / remaining)

    def _guide(
        self,
        apply: Apply,
        z: Images,
        time: Times,
        labels: Int[Array, ' B'],
        conditions: Conditions,
        velocity: Images,
    ) -> tuple[Images, Images]:
        """Return the guided velocity, iMF equation 12, and the tangent of z."""
        acts = (time >= conditions.low) & (time <= conditions.high)
        scale = jnp.where(acts, conditions.guidance, 1.0)
        instant = functools.partial(self._instant, apply, z, time)
        needs_class = self.tangent == 'predicted' or self.guidance_range
        of_class = instant(labels, scale) if needs_class else velocity
        tangent = of_class if self.tangent == 'predicted' else velocity
        if not self.guidance_range:
            return velocity, tangent
        of_none = instant(jnp.full_like(labels, NO_CLASS), jnp.ones_like(time))
        return velocity + _by_row(1 - 1 / scale) * (of_class - of_none), tangent

    def _instant(
        self, apply: Apply, z: Images, time: Times, labels: Int[Array, ' B'], guidance: Times
    ) -> Images:
        """Predict the velocity at `time`, without gradient."""
        zeros, ones = jnp.zeros_like(time), jnp.ones_like(time)
        conditions = Conditions(zeros, guidance, zeros, ones)
        predictions = self._predict(apply, z, time, labels, conditions)
        return jax.lax.stop_gradient(predictions.get('instant', predictions['average']))

    def _predict(
        self, apply: Apply, z: Images, time: Times, labels: Int[Array, ' B'], conditions: Conditions
    ) -> dict[str, Images]:
        """Predict velocities: `average`, and `instant` if the model has a second output."""
        outputs = apply(z, time, labels, conditions=conditions.as_inputs())
        names = {'image': 'average', 'instant': 'instant'}
        return {
            names[k]: self._velocity_of(x, z, time, self.prediction) for k, x in outputs.items()
        }

    def _velocity_of(self, prediction: Images, z: Images, time: Times, space: str) -> Images:
        """Convert a prediction of x or v to a velocity."""
        if space == 'v':
            return prediction
        return (prediction - z) / _by_row(jnp.maximum(1 - time, self.least_divisor))

    def _weigh(self, error: Times) -> Times:
        """Divide each error by its own power, without gradient of the divisor."""
        return error / jax.lax.stop_gradient((error + self.loss_eps) ** self.loss_power)


def _by_row(x: Array) -> Array:
    return x[:, None, None, None]
