"""RF-DETR: a windowed ViT and a light decoder that detects objects in real time.

Robinson et al., 2025, arXiv:2511.09554, after LW-DETR, Chen et al., 2024, arXiv:2406.03459.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Mapping
from typing import Any, ClassVar, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import Array

from vit_jax.array_types import Bool, Float, Key
from vit_jax.errors import UserError, check_choice
from vit_jax.models import base, vit
from vit_jax.models._deformable import (
    SAMPLINGS,
    Cells,
    Decoder,
    DeformableBlock,
    DeformableFields,
    move_boxes,
    weights_of_patches,
)
from vit_jax.models._mask_head import MaskFields, MaskHead
from vit_jax.models.base import check_counts, check_fields
from vit_jax.models.detr import resize_nearest
from vit_jax.models.eomt import Encoder
from vit_jax.models.vit import block_factory, make_norm
from vit_jax.nn.detection import (
    DECODER_EPS,
    NECK_NORMS,
    SCALES,
    ZEROS,
    ClassHeads,
    Layers,
    NeckFields,
    Projector,
    Proposals,
    WindowCut,
    scaled_size,
)
from vit_jax.nn.maps import AttentionMap, HiddenState, collect, collect_blocks
from vit_jax.nn.options import BlockFields, PoolFields, PositionFields
from vit_jax.nn.patches import patch_grid
from vit_jax.nn.stochastic import example_keys
from vit_jax.ops.masks import from_features

# name: side of a patch, windows, maps, and blocks of the decoder; all on a ViT-S
VARIANTS = {
    'N': (16, 2, (3, 6, 9, 12), 2),
    'S': (16, 2, (3, 6, 9, 12), 3),
    'B': (14, 4, (2, 5, 8, 11), 3),
    'M': (16, 2, (3, 6, 9, 12), 4),
}
# The fields of the ViT.
BACKBONE = (
    *('patch_size', 'width', 'depth', 'mlp_dim', 'num_heads', 'registers', 'no_bias', 'block'),
    *('positions', 'remat', 'attention', 'dtype', 'windows'),
)
_SIDE = 0.05  # of the boxes that cells of the first map propose; doubled for each further map
_LOW, _HIGH = 0.01, 0.99  # centers of cells that may propose


def variant(name: str) -> dict[str, Any]:
    """Look up keywords of `Model` for a name of VARIANTS, such as 'M'.

    Raises:
      UserError: if there is no such variant.
    """
    check_choice('RF-DETR variant', name, VARIANTS)
    patch, windows, maps, decoder_depth = VARIANTS[name]
    fields = {'patch_size': patch, 'windows': windows, 'maps': maps, 'depth': maps[-1]}
    return {**vit.variant(f'S/{patch}'), **fields, 'decoder_depth': decoder_depth}


class Model(base.PatchModel):
    """RF-DETR for images whose grid of patches can be cut into windows.

    Attributes:
      num_classes: Number of classes of objects.
      patch_size, width, depth, mlp_dim, num_heads, registers, no_bias: See `vit.Model`.
      class_token: Whether the ViT has a class token, as in RF-DETR; not in LW-DETR.
      maps: Numbers of blocks after which the detector reads the tokens, through the final norm; the
        last is `depth`. None for four evenly spaced ones.
      global_blocks: Blocks, counted from 0, that attend to the whole image, all others within
        windows. None for the block after each map.
      windows: Windows along each side of the image.
      num_queries: Q, objects that an image can have; no more than its maps have cells.
      groups: G, groups of queries in training, of which the first remains.
      decoder_width, decoder_depth, decoder_heads, decoder_mlp_dim: Sizes of the decoder.
      cross: Attention of queries to the image.
      neck: Convolutions from the ViT's maps to those that the decoder reads.
      masks: Masks of the objects, for instance segmentation.
      dropout: Dropout rate in the decoder, of activations and residual branches.
      block, positions: See `vit.Model`; no norms after the sums, no positions within attention.
      remat, attention, dtype: See `vit.Model`.

    Raises:
      UserError: for an invalid field, or images that do not fit patches or windows.
    """

    num_classes: int | None = None
    patch_size: int = 16
    width: int = 384
    depth: int = 12
    mlp_dim: int = 1536
    num_heads: int = 6
    registers: int = 0
    no_bias: tuple[str, ...] = ()
    class_token: bool = True
    maps: tuple[int, ...] | None = None
    global_blocks: tuple[int, ...] | None = None
    windows: int = 2
    num_queries: int = 300
    groups: int = 13
    decoder_width: int = 256
    decoder_depth: int = 3
    decoder_heads: int = 8
    decoder_mlp_dim: int = 2048
    cross: DeformableFields = DeformableFields()
    neck: NeckFields = NeckFields()
    masks: MaskFields = MaskFields()
    dropout: float = 0.0
    block: BlockFields = BlockFields()
    positions: PositionFields = PositionFields()
    remat: bool | str = False
    attention: str = 'auto'
    dtype: str = 'float32'

    head_layers: ClassVar[tuple[str, ...]] = ('class_embed',)
    effects: ClassVar = {
        **dict.fromkeys(('maps', 'global_blocks', 'windows', 'decoder_heads'), 'binding'),
        **{'cross.heads': 'binding', 'cross.sampling': 'none'},
        **{'neck.eps': 'noted', 'neck.norm': 'binding', 'neck.scales': 'binding'},
    }

    def __post_init__(self) -> None:
        check_fields(self, 'attention', 'dtype', 'remat', 'dropout')
        check_counts(self, 'num_queries', 'groups', 'windows', 'decoder_depth')
        for name in ('cross.points', 'cross.heads', 'masks.mlp_dim'):
            if (count := operator.attrgetter(name)(self)) < 1:
                raise UserError(f'{name}={count}: must be at least 1')
        check_choice('cross.sampling', self.cross.sampling, SAMPLINGS)
        check_choice('neck.norm', self.neck.norm, NECK_NORMS)
        if not self.neck.scales or not {*self.neck.scales} <= {*SCALES}:
            raise UserError(f'neck.scales={self.neck.scales}: must be some of {SCALES}')
        if self.masks.stride and len(self.neck.scales) > 1:
            raise UserError(
                f'masks.stride={self.masks.stride}: masks need one map, not '
                f'neck.scales={self.neck.scales}'
            )
        if not {*(self.global_blocks or ())} <= {*range(self.depth)}:
            raise UserError(
                f'global_blocks={self.global_blocks}: must be from 0 to depth - 1, {self.depth - 1}'
            )
        if not 0 <= self.masks.stride <= self.patch_size:
            raise UserError(
                f'masks.stride={self.masks.stride}: must be from 0, for no masks, to '
                f'patch_size={self.patch_size}'
            )
        layers = self.map_layers
        if list(layers) != sorted({*layers}) or layers[0] < 1 or layers[-1] != self.depth:
            raise UserError(
                f'maps={self.maps}: must be increasing numbers from 1 to depth={self.depth}'
            )
        for name in ('decoder_heads', 'cross.heads'):
            if self.decoder_width % (4 * (heads := operator.attrgetter(name)(self))):
                raise UserError(
                    f'decoder_width={self.decoder_width}: must be a multiple of 4 {name}, '
                    f'{4 * heads}'
                )
        if self.block.norm_place == 'post' or self.positions.kind != 'none':
            raise UserError(
                "an RF-DETR has no block.norm_place 'post', and positions.kind is 'none'"
            )
        self.backbone_module()
        super().__post_init__()

    @property
    def map_layers(self) -> tuple[int, ...]:
        """Numbers of the blocks after which the detector reads the tokens."""
        if self.maps:
            return self.maps
        return tuple(sorted({-(-self.depth * i // 4) for i in (1, 2, 3, 4)}))

    def backbone_module(self) -> Backbone:
        """Make the module of the ViT, which is not bound."""
        fields = {name: getattr(self, name) for name in BACKBONE}
        pool = PoolFields('cls' if self.class_token else 'gap')
        whole = self.map_layers if self.global_blocks is None else self.global_blocks
        return Backbone(**fields, pool=pool, maps=self.map_layers, global_blocks=whole, parent=None)

    @property
    def class_tokens(self) -> int:
        """Number of class tokens."""
        return int(self.class_token)

    @property
    def prefix_tokens(self) -> int:
        """Number of tokens before the patches."""
        return self.class_tokens + self.registers

    @property
    def positioned_tokens(self) -> int:
        """Number of tokens before the patches that have a row of `pos_embed`."""
        return self.backbone_module().positioned_tokens

    @property
    def stride(self) -> int:
        """Side in pixels of the square of one token."""
        return self.patch_size

    @property
    def kernel_side(self) -> int:
        """Side in pixels of the patches that `patch_embed` has its kernel for."""
        return self.patch_size

    def setup(self) -> None:
        if not self.num_classes:
            raise UserError('an RF-DETR needs config.model.num_classes, at least 1')
        dtype, width = jnp.dtype(self.dtype), self.decoder_width
        self.vit = self.backbone_module()
        nn.share_scope(self, self.vit)  # its parameters are at the top level, as in a ViT
        self.projectors = [
            Projector(width, scale, self.neck, dtype, name=f'projector_{i}' if i else 'projector')
            for i, scale in enumerate(self.neck.scales)
        ]
        self.proposals = [Proposals(width, dtype) for _ in range(self.groups)]
        queries = self.groups * self.num_queries
        self.query_embed = self.param('query_embed', nn.initializers.normal(1.0), (queries, width))
        self.query_boxes = self.param('query_boxes', ZEROS, (queries, 4))
        block: dict[str, Any] = {
            **{'num_heads': self.decoder_heads, 'mlp_dim': self.decoder_mlp_dim},
            **{'cross_heads': self.cross.heads, 'points': self.cross.points},
            'sampling': self.cross.sampling,
            **{'dropout': self.dropout, 'activation_dropout': self.dropout, 'dtype': dtype},
            **{'norm_eps': DECODER_EPS, 'attention_by': self.attention},
        }
        self.decoder = Decoder(functools.partial(DeformableBlock, **block), self.decoder_depth)
        self.class_embed = ClassHeads(self.num_classes, self.groups)
        self.bbox_embed = Layers((width, width, 4), dtype, zero=True)
        if self.masks.stride:
            self.mask_head = MaskHead(width, self.decoder_depth, self.masks.mlp_dim, dtype)

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
          train: Whether dropout acts, and whether there are G groups of queries instead of one.

        Returns:
          logits: [B GQ num_classes] in float32, of a sigmoid for each class.
          boxes: [B GQ 4] in float32, centered (x, y, w, h), shares of the sides of the real image.
          aux_logits, aux_boxes: [B L-1 GQ ...], the same after each block of the decoder but the
            last.
          first_logits, first_boxes: [B G Q ...], the proposals that the queries start from.

        With masks also:
          mask_queries, mask_maps: [B 1+L GQ K] and [B 1+L h w K], of the proposals and after each
            block. Their products are the logits of the pixels of the padded image, see
            `ops.masks.from_features`.
          masks: [B Q h w] in float32, of the last block; only without `train`.
        """
        if pixel_mask is None:
            pixel_mask = jnp.ones(images.shape[:3], bool)
        layers = self.vit(images, train)
        maps = [project(layers) for project in self.projectors]
        found = self.detect(maps, pixel_mask, train)
        if not (stride := self.masks.stride):
            return found.outputs
        size = images.shape[1] // stride, images.shape[2] // stride
        masks = self.mask_head(maps[0], size, found.proposals, found.hidden)
        if not train:
            last = (masks[name][:, -1] for name in ('mask_queries', 'mask_maps'))
            masks['masks'] = from_features(*last)
        return found.outputs | masks

    def example_keys(self, rows: int) -> Key[Array, ' B']:
        """Derive a key for each row from the random stream 'points'; see `nn.stochastic`."""
        return example_keys(self.make_rng('points'), rows)

    def detect(
        self, maps: list[Float[Array, 'B _ _ D']], pixel_mask: Bool[Array, 'B H W'], train: bool
    ) -> Detections:
        """Run both stages on the maps of an image; see `__call__`."""
        cells = [_as_cells(features, pixel_mask) for features in maps]
        batch, groups = len(pixel_mask), self.groups if train else 1
        first = self._propose(cells, groups)
        count = first['boxes'].shape[2]

        def rows(table: Array) -> Array:
            table = table.reshape(self.groups, self.num_queries, -1)[:groups, :count]
            return jnp.broadcast_to(table, (batch, *table.shape)).reshape(batch, groups * count, -1)

        starts = jax.lax.stop_gradient(first['boxes']).reshape(batch, groups * count, 4)
        boxes, x = move_boxes(starts, rows(self.query_boxes)), rows(self.query_embed)
        hidden = self.decoder(x, cells, boxes, train, groups)
        logits = self.class_embed(hidden)
        found = move_boxes(boxes[:, None], self.bbox_embed(hidden))
        outputs = {
            **{'logits': logits[:, -1], 'boxes': found[:, -1]},
            **{'aux_logits': logits[:, :-1], 'aux_boxes': found[:, :-1]},
            **{'first_logits': first['logits'], 'first_boxes': first['boxes']},
        }
        return Detections(outputs, hidden, first['queries'])

    def _propose(self, maps: list[Cells], groups: int) -> dict[str, Float[Array, 'B G Q _']]:
        """Select the cells of all maps that most likely hold objects, for each group."""
        starts = [_cell_boxes(cells.real, _SIDE * 2**i) for i, cells in enumerate(maps)]
        boxes, valid = (jnp.concatenate(parts, axis=1) for parts in zip(*starts, strict=True))
        tokens = jnp.concatenate([cells.tokens for cells in maps], axis=1)
        tokens = jnp.where(valid[..., None], tokens, 0)
        chosen = min(self.num_queries, tokens.shape[1])
        # All groups have parameters, whatever the first call is.
        count = self.groups if self.is_initializing() else groups
        selected = []
        for i in range(count):
            x, changes = self.proposals[i](tokens)
            logits = self.class_embed.of_group(x, i)
            scores = jnp.where(valid, logits.max(-1), -jnp.inf)
            _, best = jax.lax.top_k(scores, chosen)
            every = {'logits': logits, 'boxes': move_boxes(boxes, changes), 'queries': x}
            selected.append(
                {k: jnp.take_along_axis(v, best[..., None], axis=1) for k, v in every.items()}
            )
        return jax.tree.map(lambda *arrays: jnp.stack(arrays, axis=1), *selected[:groups])

    def attention_maps(
        self,
        intermediates: Mapping[str, Any],
        images: Float[Array, 'B H W C'],
        pixel_mask: Bool[Array, 'B H W'] | None = None,
    ) -> list[AttentionMap]:
        """Collect attention among queries, and of queries to patches of the image.

        Weights of cells of other maps than the grid are spread over the patches.

        Args:
          intermediates: Collection `intermediates` that the model returns.
          images: Input of the model.
          pixel_mask: Input of the model; padding gets no attention.
        """
        del pixel_mask
        grid = patch_grid(images.shape[1], images.shape[2], self.patch_size)
        sizes = [scaled_size(grid, scale) for scale in self.neck.scales]
        queries = (min(self.num_queries, sum(map(math.prod, sizes))),)
        sampled = collect(intermediates, 'decoder', queries, grid, 'deformable')
        if sizes != [grid]:
            sampled = [
                m._replace(weights=weights_of_patches(jnp.asarray(m.weights), sizes, grid))
                for m in sampled
            ]
        return [
            *collect(intermediates, 'decoder', queries, queries),
            *(m._replace(name=m.name.replace('/deformable', '/cross')) for m in sampled),
        ]

    def collect_hidden_states(
        self, collection: Mapping[str, Any], images: Float[Array, 'B H W C'], *others: Any
    ) -> list[HiddenState]:
        """Collect the states of the encoder's layers; class tokens come from the first window.

        The last state is the input of the last map.
        """
        del others
        grid = patch_grid(images.shape[1], images.shape[2], self.patch_size)
        cut = WindowCut(grid, self.windows, self.prefix_tokens)
        embedding, *blocks = collect_blocks(collection, 'encoder')
        whole = [embedding, *((name, cut.join(x)) for name, x in blocks)]
        return [
            HiddenState(name, x, grid, self.prefix_tokens, self.class_tokens) for name, x in whole
        ]

    def layer_order(self) -> tuple[str, ...]:
        """List patterns of the layers' parameters from the image to the end of the encoder."""
        return self.backbone_module().layer_order()


