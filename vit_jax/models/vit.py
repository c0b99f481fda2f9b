"""Vision Transformer: an image is a sequence of patches.

Dosovitskiy et al., 2021, arXiv:2010.11929, with the parts of later families to choose from.
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import flax.linen as nn
import jax.numpy as jnp
from jax import Array

from vit_jax.array_types import Bool, Float
from vit_jax.errors import UserError, check_choice, check_multiple
from vit_jax.models import _resize, _vit_head, _vit_parts, base
from vit_jax.models._vit_head import HEAD_NORMS, MEANS, POOLS, WITH_CLASS_TOKEN
from vit_jax.models._vit_sizes import VARIANTS as VARIANTS
from vit_jax.models._vit_sizes import variant as variant
from vit_jax.models.base import Params, Resized, Size, check_fields
from vit_jax.nn.attention_maps import AttentionMap, collect
from vit_jax.nn.blocks import Block, Encoder
from vit_jax.nn.parameter_pictures import (
    ParameterPictures,
    embedding_filters,
    grid_of,
    position_similarity,
)
from vit_jax.nn.patches import PatchEmbed, patch_grid
from vit_jax.nn.positions import learned, sincos2d
from vit_jax.nn.stochastic import Dropout

POSEMBS = ('learn', 'sincos2d', 'none')


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
        tokens. 'patches': the mean of the patches, in a model that also has a class token.
        'cls_patches': the class token beside that mean, [B 2 D], as for DINOv2's classifiers.
        'map': attention pooling. 'none': every token by itself. 'distilled': a class token and a
        distillation token, with a head each (DeiT, arXiv:2012.12877, section 4).
      fc_norm: whether the final norm is applied to the mean of the tokens instead of to the tokens,
        as in fine-tuning of MAE (arXiv:2111.06377).
      posemb: positions that are added to the tokens: 'learn', 'sincos2d' (fixed) or 'none'.
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
        'swiglu(norm=True)'; `mlp_dim` is the width between its layers.
      layer_scale: initial value of a learned factor for each channel of every branch
        (arXiv:2103.17239); None for none.
      registers: tokens without positions between the class token and the patches, which no pooling
        reads (arXiv:2309.16588).
      positions: positions that attention knows: 'none'; 'rope', rotations counted in patches, with
        the options of `nn.rotary.rope`, as in 'rope(reference=16)' (EVA-02); or 'rope_dinov3',
        those of `nn.rotary.rope_dinov3`, as in 'rope_dinov3(rescale=2.0)'; 'relative', a learned
        bias for each relative position, or 'relative(shared=True)', the same in all blocks (BEiT).
      qk_norm: norm of the heads of queries and keys: 'none', 'layer' or 'rms'.
      no_bias: layers without biases: some of 'query', 'key', 'value', 'out', 'patch_embed', 'mlp',
        'norm' and 'head', as in 'query|key|value'.
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

    def __post_init__(self) -> None:
        check_choice('pool', self.pool, POOLS)
        check_choice('posemb', self.posemb, POSEMBS)
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
        _vit_parts.check(self)
        super().__post_init__()

    @property
    def positioned_tokens(self) -> int:
        """Number of tokens before the patches that have a row of `pos_embed`."""
        return int(self.pool in WITH_CLASS_TOKEN) + (self.pool == 'distilled')

    @property
    def prefix_tokens(self) -> int:
        """Number of tokens before the patches."""
        return self.positioned_tokens + self.registers

    @property
    def stride(self) -> int:
        """Side in pixels of the square of one token."""
        return self.patch_size

    @property
    def kernel_side(self) -> int:
        """Side in pixels of the patches that the kernel of `patch_embed` is for."""
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
        draw = functools.partial(self.make_rng, 'dropout') if train else None
        grid = images.shape[1] // self.stride, images.shape[2] // self.stride
        positions, relative = _vit_parts.positions(self, grid, draw)
        tokens = self._encoder(dtype, relative)(tokens, train, segments, positions)
        return _vit_head.outputs(self, tokens, segments, train)

    def attention_maps(
        self, intermediates: Mapping[str, Any], images: Float[Array, 'B H W C']
    ) -> list[AttentionMap]:
        """Attention maps from the `intermediates` of a call with these images."""
        _, height, width, _ = images.shape
        grid = patch_grid(height, width, self.stride)
        return collect(intermediates, 'encoder', grid, grid)

    def parameter_pictures(
        self, params: Mapping[str, Any], image_size: Size | None
    ) -> list[ParameterPictures]:
        """Similarities of the positions of patches, and the filters that embed them."""
        if self.posemb == 'none':
            return embedding_filters(params)
        grid = grid_of(image_size, self.stride)
        table = sincos2d(*grid, self.width)
        if self.posemb == 'learn':
            table = params['pos_embed'][0, self.positioned_tokens :]
        return [position_similarity('pos_embed', table, grid), *embedding_filters(params)]

    # From the representation on; the last has an output for each class.
    head_layers = ('pre_logits', 'head')

    def resize_params(
        self, params: Params, old_size: Size | None, new_size: Size, method: str = 'bilinear'
    ) -> Resized:
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
            new = patch_grid(*new_size, self.stride)
            params, notes = _resize.positions(params, old, new, self.positioned_tokens, method)
        params, note = _resize.relative(params, patch_grid(*new_size, self.stride), method)
        notes = notes + note
        if patch != self.kernel_side:
            params, note = _resize.patches(params, self.kernel_side)
            notes += note
        return params, notes

    def layer_order(self) -> tuple[str, ...]:
        """Patterns of the layers' parameters from the image on: the embeddings, then each block."""
        blocks = (f'^encoder/block_{i}/' for i in range(self.depth))
        tokens = 'cls_token|dist_token|register_tokens|mask_token'
        return f'^(patch_embed|{tokens}|pos_embed|position_bias|norm_pre)(/|$)', *blocks

    def _embed(self, images: Any, masked: Array | None, train: bool, dtype: Any) -> Array:
        """z_0 = [x_class; x_p^1 E; ...; x_p^N E] + E_pos, equation 1; registers as configured."""
        # Blocks add to the residual stream in its dtype; their norms cast to that of computation.
        residual = jnp.dtype(self.residual_dtype or dtype)
        x = self._patches(images, dtype).astype(residual)
        if masked is not None:
            token = self.param('mask_token', nn.initializers.zeros, (1, 1, self.width))
            x = jnp.where(masked[..., None], token.astype(residual), x)
        names = ('dist_token', 'cls_token') if self.pool == 'distilled' else ('cls_token',)
        for name in names if self.pool in WITH_CLASS_TOKEN else ():
            token = self.param(name, nn.initializers.zeros, (1, 1, self.width))
            token = jnp.broadcast_to(token, (x.shape[0], 1, self.width)).astype(residual)
            x = jnp.concatenate([token, x], axis=1)
        if self.posemb != 'none':
            x = x + self._positions(x.shape[1], images).astype(residual)
        if self.registers:
            x = self._with_registers(x)
        x = Dropout(self.dropout)(x, train)
        if self.norm_pre:
            norm = _vit_parts.norm(self)(self.norm_eps, dtype=dtype, name='norm_pre')
            x = norm(x).astype(residual)
        return x

    def _with_registers(self, x: Array) -> Array:
        """The tokens with registers before the patches."""
        first, shape = self.positioned_tokens, (1, self.registers, self.width)
        tokens = self.param('register_tokens', nn.initializers.normal(0.02), shape)
        tokens = jnp.broadcast_to(tokens, (len(x), *shape[1:])).astype(x.dtype)
        return jnp.concatenate([x[:, :first], tokens, x[:, first:]], axis=1)

    def _patches(self, images: Any, dtype: Any) -> Array:
        """One token for each patch, row by row, [B N D]."""
        biased = 'patch_embed' not in _vit_parts.without_bias(self.no_bias)
        return PatchEmbed(self.patch_size, self.width, dtype, biased, name='patch_embed')(images)

    def _positions(self, tokens: int, images: Any) -> Array:
        if self.posemb == 'learn':
            return learned(self, tokens, self.width, self.posemb_std)
        _, height, width, _ = images.shape
        table = sincos2d(*patch_grid(height, width, self.stride), self.width)
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
            parts=_vit_parts.block(self, relative),
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
            norm=_vit_parts.norm(self),
            name='encoder',
        )
