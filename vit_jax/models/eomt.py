"""EoMT: a plain ViT that segments images.

Kerssies et al., 2025, "Your ViT is Secretly an Image Segmentation Model", arXiv:2503.19108.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import Array

from vit_jax.array_types import Bool, Float, Key
from vit_jax.errors import UserError
from vit_jax.models import vit
from vit_jax.models.base import check_counts
from vit_jax.models.vit import attention_positions, block_factory, make_norm
from vit_jax.nn.attention import recompute_in_backward
from vit_jax.nn.blocks import GELUS
from vit_jax.nn.maps import AttentionMap, HiddenState, collect, collect_blocks
from vit_jax.nn.norms import LayerNorm
from vit_jax.nn.options import HeadFields, PoolFields, defaults, regroup
from vit_jax.nn.patches import patch_grid
from vit_jax.nn.rotary import Rotary
from vit_jax.nn.stochastic import example_keys
from vit_jax.ops.masks import resize_bilinear

# The ViT's part of the parameters.
ENCODER = (
    *('patch_embed', 'cls_token', 'dist_token', 'register_tokens', 'pos_embed', 'norm_pre'),
    'encoder',
)

# Uniform within 1 / sqrt(fan in), like torch.nn.Linear.
_uniform = nn.initializers.variance_scaling(1 / 3, 'fan_in', 'uniform')
dense = functools.partial(nn.Dense, kernel_init=_uniform)


class Model(vit.Model):
    """A ViT whose last blocks also process learned queries, one for each segment.

    Images of any size that whole patches tile, square or not.

    Attributes:
      num_classes: Number of classes of segments; one more output means no segment.
      num_queries: Q, largest number of segments of an image.
      query_blocks: L_2, number of last blocks with queries: 3 for ViT-S and B, 4 for L, 5 for g in
        the paper.
      upscale: Number of times the grid of patches is doubled for masks; with 2 and patches of 16
        pixels a mask logit covers 4 x 4 pixels.

    Other attributes and errors: see `vit.Model`. Pooling only decides whether there is a class
    token.
    """

    num_queries: int = 200
    query_blocks: int = 4
    upscale: int = 2

    head_layers: ClassVar[tuple[str, ...]] = ('class_head',)
    title: ClassVar[str] = 'an EoMT'
    first_layer = '^patch_embed/'
    effects: ClassVar = {'query_blocks': 'binding'}

    def __post_init__(self) -> None:
        check_counts(self, 'num_queries', 'query_blocks', 'upscale')
        self._check_blocks()
        is_post, kind = self.block.norm_place == 'post', self.positions.kind
        if self.scan or is_post or kind == 'relative':
            raise UserError(
                f"{self.title} has no scanned blocks, no block.norm_place 'post', and no "
                "positions.kind 'relative'"
            )
        super().__post_init__()

    def _check_blocks(self) -> None:
        if self.query_blocks > self.depth:
            raise UserError(f'query_blocks={self.query_blocks}: must be at most depth={self.depth}')

    @nn.compact
    def __call__(  # type: ignore[override]  # no masked patches, no padding
        self,
        images: Float[Array, 'B H W C'],
        train: bool = False,
        *,
        mask_probs: Float[Array, '*L'] | None = None,
    ) -> dict[str, Float[Array, 'B ...']]:
        """Segment normalized images.

        Args:
          images: Normalized images.
          train: Whether dropout acts.
          mask_probs: Probability, for each of the last blocks or for all of them, that a query of
            an image attends only to patches within its current mask (section 3.3). It may always
            attend to queries and to tokens that are not patches. None for no masks and no
            intermediate predictions, as in inference.

        Returns:
          logits: [B Q num_classes + 1] in float32; the last class is "no segment".
          masks: [B Q h w] in float32, logits of pixels; h and w are the numbers of rows and columns
            of patches times 2^upscale.
          aux_logits, aux_masks: [B L_2 Q ...], the same before each of the last blocks; only with
            `mask_probs`.
        """
        dtype = jnp.dtype(self.dtype)
        grid = patch_grid(images.shape[1], images.shape[2], self.patch_size)
        next_key = functools.partial(self.make_rng, 'dropout') if train else None
        encoder, first = self._encoder_blocks(dtype), self.depth - self.query_blocks
        positions: Any = attention_positions(self, grid, next_key)[0]
        x = self._embed(images, None, train, dtype)
        x = encoder(x, range(first), train, positions)
        return self._segment(
            x, encoder, range(first, self.depth), grid, positions, train, mask_probs
        )

    def _encoder_blocks(self, dtype: Any) -> Encoder:
        return Encoder(
            block_factory(self, dtype),
            functools.partial(make_norm(self), self.block.norm_eps, dtype=dtype),
            *(self.depth, self.block.drop_path, self.remat, self.block.final_norm, dtype),
            name='encoder',
        )

    def _segment(
        self,
        x: Float[Array, 'B N D'],
        blocks: Encoder,
        numbers: Sequence[int],
        grid: tuple[int, int],
        positions: Rotary | None,
        train: bool,
        mask_probs: Float[Array, '*L'] | None,
    ) -> dict[str, Float[Array, 'B ...']]:
        """Put queries among the tokens of an image, and segment it by these blocks.

        Args:
          x: Tokens.
          blocks, numbers: Blocks and the numbers of those to apply.
          grid: Rows and columns of patches.
          positions: Positions of the tokens.
          train, mask_probs: See `__call__`, as for what is returned.
        """
        dtype, prefix = jnp.dtype(self.dtype), self.prefix_tokens
        outputs = (self.num_classes or 0) + 1
        class_head = dense(outputs, dtype=jnp.float32, name='class_head')
        mask_head = MaskMlp(self.block.gelu, dtype, name='mask_head')
        enlarge = Upscaler(self.upscale, self.block.gelu, dtype, name='upscaler')

        def predict(x: Array) -> dict[str, Array]:
            x = blocks.normed(x)
            queries, patches = x[:, prefix : prefix + self.num_queries], x[:, -math.prod(grid) :]
            maps = enlarge(patches.reshape(len(x), *grid, -1))
            masks = jnp.einsum(
                'bqd,bhwd->bqhw', mask_head(queries), maps, preferred_element_type=jnp.float32
            )
            return {'logits': class_head(queries), 'masks': masks}

        shape = self.num_queries, self.width
        queries = self.param('query_embed', nn.initializers.normal(1.0), shape)
        x = put_queries(x, queries, prefix)
        positions = insert_unrotated(positions, self.num_queries, prefix)
        predictions = []
        for i, number in enumerate(numbers):
            mask = None
            if mask_probs is not None or self._shows_attention:
                predictions.append(predict(x))
                inside = resize_bilinear(predictions[-1]['masks'], grid) > 0
                inside = inside.reshape(*inside.shape[:2], -1)
                self.sow('intermediates', 'inside', inside)
            if mask_probs is not None:
                free = self._draw_free(jnp.broadcast_to(mask_probs, self.query_blocks)[i], len(x))
                mask = query_mask(inside | free[..., None], prefix)
            x = blocks(x, [number], train, positions, mask)
        last = predict(x)
        if mask_probs is None:
            return last
        aux = jax.tree.map(lambda *arrays: jnp.stack(arrays, axis=1), *predictions)
        return last | {f'aux_{name}': array for name, array in aux.items()}

    def example_keys(self, rows: int) -> Key[Array, ' B']:
        """Derive a key for each row from the random stream 'points'; see `nn.stochastic`."""
        return example_keys(self.make_rng('points'), rows)

    def attention_maps(
        self, intermediates: Mapping[str, Any], images: Float[Array, 'B H W C']
    ) -> list[AttentionMap]:
        """Collect attention among tokens of the first blocks, `encoder/block_i`, and of the last
        ones, `joint/block_i`, with queries after the class token and registers; and of each query
        to patches, `queries/block_i/cross`, and within its current mask, `masked/block_i/cross`.
        """
        grid = patch_grid(images.shape[1], images.shape[2], self.patch_size)
        first = self.depth - self.query_blocks
        maps = collect(intermediates, 'encoder', grid, grid)
        return [*maps[:first], *self._query_maps(maps[first:], intermediates, grid, first)]

    def _query_maps(
        self,
        maps: Sequence[AttentionMap],
        intermediates: Mapping[str, Any],
        grid: tuple[int, int],
        first: int,
    ) -> list[AttentionMap]:
        """Take the maps of queries from those of blocks with them, numbered from `first`."""
        rows, queries = slice(self.prefix_tokens, -math.prod(grid)), (self.num_queries,)
        by_kind: dict[str, list[AttentionMap]] = {'joint': [], 'masked': [], 'queries': []}
        pairs = zip(maps, intermediates['inside'], strict=True)
        for i, (joint, inside) in enumerate(pairs, start=first):
            weights = jnp.asarray(joint.weights)
            by_kind['joint'].append(AttentionMap(f'joint/block_{i}', weights, grid, grid))
            of_queries = weights[:, :, rows]
            masked = of_queries * query_mask(inside, self.prefix_tokens)[:, :, rows]
            masked = masked / masked.sum(-1, keepdims=True)
            for kind, cross in (('masked', masked), ('queries', of_queries)):
                by_kind[kind].append(AttentionMap(f'{kind}/block_{i}/cross', cross, queries, grid))
        return [*itertools.chain.from_iterable(by_kind.values())]

    def collect_hidden_states(
        self, collection: Mapping[str, Any], images: Float[Array, 'B H W C'], *others: Any
    ) -> list[HiddenState]:
        """Collect the states of the encoder's layers; the last have queries before the patches."""
        del others
        grid = patch_grid(images.shape[1], images.shape[2], self.patch_size)
        return [
            HiddenState(name, x, grid, x.shape[1] - math.prod(grid), self.class_tokens)
            for name, x in collect_blocks(collection, 'encoder')
        ]

    def layer_order(self) -> tuple[str, ...]:
        """List patterns of the layers' parameters from the image to the last block but one.

        As in the authors' code, the image's embedding learns like the first block, and the last
        block like the heads.
        """
        embedding, *blocks = super().layer_order()[:-1]
        return ('|'.join((embedding, *blocks[:1])), *blocks[1:])

    def transferable(self) -> tuple[dict[str, Any], tuple[str, ...]]:
        """Describe the encoder as a ViT: keywords of `config.model`, and parameter names."""
        pool = PoolFields(_POOLS.get(self.pool.kind, self.pool.kind))
        without_head = {'num_classes': None, 'pool': pool, 'head': HeadFields(bias=self.head.bias)}
        plain = defaults(vit.Model)
        fields = {key: getattr(self, key) for key in plain} | without_head
        changed = {key: value for key, value in fields.items() if value != plain[key]}
        return {'name': 'vit', **regroup(vit.Model, changed)}, vit.parameter_names(**changed)

    @property
    def _shows_attention(self) -> bool:
        """Whether the call collects attention, for pictures."""
        return not self.is_initializing() and self.is_mutable_collection('intermediates')

    def _draw_free(self, prob: Float[Array, ''], rows: int) -> Bool[Array, 'B Q']:
        """Draw the queries that attend to all patches, each with probability 1 - `prob`."""

        def draw(key: Array) -> Array:
            return jax.random.uniform(key, (self.num_queries,)) >= prob

        return jax.vmap(draw)(example_keys(self.make_rng('mask'), rows))


