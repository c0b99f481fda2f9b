"""Recomputation of blocks in the backward pass (Chen et al., 2016, arXiv:1604.06174).

A block always keeps its input. `remat` says what else it keeps:

    False      all that the derivative needs
    'dots'     the results of its products by kernels, but not of those between tokens: nothing but
               attention and elementwise operations is computed again
    'names'    the heads' results and the hidden layer of the MLP, before its activation: the
               projections around attention are computed again, which is a third of the products
    'nothing'  nothing; also written True
"""

from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array

from vit_jax.errors import UserError, nearest

ATTENDED, HIDDEN = 'attended', 'hidden'
_policies = jax.checkpoint_policies
# From the one that keeps most.
POLICIES: dict[str, Callable[..., Any]] = {
    'dots': _policies.dots_with_no_batch_dims_saveable,
    'names': _policies.save_only_these_names(ATTENDED, HIDDEN),
    'nothing': _policies.nothing_saveable,
}


def check_remat(remat: bool | str) -> None:
    """Raises UserError unless `remat` is a bool or one of POLICIES."""
    if not isinstance(remat, bool) and remat not in POLICIES:
        raise UserError(nearest('remat', str(remat), ['False', 'True', *POLICIES]))


def recomputed(apply: Callable, remat: bool | str, **options: Any) -> Callable:
    """A function of a module and arrays, whose derivative computes again what `remat` says.

    Args:
      apply: the function.
      remat: whether and what, see above.
      options: of `nn.remat`.
    """
    if remat is False:
        return apply
    policy = POLICIES['nothing' if remat is True else remat]
    return nn.remat(apply, policy=policy, **options)


def named(name: str, x: Array) -> Array:
    """The same array, which `remat='names'` keeps; `name` is ATTENDED or HIDDEN."""
    return checkpoint_name(x, name)
