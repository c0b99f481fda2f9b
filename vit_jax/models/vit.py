"""Vision Transformer: an image is a sequence of patches.

Dosovitskiy et al., 2021, arXiv:2010.11929; the larger shapes are from Zhai et al., 2021,
arXiv:2106.04560, and Alabdulmohsin et al., 2023, arXiv:2305.13035.
"""

import functools
import re
from collections.abc import Mapping
from typing import Any

import flax.linen as nn
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from vit_jax.errors import UserError, check_choice, check_multiple, nearest
from vit_jax.models import _resize, base
from vit_jax.nn.attention_choice import ATTENTIONS
from vit_jax.nn.attention_maps import AttentionMap, collect
from vit_jax.nn.blocks import GELUS, Block, Encoder
from vit_jax.nn.parameter_pictures import (
    ParameterPictures,
    embedding_filters,
    grid_of,
    position_similarity,
)
from vit_jax.nn.patches import PatchEmbed, patch_grid
from vit_jax.nn.pooling import MapHead, segment_mean
from vit_jax.nn.positions import learned, sincos2d
from vit_jax.nn.recompute import check_remat
from vit_jax.nn.stochastic import Dropout, check_rate

POOLS = ('cls', 'gap', 'patches', 'map', 'none')
WITH_CLASS_TOKEN = ('cls', 'patches')
MEANS = ('gap', 'patches')
HEAD_NORMS = ('none', 'batch')
POSEMBS = ('learn', 'sincos2d')
DTYPES = ('float32', 'bfloat16', 'float16')

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
    if shape not in VARIANTS:
        raise UserError(nearest('ViT variant', shape, VARIANTS))
    if not slash or not re.fullmatch('[1-9][0-9]*', patch):
        raise UserError(f'ViT variant {name!r} needs a patch size, for example {shape}/16')
    width, depth, mlp_dim, num_heads = VARIANTS[shape]
    return {
        'patch_size': int(patch),
        'width': width,
        'depth': depth,
        'mlp_dim': mlp_dim,
        'num_heads': num_heads,
    }


