"""Image encoder of Segment Anything: a ViT with windows, relative positions and a neck.

Kirillov et al., 2023, arXiv:2304.02643, appendix A; the backbone is ViTDet's, Li et al., 2022,
arXiv:2203.16527.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any, ClassVar

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from vit_jax.array_types import Float
from vit_jax.errors import UserError, check_multiple
from vit_jax.models import base
from vit_jax.models._resizing import resize_positions
from vit_jax.models.base import Params, Resized, Size, check_counts, check_fields
from vit_jax.nn.attention import recompute_in_backward
from vit_jax.nn.blocks import Mlp
from vit_jax.nn.dense import class_head
from vit_jax.nn.maps import AttentionMap, HiddenState
from vit_jax.nn.multi_head import KeyValue, MultiHeadAttention
from vit_jax.nn.norms import LayerNorm
from vit_jax.nn.options import DropPathFields
from vit_jax.nn.patches import PatchEmbed, patch_grid
from vit_jax.nn.positions import learned
from vit_jax.nn.stochastic import Dropout, DropPath, add_branch
from vit_jax.nn.windows import Windows
from vit_jax.ops import resize

NECK_EPS = 1e-6
_TABLES = ('rows', 'columns')


class Model(base.Model):
    """SAM's image encoder. The images have the size that the model was initialized with.

    Attributes:
      num_classes: Outputs of the head on the mean of the features; None or 0 leaves the head out.
      patch_size: Side of a patch in pixels.
      width: Width of a token.
      depth: Number of blocks.
      mlp_dim: Hidden width of the blocks' MLPs.
      num_heads: Attention heads; divides width.
      window: Side of the windows in tokens.
      global_blocks: Numbers of the blocks, from 0, that attend to the whole image.
      posemb: Whether learned positions are added to the tokens: 'learn' or 'none'.
      neck: Channels of the convolutions after the blocks; None for a layer norm instead.
      dropout: Dropout rate after the positions and each dense layer of an MLP.
      head_bias: Initial value of the head's biases.
      block: Options of the blocks, see `DropPathFields`.
      remat: Recomputation in the backward pass: False, 'dots', 'names', 'nothing' (True) or
        'offload'.
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
    window: int = 14
    global_blocks: tuple[int, ...] = (2, 5, 8, 11)
    posemb: str = 'learn'
    neck: int | None = 256
    dropout: float = 0.0
    block: DropPathFields = DropPathFields(gelu='erf')
    head_bias: float = 0.0
    remat: bool | str = False
    dtype: str = 'float32'

    effects: ClassVar = {'head_bias': 'outputs'}

    def __post_init__(self) -> None:
        check_fields(self, 'block.gelu', 'block.drop_path', 'dtype', 'remat', 'dropout')
        check_counts(self, 'patch_size', 'width', 'depth', 'mlp_dim', 'num_heads', 'window', 'neck')
        check_multiple('width', self.width, 'num_heads', self.num_heads)
        if self.posemb not in ('learn', 'none'):
            raise UserError(f"posemb must be 'learn' or 'none', not {self.posemb!r}")
        if invalid := [i for i in self.global_blocks if not 0 <= i < self.depth]:
            raise UserError(f'global_blocks {invalid}: the blocks are 0 to {self.depth - 1}')
        super().__post_init__()

    @nn.compact
    def __call__(
        self, images: Float[Array, 'B H W C'], train: bool = False
    ) -> dict[str, Float[Array, 'B *rest']]:
        """Compute features of normalized images.

        Returns:
          features: [B h w D], a vector for each patch after the neck.
          pre_logits: [B D], their mean.
          logits: [B num_classes] in float32; absent without a head.
        """
        dtype = jnp.dtype(self.dtype)
        x = self._embed(images, train, dtype)
        apply = recompute_in_backward(lambda block, x, rate: block(x, train, rate), self.remat)
        for i, rate in enumerate(np.linspace(0.0, self.block.drop_path, self.depth)):
            block = SamBlock(
                *(self.num_heads, self.mlp_dim),
                window=0 if i in self.global_blocks else self.window,
                dropout=self.dropout,
                gelu=self.block.gelu,
                norm_eps=self.block.norm_eps,
                dtype=dtype,
                name=f'block_{i}',
            )
            x = apply(block, x, float(rate))
        features = self._neck(x, dtype)
        outputs = {'features': features, 'pre_logits': features.mean(axis=(1, 2))}
        if self.num_classes:
            head = class_head(self.num_classes, self.head_bias, name='head')
            outputs['logits'] = head(outputs['pre_logits'])
        return outputs

    def _embed(self, images: Array, train: bool, dtype: Any) -> Array:
        """Embed images as the tokens before the first block, [B h w D]."""
        grid = patch_grid(images.shape[1], images.shape[2], self.patch_size)
        x = PatchEmbed(self.patch_size, self.width, dtype, name='patch_embed')(images)
        if self.posemb == 'learn':
            x = x + learned(self, x.shape[1], self.width, 0.02).astype(dtype)
        return Dropout(self.dropout)(x, train).reshape(len(x), *grid, self.width)

    def _neck(self, x: Array, dtype: Any) -> Array:
        norm = functools.partial(LayerNorm, NECK_EPS, dtype=dtype)
        if self.neck is None:
            return norm(name='norm')(x)
        conv = functools.partial(nn.Conv, self.neck, use_bias=False, dtype=dtype)
        x = norm(name='neck_norm_0')(conv((1, 1), name='neck_conv_0')(x))
        return norm(name='neck_norm_1')(conv((3, 3), padding=1, name='neck_conv_1')(x))

    def attention_maps(
        self, intermediates: Mapping[str, Any], images: Float[Array, 'B H W C']
    ) -> list[AttentionMap]:
        """Collect attention maps of the blocks that attend to the whole image."""
        grid = patch_grid(images.shape[1], images.shape[2], self.patch_size)
        maps = {
            f'block_{i}': intermediates[f'block_{i}']['attention']['attention'][0]
            for i in sorted(self.global_blocks)
        }
        return [AttentionMap(name, weights, grid, grid) for name, weights in maps.items()]

    def collect_hidden_states(
        self, collection: Mapping[str, Any], images: Float[Array, 'B H W C'], *others: Any
    ) -> list[HiddenState]:
        """Collect the tokens before the first block and after each block."""
        del images, others
        blocks = ((f'block_{i}', collection[f'block_{i}']['tokens'][0]) for i in range(self.depth))
        return [
            HiddenState(name, x.reshape(len(x), -1, x.shape[-1]), x.shape[1:3])
            for name, x in (('embedding', collection['tokens'][0]), *blocks)
        ]

    def layer_order(self) -> tuple[str, ...]:
        """List patterns of the layers' parameters in order: the embeddings, then each block."""
        return '^(patch_embed|pos_embed)(/|$)', *(f'^block_{i}/' for i in range(self.depth))

    def resize_params(
        self, params: Params, old_size: Size | None, new_size: Size, method: str = 'bilinear'
    ) -> Resized:
        """Resize the parameters for images of a different size.

        Positions are resized by `method`, the tables of relative positions of the blocks that
        attend to the whole image linearly, as in the authors' code.

        Raises:
          UserError: if the images cannot be cut into patches, or the old patches do not form a
            square.
        """
        grid = patch_grid(*new_size, self.patch_size)
        notes: list[str] = []
        if 'pos_embed' in params:
            old = old_size and (old_size[0] // self.patch_size, old_size[1] // self.patch_size)
            params, notes = resize_positions(params, old, grid, 0, method)
        lengths = {name: 2 * side - 1 for name, side in zip(_TABLES, grid, strict=True)}
        is_global = [f'block_{i}' for i in self.global_blocks]

        def resize_leaf(path: tuple[Any, ...], leaf: Any) -> Any:
            block, name = str(path[0].key), str(path[-1].key)
            length = lengths.get(name)
            if block not in is_global or length in (None, len(leaf)):
                return leaf
            changed.append(f'{block}/attention/{name}')
            return resize.grid(np.asarray(leaf)[:, None], (length, 1), 'linear')[:, 0]

        changed: list[str] = []
        params = jax.tree_util.tree_map_with_path(resize_leaf, params)
        if changed:
            notes = [*notes, f'relative positions: resized to {grid[1]} x {grid[0]} patches']
        return params, notes


class SamBlock(nn.Module):
    """A pre-norm block whose attention is limited to windows, or covers the whole map.

    Windows that reach beyond the map are filled with zeros after the norm, which are attended to.

    Attributes:
      window: Side of the windows in tokens; 0 for the whole map.
    """

    num_heads: int
    mlp_dim: int
    window: int = 0
    dropout: float = 0.0
    gelu: str = 'erf'
    norm_eps: float = 1e-6
    dtype: Any = jnp.float32

    @nn.compact
    def __call__(
        self,
        x: Float[Array, 'B h w D'],
        train: bool = False,
        drop_path: float | Float[Array, ''] = 0.0,
    ) -> Float[Array, 'B h w D']:
        norm = functools.partial(LayerNorm, self.norm_eps, dtype=self.dtype)
        _, height, width, channels = x.shape
        y = norm(name='norm1')(x)
        if self.window:
            windows, grid = Windows(height, width, self.window), (self.window, self.window)
            y = windows.cut_tokens(windows.place(y))
        else:
            windows, grid = None, (height, width)
            y = y.reshape(len(y), -1, channels)
        size = channels // self.num_heads
        attention = Attention(
            self.num_heads, dtype=self.dtype, grid=grid, size=size, name='attention'
        )
        y = attention(y, train=train)
        y = windows.restore(windows.join_tokens(y)) if windows else y.reshape(x.shape)
        x = x + DropPath()(y, drop_path, train)
        mlp = Mlp(self.mlp_dim, self.dropout, self.gelu, self.dtype, name='mlp')
        y = mlp(norm(name='norm2')(x), train)
        return add_branch(x, y, self.dropout, drop_path, train)


class Attention(MultiHeadAttention):
    """Attention with a bias from each query and its rows' and columns' distances to the keys.

    The bias is q . R_row + q . R_column, with parameters `rows` [2h-1 K] and `columns` [2w-1 K] of
    all heads, from a key far behind its query to one far before it (MViTv2, arXiv:2112.01526,
    equation 4).

    Attributes:
      grid: H and w of the tokens, of a window or of the map.
      size: K, width of a head.
    """

    grid: tuple[int, int] = (1, 1)
    size: int = 1

    def setup(self) -> None:
        super().setup()
        zeros = nn.initializers.zeros
        shapes = ((2 * side - 1, self.size) for side in self.grid)
        self.tables = tuple(
            self.param(name, zeros, shape) for name, shape in zip(_TABLES, shapes, strict=True)
        )

    def _attend(
        self, query: Array, memory: KeyValue, mask: Array | None, bias: Array | None, train: bool
    ) -> Array:
        rows, columns = (
            table[np.arange(side)[:, None] - np.arange(side) + side - 1].astype(query.dtype)
            for table, side in zip(self.tables, self.grid, strict=True)
        )
        q = query.reshape(*query.shape[:-2], *self.grid, self.size)
        down = jnp.einsum('...hwk,hjk->...hwj', q, rows, preferred_element_type=jnp.float32)
        right = jnp.einsum('...hwk,wjk->...hwj', q, columns, preferred_element_type=jnp.float32)
        relative = down[..., :, None] + right[..., None, :]
        relative = relative.reshape(*query.shape[:-1], query.shape[-2])
        bias = relative if bias is None else bias + relative
        return super()._attend(query, memory, mask, bias, train)
