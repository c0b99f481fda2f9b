"""Reconstruction of masked patches by a masked autoencoder.

He et al., 2022, arXiv:2111.06377, section 3.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from vit_jax.array_types import Float
from vit_jax.errors import check_choice
from vit_jax.nn.patches import patch_grid, patchify, unpatchify
from vit_jax.ops import sequences
from vit_jax.ops.sequences import Normalization
from vit_jax.ops.terms import Term
from vit_jax.tasks import base
from vit_jax.tasks.base import Apply, Batch

Patches = Float[Array, 'B N P']
TARGETS = ('normalized', 'pixels')
EPS = 1e-6  # added to the variance of a patch


@dataclasses.dataclass(frozen=True)
class Task(base.Task):
    """Reconstruct masked patches; mean squared error.

    Attributes:
      target: 'pixels', or 'normalized' for patches with mean 0 and standard deviation 1.
      value_range: Range to which bytes 0..255 are scaled for the model; None for images normalized
        by `mean` and `std`.
      mean, std: Normalization of the target's pixels in [0, 1]: one number, or one per channel.
        For normalized patches only the ratios of `std` matter.
    """

    target: str = 'normalized'
    value_range: tuple[float, float] | None = (-1.0, 1.0)
    mean: tuple[float, ...] = (0.5,)
    std: tuple[float, ...] = (0.5,)

    rngs = ('mask',)

    def __post_init__(self) -> None:
        check_choice('config.task.target', self.target, TARGETS)
        self.require('std', min(self.std, default=0) > 0, 'positive')

    @property
    def normalization(self) -> Normalization | None:
        return (self.mean, self.std) if self.value_range is None else None

    def inputs(self, batch: Batch) -> tuple[Float[Array, 'B *rest'], ...]:
        """Return the images, and `noise` [B N], from which masks are drawn, if the batch has it."""
        noise = (batch['noise'],) if 'noise' in batch else ()
        return sequences.to_range(
            batch['image'], self.value_range or (), self.normalization
        ), *noise

    def loss(self, outputs: dict, batch: Batch) -> dict[str, Term]:
        """Mean over the masked patches of the mean squared error of a patch (section 3)."""
        errors = jnp.square(outputs['patches'] - self._target(outputs, batch)[0]).mean(-1)
        hidden = outputs['mask'] * self.mask(batch)[:, None]
        return {'loss': Term((errors * hidden).sum(), hidden.sum())}

    def predict(self, apply: Apply, batch: Batch) -> dict[str, jax.Array]:
        """Reconstruct masked images, and extract features of unmasked ones.

        Returns:
          reconstruction: [B H W C], 0 for black and 1 for white. With normalized targets, patches
            get the true mean and standard deviation.
          mask: [B h w], 1 for masked and 0 for visible patches.
          features: [B D], mean of the patch tokens.
        """
        outputs = self.outputs(apply, batch)
        patches, (mean, std) = outputs['patches'], self._target(outputs, batch)[1]
        _, height, width, channels = batch['image'].shape
        side = _patch_size(patches, channels)
        grid = patch_grid(height, width, side)
        image = unpatchify(patches * std + mean, grid, side)
        tokens = apply(self.inputs(batch)[0], method='features')
        return {
            'reconstruction': image * jnp.asarray(self.std) + jnp.asarray(self.mean),
            'mask': outputs['mask'].reshape(-1, *grid),
            'features': tokens[:, 1:].mean(1).astype(jnp.float32),
        }

    def _target(self, outputs: dict, batch: Batch) -> tuple[Patches, tuple[Any, Any]]:
        """Return the target patches, and the mean and standard deviation removed from them."""
        image = self.inputs(batch)[0]
        if self.value_range is not None:
            low, high = self.value_range
            image = (image - low) / (high - low)
            image = (image - jnp.asarray(self.mean)) / jnp.asarray(self.std)
        patches = patchify(image, _patch_size(outputs['patches'], image.shape[-1]))
        if self.target == 'pixels':
            return patches, (0.0, 1.0)
        mean = patches.mean(-1, keepdims=True)
        std = jnp.sqrt(patches.var(-1, keepdims=True, ddof=1) + EPS)
        return (patches - mean) / std, (mean, std)


def _patch_size(patches: Patches, channels: int) -> int:
    """Return the side of a patch in pixels."""
    return math.isqrt(patches.shape[-1] // channels)
