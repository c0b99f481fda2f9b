"""Pre-norm Transformer encoder and its parts."""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.ad_checkpoint import checkpoint_name

from vit_jax.array_types import Bool, Float, Int
from vit_jax.nn.attention import HIDDEN, Segments, recompute_in_backward
from vit_jax.nn.dense import XAVIER, Dense, Initializer
from vit_jax.nn.multi_head import MultiHeadAttention
from vit_jax.nn.norms import LayerNorm, recompute
from vit_jax.nn.rotary import Rotary
from vit_jax.nn.stochastic import Dropout, add_branch


def erf_gelu(x: Float[Array, '*B']) -> Float[Array, '*B']:
    """x Phi(x), in float32, since 1 + erf loses the digits of a small Phi in lower precision."""
    y = x.astype(jnp.float32)
    return (0.5 * y * (1.0 + jax.lax.erf(y * math.sqrt(0.5)))).astype(x.dtype)


def quick_gelu(x: Float[Array, '*B']) -> Float[Array, '*B']:
    """x sigmoid(1.702 x), the other approximation of Hendrycks and Gimpel, used by CLIP."""
    return x * jax.nn.sigmoid(1.702 * x)


# jax.nn.gelu computes the exact one by erfc, which takes three passes, where erf takes one.


def from_input(activation: Callable[[Array], Array]) -> Callable[[Array], Array]:
    """Wrap an activation so that its gradient needs only the input, which the layer before keeps.

    Automatic differentiation also keeps its derivative, an array as large as the hidden layer.
    """

    @recompute
    def push(x: Array, dx: Array) -> Array:
        return jax.jvp(activation, (jax.lax.optimization_barrier(x),), (dx,))[1]

    wrapped = jax.custom_jvp(lambda x: activation(x))  # without its other arguments
    wrapped.defjvp(lambda primals, tangents: (activation(*primals), push(*primals, *tangents)))
    return wrapped


GELUS = {
    name: from_input(gelu)
    for name, gelu in (('tanh', jax.nn.gelu), ('erf', erf_gelu), ('quick', quick_gelu))
}


class Mlp(nn.Module):
    """Two dense layers with a GELU between them, back to the width of the input.

    `gelu` is 'tanh' (the approximation of Hendrycks and Gimpel, 2016, arXiv:1606.08415), 'erf'
    (exact) or 'quick'. Parameters `fc1` and `fc2`, and of any `norm`, which comes before `fc2`.
    """

    hidden_dim: int
    dropout: float = 0.0
    gelu: str = 'tanh'
    dtype: Any = jnp.float32
    kernel_init: Initializer = XAVIER
    use_bias: bool = True
    norm: Callable[..., nn.Module] | None = None

    @nn.compact
    def __call__(self, x: Float[Array, '*B D'], train: bool = False) -> Float[Array, '*B D']:
        layer = functools.partial(
            Dense, dtype=self.dtype, kernel_init=self.kernel_init, use_bias=self.use_bias
        )
        y = checkpoint_name(layer(self.hidden_dim, name='fc1')(x), HIDDEN)
        y = GELUS[self.gelu](y)
        y = Dropout(self.dropout)(y, train)
        y = y if self.norm is None else self.norm(dtype=self.dtype, name='norm')(y)
        return layer(x.shape[-1], name='fc2')(y)


@dataclasses.dataclass(frozen=True)
class BlockOptions:
    """Options of a block in which families of ViTs differ; by default the paper's.

    Attributes:
      norm: Factory of norms, called as `LayerNorm(epsilon, dtype=..., name=...)`.
      mlp: Factory of the MLP, called as `Mlp(hidden_dim, dropout, gelu, dtype, name=...)`.
      layer_scale: Initial value of a learned factor for each channel of both branches
        (arXiv:2103.17239, section 2.1), parameters `layer_scale1` and `layer_scale2` [D]; None
        omits them.
      no_bias, qk_norm, inner_norm, relative: See `MultiHeadAttention`.
      norm_place: 'pre': x + f(norm(x)); 'post': norm(x + f(x)), as in arXiv:1706.03762; 'res_post':
        x + norm(f(x)), as in Swin v2 (arXiv:2111.09883); 'parallel': x + f(y) + g(y) with
        y = norm(x), as in ViT-22B (arXiv:2302.05442, section 2).
      causal: Whether tokens attend only to themselves and earlier tokens.
    """

    norm: Callable[..., nn.Module] = LayerNorm
    mlp: Callable[..., nn.Module] = Mlp
    layer_scale: float | None = None
    no_bias: tuple[str, ...] = ()
    qk_norm: Callable[..., nn.Module] | None = None
    inner_norm: Callable[..., nn.Module] | None = None
    relative: Callable[[], nn.Module] | None = None
    norm_place: str = 'pre'
    causal: bool = False


