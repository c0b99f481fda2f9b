"""Base of tasks that compare views of an image, cropped by the transform `views`."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
from jax import Array

from vit_jax.array_types import Float
from vit_jax.errors import UserError
from vit_jax.ops import sequences
from vit_jax.ops.sequences import Normalization
from vit_jax.tasks import base
from vit_jax.tasks.base import Apply, Batch

GLOBAL = ('image', 'second_image')
LOCAL = 'local_image'


@dataclasses.dataclass(frozen=True)
class Views(base.Task):
    """Views and features of images.

    In training, `image` holds global crops [B G H W C] from the transform `views`, `second_image`
    optional further ones with different transforms, and `local_image` smaller local crops. In
    evaluation, `image` holds whole images.

    Attributes:
      value_range: Range to which bytes 0..255 are scaled for the model.
      mean, std: Normalization of each channel of images in [0, 1]; empty for `value_range`.
      patches: Whether `predict` also returns patch tokens, for pictures.
    """

    value_range: tuple[float, float] = (-1.0, 1.0)
    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()
    patches: bool = False

    couples_rows = True

    def __post_init__(self) -> None:
        is_whole = len(self.std) == len(self.mean) and min(self.std, default=1) > 0
        self.require('std', is_whole, 'positive, and given with mean for as many channels')

    @property
    def normalization(self) -> Normalization | None:
        """Mean and standard deviation of images, if set."""
        return (self.mean, self.std) if self.std else None

    def inputs(self, batch: Batch) -> tuple[Float[Array, 'B H W C']]:
        """Return whole images, or the first global crops."""
        return (self.global_views(batch)[:, 0],)

    def predict(self, apply: Apply, batch: Batch) -> dict[str, Array]:
        """Return `features` [B D] of whole images, and `patches` [B N D] if set."""
        return self.features(apply(*self.inputs(batch)))

    def features(self, outputs: dict[str, Array]) -> dict[str, Array]:
        """Select what `predict` returns of the model's outputs."""
        kinds = {'features': 'pre_logits'} | ({'patches': 'patches'} if self.patches else {})
        return {k: outputs[v].astype(jnp.float32) for k, v in kinds.items() if v in outputs}

    def global_views(self, batch: Batch) -> Float[Array, 'B G H W C']:
        """Scale global crops; a whole image counts as one."""
        views = [batch[name] for name in GLOBAL if name in batch]
        crops = [x if x.ndim == 5 else x[:, None] for x in views]
        return self.scale(jnp.concatenate(crops, axis=1))

    def local_views(self, batch: Batch) -> Float[Array, 'B L h w C'] | None:
        """Scale local crops; None if there are none.

        Raises:
          UserError: if they were cut from global ones.
        """
        if LOCAL not in batch:
            return None
        if batch[LOCAL].ndim != 5:
            raise UserError(
                f'config.data.transforms: put the views of {LOCAL} before the views of image, '
                'which replace the image'
            )
        return self.scale(batch[LOCAL])

    def scale(self, images: Array) -> Array:
        """Scale or normalize bytes for the model."""
        return sequences.to_range(images, self.value_range, self.normalization)

    def unscale(self, images: Array) -> Float[Array, '*B C']:
        """Convert bytes or scaled images to [0, 1]."""
        low, high = self.value_range
        mean, std = self.normalization or ((-low / (high - low),), (1 / (high - low),))
        return self.scale(images) * jnp.asarray(std) + jnp.asarray(mean)


def fold(x: Array) -> Array:
    """Merge views into rows, [B V ...] -> [B V, ...], keeping views of an example adjacent."""
    return x.reshape(-1, *x.shape[2:])


def unfold(x: Array, rows: int) -> Array:
    """Invert `fold` for `rows` examples."""
    return x.reshape(rows, -1, *x.shape[1:])
