"""Visualization of images from images: samples beside what is given and the original."""

from __future__ import annotations

from typing import Any

import numpy as np

from vit_jax.ops import colors
from vit_jax.viz import coltran, figures, generate
from vit_jax.viz.base import Picture
from vit_jax.viz.batch import Panels
from vit_jax.viz.photo import Context, Fields, Photo


class Viz(generate.Viz):
    """Samples of what is given of a file, or of an example."""

    def rows(self, prediction: Fields, photo: Photo, context: Context) -> list[dict[str, Any]]:
        """The PSNR in dB of each sample to the image; None for colors that a gray file lacks."""
        true = photo.image / 255
        lacks = is_gray(prediction) and not figures.has_colors(photo.image)
        return [
            {'sample': i, 'psnr': None if lacks else float(colors.psnr(sample / 255, true))}
            for i, sample in enumerate(prediction['samples'])
        ]

    def panels(self, prediction: Fields, photo: Photo) -> Panels:
        """What is given, its samples, and the original, unless it is gray and so given."""
        known = np.broadcast_to(prediction['given'], photo.image.shape)
        name = 'gray' if is_gray(prediction) else 'small'
        shown = [(name, known)]
        shown += [(f'sample {i}', sample) for i, sample in enumerate(prediction['samples'])]
        if name == 'small' or figures.has_colors(photo.image):
            shown.append(('original', photo.image))
        return shown

    def image(self, prediction: Fields, photo: Photo, context: Context) -> Picture:
        """The first sample; its colors on the luminance of the file, where gray is given."""
        sample = prediction['samples'][0]
        if is_gray(prediction):
            return coltran.color_file(photo, sample)
        return np.broadcast_to(sample, (*sample.shape[:2], 3))


def is_gray(prediction: Fields) -> bool:
    """Whether colors are missing in what is given, of color images."""
    return prediction['given'].shape[-1] < prediction['samples'].shape[-1]
