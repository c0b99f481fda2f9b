"""Color operations as pure functions: conversions, bins of a and b, and coarse colors.

sRGB follows IEC 61966-2-1, with values in [0, 1]. Lab is CIE 1976 under D65: lightness L is in
[0, 100]; a and b are zero for grays and between -110 and 100 for sRGB.

A color is converted to the sRGB gray with the same relative luminance, so that an image and its
gray version have the same L.

Bins of a and b turn colors into classes, so that several can be likely at once (Zhang et al., 2016,
arXiv:1603.08511, section 2.2). Coarse colors have three bits per channel: a byte x becomes the
level floor(x / 32), and the levels of a pixel become the bin 64 r + 8 g + b (Kumar et al., 2021,
arXiv:2102.04432, section 4).
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from vit_jax.array_types import Float, Int, Num, UInt8

Values = np.ndarray | Array

WHITE = np.array([0.95047, 1.0, 1.08883])  # XYZ of D65
PRIMARIES = np.array([[0.64, 0.33], [0.30, 0.60], [0.15, 0.06]])  # (x, y) of red, green and blue
BREAK = 6 / 29  # CIE's cube root is linear below


def _rgb_to_xyz() -> Float[np.ndarray, '3 3']:
    """Return the matrix whose columns are the primaries, which add up to white."""
    x, y = PRIMARIES.T
    columns = np.stack([x / y, np.ones(3), (1 - x - y) / y])
    return columns * np.linalg.solve(columns, WHITE)


_XYZ = _rgb_to_xyz()
_RGB = np.linalg.inv(_XYZ)


def to_linear(rgb: Float[Values, '*B']) -> Float[Array, '*B']:
    """Convert sRGB to linear light, 0 for black and 1 for white."""
    return jnp.where(rgb <= 0.04045, rgb / 12.92, ((jnp.maximum(rgb, 0) + 0.055) / 1.055) ** 2.4)


def from_linear(light: Float[Values, '*B']) -> Float[Array, '*B']:
    """Convert linear light to sRGB; inverts `to_linear`."""
    root = 1.055 * jnp.maximum(light, 0.0031308) ** (1 / 2.4) - 0.055
    return jnp.where(light <= 0.0031308, 12.92 * light, root)


def luminance(rgb: Float[Values, '*B 3']) -> Float[Array, '*B 1']:
    """Relative luminance Y of sRGB, 0 to 1."""
    return _weighted_sum(to_linear(rgb), _XYZ[1])[..., None]


def to_gray(rgb: Float[Values, '*B 3']) -> Float[Array, '*B 1']:
    """Return the sRGB value of the gray with the same luminance as a color."""
    return from_linear(luminance(rgb))


def rgb_to_lab(rgb: Float[Values, '*B 3']) -> Float[Array, '*B 3']:
    """Convert sRGB to L, a and b."""
    light = to_linear(rgb)
    x, y, z = (
        _lab_curve(_weighted_sum(light, row / white))
        for row, white in zip(_XYZ, WHITE, strict=True)
    )
    return jnp.stack([116 * y - 16, 500 * (x - y), 200 * (y - z)], axis=-1)


def lab_to_linear(lab: Float[Values, '*B 3']) -> Float[Array, '*B 3']:
    """Convert Lab to linear red, green and blue; outside of [0, 1] for colors beyond sRGB."""
    y = (lab[..., 0] + 16) / 116
    curves = y + lab[..., 1] / 500, y, y - lab[..., 2] / 200
    xyz = jnp.stack([_inverse_curve(c) * w for c, w in zip(curves, WHITE, strict=True)], axis=-1)
    return jnp.stack([_weighted_sum(xyz, row) for row in _RGB], axis=-1)


def colorize(gray: Float[Values, '*B 1'], ab: Float[Values, '*B 2']) -> Float[Array, '*B 3']:
    """Return sRGB with the luminance of `gray` and the colors `ab`, as far as the gamut allows.

    A color outside of the gamut is moved toward the gray of the same luminance until it is inside:
    it loses saturation, but keeps luminance and dominant wavelength.
    """
    light = to_linear(gray)
    lightness = 116 * _lab_curve(light) - 16
    chroma = lab_to_linear(jnp.concatenate([lightness, ab], axis=-1)) - light
    max_scale = jnp.where(chroma > 0, 1 - light, light) / jnp.maximum(jnp.abs(chroma), 1e-12)
    share = jnp.minimum(max_scale.min(axis=-1, keepdims=True), 1)
    return jnp.clip(from_linear(light + share * chroma), 0, 1)


def to_bytes(values: Float[Values, '*B']) -> UInt8[Array, '*B']:
    """Round sRGB in [0, 1] to the nearest of 0..255."""
    return jnp.round(jnp.clip(values, 0, 1) * 255).astype(jnp.uint8)


def _weighted_sum(channels: Values, weights: np.ndarray) -> Array:
    """Compute a weighted sum of three channels in float32, which a matmul does not guarantee."""
    first, second, third = (channels[..., i] * float(weight) for i, weight in enumerate(weights))
    return jnp.asarray(first + second + third)


def _lab_curve(t: Values) -> Array:
    """Apply CIE's cube root, linear near zero."""
    return jnp.where(t > BREAK**3, jnp.cbrt(t), t / (3 * BREAK**2) + 4 / 29)


