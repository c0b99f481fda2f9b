"""Image-to-image flow matching: colorization and super-resolution.

The condition, a gray or small image, is concatenated to the channels of the noisy image: Saharia et
al., 2022, "Palette: Image-to-Image Diffusion Models", arXiv:2111.05826, section 3. Different noise
yields different images that fit the condition.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
from jax import Array

from vit_jax.array_types import Float
from vit_jax.errors import UserError, check_choice
from vit_jax.ops import colors, sequences
from vit_jax.tasks import generate
from vit_jax.tasks.base import Apply, Batch
from vit_jax.tasks.generate import Images

GRAY, SMALL = 'gray', 'small'


@dataclasses.dataclass(frozen=True)
class Task(generate.Task):
    """Task `generate`, conditioned on gray or small images instead of classes.

    Attributes:
      given: Kind of condition: 'gray' for the luminance, or 'small' for images downsampled by
        `factor` and enlarged again.
      factor: Side in pixels of the blocks that are averaged into the small image.
    """

    given: str = GRAY
    factor: int = 4

    def __post_init__(self) -> None:
        check_choice('config.task.given', self.given, (GRAY, SMALL))
        self.require('factor', self.factor >= 2, 'at least 2')
        super().__post_init__()

    def inputs(self, batch: Batch) -> tuple[Array, ...]:
        """Return the inputs of `generate` without classes, and the condition."""
        images, time, no_classes = super().inputs({'image': batch['image']})
        return images, time, no_classes, self.condition_from(images)

    def outputs(self, apply: Apply, batch: Batch) -> dict[str, Array]:
        """See `generate`."""
        return super().outputs(_Conditioned(apply, self.inputs(batch)[3]), batch)

    def predict(self, apply: Apply, batch: Batch) -> dict[str, Array]:
        """Sample images that fit the condition.

        Returns:
          samples, finite, image: see `generate`.
          given: condition, bytes [B H W c].
        """
        condition = self.inputs(batch)[3]
        return {
            **super().predict(_Conditioned(apply, condition), batch),
            'given': self.to_bytes(condition),
        }

    def condition_from(self, images: Images) -> Float[Array, 'B H W c']:
        """Compute the condition, rounded to bytes; images are in the model's range of values.

        Raises:
          UserError: if gray images are to be colorized, or blocks do not tile the images.
        """
        pixels = self.to_bytes(images)
        if self.given == GRAY:
            if images.shape[-1] != 3:
                raise UserError(
                    "config.task.given='gray': colorization needs images with 3 channels, not "
                    f'{images.shape[-1]}'
                )
            condition = colors.to_bytes(colors.to_gray(pixels / 255))
        else:
            height, width = images.shape[1:3]
            if height % self.factor or width % self.factor:
                raise UserError(
                    f'config.task.factor={self.factor} does not divide the sides of images of '
                    f'{width} x {height} pixels'
                )
            small = jnp.round(colors.downsample(pixels, self.factor)).astype(jnp.uint8)
            condition = colors.upsample(small, self.factor)
        return sequences.to_range(condition, self.value_range)


class _Conditioned:
    """Wrap a model so that each call gets the condition of each example."""

    def __init__(self, apply: Apply, condition: Images):
        self._apply, self._condition = apply, condition
        self.train, self.step, self.frozen = apply.train, apply.step, apply.frozen

    def __call__(self, *inputs: Any, method: str | None = None, **options: Any) -> Any:
        if method is not None:
            return self._apply(*inputs, method=method, **options)
        # Samples of an example, and pairs for guidance, are neighbors.
        repeats = len(inputs[0]) // len(self._condition)
        return self._apply(*inputs, self._condition.repeat(repeats, axis=0), **options)

    def average(self, *inputs: Any, method: str | None = None, **options: Any) -> Any:
        return self._apply.average(*inputs, self._condition, method=method, **options)
