"""Normals of the surfaces in an image, for every pixel."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
from jax import Array

from vit_jax.array_types import Bool, Float
from vit_jax.errors import UserError
from vit_jax.nn.norms import unit
from vit_jax.ops import masks, sequences
from vit_jax.ops.depth import mean
from vit_jax.ops.sequences import Normalization
from vit_jax.ops.terms import Term
from vit_jax.tasks import base
from vit_jax.tasks.base import Apply, Batch, Sums

SMALL = 11.25  # degrees, usual since arXiv:1411.4734
Maps = Float[Array, 'B H W 3']


@dataclasses.dataclass(frozen=True)
class Task(base.Task):
    """Predict normals; batches have `normals` [B H W 3] of length 1, 0 where they are unknown.

    x points right, y down and z away from the camera.

    Attributes:
      value_range: Range to which bytes 0..255 are scaled for the model.
      mean, std: Normalization of each channel of images in [0, 1]; empty for `value_range`.
    """

    value_range: tuple[float, float] = (-1.0, 1.0)
    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()

    rngs = ('dropout',)

    def __post_init__(self) -> None:
        is_whole = len(self.std) == len(self.mean) and min(self.std, default=1) > 0
        self.require('std', is_whole, 'positive, and given with mean for as many channels')

    @property
    def normalization(self) -> Normalization | None:
        return (self.mean, self.std) if self.std else None

    def inputs(self, batch: Batch) -> tuple[Float[Array, 'B H W C'], ...]:
        """Return scaled images."""
        return (sequences.to_range(batch['image'], self.value_range, self.normalization),)

    def loss(self, outputs: dict, batch: Batch) -> dict[str, Term]:
        """Mean over images with known normals of 1 - cos, a mean over their pixels."""
        truth, valid = _truth(batch)
        losses = 1 - mean(_cosine(outputs, truth), valid)
        counted = self.mask(batch) * valid.any((1, 2))
        return {'loss': Term((losses * counted).sum(), counted.sum())}

    def evaluate(self, apply: Apply, batch: Batch) -> Sums:
        """Sums and counts over images with known normals of three means.

        Returns:
          loss: See `loss`.
          angle: Angle to the true normal, in degrees.
          within_11: Share of pixels whose angle is less than 11.25 degrees.
        """
        truth, valid = _truth(batch)
        cosine = _cosine(self.outputs(apply, batch), truth)
        angle = jnp.degrees(jnp.arccos(cosine.clip(-1, 1)))
        counted = self.mask(batch) * valid.any((1, 2))
        values = {'loss': 1 - cosine, 'angle': angle, 'within_11': 1.0 * (angle < SMALL)}
        return {n: ((mean(x, valid) * counted).sum(), counted.sum()) for n, x in values.items()}

    def predict(self, apply: Apply, batch: Batch) -> dict[str, Array]:
        """Return `normals` of length 1, float32 [B H W 3] for all pixels."""
        (images,) = self.inputs(batch)
        return {'normals': unit(_resize(apply(images)['normals'], images.shape[1:3]))}


def _truth(batch: Batch) -> tuple[Maps, Bool[Array, 'B H W']]:
    """Return true normals, and where they are known."""
    if 'normals' not in batch:
        raise UserError(
            f"task 'normals' needs 'normals' [H, W, 3], but the data have "
            f'{", ".join(sorted(batch))}'
        )
    truth = batch['normals'].astype(jnp.float32)
    return truth, (truth != 0).any(-1)


def _cosine(outputs: dict, truth: Maps) -> Float[Array, 'B H W']:
    return (unit(_resize(outputs['normals'], truth.shape[1:3])) * truth).sum(-1)


def _resize(normals: Float[Array, 'B h w 3'], size: tuple[int, ...]) -> Maps:
    """Interpolate normals bilinearly; they are not of length 1."""
    if normals.shape[1:3] == tuple(size):
        return normals
    planes = masks.resize_bilinear(jnp.moveaxis(normals, -1, 1), size)
    return jnp.moveaxis(planes, 1, -1)
