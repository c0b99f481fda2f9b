"""Resizing position embeddings and patch kernels to other grids and patch sizes, in NumPy.

Every method is linear and separable: one matrix for the rows and one for the columns.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np

from vit_jax.array_types import Float
from vit_jax.errors import UserError, nearest

Size = tuple[int, int]  # height, width
Values = Any  # NumPy or JAX array; JAX is not imported here


def bilinear_align_corners(
    x: Float[Values, 'h w D'], size: Size
) -> Float[np.ndarray, 'new_h new_w D']:
    """Interpolate linearly, aligning corners.

    Equal to `scipy.ndimage.zoom` with order 1, which vision_transformer and big_vision use to
    resize position embeddings.
    """
    return _resize(x, size, _align_corners)


def bicubic_half_pixel(x: Float[Values, 'h w D'], size: Size) -> Float[np.ndarray, 'new_h new_w D']:
    """Interpolate cubically between cell centers, with a = -0.75 and no antialiasing.

    Equal to PyTorch's `interpolate(mode='bicubic')`, which DeiT and transformers use to resize
    position embeddings. Keys, 1981, equation 4, uses a = -0.5 instead.
    """
    return _resize(x, size, _bicubic)


def bicubic_offset(x: Float[Values, 'h w D'], size: Size) -> Float[np.ndarray, 'new_h new_w D']:
    """Interpolate like `bicubic_half_pixel`, as if the new grid were a tenth of a cell longer.

    DINO and DINOv2 resize position embeddings this way: their authors add 0.1 to the sides of the
    new grid, which determine the step size of PyTorch's `interpolate(scale_factor=...)`.
    """
    return _resize(x, size, lambda old, new: _bicubic(old, new, extra=0.1))


def bicubic_antialiased(
    x: Float[Values, 'h w D'], size: Size
) -> Float[np.ndarray, 'new_h new_w D']:
    """Interpolate cubically between cell centers, with a = -0.5 and antialiasing.

    Equal to PyTorch's `interpolate(mode='bicubic', antialias=True)`, which timm uses to resize
    position embeddings.
    """
    return _resize(x, size, lambda old, new: _antialiased(old, new, _keys))


def linear_matrix(old: int, new: int) -> Float[np.ndarray, 'new old']:
    """Return the matrix of `linear_half_pixel` for one axis."""
    return _bilinear(old, new)


def align_corners_matrix(old: int, new: int) -> Float[np.ndarray, 'new old']:
    """Return the matrix of `bilinear_align_corners` for one axis, in float32."""
    return _align_corners(old, new).astype(np.float32)


def bicubic_matrix(old: int, new: int) -> Float[np.ndarray, 'new old']:
    """Return the matrix of `bicubic_half_pixel` for one axis, in float32."""
    return _bicubic(old, new).astype(np.float32)


def linear_half_pixel(x: Float[Values, 'h w D'], size: Size) -> Float[np.ndarray, 'new_h new_w D']:
    """Interpolate linearly between cell centers, without antialiasing.

    Equal to PyTorch's `interpolate(mode='bilinear')`, which transformers uses to resize the
    relative position biases of BEiT.
    """
    return _resize(x, size, _bilinear)


def bilinear_half_pixel(
    x: Float[Values, 'h w D'], size: Size
) -> Float[np.ndarray, 'new_h new_w D']:
    """Interpolate linearly between cell centers, with antialiasing when downsampling."""
    return _resize(x, size, lambda old, new: _antialiased(old, new, _linear))


def geometric(x: Float[Values, 'h w D'], size: Size) -> Float[np.ndarray, 'new_h new_w D']:
    """Interpolate linearly by offset, with the old offsets spaced geometrically.

    Offsets are counted from the center, and the steps between the old ones form a geometric series
    that ends at the new border, so that near neighbors keep their values. timm resizes the relative
    position biases of BEiT this way.
    """
    return _resize(x, size, _geometric)


def pinv_patch_kernel(
    kernel: Float[Values, 'p q C D'], size: Size
) -> Float[np.ndarray, 'new_p new_q C D']:
    """Resize a patch kernel by PI-resize, FlexiViT, arXiv:2212.08013, section 3.4.

    The result is pinv(B^T) vec(kernel), where the matrix B resizes a patch (bilinear between
    centers, antialiased). An enlarged patch then gives the same token as the original; a shrunk
    patch gives the closest token on average over patches of independent pixels.
    """
    return _resize(kernel, size, pinv_matrix)


@functools.cache
def pinv_matrix(old: int, new: int) -> Float[np.ndarray, 'new old']:
    """Return the matrix of `pinv_patch_kernel` for one side of the patches."""
    # The pseudoinverse of a Kronecker product is the product of the pseudoinverses.
    return np.linalg.pinv(_antialiased(old, new, _linear).T)


def grid(x: Float[Values, 'h w D'], size: Size, method: str) -> Float[np.ndarray, 'i j D']:
    """Resize a grid of learned vectors.

    Args:
      x: Vectors of the old grid.
      size: Rows and columns of the new grid.
      method: 'bilinear' (`bilinear_align_corners`), 'bicubic' (`bicubic_half_pixel`),
        'bicubic_offset', 'antialiased' (`bicubic_antialiased`), 'linear' (`linear_half_pixel`),
        'linear_antialiased' (`bilinear_half_pixel`) or 'geometric'. With the suffix '_cropped', the
        grid is resized to a square of the longer side and cropped to its first rows and columns, so
        that cells keep their aspect ratio.

    Raises:
      UserError: if there is no such method.
    """
    plain = method.removesuffix(CROPPED)
    if plain not in _METHODS:
        raise UserError(nearest('method to resize position embeddings', plain, _METHODS))
    if plain == method:
        return _METHODS[plain](x, size)
    return _METHODS[plain](x, (max(size), max(size)))[: size[0], : size[1]]


def position_embedding(
    table: Float[Values, '1 N D'],
    old_grid: Size,
    new_grid: Size,
    method: str = 'bilinear',
    num_prefix: int = 0,
) -> Float[np.ndarray, '1 M D']:
    """Resize a position embedding to a different grid; the first `num_prefix` rows stay unchanged.

    Args:
      table: `num_prefix` rows (class token), then the grid in raster order.
      old_grid, new_grid: Rows and columns of patches.
      method: Resizing method, see `grid`.
      num_prefix: Number of rows before the grid.

    Raises:
      UserError: if there is no such method, a grid is empty, or the table does not fit `old_grid`.
    """
    if min(*old_grid, *new_grid) < 1:
        raise UserError(
            f'a grid needs at least 1 x 1 patches: {_format_grid(old_grid)}, '
            f'{_format_grid(new_grid)}'
        )
    table = np.asarray(table)
    rows = table.shape[1] - num_prefix
    if rows != old_grid[0] * old_grid[1]:
        raise UserError(
            f'a position embedding of {rows} patches does not fit a grid of '
            f'{_format_grid(old_grid)}'
        )
    prefix, patches = table[0, :num_prefix], table[0, num_prefix:]
    resized = grid(patches.reshape(*old_grid, -1), new_grid, method)
    return np.concatenate([prefix, resized.reshape(-1, resized.shape[-1])])[None]


CROPPED = '_cropped'
_METHODS = {
    'bilinear': bilinear_align_corners,
    'bicubic': bicubic_half_pixel,
    'bicubic_offset': bicubic_offset,
    'antialiased': bicubic_antialiased,
    'linear': linear_half_pixel,
    'linear_antialiased': bilinear_half_pixel,
    'geometric': geometric,
}


def _resize(x: Values, size: Size, matrix: Callable[[int, int], np.ndarray]) -> np.ndarray:
    """Apply `matrix(old, new)` to axes 0 and 1, in float64; keep the dtype."""
    x = np.asarray(x)
    if x.shape[:2] == tuple(size):
        return x
    rows, columns = (matrix(old, new) for old, new in zip(x.shape[:2], size, strict=True))
    return np.einsum('ai,bj,ij...->ab...', rows, columns, x, optimize=True).astype(x.dtype)


@functools.cache
def _align_corners(old: int, new: int) -> Float[np.ndarray, 'new old']:
    positions = np.arange(new) * ((old - 1) / max(new - 1, 1))
    return np.maximum(1.0 - np.abs(positions[:, None] - np.arange(old)), 0.0)


@functools.cache
def _bilinear(old: int, new: int) -> Float[np.ndarray, 'new old']:
    positions = np.clip(_centers(old, new), 0, old - 1)
    return _linear(np.abs(positions[:, None] - np.arange(old)))


@functools.cache
def _geometric(old: int, new: int) -> Float[np.ndarray, 'new old']:
    half, low, high = old // 2, 1.01, 1.5
    while high - low > 1e-6:
        ratio = (low + high) / 2
        is_too_far = (1 - ratio**half) / (1 - ratio) > new // 2
        low, high = (low, ratio) if is_too_far else (ratio, high)
    offsets = np.cumsum(ratio ** np.arange(half))
    positions = np.concatenate([-offsets[::-1], [0.0], offsets])
    return np.stack(
        [np.interp(np.arange(new) - new // 2, positions, row) for row in np.eye(old)], axis=1
    )


@functools.cache
def _bicubic(old: int, new: int, extra: float = 0.0) -> Float[np.ndarray, 'new old']:
    positions = _centers(old, new, extra)
    first = np.floor(positions).astype(int) - 1
    taps = first[:, None] + np.arange(4)
    weights = _cubic(np.abs(positions[:, None] - taps), a=-0.75)
    matrix = np.zeros((new, old))
    # The border cell is repeated outside of the grid.
    np.add.at(matrix, (np.arange(new)[:, None], np.clip(taps, 0, old - 1)), weights)
    return matrix


@functools.cache
def _antialiased(
    old: int, new: int, kernel: Callable[[np.ndarray], np.ndarray]
) -> Float[np.ndarray, 'new old']:
    """Return a kernel's weights over the old cells below each new cell, summing to 1."""
    distance = np.abs(_centers(old, new)[:, None] - np.arange(old))
    weights = kernel(distance / max(old / new, 1.0))
    return weights / weights.sum(axis=1, keepdims=True)


def _centers(old: int, new: int, extra: float = 0.0) -> Float[np.ndarray, 'new']:
    """Return the centers of new cells, in units where the old ones are at 0, 1, ...

    `extra` is how much longer the new grid is than its cells, in cells.
    """
    return (np.arange(new) + 0.5) * (old / (new + extra)) - 0.5


def _linear(x: Float[np.ndarray, '*B']) -> Float[np.ndarray, '*B']:
    return np.maximum(1.0 - x, 0.0)


def _keys(x: Float[np.ndarray, '*B']) -> Float[np.ndarray, '*B']:
    """Evaluate the kernel of Keys, 1981, equation 4, which is zero beyond a distance of 2."""
    return np.where(x < 2, _cubic(x, a=-0.5), 0.0)


def _cubic(x: Float[np.ndarray, '*B'], a: float) -> Float[np.ndarray, '*B']:
    """Evaluate the cubic convolution kernel of Keys, 1981, at distances of up to 2."""
    near = ((a + 2) * x - (a + 3)) * x * x + 1
    far = ((a * x - 5 * a) * x + 8 * a) * x - 4 * a
    return np.where(x <= 1, near, far)


def _format_grid(grid: Size) -> str:
    return f'{grid[1]} x {grid[0]}'
