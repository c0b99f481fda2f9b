"""Visualization of a masked autoencoder: original, visible patches, and reconstruction."""

from __future__ import annotations

import argparse
from typing import Any

import numpy as np

from vit_jax.array_types import Float, UInt8
from vit_jax.errors import UserError
from vit_jax.ops import fidelity
from vit_jax.viz import base
from vit_jax.viz.batch import Panels
from vit_jax.viz.photo import Context, Fields, Photo

TITLES = ('original', 'seen', 'reconstruction', 'reconstruction with the seen patches')
GRAY = 128  # color of masked patches


class Viz(base.Viz):
    """Show masked images and their reconstructions."""

    side = 2.4

    def add_flags(self, parser: argparse.ArgumentParser) -> None:
        """Add the share of masked patches."""
        parser.add_argument(
            '--mask-ratio',
            type=float,
            metavar='SHARE',
            help="share of hidden patches (default: training's)",
        )

    def adapt_model(self, model: Any, context: Context) -> Any:
        """Apply the flag's mask ratio to the model."""
        ratio = context.flags.mask_ratio
        return model if ratio is None else model.clone(mask_ratio=ratio)

    def rows(self, prediction: Fields, photo: Photo, context: Context) -> list[dict[str, Any]]:
        """Return the number of masked patches, and the PSNR in dB of their reconstruction."""
        hidden = prediction['mask'] > 0
        count = int(hidden.sum())
        return [{'patches': hidden.size, 'hidden': count, 'psnr': psnr(prediction, photo)}]

    def panels(self, prediction: Fields, photo: Photo) -> Panels:
        """Return four pictures, see TITLES."""
        return list(zip(TITLES, panels(prediction, photo), strict=True))


def psnr(prediction: Fields, photo: Photo) -> float | None:
    """Peak signal-to-noise ratio over masked pixels in dB; None if nothing is masked."""
    hidden = enlarge_mask(prediction['mask'], photo)
    if not hidden.any():
        return None
    guess = np.clip(prediction['reconstruction'], 0, 1)
    where = hidden[..., None]
    return float(fidelity.psnr(guess, photo.image / 255.0, floor=0.0, where=where))


def enlarge_mask(mask: Float[np.ndarray, 'h w'], photo: Photo) -> Any:
    """Enlarge the mask of patches to pixels, [H W]."""
    height, width = photo.image.shape[:2]
    return np.kron(mask, np.ones((height // mask.shape[0], width // mask.shape[1]))) > 0


def panels(prediction: Fields, photo: Photo) -> list[UInt8[np.ndarray, 'H W C']]:
    """Return the image, visible patches, and the reconstruction without and with visible patches.

    Raises:
      UserError: if the transforms of the run do not make uint8 images.
    """
    if photo.image.dtype != np.uint8:
        raise UserError(
            f'{photo.path}: the transforms of this run produce {photo.image.dtype} images, but '
            'pictures need uint8: let the task normalize them (value_range)'
        )
    hidden = enlarge_mask(prediction['mask'], photo)[..., None]
    guess = np.round(np.clip(prediction['reconstruction'], 0, 1) * 255).astype(np.uint8)
    visible = np.where(hidden, np.uint8(GRAY), photo.image)
    return [photo.image, visible, guess, np.where(hidden, guess, photo.image)]
