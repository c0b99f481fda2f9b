"""The student of TIPS: its towers with heads of prototypes for self-distillation.

Maninis et al., 2025, arXiv:2410.16512; second version: arXiv:2604.12012. The heads only help to
train: `vit_jax.load` returns the towers, the model `tips`.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax import Array

from vit_jax.array_types import Float, Int
from vit_jax.errors import UserError
from vit_jax.models import siglip2, tips
from vit_jax.models.siglip import variant as variant
from vit_jax.models.siglip2 import PrototypeFields
from vit_jax.nn.options import defaults, regroup

TOWERS = ('image', 'text', 'log_scale')


class Model(siglip2.Distilled, tips.Model):
    """Model `tips` with heads for self-distillation.

    Images may be smaller or larger than those that initialize the model; positions are interpolated
    for them. It has the fields of `tips` and one more.

    Attributes:
      prototypes: Options of the heads, see `PrototypeFields`.
    """

    prototypes: PrototypeFields = PrototypeFields()

    part_task = 'siglip'

    def __post_init__(self) -> None:
        self._check_heads()
        super().__post_init__()

    def setup(self) -> None:
        super().setup()
        self.add_heads()

    def __call__(  # type: ignore[override]  # a second text comes before `train`
        self,
        images: Float[Array, 'B H W C'],
        ids: Int[Array, 'B N'] | None = None,
        second_ids: Int[Array, 'B N'] | None = None,
        train: bool = False,
    ) -> dict[str, Float[Array, '*rest']]:
        """Embed normalized images and texts.

        Args:
          images: Normalized images.
          ids: Texts to embed, if any.
          second_ids: Texts for the second class token, which is the first register, if any.
          train: Whether dropout acts.

        Returns:
          The outputs of `siglip`, and with `second_ids`:
          second_image, second_text: [B E], of length 1, float32.
        """
        tower = self.image(images, train)
        outputs = {'image': self._embed_pooled(tower['pre_logits'])}
        if ids is not None:
            outputs['text'] = self.embed_texts(ids, train)
        if second_ids is not None:
            if not self.registers:
                raise UserError(
                    'config.model.registers=0: a second text needs a second class token, the first '
                    "register; set config.task.second_text='' for none"
                )
            outputs['second_image'] = self._embed_pooled(tower['tokens'][:, 1])
            outputs['second_text'] = self.embed_texts(second_ids, train)
        return {**outputs, 'scale': jnp.exp(self.log_scale), 'bias': self.bias}

    def transferable(self) -> tuple[dict[str, Any], tuple[str, ...]]:
        """Describe the towers: keywords of `config.model`, and parameter names."""
        fields = {name: getattr(self, name) for name in defaults(tips.Model)}
        return {'name': 'tips', **regroup(tips.Model, fields)}, TOWERS
