"""MLP-Mixer: MLPs over the patches of an image alternate with MLPs over their channels.

Tolstikhin et al., 2021, arXiv:2105.01601.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import flax.linen as nn
import jax.numpy as jnp
import numpy as np
from jax import Array

from vit_jax.array_types import Float, Int
from vit_jax.errors import UserError, check_choice
from vit_jax.models import base
from vit_jax.models.base import Params, Resized, Size, bind_norm, check_counts, check_fields
from vit_jax.nn.blocks import Encoder, Mlp
from vit_jax.nn.dense import class_head
from vit_jax.nn.maps import (
    HiddenState,
    ParameterPictures,
    collect_blocks,
    embedding_filters,
    require_grid,
)
from vit_jax.nn.norms import LayerNorm
from vit_jax.nn.options import DropPathFields
from vit_jax.nn.patches import PatchEmbed, patch_grid
from vit_jax.nn.stochastic import Dropout, add_branch

# name: width C, depth, tokens_mlp_dim D_S, channels_mlp_dim D_C (table 1)
VARIANTS = {
    'mu': (32, 1, 16, 128),
    'S': (512, 8, 256, 2048),
    'B': (768, 12, 384, 3072),
    'L': (1024, 24, 512, 4096),
    'H': (1280, 32, 640, 5120),
}
FIELDS = ('width', 'depth', 'tokens_mlp_dim', 'channels_mlp_dim')
PICTURED = 3  # blocks whose units are drawn, as in figure 5


def variant(name: str) -> dict[str, int]:
    """Keywords of `Model` for a name such as 'B/16': a shape of VARIANTS and a patch size.

    The paper has S, B and L with patches of 32 and 16 pixels, and H with 14.

    Raises:
      UserError: if there is no such shape, or the patch size is not a positive number.
    """
    shape, slash, patch = name.partition('/')
    check_choice('Mixer variant', shape, VARIANTS)
    if not slash or not re.fullmatch('[1-9][0-9]*', patch):
        raise UserError(f'Mixer variant {name!r} needs a patch size, for example {shape}/16')
    return {'patch_size': int(patch), **dict(zip(FIELDS, VARIANTS[shape], strict=True))}


class Model(base.Model):
    """MLP-Mixer. The images have the size that the model was initialized with.

    Attributes:
      num_classes: Outputs of the head; None or 0 leaves the head out.
      patch_size: Side of a patch in pixels.
      width: C, width of a token.
      depth: Number of blocks.
      tokens_mlp_dim: D_S, hidden width of the MLPs over patches.
      channels_mlp_dim: D_C, hidden width of the MLPs over channels.
      dropout: Dropout rate after the patch embedding and each dense layer of a block.
      head_bias: Initial value of the head's biases.
      block: Options of the blocks, see `DropPathFields`; `gelu` is 'tanh' for the authors' models,
        'erf' for timm's.
      scan: One scanned block instead of `depth` unrolled ones; see `Encoder`.
      remat: Recomputation in the backward pass: False, 'dots', 'names', 'nothing' (True) or
        'offload'.
      dtype: Computation dtype. Parameters and layer norm statistics stay float32.

    Raises:
      UserError: if a field has no such value.
    """

    num_classes: int | None = None
    patch_size: int = 16
    width: int = 768
    depth: int = 12
    tokens_mlp_dim: int = 384
    channels_mlp_dim: int = 3072
    dropout: float = 0.0
    block: DropPathFields = DropPathFields()
    head_bias: float = 0.0
    scan: bool = False
    remat: bool | str = False
    dtype: str = 'float32'

    effects: ClassVar = {'head_bias': 'outputs'}

    def __post_init__(self) -> None:
        check_fields(self, 'block.gelu', 'block.drop_path', 'dtype', 'remat', 'dropout')
        check_counts(self, 'patch_size', *FIELDS)
        super().__post_init__()

    @nn.compact
    def __call__(
        self, images: Float[Array, 'B H W C'], train: bool = False
    ) -> dict[str, Float[Array, 'B *rest']]:
        """Classify normalized images.

        Returns:
          tokens: [B N D] after the final norm, one for each patch, row by row.
          pre_logits: [B D], their mean.
          logits: [B num_classes] in float32; absent without a head.
        """
        dtype = jnp.dtype(self.dtype)
        block = functools.partial(
            MixerLayer,
            *(self.tokens_mlp_dim, self.channels_mlp_dim),
            dropout=self.dropout,
            gelu=self.block.gelu,
            norm_eps=self.block.norm_eps,
            dtype=dtype,
        )
        encoder = Encoder(
            block,
            self.depth,
            self.block.drop_path,
            scan=self.scan,
            remat=self.remat,
            norm_eps=self.block.norm_eps,
            dtype=dtype,
            name='encoder',
        )
        tokens = encoder(self._embed(images, train, dtype), train)
        outputs = {'tokens': tokens, 'pre_logits': tokens.mean(axis=1)}
        if self.num_classes:
            head = class_head(self.num_classes, self.head_bias, name='head')
            outputs['logits'] = head(outputs['pre_logits'])
        return outputs

    def _embed(self, images: Array, train: bool, dtype: Any) -> Array:
        """Embed images as the tokens before the first block."""
        x = PatchEmbed(self.patch_size, self.width, dtype, name='patch_embed')(images)
        return Dropout(self.dropout)(x, train)

    def collect_hidden_states(
        self, collection: Mapping[str, Any], images: Float[Array, 'B H W C'], *others: Any
    ) -> list[HiddenState]:
        """Collect the states of the blocks in a call with these images."""
        del others
        grid = patch_grid(images.shape[1], images.shape[2], self.patch_size)
        return [
            HiddenState(name, tokens, grid)
            for name, tokens in collect_blocks(collection, 'encoder')
        ]

    def final_norm_of(self, params: Mapping[str, Any]) -> Callable[[Array], Array] | None:
        """Bind the norm after the last block."""
        return bind_norm('layer', self.block.norm_eps, self.dtype, params['encoder'].get('norm'))

    def layer_order(self) -> tuple[str, ...]:
        """List patterns of the layers' parameters in order: the embedding, then each block."""
        return '^patch_embed/', *(f'^encoder/block_{i}/' for i in range(self.depth))

    def parameter_pictures(
        self, params: Mapping[str, Any], image_size: Size | None
    ) -> list[ParameterPictures]:
        """Draw weights of the units that mix patches, as in figure 5, and the patches' filters."""
        grid, pictures = require_grid(image_size, self.patch_size), []
        for i in range(min(self.depth, PICTURED)):
            units = np.asarray(params['encoder'][f'block_{i}']['token_mixing']['fc1']['kernel'])
            name = f'encoder/block_{i}/token_mixing/fc1/kernel'
            weights = units.T.reshape(-1, *grid)
            pictures.append(ParameterPictures(name, weights, 'unit', 'weights of the patches'))
        return [*pictures, *embedding_filters(params)]

    def resize_params(
        self, params: Params, old_size: Size | None, new_size: Size, method: str = 'bilinear'
    ) -> Resized:
        """Return the parameters as they are: the weights over patches belong to one grid.

        Raises:
          UserError: if the new images have a different grid of patches.
        """
        del method
        new = patch_grid(*new_size, self.patch_size)
        old = old_size and (old_size[0] // self.patch_size, old_size[1] // self.patch_size)
        patches = _patches(params)
        if patches not in (None, math.prod(new)) or (old and patches and old != new):
            raise UserError(
                f'images of {new_size[1]} x {new_size[0]} pixels have {new[1]} x {new[0]} patches: '
                f'this Mixer has weights for {_grid(old, patches)}, which cannot be resized'
            )
        return params, []


def _patches(params: Mapping[str, Any]) -> int | None:
    """Return the number of patches that parameters are for; None without blocks."""
    for name, block in params.get('encoder', {}).items():
        if name.startswith('block'):
            rows: int = block['token_mixing']['fc1']['kernel'].shape[-2]
            return rows
    return None


def _grid(grid: tuple[int, int] | None, patches: int | None) -> str:
    return f'{grid[1]} x {grid[0]}' if grid else f'{patches} patches'


class MixerLayer(nn.Module):
    """A Mixer layer, equation 1: U = X + MLP(LN(X)^T)^T over patches, Y = U + MLP(LN(U)) over
    channels.

    Parameters `norm1`, `token_mixing`, `norm2` and `channel_mixing`; of the former's, `fc2/bias`
    moves all channels of a token alike, which the next norm subtracts. Each sum is preceded by
    dropout and, with probability `drop_path`, by dropping the whole branch.
    """

    tokens_mlp_dim: int
    channels_mlp_dim: int
    dropout: float = 0.0
    gelu: str = 'tanh'
    norm_eps: float = 1e-6
    dtype: Any = jnp.float32

    @nn.compact
    def __call__(
        self,
        x: Float[Array, 'B N D'],
        train: bool = False,
        drop_path: float | Float[Array, ''] = 0.0,
        segments: Int[Array, 'B N'] | None = None,
    ) -> Float[Array, 'B N D']:
        """Return the tokens after the block; there is no padding that `segments` would tell."""
        del segments
        norm = functools.partial(LayerNorm, self.norm_eps, dtype=self.dtype)
        mlp = functools.partial(
            Mlp,
            dropout=self.dropout,
            gelu=self.gelu,
            dtype=self.dtype,
            kernel_init=nn.initializers.lecun_normal(),
        )

        y = norm(name='norm1')(x).swapaxes(1, 2)
        y = mlp(self.tokens_mlp_dim, name='token_mixing')(y, train).swapaxes(1, 2)
        x = add_branch(x, y, self.dropout, drop_path, train)
        y = norm(name='norm2')(x)
        y = mlp(self.channels_mlp_dim, name='channel_mixing')(y, train)
        return add_branch(x, y, self.dropout, drop_path, train)
