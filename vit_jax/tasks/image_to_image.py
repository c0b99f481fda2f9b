"""Images from images by flow matching: colorization and super-resolution.

The model sees what is given of an image beside the noisy one, as further channels of its input, and
makes whole images out of noise that fit: Saharia et al., 2022, "Palette: Image-to-Image Diffusion
Models", arXiv:2111.05826, section 3. Each noise leads to another one of the possible images.
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
    """The task `generate` with gray or small images in the model's input, and without classes.

    Attributes:
      given: 'gray' for the luminance of color images, or 'small' for images whose sides are shorter
        by a factor, enlarged to the old size.
      factor: side in pixels of the blocks whose mean colors are the small image.
    """

    given: str = GRAY
    factor: int = 4

    def __post_init__(self) -> None:
        check_choice('config.task.given', self.given, (GRAY, SMALL))
        self.require('factor', self.factor >= 2, 'at least 2')
        super().__post_init__()

    def inputs(self, batch: Batch) -> tuple[Array, ...]:
        """Those of `generate` without classes, and what is given of each image."""
        images, time, none = super().inputs({'image': batch['image']})
        return images, time, none, self.given_of(images)

    def outputs(self, apply: Apply, batch: Batch) -> dict[str, Array]:
        """See `generate`."""
        return super().outputs(_Given(apply, self.inputs(batch)[3]), batch)

    def predict(self, apply: Apply, batch: Batch) -> dict[str, Array]:
        """New images that fit what is given.

        Returns:
          samples, finite, image: see `generate`.
          given: bytes [B H W c].
        """
        given = self.inputs(batch)[3]
        return {**super().predict(_Given(apply, given), batch), 'given': self.to_bytes(given)}

    def given_of(self, images: Images) -> Float[Array, 'B H W c']:
        """What is given of images, both in the model's range of values; that of bytes, rounded.

        Raises:
          UserError: if gray images are to be colorized, or blocks do not tile the images.
        """
        pixels = self.to_bytes(images)
        if self.given == GRAY:
            if images.shape[-1] != 3:
                raise UserError(
                    "config.task.given='gray': the images have no colors to learn: take images of "
                    '3 channels'
                )
            known = colors.to_bytes(colors.to_gray(pixels / 255))
        else:
            height, width = images.shape[1:3]
            if height % self.factor or width % self.factor:
                raise UserError(
                    f'config.task.factor={self.factor} does not divide the sides of images of '
                    f'{width} x {height} pixels'
                )
            small = jnp.round(colors.downsample(pixels, self.factor)).astype(jnp.uint8)
            known = colors.upsample(small, self.factor)
        return sequences.to_range(known, self.value_range)


class _Given:
    """The model with what is given of each example in its input."""

    def __init__(self, apply: Apply, given: Images):
        self._apply, self._given = apply, given
        self.train, self.step, self.frozen = apply.train, apply.step, apply.frozen

    def __call__(self, *inputs: Any, method: str | None = None, **options: Any) -> Any:
        if method is not None:
            return self._apply(*inputs, method=method, **options)
        # Samples of an example, and pairs for guidance, are neighbors.
        repeats = len(inputs[0]) // len(self._given)
        return self._apply(*inputs, self._given.repeat(repeats, axis=0), **options)

    def average(self, *inputs: Any, method: str | None = None, **options: Any) -> Any:
        return self._apply.average(*inputs, self._given, method=method, **options)
