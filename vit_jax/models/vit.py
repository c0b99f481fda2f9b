"""Vision Transformer: an image is a sequence of patches.

Dosovitskiy et al., 2021, arXiv:2010.11929, with the parts of later families to choose from.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import Array

from vit_jax.array_types import Bool, Float, Int
from vit_jax.errors import UserError, check_choice, check_multiple
from vit_jax.models import base
from vit_jax.models.base import check_fields, parse_choice
from vit_jax.nn.blocks import MLPS, Block, BlockOptions, Encoder, MapHead, segment_mean
from vit_jax.nn.dense import class_head
from vit_jax.nn.norms import NORMS, BatchNorm, LayerNorm
from vit_jax.nn.patches import PatchEmbed, patch_grid
from vit_jax.nn.positions import Relative, learned, relative, sincos2d
from vit_jax.nn.rotary import KeySource, Layout, Rotary, rope, rope_dinov3
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


POOLS = ('cls', 'gap', 'patches', 'cls_patches', 'map', 'cls_map', 'none', 'distilled')
WITH_CLASS_TOKEN = ('cls', 'patches', 'cls_patches', 'cls_map', 'distilled')
MEANS = ('gap', 'patches')
HEAD_NORMS = ('none', 'batch')
POSEMBS = ('learn', 'sincos2d', 'none')
POSEMB_PREFIXES = ('none', 'class', 'all')
REGISTERS = nn.initializers.normal(0.02)
# Functions of the tokens' layout, a head's width and a source of keys; options follow the `*`.
POSITIONS: Mapping[str, Callable[..., Rotary | Relative]] = {
    **{'rope': rope, 'rope_dinov3': rope_dinov3},
    'relative': relative,
}
NORM_PLACES = ('pre', 'post', 'res_post')
# The layers of a ViT that may have no bias; those of attention come first.
PROJECTIONS = ('query', 'key', 'value', 'out')
BIASES = (*PROJECTIONS, 'patch_embed', 'mlp', 'norm', 'head')


class Model(base.PatchModel):
    """ViT. Images of any size that whole patches tile, square or not.

    Attributes:
      num_classes: outputs of the head; None or 0 leaves the head out.
      patch_size: side of a patch in pixels.
      width: D, token width.
      depth: L, number of blocks.
      mlp_dim: hidden width of the blocks' MLPs.
      num_heads: attention heads; divides width.
      pool: the head's input. 'cls': an extra class token, as in the paper. 'gap': the mean of the
        tokens. 'patches': the mean of the patches, in a model that also has a class token.
        'cls_patches': the class token beside that mean, [B 2 D], as for DINOv2's classifiers.
        'map': attention pooling; 'cls_map': of all tokens, also a class token (PE core). 'none':
        every token by itself. 'distilled': a class token and a distillation token, with a head each
        (DeiT, arXiv:2012.12877, section 4).
      pool_heads, pool_mlp_dim: of attention pooling; None for those of the blocks.
      fc_norm: whether the final norm is applied to the mean of the tokens instead of to the tokens,
        as in fine-tuning of MAE (arXiv:2111.06377).
      posemb: positions that are added to the tokens: 'learn', 'sincos2d' (fixed) or 'none'.
      posemb_prefix: tokens before the patches that have positions: 'class', class and distillation
        tokens (the paper); 'none' (big_vision, DeiT III); 'all', also registers (YOLOS).
      posemb_std: initial standard deviation of learned positions; 0.02 in the authors' code,
        width^-1/2 in big_vision.
      representation_size: width of a tanh layer before the head; None for no such layer.
      dropout: dropout rate after the position embedding and each dense layer of a block.
      attention_dropout: dropout of the attention weights.
      drop_path: stochastic depth of the last block, rising linearly from 0 at the first.
      head_norm: 'none', or 'batch': batch normalization without parameters before the head, for a
        linear probe of features of any scale (MAE, arXiv:2111.06377, appendix A.1).
      head_bias: initial value of the head's biases.
      gelu: 'tanh' (approximate), 'erf' (exact) or 'quick' (x sigmoid(1.702 x), CLIP's).
      norm: 'layer' or 'rms' (without means and biases, arXiv:1910.07467).
      norm_eps: added to the variance in norms.
      norm_place: 'pre', the paper's; 'post', after the sums, without a final norm; or 'res_post',
        on the branches before the sums (Swin v2).
      norm_pre: whether the tokens are normalized before the first block too (CLIP).
      final_norm: whether the tokens are normalized after the last block (not in RADIO).
      mlp: 'mlp' (the paper's) or 'swiglu' (DINOv2, EVA-02, DINOv3), with a norm inside
        'mlp(norm=True)' or 'swiglu(norm=True)'; `mlp_dim` is the width between its layers.
      layer_scale: initial value of a learned factor for each channel of every branch
        (arXiv:2103.17239); None for none.
      registers: tokens between the class token and the patches, which no pooling reads
        (arXiv:2309.16588); without positions unless `posemb_prefix` is 'all'.
      positions: positions within attention: 'none'; 'rope', rotations counted in patches, with
        the options of `nn.rotary.rope`, as in 'rope(reference=16)' (EVA-02); or 'rope_dinov3',
        those of `nn.rotary.rope_dinov3`, as in 'rope_dinov3(rescale=2.0)'; 'relative', a learned
        bias for each relative position, or 'relative(shared=True)', the same in all blocks (BEiT).
      qk_norm: norm of the heads of queries and keys: 'none', 'layer' or 'rms'.
      inner_norm: whether the joined heads are normalized (EVA-02 of CLIP, BEiT-3; sub-LN).
      no_bias: layers without biases: some of 'query', 'key', 'value', 'out', 'patch_embed', 'mlp',
        'norm' and 'head', as in 'query|key|value'.
      scan: one scanned block instead of `depth` unrolled ones; see `Encoder`.
      remat: recomputation in the backward pass: False, 'dots', 'names' or 'nothing' (True), in the
        order of what blocks keep; see `vit_jax.nn.attention`.
      attention: implementation: 'xla'; 'pallas', a TPU kernel for sequences that fit into VMEM;
        'cudnn', a kernel for GPUs in half precision; or 'auto', the kernel if the devices support
        it. See docs/kernels.md.
      dtype: computation dtype. Parameters, layer norm statistics and softmax stay float32.
      residual_dtype: of the residual stream; that of the computation if None. big_vision uses
        'float32' with bfloat16 computation.

    Raises:
      UserError: if a field has no such value, or images do not fit the patches or `pos_embed`.
    """

    num_classes: int | None = None
    patch_size: int = 16
    width: int = 768
    depth: int = 12
    mlp_dim: int = 3072
    num_heads: int = 12
    pool: str = 'cls'
    pool_heads: int | None = None
    pool_mlp_dim: int | None = None
    fc_norm: bool = False
    posemb: str = 'learn'
    posemb_prefix: str = 'class'
    posemb_std: float = 0.02
    representation_size: int | None = None
    dropout: float = 0.0
    attention_dropout: float = 0.0
    drop_path: float = 0.0
    head_norm: str = 'none'
    head_bias: float = 0.0
    gelu: str = 'tanh'
    norm: str = 'layer'
    norm_eps: float = 1e-6
    norm_place: str = 'pre'
    norm_pre: bool = False
    final_norm: bool = True
    mlp: str = 'mlp'
    layer_scale: float | None = None
    registers: int = 0
    positions: str = 'none'
    qk_norm: str = 'none'
    inner_norm: bool = False
    no_bias: str = ''
    scan: bool = False
    remat: bool | str = False
    attention: str = 'auto'
    dtype: str = 'float32'
    residual_dtype: str | None = None

    weightless: ClassVar[tuple[str, ...]] = (
        *('dropout', 'attention_dropout', 'drop_path', 'head_norm', 'head_bias', 'posemb_std'),
        *('gelu', 'norm_eps', 'scan', 'remat', 'attention', 'dtype', 'residual_dtype'),
    )
    binding = (*base.Model.binding, 'norm_place')
    noted: ClassVar[tuple[str, ...]] = (*base.Model.noted, 'positions')
    head_layers: ClassVar[tuple[str, ...]] = ('pre_logits', 'head')

    def __post_init__(self) -> None:
        check_choice('pool', self.pool, POOLS)
        check_choice('posemb', self.posemb, POSEMBS)
        check_choice('posemb_prefix', self.posemb_prefix, POSEMB_PREFIXES)
        check_choice('head_norm', self.head_norm, HEAD_NORMS)
        check_fields(self, 'gelu', 'attention', 'dtype', 'remat', 'residual_dtype')
        check_fields(self, 'dropout', 'attention_dropout', 'drop_path')
        check_multiple('width', self.width, 'num_heads', self.num_heads)
        if self.fc_norm and self.pool not in MEANS:
            raise UserError(
                f'fc_norm norms a mean of tokens: take pool {" or ".join(map(repr, MEANS))}, '
                f'not {self.pool!r}'
            )
        if self.pool == 'distilled' and (self.representation_size or self.head_norm != 'none'):
            raise UserError("pool 'distilled' takes no representation_size and no head_norm")
        check_choice('norm', self.norm, NORMS)
        check_choice('qk_norm', self.qk_norm, ('none', *NORMS))
        check_choice('norm_place', self.norm_place, NORM_PLACES)
        if self.registers < 0:
            raise UserError(f'registers must be at least 0, not {self.registers}')
        block_options(self)
        _make_positions(self, (1, 1), None)
        super().__post_init__()

    @property
    def class_tokens(self) -> int:
        """Number of class and distillation tokens, which come first."""
        return int(self.pool in WITH_CLASS_TOKEN) + (self.pool == 'distilled')

    @property
    def positioned_tokens(self) -> int:
        """Number of tokens before the patches that have a row of `pos_embed`."""
        rows = self.class_tokens if self.posemb_prefix == 'class' else self.prefix_tokens
        return rows if self.posemb_prefix != 'none' else 0

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
        """Class scores of normalized images.

        Args:
          images: normalized.
          train: whether dropout acts.
          mask: true for patches of the image and false for padding, which does not affect them,
            except that `positions` relative to the size of the grid count it in.
          masked: true for patches whose embedding is replaced by the parameter `mask_token`
            [1 1 D], as in masked image modeling. A model has the parameter if it is initialized
            with this argument.

        Returns:
          tokens: [B N D] after the final norm, except with `fc_norm`; the first `prefix_tokens`
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
        """z_0 = [x_class; x_p^1 E; ...; x_p^N E] + E_pos, equation 1; registers as configured."""
        # Blocks add to the residual stream in its dtype; their norms cast to that of computation.
        residual = jnp.dtype(self.residual_dtype or dtype)
        x = self._patches(images, dtype).astype(residual)
        if masked is not None:
            token = self.param('mask_token', nn.initializers.zeros, (1, 1, self.width))
            x = jnp.where(masked[..., None], token.astype(residual), x)
        for prefix in POSEMB_PREFIXES:  # tokens come before the patches in this order
            for name in ('dist_token', 'cls_token')[2 - self.class_tokens :]:
                x = self._insert(x, 0, name, 1, nn.initializers.zeros) if prefix == 'class' else x
            if prefix == 'all' and self.registers:
                x = self._insert(x, self.class_tokens, 'register_tokens', self.registers)
            if prefix == self.posemb_prefix and self.posemb != 'none':
                x = x + self._positions(x.shape[1], images).astype(residual)
        x = Dropout(self.dropout)(x, train)
        if self.norm_pre:
            norm = make_norm(self)(self.norm_eps, dtype=dtype, name='norm_pre')
            x = norm(x).astype(residual)
        return x

    def _insert(self, x: Array, at: int, name: str, count: int, init: Any = REGISTERS) -> Array:
        """The tokens with those of the parameter `name` [1 count D] from index `at` on."""
        tokens = self.param(name, init, (1, count, self.width))
        tokens = jnp.broadcast_to(tokens, (len(x), count, self.width)).astype(x.dtype)
        return jnp.concatenate([x[:, :at], tokens, x[:, at:]], axis=1)

    def _patches(self, images: Any, dtype: Any) -> Array:
        """One token for each patch, row by row, [B N D]."""
        biased = 'patch_embed' not in without_bias(self.no_bias)
        return PatchEmbed(self.patch_size, self.width, dtype, biased, name='patch_embed')(images)

    def _positions(self, tokens: int, images: Any) -> Array:
        if self.posemb == 'learn':
            return learned(self, tokens, self.width, self.posemb_std)
        table = sincos2d(*patch_grid(images.shape[1], images.shape[2], self.stride), self.width)
        # A class token has no position in the image: its row is zero.
        return jnp.pad(jnp.asarray(table), ((tokens - len(table), 0), (0, 0)))[None]

    def _encoder(self, dtype: Any, relative: Callable[[], nn.Module] | None) -> Encoder:
        block = functools.partial(
            Block,
            num_heads=self.num_heads,
            mlp_dim=self.mlp_dim,
            dropout=self.dropout,
            attention_dropout=self.attention_dropout,
            gelu=self.gelu,
            norm_eps=self.norm_eps,
            dtype=dtype,
            attention_by=self.attention,
            options=block_options(self, relative),
        )
        return Encoder(
            block,
            self.depth,
            self.drop_path,
            scan=self.scan,
            remat=self.remat,
            final_norm=self.final_norm and not self.fc_norm and self.norm_place != 'post',
            norm_eps=self.norm_eps,
            dtype=dtype,
            norm=make_norm(self),
            name='encoder',
        )

    def layer_order(self) -> tuple[str, ...]:
        """Patterns of the layers' parameters from the image on: the embeddings, then each block."""
        blocks = (f'^encoder/block_{i}/' for i in range(self.depth))
        tokens = 'cls_token|dist_token|register_tokens|mask_token'
        return f'^(patch_embed|{tokens}|pos_embed|position_bias|norm_pre)(/|$)', *blocks


def parameter_names(**fields: Any) -> tuple[str, ...]:
    """The names of the parameters, or of the groups of them, of a ViT with these fields."""
    model = Model(**fields | {'depth': 1, 'attention': 'xla'}, parent=None)
    image = jax.ShapeDtypeStruct((1, model.stride, model.stride, 3), jnp.float32)
    return tuple(jax.eval_shape(model.init, jax.random.key(0), image)['params'])


def attention_positions(
    model: Any, grid: tuple[int, int], next_key: KeySource | None
) -> tuple[Rotary | Array | None, Callable[[], nn.Module] | None]:
    """Positions within attention, from the field `positions`.

    Args:
      model: a ViT, to which a layer `position_bias` is added if all blocks share one.
      grid: rows and columns of patches.
      next_key: a source of random keys in training; else None.

    Returns:
      Positions for all blocks, and a function that makes a layer for each of them.
    """
    found = _make_positions(model, grid, next_key)
    if not isinstance(found, Relative):
        return found, None
    if found.shared:
        return found.bias(model.num_heads, name='position_bias')(), None
    return None, functools.partial(found.bias, model.num_heads)


def _make_positions(
    model: Any, grid: tuple[int, int], next_key: KeySource | None
) -> Rotary | Relative | None:
    if model.positions == 'none':
        return None
    layout = Layout(grid, model.class_tokens, model.registers)
    make = parse_choice('positions', model.positions, POSITIONS)
    return make(layout, model.width // model.num_heads, next_key)


def block_options(model: Any, relative: Callable[[], nn.Module] | None = None) -> BlockOptions:
    """The options of the blocks from the fields of a ViT.

    Args:
      model: a ViT.
      relative: makes a layer of relative biases for each block, see `attention_positions`.
    """
    absent = without_bias(model.no_bias)
    make_mlp = parse_choice('mlp', model.mlp, MLPS)
    norm = functools.partial(make_norm(model), model.norm_eps)
    qk_norm = None
    if model.qk_norm != 'none':
        qk_norm = functools.partial(make_norm(model, model.qk_norm), model.norm_eps)
    return BlockOptions(
        norm=make_norm(model),
        mlp=make_mlp(norm, 'mlp' not in absent),
        layer_scale=model.layer_scale,
        no_bias=tuple(name for name in PROJECTIONS if name in absent),
        qk_norm=qk_norm,
        inner_norm=norm if model.inner_norm else None,
        relative=relative,
        norm_place=model.norm_place,
    )


def make_norm(model: Any, name: str = '') -> Callable[..., nn.Module]:
    """The norm `name`, by default the field `norm`, called as `BlockOptions.norm` is."""
    kind = NORMS[name or model.norm]
    plain = kind is LayerNorm and 'norm' in without_bias(model.no_bias)
    return functools.partial(kind, use_bias=False) if plain else kind


def without_bias(text: str) -> frozenset[str]:
    """The layers of BIASES in a text such as 'query|key'.

    Raises:
      UserError: if there is no such layer.
    """
    layers = frozenset(filter(None, (layer.strip() for layer in text.split('|'))))
    for layer in sorted(layers):
        check_choice('layer of no_bias', layer, BIASES)
    return layers


def outputs(
    model: Any, tokens: Float[Array, 'B N D'], segments: Int[Array, 'B N'] | None, train: bool
) -> dict[str, Float[Array, 'B *rest']]:
    """The outputs of a ViT from its last tokens; see `Model.__call__` and the field `pool`."""
    x = pool(model, tokens, segments, train)
    if model.representation_size:
        dense = nn.Dense(model.representation_size, dtype=jnp.dtype(model.dtype), name='pre_logits')
        x = nn.tanh(dense(x))
    found = {'tokens': tokens, 'pre_logits': x}
    return found | scores(model, x, tokens, train) if model.num_classes else found


def pool(
    model: Any, tokens: Float[Array, 'B N D'], segments: Int[Array, 'B N'] | None, train: bool
) -> Float[Array, 'B *rest']:
    """y = LN(z_L^0), equation 4 of arXiv:2010.11929, or another summary.

    The encoder has applied the norm, except with `fc_norm`. Segments are 1 for tokens of the image
    and 0 for padding; None without padding.
    """
    if model.pool == 'cls':
        return tokens[:, 0]
    if model.pool == 'distilled':
        return tokens[:, :2].mean(axis=1)
    if model.pool == 'none':
        return tokens
    cls = tokens[:, 0]
    if (first := model.prefix_tokens) and model.pool != 'cls_map':
        tokens, segments = tokens[:, first:], None if segments is None else segments[:, first:]
    if model.pool in (*MEANS, 'cls_patches'):
        mean = tokens.mean(axis=1) if segments is None else segment_mean(tokens, segments)[:, 0]
        if model.pool == 'cls_patches':
            return jnp.concatenate([cls, mean], axis=-1)
        norm = make_norm(model)(model.norm_eps, dtype=jnp.dtype(model.dtype), name='fc_norm')
        return norm(mean) if model.fc_norm else mean
    head = MapHead(
        *(model.pool_heads or model.num_heads, model.pool_mlp_dim or model.mlp_dim),
        *(model.gelu, model.norm_eps),
        dtype=jnp.dtype(model.dtype),
        name='map_head',
    )
    return head(tokens, train) if segments is None else head(tokens, train, segments)[:, 0]


def scores(
    model: Any, x: Float[Array, '*_ F'], tokens: Float[Array, 'B N D'], train: bool
) -> dict[str, Float[Array, '*_ C']]:
    """Scores of `model.num_classes` classes in float32.

    Args:
      model: a ViT.
      x: the representation.
      tokens: after the encoder.
      train: whether a batch norm takes the statistics of this batch.
    """
    dense = functools.partial(
        class_head,
        *(model.num_classes, model.head_bias),
        use_bias='head' not in without_bias(model.no_bias),
    )
    if model.pool == 'distilled':
        both = DistilledHead(dense, name='head')(tokens[:, :2])
        mean = (both[0] + both[1]) / 2
        return {'logits': mean, 'class_logits': both[0], 'distillation_logits': both[1]}
    if model.head_norm == 'batch':
        plain = {'use_bias': False, 'use_scale': False, 'dtype': jnp.float32, 'name': 'head_norm'}
        x = BatchNorm(not train, momentum=0.9, epsilon=1e-6, **plain)(x)
    return {'logits': dense(name='head')(x)}


class DistilledHead(nn.Module):
    """A head for the class token, and one for the distillation token: DeiT, arXiv:2012.12877.

    Parameters `kernel` and `bias` of the first, `distillation/kernel` and `distillation/bias`.
    """

    dense: Callable[[], nn.Dense]

    def setup(self) -> None:
        self.first, self.distillation = self.dense(), self.dense()
        nn.share_scope(self, self.first)

    def __call__(
        self, tokens: Float[Array, 'B 2 D']
    ) -> tuple[Float[Array, 'B C'], Float[Array, 'B C']]:
        return self.first(tokens[:, 0]), self.distillation(tokens[:, 1])
