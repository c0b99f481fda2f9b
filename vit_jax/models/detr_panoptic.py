"""DETR for panoptic segmentation: a detector, and a mask for each of its queries.

Carion et al., 2020, arXiv:2005.12872, section 4.4. Things and stuff alike are found as boxes first.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from vit_jax.models import detr
from vit_jax.nn.mask_head import MaskHead, ObjectMaps

# Of the parameters, those that a detector has too.
DETECTOR = (
    *('backbone', 'input_proj', 'encoder', 'decoder'),
    *('query_embed', 'class_embed', 'bbox_embed'),
)


class Model(detr.Model):
    """A detector with a mask head.

    Attributes:
      frozen_detector: nothing but the mask head gets a gradient, which saves the way back through
        the detector. Give its parameters to `config.optim.freeze` too, or weight decay will shrink
        them.

    The other attributes, and what is raised, are those of the detector.
    """

    frozen_detector: bool = False

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
        """What the detector gives, see there, and `masks`.

        Returns:
          masks: [B Q h w] in float32, logits of the pixels of each query's object, at a quarter of
            the sides of the padded image, rounded up.
        """
        seen = self.see(images, pixel_mask, train)
        outputs = self.heads(seen.hidden)
        if self.frozen_detector:
            seen, outputs = jax.lax.stop_gradient((seen, outputs))
        maps = self.bbox_attention(seen.hidden[:, -1], seen.memory)
        batch, height, width, _ = seen.features.shape
        maps = maps.reshape(batch, -1, height, width, self.num_heads)
        # Of the stages before the last one, the finest is the mask's.
        masks = self.mask_head(seen.features, maps, seen.stages[-2::-1])
        return {**outputs, 'masks': masks}
