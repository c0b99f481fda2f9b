"""A ViT whose class token and patches are compared with prototypes, for learning without labels.

DINOv2 (Oquab et al., 2023, arXiv:2304.07193) has the losses of DINO (arXiv:2104.14294) and iBOT
(arXiv:2111.07832). The encoder's parameters have the names of a ViT's.
"""

import functools
import math
from collections.abc import Callable, Mapping
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import Array

from vit_jax.array_types import Bool, Float, Int, Key
from vit_jax.errors import UserError
from vit_jax.models import base, vit
from vit_jax.models.base import Params, Resized, Size, check_counts
from vit_jax.nn.blocks import GELUS
from vit_jax.nn.maps import AttentionMap, HiddenState, ParameterPictures
from vit_jax.nn.norms import unit
from vit_jax.nn.options import BlockFields, regroup
from vit_jax.nn.patches import patch_grid
from vit_jax.nn.stochastic import example_keys
from vit_jax.ops import resize
from vit_jax.ops.self_distillation import CropMasks, crop_masks

# The ViT encoder's part of the parameters.
ENCODER = ('patch_embed', 'cls_token', 'pos_embed', 'encoder')
# Fields of a ViT with the same features, and of its training and computation.
SAME = (*('patch_size', 'width', 'depth', 'mlp_dim', 'num_heads', 'registers', 'block'),)
RUNNING = ('scan', 'remat', 'attention', 'dtype')

_normal = nn.initializers.normal(0.02)
# Uniform within 1 / sqrt(fan in), as torch.nn.Linear.
_uniform = nn.initializers.variance_scaling(1 / 3, 'fan_in', 'uniform')


