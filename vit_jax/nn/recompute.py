"""Recomputation of blocks in the backward pass (Chen et al., 2016, arXiv:1604.06174).

A block always keeps its input. `remat` selects the other values that it keeps:

    False      all that the backward pass needs
    'dots'     the products with kernels, but not those between tokens: only attention and
               elementwise operations are recomputed
    'names'    the heads' results and the hidden layer of the MLP before its activation: the
               projections around attention are recomputed too, a third of the products
    'nothing'  nothing; also written True
"""

from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
from jax import Array
from jax.ad_checkpoint import checkpoint_name

from vit_jax.errors import UserError, nearest

ATTENDED, HIDDEN = 'attended', 'hidden'
_policies = jax.checkpoint_policies
# The first keeps most.
POLICIES: dict[str, Callable[..., Any]] = {
    'dots': _policies.dots_with_no_batch_dims_saveable,
    'names': _policies.save_only_these_names(ATTENDED, HIDDEN),
    'nothing': _policies.nothing_saveable,
}


def check_remat(remat: bool | str) -> None:
    """Raise UserError unless `remat` is a bool or one of POLICIES."""
    if not isinstance(remat, bool) and remat not in POLICIES:
        raise UserError(nearest('remat', str(remat), ['False', 'True', *POLICIES]))


def recomputed(apply: Callable, remat: bool | str, **options: Any) -> Callable:
    """Wrap a function of a module and arrays to recompute values in the backward pass.

    Args:
      apply: the function.
      remat: the values that are kept, see the module's docstring.
      options: of `nn.remat`.
    """
    if remat is False:
        return apply
    policy = POLICIES['nothing' if remat is True else remat]
    return nn.remat(apply, policy=policy, **options)


def named(name: str, x: Array) -> Array:
    """Name an array that `remat='names'` keeps; `name` is ATTENDED or HIDDEN."""
    return checkpoint_name(x, name)
