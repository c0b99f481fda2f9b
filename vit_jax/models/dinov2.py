"""A ViT whose class token and patches are compared with prototypes, for learning without labels.

DINOv2 (Oquab et al., 2023, arXiv:2304.07193) has the losses of DINO (arXiv:2104.14294) and iBOT
(arXiv:2111.07832). The encoder's parameters have the names of a ViT's.
"""

import functools
import math
from collections.abc import Mapping
from typing import Any, ClassVar

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import Array

from vit_jax.array_types import Bool, Float, Int, Key
from vit_jax.errors import UserError, check_choice
from vit_jax.models import vit
from vit_jax.models.base import check_counts
from vit_jax.nn.blocks import GELUS
from vit_jax.nn.norms import unit
from vit_jax.nn.options import BlockFields, defaults, regroup
from vit_jax.nn.patches import patch_grid
from vit_jax.nn.stochastic import example_keys
from vit_jax.ops import resize
from vit_jax.ops.self_distillation import CropMasks, crop_masks

# Fields of a ViT's training and computation, which its features do not depend on.
RUNNING = ('scan', 'remat', 'attention', 'dtype')
SUMMARIES = ('cls', 'gap', 'patches', 'map')  # pools with one vector [D] for an image

_normal = nn.initializers.normal(0.02)
# Uniform within 1 / sqrt(fan in), as torch.nn.Linear.
_uniform = nn.initializers.variance_scaling(1 / 3, 'fan_in', 'uniform')


class Backbone(vit.Model):
    """A ViT that interpolates its positions for images of a different size."""

    def _positions(self, tokens: int, images: Any) -> Array:
        if not self.has_variable('params', 'pos_embed'):
            return super()._positions(tokens, images)
        table: Array = self.get_variable('params', 'pos_embed')
        if table.shape[1] == tokens:
            return table
        first = self.positioned_tokens
        side = math.isqrt(table.shape[1] - first)
        if side**2 != table.shape[1] - first:
            raise UserError(
                f'pos_embed has rows for {table.shape[1] - first} patches, which form no square: '
                'take square global crops, or crops of one size'
            )
        _, height, width, _ = images.shape
        grid = patch_grid(height, width, self.patch_size)
        rows, columns = (resize.bicubic_matrix(side, new) for new in grid)
        patches = table[0, first:].reshape(side, side, -1)
        patches = jnp.einsum('ai,bj,ijd->abd', rows, columns, patches, precision='highest')
        patches = patches.reshape(1, tokens - first, -1)
        return jnp.concatenate([table[:, :first], patches], axis=1)


class Model(Backbone):
    """A ViT with projection heads (DINO, appendix C). Images of any size that whole patches tile.

    It has the fields of `vit` and five more, so that DINOv3's student is a ViT with rotary
    positions. Learned positions have the size of the images that initialize the model, global
    crops, and are interpolated for others. The heads have the blocks' `gelu`.

    Attributes:
      block: Options of the blocks and their norms, see `BlockFields`.
      prototypes: K, outputs of the head of the class token.
      patch_prototypes: Outputs of a separate head for patches; None to share the class token's.
      hidden: Width of the heads' two hidden layers.
      bottleneck: Width of the heads' last layer, in which prototypes are unit vectors.
      patch_bottleneck: Bottleneck of a separate head for patches.

    Raises:
      UserError: for an invalid field, images that do not fit the patches, or a new image size for
        learned positions that do not form a square.
    """

    num_classes: ClassVar[None] = None  # type: ignore[misc]  # a student learns without classes
    block: BlockFields = BlockFields(gelu='erf')
    prototypes: int = 65536
    patch_prototypes: int | None = None
    hidden: int = 2048
    bottleneck: int = 256
    patch_bottleneck: int = 256

    def __post_init__(self) -> None:
        check_counts(self, 'prototypes', 'hidden', 'bottleneck', 'patch_bottleneck')
        super().__post_init__()  # checks the group
        check_choice('pool.kind of a student', self.pool.kind, SUMMARIES)
        if self.positions.kind == 'relative':
            raise UserError("positions.kind='relative': a table does not fit crops of two sizes")

    @nn.compact
    def __call__(
        self,
        images: Float[Array, 'R H W C'],
        train: bool = False,
        *,
        mask: Bool[Array, 'R N'] | None = None,
        masked: Bool[Array, 'R N'] | None = None,
        places: Int[Array, 'B M'] | None = None,
    ) -> dict[str, Float[Array, '_ *rest']]:
        """Compare images with prototypes.

        Args:
          images: Normalized images.
          train: Whether to drop paths, and to change the coordinates of rotary positions.
          mask: True for patches of the image and false for padding, as in `vit`.
          masked: True for patches whose embedding is replaced by the mask token.
          places: Indices of patches to compare, counted through the R / B images of a row.

        Returns:
          tokens: [R _ D] after the final norm: the class token, registers, and patches.
          pre_logits: [R D], the class token.
          patches: [R N D], the tokens of patches.
          scores: [R K] in float32, cosines of the projected class token and the prototypes, times
            the prototypes' scales.
          patch_scores: [B M K], likewise of the patches at `places`; absent without these.
        """
        outputs = self.encode(images, train, mask=mask, masked=masked)
        make_head = functools.partial(
            Head, hidden=self.hidden, gelu=self.block.gelu, dtype=self.dtype
        )
        head = patch_head = make_head(self.prototypes, self.bottleneck, name='dino_head')
        if self.patch_prototypes and places is not None:
            sizes = self.patch_prototypes, self.patch_bottleneck
            patch_head = make_head(*sizes, name='ibot_head')
        return outputs | score(outputs, head, patch_head, places)

    def encode(self, images: Array, *args: Any, **options: Any) -> dict[str, Array]:
        """Return a ViT's outputs and its `patches` [R N D]; needs no heads."""
        outputs = super().__call__(images, *args, **options)
        return outputs | {'patches': outputs['tokens'][:, self.prefix_tokens :]}

    def block_masks(
        self, images: Float[Array, 'B G H W C'], *, masked: int, ratios: tuple[float, float]
    ) -> CropMasks:
        """Draw masks for `masked` of the G crops of each image, from the random stream 'mask'.

        See `ops.self_distillation.crop_masks` for the arguments.
        """
        return draw_masks(self.make_rng('mask'), images, self.patch_size, masked, ratios)

    def transferable(self) -> tuple[dict[str, Any], tuple[str, ...]]:
        """Describe the encoder as a ViT: keywords of `config.model`, and parameter paths."""
        names = [name for name in defaults(vit.Model) if name not in (*RUNNING, 'num_classes')]
        fields = {name: getattr(self, name) for name in names}
        fields['block'] = self.block.without_training
        return {'name': 'vit', **regroup(vit.Model, fields)}, vit.parameter_names(**fields)


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
