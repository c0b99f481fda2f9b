"""DETR for panoptic segmentation: a detector, and a mask for each of its queries.

Carion et al., 2020, arXiv:2005.12872, section 4.4. Both things and stuff are detected as boxes.
"""

import jax
import jax.numpy as jnp
from jax import Array

from vit_jax.array_types import Bool, Float, Int
from vit_jax.errors import UserError
from vit_jax.models import detr
from vit_jax.models.detr import MaskHead, ObjectMaps
from vit_jax.ops.boxes import to_corners

# The detector's part of the parameters.
DETECTOR = (
    *('backbone', 'input_proj', 'encoder', 'decoder'),
    *('query_embed', 'class_embed', 'bbox_embed'),
)
STRIDES = (2, 4)
NO_MASK = -10.0


class Model(detr.Model):
    """A detector with a mask head.

    Attributes:
      frozen_detector: Whether only the mask head gets a gradient, which saves the backward pass of
        the detector. Add its parameters to `config.optim.freeze` too, or weight decay will shrink
        them.
      mask_stride: Side in pixels of the square of one mask logit: 4 as in the paper, or 2 for
        objects a few pixels wide, in which case the mask head also uses the map of the ResNet's
        root.
      box_maps: Whether the mask head gets each query's box too, as the share of each cell that the
        box covers, added to its attention. Without it, attention, which sums to 1 over all cells,
        is a weak signal in a short training, and less local the fewer blocks the encoder has.
      num_masks: Number of queries of an image with a mask, which have the lowest probability of "no
        object"; 0 for all. The others have the logit `NO_MASK` everywhere.

    For other attributes and errors see `detr.Model`.
    """

    frozen_detector: bool = False
    mask_stride: int = 4
    box_maps: bool = False
    num_masks: int = 0

    def __post_init__(self) -> None:
        if self.mask_stride not in STRIDES:
            raise UserError(f'mask_stride={self.mask_stride}: must be one of {STRIDES}')
        if not 0 <= self.num_masks <= self.num_queries:
            raise UserError(
                f'num_masks={self.num_masks}: must be from 0 to num_queries={self.num_queries}'
            )
        super().__post_init__()

    def setup(self) -> None:
        super().setup()
        dtype = jnp.dtype(self.dtype)
        self.bbox_attention = ObjectMaps(self.num_heads, dtype)
        self.mask_head = MaskHead(self.width, dtype)

    def __call__(
        self,
        images: Float[Array, 'B H W C'],
        pixel_mask: Bool[Array, 'B H W'] | None = None,
        train: bool = False,
    ) -> dict[str, Float[Array, 'B ...']]:
        """Detect objects, and predict `masks`.

        Returns:
          The outputs of the detector, and
          masks: [B Q h w] in float32, logits of the pixels of each query's object; h and w are the
            sides of the padded image divided by `mask_stride`, rounded up.
        """
        detected = self.detector_features(images, pixel_mask, train)
        outputs = self.heads(detected.hidden)
        if self.frozen_detector:
            detected, outputs = jax.lax.stop_gradient((detected, outputs))
        hidden, boxes, chosen = detected.hidden[:, -1], outputs['boxes'], None
        if self.num_masks:
            none = jax.nn.softmax(outputs['logits'])[..., -1]
            chosen = jax.lax.top_k(-none, self.num_masks)[1]
            hidden, boxes = (
                jnp.take_along_axis(x, chosen[..., None], axis=1) for x in (hidden, boxes)
            )
        maps = self.bbox_attention(hidden, detected.memory)
        batch, height, width, _ = detected.features.shape
        maps = maps.reshape(batch, -1, height, width, self.num_heads)
        if self.box_maps:
            maps += box_coverage(boxes, (height, width), pixel_mask)[..., None]
        # The finest of the maps before the last one has the size of the masks.
        finest = STRIDES.index(self.mask_stride)
        masks = self.mask_head(detected.features, maps, detected.maps[finest:-1][::-1])
        if chosen is not None:
            masks = jax.vmap(self._scatter)(masks, chosen)
        return {**outputs, 'masks': masks}

    def _scatter(
        self, masks: Float[Array, 'K h w'], chosen: Int[Array, ' K']
    ) -> Float[Array, 'Q h w']:
        """Scatter the masks of the chosen queries to all queries."""
        return jnp.full((self.num_queries, *masks.shape[1:]), NO_MASK).at[chosen].set(masks)


def box_coverage(
    boxes: Float[Array, 'B Q 4'],
    grid: tuple[int, int],
    pixel_mask: Bool[Array, 'B H W'] | None = None,
) -> Float[Array, 'B Q h w']:
    """Compute the share, 0 to 1, of each cell of a grid over padded images that a box covers.

    Args:
      boxes: Centered (x, y, w, h), shares of the sides of the real image.
      grid: Rows h and columns w.
      pixel_mask: True for real pixels, false for padding; by default all are real.
    """
    sides = jnp.ones((len(boxes), 2))
    if pixel_mask is not None:
        sides = jnp.stack([pixel_mask[:, 0].mean(-1), pixel_mask[:, :, 0].mean(-1)], axis=-1)
    corners = to_corners(boxes) * jnp.tile(sides, 2)[:, None]
    shares = []
    for axis, count in enumerate(reversed(grid)):
        low, high = (corners[..., i, None] * count for i in (axis, axis + 2))
        cells = jnp.arange(count)
        shares.append((jnp.minimum(high, cells + 1) - jnp.maximum(low, cells)).clip(0))
    x, y = shares
    return y[..., :, None] * x[..., None, :]
