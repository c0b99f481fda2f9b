"""Layouts of kernels in this package: which axes are contracted, which are of the result."""

from __future__ import annotations

import re
from typing import Any

from vit_jax.tree_paths import unrolled

Axes = tuple[int, ...]

# Projections to heads; the letters are those of their C parts.
TO_HEADS = re.compile(r'/([qkv]+)/(kernel|bias)$')


def is_stacked(path: str, leaf: Any) -> bool:
    """Whether a parameter has the scanned blocks on axis 0."""
    return unrolled(path, leaf) != [path]


def kernel_axes(path: str, ndim: int) -> tuple[Axes, Axes]:
    """The axes of a kernel's inputs and outputs; any others count independent matrices.

    Dense layers have [in, out], convolutions [H, W, in, out], projections to heads [D, C, H, K] and
    from them [H, K, D].

    Args:
      path: of the parameter.
      ndim: number of its axes without that of scanned blocks.
    """
    if TO_HEADS.search(path):
        return (0,), (2, 3)
    return tuple(range(ndim - 1)), (ndim - 1,)
