"""Transforms of pixel values that move nothing, and how files become pixels."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from vit_jax.array_types import Float, UInt8
from vit_jax.data.records import Record
from vit_jax.data.transforms.arguments import shares
from vit_jax.data.transforms.pillow import require_bytes
from vit_jax.data.transforms.registry import transform
from vit_jax.data.transforms.windows import random_window

Pixels = UInt8[np.ndarray, 'H W C']


@transform
def drop_alpha() -> Callable[[Record], Record]:
    """Decode files without their transparency, instead of laying it over white.

    This is how timm and transformers read files. It takes effect wherever it stands.
    """
    return lambda record: record


@transform
def random_erasing(
    p: float = 0.25, area_min: float = 2, area_max: float = 33
) -> Callable[[Pixels, np.random.Generator], Pixels]:
    """Fill a random window with random bytes, with probability `p` (Zhong et al. 2020).

    The window has `area_min` to `area_max` percent of the area and an aspect ratio of 0.3 to
    3.3; if ten draws do not fit, the image is unchanged. Boxes and masks of hidden objects stay.
    """
    if not 0 <= p <= 1:
        raise ValueError(f'{p=} must be in [0, 1]')
    area = shares(area_min, area_max)

    def apply(image: Pixels, rng: np.random.Generator) -> Pixels:
        require_bytes(image)
        if rng.random() >= p:
            return image
        window = random_window(rng, image.shape[:2], area, (0.3, 3.3))
        if window is None:
            return image
        y, x, h, w = window
        image = image.copy()
        image[y : y + h, x : x + w] = rng.integers(0, 256, (h, w, image.shape[2]), np.uint8)
        return image

    return apply


@transform
def value_range(low: float, high: float) -> Callable[[Pixels], Float[np.ndarray, 'H W C']]:
    """Map bytes 0..255 to float32 low..high, on the host.

    Tasks do this on the device, which needs a quarter of the transfer; this is for other users of
    the data.
    """
    if not low < high:
        raise ValueError(f'{low=} must be less than {high=}')

    def apply(image: Pixels) -> Float[np.ndarray, 'H W C']:
        require_bytes(image)
        return image.astype(np.float32) * np.float32((high - low) / 255) + np.float32(low)

    return apply