class Model(base.Model):
    """A ViT with projection heads (DINO, appendix C). Images of any size that whole patches tile.

    Positions are learned for the size of the images that initialize the model, global crops, and
    interpolated for others.

    Attributes:
      prototypes: K, outputs of the head of the class token.
      patch_prototypes: Outputs of a separate head for patches; None to share the class token's.
      hidden: Width of the heads' two hidden layers.
      bottleneck: Width of the heads' last layer, in which prototypes are unit vectors.
      patch_bottleneck: Bottleneck of a separate head for patches.
      patch_size, width, depth, mlp_dim, num_heads: Sizes of the encoder, see `vit.Model`.
      registers: Tokens between the class token and the patches (arXiv:2309.16588).
      block: Options of the blocks and their norms, see `BlockFields`; the heads have its `gelu`.
      scan: One scanned block instead of unrolled ones; see `Encoder`.
      remat: Recomputation in the backward pass; see the model `vit`.
      attention: Implementation: 'xla', 'pallas', 'cudnn' or 'auto'; see the model `vit`.
      dtype: Computation dtype. Parameters, layer norm statistics, softmax and the lengths of
        vectors in the heads stay float32.

    Raises:
      UserError: for an invalid field, images that do not fit the patches, or a new image size for
        learned positions that do not form a square.
    """

    prototypes: int = 65536
    patch_prototypes: int | None = None
    hidden: int = 2048
    bottleneck: int = 256
    patch_bottleneck: int = 256
    patch_size: int = 16
    width: int = 768
    depth: int = 12
    mlp_dim: int = 3072
    num_heads: int = 12
    registers: int = 0
    block: BlockFields = BlockFields(gelu='erf')
    scan: bool = False
    remat: bool | str = False
    attention: str = 'auto'
    dtype: str = 'float32'

    def __post_init__(self) -> None:
        check_counts(self, 'prototypes', 'hidden', 'bottleneck', 'patch_bottleneck')
        self._vit()  # checks its fields
        super().__post_init__()

    def setup(self) -> None:
        self.vit = Backbone(**self._fields())
        nn.share_scope(self, self.vit)  # its parameters are at the top level, as in a ViT
        head = functools.partial(Head, hidden=self.hidden, gelu=self.block.gelu, dtype=self.dtype)
        self.dino_head = head(self.prototypes, bottleneck=self.bottleneck)
        if self.patch_prototypes:
            self.ibot_head = head(self.patch_prototypes, bottleneck=self.patch_bottleneck)

    def __call__(
        self,
        images: Float[Array, 'R H W C'],
        train: bool = False,
        *,
        hidden: Bool[Array, 'R N'] | None = None,
        places: Int[Array, 'B M'] | None = None,
    ) -> dict[str, Float[Array, '_ *rest']]:
        """Compare images with prototypes.

        Args:
          images: Normalized images.
          train: Whether to drop paths.
          hidden: True for patches whose embedding is replaced by the mask token.
          places: Indices of patches to compare, counted through the R / B images of a row.

        Returns:
          tokens: [R _ D] after the final norm: the class token, registers, and patches.
          pre_logits: [R D], the class token.
          patches: [R N D], the tokens of patches.
          scores: [R K] in float32, cosines of the projected class token and the prototypes, times
            the prototypes' scales.
          patch_scores: [B M K], likewise of the patches at `places`; absent without these.
        """
        outputs = self.vit(images, train, masked=hidden)
        outputs['patches'] = outputs['tokens'][:, 1 + self.registers :]
        patch_head = self.ibot_head if self.patch_prototypes else self.dino_head
        return outputs | score(outputs, self.dino_head, patch_head, places)

    def block_masks(
        self, images: Float[Array, 'B G H W C'], *, masked: int, ratios: tuple[float, float]
    ) -> CropMasks:
        """Draw masks for `masked` of the G crops of each image, from the random stream 'mask'.

        See `ops.self_distillation.crop_masks` for the arguments.
        """
        return draw_masks(self.make_rng('mask'), images, self.patch_size, masked, ratios)

    def attention_maps(
        self, intermediates: Mapping[str, Any], images: Float[Array, 'B H W C']
    ) -> list[AttentionMap]:
        """Collect attention maps from the `intermediates` of a call with these images."""
        return self._vit().attention_maps(intermediates, images)

    def collect_hidden_states(
        self, collection: Mapping[str, Any], images: Float[Array, 'B H W C'], *others: Any
    ) -> list[HiddenState]:
        """Collect the states of the encoder's layers in a call with these images."""
        return self._vit().collect_hidden_states(collection, images, *others)

    def final_norm_of(self, params: Mapping[str, Any]) -> Callable[[Array], Array] | None:
        """Bind the encoder's last norm."""
        return self._vit().final_norm_of(params)

    def parameter_pictures(
        self, params: Mapping[str, Any], image_size: Size | None
    ) -> list[ParameterPictures]:
        """Draw similarities of the patches' positions, and the filters that embed patches."""
        return self._vit().parameter_pictures(params, image_size)

    def transferable(self) -> tuple[dict[str, Any], tuple[str, ...]]:
        """Describe the encoder as a ViT: keywords of `config.model`, and parameter paths."""
        names = (*ENCODER, *(['register_tokens'] if self.registers else []))
        model = {'name': 'vit', **{key: getattr(self, key) for key in SAME}}
        model['block'] = self.block.without_training
        return regroup(vit.Model, model), names

    def layer_order(self) -> tuple[str, ...]:
        """List patterns of the layers' parameters from the image on; the heads come last."""
        return self._vit().layer_order()

    def resize_params(
        self, params: Params, old_size: Size | None, new_size: Size, method: str = 'bilinear'
    ) -> Resized:
        """Resize the parameters for images, and patches, of a different size; see `vit.Model`."""
        return self._vit().resize_params(params, old_size, new_size, method)

    def _vit(self) -> vit.Model:
        """Make the encoder as a separate ViT."""
        return vit.Model(parent=None, **self._fields())

    def _fields(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in (*SAME, *RUNNING)}


