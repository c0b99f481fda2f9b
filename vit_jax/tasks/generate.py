"""Image generation by flow matching.

Noise e at time 0 and an image x at time 1 are interpolated by z = t x + (1 - t) e with velocity
v = x - e. The model predicts one of x, e and v, and the loss compares one of them: Li and He, 2025,
arXiv:2511.13720, table 1. Samples follow the predicted velocity from time 0 to 1.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from vit_jax.array_types import Float, Int, UInt8
from vit_jax.errors import UserError, check_choice
from vit_jax.ops import sequences
from vit_jax.ops.terms import Term
from vit_jax.tasks import base
from vit_jax.tasks.base import Apply, Batch

SPACES = ('x', 'epsilon', 'v')
SAMPLERS = ('heun', 'euler')
NO_CLASS = -1
Images = Float[Array, 'B H W C']
Times = Float[Array, ' B']


class Generated(NamedTuple):
    """Generated images.

    Attributes:
      images: Samples in the model's range of values.
      frames: [K B H W C], images predicted at the start of K evenly spaced steps.
    """

    images: Images
    frames: Float[Array, 'K B H W C']


@dataclasses.dataclass(frozen=True)
class Task(base.Task):
    """Train on noisy images with a mean squared error, and sample images.

    Attributes:
      prediction: What the model predicts: 'x', 'epsilon' or 'v'.
      loss_space: What the loss compares, after conversion: 'x', 'epsilon' or 'v'.
      time_mean, time_std: Parameters of the logit-normal distribution of times in training and
        evaluation (arXiv:2403.03206, section 3.1).
      noise_scale: Standard deviation of the noise; 1 at 256 pixels, 2 at 512.
      least_divisor: Lower bound of t and 1 - t where conversions divide by them.
      class_dropout: Share of the examples whose class is hidden in training, for guidance.
      sampler: 'heun', two evaluations of the model for each step except the last; or 'euler'.
      steps: Number of steps from time 0 to 1, of equal length.
      guidance: Scale w of classifier-free guidance, v + (w - 1) (v - v_unconditional)
        (arXiv:2207.12598); 1 for none.
      interval: Times between which guidance is applied (arXiv:2404.07724).
      samples: Number of samples per example in `predict`.
      value_range: Range to which bytes 0..255 are scaled for the model.
    """

    prediction: str = 'x'
    loss_space: str = 'v'
    time_mean: float = -0.8
    time_std: float = 0.8
    noise_scale: float = 1.0
    least_divisor: float = 0.05
    class_dropout: float = 0.1
    sampler: str = 'heun'
    steps: int = 50
    guidance: float = 1.0
    interval: tuple[float, float] = (0.1, 1.0)
    samples: int = 1
    value_range: tuple[float, float] = (-1.0, 1.0)

    rngs = ('noise', 'dropout')
    inert = (*base.Task.inert, 'class_dropout')

    def __post_init__(self) -> None:
        check_choice('config.task.prediction', self.prediction, SPACES)
        check_choice('config.task.loss_space', self.loss_space, SPACES)
        check_choice('config.task.sampler', self.sampler, SAMPLERS)
        for name in ('time_std', 'noise_scale', 'least_divisor'):
            self.require(name, getattr(self, name) > 0, 'positive')
        for name in ('steps', 'samples'):
            self.require(name, getattr(self, name) >= 1, 'at least 1')
        self.require('class_dropout', 0 <= self.class_dropout < 1, 'in [0, 1)')
        self.require('guidance', 0 <= self.guidance < math.inf, 'at least 0, and finite')
        low, high = self.interval
        self.require('interval', 0 <= low < high <= 1, 'two increasing times from 0 to 1')

    def inputs(self, batch: Batch) -> tuple[Array, ...]:
        """Return images [B H W C] without noise, their time 1 [B], and classes [B]; -1 for none."""
        images = sequences.to_range(batch['image'], self.value_range)
        return images, jnp.ones(len(images)), self._labels(batch)

    def outputs(self, apply: Apply, batch: Batch) -> dict[str, Array]:
        """Return the prediction from noisy images, its target, and the factor of its error.

        The batch may have `time` [B] and unscaled `noise` [B H W C]; by default both are drawn from
        the random stream 'noise'.
        """
        images, _, labels, *_ = self.inputs(batch)
        time, noise, coin = self._draw(apply, images)
        time, noise = batch.get('time', time), batch.get('noise', noise) * self.noise_scale
        if apply.train:
            labels = jnp.where(coin < self.class_dropout, NO_CLASS, labels)
        t = _by_row(time)
        prediction = apply(t * images + (1 - t) * noise, time, labels)['image']
        target = {'x': images, 'epsilon': noise, 'v': images - noise}[self.prediction]
        factor = conversion(self.prediction, self.loss_space, time, self.least_divisor)
        return {'prediction': prediction, 'target': target, 'factor': factor}

    def loss(self, outputs: dict[str, Any], batch: Batch) -> dict[str, Term]:
        """Mean over images of the mean squared error in the loss space."""
        errors = jnp.square(outputs['prediction'] - outputs['target']).mean((1, 2, 3))
        mask = self.mask(batch)
        losses = errors * jnp.square(outputs['factor'])
        return {'loss': Term((losses * mask).sum(), mask.sum())}

    def predict(self, apply: Apply, batch: Batch) -> dict[str, Array]:
        """Sample images of each example's class.

        Their initial noise depends only on the seed and the example's index.

        Returns:
          samples: bytes [B S H W C].
          finite: bool [B S], whether the sample was finite before it was converted to bytes.
          image: bytes [B H W C], the example.
        """
        inputs, _, labels, *_ = self.inputs(batch)
        rows = len(inputs)
        noise = self.noise(apply, rows * self.samples, inputs.shape[1:])
        images = self.generate(apply, noise, jnp.repeat(labels, self.samples)).images
        return {
            'samples': self.to_bytes(images).reshape(rows, self.samples, *inputs.shape[1:]),
            'finite': jnp.isfinite(images).all((1, 2, 3)).reshape(rows, self.samples),
            'image': self.to_bytes(inputs),
        }

    def noise(self, apply: Apply, rows: int, shape: tuple[int, ...]) -> Images:
        """Draw the noise of `rows` samples of this shape from their keys."""
        keys = apply(rows, method='example_keys')
        return self.noise_scale * jax.vmap(lambda key: jax.random.normal(key, shape))(keys)

    def generate(
        self, apply: Apply, noise: Images, labels: Int[Array, ' B'], frames: int = 0
    ) -> Generated:
        """Integrate the velocity from noise to images.

        Args:
          apply: Model in evaluation mode.
          noise: Noise at time 0.
          labels: Classes of the images; -1 for none.
          frames: Number K of intermediate predictions to keep; at most `steps` - 1.
        """
        times = jnp.linspace(0.0, 1.0, self.steps + 1)

        def step(z: Images, interval: tuple[Array, Array]) -> tuple[Images, Any]:
            start, end = interval
            velocity, image = self._velocity(apply, z, start, labels)
            after = z + (end - start) * velocity
            if self.sampler == 'heun':
                velocity = (velocity + self._velocity(apply, after, end, labels)[0]) / 2
                after = z + (end - start) * velocity
            return after, image if frames else None

        z, predicted = jax.lax.scan(step, noise, (times[:-2], times[1:-1]))
        velocity, _ = self._velocity(apply, z, times[-2], labels)  # the last step is Euler's
        movie = predicted[self.frame_steps(frames)] if frames else jnp.zeros((0, *noise.shape))
        return Generated(z + (times[-1] - times[-2]) * velocity, movie)

    def frame_steps(self, frames: int) -> Int[np.ndarray, ' K']:
        """Return the steps at whose start `generate` keeps predicted images."""
        return np.arange(frames) * (self.steps - 1) // max(frames, 1)

    def to_bytes(self, images: Images) -> UInt8[Array, 'B H W C']:
        """Convert images from the model's range to rounded bytes."""
        low, high = self.value_range
        return jnp.round(jnp.clip((images - low) / (high - low), 0, 1) * 255).astype(jnp.uint8)

    def _labels(self, batch: Batch) -> Int[Array, ' B']:
        labels = batch.get('label', jnp.full(len(batch['image']), NO_CLASS))
        if labels.ndim > 1:
            raise UserError('task generate needs one class per image, but these have several')
        return labels

    def _draw(self, apply: Apply, images: Images) -> tuple[Times, Images, Times]:
        """Draw a time, noise and a uniform number in [0, 1) for each example."""

        def draw(key: Array) -> tuple[Array, Array, Array]:
            keys = jax.random.split(key, 3)
            time = jax.nn.sigmoid(jax.random.normal(keys[0]) * self.time_std + self.time_mean)
            noise = jax.random.normal(keys[1], images.shape[1:])
            return time, noise, jax.random.uniform(keys[2])

        return jax.vmap(draw)(apply(len(images), method='example_keys'))

    def _velocity(
        self, apply: Apply, z: Images, time: Float[Array, ''], labels: Int[Array, ' B']
    ) -> tuple[Images, Images]:
        """Return the guided velocity at `time`, and the image predicted for the class."""
        rows = len(z)
        if self.guidance == 1:
            prediction = apply(z, jnp.full(rows, time), labels)['image']
            return self._to_velocity(prediction, z, time)
        # Keep pairs adjacent, so that each device computes both predictions of its rows.
        pairs = jnp.stack([labels, jnp.full_like(labels, NO_CLASS)], axis=1).reshape(-1)
        prediction = apply(jnp.repeat(z, 2, axis=0), jnp.full(2 * rows, time), pairs)['image']
        prediction = prediction.reshape(rows, 2, *z.shape[1:])
        conditional, image = self._to_velocity(prediction[:, 0], z, time)
        unconditional, _ = self._to_velocity(prediction[:, 1], z, time)
        low, high = self.interval
        is_guided = (time < high) & ((time > low) | (low == 0))
        return unconditional + jnp.where(is_guided, self.guidance, 1.0) * (
            conditional - unconditional
        ), image

    def _to_velocity(
        self, prediction: Images, z: Images, time: Float[Array, '']
    ) -> tuple[Images, Images]:
        """Convert a prediction to a velocity and an image."""
        before, after = (jnp.maximum(x, self.least_divisor) for x in (time, 1 - time))
        if self.prediction == 'x':
            return (prediction - z) / after, prediction
        if self.prediction == 'epsilon':
            return (z - prediction) / before, (z - (1 - time) * prediction) / before
        return prediction, z + (1 - time) * prediction


def conversion(prediction: str, space: str, time: Times, least: float = 0.0) -> Times:
    """Compute the factor that converts an error of a prediction to another space.

    Given z and t, each of x, e and v determines the others by z = t x + (1 - t) e and v = x - e: an
    error d of x is an error -d t / (1 - t) of e and d / (1 - t) of v. Signs are omitted.

    Args:
      prediction: Space of the prediction, see SPACES.
      space: Space of the result, see SPACES.
      time: T.
      least: Lower bound of divisors.
    """
    # Error in each space, relative to the error of v.
    relative_error = {'x': 1 - time, 'epsilon': time, 'v': jnp.ones_like(time)}
    if prediction == space:
        return relative_error['v']
    return relative_error[space] / jnp.maximum(relative_error[prediction], least)


def _by_row(x: Times) -> Float[Array, 'B 1 1 1']:
    return x[:, None, None, None]
