"""Visualization of image-to-image models: samples next to the condition and the original."""

from __future__ import annotations

from typing import Any

import numpy as np

from vit_jax.ops import fidelity
from vit_jax.viz import coltran, figures, generate
from vit_jax.viz.base import Picture
from vit_jax.viz.batch import Panels
from vit_jax.viz.photo import Context, Fields, Photo


class Viz(generate.Viz):
    """Show samples conditioned on a file or an example."""

    def rows(self, prediction: Fields, photo: Photo, context: Context) -> list[dict[str, Any]]:
        """Return the PSNR in dB of each sample to the image; None for colors of a gray file."""
        original = photo.image / 255
        is_gray_file = is_gray(prediction) and not figures.has_colors(photo.image)
        return [
            {
                'sample': i,
                'psnr': None if is_gray_file else float(fidelity.psnr(sample / 255, original)),
            }
            for i, sample in enumerate(prediction['samples'])
        ]

    def panels(self, prediction: Fields, photo: Photo) -> Panels:
        """Return the condition, its samples, and the original unless it is gray."""
        condition = np.broadcast_to(prediction['given'], photo.image.shape)
        name = 'gray' if is_gray(prediction) else 'small'
        pictures = [(name, condition)]
        pictures += [(f'sample {i}', sample) for i, sample in enumerate(prediction['samples'])]
        if name == 'small' or figures.has_colors(photo.image):
            pictures.append(('original', photo.image))
        return pictures

    def image(self, prediction: Fields, photo: Photo, context: Context) -> Picture:
        """Return the first sample; for gray conditions, its colors on the luminance of the file."""
        sample = prediction['samples'][0]
        if is_gray(prediction):
            return coltran.color_file(photo, sample)
        return np.broadcast_to(sample, (*sample.shape[:2], 3))


def is_gray(prediction: Fields) -> bool:
    """Return whether the condition lacks colors that the samples have."""
    return prediction['given'].shape[-1] < prediction['samples'].shape[-1]
