"""DETR: detection of objects as a set, by a Transformer on the features of a ResNet.

Carion et al., 2020, arXiv:2005.12872.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import Array

from vit_jax.array_types import Bool, Float, Shaped
from vit_jax.errors import check_choice
from vit_jax.models import base
from vit_jax.models.base import bind_norm, check_counts, check_fields
from vit_jax.nn.attention import masked_softmax
from vit_jax.nn.dense import Dense
from vit_jax.nn.encoder_decoder import (
    ACTIVATIONS,
    NORMS,
    DecoderBlock,
    EncoderBlock,
    LayerOutputs,
    Memory,
    Stack,
)
from vit_jax.nn.maps import AttentionMap, HiddenState, collect, collect_blocks
from vit_jax.nn.multi_head import Heads
from vit_jax.nn.norms import group_norm
from vit_jax.nn.positions import masked_sine2d
from vit_jax.nn.resnet import NORMS as BACKBONE_NORMS
from vit_jax.nn.resnet import ResNet, block_order

# Kaiming uniform with gain 1, the initialization of the authors' head.
KERNEL = nn.initializers.lecun_uniform()
# Table 1 of the paper: blocks of each stage, and whether the last one is dilated.
VARIANTS = {
    'R50': ((3, 4, 6, 3), False),
    'DC5-R50': ((3, 4, 6, 3), True),
    'R101': ((3, 4, 23, 3), False),
    'DC5-R101': ((3, 4, 23, 3), True),
}


def variant(name: str) -> dict[str, Any]:
    """Look up keywords of `Model` for a name of VARIANTS, such as 'R50'.

    Raises:
      UserError: if there is no such variant.
    """
    check_choice('DETR variant', name, VARIANTS)
    layers, dilate = VARIANTS[name]
    return {'layers': layers, 'dilate': dilate}


class DetectorFeatures(NamedTuple):
    """Intermediate results of a detector that its heads read.

    Attributes:
      maps: Feature maps of the ResNet; its root's, of stride 2, comes first.
      features: Last map, projected to the width of a token.
      memory: Output of the encoder.
      hidden: Queries after each block of the decoder, normalized, in float32.
    """

    maps: list[Float[Array, 'B _ _ _']]
    features: Float[Array, 'B h w D']
    memory: Memory
    hidden: Float[Array, 'B L Q D']


@dataclasses.dataclass(frozen=True)
class ResNetFields:
    """The ResNet, a backbone.

    Attributes:
      layers: Blocks of each stage.
      width: Channels of its root, 64 in the paper.
      norm: 'frozen' batch norm, which is not trained, for a ResNet from a checkpoint; 'group' norm
        for one trained from scratch.
      dilate: Whether the last stage keeps its resolution: DC5.
      frozen_stages: Number of parts, from the root on, that get no gradient. Add their kernels to
        `config.optim.freeze` too, or weight decay will shrink them.
    """

    layers: tuple[int, ...] = (3, 4, 6, 3)
    width: int = 64
    norm: str = 'frozen'
    dilate: bool = False
    frozen_stages: int = 0


class Model(base.Model):
    """DETR for images of any size, padded at the right and below.

    Attributes:
      num_classes: Number of classes of objects; one more output means no object.
      resnet: Options of the ResNet, see `ResNetFields`.
      num_queries: Objects that an image can have.
      width: Token width.
      depth, decoder_depth: Blocks of the encoder and of the decoder.
      num_heads: Heads of every attention; divides `width`.
      mlp_dim: Hidden width of the blocks.
      decoder_heads, decoder_mlp_dim: Values for the decoder; None for the encoder's.
      activation: Activation of the blocks' MLPs: 'relu' as in the paper, 'gelu' (exact) or 'swish'.
      dropout: Dropout rate of attention weights, activations and residual branches.
      norm: 'post' as in the paper, or 'pre'.
      norm_eps: Value added to the variance in layer norms.
      dtype: Computation dtype. Parameters, softmax and outputs stay float32.
      attention: Implementation: 'xla', 'pallas', 'cudnn' or 'auto'; see the model `vit`.

    Raises:
      UserError: for an invalid field.
    """

    num_classes: int | None = None
    resnet: ResNetFields = ResNetFields()
    num_queries: int = 100
    width: int = 256
    depth: int = 6
    decoder_depth: int = 6
    num_heads: int = 8
    mlp_dim: int = 2048
    decoder_heads: int | None = None
    decoder_mlp_dim: int | None = None
    activation: str = 'relu'
    dropout: float = 0.1
    norm: str = 'post'
    norm_eps: float = 1e-5
    dtype: str = 'float32'
    attention: str = 'auto'

    head_layers = ('class_embed',)

    effects: ClassVar = {'activation': 'outputs'}

    def __post_init__(self) -> None:
        check_fields(self, 'dtype', 'attention', 'dropout')
        check_counts(self, 'num_queries', 'depth', 'decoder_depth')
        check_choice('norm', self.norm, NORMS)
        check_choice('activation', self.activation, ACTIVATIONS)
        check_choice('resnet.norm', self.resnet.norm, BACKBONE_NORMS)
        super().__post_init__()

    @property
    def stride(self) -> int:
        """Side in pixels of the square of one token."""
        return 4 * 2 ** max(len(self.resnet.layers) - 1 - self.resnet.dilate, 0)

    def setup(self) -> None:
        dtype = jnp.dtype(self.dtype)
        self.backbone = ResNet(**vars(self.resnet), dtype=dtype)
        self.input_proj = Dense(self.width, dtype=dtype)
        block: dict[str, Any] = {
            'num_heads': self.num_heads,
            'mlp_dim': self.mlp_dim,
            'norm': self.norm,
            'activation': self.activation,
            'dropout': self.dropout,
            'attention_dropout': self.dropout,
            'activation_dropout': self.dropout,
            'norm_eps': self.norm_eps,
            'dtype': dtype,
            'attention_by': self.attention,
        }
        self.encoder = Stack(functools.partial(EncoderBlock, **block), self.depth)
        block['num_heads'] = self.decoder_heads or self.num_heads
        block['mlp_dim'] = self.decoder_mlp_dim or self.mlp_dim
        self.decoder = LayerOutputs(functools.partial(DecoderBlock, **block), self.decoder_depth)
        shape = (self.num_queries, self.width)
        self.query_embed = self.param('query_embed', nn.initializers.normal(1.0), shape)
        self.class_embed = Dense((self.num_classes or 0) + 1)
        self.bbox_embed = BoxHead(self.width)

    def __call__(
        self,
        images: Float[Array, 'B H W C'],
        pixel_mask: Bool[Array, 'B H W'] | None = None,
        train: bool = False,
    ) -> dict[str, Float[Array, 'B ...']]:
        """Detect the objects of normalized images, whose padding is zero.

        Args:
          images: Normalized images.
          pixel_mask: True for real pixels, false for padding; by default all are real.
          train: Whether dropout acts.

        Returns:
          logits: [B Q num_classes + 1] in float32; the last class is "no object".
          boxes: [B Q 4] in float32, centered (x, y, w, h), shares of the sides of the real image.
          aux_logits, aux_boxes: [B L-1 Q ...], the same after each block of the decoder but the
            last.
        """
        return self.heads(self.detector_features(images, pixel_mask, train).hidden)

    def detector_features(
        self,
        images: Float[Array, 'B H W C'],
        pixel_mask: Bool[Array, 'B H W'] | None = None,
        train: bool = False,
    ) -> DetectorFeatures:
        """Compute the inputs of the heads of this model and of derived ones; see `__call__`."""
        if pixel_mask is None:
            pixel_mask = jnp.ones(images.shape[:3], bool)
        maps = self.backbone(images)
        features = self._embed(maps)
        memory = self._encode(features, pixel_mask, train)
        return DetectorFeatures(
            maps, features, memory, self._decode(memory, train).astype(jnp.float32)
        )

    def _embed(self, maps: list[Array]) -> Array:
        """Project the cells of the ResNet's last map to tokens, [B h w D]."""
        features: Array = self.input_proj(maps[-1])
        return features

    def heads(self, hidden: Float[Array, 'B L Q D']) -> dict[str, Float[Array, 'B ...']]:
        """Compute the outputs of `__call__` from the decoder's outputs."""
        logits, boxes = self.class_embed(hidden), self.bbox_embed(hidden)
        return {
            'logits': logits[:, -1],
            'boxes': boxes[:, -1],
            'aux_logits': logits[:, :-1],
            'aux_boxes': boxes[:, :-1],
        }

    def _encode(
        self, features: Float[Array, 'B h w D'], pixel_mask: Bool[Array, 'B H W'], train: bool
    ) -> Memory:
        """Encode the decoder's memory: a token for each cell of the last map, row by row."""
        mask = resize_nearest(pixel_mask, features.shape[1:3])
        positions = masked_sine2d(mask, self.width)
        tokens, positions = (x.reshape(x.shape[0], -1, self.width) for x in (features, positions))
        mask = mask.reshape(len(mask), 1, 1, -1)
        tokens = self.encoder(tokens, mask, train, positions)
        return Memory(tokens, mask, positions)

    def _decode(self, memory: Memory, train: bool) -> Array:
        """Compute the queries after each block of the decoder, normalized, [B L Q D]."""
        batch = memory.tokens.shape[0]
        queries = jnp.broadcast_to(self.query_embed, (batch, *self.query_embed.shape))
        x = jnp.zeros_like(queries, memory.tokens.dtype)
        return self.decoder(x, memory, train, queries)

    def attention_maps(
        self, intermediates: Mapping[str, Any], images: Array, pixel_mask: Array | None = None
    ) -> list[AttentionMap]:
        """Collect attention among cells, among queries, and of queries to cells.

        Args:
          intermediates: Collection `intermediates` that the model returns.
          images: Input of the model.
          pixel_mask: Input of the model; padding gets no attention.
        """
        del pixel_mask
        grid = tuple(-(-side // self.stride) for side in images.shape[1:3])
        queries = (self.num_queries,)
        return [
            *collect(intermediates, 'encoder', grid, grid),
            *collect(intermediates, 'decoder', queries, queries),
            *collect(intermediates, 'decoder', queries, grid, 'cross'),
        ]

    def collect_hidden_states(
        self, collection: Mapping[str, Any], images: Array, pixel_mask: Array | None = None
    ) -> list[HiddenState]:
        """Collect the cells before the encoder and after each of its blocks.

        `detector_features` has the queries after each block of the decoder.
        """
        del images
        states = collect_blocks(collection, 'encoder')
        grid = states[0][1].shape[1:3]
        cells = None if pixel_mask is None else resize_nearest(pixel_mask, grid)
        real = None if cells is None else cells.reshape(len(cells), -1)
        return [
            HiddenState(name, x.reshape(len(x), -1, self.width), grid, real=real)
            for name, x in states
        ]

    def final_norm_of(self, params: Mapping[str, Any]) -> Callable[[Array], Array] | None:
        """Bind the encoder's last norm, which post-norm blocks do not have."""
        return bind_norm('layer', self.norm_eps, self.dtype, params['encoder'].get('norm'))

    def layer_order(self) -> tuple[str, ...]:
        """List patterns of the layers' parameters from the image to the end of the encoder."""
        return (
            '^backbone/root/',
            *block_order('backbone/', self.resnet.layers),
            '^input_proj/',
            *(f'^encoder/block_{i}/' for i in range(self.depth)),
        )


class BoxHead(nn.Module):
    """Three dense layers, `layer_0` to `layer_2`, to a box within 0 and 1."""

    hidden_dim: int

    @nn.compact
    def __call__(self, x: Float[Array, '*B D']) -> Float[Array, '*B 4']:
        for i in range(2):
            x = nn.relu(Dense(self.hidden_dim, name=f'layer_{i}')(x))
        return nn.sigmoid(Dense(4, name='layer_2')(x))


class ObjectMaps(nn.Module):
    """Attention maps of objects over the image, without values. Parameter `qk`.

    The softmax is taken over all heads and cells together.
    """

    num_heads: int
    dtype: Any = jnp.float32

    @nn.compact
    def __call__(self, queries: Float[Array, 'B Q D'], memory: Memory) -> Float[Array, 'B Q N H']:
        """Compute the weight of each cell for each query and head, in float32."""
        query, key = Heads(self.num_heads, self.dtype, name='qk')(queries, memory.tokens)
        scores = jnp.einsum('bhqk,bhnk->bqnh', query, key, preferred_element_type=jnp.float32)
        scores = scores * math.sqrt(self.num_heads / queries.shape[-1])
        mask = memory.mask.swapaxes(-1, -2)  # [B 1 N 1], the same for all queries and heads
        flat, flat_mask = (
            x.reshape(*x.shape[:2], -1) for x in (scores, jnp.broadcast_to(mask, scores.shape))
        )
        return masked_softmax(flat, flat_mask).reshape(scores.shape)


class MaskHead(nn.Module):
    """Convolutions that enlarge the maps of objects to the finer stages of a ResNet.

    Two 3 x 3 convolutions with group norms, `conv_0` and `conv_1`, then one for each finer stage,
    three in the paper: before it the maps are resized to the stage, and its features are added by
    `adapter_0`, `adapter_1`, ... Then `out`. The features shared by all objects of an image are
    computed once.

    Attributes:
      width: Channels of the features, which fall to a sixteenth of it.
      dtype: Computation dtype; the masks are float32.
    """

    width: int
    dtype: Any = jnp.float32

    @nn.compact
    def __call__(
        self,
        features: Float[Array, 'B h w D'],
        maps: Float[Array, 'B Q h w N'],
        stages: Sequence[Float[Array, 'B _ _ _']],
    ) -> Float[Array, 'B Q H W']:
        """Compute logits of each object's pixels.

        Args:
          features: Features of the image, in the grid of the maps.
          maps: N maps of each object.
          stages: Feature maps of the image from coarse to fine; the last has the size of the masks.
        """
        queries = maps.shape[1]
        make = functools.partial(nn.Conv, dtype=self.dtype, kernel_init=KERNEL)
        norm = functools.partial(group_norm, most=8, dtype=self.dtype)
        channels = features.shape[-1] + maps.shape[-1]
        x = ObjectConv(channels, self.dtype, name='conv_0')(features, maps)
        x = nn.relu(norm(channels, name='norm_0')(x))
        for i in range(len(stages) + 1):
            if i > 0:
                finer = make(x.shape[-1], (1, 1), name=f'adapter_{i - 1}')(stages[i - 1])
                x = resize_nearest(x, finer.shape[1:3]) + jnp.repeat(finer, queries, axis=0)
            channels = self.width // 2 ** (i + 1)
            x = make(channels, (3, 3), name=f'conv_{i + 1}')(x)
            x = nn.relu(norm(channels, name=f'norm_{i + 1}')(x))
        x = make(1, (3, 3), name='out')(x).astype(jnp.float32)
        return x.reshape(-1, queries, *x.shape[1:3])


class ObjectConv(nn.Module):
    """A convolution of 3 x 3 pixels of an image's features and an object's maps, concatenated.

    Being linear, it convolves the image's features once for all objects.
    """

    channels: int
    dtype: Any = jnp.float32

    @nn.compact
    def __call__(
        self, features: Float[Array, 'B h w D'], maps: Float[Array, 'B Q h w N']
    ) -> Float[Array, 'M h w C']:
        """Convolve the objects of all images, in order, M = B Q."""
        width = features.shape[-1]
        kernel = self.param('kernel', KERNEL, (3, 3, width + maps.shape[-1], self.channels))
        bias = self.param('bias', nn.initializers.zeros, (self.channels,))

        def conv(x: Array, kernel: Array) -> Array:
            layout = ('NHWC', 'HWIO', 'NHWC')
            x, kernel = x.astype(self.dtype), kernel.astype(self.dtype)
            return jax.lax.conv_general_dilated(x, kernel, (1, 1), 'SAME', dimension_numbers=layout)

        of_images = conv(features, kernel[:, :, :width]) + bias.astype(self.dtype)
        of_objects = conv(maps.reshape(-1, *maps.shape[2:]), kernel[:, :, width:])
        return of_objects + jnp.repeat(of_images, maps.shape[1], axis=0)


def resize_nearest(x: Shaped[Array, 'B H W *C'], size: Sequence[int]) -> Shaped[Array, 'B h w *C']:
    """Resize so that each new pixel has the value of the old one below its upper left corner.

    This is PyTorch's `nearest`; `jax.image.resize` takes the pixel below the center.
    """
    rows, columns = (
        jnp.arange(new) * old // new for old, new in zip(x.shape[1:3], size, strict=True)
    )
    return jnp.asarray(x)[:, rows[:, None], columns]
