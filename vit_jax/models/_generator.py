"""Base of generators: ViTs on noisy pixels, for the tasks `generate` and `meanflow`."""

from __future__ import annotations

import abc
import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import flax.linen as nn
import jax.numpy as jnp
from jax import Array

from vit_jax.array_types import Float, Int, Key
from vit_jax.errors import check_multiple
from vit_jax.models import base
from vit_jax.models.base import Size, check_counts, check_fields
from vit_jax.nn.dense import Dense
from vit_jax.nn.maps import AttentionMap, ParameterPictures, embedding_filters
from vit_jax.nn.options import NormFields
from vit_jax.nn.patches import PatchEmbed, patch_grid, unpatchify
from vit_jax.nn.stochastic import example_keys


@dataclasses.dataclass(frozen=True)
class GeneratorBlockFields(NormFields):
    """Blocks of a generator.

    Attributes:
      residual_dtype: Dtype of the residual stream; None for the computation dtype.
    """

    residual_dtype: str | None = None


@dataclasses.dataclass(frozen=True)
class GeneratorInputs:
    """What a generator makes its predictions of.

    Attributes:
      tokens: Embedded patches of the noisy images.
      grid: Rows and columns of patches.
      values: Number of values of a predicted patch.
      time: t, from 0 for noise to 1 for images.
      labels: Classes; -1 for no class.
      conditions: Further numbers from 0 to 1; None for none.
      train: Whether dropout acts.
    """

    tokens: Float[Array, 'B N D']
    grid: tuple[int, int]
    values: int
    time: Float[Array, ' B']
    labels: Int[Array, ' B']
    conditions: Float[Array, 'B K'] | None
    train: bool


class Generator(base.Model):
    """A model of noisy images. Images of any size that whole patches tile.

    Attributes:
      num_classes: Number of classes to choose from; None or 0 for generation without classes.
      patch_size: Side of a patch in pixels.
      width: D, token width.
      depth: Number of blocks.
      mlp_dim: Hidden width of the blocks' SwiGLU; two thirds of 4 D in the papers.
      num_heads: Number of attention heads; divides width.
      bottleneck: Width between the two linear layers that embed a patch.
      block: Options of the blocks, see `GeneratorBlockFields`.
      remat: Recomputation in the backward pass; see the model `vit`.
      attention: Implementation: 'xla', 'pallas', 'cudnn' or 'auto'; see the model `vit`.
      dtype: Computation dtype. Parameters, embeddings of numbers, norms' statistics, softmax and
        the last layer stay float32.

    Raises:
      UserError: for an invalid field, or images that do not fit the patches.
    """

    num_classes: int | None = None
    patch_size: int = 16
    width: int = 768
    depth: int = 12
    mlp_dim: int = 2048
    num_heads: int = 12
    bottleneck: int = 128
    block: GeneratorBlockFields = GeneratorBlockFields()
    remat: bool | str = False
    attention: str = 'auto'
    dtype: str = 'float32'

    def __post_init__(self) -> None:
        check_fields(self, 'attention', 'dtype', 'block.residual_dtype', 'remat')
        check_counts(self, 'bottleneck', 'depth')
        check_multiple('width', self.width, 'num_heads', self.num_heads)
        super().__post_init__()

    @nn.compact
    def __call__(
        self,
        images: Float[Array, 'B H W C'],
        time: Float[Array, ' B'],
        labels: Int[Array, ' B'],
        given: Float[Array, 'B H W c'] | None = None,
        conditions: Float[Array, 'B K'] | None = None,
        train: bool = False,
    ) -> dict[str, Float[Array, 'B H W C']]:
        """Predict the image, the noise or the velocity, whichever is trained, from noisy images.

        Args:
          images: Noisy images z = t x + (1 - t) e.
          time: t, from 0 for noise to 1 for images.
          labels: Classes; -1 for no class, as for guidance (arXiv:2207.12598).
          given: Further channels of the input, which are not predicted, such as gray images to
            colorize (arXiv:2111.05826).
          conditions: Further numbers from 0 to 1.
          train: Whether dropout acts.

        Returns:
          image: Prediction in float32.
          Further predictions of a model with several heads.
        """
        _, height, width, channels = images.shape
        grid, dtype = patch_grid(height, width, self.patch_size), jnp.dtype(self.dtype)
        pixels = images if given is None else jnp.concatenate([images, given], axis=-1)
        embed = PatchEmbed(
            self.patch_size, self.bottleneck, dtype, self.patch_bias, name='patch_embed'
        )
        tokens = Dense(self.width, dtype=dtype, name='embed')(embed(pixels))
        values = self.patch_size**2 * channels
        inputs = GeneratorInputs(tokens, grid, values, time, labels, conditions, train)
        patches = self.predict_patches(inputs)
        return {name: unpatchify(x, grid, self.patch_size) for name, x in patches.items()}

    @property
    @abc.abstractmethod
    def patch_bias(self) -> bool:
        """Whether the first of the layers that embed a patch has biases."""

    @abc.abstractmethod
    def predict_patches(self, inputs: GeneratorInputs) -> dict[str, Float[Array, 'B N P']]:
        """Predict the values of every patch in float32, by the name of the output."""

    def example_keys(self, rows: int) -> Key[Array, ' B']:
        """Derive a key for each row from the random stream 'noise'; see `nn.stochastic`."""
        return example_keys(self.make_rng('noise'), rows)

    def parameter_pictures(
        self, params: Mapping[str, Any], image_size: Size | None
    ) -> list[ParameterPictures]:
        """Draw the filters that embed patches."""
        del image_size
        return embedding_filters(params)


def among_patches(maps: Sequence[AttentionMap], grid: tuple[int, int]) -> list[AttentionMap]:
    """Select the weights among patches, which are the last tokens, divided by their sums."""
    patches = math.prod(grid)
    inner = [jnp.asarray(weights)[:, :, -patches:, -patches:] for _, weights, *_ in maps]
    return [
        AttentionMap(name, weights / weights.sum(-1, keepdims=True), grid, grid)
        for (name, *_), weights in zip(maps, inner, strict=True)
    ]
