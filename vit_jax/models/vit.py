"""Vision Transformer: an image is a sequence of patches.

Dosovitskiy et al., 2021, arXiv:2010.11929, with the parts of later families to choose from.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import Any, ClassVar

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import Array

from vit_jax.array_types import Bool, Float, Int
from vit_jax.errors import UserError, check_choice, check_multiple
from vit_jax.models import base
from vit_jax.models.base import check_fields
from vit_jax.nn import options
from vit_jax.nn.blocks import MLPS, Block, BlockOptions, Encoder, MapHead, segment_mean
from vit_jax.nn.dense import class_head
from vit_jax.nn.norms import NORMS, BatchNorm, LayerNorm
from vit_jax.nn.options import (
    MEANS,
    WITH_CLASS_TOKEN,
    BlockFields,
    HeadFields,
    PoolFields,
    PositionFields,
)
from vit_jax.nn.patches import PatchEmbed, patch_grid
from vit_jax.nn.positions import Relative, learned, sincos2d
from vit_jax.nn.rotary import KeySource, Layout, Rope, RopeDinov3, Rotary
from vit_jax.nn.stochastic import Dropout

# name: width, depth, mlp_dim, num_heads
VARIANTS = {
    'mu': (32, 1, 128, 2),
    'Ti': (192, 12, 768, 3),
    'S': (384, 12, 1536, 6),
    'M': (512, 12, 2048, 8),
    'B': (768, 12, 3072, 12),
    'L': (1024, 24, 4096, 16),
    'So400m': (1152, 27, 4304, 16),
    'H': (1280, 32, 5120, 16),
    'g': (1408, 40, 6144, 16),
    'g-opt': (1536, 40, 6144, 16),
    'G': (1664, 48, 8192, 16),
    'G-opt': (1536, 48, 8192, 16),
    'e': (1792, 56, 15360, 16),
}


def variant(name: str) -> dict[str, int]:
    """Keywords of `Model` for a name such as 'B/16': a shape of VARIANTS and a patch size.

    Raises:
      UserError: if there is no such shape, or the patch size is not a positive number.
    """
    shape, slash, patch = name.partition('/')
    check_choice('ViT variant', shape, VARIANTS)
    if not slash or not re.fullmatch('[1-9][0-9]*', patch):
        raise UserError(f'ViT variant {name!r} needs a patch size, for example {shape}/16')
    fields = ('width', 'depth', 'mlp_dim', 'num_heads')
    return {'patch_size': int(patch), **dict(zip(fields, VARIANTS[shape], strict=True))}


REGISTERS = nn.initializers.normal(0.02)
# Layers of a ViT that may lack biases; attention's projections come first.
PROJECTIONS = ('query', 'key', 'value', 'out')
BIASES = (*PROJECTIONS, 'patch_embed', 'mlp', 'norm', 'head')


class Model(base.PatchModel):
    """ViT. Images of any size that whole patches tile, square or not.

    Attributes:
      num_classes: Outputs of the head; None or 0 leaves the head out.
      patch_size: Side of a patch in pixels.
      width: D, token width.
      depth: L, number of blocks.
      mlp_dim: Hidden width of the blocks' MLPs.
      num_heads: Attention heads; divides width.
      registers: Tokens between the class token and the patches, which no pooling reads
        (arXiv:2309.16588); without positions unless `positions.prefix` is 'all'.
      dropout: Dropout rate after the position embedding and each dense layer of a block.
      no_bias: Layers without biases: some of 'query', 'key', 'value', 'out', 'patch_embed', 'mlp',
        'norm' and 'head'.
      block: Options of the blocks and their norms, see `BlockFields`.
      positions: Positions added to tokens and within attention, see `PositionFields`.
      pool: Input of the head, see `PoolFields`.
      head: Layers from the representation to the scores, see `HeadFields`.
      scan: One scanned block instead of `depth` unrolled ones; see `Encoder`.
      remat: Recomputation in the backward pass: False, 'dots', 'names' or 'nothing' (True), in the
        order of what blocks keep, or 'offload'; see `vit_jax.nn.attention`.
      attention: Implementation: 'xla'; 'pallas', a TPU kernel for sequences that fit into VMEM;
        'cudnn', a kernel for GPUs in half precision; or 'auto', the kernel if the devices support
        it. See docs/attention.md.
      dtype: Computation dtype. Parameters, layer norm statistics and softmax stay float32.

    Raises:
      UserError: for an invalid field, or images that do not fit the patches or `pos_embed`.
    """

    num_classes: int | None = None
    patch_size: int = 16
    width: int = 768
    depth: int = 12
    mlp_dim: int = 3072
    num_heads: int = 12
    registers: int = 0
    dropout: float = 0.0
    no_bias: tuple[str, ...] = ()
    block: BlockFields = BlockFields()
    positions: PositionFields = PositionFields()
    pool: PoolFields = PoolFields()
    head: HeadFields = HeadFields()
    scan: bool = False
    remat: bool | str = False
    attention: str = 'auto'
    dtype: str = 'float32'

    head_layers: ClassVar[tuple[str, ...]] = ('pre_logits', 'head')

    def __post_init__(self) -> None:
        options.check_groups(self)
        check_fields(self, 'attention', 'dtype', 'remat', 'dropout', 'block.residual_dtype')
        check_fields(self, 'block.attention_dropout', 'block.drop_path')
        check_multiple('width', self.width, 'num_heads', self.num_heads)
        if self.registers < 0:
            raise UserError(f'registers must be at least 0, not {self.registers}')
        for layer in sorted(self.no_bias):
            check_choice('layer of no_bias', layer, BIASES)
        _make_positions(self, (1, 1), None)
        super().__post_init__()

    @property
    def batch_norm_key(self) -> str:
        """Return the key whose value makes a batch norm; empty for none."""
        return 'head.norm' if self.head.norm == 'batch' else ''

    @property
    def class_tokens(self) -> int:
        """Number of class and distillation tokens, which come first."""
        return int(self.pool.kind in WITH_CLASS_TOKEN) + (self.pool.kind == 'distilled')

    @property
    def positioned_tokens(self) -> int:
        """Number of tokens before the patches that have a row of `pos_embed`."""
        counts = {'none': 0, 'class': self.class_tokens, 'all': self.prefix_tokens}
        return counts[self.positions.prefix]

    @property
    def prefix_tokens(self) -> int:
        """Number of tokens before the patches."""
        return self.class_tokens + self.registers

    @property
    def stride(self) -> int:
        """Side in pixels of the square of one token."""
        return self.patch_size

    @property
    def kernel_side(self) -> int:
        """Side in pixels of the patches that `patch_embed` has its kernel for."""
        return self.patch_size

    @nn.compact
    def __call__(
        self,
        images: Float[Array, 'B H W C'],
        train: bool = False,
        *,
        mask: Bool[Array, 'B N'] | None = None,
        masked: Bool[Array, 'B N'] | None = None,
    ) -> dict[str, Float[Array, 'B *rest']]:
        """Classify normalized images.

        Args:
          images: Normalized images.
          train: Whether dropout acts.
          mask: True for patches of the image and false for padding, which does not affect them,
            except that `positions` relative to the size of the grid include it.
          masked: True for patches whose embedding is replaced by the parameter `mask_token`
            [1 1 D], as in masked image modeling. A model has the parameter if it is initialized
            with this argument.

        Returns:
          tokens: [B N D] after the final norm, except with `pool.norm`; the first `prefix_tokens`
            are not patches: any class token and then the registers.
          pre_logits: the head's input, [B D] or [B representation_size].
          logits: [B num_classes] in float32; absent without a head.
          class_logits, distillation_logits: with pool 'distilled'; `logits` is their mean.
        With pool 'none' pre_logits and logits keep the axis of the tokens: [B N D],
        [B N num_classes].
        """
        dtype = jnp.dtype(self.dtype)
        tokens, segments = self._embed(images, masked, train, dtype), None
        if mask is not None:  # tokens before the patches are always real
            extra = ((0, 0), (tokens.shape[1] - mask.shape[1], 0))
            segments = jnp.pad(mask.astype(int), extra, constant_values=1)
        next_key = functools.partial(self.make_rng, 'dropout') if train else None
        grid = images.shape[1] // self.stride, images.shape[2] // self.stride
        positions, relative = attention_positions(self, grid, next_key)
        tokens = self._encoder(dtype, relative)(tokens, train, segments, positions)
        return outputs(self, tokens, segments, train)

    def _embed(self, images: Any, masked: Array | None, train: bool, dtype: Any) -> Array:
        """Embed: z_0 = [x_class; x_p^1 E; ...; x_p^N E] + E_pos, equation 1; registers if any."""
        # Blocks add to the residual stream in its dtype; their norms cast to the computation dtype.
        residual = jnp.dtype(self.block.residual_dtype or dtype)
        x = self._patches(images, dtype).astype(residual)
        if masked is not None:
            x = jnp.where(masked[..., None], self._mask_token().astype(residual), x)
        x = self._add_positions(x, images, 'none')
        for name in ('dist_token', 'cls_token')[2 - self.class_tokens :]:
            x = self._insert(x, 0, name, 1, nn.initializers.zeros)
        x = self._add_positions(x, images, 'class')
        if self.registers:
            x = self._insert(x, self.class_tokens, 'register_tokens', self.registers, REGISTERS)
        x = self._add_positions(x, images, 'all')
        x = Dropout(self.dropout)(x, train)
        if self.block.norm_pre:
            norm = make_norm(self)(self.block.norm_eps, dtype=dtype, name='norm_pre')
            x = norm(x).astype(residual)
        return x

    def _mask_token(self) -> Array:
        return self.param('mask_token', nn.initializers.zeros, (1, 1, self.width))

    def _add_positions(self, x: Array, images: Any, prefix: str) -> Array:
        """Add E_pos if `positions.prefix` is this one."""
        if prefix != self.positions.prefix or self.positions.embed == 'none':
            return x
        return x + self._positions(x.shape[1], images).astype(x.dtype)

    def _insert(self, x: Array, at: int, name: str, count: int, init: Any) -> Array:
        """Insert the parameter `name` [1 count D] before the token of index `at`."""
        tokens = self.param(name, init, (1, count, self.width))
        tokens = jnp.broadcast_to(tokens, (x.shape[0], count, self.width)).astype(x.dtype)
        return jnp.concatenate([x[:, :at], tokens, x[:, at:]], axis=1)

    def _patches(self, images: Any, dtype: Any) -> Array:
        """Embed each patch as a token, row by row, [B N D]."""
        biased = 'patch_embed' not in self.no_bias
        return PatchEmbed(self.patch_size, self.width, dtype, biased, name='patch_embed')(images)

    def _positions(self, tokens: int, images: Any) -> Array:
        if self.positions.embed == 'learn':
            return learned(self, tokens, self.width, self.positions.std)
        table = sincos2d(*patch_grid(images.shape[1], images.shape[2], self.stride), self.width)
        # A class token has no position in the image: its row is zero.
        return jnp.pad(jnp.asarray(table), ((tokens - len(table), 0), (0, 0)))[None]

    def _encoder(self, dtype: Any, relative: Callable[[], nn.Module] | None) -> Encoder:
        fields = self.block
        return Encoder(
            block_factory(self, dtype, relative),
            self.depth,
            fields.drop_path,
            scan=self.scan,
            remat=self.remat,
            final_norm=fields.final_norm and not self.pool.norm and fields.norm_place != 'post',
            norm_eps=fields.norm_eps,
            dtype=dtype,
            norm=make_norm(self),
            name='encoder',
        )

    def layer_order(self) -> tuple[str, ...]:
        """List patterns of the layers' parameters in order: the embeddings, then each block."""
        blocks = (f'^encoder/block_{i}/' for i in range(self.depth))
        tokens = 'cls_token|dist_token|register_tokens|mask_token'
        return f'^(patch_embed|{tokens}|pos_embed|position_bias|norm_pre)(/|$)', *blocks


