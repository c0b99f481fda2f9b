"""Coarse colors, three bits a channel in 512 bins, and the gray image to be colored.

Kumar et al., 2021, arXiv:2102.04432, section 4: a byte x becomes the level floor(x / 32), and the
levels of a pixel become the bin 64 r + 8 g + b. Parameter-free, on the device.
"""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array

from vit_jax.array_types import Float, Int, UInt8

LEVELS = 8  # of a channel
BINS = LEVELS**3
STEP = 256 // LEVELS  # bytes of one level

# ITU-R BT.601, as in `tf.image.rgb_to_grayscale`.
GRAY_WEIGHTS = (0.2989, 0.5870, 0.1140)


def to_bins(image: UInt8[Array, '*B 3']) -> Int[Array, '*B']:
    """The bin of every pixel, in 0..511."""
    levels = image.astype(jnp.int32) // STEP
    return (levels * jnp.array([LEVELS**2, LEVELS, 1])).sum(-1)


def from_bins(bins: Int[Array, '*B']) -> UInt8[Array, '*B 3']:
    """The color in the middle of every bin: 32 x level + 16 in each channel."""
    levels = bins[..., None] // jnp.array([LEVELS**2, LEVELS, 1]) % LEVELS
    return (levels * STEP + STEP // 2).astype(jnp.uint8)


def to_luma(image: UInt8[Array, '*B 3']) -> UInt8[Array, '*B']:
    """The luma of every pixel, rounded; a gray pixel keeps its value."""
    luma = (image.astype(jnp.float32) * jnp.array(GRAY_WEIGHTS)).sum(-1)
    return jnp.round(luma).astype(jnp.uint8)


def shrunk(image: UInt8[Array, '*B H W C'], factor: int) -> Float[Array, '*B h w C']:
    """The mean color of every block of `factor` x `factor` pixels.

    Raises:
      ValueError: if blocks do not tile the image.
    """
    *batch, height, width, channels = image.shape
    if height % factor or width % factor:
        raise ValueError(f'blocks of {factor} pixels do not tile {height} x {width} pixels')
    blocks = (*batch, height // factor, factor, width // factor, factor, channels)
    return image.astype(jnp.float32).reshape(blocks).mean((-4, -2))


def enlarged(image: UInt8[Array, '*B h w C'], factor: int) -> UInt8[Array, '*B H W C']:
    """Every pixel as a block of `factor` x `factor` pixels."""
    return image.repeat(factor, axis=-3).repeat(factor, axis=-2)
