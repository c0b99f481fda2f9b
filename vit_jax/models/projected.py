"""A ViT whose representation is also projected to a different width, such as a teacher's."""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax.numpy as jnp
from jax import Array

from vit_jax.array_types import Bool, Float
from vit_jax.errors import UserError
from vit_jax.models import vit
from vit_jax.nn.options import defaults, regroup


class Model(vit.Model):
    """ViT with a linear projection for `distill`, and one more field than `vit`.

    Attributes:
      projection: Width of the projection, equal to the width of the teacher's features.

    Raises:
      UserError: if the width is not positive, or as in `vit`.
    """

    projection: int = 768

    def __post_init__(self) -> None:
        if self.projection < 1:
            raise UserError(f'projection must be at least 1, not {self.projection}')
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
        """Apply the ViT, and add `projected` [B projection] in float32, from `pre_logits`."""
        outputs = super().__call__(images, train, mask=mask, masked=masked)
        layer = nn.Dense(self.projection, dtype=jnp.float32, name='projection')
        return outputs | {'projected': layer(outputs['pre_logits'])}

    def transferable(self) -> tuple[dict[str, Any], tuple[str, ...]]:
        """Describe the ViT: keywords of `config.model`, and parameter names."""
        fields = {name: getattr(self, name) for name in defaults(vit.Model)}
        return {'name': 'vit', **regroup(vit.Model, fields)}, vit.parameter_names(**fields)