def parameter_names(**fields: Any) -> tuple[str, ...]:
    """List the top-level names of the parameters of a ViT with these fields."""
    model = Model(**fields | {'depth': 1, 'attention': 'xla'}, parent=None)
    image = jax.ShapeDtypeStruct((1, model.stride, model.stride, 3), jnp.float32)
    return tuple(jax.eval_shape(model.init, jax.random.key(0), image)['params'])


def attention_positions(
    model: Any, grid: tuple[int, int], next_key: KeySource | None
) -> tuple[Rotary | Array | None, Callable[[], nn.Module] | None]:
    """Make the positions within attention that `positions.kind` selects.

    Args:
      model: A ViT, to which a layer `position_bias` is added if all blocks share one.
      grid: Rows and columns of patches.
      next_key: Source of random keys in training; otherwise None.

    Returns:
      Positions for all blocks, and a function that makes a layer for each of them.
    """
    positions = _make_positions(model, grid, next_key)
    if not isinstance(positions, Relative):
        return positions, None
    if positions.shared:
        return positions.bias(model.num_heads, name='position_bias')(), None
    return None, functools.partial(positions.bias, model.num_heads)


def _make_positions(
    model: Any, grid: tuple[int, int], next_key: KeySource | None
) -> Rotary | Relative | None:
    kind, layout = model.positions.kind, Layout(grid, model.class_tokens, model.registers)
    if kind == 'none':
        return None
    if kind == 'relative':
        return Relative(layout, model.positions.relative.shared)
    rotations: Rope | RopeDinov3 = getattr(model.positions, kind)
    return rotations(layout, model.width // model.num_heads, next_key)


def block_factory(
    model: Any, dtype: Any, relative: Callable[[], nn.Module] | None = None
) -> Callable[..., nn.Module]:
    """Make a factory of the blocks of a ViT; see `block_options`."""
    return functools.partial(
        Block,
        num_heads=model.num_heads,
        mlp_dim=model.mlp_dim,
        dropout=model.dropout,
        attention_dropout=model.block.attention_dropout,
        gelu=model.block.gelu,
        norm_eps=model.block.norm_eps,
        dtype=dtype,
        attention_by=model.attention,
        options=block_options(model, relative),
    )


def block_options(model: Any, relative: Callable[[], nn.Module] | None = None) -> BlockOptions:
    """Derive the blocks' options from the fields of a ViT.

    Args:
      model: A ViT.
      relative: Factory of each block's layer of relative biases, see `attention_positions`.
    """
    block = model.block
    norm = functools.partial(make_norm(model), block.norm_eps)
    qk_norm = None
    if block.qk_norm != 'none':
        qk_norm = functools.partial(make_norm(model, block.qk_norm), block.norm_eps)
    return BlockOptions(
        norm=make_norm(model),
        mlp=functools.partial(
            MLPS[block.mlp],
            use_bias='mlp' not in model.no_bias,
            norm=norm if block.mlp_norm else None,
        ),
        layer_scale=block.layer_scale,
        no_bias=tuple(name for name in PROJECTIONS if name in model.no_bias),
        qk_norm=qk_norm,
        inner_norm=norm if block.inner_norm else None,
        relative=relative,
        norm_place=block.norm_place,
    )


def make_norm(model: Any, name: str = '') -> Callable[..., nn.Module]:
    """Select the norm `name`, by default `block.norm`; see `BlockOptions.norm` for its call."""
    kind = NORMS[name or model.block.norm]
    plain = kind is LayerNorm and 'norm' in model.no_bias
    return functools.partial(kind, use_bias=False) if plain else kind


def outputs(
    model: Any, tokens: Float[Array, 'B N D'], segments: Int[Array, 'B N'] | None, train: bool
) -> dict[str, Float[Array, 'B *rest']]:
    """Pool and classify the last tokens of a ViT; see `Model.__call__` and `PoolFields`."""
    x = pool(model, tokens, segments, train)
    if model.head.representation_size:
        size, dtype = model.head.representation_size, jnp.dtype(model.dtype)
        dense = nn.Dense(size, dtype=dtype, name='pre_logits')
        x = nn.tanh(dense(x))
    features = {'tokens': tokens, 'pre_logits': x}
    return features | scores(model, x, tokens, train) if model.num_classes else features


def pool(
    model: Any, tokens: Float[Array, 'B N D'], segments: Int[Array, 'B N'] | None, train: bool
) -> Float[Array, 'B *rest']:
    """Summarize the tokens: y = LN(z_L^0), equation 4 of arXiv:2010.11929, or another pooling.

    The encoder has applied the norm, except with `pool.norm`. Segments are 1 for tokens of the
    image and 0 for padding; None without padding.
    """
    kind = model.pool.kind
    if kind == 'cls':
        return tokens[:, 0]
    if kind == 'distilled':
        return tokens[:, :2].mean(axis=1)
    if kind == 'none':
        return tokens
    cls = tokens[:, 0]
    if (first := model.prefix_tokens) and kind != 'cls_map':
        tokens, segments = tokens[:, first:], None if segments is None else segments[:, first:]
    if kind in (*MEANS, 'cls_patches'):
        mean = tokens.mean(axis=1) if segments is None else segment_mean(tokens, segments)[:, 0]
        if kind == 'cls_patches':
            return jnp.concatenate([cls, mean], axis=-1)
        norm = make_norm(model)(model.block.norm_eps, dtype=jnp.dtype(model.dtype), name='fc_norm')
        return norm(mean) if model.pool.norm else mean
    head = MapHead(
        *(model.pool.num_heads or model.num_heads, model.pool.mlp_dim or model.mlp_dim),
        *(model.block.gelu, model.block.norm_eps),
        dtype=jnp.dtype(model.dtype),
        name='map_head',
    )
    return head(tokens, train) if segments is None else head(tokens, train, segments)[:, 0]


def scores(
    model: Any, x: Float[Array, '*_ F'], tokens: Float[Array, 'B N D'], train: bool
) -> dict[str, Float[Array, '*_ C']]:
    """Compute scores of `model.num_classes` classes in float32.

    Args:
      model: A ViT.
      x: Representation of each image.
      tokens: Tokens after the encoder.
      train: Whether a batch norm takes the statistics of this batch.
    """
    dense = functools.partial(
        class_head,
        *(model.num_classes, model.head.bias),
        use_bias='head' not in model.no_bias,
    )
    if model.pool.kind == 'distilled':
        of_class, of_teacher = DistilledHead(dense, name='head')(tokens[:, :2])
        mean = (of_class + of_teacher) / 2
        return {'logits': mean, 'class_logits': of_class, 'distillation_logits': of_teacher}
    if model.head.norm == 'batch':
        plain = {'use_bias': False, 'use_scale': False, 'dtype': jnp.float32, 'name': 'head_norm'}
        x = BatchNorm(not train, momentum=0.9, epsilon=1e-6, **plain)(x)
    return {'logits': dense(name='head')(x)}


class DistilledHead(nn.Module):
    """A head for the class token, and one for the distillation token: DeiT, arXiv:2012.12877.

    The first has the parameters `kernel` and `bias`, the other `distillation/kernel` and
    `distillation/bias`.
    """

    dense: Callable[[], nn.Dense]

    def setup(self) -> None:
        self.first, self.distillation = self.dense(), self.dense()
        nn.share_scope(self, self.first)

    def __call__(
        self, tokens: Float[Array, 'B 2 D']
    ) -> tuple[Float[Array, 'B C'], Float[Array, 'B C']]:
        return self.first(tokens[:, 0]), self.distillation(tokens[:, 1])
