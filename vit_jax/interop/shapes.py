"""What the shapes of parameters tell of a model."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

from vit_jax.errors import UserError


def shape_of(
    flat: Mapping[str, np.ndarray], source: str, label: Callable[[str], str], name: str, ndim: int
) -> tuple[int, ...]:
    """The shape of a parameter.

    Args:
      flat: arrays by our names.
      source: what to call the file.
      label: what to call a parameter, by our name.
      name: ours.
      ndim: number of axes.

    Raises:
      UserError: if it is not there, or has another number of axes.
    """
    if name not in flat:
        raise UserError(f'{source}: {label(name)} is not in the file')
    if flat[name].ndim != ndim:
        raise UserError(f'{source}: {label(name)} cannot have shape {flat[name].shape}')
    return flat[name].shape


def patches(
    flat: Mapping[str, np.ndarray], source: str, label: Callable[[str], str]
) -> tuple[int, int]:
    """Side of a patch in pixels, and width of its token.

    Raises:
      UserError: if patches are no squares, or as `shape_of`.
    """
    rows, columns, _, width = shape_of(flat, source, label, 'patch_embed/kernel', 4)
    if rows != columns:
        raise UserError(f'{source}: patches of {rows}x{columns} pixels; only squares are supported')
    return rows, width
