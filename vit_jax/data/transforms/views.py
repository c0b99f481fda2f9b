"""Several views of one image, for self-supervised methods."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from vit_jax.data.records import Record
from vit_jax.data.transforms.arguments import check_positive
from vit_jax.data.transforms.movable import check_annotations_stay, is_image
from vit_jax.data.transforms.parse import parse_transforms
from vit_jax.data.transforms.registry import transform


@transform
def views(
    name: str, count: int, transforms: str
) -> Callable[[Record, np.random.Generator], Record]:
    """Make views of the image, [count, H, W, C], each with its own draws.

    Two global and eight local crops (Caron et al. 2021, arXiv:2104.14294, section 3.1) are
    `views('local_image', 8, 'inception_crop(96, 5, 40)|flip')`, and then
    `views('image', 2, 'inception_crop(224, 40)|flip')`, which replaces the image.

    Args:
      name: of the field for the views, 'image' or 'NAME_image'.
      count: number of views.
      transforms: applied to the image for each view.
    """
    if not isinstance(name, str) or not is_image(name):
        raise ValueError(f"{name=} must be 'image', or end in '_image' as 'local_image' does")
    check_positive(count=count)
    if not isinstance(transforms, str):
        raise ValueError(f"{transforms=} must be a text, for example 'inception_crop(96)|flip'")
    make = parse_transforms(transforms)

    def apply(record: Record, rng: np.random.Generator) -> Record:
        if name == 'image':
            check_annotations_stay(record)
        image = {'image': record['image']}
        return {**record, name: np.stack([make(image, rng)['image'] for _ in range(count)])}

    return apply