# Poolings with as many class tokens and without parameters.
_POOLS = {'map': 'gap', 'cls_map': 'cls'}


class Encoder(nn.Module):
    """Blocks `block_0`, `block_1`, ..., and the norm `norm`, named as in `nn.blocks.Encoder`."""

    make_block: Any
    make_norm: Any
    depth: int
    drop_path: float
    remat: bool | str
    final_norm: bool
    dtype: Any

    def setup(self) -> None:
        self.block = [self.make_block() for _ in range(self.depth)]
        if self.final_norm:
            self.norm = self.make_norm()

    def __call__(
        self,
        x: Float[Array, 'B N D'],
        blocks: Sequence[int],
        train: bool,
        positions: Rotary | None = None,
        mask: Bool[Array, 'B 1 N N'] | None = None,
    ) -> Float[Array, 'B N D']:
        """Apply the blocks of these numbers to tokens."""

        def apply(block: nn.Module, x: Array, positions: Any, mask: Any, rate: float) -> Array:
            return block(x, train, rate, None, positions, mask)

        for i in blocks:
            rate = self.drop_path * i / max(self.depth - 1, 1)
            run = recompute_in_backward(functools.partial(apply, rate=rate), self.remat)
            x = run(self.block[i], x, positions, mask)
        return x

    def normed(self, x: Float[Array, 'B N D']) -> Float[Array, 'B N D']:
        """Apply the final norm, if there is one, and cast to the computation dtype."""
        return self.norm(x) if self.final_norm else x.astype(self.dtype)


