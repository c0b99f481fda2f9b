"""Visualization of color upsampling: the result beside the coarse image and the photograph."""

from __future__ import annotations

from typing import Any

from vit_jax.viz import base, figures
from vit_jax.viz.batch import Panels
from vit_jax.viz.coltran import psnr, to_gray
from vit_jax.viz.photo import Context, Fields, Photo


class Viz(base.Viz):
    """Images before and after an upsampler of colors."""

    whole = True

    def rows(self, prediction: Fields, photo: Photo, context: Context) -> list[dict[str, Any]]:
        """PSNR in dB to the photograph, before and after."""
        return [
            {'image': name, 'psnr': psnr(prediction[key], photo)}
            for name, key in (('coarse', 'coarse'), ('upsampled', 'image'))
        ]

    def panels(self, prediction: Fields, photo: Photo) -> Panels:
        """The gray, the coarse and the upsampled image, and the original if it has colors."""
        shown = [('gray', to_gray(photo.image)), ('coarse', prediction['coarse'])]
        shown.append(('upsampled', prediction['image']))
        original = [('original', photo.image)] if figures.has_colors(photo.image) else []
        return shown + original