class Detections(NamedTuple):
    """Results of the detector.

    Attributes:
      outputs: See `Model.__call__`.
      hidden: Queries after each block of the decoder, normalized.
      proposals: Features of the cells that were selected.
    """

    outputs: dict[str, Array]
    hidden: Float[Array, 'B L _ D']
    proposals: Float[Array, 'B G Q D']


def _as_cells(features: Float[Array, 'B h w D'], pixel_mask: Bool[Array, 'B H W']) -> Cells:
    """Return a map as the cells that queries read, with the mask at its size."""
    batch, height, width, _ = features.shape
    real = resize_nearest(pixel_mask, (height, width)).reshape(batch, -1)
    return Cells(features.reshape(batch, height * width, -1), real, (height, width))


def _cell_boxes(
    real: Bool[Array, 'B h w'], side: float
) -> tuple[Float[Array, 'B N 4'], Bool[Array, 'B N']]:
    """Return a box at each cell, relative to the real part, and whether it may propose."""
    batch, height, width = real.shape
    rows = (jnp.arange(height) + 0.5) / real[:, :, 0].sum(1)[:, None]
    columns = (jnp.arange(width) + 0.5) / real[:, 0, :].sum(1)[:, None]
    y = jnp.broadcast_to(rows[:, :, None], real.shape).reshape(batch, -1)
    x = jnp.broadcast_to(columns[:, None, :], real.shape).reshape(batch, -1)
    inside = (jnp.minimum(x, y) > _LOW) & (jnp.maximum(x, y) < _HIGH)
    valid = real.reshape(batch, -1) & inside
    boxes = jnp.stack([x, y, *[jnp.full_like(x, side)] * 2], axis=-1)
    return jnp.where(valid[..., None], boxes, 0), valid


