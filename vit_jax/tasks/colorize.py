"""Colorization: predict the colors of a gray image.

Zhang et al., 2016, arXiv:1603.08511, section 2.
"""

from __future__ import annotations

import dataclasses
import json
import os

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from vit_jax.array_types import Float, Int64
from vit_jax.errors import UserError
from vit_jax.ops import colors, fidelity, sequences
from vit_jax.ops.terms import Term, hits
from vit_jax.storage import paths
from vit_jax.tasks import base
from vit_jax.tasks.base import Apply, Batch, Sums


@dataclasses.dataclass(frozen=True)
class Task(base.Task):
    """Classify color bins; cross entropy with soft labels and larger weights for rare colors.

    Images are bytes or floats with three channels, or one without ground truth.

    Attributes:
      prior: File of color counts, written by the command `colors`; '' gives all
        colors the same weight. Only training and evaluation read it.
      rebalance: Lambda of the color weights, see `colors.class_weights`.
      temperature: Temperature of the annealed mean; 0.38 in the paper.
      value_range: Range to which bytes 0..255 are scaled for the model; float images must already
        be in it.
    """

    prior: str = ''
    rebalance: float = colors.REBALANCE
    temperature: float = colors.TEMPERATURE
    value_range: tuple[float, float] = (-1.0, 1.0)

    rngs = ('dropout',)

    def __post_init__(self) -> None:
        self.require('rebalance', 0 < self.rebalance <= 1, 'in (0, 1]')
        self.require('temperature', self.temperature > 0, 'positive')

    def inputs(self, batch: Batch) -> tuple[Float[Array, 'B H W 1']]:
        """Return gray images, rounded as in an eight-bit file."""
        low, high = self.value_range
        return (self._gray(batch) * (high - low) + low,)

    def loss(self, outputs: dict, batch: Batch) -> dict[str, Term]:
        """Means over the cells of the output: the weighted cross entropy (equation 2), and the
        metric `accuracy`, the share of cells whose most likely bin is correct.
        """
        losses, correct = self._compare(outputs, batch)
        mask = self.mask(batch)
        cells = mask.sum() * losses[0].size
        losses, correct = ((values * mask[:, None, None]).sum() for values in (losses, correct))
        return {'loss': Term(losses, cells), 'accuracy': Term(correct, cells, weight=0.0)}

    def evaluate(self, apply: Apply, batch: Batch) -> Sums:
        """Sums and counts over the real examples; padding has mask 0.

        The terms of the loss; `psnr`, in dB, of the color images and `psnr_of_grey` as its
        baseline; `colorfulness` (Hasler and Suesstrunk, 2003) and `true_colorfulness`.
        """
        outputs, truth = self.outputs(apply, batch), self._rgb(batch)
        predicted, gray = self._colorize(outputs, batch), self._gray(batch)
        images = {
            'psnr': fidelity.psnr(predicted, truth),
            'psnr_of_grey': fidelity.psnr(jnp.broadcast_to(gray, truth.shape), truth),
            'colorfulness': fidelity.colorfulness(predicted),
            'true_colorfulness': fidelity.colorfulness(truth),
        }
        terms, mask = self.loss(outputs, batch), self.mask(batch)
        return {
            **{name: (term.sum, term.count) for name, term in terms.items()},
            **{name: ((values * mask).sum(), mask.sum()) for name, values in images.items()},
        }

    def predict(self, apply: Apply, batch: Batch) -> dict[str, jax.Array]:
        """Predict colors.

        Returns:
          ab: [B h w 2], color of each cell of the output.
          image: bytes [B H W 3], predicted colors with the luminance of the input.
        """
        outputs = self.outputs(apply, batch)
        image = colors.to_bytes(self._colorize(outputs, batch))
        return {'ab': self._ab(outputs), 'image': image}

    def _rgb(self, batch: Batch) -> Float[Array, 'B H W C']:
        """Return color images, 0 to 1."""
        low, high = self.value_range
        return (sequences.to_range(batch['image'], self.value_range) - low) / (high - low)

    def _gray(self, batch: Batch) -> Float[Array, 'B H W 1']:
        """Return gray images, 0 to 1 in steps of 1/255, so that a gray file stays the same."""
        rgb = self._rgb(batch)
        return jnp.round(255 * colors.to_gray(jnp.broadcast_to(rgb, (*rgb.shape[:3], 3)))) / 255

    def _compare(
        self, outputs: dict, batch: Batch
    ) -> tuple[Float[Array, 'B h w'], Float[Array, 'B h w']]:
        """Compute the weighted cross entropy per cell, and 1 where its likeliest bin is correct."""
        logits = outputs['logits']
        bins, shares = colors.soft_encode(self._truth(batch, logits.shape[1:3]))
        log_probs = jnp.take_along_axis(jax.nn.log_softmax(logits), bins, axis=-1)
        nearest = bins[..., 0]
        losses = -(shares * log_probs).sum(-1) * jnp.asarray(self._weights())[nearest]
        return losses, hits(logits, nearest)

    def _truth(self, batch: Batch, grid: tuple[int, int]) -> Float[Array, 'B h w 2']:
        """Average the true colors over each cell.

        Raises:
          UserError: if the images have no colors.
        """
        rgb = self._rgb(batch)
        if rgb.shape[-1] != 3:
            raise UserError(
                f'task colorize learns from images with 3 channels, not {rgb.shape[-1]}'
            )
        batch_size, (rows, columns) = len(rgb), grid
        ab = colors.rgb_to_lab(rgb)[..., 1:]
        cells = ab.reshape(batch_size, rows, rgb.shape[1] // rows, columns, -1, 2)
        return cells.mean(axis=(2, 4))

    def _weights(self) -> np.ndarray:
        """Return the weight of each bin, [Q]."""
        if not self.prior:
            return np.ones(colors.NUM_BINS, np.float32)
        counts = read_color_counts(self.prior)
        if len(counts) != colors.NUM_BINS:
            raise UserError(
                f'config.task.prior: {self.prior!r} counts {len(counts)} colors instead of '
                f'{colors.NUM_BINS}; write it again with `python -m vit_jax colors SOURCE`'
            )
        return colors.class_weights(counts, self.rebalance)

    def _ab(self, outputs: dict) -> Float[Array, 'B h w 2']:
        return colors.annealed_mean(outputs['logits'], self.temperature)

    def _colorize(self, outputs: dict, batch: Batch) -> Float[Array, 'B H W 3']:
        """Combine the enlarged colors with the luminance of the input, 0 to 1."""
        ab, gray = self._ab(outputs), self._gray(batch)
        return colors.colorize(gray, jax.image.resize(ab, (*gray.shape[:3], 2), 'bilinear'))


def write_color_counts(
    path: str | os.PathLike[str], counts: Int64[np.ndarray, 'Q'], source: str
) -> None:
    """Write the counts of the color bins of `ops.colors`, and their source, as JSON."""
    paths.write_text_atomic(path, json.dumps({'source': source, 'counts': counts.tolist()}) + '\n')


def read_color_counts(path: str | os.PathLike[str]) -> Int64[np.ndarray, 'Q']:
    """Read color counts.

    Raises:
      UserError: if there is no such file, or it does not hold valid counts.
    """
    text = paths.read_text(paths.path(path), errors='replace')
    if text is None:
        raise UserError(
            f'config.task.prior: there is no {os.fspath(path)!r}; compute it from the training '
            'data with `python -m vit_jax colors SOURCE --out FILE`'
        )
    try:
        counts = np.array(paths.parse_json(text)['counts'])
    except (ValueError, KeyError, TypeError, OverflowError) as error:
        raise UserError(f'config.task.prior: {os.fspath(path)!r} has no counts') from error
    if counts.ndim != 1 or counts.dtype != np.int64 or counts.min() < 0 or not counts.sum():
        raise UserError(f'config.task.prior: {os.fspath(path)!r} has invalid counts')
    return counts
