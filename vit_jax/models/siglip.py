"""SigLIP: an image tower and a text tower embed pictures and their captions in one space.

Zhai et al., 2023, arXiv:2303.15343; the attention pooling of images is that of Zhai et al., 2021,
arXiv:2106.04560. Towers of CLIP (arXiv:2103.00020) and LiT (arXiv:2111.07991) have the same parts.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from typing import Any, ClassVar

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from vit_jax.errors import UserError, check_choice, check_multiple
from vit_jax.models import base, vit
from vit_jax.models.base import Params, Resized, Size, check_fields
from vit_jax.nn.attention_maps import AttentionMap
from vit_jax.nn.blocks import Block, Encoder
from vit_jax.nn.parameter_pictures import ParameterPictures
from vit_jax.nn.positions import learned
from vit_jax.ops.sequences import Sequences

POOLS = ('map', 'gap', 'cls')


def variant(name: str) -> dict[str, int]:
    """Keywords of `Model` for a name such as 'B/16': both towers have the shape of that ViT.

    Raises:
      UserError: as `vit.variant`.
    """
    image = vit.variant(name)
    text = {f'text_{key}': value for key, value in image.items() if key != 'patch_size'}
    return image | text | {'embed_dim': image['width']}


class TextTower(nn.Module):
    """A Transformer encoder over the ids of a text; the last one's token becomes the embedding.

    Every id takes part, those of the padding too, as in the authors' code. So texts are padded to
    the same length wherever they are compared.
    """

    vocab_size: int
    length: int
    width: int
    depth: int
    mlp_dim: int
    num_heads: int
    embed_dim: int
    dropout: float = 0.0
    gelu: str = 'tanh'
    norm_eps: float = 1e-6
    scan: bool = False
    remat: bool | str = False
    attention: str = 'auto'
    dtype: Any = jnp.float32

    @nn.compact
    def __call__(self, ids: Int[Array, 'B N'], train: bool = False) -> Float[Array, 'B E']:
        """The embeddings, not yet of length 1."""
        std = self.width**-0.5
        embed = nn.Embed(
            self.vocab_size,
            self.width,
            dtype=self.dtype,
            embedding_init=nn.initializers.normal(std),
            name='token_embed',
        )
        positions = learned(self, self.length, self.width, std)
        x = embed(ids) + positions.astype(self.dtype)
        block = functools.partial(
            Block,
            num_heads=self.num_heads,
            mlp_dim=self.mlp_dim,
            dropout=self.dropout,
            gelu=self.gelu,
            norm_eps=self.norm_eps,
            dtype=self.dtype,
            attention_by=self.attention,
        )
        encoder = Encoder(
            block,
            self.depth,
            scan=self.scan,
            remat=self.remat,
            norm_eps=self.norm_eps,
            dtype=self.dtype,
            name='encoder',
        )
        return nn.Dense(self.embed_dim, dtype=self.dtype, name='head')(encoder(x, train)[:, -1])


class Model(base.Model):
    """Embeddings of images and of texts, of length 1, with the scale and the bias of their logits.

    The logit of an image and a text is `scale * <image, text> + bias`, equation 1.

    Attributes:
      vocab_size: ids of texts are in 0..vocab_size-1.
      length: number of ids of a text, the padding included.
      patch_size, width, depth, mlp_dim, num_heads: of the image tower, see the model `vit`.
      pool: of the image tower: 'map', attention pooling; 'gap' or 'cls' for towers started from a
        ViT that has these.
      text_width, text_depth, text_mlp_dim, text_num_heads: of the text tower.
      embed_dim: E, size of the embeddings; the width of the image tower unless `project` is set.
      project: whether a dense layer follows the image tower, as in CLIP. SigLIP has none.
      init_scale: t of the paper at the start; the parameter `log_scale` is its logarithm t'.
      init_bias: b of the paper at the start, which makes up for the many negatives. A softmax does
        not see it.
      dropout: dropout rate of both towers.
      gelu: 'tanh' (approximate) or 'erf' (exact).
      norm_eps: added to the variance in layer norms.
      scan: one scanned block instead of unrolled ones, in both towers; see the model `vit`.
      remat: recomputation in the backward pass, in both towers; see the model `vit`.
      attention: implementation: 'xla', 'pallas' or 'auto'; see the model `vit`.
      dtype: computation dtype. Parameters and the product of embeddings stay float32.

    Raises:
      UserError: if a field has no such value, the embeddings of images and texts differ in size, or
        a text has another length.
    """

    vocab_size: int | None = None
    length: int = 64
    patch_size: int = 16
    width: int = 768
    depth: int = 12
    mlp_dim: int = 3072
    num_heads: int = 12
    pool: str = 'map'
    text_width: int = 768
    text_depth: int = 12
    text_mlp_dim: int = 3072
    text_num_heads: int = 12
    embed_dim: int = 768
    project: bool = False
    init_scale: float = 10.0
    init_bias: float = -10.0
    dropout: float = 0.0
    gelu: str = 'tanh'
    norm_eps: float = 1e-6
    scan: bool = False
    remat: bool | str = False
    attention: str = 'auto'
    dtype: str = 'float32'

    tower: ClassVar[type[Any]] = vit.Model

    weightless: ClassVar[tuple[str, ...]] = (
        *('dropout', 'init_scale', 'init_bias', 'gelu', 'norm_eps', 'scan', 'remat', 'attention'),
        'dtype',
    )

    def __post_init__(self) -> None:
        check_choice('pool', self.pool, POOLS)
        check_fields(self, 'gelu', 'attention', 'dtype', 'remat', 'dropout')
        check_multiple('width', self.width, 'num_heads', self.num_heads)
        check_multiple('text_width', self.text_width, 'text_num_heads', self.text_num_heads)
        if not self.project and self.embed_dim != self.width:
            raise UserError(
                f'embed_dim={self.embed_dim}: the image tower has width {self.width}; make them '
                'equal, or set project=True'
            )
        if self.init_scale <= 0:
            raise UserError(f'init_scale={self.init_scale}: must be positive')
        super().__post_init__()

    def setup(self) -> None:
        self.image = self.tower(**self._image_fields)
        self.text = TextTower(
            vocab_size=self.vocab_size or 0,
            length=self.length,
            width=self.text_width,
            depth=self.text_depth,
            mlp_dim=self.text_mlp_dim,
            num_heads=self.text_num_heads,
            embed_dim=self.embed_dim,
            dtype=jnp.dtype(self.dtype),
            **self._options,
        )
        if self.project:
            self.image_head = nn.Dense(self.embed_dim, dtype=jnp.dtype(self.dtype))
        constant = nn.initializers.constant
        self.log_scale = self.param('log_scale', constant(math.log(self.init_scale)), ())
        self.bias = self.param('bias', constant(self.init_bias), ())

    def __call__(
        self,
        images: Float[Array, 'B H W C'] | Sequences,
        ids: Int[Array, 'T N'] | None = None,
        train: bool = False,
    ) -> dict[str, Float[Array, '*rest']]:
        """Embed normalized images and texts; sequences of patches if the tower takes these.

        Returns:
          image: [B E], of length 1, float32.
          text: [T E], likewise; absent without `ids`.
          scale, bias: numbers.
        """
        outputs = {'image': self.embed_images(images, train)}
        if ids is not None:
            outputs['text'] = self.embed_texts(ids, train)
        return {**outputs, 'scale': jnp.exp(self.log_scale), 'bias': self.bias}

    def embed_images(
        self, images: Float[Array, 'B H W C'] | Sequences, train: bool = False
    ) -> Float[Array, 'B E']:
        """The embeddings of images, of length 1, float32."""
        x = self.image(images, train)['pre_logits']
        return unit(self.image_head(x) if self.project else x)

    def embed_texts(self, ids: Int[Array, 'T N'], train: bool = False) -> Float[Array, 'T E']:
        """The embeddings of texts of `length` ids, of length 1, float32."""
        if ids.shape[1] != self.length:
            raise UserError(
                f'texts have {ids.shape[1]} ids, the model was made for {self.length}: set the '
                "length of the transform tokenize('caption', LENGTH) and config.model.length alike"
            )
        return unit(self.text(ids, train))

    def attention_maps(
        self,
        intermediates: Mapping[str, Any],
        images: Float[Array, 'B H W C'] | Sequences,
        *texts: Any,
    ) -> list[AttentionMap]:
        """Attention maps of the image tower, from the `intermediates` of a call."""
        del texts
        maps: list[AttentionMap]
        maps = self._image_tower().attention_maps(intermediates['image'], images)
        return maps

    def parameter_pictures(
        self, params: Mapping[str, Any], image_size: Size | None
    ) -> list[ParameterPictures]:
        """Those of the image tower, see the model `vit`."""
        return self._image_tower().parameter_pictures(params['image'], image_size)

    def resize_params(
        self, params: Params, old_size: Size | None, new_size: Size, method: str = 'bilinear'
    ) -> Resized:
        """The parameters for images, and patches, of another size; see `base.Model`."""
        if 'image' not in params:
            return params, []
        resize = self._image_tower().resize_params
        image, notes = resize(params['image'], old_size, new_size, method)
        return params | {'image': image}, notes

    @property
    def _options(self) -> dict[str, Any]:
        """The fields that both towers have."""
        names = ('dropout', 'gelu', 'norm_eps', 'scan', 'remat', 'attention')
        return {name: getattr(self, name) for name in names}

    @property
    def _image_fields(self) -> dict[str, Any]:
        names = ('patch_size', 'width', 'depth', 'mlp_dim', 'num_heads', 'pool', 'dtype')
        own = {name: getattr(self, name) for name in names}
        return own | self._options | {'posemb_std': self.width**-0.5}

    def _image_tower(self) -> Any:
        """The image tower by itself, for its methods that need no parameters."""
        return self.tower(**self._image_fields, parent=None)


def unit(x: Float[Array, '*B E']) -> Float[Array, '*B E']:
    """The rows scaled to length 1, in float32; a row of zeros stays."""
    x = x.astype(jnp.float32)
    return x * jax.lax.rsqrt(jnp.maximum(jnp.sum(x * x, axis=-1, keepdims=True), 1e-24))