def _inverse_curve(t: Values) -> Array:
    return jnp.where(t > BREAK, t**3, 3 * BREAK**2 * (t - 4 / 29))


BIN_SIZE = 10  # in units of a and b
GAMUT_MARGIN = 13.5
NUM_BINS = 313
NEIGHBORS, SIGMA = 5, 5.0  # of the soft encoding
REBALANCE = 0.5  # lambda: share of the uniform distribution in the mixture with the color shares
TEMPERATURE = 0.38


@functools.cache
def bin_centers() -> Float[np.ndarray, 'Q 2']:
    """Return the center (a, b) of each bin, sorted.

    The bins are the multiples of 10 within 13.5 of an sRGB color. The paper gives only their
    number, 313; the margin is chosen to match it. 229 of the bins are sRGB colors at some
    lightness, and 261 are the nearest bin of such a color; the others surround these, so that the
    soft encoding finds all its neighbors.
    """
    from scipy.spatial import KDTree

    steps = np.linspace(0, 1, 64)
    # In (a, b) the faces of the cube cover the same area as the whole cube.
    cube = np.stack(np.meshgrid(steps, steps, [0.0, 1.0], indexing='ij'), axis=-1).reshape(-1, 3)
    faces = np.concatenate([np.roll(cube, shift, axis=1) for shift in range(3)])
    with jax.ensure_compile_time_eval():
        gamut = np.asarray(rgb_to_lab(faces.astype(np.float32)))[:, 1:]
    ticks = np.arange(-130, 131, BIN_SIZE)
    grid = np.stack(np.meshgrid(ticks, ticks, indexing='ij'), axis=-1).reshape(-1, 2)
    centers = grid[KDTree(gamut).query(grid)[0] <= GAMUT_MARGIN].astype(np.float32)
    centers.flags.writeable = False
    return centers


def _distances(ab: Float[Values, '*B 2']) -> Float[Array, '*B Q']:
    """Return squared distances to all bins."""
    middle = jnp.asarray(bin_centers())
    a, b = (jnp.square(ab[..., i, None] - middle[:, i]) for i in range(2))
    return a + b


def nearest_bin(ab: Float[Values, '*B 2']) -> Int[Array, '*B']:
    """Return the index of the nearest bin."""
    return jnp.argmin(_distances(ab), axis=-1)


def soft_encode(
    ab: Float[Values, '*B 2'],
) -> tuple[Int[Array, '*B 5'], Float[Array, '*B 5']]:
    """Return the five nearest bins, the nearest first, and their weights, which sum to 1.

    The weights are Gaussian in the distance, with a standard deviation of 5.
    """
    closeness, bins = jax.lax.top_k(-_distances(ab), NEIGHBORS)
    # XLA would merge a caller's slice of the bins with `top_k`'s own and sort all of them. A
    # barrier for both results at once crashes its compiler under `jax.pmap` on CPUs.
    bins = jax.lax.optimization_barrier(bins)
    return bins, jax.nn.softmax(closeness / (2 * SIGMA**2), axis=-1)