class Backbone(vit.Model):
    """A ViT that attends within windows, except in some blocks.

    Attributes:
      maps, global_blocks, windows: See `Model`.

    Other attributes: see `vit.Model`.
    """

    maps: tuple[int, ...] = ()
    global_blocks: tuple[int, ...] = ()
    windows: int = 1

    @nn.compact
    def __call__(  # type: ignore[override]  # other outputs
        self, images: Float[Array, 'B H W C'], train: bool = False
    ) -> list[Float[Array, 'B h w D']]:
        """Compute the maps of all layers of `maps`, after the final norm if any."""
        dtype, block = jnp.dtype(self.dtype), self.block
        grid = patch_grid(images.shape[1], images.shape[2], self.patch_size)
        cut = WindowCut(grid, self.windows, self.prefix_tokens)
        encoder = Encoder(
            block_factory(self, dtype),
            functools.partial(make_norm(self), block.norm_eps, dtype=dtype),
            *(self.depth, block.drop_path, self.remat, block.final_norm, dtype),
            name='encoder',
        )
        x = cut.cut(self._embed(images, None, train, dtype))
        shape, maps = x.shape, []
        for i in range(self.depth):
            x = (
                x.reshape(len(images), -1, shape[-1])
                if i in self.global_blocks
                else x.reshape(shape)
            )
            x = encoder(x, range(i, i + 1), train)
            if i + 1 in self.maps:
                patches = cut.join(encoder.normed(x))[:, self.prefix_tokens :]
                maps.append(patches.reshape(len(images), *grid, -1))
        return maps
