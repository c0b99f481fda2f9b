"""Depth of every pixel from one image."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jax import Array

from vit_jax.array_types import Bool, Float
from vit_jax.errors import UserError, check_choice
from vit_jax.ops import masks, sequences
from vit_jax.ops.depth import mean, measure, sig_loss
from vit_jax.ops.sequences import Normalization
from vit_jax.ops.terms import Term
from vit_jax.tasks import base
from vit_jax.tasks.base import Apply, Batch, Sums

METERS, INVERSE = 'meters', 'inverse'
Maps = Float[Array, 'B H W']
Valid = Bool[Array, 'B H W']


@dataclasses.dataclass(frozen=True)
class Task(base.Task):
    """Predict depth; batches have `depth` [B H W] in meters, 0 where it is unknown.

    Attributes:
      output: What the model predicts: depth in 'meters', or 'inverse' for inverse depth up to a
        scale and a shift of each image. Inverse depth is compared after aligning it to the true one
        by least squares.
      least, deepest: Range of depths in meters that count; predictions are clipped to it for
        metrics.
      trimmed: Share of an image's pixels with the largest errors that the loss of inverse depth
        leaves out (arXiv:1907.01341, equation 7).
      value_range: Range to which bytes 0..255 are scaled for the model.
      mean, std: Normalization of each channel of images in [0, 1]; empty for `value_range`.
    """

    output: str = METERS
    least: float = 1e-3
    deepest: float = 80.0
    trimmed: float = 0.2
    value_range: tuple[float, float] = (-1.0, 1.0)
    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()

    rngs = ('dropout',)

    def __post_init__(self) -> None:
        check_choice('config.task.output', self.output, (METERS, INVERSE))
        self.require('least', 0 < self.least < self.deepest, 'positive and less than deepest')
        self.require('trimmed', 0 <= self.trimmed < 1, 'in [0, 1)')
        is_whole = len(self.std) == len(self.mean) and min(self.std, default=1) > 0
        self.require('std', is_whole, 'positive, and given with mean for as many channels')

    @property
    def normalization(self) -> Normalization | None:
        return (self.mean, self.std) if self.std else None

    def inputs(self, batch: Batch) -> tuple[Float[Array, 'B H W C'], ...]:
        """Return scaled images."""
        return (sequences.to_range(batch['image'], self.value_range, self.normalization),)

    def loss(self, outputs: dict, batch: Batch) -> dict[str, Term]:
        """Mean over images with known depth of `sig_loss` or `aligned_loss`."""
        truth, valid = self._truth(batch)
        depth = resize(outputs['depth'], truth)
        if self.output == METERS:
            losses = sig_loss(depth.clip(0), truth, valid)
        else:
            losses = aligned_loss(depth, invert(truth, valid), valid, self.trimmed)
        counted = self.mask(batch) * valid.any((1, 2))
        return {'loss': Term((losses * counted).sum(), counted.sum())}

    def evaluate(self, apply: Apply, batch: Batch) -> Sums:
        """Sums and counts over images with known depth: the loss, and the means of `measure`."""
        outputs = self.outputs(apply, batch)
        truth, valid = self._truth(batch)
        depth = resize(outputs['depth'], truth)
        if self.output == INVERSE:
            aligned = align(depth, invert(truth, valid), valid)
            depth = 1 / jnp.maximum(aligned, 1 / self.deepest)
        depth = depth.clip(self.least, self.deepest)
        counted = self.mask(batch) * valid.any((1, 2))
        terms = self.loss(outputs, batch)
        sums: Sums = {name: (term.sum, term.count) for name, term in terms.items()}
        for name, values in measure(depth, truth, valid).items():
            sums[name] = ((values * counted).sum(), counted.sum())
        return sums

    def predict(self, apply: Apply, batch: Batch) -> dict[str, jax.Array]:
        """Return `depth` in meters, or else `inverse_depth`, float32 [B H W] for all pixels."""
        (images,) = self.inputs(batch)
        depth = resize(apply(images)['depth'], images[..., 0])
        return {'depth' if self.output == METERS else 'inverse_depth': depth}

    def _truth(self, batch: Batch) -> tuple[Maps, Valid]:
        """Return true depths, and where they are known and in range."""
        if 'depth' not in batch:
            raise UserError(
                f"task 'depth' needs 'depth' [H, W] in meters, but the data have "
                f'{", ".join(sorted(batch))}'
            )
        truth = batch['depth'].astype(jnp.float32)
        return truth, (truth >= self.least) & (truth <= self.deepest)


def resize(depth: Float[Array, 'B h w'], like: Maps) -> Maps:
    """Resize predictions to the size of other maps."""
    same = depth.shape == like.shape
    return depth if same else masks.resize_bilinear(depth, like.shape[1:])


def invert(truth: Maps, valid: Valid) -> Maps:
    """Return inverse depths, 0 where they are unknown."""
    return jnp.where(valid, 1 / jnp.where(valid, truth, 1), 0)


def align(values: Maps, truth: Maps, valid: Valid) -> Maps:
    """Scale and shift each map to the true one by least squares (arXiv:1907.01341, equation 4).

    A map that is constant where depth is known is only shifted.
    """
    own_mean, true_mean = (mean(x, valid)[:, None, None] for x in (values, truth))
    centered = jnp.where(valid, values - own_mean, 0)
    square = (centered**2).sum((1, 2))
    product = (centered * jnp.where(valid, truth - true_mean, 0)).sum((1, 2))
    scale = jnp.where(square > 0, product / jnp.where(square > 0, square, 1), 0)
    return scale[:, None, None] * (values - own_mean) + true_mean


def aligned_loss(values: Maps, truth: Maps, valid: Valid, trimmed: float) -> Float[Array, ' B']:
    """Compute each image's scale- and shift-invariant loss (Ranftl et al., 2019, arXiv:1907.01341).

    Both maps are shifted by their medians and divided by their mean absolute deviations (equation
    5); the loss is half of the mean error, without the share `trimmed` of the largest (equation 7).

    Args:
      values: Predictions up to a scale and a shift of each image.
      truth: True values.
      valid: Where they are known.
      trimmed: Share of the pixels to leave out.
    """
    errors = jnp.abs(standardize(values, valid) - standardize(truth, valid))
    ordered = jnp.sort(jnp.where(valid, errors, jnp.inf).reshape(len(errors), -1), axis=1)
    count = valid.sum((1, 2))
    kept = jnp.ceil((1 - trimmed) * count)
    is_kept = jnp.arange(ordered.shape[1]) < kept[:, None]
    return jnp.where(is_kept, ordered, 0).sum(1) / (2 * jnp.maximum(count, 1))


def standardize(values: Maps, valid: Valid) -> Maps:
    """Subtract each map's median, and divide by the mean absolute deviation from it."""
    flat = jnp.where(valid, values, jnp.nan).reshape(len(values), -1)
    has_any = valid.any((1, 2))
    flat = jnp.where(has_any[:, None], flat, 0)
    median = jnp.nanmedian(flat, axis=1)[:, None, None]
    shifted = values - median
    spread = mean(jnp.where(valid, jnp.abs(shifted), 0), valid)[:, None, None]
    return jnp.where(valid, shifted / jnp.maximum(spread, 1e-6), 0)
