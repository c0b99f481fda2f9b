"""SigLIP: an image tower and a text tower embed pictures and their captions in one space.

Zhai et al., 2023, arXiv:2303.15343; the attention pooling of images is from Zhai et al., 2021,
arXiv:2106.04560. Towers of CLIP (arXiv:2103.00020) and LiT (arXiv:2111.07991) have the same parts.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import flax.linen as nn
import jax.numpy as jnp
from jax import Array

from vit_jax.array_types import Float, Int
from vit_jax.errors import UserError, check_choice, check_multiple
from vit_jax.models import base, text_encoder, vit
from vit_jax.models.base import Params, Resized, Size, check_fields
from vit_jax.nn.maps import AttentionMap, HiddenState, ParameterPictures
from vit_jax.nn.norms import unit
from vit_jax.nn.options import PlainBlockFields, PoolKind
from vit_jax.ops.sequences import Sequences

POOLS = ('map', 'gap', 'cls')
SHAPE = ('width', 'depth', 'mlp_dim', 'num_heads')
# In CLIP, logits are not scaled by more than 100 (arXiv:2103.00020, section 2.5).
CLIP_SCALE = (('^log_scale$', math.log(100)),)


def variant(name: str) -> dict[str, int]:
    """Look up keywords of `Model` for a name such as 'B/16': both towers have this ViT's shape.

    Raises:
      UserError: as in `vit.variant`.
    """
    image = vit.variant(name)
    text = {f'text_{key}': image[key] for key in SHAPE}
    return image | text | {'embed_dim': image['width']}


@dataclasses.dataclass(frozen=True)
class TextFields:
    """The text tower.

    Attributes:
      width, depth, mlp_dim, num_heads: Sizes, see the model `vit`.
    """

    width: int = 768
    depth: int = 12
    mlp_dim: int = 3072
    num_heads: int = 12


@dataclasses.dataclass(frozen=True)
class LogitFields:
    """Initial values of the logits' scale and bias.

    Attributes:
      scale: The paper's t; the parameter `log_scale` is its logarithm t'.
      bias: The paper's b, which compensates for the many negatives. It has no effect on a softmax.
    """

    scale: float = 10.0
    bias: float = -10.0


class Model(base.Model):
    """Embeddings of images and texts, of length 1, with the scale and the bias of their logits.

    The logit of an image and a text is `scale * <image, text> + bias`, equation 1.

    Attributes:
      vocab_size: Number of ids of texts, in 0..vocab_size-1.
      length: Number of ids of a text, including padding.
      patch_size, width, depth, mlp_dim, num_heads: Sizes of the image tower, see the model `vit`.
      pool: Pooling of the image tower: the kind 'map', attention pooling; 'gap' or 'cls' for towers
        started from a ViT with this pooling.
      texts: Options of the text tower, see `TextFields`.
      embed_dim: E, size of the embeddings; the width of the image tower unless `project` is set.
      project: Whether a dense layer follows the image tower, as in CLIP. SigLIP has none.
      logits: Initial scale and bias of the logits, see `LogitFields`.
      dropout: Dropout rate of both towers.
      block: Options of the blocks of both towers, see `PlainBlockFields`.
      scan: One scanned block instead of unrolled ones, in both towers; see the model `vit`.
      remat: Recomputation in the backward pass, in both towers; see the model `vit`.
      attention: Implementation: 'xla', 'pallas', 'cudnn' or 'auto'; see the model `vit`.
      dtype: Computation dtype. Parameters and the matmul of embeddings stay float32.

    Raises:
      UserError: for an invalid field, embeddings of images and texts of different size, or a text
        of a different length.
    """

    vocab_size: int | None = None
    length: int = 64
    patch_size: int = 16
    width: int = 768
    depth: int = 12
    mlp_dim: int = 3072
    num_heads: int = 12
    pool: PoolKind = PoolKind('map')
    texts: TextFields = TextFields()
    embed_dim: int = 768
    project: bool = False
    logits: LogitFields = LogitFields()
    dropout: float = 0.0
    block: PlainBlockFields = PlainBlockFields()
    scan: bool = False
    remat: bool | str = False
    attention: str = 'auto'
    dtype: str = 'float32'

    first_layer = '^image/patch_embed/'
    image_method = 'embed_images'
    tower: ClassVar[type[Any]] = vit.Model
    text_class: ClassVar[type[Any]] = text_encoder.Model
    pools: ClassVar[tuple[str, ...]] = POOLS
    # Whether the heads of both towers, and the logits, have biases.
    biases: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_choice('pool.kind', self.pool.kind, self.pools)
        check_fields(self, 'block.gelu', 'attention', 'dtype', 'remat', 'dropout')
        check_multiple('width', self.width, 'num_heads', self.num_heads)
        check_multiple('texts.width', self.texts.width, 'texts.num_heads', self.texts.num_heads)
        if not self.project and self.embed_dim != self.width:
            raise UserError(
                f'embed_dim={self.embed_dim}: the image tower has width {self.width}; make them '
                'equal, or set project=True'
            )
        if self.logits.scale <= 0:
            raise UserError(f'logits.scale={self.logits.scale}: must be positive')
        super().__post_init__()

    def setup(self) -> None:
        self.image = self._make_tower()
        self.text = self.text_class(**self._text_fields)
        if self.project:
            biased = self.has_bias('image')
            self.image_head = nn.Dense(self.embed_dim, biased, jnp.dtype(self.dtype))
        start = nn.initializers.constant(math.log(self.logits.scale))
        self.log_scale = self.param('log_scale', start, ())
        self.bias = self._bias()

    def __call__(
        self,
        images: Float[Array, 'B H W C'] | Sequences,
        ids: Int[Array, 'T N'] | None = None,
        train: bool = False,
    ) -> dict[str, Float[Array, '*rest']]:
        """Embed normalized images and texts; also sequences of patches if the tower accepts them.

        Returns:
          image: [B E], of length 1, float32.
          text: [T E], of length 1, float32; absent without `ids`.
          scale, bias: numbers.
        """
        outputs = {'image': self.embed_images(images, train)}
        if ids is not None:
            outputs['text'] = self.embed_texts(ids, train)
        return {**outputs, 'scale': jnp.exp(self.log_scale), 'bias': self.bias}

    def embed_images(
        self, images: Float[Array, 'B H W C'] | Sequences, train: bool = False
    ) -> Float[Array, 'B E']:
        """Embed images as vectors of length 1 in float32."""
        return self._embed_pooled(self.image(images, train)['pre_logits'])

    def embed_texts(self, ids: Int[Array, 'T N'], train: bool = False) -> Float[Array, 'T E']:
        """Embed texts of `length` ids as vectors of length 1 in float32."""
        return unit(self.text(ids, train)['logits'])

    def attention_maps(
        self,
        intermediates: Mapping[str, Any],
        images: Float[Array, 'B H W C'] | Sequences,
        *texts: Any,
    ) -> list[AttentionMap]:
        """Collect attention maps of the image tower from the `intermediates` of a call."""
        del texts
        maps: list[AttentionMap]
        maps = self.image_tower().attention_maps(intermediates['image'], images)
        return maps

    def collect_hidden_states(
        self,
        collection: Mapping[str, Any],
        images: Float[Array, 'B H W C'] | Sequences,
        *texts: Any,
    ) -> list[HiddenState]:
        """Collect the states of the image tower's layers; for texts see `text_tower`."""
        del texts
        states: list[HiddenState]
        states = self.image_tower().collect_hidden_states(collection['image'], images)
        return states

    def final_norm_of(self, params: Mapping[str, Any]) -> Callable[[Array], Array] | None:
        """Bind the image tower's last norm."""
        norm: Callable[[Array], Array] | None = self.image_tower().final_norm_of(params['image'])
        return norm

    def parameter_pictures(
        self, params: Mapping[str, Any], image_size: Size | None
    ) -> list[ParameterPictures]:
        """Draw the pictures of the image tower, see the model `vit`."""
        return self.image_tower().parameter_pictures(params['image'], image_size)

    def resize_params(
        self, params: Params, old_size: Size | None, new_size: Size, method: str = 'bilinear'
    ) -> Resized:
        """Resize the parameters for images, and patches, of a different size; see `base.Model`."""
        if 'image' not in params:
            return params, []
        resize = self.image_tower().resize_params
        image, notes = resize(params['image'], old_size, new_size, method)
        return params | {'image': image}, notes

    def image_tower(self) -> Any:
        """Make the image tower as a separate model, without parameters."""
        return self.tower(**self._image_fields, parent=None)

    def text_tower(self) -> text_encoder.Model:
        """Make the text tower as a separate model, without parameters."""
        tower: text_encoder.Model = self.text_class(**self._text_fields, parent=None)
        return tower

    def has_bias(self, part: str) -> bool:
        """Return whether the 'image' head, the 'text' head or the 'logits' have a bias."""
        del part
        return self.biases

    def _make_tower(self) -> Any:
        return self.tower(**self._image_fields)

    def _embed_pooled(self, x: Float[Array, 'B D']) -> Float[Array, 'B E']:
        return unit(self.image_head(x) if self.project else x)

    def _bias(self) -> Float[Array, '']:
        if not self.has_bias('logits'):
            return jnp.zeros(())
        return self.param('bias', nn.initializers.constant(self.logits.bias), ())

    @property
    def _image_fields(self) -> dict[str, Any]:
        same = ('patch_size', *SHAPE, 'dropout', 'scan', 'remat', 'attention', 'dtype')
        return {
            **{name: getattr(self, name) for name in same},
            'block': vars(self.block),
            'positions': {'std': self.width**-0.5},
            'pool': vars(self.pool),
        }

    @property
    def _text_fields(self) -> dict[str, Any]:
        same = ('vocab_size', 'length', 'dropout', 'block', 'scan', 'remat', 'attention', 'dtype')
        fields = {**vars(self.texts), **{name: getattr(self, name) for name in same}}
        return fields | {'num_classes': self.embed_dim, 'head_bias': self.has_bias('text')}
