"""Resize parameters for images, and patches, of a different size."""

from __future__ import annotations

import math
from typing import Any

import jax
import numpy as np

from vit_jax.errors import UserError
from vit_jax.ops import resize

Size = tuple[int, int]  # height and width in pixels
Grid = tuple[int, int]  # rows and columns of patches
Params = dict[str, Any]  # nested arrays
Resized = tuple[Params, list[str]]  # parameters, and a line for each change

# How biases are interpolated, by the method for positions: as in transformers, and in timm.
_BIAS_METHODS = {'bicubic': 'linear', 'antialiased': 'geometric'}


def resize_positions(
    params: Params, old_grid: Grid | None, new_grid: Grid, prefix: int, method: str
) -> Resized:
    """Resize `pos_embed` to a different grid of patches, including one with as many patches.

    Args:
      params: Tree with `pos_embed` [1 N D].
      old_grid: Grid of `pos_embed`; None for a square.
      new_grid: Grid to resize it to.
      prefix: Number of rows of `pos_embed` before the patches.
      method: See `ops.resize.grid`.

    Returns:
      The parameters. A `pos_embed` of another model, whose rows are not the old grid, is left
      unchanged.

    Raises:
      UserError: if `old_grid` is None and the rows do not form a square.
    """
    table = params['pos_embed']
    rows = table.shape[1] - prefix
    old_grid = old_grid or _square(rows)
    if old_grid is None and rows != math.prod(new_grid):
        raise UserError(
            f'pos_embed has rows for {rows} patches, which form no square, and '
            f'cannot be resized to {new_grid[1]} x {new_grid[0]}'
        )
    if old_grid in (None, new_grid) or rows != math.prod(old_grid):
        return params, []
    table = resize.position_embedding(table, old_grid, new_grid, method, prefix)
    sizes = (f'{width} x {height}' for height, width in (old_grid, new_grid))
    note = f'pos_embed: {" patches resized to ".join(sizes)} ({method})'
    return params | {'pos_embed': table}, [note]


def resize_relative(params: Params, new_grid: Grid, method: str) -> Resized:
    """Resize tables of `nn.positions.RelativeBias` to a different grid of patches, like images.

    Args:
      params: A tree whose layers `position_bias` have tables [2h-1 2w-1 H], or [L 2h-1 2w-1 H].
      new_grid: Rows and columns of the new grid.
      method: Method for position embeddings, see `ops.resize.grid`. 'bicubic' resizes biases by
        'linear', 'antialiased' by 'geometric'.
    """
    method = _BIAS_METHODS.get(method, method)
    sides = 2 * new_grid[0] - 1, 2 * new_grid[1] - 1
    notes = set()

    def resize_leaf(path: tuple[Any, ...], leaf: Any) -> Any:
        names = [str(key.key) for key in path]
        if names[-2:] != ['position_bias', 'table'] or leaf.shape[-3:-1] == sides:
            return leaf
        notes.add(f'position_bias: resized to {new_grid[1]} x {new_grid[0]} patches ({method})')
        if leaf.ndim == 3:
            return resize.grid(leaf, sides, method)
        return np.stack([resize.grid(table, sides, method) for table in leaf])

    return jax.tree_util.tree_map_with_path(resize_leaf, params), sorted(notes)


def resize_axial(params: Params, new_grid: Grid, method: str) -> Resized:
    """Resize `params` of axial attention (`nn.axial`) to a different grid.

    Positions and the weights of summaries are resized like a picture. Relative biases are
    stretched with the image, so that the bias of distance 0 stays.

    Args:
      params: A tree with layers `rows_i` and `columns_i`.
      new_grid: Rows and columns of the new grid.
      method: See `ops.resize.grid`.
    """
    changed = set()

    def resize_leaf(path: tuple[Any, ...], leaf: Any) -> Any:
        names = [str(key.key) for key in path]
        new = _resize_axial_leaf(names, leaf, new_grid, method)
        if new is None or new.shape == leaf.shape:
            return leaf
        changed.add(names[-1])
        return new

    params = jax.tree_util.tree_map_with_path(resize_leaf, params)
    size = f'{new_grid[1]} x {new_grid[0]} places ({method})'
    return params, [f'{", ".join(sorted(changed))}: resized to {size}'] if changed else []


def _resize_axial_leaf(names: list[str], leaf: Any, size: Grid, method: str) -> np.ndarray | None:
    """Resize a parameter of `nn.axial`; None if it does not depend on the grid."""
    height, width = size
    match names:
        case [*_, 'positions', 'rows']:
            return resize.grid(leaf, (height, 1), method)
        case [*_, 'positions', 'columns']:
            return resize.grid(leaf[None], (1, width), method)[0]
        case [*_, 'weights']:
            return resize.grid(leaf, size, method)
        case [*_, layer, 'attention', 'relative_bias']:
            places = width if layer.startswith('rows') else height
            return resize.grid(leaf[..., None], (len(leaf), 2 * places - 1), method)[..., 0]
    return None


def resize_patches(params: Params, patch_size: int) -> Resized:
    """Resize the kernel of `patch_embed` to patches of a different size.

    Uses the pseudoinverse of FlexiViT, arXiv:2212.08013, section 3.4.
    """
    kernel, size = params['patch_embed']['kernel'], (patch_size, patch_size)
    if kernel.shape[:2] == size:
        return params, []
    new = params['patch_embed'] | {'kernel': resize.pinv_patch_kernel(kernel, size)}
    sizes = (f'{width} x {height}' for height, width in (kernel.shape[:2], size))
    return params | {'patch_embed': new}, [f'patch_embed: {" resized to ".join(sizes)}']


def _square(patches: int) -> Grid | None:
    side = math.isqrt(max(patches, 0))
    return (side, side) if side * side == patches else None