class Model(base.Model):
    """ViT. Images of any size that whole patches tile, square or not.

    Attributes:
      num_classes: outputs of the head; None or 0 leaves the head out.
      patch_size: side of a patch in pixels.
      width: D, token width.
      depth: L, number of blocks.
      mlp_dim: hidden width of the blocks' MLPs.
      num_heads: attention heads; divides width.
      pool: the head's input. 'cls': an extra class token, as in the paper. 'gap': the mean of the
        tokens. 'patches': the mean of the patches, in a model that also has a class token. 'map':
        attention pooling. 'none': every token by itself.
      fc_norm: whether the final norm is applied to the mean of the tokens instead of to the tokens,
        as in fine-tuning of MAE (arXiv:2111.06377).
      posemb: 'learn', or 'sincos2d' (fixed).
      posemb_std: initial standard deviation of learned positions; 0.02 in the authors' code,
        width^-1/2 in big_vision.
      representation_size: width of a tanh layer before the head; None for no such layer.
      dropout: dropout rate after the position embedding and each dense layer of a block.
      attention_dropout: dropout of the attention weights.
      drop_path: stochastic depth of the last block, rising linearly from 0 at the first.
      head_norm: 'none', or 'batch': batch normalization without parameters before the head, for a
        linear probe of features of any scale (MAE, arXiv:2111.06377, appendix A.1).
      head_bias: initial value of the head's biases.
      gelu: 'tanh' (approximate) or 'erf' (exact).
      norm_eps: added to the variance in layer norms.
      scan: one scanned block instead of `depth` unrolled ones; see `Encoder`.
      remat: recomputation in the backward pass: False, 'dots', 'names' or 'nothing' (True), in the
        order of what blocks keep; see `vit_jax.nn.recompute`.
      attention: implementation: 'xla'; 'pallas', a TPU kernel for sequences that fit into VMEM;
        or 'auto', the kernel if the devices support it. See docs/tpu.md.
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
    fc_norm: bool = False
    posemb: str = 'learn'
    posemb_std: float = 0.02
    representation_size: int | None = None
    dropout: float = 0.0
    attention_dropout: float = 0.0
    drop_path: float = 0.0
    head_norm: str = 'none'
    head_bias: float = 0.0
    gelu: str = 'tanh'
    norm_eps: float = 1e-6
    scan: bool = False
    remat: bool | str = False
    attention: str = 'auto'
    dtype: str = 'float32'
    residual_dtype: str | None = None

    weightless = (
        *('dropout', 'attention_dropout', 'drop_path', 'head_norm', 'head_bias', 'posemb_std'),
        *('gelu', 'norm_eps', 'scan', 'remat', 'attention', 'dtype', 'residual_dtype'),
    )

    def __post_init__(self) -> None:
        check_choice('pool', self.pool, POOLS)
        check_choice('posemb', self.posemb, POSEMBS)
        check_choice('head_norm', self.head_norm, HEAD_NORMS)
        check_choice('gelu', self.gelu, GELUS)
        check_choice('attention', self.attention, ATTENTIONS)
        check_choice('dtype', self.dtype, DTYPES)
        check_remat(self.remat)
        if self.residual_dtype is not None:
            check_choice('residual_dtype', self.residual_dtype, DTYPES)
        for rate in ('dropout', 'attention_dropout', 'drop_path'):
            check_rate(rate, getattr(self, rate))
        check_multiple('width', self.width, 'num_heads', self.num_heads)
        if self.fc_norm and self.pool not in MEANS:
            raise UserError(
                f'fc_norm norms a mean of tokens: take pool {" or ".join(map(repr, MEANS))}, '
                f'not {self.pool!r}'
            )
        super().__post_init__()

    @property
    def stride(self) -> int:
        """Side in pixels of the square of one token."""
        return self.patch_size

    @nn.compact
    def __call__(
        self,
        images: Float[Array, 'B H W C'],
        train: bool = False,
        *,
        mask: Bool[Array, 'B N'] | None = None,
    ) -> dict[str, Float[Array, 'B *rest']]:
        """Class scores of normalized images.

        `mask` is true for patches of the image and false for padding, which does not affect them.

        Returns:
          tokens: [B N D] after the final norm, except with `fc_norm`; any class token
            comes first.
          pre_logits: the head's input, [B D] or [B representation_size].
          logits: [B num_classes] in float32; absent without a head.
        With pool 'none' the last two keep the axis of the tokens: [B N D], [B N num_classes].
        """
        dtype = jnp.dtype(self.dtype)
        tokens, segments = self._embed(images, train, dtype), None
        if mask is not None:  # a class token is always real
            extra = ((0, 0), (tokens.shape[1] - mask.shape[1], 0))
            segments = jnp.pad(mask.astype(int), extra, constant_values=1)
        tokens = self._encoder(dtype)(tokens, train, segments)
        outputs = {'tokens': tokens, 'pre_logits': self._pool(tokens, segments, train, dtype)}
        if self.representation_size:
            dense = nn.Dense(self.representation_size, dtype=dtype, name='pre_logits')
            outputs['pre_logits'] = nn.tanh(dense(outputs['pre_logits']))
        if self.num_classes:
            x = outputs['pre_logits']
            if self.head_norm == 'batch':
                x = self._batch_norm(train)(x)
            outputs['logits'] = self._head(self.num_classes)(x)
        return outputs

    def attention_maps(
        self, intermediates: Mapping[str, Any], images: Float[Array, 'B H W C']
    ) -> list[AttentionMap]:
        """Attention maps from the `intermediates` of a call with these images."""
        _, height, width, _ = images.shape
        grid = patch_grid(height, width, self.stride)
        return collect(intermediates, 'encoder', grid, grid)

    def parameter_pictures(
        self, params: Mapping[str, Any], image_size: tuple[int, int] | None
    ) -> list[ParameterPictures]:
        """Similarities of the positions of patches, and the filters that embed them."""
        grid = grid_of(image_size, self.stride)
        table = sincos2d(*grid, self.width)
        if self.posemb == 'learn':
            table = params['pos_embed'][0, int(self.pool in WITH_CLASS_TOKEN) :]
        return [position_similarity('pos_embed', table, grid), *embedding_filters(params)]

    # From the representation on; the last has an output for each class.
    head_layers = ('pre_logits', 'head')

    def resize_params(
        self,
        params: dict[str, Any],
        old_size: tuple[int, int] | None,
        new_size: tuple[int, int],
        method: str = 'bilinear',
    ) -> tuple[dict[str, Any], list[str]]:
        """The parameters for images, and patches, of another size; see `base.Model`.

        If `old_size` is None, the old patches are assumed to form a square.

        Raises:
          UserError: if the images cannot be cut into patches, or the old patches form no square.
        """
        notes: list[str] = []
        patch = _resize.patch_size(params) or self.patch_size
        if self.posemb == 'learn' and 'pos_embed' in params:
            stride = self.stride // self.patch_size * patch
            old = old_size and (old_size[0] // stride, old_size[1] // stride)
            new, prefix = patch_grid(*new_size, self.stride), int(self.pool in WITH_CLASS_TOKEN)
            params, notes = _resize.positions(params, old, new, prefix, method)
        if patch != self.patch_size:
            params, note = _resize.patches(params, self.patch_size)
            notes += note
        return params, notes

    def layer_order(self) -> tuple[str, ...]:
        """Patterns of the layers' parameters from the image on: the embeddings, then each block."""
        blocks = (f'^encoder/block_{i}/' for i in range(self.depth))
        return '^(patch_embed|cls_token|pos_embed)(/|$)', *blocks

    def _embed(self, images: Array, train: bool, dtype: Any) -> Array:
        """z_0 = [x_class; x_p^1 E; ...; x_p^N E] + E_pos, equation 1."""
        # Blocks add to the residual stream in its dtype; their norms cast to that of computation.
        residual = jnp.dtype(self.residual_dtype or dtype)
        x = self._patches(images, dtype).astype(residual)
        if self.pool in WITH_CLASS_TOKEN:
            token = self.param('cls_token', nn.initializers.zeros, (1, 1, self.width))
            token = jnp.broadcast_to(token, (x.shape[0], 1, self.width)).astype(residual)
            x = jnp.concatenate([token, x], axis=1)
        x = x + self._positions(x.shape[1], *images.shape[1:3]).astype(residual)
        return Dropout(self.dropout)(x, train)

    def _patches(self, images: Array, dtype: Any) -> Array:
        """One token for each patch, row by row, [B N D]."""
        return PatchEmbed(self.patch_size, self.width, dtype, name='patch_embed')(images)

    def _positions(self, tokens: int, height: int, width: int) -> Array:
        if self.posemb == 'learn':
            return learned(self, tokens, self.width, self.posemb_std)
        table = sincos2d(*patch_grid(height, width, self.stride), self.width)
        # A class token has no position in the image: its row is zero.
        return jnp.pad(jnp.asarray(table), ((tokens - len(table), 0), (0, 0)))[None]

    def _encoder(self, dtype: Any) -> Encoder:
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
        )
        return Encoder(
            block,
            self.depth,
            self.drop_path,
            scan=self.scan,
            remat=self.remat,
            final_norm=not self.fc_norm,
            norm_eps=self.norm_eps,
            dtype=dtype,
            name='encoder',
        )

    def _pool(self, tokens: Array, segments: Array | None, train: bool, dtype: Any) -> Array:
        """y = LN(z_L^0), equation 4, or another summary.

        The encoder has applied the norm, except with `fc_norm`.
        """
        if self.pool == 'cls':
            return tokens[:, 0]
        if self.pool in MEANS:
            first = int(self.pool in WITH_CLASS_TOKEN)
            x, own = tokens[:, first:], None if segments is None else segments[:, first:]
            mean = x.mean(axis=1) if own is None else segment_mean(x, own)[:, 0]
            norm = nn.LayerNorm(self.norm_eps, dtype=dtype, name='fc_norm')
            return norm(mean) if self.fc_norm else mean
        if self.pool == 'none':
            return tokens
        head = MapHead(
            self.num_heads, self.mlp_dim, self.gelu, self.norm_eps, dtype, name='map_head'
        )
        return head(tokens, train) if segments is None else head(tokens, train, segments)[:, 0]

    def _batch_norm(self, train: bool) -> nn.BatchNorm:
        return nn.BatchNorm(
            use_running_average=not train,
            momentum=0.9,
            epsilon=1e-6,
            dtype=jnp.float32,
            use_bias=False,
            use_scale=False,
            name='head_norm',
        )

    def _head(self, num_classes: int) -> nn.Dense:
        return nn.Dense(
            num_classes,
            dtype=jnp.float32,
            kernel_init=nn.initializers.zeros,
            bias_init=nn.initializers.constant(self.head_bias),
            name='head',
        )
