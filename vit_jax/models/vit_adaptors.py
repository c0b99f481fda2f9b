"""A ViT with adaptors that predict the features of several teachers.

Ranzinger et al., 2024, "AM-RADIO", arXiv:2312.06709.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import flax.linen as nn
import jax.numpy as jnp
from jax import Array

from vit_jax.array_types import Bool, Float
from vit_jax.errors import UserError
from vit_jax.models import vit
from vit_jax.nn.maps import HiddenState, choose_layers
from vit_jax.nn.norms import LayerNorm
from vit_jax.nn.options import defaults, regroup
from vit_jax.nn.patches import patch_grid

KINDS = ('summary', 'patches')


class Model(vit.Model):
    """ViT with an MLP per teacher for the whole image, and one for its patches.

    The model has the fields of `vit` and four more.

    Attributes:
      summary_widths: Width of each teacher's representation of an image; 0 for no adaptor.
      patch_widths: Width of each teacher's patches; 0 for no adaptor.
      hidden: Width of the hidden layer of adaptors.
      adaptor: Number of the teacher whose features are the outputs, except in training; by default
        the ViT's own.

    Raises:
      UserError: if a width is negative, the numbers of teachers differ, there is no adaptor of this
        number, or as in `vit`.
    """

    summary_widths: tuple[int, ...] = (768,)
    patch_widths: tuple[int, ...] = (768,)
    hidden: int = 1024
    adaptor: int | None = None

    def __post_init__(self) -> None:
        widths = (*self.summary_widths, *self.patch_widths)
        if len(self.summary_widths) != len(self.patch_widths) or min(widths, default=0) < 0:
            raise UserError(
                f'summary_widths={self.summary_widths}, patch_widths={self.patch_widths}: both '
                'need a width per teacher, or 0'
            )
        if self.hidden < 1:
            raise UserError(f'hidden must be at least 1, not {self.hidden}')
        if self.adaptor is not None and self._widths_of_adaptor() in ([], [0, 0]):
            raise UserError(f'adaptor={self.adaptor}: summary_widths and patch_widths have none')
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
        With `adaptor`, not in training, `tokens` and `patches` are the teacher's patches, absent if
        it has none; `pre_logits` is its representation, or else the mean of its patches.
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
        return outputs if train or self.adaptor is None else self._choose(outputs)

    def _choose(self, outputs: dict[str, Array]) -> dict[str, Array]:
        """Replace the ViT's features by the adaptor's."""
        own = ('tokens', 'patches', 'pre_logits')
        chosen = {name: x for name, x in outputs.items() if name not in own}
        summary, patches = (chosen.get(f'{kind}_{self.adaptor}') for kind in KINDS)
        if patches is not None:
            chosen |= {'tokens': patches, 'patches': patches, 'pre_logits': patches.mean(1)}
        return chosen if summary is None else chosen | {'pre_logits': summary}

    def _widths_of_adaptor(self) -> list[int]:
        widths = (self.summary_widths, self.patch_widths)
        return [x for of_kind in widths for x in of_kind[self.adaptor :][:1]]

    def hidden_states(
        self,
        variables: Mapping[str, Any],
        *inputs: Any,
        layers: Sequence[int] | None = None,
        normalized: bool = False,
    ) -> tuple[Any, list[HiddenState]]:
        """Return the ViT's layers, see `base.Model`; with `adaptor` only the teacher's patches."""
        if self.adaptor is None:
            return super().hidden_states(variables, *inputs, layers=layers, normalized=normalized)
        outputs: Any = self.apply(variables, *inputs)
        if 'patches' not in outputs:
            raise UserError(f'patch_widths[{self.adaptor}]=0: this adaptor predicts no patches')
        grid = patch_grid(inputs[0].shape[1], inputs[0].shape[2], self.stride)
        states = [HiddenState(f'adaptor_patches_{self.adaptor}', outputs['patches'], grid)]
        return outputs, [states[i] for i in choose_layers(1, layers or (-1,))]

    def final_norm_of(self, params: Mapping[str, Any]) -> Callable[[Array], Array] | None:
        """Bind the ViT's last norm; None with `adaptor`, whose patches have none."""
        return super().final_norm_of(params) if self.adaptor is None else None

    def transferable(self) -> tuple[dict[str, Any], tuple[str, ...]] | None:
        """Describe the ViT: its `config.model`, and parameter names; None with `adaptor`."""
        if self.adaptor is not None:
            return None
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
