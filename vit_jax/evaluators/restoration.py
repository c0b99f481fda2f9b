"""Fidelity and colorfulness of restored images."""

from __future__ import annotations

import math

import numpy as np

from vit_jax.array_types import Float, UInt8
from vit_jax.errors import UserError
from vit_jax.evaluators import base
from vit_jax.evaluators.base import Arrays
from vit_jax.ops import fidelity

Images = UInt8[np.ndarray, '*B H W C']


class Evaluator(base.Evaluator):
    """`psnr` and `psnr_of_given` in dB, `colorfulness` and `true_colorfulness`.

    They are means over the samples of the task `image_to_image`, over its conditions, and over the
    original images. A single sample cannot have the PSNR of the mean of all possible images.
    """

    predictions = ('samples', 'given')

    def __init__(self) -> None:
        self.start()

    def start(self) -> None:
        self._batch_metrics: list[Float[np.ndarray, 'B 4']] = []
        self._finite = True

    def update(self, predictions: Arrays, batch: Arrays) -> None:
        """Add a batch; raise UserError unless the task restores images."""
        if 'samples' not in predictions or 'given' not in predictions:
            raise UserError("the task does not restore images: evaluate a run of 'image_to_image'")
        samples, originals = predictions['samples'], predictions['image']
        self._finite &= bool(np.all(predictions.get('finite', True)))
        floats = originals.astype(np.float64)
        metrics = (
            fidelity.psnr(samples, floats[:, None], peak=255).mean(1),
            fidelity.psnr(predictions['given'], floats, peak=255),
            colorfulness(samples).mean(1),
            colorfulness(originals),
        )
        self._batch_metrics.append(np.stack(metrics, axis=1))

    def result(self) -> dict[str, float]:
        means = np.concatenate(self._batch_metrics).mean(0)
        if not self._finite:
            means[:] = math.nan
        self.start()
        return dict(zip(self.names(), means.tolist(), strict=True))

    def names(self) -> tuple[str, ...]:
        return 'psnr', 'psnr_of_given', 'colorfulness', 'true_colorfulness'


def colorfulness(images: Images) -> Float[np.ndarray, '*B']:
    """Compute `ops.fidelity.colorfulness`; 0 for images with one channel."""
    if images.shape[-1] == 1:
        return np.zeros(images.shape[:-3])
    return fidelity.colorfulness(images.astype(np.float64), peak=255)
