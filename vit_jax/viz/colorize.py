"""Visualization of colorization: colorized images next to the gray ones, at the file's size."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
from jax import Array
from PIL import Image

from vit_jax.array_types import Float, UInt8
from vit_jax.ops import colors, fidelity
from vit_jax.viz import base, figures
from vit_jax.viz.batch import Panels
from vit_jax.viz.photo import Context, Fields, Photo

TITLES = ('gray', 'colorized', 'original')
PIXELS = 720  # maximum of an image's longer side in the picture
CHUNK = 2**18  # pixels colored at a time

Picture = UInt8[np.ndarray, 'Y X 3']


class Viz(base.Viz):
    """Show colorized images next to the gray ones."""

    whole, side = True, 3.0

    def rows(self, prediction: Fields, photo: Photo, context: Context) -> list[dict[str, Any]]:
        """Return the colorfulness (Hasler and Suesstrunk, 2003) of the colorized image.

        A color file adds its own colorfulness and the PSNR in dB between the two, at the size of
        the model's input.
        """
        row = {'colorfulness': _colorfulness(prediction['image'])}
        if figures.has_colors(photo.original):
            row['true_colorfulness'] = _colorfulness(photo.image)
            originals = photo.image.astype(np.float64)
            row['psnr'] = float(fidelity.psnr(prediction['image'], originals, peak=255))
        return [row]

    def image(self, prediction: Fields, photo: Photo, context: Context) -> Picture:
        """Return the colorized file, at its size."""
        return color_file(prediction['ab'], photo)

    def seen(self, picture: Picture) -> Picture:
        """Return the model's gray input."""
        return to_gray(picture)

    def panels(self, prediction: Fields, photo: Photo) -> Panels:
        """Return the gray and the colorized image, and the original if it has colors."""
        return list(zip(TITLES, panels(prediction['ab'], photo), strict=False))


def _colorfulness(image: Picture) -> float:
    return float(fidelity.colorfulness((image / 255).astype(np.float32)))


def color_file(ab: Float[np.ndarray, 'H W 2'], photo: Photo) -> Picture:
    """Color the file: enlarged colors on its luminance."""
    height, width = photo.original.shape[:2]
    channels = (Image.fromarray(ab[..., i].astype(np.float32)) for i in range(2))
    size = (width, height)
    enlarged = [np.asarray(c.resize(size, Image.Resampling.BILINEAR)).ravel() for c in channels]
    pixels = _rgb(photo.original).reshape(-1, 3), np.stack(enlarged, axis=-1)
    colored = np.empty_like(pixels[0])
    for first in range(0, len(colored), CHUNK):
        # Chunks of equal size compile once.
        chunks = [part[first : first + CHUNK] for part in pixels]
        count = len(chunks[0])
        padded = [np.pad(chunk, ((0, CHUNK - count), (0, 0))) for chunk in chunks]
        colored[first : first + count] = np.asarray(_recolor(*padded))[:count]
    return colored.reshape(height, width, 3)


@jax.jit
def _recolor(rgb: UInt8[Array, 'N 3'], ab: Float[Array, 'N 2']) -> UInt8[Array, 'N 3']:
    return colors.to_bytes(colors.colorize(_gray(rgb), ab))


def _gray(rgb: colors.Values) -> Array:
    """Return gray values of pixels, 0 to 1."""
    return colors.to_bytes(colors.to_gray(rgb / 255.0)) / 255.0


def _rgb(image: UInt8[np.ndarray, 'Y X C']) -> Picture:
    return np.broadcast_to(image, (*image.shape[:2], 3))


def panels(ab: Float[np.ndarray, 'H W 2'], photo: Photo) -> list[Picture]:
    """Return the gray, the colorized and, if in color, the original image, at picture size."""
    original = _rgb(photo.original)
    pictures = [_thumbnail(color_file(ab, photo))]
    if figures.has_colors(original):
        pictures.append(_thumbnail(original))
    return [to_gray(_thumbnail(original)), *pictures]


def to_gray(picture: Picture) -> Picture:
    """Return the model's gray input."""
    return _rgb(np.round(np.asarray(_gray(picture)) * 255).astype(np.uint8))


def _thumbnail(picture: Picture) -> Picture:
    thumbnail = Image.fromarray(picture)
    thumbnail.thumbnail((PIXELS, PIXELS))
    return np.asarray(thumbnail)
