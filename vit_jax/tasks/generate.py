"""Generation of images by flow matching: a model learns to undo noise, and images are sampled.

Between noise e at time 0 and an image x at time 1 lies z = t x + (1 - t) e, which moves with the
velocity v = x - e. The model predicts one of x, e and v, and the loss compares one of them: Li and
He, 2025, arXiv:2511.13720, table 1. Samples follow the predicted velocity from time 0 to 1.
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
    """Samples.

    Attributes:
      images: in the model's range of values.
      frames: [K B H W C], the images predicted at the beginning of steps, evenly spread.
    """

    images: Images
    frames: Float[Array, 'K B H W C']


@dataclasses.dataclass(frozen=True)
class Task(base.Task):
    """Mean squared error of predictions from noisy images, and sampling.

    Attributes:
      prediction: the output of the model: 'x', 'epsilon' or 'v'.
      loss_space: of the loss, to which prediction and target are converted: the same choices.
      time_mean, time_std: of a normal distribution whose sigmoid is the time of an example in
        training and evaluation (arXiv:2403.03206, section 3.1).
      noise_scale: standard deviation of the noise; 1 at 256 pixels, 2 at 512.
      least_divisor: least 1 - t and t that conversions divide by.
      class_dropout: share of the examples whose class is hidden in training, for guidance.
      sampler: 'heun', with two evaluations of the model for each step but the last; or 'euler'.
      steps: number of steps from time 0 to 1, of equal length.
      guidance: factor w of the velocity of the class against that without a class, v + (w - 1)
        (v - v_without) (arXiv:2207.12598); 1 for none.
      interval: times between which guidance acts (arXiv:2404.07724).
      samples: of each example's class, made by `predict`.
      value_range: range to which bytes 0..255 are scaled for the model.
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
        """Images [B H W C] without noise, their time 1 [B], and classes [B]; -1 for none."""
        images = sequences.to_range(batch['image'], self.value_range)
        return images, jnp.ones(len(images)), self._labels(batch)

    def outputs(self, apply: Apply, batch: Batch) -> dict[str, Array]:
        """The prediction from noisy images, its target, and the factor of its error in the loss.

        The batch may hold the `time` [B] of its examples, and their `noise` [B H W C] before
        scaling; by default both are drawn from the random stream 'noise'.
        """
        images, _, labels, *_ = self.inputs(batch)
        time, noise, coin = self._draw(apply, images)
        time, noise = batch.get('time', time), batch.get('noise', noise) * self.noise_scale
        if apply.train:
            labels = jnp.where(coin < self.class_dropout, NO_CLASS, labels)
        t = _by_row(time)
        made = apply(t * images + (1 - t) * noise, time, labels)['image']
        target = {'x': images, 'epsilon': noise, 'v': images - noise}[self.prediction]
        factor = conversion(self.prediction, self.loss_space, time, self.least_divisor)
        return {'prediction': made, 'target': target, 'factor': factor}

    def loss(self, outputs: dict[str, Any], batch: Batch) -> dict[str, Term]:
        """The mean over images of the mean squared error in the space of the loss."""
        errors = jnp.square(outputs['prediction'] - outputs['target']).mean((1, 2, 3))
        mask = self.mask(batch)
        losses = errors * jnp.square(outputs['factor'])
        return {'loss': Term((losses * mask).sum(), mask.sum())}

    def predict(self, apply: Apply, batch: Batch) -> dict[str, Array]:
        """New images of each example's class.

        The noise that they start from depends only on the seed and the example's index.

        Returns:
          samples: bytes [B S H W C].
          finite: whether all numbers of a sample were finite before they became bytes, [B S].
          image: the example, bytes [B H W C].
        """
        images, _, labels, *_ = self.inputs(batch)
        rows = len(images)
        noise = self.noise(apply, rows * self.samples, images.shape[1:])
        made = self.generate(apply, noise, jnp.repeat(labels, self.samples)).images
        return {
            'samples': self.to_bytes(made).reshape(rows, self.samples, *images.shape[1:]),
            'finite': jnp.isfinite(made).all((1, 2, 3)).reshape(rows, self.samples),
            'image': self.to_bytes(images),
        }

    def noise(self, apply: Apply, rows: int, shape: tuple[int, ...]) -> Images:
        """The noise of `rows` samples of this shape, a function of their keys."""
        keys = apply(rows, method='example_keys')
        return self.noise_scale * jax.vmap(lambda key: jax.random.normal(key, shape))(keys)

    def generate(
        self, apply: Apply, noise: Images, labels: Int[Array, ' B'], frames: int = 0
    ) -> Generated:
        """Follow the velocity from noise to images.

        Args:
          apply: the model in evaluation.
          noise: at time 0.
          labels: classes of the images; -1 for none.
          frames: K, images that are predicted on the way and kept; at most `steps` - 1.
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

        z, passed = jax.lax.scan(step, noise, (times[:-2], times[1:-1]))
        velocity, _ = self._velocity(apply, z, times[-2], labels)  # the last step is Euler's
        shown = passed[self.frame_steps(frames)] if frames else jnp.zeros((0, *noise.shape))
        return Generated(z + (times[-1] - times[-2]) * velocity, shown)

    def frame_steps(self, frames: int) -> Int[np.ndarray, ' K']:
        """The steps at whose beginning `generate` keeps images."""
        return np.arange(frames) * (self.steps - 1) // max(frames, 1)

    def to_bytes(self, images: Images) -> UInt8[Array, 'B H W C']:
        """Images in the model's range as bytes, rounded."""
        low, high = self.value_range
        return jnp.round(jnp.clip((images - low) / (high - low), 0, 1) * 255).astype(jnp.uint8)

    def _labels(self, batch: Batch) -> Int[Array, ' B']:
        labels = batch.get('label', jnp.full(len(batch['image']), NO_CLASS))
        if labels.ndim > 1:
            raise UserError('task generate takes one class an image, and these have several')
        return labels

    def _draw(self, apply: Apply, images: Images) -> tuple[Times, Images, Times]:
        """A time, noise and a number from 0 to 1 for each example."""

        def draw(key: Array) -> tuple[Array, Array, Array]:
            keys = jax.random.split(key, 3)
            time = jax.nn.sigmoid(jax.random.normal(keys[0]) * self.time_std + self.time_mean)
            noise = jax.random.normal(keys[1], images.shape[1:])
            return time, noise, jax.random.uniform(keys[2])

        return jax.vmap(draw)(apply(len(images), method='example_keys'))

    def _velocity(
        self, apply: Apply, z: Images, time: Float[Array, ''], labels: Int[Array, ' B']
    ) -> tuple[Images, Images]:
        """The guided velocity at `time`, and the image that is predicted of the class."""
        rows = len(z)
        if self.guidance == 1:
            made = apply(z, jnp.full(rows, time), labels)['image']
            return self._of_prediction(made, z, time)
        # Pairs stay neighbors, so that each device makes both predictions of its rows.
        pairs = jnp.stack([labels, jnp.full_like(labels, NO_CLASS)], axis=1).reshape(-1)
        made = apply(jnp.repeat(z, 2, axis=0), jnp.full(2 * rows, time), pairs)['image']
        made = made.reshape(rows, 2, *z.shape[1:])
        own, image = self._of_prediction(made[:, 0], z, time)
        other, _ = self._of_prediction(made[:, 1], z, time)
        low, high = self.interval
        acts = (time < high) & ((time > low) | (low == 0))
        return other + jnp.where(acts, self.guidance, 1.0) * (own - other), image

    def _of_prediction(
        self, made: Images, z: Images, time: Float[Array, '']
    ) -> tuple[Images, Images]:
        """The velocity and the image of a prediction."""
        before, after = (jnp.maximum(x, self.least_divisor) for x in (time, 1 - time))
        if self.prediction == 'x':
            return (made - z) / after, made
        if self.prediction == 'epsilon':
            return (z - made) / before, (z - (1 - time) * made) / before
        return made, z + (1 - time) * made


def conversion(prediction: str, space: str, time: Times, least: float = 0.0) -> Times:
    """The factor by which an error of a prediction becomes one in another space.

    Given z and t, of x, e and v each determines the others by z = t x + (1 - t) e and v = x - e:
    an error d of x is one of -d t / (1 - t) of e and of d / (1 - t) of v. Signs are left out.

    Args:
      prediction, space: of SPACES.
      time: t.
      least: of the divisors.
    """
    # How large an error of each is beside one of v; to divide, not less than `least`.
    over = {'x': 1 - time, 'epsilon': time, 'v': jnp.ones_like(time)}
    if prediction == space:
        return over['v']
    return over[space] / jnp.maximum(over[prediction], least)


def _by_row(x: Times) -> Float[Array, 'B 1 1 1']:
    return x[:, None, None, None]
