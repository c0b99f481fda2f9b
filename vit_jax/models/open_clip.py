"""Towers of OpenCLIP: the model `siglip` with any ViT for images, and texts as in CLIP or SigLIP.

Cherti et al., 2023, arXiv:2212.07143; for example, the towers of EVA-02 CLIP (arXiv:2303.11331),
Perception Encoder (arXiv:2504.13181) and SigLIP (arXiv:2303.15343).
"""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

from vit_jax import signatures
from vit_jax.errors import UserError, check_choice
from vit_jax.models import siglip, vit
from vit_jax.models.clip import variant as variant
from vit_jax.models.siglip import LogitFields
from vit_jax.models.text_encoder import check_eos
from vit_jax.nn.options import POOLS, PlainBlockFields, PoolKind, flatten_fields, regroup

HEADS = ('image', 'text', 'logits')


@dataclasses.dataclass(frozen=True)
class OpenClipTextFields(siglip.TextFields):
    """The text tower.

    Attributes:
      causal, eos: Options of the model `text_encoder`.
    """

    causal: bool = True
    eos: int | str | None = 'largest'


class Model(siglip.Model):
    """Model `siglip` whose image tower may have any options of a ViT.

    Attributes:
      pool: Pooling of the image tower, see the model `vit`.
      image_options: Options of the image tower beyond its shape, see the model `vit`; for example
        'vit(block={"mlp": "swiglu"})'.
      no_bias: Heads without biases: some of 'image', 'text' and 'logits'.
      logits: Initial scale and bias; training limits the scale to 100, as in CLIP.
      block: Options of the text tower, and of the image tower unless `image_options` sets them.

    Raises:
      UserError: as in `siglip`, or for an option that a ViT does not have.
    """

    pool: PoolKind = PoolKind('cls')
    texts: OpenClipTextFields = OpenClipTextFields()
    project: bool = True
    image_options: str = 'vit()'
    no_bias: tuple[str, ...] = ('text', 'logits')
    logits: LogitFields = LogitFields(1 / 0.07)
    block: PlainBlockFields = PlainBlockFields(gelu='erf', norm_eps=1e-5)

    pools = POOLS
    largest = siglip.CLIP_SCALE
    effects: ClassVar = {'texts.causal': 'outputs', 'texts.eos': 'binding'}

    def __post_init__(self) -> None:
        check_eos(self.texts.eos, self.vocab_size)
        for part in self.no_bias:
            check_choice('part of no_bias', part, HEADS)
        self._parse_image_options()
        super().__post_init__()

    def has_bias(self, part: str) -> bool:
        """Return whether a head, or the logits, have a bias."""
        return part not in self.no_bias

    @property
    def end_of_text(self) -> int | None:
        """The id that texts have to end with; None if they need none."""
        return self.texts.eos if isinstance(self.texts.eos, int) else None

    def _parse_image_options(self) -> dict[str, Any]:
        """Parse `image_options`, and check names and types."""
        node = signatures.parse_call(self.image_options, 'image_options')
        if signatures.function_name(node) != 'vit':
            raise UserError(f'image_options={self.image_options!r}: write it as vit(...)')
        _, options = signatures.arguments(node)
        defaults = flatten_fields(vit.Model, {})
        for name, value in flatten_fields(vit.Model, options).items():
            check_choice('option of the image tower', name, tuple(defaults))
            kind = type(defaults[name])
            wide = (int, float) if kind is float else kind
            if kind in (bool, int, float, str) and not isinstance(value, wide):
                raise UserError(f'image_options: {name}={value!r}: expected {kind.__name__}')
        return options

    @property
    def _image_fields(self) -> dict[str, Any]:
        return regroup(vit.Model, super()._image_fields, self._parse_image_options())