class Block(nn.Module):
    """An encoder block, by default pre-norm, equations 2 and 3 of arXiv:2010.11929.

        z' = MSA(LN(z)) + z
        z  = MLP(LN(z')) + z'

    Each sum is preceded by dropout and, with probability `drop_path`, by dropping the whole branch.
    `attention_by` is the `attention` of `MultiHeadAttention`.
    """

    num_heads: int
    mlp_dim: int
    dropout: float = 0.0
    attention_dropout: float = 0.0
    gelu: str = 'tanh'
    norm_eps: float = 1e-6
    dtype: Any = jnp.float32
    attention_by: str = 'xla'
    options: BlockOptions = BlockOptions()

    @nn.compact
    def __call__(
        self,
        x: Float[Array, 'B N D'],
        train: bool = False,
        drop_path: float | Float[Array, ''] = 0.0,
        segments: Int[Array, 'B N'] | None = None,
        positions: Rotary | Float[Array, '1 H N N'] | None = None,
        mask: Bool[Array, 'B 1 N N'] | None = None,
    ) -> Float[Array, 'B N D']:
        """Apply the block to tokens.

        `segments` limits attention, see `Segments`, and so does `mask`, true where a query may
        attend; `positions` are rotations of queries and keys, or biases of scores.
        """
        place = self.options.norm_place

        def make_norm(number: int) -> nn.Module:
            return self.options.norm(self.norm_eps, dtype=self.dtype, name=f'norm{number}')

        def add(x: Array, layer: Callable[[Array], Array], number: int) -> Array:
            norm = make_norm(number)
            branch = layer(norm(x) if place == 'pre' else x)
            branch = norm(branch) if place == 'res_post' else branch
            x = add_scaled(x, branch, number)
            return norm(x).astype(x.dtype) if place == 'post' else x

        def add_scaled(x: Array, branch: Array, number: int) -> Array:
            if (initial := self.options.layer_scale) is not None:
                init = nn.initializers.constant(initial)
                scale = self.param(f'layer_scale{number}', init, branch.shape[-1:])
                branch = branch.astype(x.dtype) * scale.astype(x.dtype)
            return add_branch(x, branch, self.dropout, drop_path, train)

        attention = MultiHeadAttention(
            self.num_heads,
            dropout=self.attention_dropout,
            dtype=self.dtype,
            attention=self.attention_by,
            no_bias=self.options.no_bias,
            qk_norm=self.options.qk_norm,
            inner_norm=self.options.inner_norm,
            relative=self.options.relative,
            name='attention',
        )
        pairs = None if segments is None else Segments(segments, segments)
        kind = 'rotary' if isinstance(positions, Rotary) else 'bias'
        inputs: dict[str, Any] = {kind: positions, 'segments': pairs, 'mask': mask}
        inputs |= {'causal': self.options.causal, 'train': train}
        mlp = self.options.mlp(self.mlp_dim, self.dropout, self.gelu, self.dtype, name='mlp')
        if place == 'parallel':
            y = make_norm(1)(x)
            return add_scaled(add_scaled(x, attention(y, **inputs), 1), mlp(y, train), 2)
        x = add(x, lambda y: attention(y, **inputs), 1)
        return add(x, lambda y: mlp(y, train), 2)


class Encoder(nn.Module):
    """`depth` blocks and an optional final norm.

    Attributes:
      block: Factory of blocks, called with `name`.
      depth: Number of blocks.
      drop_path: Rate of the last block; the rates rise linearly from 0 at the first.
      scan: Stack the blocks' parameters on axis 0 under `blocks` and scan over them, so that the
        program and its compile time do not grow with depth. Otherwise `block_0`, `block_1`, ...
      remat: Recomputation in the backward pass; see `vit_jax.nn.attention`.
      final_norm: Whether a layer norm follows the blocks.
      norm_eps: Value added to the variance in the final norm.
      norm: Factory of the final norm; see `BlockOptions`.
      dtype: Computation dtype.
    """

    block: Callable[..., nn.Module]
    depth: int
    drop_path: float = 0.0
    scan: bool = False
    remat: bool | str = False
    final_norm: bool = True
    norm_eps: float = 1e-6
    dtype: Any = jnp.float32
    norm: Callable[..., nn.Module] = LayerNorm

    @nn.compact
    def __call__(
        self,
        x: Float[Array, 'B N D'],
        train: bool = False,
        segments: Int[Array, 'B N'] | None = None,
        positions: Rotary | Float[Array, '1 H N N'] | None = None,
    ) -> Float[Array, 'B N D']:
        """Apply all blocks to tokens, with the same `segments` and `positions`."""
        # Blocks of other projects may not take positions.
        optional = () if positions is None else (positions,)

        def apply(block: nn.Module, x: Array, rate: float | Array, *rest: Any) -> Array:
            return block(x, train, rate, *rest)

        apply = recompute_in_backward(apply, self.remat, prevent_cse=not self.scan)
        rates = np.linspace(0.0, self.drop_path, self.depth)
        if self.scan:
            x = self._scan(apply, x, rates, segments, *optional)
        else:
            for i, rate in enumerate(rates):
                x = apply(self.block(name=f'block_{i}'), x, float(rate), segments, *optional)
        if not self.final_norm:
            return x
        return self.norm(self.norm_eps, dtype=self.dtype, name='norm')(x)

    def _scan(self, apply: Callable[..., Array], x: Array, rates: np.ndarray, *rest: Any) -> Array:
        scanned = nn.scan(
            lambda block, x, rate, *rest: (apply(block, x, rate, *rest), None),
            in_axes=(0, *[nn.broadcast] * len(rest)),
            variable_axes={True: 0},  # every collection and random stream, also of foreign blocks
            split_rngs={True: True},
            length=self.depth,
        )
        x, _ = scanned(self.block(name='blocks'), x, jnp.asarray(rates, jnp.float32), *rest)
        return x


