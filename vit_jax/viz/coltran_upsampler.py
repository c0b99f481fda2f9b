"""Visualization of color upsampling: the result next to the coarse image and the photo."""

from __future__ import annotations

from typing import Any

from vit_jax.viz import base, figures
from vit_jax.viz.batch import Panels
from vit_jax.viz.coltran import psnr, to_gray
from vit_jax.viz.photo import Context, Fields, Photo


class Viz(base.Viz):
    """Show images before and after color upsampling."""

    whole = True

    def rows(self, prediction: Fields, photo: Photo, context: Context) -> list[dict[str, Any]]:
        """Return the PSNR in dB to the photo, before and after."""
        return [
            {'image': name, 'psnr': psnr(prediction[key], photo)}
            for name, key in (('coarse', 'coarse'), ('upsampled', 'image'))
        ]

    def panels(self, prediction: Fields, photo: Photo) -> Panels:
        """Return the gray, coarse and upsampled image, and the original if it has colors."""
        pictures = [('gray', to_gray(photo.image)), ('coarse', prediction['coarse'])]
        pictures.append(('upsampled', prediction['image']))
        original = [('original', photo.image)] if figures.has_colors(photo.image) else []
        return pictures + original
