"""Position embeddings and patch kernels for other grids and patch sizes. Parameter-free, in NumPy.

Every resize here is linear and separable: a matrix for the rows and one for the columns.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np

from vit_jax.array_types import Float
from vit_jax.errors import UserError, nearest

Size = tuple[int, int]  # height, width
Values = Any  # an array of NumPy or JAX, which is not imported here


def bilinear_align_corners(
    x: Float[Values, 'h w D'], size: Size
) -> Float[np.ndarray, 'new_h new_w D']:
    """Linear interpolation that maps corners onto corners.

    Equal to `scipy.ndimage.zoom` of order 1, by which vision_transformer and big_vision resize
    their position embeddings.
    """
    return _resize(x, size, _align_corners)


def bicubic_half_pixel(x: Float[Values, 'h w D'], size: Size) -> Float[np.ndarray, 'new_h new_w D']:
    """Cubic interpolation between the centers of cells, with a = -0.75 and no antialiasing.

    Equal to PyTorch's `interpolate(mode='bicubic')`, by which DeiT and transformers resize their
    position embeddings. Keys, 1981, equation 4, has a = -0.5 instead.
    """
    return _resize(x, size, _bicubic)


def bicubic_offset(x: Float[Values, 'h w D'], size: Size) -> Float[np.ndarray, 'new_h new_w D']:
    """`bicubic_half_pixel` as if the new grid had a tenth of a cell more on each side.

    DINO and DINOv2 resize their position embeddings like this: their authors add 0.1 to the sides
    of the new grid, from which PyTorch's `interpolate(scale_factor=...)` takes its steps.
    """
    return _resize(x, size, lambda old, new: _bicubic(old, new, extra=0.1))


def bicubic_antialiased(
    x: Float[Values, 'h w D'], size: Size
) -> Float[np.ndarray, 'new_h new_w D']:
    """Cubic interpolation between the centers of cells, with a = -0.5, over all that a cell covers.

    Equal to PyTorch's `interpolate(mode='bicubic', antialias=True)`, by which timm resizes its
    position embeddings.
    """
    return _resize(x, size, lambda old, new: _antialiased(old, new, _keys))


def linear_matrix(old: int, new: int) -> Float[np.ndarray, 'new old']:
    """The factor of `linear_half_pixel` for one axis."""
    return _bilinear(old, new)


def bicubic_matrix(old: int, new: int) -> Float[np.ndarray, 'new old']:
    """The factor of `bicubic_half_pixel` for one axis, in float32."""
    return _bicubic(old, new).astype(np.float32)


def linear_half_pixel(x: Float[Values, 'h w D'], size: Size) -> Float[np.ndarray, 'new_h new_w D']:
    """Linear interpolation between the centers of cells, without antialiasing.

    Equal to PyTorch's `interpolate(mode='bilinear')`, by which transformers resizes the biases of
    relative positions of BEiT.
    """
    return _resize(x, size, _bilinear)


def bilinear_half_pixel(
    x: Float[Values, 'h w D'], size: Size
) -> Float[np.ndarray, 'new_h new_w D']:
    """Linear interpolation between the centers of cells, antialiased when downsampling."""
    return _resize(x, size, lambda old, new: _antialiased(old, new, _linear))


def geometric(x: Float[Values, 'h w D'], size: Size) -> Float[np.ndarray, 'new_h new_w D']:
    """Linear interpolation of values by offset: the old ones grow apart with the distance from 0.

    Offsets are counted from the middle, and the steps between the old ones form a geometric series
    that ends at the new border, so that near neighbors keep their values. timm resizes the biases
    of relative positions of BEiT like this.
    """
    return _resize(x, size, _geometric)


def pinv_patch_kernel(
    kernel: Float[Values, 'p q C D'], size: Size
) -> Float[np.ndarray, 'new_p new_q C D']:
    """The kernel for patches resized to `size`: PI-resize, FlexiViT, arXiv:2212.08013, section 3.4.

    It is pinv(B^T) vec(kernel), where the matrix B resizes a patch (bilinear between centers,
    antialiased). An enlarged patch then gives the token of the original; a shrunk one gives the
    closest token on average over patches of independent pixels.
    """
    return _resize(kernel, size, pinv_matrix)


@functools.cache
def pinv_matrix(old: int, new: int) -> Float[np.ndarray, 'new old']:
    """The factor of `pinv_patch_kernel` for one side of the patches."""
    # The pseudoinverse of a Kronecker product is that of its factors.
    return np.linalg.pinv(_antialiased(old, new, _linear).T)


def grid(x: Float[Values, 'h w D'], size: Size, method: str) -> Float[np.ndarray, 'i j D']:
    """Resize a grid of learned vectors.

    Args:
      x: the vectors of the old grid.
      size: rows and columns of the new grid.
      method: 'bilinear' (`bilinear_align_corners`), 'bicubic' (`bicubic_half_pixel`),
        'bicubic_offset', 'antialiased' (`bicubic_antialiased`), 'linear' (`linear_half_pixel`),
        'linear_antialiased' (`bilinear_half_pixel`) or 'geometric'. With '_cropped' behind it, the
        grid is resized to a square of the longer side, whose first rows and columns are taken, so
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
    """Resize a position embedding to another grid of patches; the `num_prefix` first rows stay.

    Args:
      table: `num_prefix` rows (of the class token), then the grid line by line.
      old_grid, new_grid: rows and columns of patches.
      method: of `grid`.
      num_prefix: number of rows that are not in the grid.

    Raises:
      UserError: if there is no such method, a grid is empty, or the table is not of `old_grid`.
    """
    if min(*old_grid, *new_grid) < 1:
        raise UserError(f'a grid has at least 1 x 1 patches: {_text(old_grid)}, {_text(new_grid)}')
    table = np.asarray(table)
    rows = table.shape[1] - num_prefix
    if rows != old_grid[0] * old_grid[1]:
        raise UserError(f'a position embedding of {rows} patches is not of {_text(old_grid)}')
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
    """Apply `matrix(old, new)` to axes 0 and 1, in float64; the dtype stays."""
    x = np.asarray(x)
    if x.shape[:2] == tuple(size):
        return x
    rows, columns = (matrix(old, new) for old, new in zip(x.shape[:2], size, strict=True))
    return np.einsum('ai,bj,ij...->ab...', rows, columns, x, optimize=True).astype(x.dtype)


