"""The MLPs that blocks choose by name, besides `blocks.Mlp`."""

import functools
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax.numpy as jnp
from jax import Array

from vit_jax.array_types import Float
from vit_jax.nn.blocks import Mlp, dense
from vit_jax.nn.recompute import HIDDEN, named
from vit_jax.nn.stochastic import Dropout

Factory = Callable[..., nn.Module]


class SwiGlu(nn.Module):
    """fc2(norm(SiLU(gate(x)) fc1(x))), SwiGLU of Shazeer, 2020, arXiv:2002.05202, equation 6.

    Parameters `gate`, `fc1` and `fc2`, and `norm` of EVA-02 (arXiv:2303.11331, section 2.1) if
    there is one. `hidden_dim` is the width of `gate` and `fc1` as it is; to have the parameters of
    `Mlp` it is two thirds of the one there. `gelu` has no effect.
    """

    hidden_dim: int
    dropout: float = 0.0
    gelu: str = 'tanh'
    dtype: Any = jnp.float32
    norm: Factory | None = None
    use_bias: bool = True

    @nn.compact
    def __call__(self, x: Float[Array, '*B D'], train: bool = False) -> Float[Array, '*B D']:
        layer = functools.partial(dense, dtype=self.dtype, use_bias=self.use_bias)
        gate = named(HIDDEN, layer(self.hidden_dim, name='gate')(x))
        y = nn.silu(gate) * named(HIDDEN, layer(self.hidden_dim, name='fc1')(x))
        if self.norm is not None:
            y = self.norm(dtype=self.dtype, name='norm')(y)
        y = Dropout(self.dropout)(y, train)
        return layer(x.shape[-1], name='fc2')(y)


def mlp(norm_of: Factory, use_bias: bool) -> Factory:
    """The MLP of the paper, `blocks.Mlp`; it has no norm."""
    del norm_of
    return functools.partial(Mlp, use_bias=use_bias)


def swiglu(norm_of: Factory, use_bias: bool, *, norm: bool = False) -> Factory:
    """SwiGLU, see `SwiGlu`.

    Args:
      norm_of: makes a norm, given its dtype and name.
      use_bias: whether the dense layers have biases.
      norm: whether the product is normalized before the last dense layer.
    """
    return functools.partial(SwiGlu, norm=norm_of if norm else None, use_bias=use_bias)


# Functions of the model's norm and of the use of biases, and of the options after the `*`.
MLPS = {'mlp': mlp, 'swiglu': swiglu}
