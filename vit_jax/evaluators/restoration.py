"""Likeness of images made of gray or small ones to the originals, and how colorful they are."""

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

    They are means over the samples of the task `image_to_image`, of what it is given, and of the
    originals. A sample is not the mean of all possible images, which alone has the best PSNR.
    """

    predictions = ('samples', 'given')

    def __init__(self) -> None:
        self.start()

    def start(self) -> None:
        self._found: list[Float[np.ndarray, 'B 4']] = []
        self._finite = True

    def update(self, predictions: Arrays, batch: Arrays) -> None:
        """Raise UserError if the task is given nothing of an image."""
        if 'samples' not in predictions or 'given' not in predictions:
            raise UserError("the task restores no images: evaluate a run of 'image_to_image'")
        samples, true = predictions['samples'], predictions['image']
        self._finite &= bool(np.all(predictions.get('finite', True)))
        measured = (
            psnr(samples, true[:, None]).mean(1),
            psnr(predictions['given'], true),
            colorfulness(samples).mean(1),
            colorfulness(true),
        )
        self._found.append(np.stack(measured, axis=1))

    def result(self) -> dict[str, float]:
        means = np.concatenate(self._found).mean(0)
        if not self._finite:
            means[:] = math.nan
        self.start()
        return dict(zip(self.names(), means.tolist(), strict=True))

    def names(self) -> tuple[str, ...]:
        return 'psnr', 'psnr_of_given', 'colorfulness', 'true_colorfulness'


def psnr(a: UInt8[np.ndarray, '...'], b: UInt8[np.ndarray, '...']) -> Float[np.ndarray, '*B']:
    """Peak signal to noise ratio in dB of images [*B H W C]; 100 where they are the same."""
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
