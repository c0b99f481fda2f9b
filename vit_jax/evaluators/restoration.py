"""Fidelity and colorfulness of restored images."""

from __future__ import annotations

import math

import numpy as np

from vit_jax.array_types import Float, UInt8
from vit_jax.errors import UserError
from vit_jax.evaluators import base
from vit_jax.evaluators.base import Arrays

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
        metrics = (
            psnr(samples, originals[:, None]).mean(1),
            psnr(predictions['given'], originals),
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


def psnr(a: UInt8[np.ndarray, '...'], b: UInt8[np.ndarray, '...']) -> Float[np.ndarray, '*B']:
    """Peak signal-to-noise ratio in dB of images [*B H W C]; 100 for equal images."""
    error = np.square((a.astype(np.float64) - b) / 255).mean((-3, -2, -1))
    return -10 * np.log10(np.maximum(error, 1e-10))


def colorfulness(images: Images) -> Float[np.ndarray, '*B']:
    """M3 of Hasler and Suesstrunk, 2003, section 6; see `ops.colors.colorfulness`."""
    if images.shape[-1] == 1:
        return np.zeros(images.shape[:-3])
    red, green, blue = (images[..., i].astype(np.float64) for i in range(3))
    opponents = np.stack([red - green, (red + green) / 2 - blue], axis=-1)
    std, mean = (np.hypot(*np.moveaxis(f(opponents, (-3, -2)), -1, 0)) for f in (np.std, np.mean))
    return std + 0.3 * mean
