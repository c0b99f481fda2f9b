"""A ViT with a projector, whose projections should be an isotropic Gaussian: LeJEPA.

Balestriero and LeCun, 2025, arXiv:2511.08544.
"""

from __future__ import annotations

import math
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import Array

from vit_jax.array_types import Bool, Float
from vit_jax.errors import UserError, check_choice
from vit_jax.models import dinov2, vit
from vit_jax.nn.norms import BatchNorm, LayerNorm
from vit_jax.nn.options import defaults, regroup
from vit_jax.nn.patches import patch_grid

NORMS = ('batch', 'layer')


class Model(dinov2.Backbone):
    """ViT for images of several sizes, with an MLP that projects its representation.

    The model has the fields of `vit` and four more.

    Attributes:
      projection: Width of projections.
      projector: Widths of the projector's hidden layers.
      projector_norm: Norm of the hidden layers: 'batch', which needs the whole batch in one step
        (neither accumulation nor pmap), or 'layer'.

    Raises:
      UserError: if a width is not positive, or as for `vit`.
    """

    projection: int = 128
    projector: tuple[int, ...] = (2048, 2048)
    projector_norm: str = 'batch'

    def __post_init__(self) -> None:
        for width in (self.projection, *self.projector):
            if width < 1:
                raise UserError(f'projection and projector must be at least 1, not {width}')
        check_choice('projector_norm', self.projector_norm, NORMS)
        super().__post_init__()

    @nn.compact
    def __call__(
        self,
        images: Float[Array, 'B H W C'],
        train: bool = False,
        *,
        mask: Bool[Array, 'B N'] | None = None,
        masked: Bool[Array, 'B N'] | None = None,
    ) -> dict[str, Float[Array, 'B *rest']]:
        """Return a ViT's outputs, its `patches` [B N D], and `projected` [B projection]."""
        outputs = super().__call__(images, train, mask=mask, masked=masked)
        patches = math.prod(patch_grid(images.shape[1], images.shape[2], self.patch_size))
        outputs['patches'] = outputs['tokens'][:, -patches:]
        x = outputs['pre_logits'].astype(jnp.float32)
        for i, width in enumerate(self.projector):
            x = nn.Dense(width, name=f'projector_fc{i}')(x)
            name = f'projector_norm{i}'
            if self.projector_norm == 'batch':
                x = BatchNorm(not train, momentum=0.9, epsilon=1e-5, name=name)(x)
            else:
                x = LayerNorm(name=name)(x)
            x = nn.relu(x)
        return outputs | {'projected': nn.Dense(self.projection, name='projector_out')(x)}

    @property
    def batch_norm_key(self) -> str:
        """Return the key whose value makes a batch norm; empty for none."""
        return 'projector_norm' if self.projector_norm == 'batch' else super().batch_norm_key

    def directions(self, count: int) -> Float[Array, 'P S']:
        """Draw random unit vectors [projection, count] that all examples of a step share."""
        key = self.make_rng('directions')
        vectors = jax.random.normal(key, (self.projection, count))
        return vectors / jnp.linalg.norm(vectors, axis=0)

    def transferable(self) -> tuple[dict[str, Any], tuple[str, ...]]:
        """Return the keywords of `config.model` for the ViT, and the names of its parameters."""
        fields = {name: getattr(self, name) for name in defaults(vit.Model)}
        return {'name': 'vit', **regroup(vit.Model, fields)}, vit.parameter_names(**fields)
