"""Resizing of parameters that depend on the size of the images or of the patches."""

from __future__ import annotations

import math
from typing import Any

import jax
import numpy as np

from vit_jax.errors import UserError
from vit_jax.models.base import Params, Resized
from vit_jax.ops import resize

Grid = tuple[int, int]  # rows and columns of patches

# By the interpolation of positions: transformers' of biases, and timm's.
_OF_BIASES = {'bicubic': 'linear', 'antialiased': 'geometric'}


def positions(
    params: Params, old_grid: Grid | None, new_grid: Grid, prefix: int, method: str
) -> Resized:
    """Resize `pos_embed` to another grid of patches, including one with as many patches.

    Args:
      params: the tree that holds `pos_embed` [1 N D].
      old_grid: the grid of `pos_embed`; None if it is a square.
      new_grid: the grid to resize it to.
      prefix: rows of `pos_embed` before those of the patches.
      method: see `ops.resize.grid`.

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
            f'cannot be resized to {new_grid[0]} x {new_grid[1]}'
        )
    if old_grid in (None, new_grid) or rows != math.prod(old_grid):
        return params, []
    table = resize.position_embedding(table, old_grid, new_grid, method, prefix)
    sizes = (f'{height} x {width}' for height, width in (old_grid, new_grid))
    note = f'pos_embed: {" patches resized to ".join(sizes)} ({method})'
    return params | {'pos_embed': table}, [note]


def relative(params: Params, new_grid: Grid, method: str) -> Resized:
    """Resize the tables of `nn.relative_positions` to another grid of patches, like pictures.

    Args:
      params: a tree whose layers `position_bias` have tables [2h-1 2w-1 H], or [L 2h-1 2w-1 H].
      new_grid: rows and columns of the new grid.
      method: of position embeddings, see `ops.resize.grid`; 'bicubic' ones go with linear biases,
        'antialiased' ones with 'geometric' biases.
    """
    method = _OF_BIASES.get(method, method)
    sides = 2 * new_grid[0] - 1, 2 * new_grid[1] - 1
    notes = set()

    def resized(path: tuple[Any, ...], leaf: Any) -> Any:
        names = [str(key.key) for key in path]
        if names[-2:] != ['position_bias', 'table'] or leaf.shape[-3:-1] == sides:
            return leaf
        notes.add(f'position_bias: resized to {new_grid[0]} x {new_grid[1]} patches ({method})')
        if leaf.ndim == 3:
            return resize.grid(leaf, sides, method)
        return np.stack([resize.grid(table, sides, method) for table in leaf])

    return jax.tree_util.tree_map_with_path(resized, params), sorted(notes)


def axial(params: Params, new_grid: Grid, method: str) -> Resized:
    """Resize `params` of axial attention (`nn.axial`) to another grid.

    Positions and the weights of summaries are resized like a picture. Relative biases are
    stretched with the image, so that the bias of distance 0 stays.

    Args:
      params: a tree with layers `rows_i` and `columns_i`.
      new_grid: rows and columns of the new grid.
      method: see `ops.resize.grid`.
    """
    changed = set()

    def resized(path: tuple[Any, ...], leaf: Any) -> Any:
        names = [str(key.key) for key in path]
        new = _of_place(names, leaf, new_grid, method)
        if new is None or new.shape == leaf.shape:
            return leaf
        changed.add(names[-1])
        return new

    params = jax.tree_util.tree_map_with_path(resized, params)
    size = f'{new_grid[0]} x {new_grid[1]} places ({method})'
    return params, [f'{", ".join(sorted(changed))}: resized to {size}'] if changed else []


def _of_place(names: list[str], leaf: Any, size: Grid, method: str) -> np.ndarray | None:
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


def patch_size(params: Params) -> int | None:
    """The side in pixels of the patches of `patch_embed`; None if there is no such kernel."""
    kernel = params.get('patch_embed', {}).get('kernel')
    return None if kernel is None or kernel.ndim != 4 else kernel.shape[0]


def patches(params: Params, patch_size: int) -> Resized:
    """Resize the kernel of `patch_embed` to patches of another size.

    Uses the pseudoinverse of FlexiViT, arXiv:2212.08013, section 3.4.
    """
    kernel, size = params['patch_embed']['kernel'], (patch_size, patch_size)
    if kernel.shape[:2] == size:
        return params, []
    new = params['patch_embed'] | {'kernel': resize.pinv_patch_kernel(kernel, size)}
    sizes = (f'{height} x {width}' for height, width in (kernel.shape[:2], size))
    return params | {'patch_embed': new}, [f'patch_embed: {" resized to ".join(sizes)}']


def _square(patches: int) -> Grid | None:
    side = math.isqrt(max(patches, 0))
    return (side, side) if side * side == patches else None