class MaskMlp(nn.Module):
    """Three dense layers of the tokens' width, `fc1` to `fc3`."""

    gelu: str
    dtype: Any

    @nn.compact
    def __call__(self, x: Float[Array, 'B Q D']) -> Float[Array, 'B Q D']:
        for i in (1, 2):
            x = GELUS[self.gelu](dense(x.shape[-1], dtype=self.dtype, name=f'fc{i}')(x))
        return dense(x.shape[-1], dtype=self.dtype, name='fc3')(x)


class Upscaler(nn.Module):
    """Steps `step_0`, `step_1`, ... that double the sides of a map (appendix A)."""

    steps: int
    gelu: str
    dtype: Any

    @nn.compact
    def __call__(self, x: Float[Array, 'B h w D']) -> Float[Array, 'B H W D']:
        for i in range(self.steps):
            x = Doubling(self.gelu, self.dtype, name=f'step_{i}')(x)
        return x


class Doubling(nn.Module):
    """A transposed convolution of 2 x 2, GELU, a depthwise convolution of 3 x 3, layer norm."""

    gelu: str
    dtype: Any

    @nn.compact
    def __call__(self, x: Float[Array, 'B h w D']) -> Float[Array, 'B H W D']:
        batch, height, width, channels = x.shape
        # A pixel becomes four, each by a separate dense layer. PyTorch's initializer takes the
        # outputs for inputs.
        kernel = self.param('kernel', _transposed, (2, 2, channels, channels))
        bias = self.param('bias', nn.initializers.zeros, (channels,))
        x, kernel, bias = nn.dtypes.promote_dtype(x, kernel, bias, dtype=self.dtype)
        x = jnp.einsum('bhwc,ijco->bhiwjo', x, kernel)
        x = x.reshape(batch, 2 * height, 2 * width, channels) + bias
        x = Depthwise(self.dtype, name='depthwise')(GELUS[self.gelu](x))
        return LayerNorm(1e-6, dtype=self.dtype, name='norm')(x)


