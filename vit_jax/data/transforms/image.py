"""Transforms of images: sizes, crops, flips, erasing.

Each function takes the arguments that stand in the text of a config, and returns what is
applied to an image, uint8 [H, W, C]. Sizes are an integer for squares, or (height, width).
Resampling is Pillow's, antialiased when it shrinks.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
from PIL import Image

from vit_jax.data.records import Record
from vit_jax.errors import UserError

Size = int | tuple[int, int]
Apply = Callable[[np.ndarray], np.ndarray]
RandomApply = Callable[[np.ndarray, np.random.Generator], np.ndarray]

METHODS = {
    'nearest': Image.Resampling.NEAREST,
    'box': Image.Resampling.BOX,
    'bilinear': Image.Resampling.BILINEAR,
    'bicubic': Image.Resampling.BICUBIC,
    'lanczos': Image.Resampling.LANCZOS,
}
ATTEMPTS = 10  # to find a random box that fits


def resize(size: Size, method: str = 'bilinear') -> Apply:
    """Resizes to `size`, whatever that does to the aspect ratio."""
    height, width = _height_width(size)
    resample = _method(method)

    def apply(image: np.ndarray) -> np.ndarray:
        return _resample(image, height, width, resample)

    return apply


def resize_small(size: int, method: str = 'bilinear') -> Apply:
    """Resizes the shorter side to `size`, keeping the aspect ratio."""
    _check_positive(size=size)
    resample = _method(method)

    def apply(image: np.ndarray) -> np.ndarray:
        height, width = image.shape[:2]
        scale = size / min(height, width)
        return _resample(image, round(height * scale), round(width * scale), resample)

    return apply


def central_crop(size: Size) -> Apply:
    """The middle of the image; UserError if the image is smaller than `size`."""
    height, width = _height_width(size)

    def apply(image: np.ndarray) -> np.ndarray:
        spare = _spare(image, height, width, f'central_crop({size})')
        y, x = (pixels // 2 for pixels in spare)
        return image[y : y + height, x : x + width]

    return apply


def random_crop(size: Size) -> RandomApply:
    """Any window of `size`, each as likely; UserError if the image is smaller."""
    height, width = _height_width(size)

    def apply(image: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        spare = _spare(image, height, width, f'random_crop({size})')
        y, x = (rng.integers(pixels + 1) for pixels in spare)
        return image[y : y + height, x : x + width]

    return apply


def inception_crop(
    size: Size, area_min: float = 5, area_max: float = 100, method: str = 'bilinear'
) -> RandomApply:
    """Resizes a random box of the image to `size` (Szegedy et al. 2015, section 6).

    The box has `area_min` to `area_max` percent of the image's area and an aspect ratio of
    3/4 to 4/3, uniform in its logarithm; after ten boxes that do not fit it is the largest
    in the middle within those ratios.
    """
    height, width = _height_width(size)
    if not 0 < area_min <= area_max <= 100:
        raise ValueError(f'{area_min=} and {area_max=} must be percentages in this order')
    resample = _method(method)

    def apply(image: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        shares, ratios = (area_min / 100, area_max / 100), (3 / 4, 4 / 3)
        box = _random_box(rng, image.shape, shares, ratios) or _central_box(image.shape, ratios)
        y, x, h, w = box
        return _resample(image[y : y + h, x : x + w], height, width, resample)

    return apply


def pad_and_crop(pad: int) -> RandomApply:
    """Pads with black by `pad` pixels and crops the original size at random.

    The augmentation of He et al. (2016), section 4.2: pad 4 for 32 x 32 images.
    """
    _check_positive(pad=pad)

    def apply(image: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        height, width, channels = image.shape
        padded = np.zeros((height + 2 * pad, width + 2 * pad, channels), image.dtype)
        padded[pad:-pad, pad:-pad] = image
        y, x = rng.integers(2 * pad + 1), rng.integers(2 * pad + 1)
        return padded[y : y + height, x : x + width]

    return apply


def flip() -> RandomApply:
    """Mirrors left and right, half of the time."""

    def apply(image: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        return image[:, ::-1] if rng.random() < 0.5 else image

    return apply


def random_erasing(p: float = 0.25, area_min: float = 2, area_max: float = 33) -> RandomApply:
    """Fills a random box with random bytes, with probability `p` (Zhong et al. 2020).

    The box has `area_min` to `area_max` percent of the area and an aspect ratio of 0.3 to
    3.3; an image in which ten boxes do not fit stays as it is.
    """
    if not 0 <= p <= 1:
        raise ValueError(f'{p=} must be in [0, 1]')
    if not 0 < area_min <= area_max <= 100:
        raise ValueError(f'{area_min=} and {area_max=} must be percentages in this order')

    def apply(image: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        if rng.random() >= p:
            return image
        box = _random_box(rng, image.shape, (area_min / 100, area_max / 100), (0.3, 3.3))
        if box is None:
            return image
        y, x, h, w = box
        image = image.copy()
        image[y : y + h, x : x + w] = rng.integers(0, 256, (h, w, image.shape[2]), np.uint8)
        return image

    return apply


def value_range(low: float, high: float) -> Apply:
    """Bytes 0..255 to float32 low..high, on the host.

    Tasks do this on the device, which moves a quarter of the bytes; this is for consumers
    other than them.
    """
    if not low < high:
        raise ValueError(f'{low=} must be less than {high=}')

    def apply(image: np.ndarray) -> np.ndarray:
        return image.astype(np.float32) * np.float32((high - low) / 255) + np.float32(low)

    return apply


def keep(*names: str) -> Callable[[Record], Record]:
    """Keeps only the named entries of the record."""
    if not names or not all(isinstance(name, str) for name in names):
        raise ValueError("needs the entries' names, for example keep('image', 'label')")

    def apply(record: Record) -> Record:
        return {name: record[name] for name in names}

    return apply


def to_pil(image: np.ndarray) -> Image.Image:
    """uint8 [H, W, 3] or [H, W, 1] as a Pillow image, RGB or grey."""
    if image.dtype != np.uint8:
        raise UserError(f'a transform of bytes got {image.dtype}: put value_range last')
    return Image.fromarray(image[..., 0] if image.shape[2] == 1 else image)


def from_pil(image: Image.Image) -> np.ndarray:
    """A Pillow image as uint8 [H, W, 3], or [H, W, 1] if it is grey."""
    array = np.asarray(image)
    return array if array.ndim == 3 else array[..., None]


def _resample(image: np.ndarray, height: int, width: int, resample: Image.Resampling) -> np.ndarray:
    if image.shape[:2] == (height, width):
        return image
    return from_pil(to_pil(image).resize((width, height), resample))


def _spare(image: np.ndarray, height: int, width: int, what: str) -> tuple[int, int]:
    """How many rows and columns a window leaves over."""
    spare = image.shape[0] - height, image.shape[1] - width
    if min(spare) < 0:
        raise UserError(
            f'{what}: the image has {image.shape[0]} x {image.shape[1]} pixels; enlarge it '
            f"before, for example with 'resize_small({max(height, width)})'"
        )
    return spare


def _random_box(
    rng: np.random.Generator,
    shape: tuple[int, ...],
    shares: tuple[float, float],
    ratios: tuple[float, float],
) -> tuple[int, int, int, int] | None:
    """(y, x, height, width) of a box of a random share of the area, or None if none fits."""
    for _ in range(ATTEMPTS):
        area = shape[0] * shape[1] * rng.uniform(*shares)
        ratio = math.exp(rng.uniform(math.log(ratios[0]), math.log(ratios[1])))
        height, width = round(math.sqrt(area / ratio)), round(math.sqrt(area * ratio))
        if 0 < height <= shape[0] and 0 < width <= shape[1]:
            y, x = rng.integers(shape[0] - height + 1), rng.integers(shape[1] - width + 1)
            return int(y), int(x), height, width
    return None


def _central_box(shape: tuple[int, ...], ratios: tuple[float, float]) -> tuple[int, int, int, int]:
    height = min(shape[0], max(1, round(shape[1] / ratios[0])))
    width = min(shape[1], max(1, round(shape[0] * ratios[1])))
    return (shape[0] - height) // 2, (shape[1] - width) // 2, height, width


def _height_width(size: Any) -> tuple[int, int]:
    pair = size if isinstance(size, tuple) else (size, size)
    if len(pair) != 2:
        raise ValueError(f'{size=} must be an integer or (height, width)')
    _check_positive(height=pair[0], width=pair[1])
    return pair


def _method(name: str) -> Image.Resampling:
    if name not in METHODS:
        raise ValueError(f'method={name!r} must be one of {", ".join(METHODS)}')
    return METHODS[name]


def _check_positive(**values: Any) -> None:
    for name, value in values.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(f'{name}={value!r} must be a positive integer')
