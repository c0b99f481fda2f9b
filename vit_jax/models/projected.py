"""A ViT whose representation is also projected to another width, such as that of a teacher."""

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
    """ViT with a linear projection for `distill`; the fields are those of `vit` and one more.

    Attributes:
      projection: width of the projection, that of the teacher's features.

    Raises:
      UserError: if the width is not positive, or as for `vit`.
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
        """The outputs of a ViT, and `projected` [B projection] in float32, of `pre_logits`."""
        outputs = super().__call__(images, train, mask=mask, masked=masked)
        layer = nn.Dense(self.projection, dtype=jnp.float32, name='projection')
        return outputs | {'projected': layer(outputs['pre_logits'])}

    def transferable(self) -> tuple[dict[str, Any], tuple[str, ...]]:
        """Keywords of `config.model` for the ViT alone, and the names of its parameters."""
        fields = {name: getattr(self, name) for name in defaults(vit.Model)}
        return {'name': 'vit', **regroup(vit.Model, fields)}, vit.parameter_names(**fields)