Factory = Callable[..., nn.Module]


class SwiGlu(nn.Module):
    """fc2(norm(SiLU(gate(x)) fc1(x))), SwiGLU of Shazeer, 2020, arXiv:2002.05202, equation 6.

    Parameters `gate`, `fc1` and `fc2`, and `norm` of EVA-02 (arXiv:2303.11331, section 2.1) if
    there is one. `hidden_dim` is the width of `gate` and `fc1`; two thirds of the width in `Mlp`
    give as many parameters. `gelu` has no effect.
    """

    hidden_dim: int
    dropout: float = 0.0
    gelu: str = 'tanh'
    dtype: Any = jnp.float32
    norm: Factory | None = None
    use_bias: bool = True

    @nn.compact
    def __call__(self, x: Float[Array, '*B D'], train: bool = False) -> Float[Array, '*B D']:
        layer = functools.partial(Dense, dtype=self.dtype, use_bias=self.use_bias)
        gate = checkpoint_name(layer(self.hidden_dim, name='gate')(x), HIDDEN)
        y = nn.silu(gate) * checkpoint_name(layer(self.hidden_dim, name='fc1')(x), HIDDEN)
        if self.norm is not None:
            y = self.norm(dtype=self.dtype, name='norm')(y)
        y = Dropout(self.dropout)(y, train)
        return layer(x.shape[-1], name='fc2')(y)


MLPS: dict[str, Factory] = {'mlp': Mlp, 'swiglu': SwiGlu}


class MapHead(nn.Module):
    """Multi-head attention pooling: a learned probe attends to all tokens, then an MLP refines it.

    Zhai et al., 2021, arXiv:2106.04560. Parameters `probe` [1 1 D], `attention`, `norm` and `mlp`.
    """

    num_heads: int
    mlp_dim: int
    gelu: str = 'tanh'
    norm_eps: float = 1e-6
    dtype: Any = jnp.float32

    @nn.compact
    def __call__(
        self,
        x: Float[Array, 'B N D'],
        train: bool = False,
        segments: Int[Array, 'B N'] | None = None,
        num_segments: int = 1,
    ) -> Float[Array, 'B D'] | Float[Array, 'B S D']:
        """Pool each row to a vector, or with `segments` each of 1 ... S; see `segment_mean`.

        A segment without tokens gets the vector of uniform attention to all tokens.
        """
        batch, _, width = x.shape
        probe = self.param('probe', nn.initializers.xavier_uniform(), (1, 1, width))
        probe = jnp.broadcast_to(probe, (batch, num_segments, width)).astype(self.dtype)
        attention = MultiHeadAttention(
            self.num_heads, kernels=('q', 'kv'), dtype=self.dtype, name='attention'
        )
        pairs = None
        if segments is not None:
            numbers = jnp.arange(1, num_segments + 1, dtype=segments.dtype)
            pairs = Segments(jnp.broadcast_to(numbers, (batch, num_segments)), segments)
        x = attention(probe, x, segments=pairs)
        y = LayerNorm(self.norm_eps, dtype=self.dtype, name='norm')(x)
        x = x + Mlp(self.mlp_dim, gelu=self.gelu, dtype=self.dtype, name='mlp')(y, train)
        return x[:, 0] if segments is None else x


def segment_mean(
    x: Float[Array, 'B N D'], segments: Int[Array, 'B N'], num_segments: int = 1
) -> Float[Array, 'B S D']:
    """Average the tokens of each segment, accumulated in float32.

    Args:
      x: Tokens.
      segments: Numbers 1 ... S of the tokens' segments; tokens with other numbers, such as 0, are
        ignored.
      num_segments: S; a segment without tokens gets zeros.
    """
    members = jax.nn.one_hot(segments - 1, num_segments, dtype=jnp.float32)
    sums = jnp.einsum('bns,bnd->bsd', members, x.astype(jnp.float32), precision='highest')
    return (sums / jnp.maximum(members.sum(axis=1), 1)[..., None]).astype(x.dtype)
