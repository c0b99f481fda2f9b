"""Models of this package as Flax NNX modules."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import flax.linen as nn
import jax.numpy as jnp
from flax import nnx
from flax.traverse_util import flatten_dict, unflatten_dict


def to_nnx(model: nn.Module, variables: Mapping[str, Any], rngs: nnx.Rngs | None = None) -> Any:
    """Turn a Linen module and its weights into an NNX module, called as the Linen one is.

    Parameters become `nnx.Param`, `batch_stats` `nnx.BatchStat`. Give `rngs` for dropout:

        module = vit_jax.to_nnx(*vit_jax.load('hf://google/vit-base-patch16-224'))
        logits = module(images)['logits']
        optimizer = nnx.Optimizer(module, optax.adamw(1e-4), wrt=nnx.Param)

    Args:
      model: Linen module.
      variables: Its collections, {'params': ..., ...}; copied to JAX arrays.
      rngs: Random streams, such as `nnx.Rngs(dropout=0)`.

    Returns:
      An `nnx.bridge.ToNNX`, with an attribute for each submodule at the top.
    """
    leaves = {
        path: nnx.variable_type_from_name(collection)(jnp.asarray(value))
        for collection, tree in variables.items()
        for path, value in flatten_dict(dict(tree)).items()
    }
    module = nnx.bridge.ToNNX(model, rngs=rngs)
    for name, part in unflatten_dict(leaves).items():
        setattr(module, name, nnx.data(part))
    return module
