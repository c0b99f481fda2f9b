"""Sizes of a model from the shapes of its parameters."""

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
      source: the name of the file for messages.
      label: our name -> the parameter's name for messages.
      name: our name of the parameter.
      ndim: number of axes.

    Raises:
      UserError: if it is missing, or has another number of axes.
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
      UserError: if patches are not square, or as `shape_of`.
    """
    rows, columns, _, width = shape_of(flat, source, label, 'patch_embed/kernel', 4)
    if rows != columns:
        raise UserError(f'{source}: patches of {rows}x{columns} pixels; only squares are supported')
    return rows, width