class Depthwise(nn.Module):
    """A convolution of 3 x 3 of each channel by itself; pixels outside are 0.

    On CPUs it is computed from shifted maps, since XLA takes five times as long for the convolution
    and ten times as long for its derivative; results and gradients are the same.
    """

    dtype: Any
    use_bias: bool = False

    @nn.compact
    def __call__(self, x: Float[Array, 'B H W C']) -> Float[Array, 'B H W C']:
        kernel = self.param('kernel', _uniform, (3, 3, 1, x.shape[-1]))
        x, kernel = nn.dtypes.promote_dtype(x, kernel, dtype=self.dtype)
        x = jax.lax.platform_dependent(x, kernel, cpu=_sum_of_shifts, default=_convolve)
        if not self.use_bias:
            return x
        return x + self.param('bias', nn.initializers.zeros, (x.shape[-1],)).astype(x.dtype)


def _convolve(x: Array, kernel: Array) -> Array:
    return jax.lax.conv_general_dilated(
        *(x, kernel, (1, 1), 'SAME'),
        dimension_numbers=('NHWC', 'HWIO', 'NHWC'),
        feature_group_count=x.shape[-1],
    )


@jax.custom_jvp
def _sum_of_shifts(x: Array, kernel: Array) -> Array:
    return _add_shifts(_pad(x), kernel.reshape(9, -1))


def _pad(x: Array) -> Array:
    return jnp.pad(x, ((0, 0), (1, 1), (1, 1), (0, 0)))


def _add_shifts(padded: Array, factors: Sequence[Array] | Array) -> Array:
    """Add a map [... H W C], padded by a pixel, at 9 offsets, each times its factor."""
    height, width = padded.shape[-3] - 2, padded.shape[-2] - 2
    shifted = (padded[..., i : i + height, j : j + width, :] for i in range(3) for j in range(3))
    return functools.reduce(jnp.add, map(jnp.multiply, shifted, factors))


@_sum_of_shifts.defjvp
def _shift_jvp(primals: tuple[Array, Array], tangents: tuple[Array, Array]) -> tuple[Array, Array]:
    """Differentiate image by image, at the map's size, so that sums run along channels."""
    (x, kernel), (dx, dkernel) = primals, tangents
    factors = [jnp.broadcast_to(d, x.shape[1:]) for d in dkernel.reshape(9, -1)]
    of_kernel = jax.lax.map(lambda image: _add_shifts(image, factors), _pad(x))
    return _sum_of_shifts(x, kernel), _sum_of_shifts(dx, kernel) + of_kernel


_transposed = nn.initializers.variance_scaling(1 / 3, 'fan_out', 'uniform')


def put_queries(
    x: Float[Array, 'B N D'], queries: Float[Array, 'Q D'], prefix: int
) -> Float[Array, 'B M D']:
    """Insert queries after the first `prefix` tokens; blocks do not depend on the order."""
    rows = jnp.broadcast_to(queries.astype(x.dtype), (len(x), *queries.shape))
    return jnp.concatenate([x[:, :prefix], rows, x[:, prefix:]], axis=1)


def insert_unrotated(positions: Rotary | None, count: int, prefix: int) -> Rotary | None:
    """Insert `count` tokens without rotation after the first `prefix` of rotary positions."""
    if positions is None:
        return None

    def put(table: Array, value: float) -> Array:
        more = jnp.full((*table.shape[:-2], count, table.shape[-1]), value, table.dtype)
        parts = [table[..., :prefix, :], more, table[..., prefix:, :]]
        return jnp.concatenate(parts, axis=-2)

    return Rotary(put(positions.cos, 1.0), put(positions.sin, 0.0), positions.neighbors)


def query_mask(inside: Bool[Array, 'B Q N'], prefix: int) -> Bool[Array, 'B 1 M M']:
    """Make a mask that limits queries to patches in `inside`; all else may attend to all.

    Args:
      inside: True for patches that a query may attend to.
      prefix: Number of tokens before the queries.
    """
    batch, queries, patches = inside.shape
    tokens = prefix + queries + patches
    mask = jnp.ones((batch, 1, tokens, tokens), bool)
    return mask.at[:, 0, prefix : prefix + queries, prefix + queries :].set(inside)