def draw_masks(
    key: Key[Array, ''],
    images: Float[Array, 'B G H W C'],
    patch_size: int,
    masked: int,
    ratios: tuple[float, float],
) -> CropMasks:
    """Draw masks for `masked` of the G crops of each image; see `Model.block_masks`."""
    rows, crops, height, width, _ = images.shape
    grid = patch_grid(height, width, patch_size)
    keys = example_keys(key, rows)
    return jax.vmap(lambda key: crop_masks(key, grid, crops, masked, ratios))(keys)


def score(
    outputs: Mapping[str, Any],
    head: nn.Module,
    patch_head: nn.Module,
    places: Int[Array, 'B M'] | None = None,
) -> dict[str, Float[Array, '_ *rest']]:
    """Compare an encoder's outputs with prototypes.

    Args:
      outputs: `pre_logits` [R D] and `patches` [R N D] of images.
      head: Head of the representation of an image.
      patch_head: Head of patches.
      places: Indices of patches to compare, counted through the R / B images of a row.

    Returns:
      `scores` [R K], and with `places` also `patch_scores` [B M K].
    """
    scores = {'scores': head(outputs['pre_logits'])}
    if places is None:
        return scores
    patches = outputs['patches'].reshape(len(places), -1, outputs['patches'].shape[-1])
    picked = jnp.take_along_axis(patches, places[..., None], axis=1)
    return scores | {'patch_scores': patch_head(picked)}


class Backbone(vit.Model):
    """A ViT that interpolates its positions for images of a different size."""

    def _positions(self, tokens: int, images: Any) -> Array:
        if not self.has_variable('params', 'pos_embed'):
            return super()._positions(tokens, images)
        table: Array = self.get_variable('params', 'pos_embed')
        if table.shape[1] == tokens:
            return table
        first = self.positioned_tokens
        side = math.isqrt(count := table.shape[1] - first)
        if side**2 != count:
            raise UserError(
                f'pos_embed has rows for {count} patches, which form no square: take '
                'square global crops, or crops of one size'
            )
        _, height, width, _ = images.shape
        grid = patch_grid(height, width, self.patch_size)
        rows, columns = (resize.bicubic_matrix(side, new) for new in grid)
        patches = table[0, first:].reshape(side, side, -1)
        patches = jnp.einsum('ai,bj,ijd->abd', rows, columns, patches, precision='highest')
        return jnp.concatenate([table[:, :first], patches.reshape(1, tokens - first, -1)], axis=1)


class Head(nn.Module):
    """Projection to unit vectors, and scores of prototypes (DINO, appendix C).

    Three dense layers with GELUs between them. `prototypes` has a `kernel` whose columns are
    normalized, and a learned `scale` for each, 1 at first.
    """

    prototypes: int
    bottleneck: int
    hidden: int
    gelu: str = 'erf'
    dtype: Any = 'float32'

    @nn.compact
    def __call__(self, x: Float[Array, '*B D']) -> Float[Array, '*B K']:
        layer = functools.partial(nn.Dense, kernel_init=_normal, dtype=jnp.dtype(self.dtype))
        for name in ('fc1', 'fc2'):
            x = GELUS[self.gelu](layer(self.hidden, name=name)(x))
        x = unit(layer(self.bottleneck, name='fc3')(x))
        return Prototypes(self.prototypes, self.dtype, name='prototypes')(x)


class Prototypes(nn.Module):
    """A matmul with unit vectors, times a scale for each: weight normalization.

    Salimans and Kingma, 2016, arXiv:1602.07868.
    """

    count: int
    dtype: Any = 'float32'

    @nn.compact
    def __call__(self, x: Float[Array, '*B D']) -> Float[Array, '*B K']:
        kernel = self.param('kernel', _uniform, (x.shape[-1], self.count))
        scale = self.param('scale', nn.initializers.ones, (self.count,))
        dtype = jnp.dtype(self.dtype)
        weights = (unit(kernel, axis=0) * scale).astype(dtype)
        return jnp.matmul(x.astype(dtype), weights, preferred_element_type=jnp.float32)
