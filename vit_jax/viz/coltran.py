"""Visualization of coarse colorization: samples next to the gray photo."""

from __future__ import annotations

import argparse
import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np

from vit_jax.array_types import Float, UInt8
from vit_jax.ops import colors, fidelity
from vit_jax.ops.colors import to_luma
from vit_jax.viz import base, colorize, figures
from vit_jax.viz.batch import Panels
from vit_jax.viz.photo import Context, Fields, Photo
from vit_jax.viz.sampling_flags import add_sampling_flags

EQUAL = 1e-6 / 255**2  # mean squared error that counts as none


class Viz(base.Viz):
    """Show samples of coarse colors."""

    whole = True

    def add_flags(self, parser: argparse.ArgumentParser) -> None:
        """Add the number of samples and sampling options."""
        add_sampling_flags(parser)

    def adapt_task(self, task: Any, context: Context) -> Any:
        """Apply the options of the flags to the task."""
        options = {
            name: getattr(context.flags, name) for name in ('samples', 'temperature', 'top_k')
        }
        return dataclasses.replace(task, **{k: v for k, v in options.items() if v is not None})

    def rows(self, prediction: Fields, photo: Photo, context: Context) -> list[dict[str, Any]]:
        """Return rows of samples, see `sample_rows`."""
        return sample_rows(prediction['samples'], prediction['bits_per_dim'], photo)

    def seen(self, picture: base.Picture) -> base.Picture:
        """Return the model's gray input."""
        return to_gray(picture)

    def panels(self, prediction: Fields, photo: Photo) -> Panels:
        """Return panels of samples, see `sample_panels`."""
        return sample_panels(photo, prediction['samples'])


def sample_rows(
    samples: UInt8[np.ndarray, 'S H W 3'], bits: Float[np.ndarray, 'S'], photo: Photo
) -> list[dict[str, Any]]:
    """Return bits per pixel of each sample's coarse colors, and its PSNR in dB to the photo; None
    for a gray photo.
    """
    return [
        {'sample': i, 'bits_per_dim': float(sample_bits), 'psnr': psnr(sample, photo)}
        for i, (sample, sample_bits) in enumerate(zip(samples, bits, strict=True))
    ]


def psnr(image: UInt8[np.ndarray, 'H W 3'], photo: Photo) -> float | None:
    """Peak signal-to-noise ratio in dB to the photo; None if it is gray."""
    if not figures.has_colors(photo.image):
        return None
    return float(fidelity.psnr(image.astype(np.float32), photo.image, peak=255, floor=EQUAL))


def to_gray(image: UInt8[np.ndarray, 'H W C']) -> UInt8[np.ndarray, 'H W 3']:
    """Return the model's gray input."""
    gray = to_luma(jnp.asarray(np.broadcast_to(image, (*image.shape[:2], 3))))
    return np.asarray(gray)[..., None].repeat(3, axis=-1)


def sample_panels(photo: Photo, samples: UInt8[np.ndarray, 'S H W 3']) -> Panels:
    """Return the gray image, its samples, and the original if it has colors."""
    numbered = [(f'sample {i}', sample) for i, sample in enumerate(samples)]
    pictures = [('gray', to_gray(photo.image)), *numbered]
    original = [('original', photo.image)] if figures.has_colors(photo.image) else []
    return pictures + original


def file_panels(photo: Photo, samples: UInt8[np.ndarray, 'S H W 3']) -> Panels:
    """Return the gray file, each sample's colors on its luminance, and the original."""
    panels_of_samples = [colorize.panels(ab(sample), photo) for sample in samples]
    gray, _, *original = panels_of_samples[0]
    numbered = [
        (f'sample {i}', panels_of_one[1]) for i, panels_of_one in enumerate(panels_of_samples)
    ]
    return [('gray', gray), *numbered, *(('original', picture) for picture in original)]


def color_file(photo: Photo, sample: UInt8[np.ndarray, 'H W 3']) -> UInt8[np.ndarray, 'Y X 3']:
    """Combine a sample's colors with the luminance of the file, at the file's size."""
    return colorize.color_file(ab(sample), photo)


def ab(image: UInt8[np.ndarray, 'H W 3']) -> Float[np.ndarray, 'H W 2']:
    """Return a and b of Lab, without lightness."""
    return np.asarray(colors.rgb_to_lab(image / np.float32(255)))[..., 1:]
