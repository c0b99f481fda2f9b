"""A ViT with adaptors that predict the features of several teachers.

Ranzinger et al., 2024, "AM-RADIO", arXiv:2312.06709.
"""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax.numpy as jnp
from jax import Array

from vit_jax.array_types import Bool, Float
from vit_jax.errors import UserError
from vit_jax.models import vit
from vit_jax.nn.norms import LayerNorm
from vit_jax.nn.options import defaults, regroup


class Model(vit.Model):
    """ViT with an MLP per teacher for the whole image, and one for its patches.

    The model has the fields of `vit` and three more.

    Attributes:
      summary_widths: Width of each teacher's representation of an image; 0 for no adaptor.
      patch_widths: Width of each teacher's patches; 0 for no adaptor.
      hidden: Width of the hidden layer of adaptors.

    Raises:
      UserError: if a width is negative, the numbers of teachers differ, or as in `vit`.
    """

    summary_widths: tuple[int, ...] = (768,)
    patch_widths: tuple[int, ...] = (768,)
    hidden: int = 1024

    def __post_init__(self) -> None:
        widths = (*self.summary_widths, *self.patch_widths)
        if len(self.summary_widths) != len(self.patch_widths) or min(widths, default=0) < 0:
            raise UserError(
                f'summary_widths={self.summary_widths}, patch_widths={self.patch_widths}: both '
                'need a width per teacher, or 0'
            )
        if self.hidden < 1:
            raise UserError(f'hidden must be at least 1, not {self.hidden}')
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
        """Apply the ViT, and predict each teacher's features in float32.

        Returns:
          The outputs of a ViT, its `patches` [B N D], and for teacher I:
          summary_I: [B summary_widths[I]], from `pre_logits`.
          patches_I: [B N patch_widths[I]], from `patches`.
        """
        outputs = super().__call__(images, train, mask=mask, masked=masked)
        outputs['patches'] = outputs['tokens'][:, self.prefix_tokens :]
        inputs = {'summary': outputs['pre_logits'], 'patches': outputs['patches']}
        widths = {'summary': self.summary_widths, 'patches': self.patch_widths}
        for kind, x in inputs.items():
            for i, width in enumerate(widths[kind]):
                if width:
                    name = f'{kind}_{i}'
                    adaptor = Adaptor(self.hidden, width, self.dtype, name=f'adaptor_{name}')
                    outputs[name] = adaptor(x)
        return outputs

    def transferable(self) -> tuple[dict[str, Any], tuple[str, ...]]:
        """Describe the ViT: keywords of `config.model`, and parameter names."""
        fields = {name: getattr(self, name) for name in defaults(vit.Model)}
        return {'name': 'vit', **regroup(vit.Model, fields)}, vit.parameter_names(**fields)


class Adaptor(nn.Module):
    """MLP of two layers with a norm and GELU between them; its output is float32.

    Attributes:
      hidden, features: Widths of the layers.
      dtype: Computation dtype.
    """

    hidden: int
    features: int
    dtype: str = 'float32'

    @nn.compact
    def __call__(self, x: Float[Array, '*B D']) -> Float[Array, '*B F']:
        x = nn.Dense(self.hidden, dtype=self.dtype, name='fc1')(x)
        x = nn.gelu(LayerNorm(dtype=self.dtype, name='norm')(x), approximate=False)
        return nn.Dense(self.features, dtype=self.dtype, name='fc2')(x).astype(jnp.float32)
