"""CLIP: the model `siglip` with its predecessor's towers; the text tower is causal.

Radford et al., 2021, arXiv:2103.00020, section 2.4 and table 20.
"""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

from vit_jax.models import siglip, vit
from vit_jax.models.siglip import LogitFields
from vit_jax.models.text_encoder import check_eos
from vit_jax.nn.options import PlainBlockFields, PoolKind

# Width of the embeddings, then width, depth and heads of the towers for texts.
_TEXTS = {'B': (512, 512, 12, 8), 'L': (768, 768, 12, 12)}


def variant(name: str) -> dict[str, int]:
    """Keywords of `Model` for a name such as 'B/16'; of ViTs that the authors did not train, both
    towers have the shape.

    Raises:
      UserError: as `vit.variant`.
    """
    image = vit.variant(name)
    shape = (image['width'], image['width'], image['depth'], image['num_heads'])
    embed_dim, width, depth, heads = _TEXTS.get(name.partition('/')[0], shape)
    text = {'text_width': width, 'text_depth': depth, 'text_num_heads': heads}
    return {**image, **text, 'text_mlp_dim': 4 * width, 'embed_dim': embed_dim}


@dataclasses.dataclass(frozen=True)
class ClipTextFields(siglip.TextFields):
    """The text tower, whose tokens attend to no later ones.

    Attributes:
      eos: Id of the end of a text, whose token becomes the embedding, or 'largest': see the model
        `text_encoder`. What follows the end has no effect.
    """

    width: int = 512
    mlp_dim: int = 2048
    num_heads: int = 8
    eos: int | str = 49407


class Model(siglip.Model):
    """Model `siglip` with a class token, norms before the first block and after the last, and
    projections without biases to the embeddings. Logits have no bias either.

    Attributes:
      no_bias: Layers of the image tower without biases, see the model `vit`; 'patch_embed' in the
        authors' files.
      logits: Initial scale, which training keeps at most at 100 (section 2.5); the bias has no
        effect.

    Raises:
      UserError: as `siglip`, or if the end is not an id of the vocabulary.
    """

    length: int = 77
    patch_size: int = 32
    pool: PoolKind = PoolKind('cls')
    texts: ClipTextFields = ClipTextFields()
    embed_dim: int = 512
    project: bool = True
    no_bias: tuple[str, ...] = ()
    logits: LogitFields = LogitFields(1 / 0.07, 0.0)
    block: PlainBlockFields = PlainBlockFields(gelu='quick', norm_eps=1e-5)

    biases = False
    largest = siglip.CLIP_SCALE
    effects: ClassVar = {'texts.eos': 'binding'}

    def __post_init__(self) -> None:
        check_eos(self.texts.eos, self.vocab_size)
        super().__post_init__()

    @property
    def end_of_text(self) -> int | None:
        """As in `text_encoder`."""
        return self.texts.eos if isinstance(self.texts.eos, int) else None

    @property
    def _image_fields(self) -> dict[str, Any]:
        block = {**vars(self.block), 'norm_pre': True}
        return super()._image_fields | {'block': block, 'no_bias': self.no_bias}

    @property
    def _text_fields(self) -> dict[str, Any]:
        return super()._text_fields | {'causal': True}