@functools.cache
def _align_corners(old: int, new: int) -> Float[np.ndarray, 'new old']:
    at = np.arange(new) * ((old - 1) / max(new - 1, 1))
    return np.maximum(1.0 - np.abs(at[:, None] - np.arange(old)), 0.0)


@functools.cache
def _bilinear(old: int, new: int) -> Float[np.ndarray, 'new old']:
    at = np.clip(_centers(old, new), 0, old - 1)
    return _linear(np.abs(at[:, None] - np.arange(old)))


@functools.cache
def _geometric(old: int, new: int) -> Float[np.ndarray, 'new old']:
    half, low, high = old // 2, 1.01, 1.5
    while high - low > 1e-6:
        ratio = (low + high) / 2
        beyond = (1 - ratio**half) / (1 - ratio) > new // 2
        low, high = (low, ratio) if beyond else (ratio, high)
    offsets = np.cumsum(ratio ** np.arange(half))
    at = np.concatenate([-offsets[::-1], [0.0], offsets])
    return np.stack([np.interp(np.arange(new) - new // 2, at, row) for row in np.eye(old)], axis=1)


@functools.cache
def _bicubic(old: int, new: int, extra: float = 0.0) -> Float[np.ndarray, 'new old']:
    at = _centers(old, new, extra)
    first = np.floor(at).astype(int) - 1
    taps = first[:, None] + np.arange(4)
    weights = _cubic(np.abs(at[:, None] - taps), a=-0.75)
    matrix = np.zeros((new, old))
    # The border is repeated beyond itself.
    np.add.at(matrix, (np.arange(new)[:, None], np.clip(taps, 0, old - 1)), weights)
    return matrix


@functools.cache
def _antialiased(
    old: int, new: int, kernel: Callable[[np.ndarray], np.ndarray]
) -> Float[np.ndarray, 'new old']:
    """A kernel's weights over the cells that a new one covers; they sum to 1 at the border too."""
    distance = np.abs(_centers(old, new)[:, None] - np.arange(old))
    weights = kernel(distance / max(old / new, 1.0))
    return weights / weights.sum(axis=1, keepdims=True)


def _centers(old: int, new: int, extra: float = 0.0) -> Float[np.ndarray, 'new']:
    """The centers of new cells, in units in which the old ones are at 0, 1, ...

    `extra` is the part of a cell that the new grid is longer than its cells.
    """
    return (np.arange(new) + 0.5) * (old / (new + extra)) - 0.5


def _linear(x: Float[np.ndarray, '*B']) -> Float[np.ndarray, '*B']:
    return np.maximum(1.0 - x, 0.0)


def _keys(x: Float[np.ndarray, '*B']) -> Float[np.ndarray, '*B']:
    """The kernel of Keys, 1981, equation 4, which is zero from a distance of 2 on."""
    return np.where(x < 2, _cubic(x, a=-0.5), 0.0)


def _cubic(x: Float[np.ndarray, '*B'], a: float) -> Float[np.ndarray, '*B']:
    """The cubic convolution kernel of Keys, 1981, at distances of up to 2."""
    near = ((a + 2) * x - (a + 3)) * x * x + 1
    far = ((a * x - 5 * a) * x + 8 * a) * x - 4 * a
    return np.where(x <= 1, near, far)


def _text(grid: Size) -> str:
    return f'{grid[1]} x {grid[0]}'