def annealed_mean(
    logits: Float[Array, '*B Q'], temperature: float = TEMPERATURE
) -> Float[Array, '*B 2']:
    """Return the mean color of the distribution at a temperature (equation 5).

    At 1 it is the plain mean, which is pale; toward 0 it becomes the most likely bin, which is
    patchy.
    """
    probs = jax.nn.softmax(logits / temperature, axis=-1)
    return jnp.stack([(probs * middle).sum(-1) for middle in bin_centers().T], axis=-1)


def class_weights(counts: Num[np.ndarray, 'Q'], mix: float = REBALANCE) -> Float[np.ndarray, 'Q']:
    """Compute the loss weight of each bin, larger for rare colors (equation 4).

    Shares of bins are smoothed in (a, b) by a Gaussian with a standard deviation of 5 and mixed
    with the uniform distribution. The weights are their inverses, scaled so that the mean weight
    under the smoothed shares is 1.

    Args:
      counts: Number of colors in each bin.
      mix: Lambda, 0 for pure inverses, 1 for no rebalancing.
    """
    distances = np.square(bin_centers()[:, None] - bin_centers()[None]).sum(-1)
    kernel = np.exp(-distances / (2 * SIGMA**2))
    shares = kernel / kernel.sum(axis=0) @ (counts / counts.sum())
    weights = 1 / ((1 - mix) * shares + mix / len(shares))
    return (weights / (shares * weights).sum()).astype(np.float32)


LEVELS = 8  # per channel
NUM_COARSE_BINS = LEVELS**3
LEVEL_WIDTH = 256 // LEVELS  # bytes per level

# ITU-R BT.601, as in `tf.image.rgb_to_grayscale`.
GRAY_WEIGHTS = (0.2989, 0.5870, 0.1140)


def to_coarse_bins(image: UInt8[Array, '*B 3']) -> Int[Array, '*B']:
    """Return the coarse bin of each pixel, in 0..511."""
    levels = image.astype(jnp.int32) // LEVEL_WIDTH
    return (levels * jnp.array([LEVELS**2, LEVELS, 1])).sum(-1)


def from_coarse_bins(bins: Int[Array, '*B']) -> UInt8[Array, '*B 3']:
    """Return the center color of each bin: 32 x level + 16 in each channel."""
    levels = bins[..., None] // jnp.array([LEVELS**2, LEVELS, 1]) % LEVELS
    return (levels * LEVEL_WIDTH + LEVEL_WIDTH // 2).astype(jnp.uint8)


def to_luma(image: UInt8[Array, '*B 3']) -> UInt8[Array, '*B']:
    """Return the luma of each pixel, rounded; a gray pixel keeps its value."""
    luma = (image.astype(jnp.float32) * jnp.array(GRAY_WEIGHTS)).sum(-1)
    return jnp.round(luma).astype(jnp.uint8)


def downsample(image: UInt8[Array, '*B H W C'], factor: int) -> Float[Array, '*B h w C']:
    """Average the color of each block of `factor` x `factor` pixels.

    Raises:
      ValueError: if blocks do not tile the image.
    """
    *batch, height, width, channels = image.shape
    if height % factor or width % factor:
        raise ValueError(f'blocks of {factor} pixels do not tile {width} x {height} pixels')
    blocks = (*batch, height // factor, factor, width // factor, factor, channels)
    return image.astype(jnp.float32).reshape(blocks).mean((-4, -2))


def upsample(image: UInt8[Array, '*B h w C'], factor: int) -> UInt8[Array, '*B H W C']:
    """Repeat each pixel as a block of `factor` x `factor` pixels."""
    return image.repeat(factor, axis=-3).repeat(factor, axis=-2)
