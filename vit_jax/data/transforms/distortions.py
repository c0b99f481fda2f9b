"""Random colors and sharpness, choices, and views of an image with different draws.

Chen et al., 2020, arXiv:2002.05709, appendix A, with torchvision's ranges. Changes of color move
nothing, so boxes, masks and points stay.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from PIL import Image, ImageEnhance, ImageOps

from vit_jax.array_types import UInt8
from vit_jax.data.records import Record
from vit_jax.data.transforms.geometry import check_annotations_stay, is_image
from vit_jax.data.transforms.parse import parse_transforms
from vit_jax.data.transforms.pillow import check_positive, from_pillow, require_bytes, to_pillow
from vit_jax.data.transforms.registry import transform
from vit_jax.errors import UserError

Pixels = UInt8[np.ndarray, 'H W C']
Apply = Callable[[Pixels, np.random.Generator], Pixels]

RADIUS = 4  # radius of the kernel of `gaussian_blur`, in pixels
ENHANCERS = (ImageEnhance.Brightness, ImageEnhance.Contrast, ImageEnhance.Color)


@transform
def color_jitter(
    brightness: float = 0.4,
    contrast: float = 0.4,
    saturation: float = 0.2,
    hue: float = 0.1,
    p: float = 0.8,
) -> Apply:
    """Change brightness, contrast, saturation and hue in random order, with probability `p`.

    The factors of the first three are uniform in 1 - x to 1 + x, at least 0; the hue is shifted by
    -x to x turns. Gray images have no saturation and no hue to change.

    Raises:
      ValueError: for a negative strength, or a `hue` above 0.5.
    """
    amounts = _check_strengths(brightness, contrast, saturation, hue)
    _check_probability(p)

    def apply(image: Pixels, rng: np.random.Generator) -> Pixels:
        if rng.random() >= p:
            return image
        factors = [rng.uniform(max(0.0, 1 - x), 1 + x) for x in amounts]
        shift = rng.uniform(-hue, hue)
        jittered = to_pillow(image)
        for step in rng.permutation(len(ENHANCERS) + 1):
            if step < len(ENHANCERS):
                jittered = ENHANCERS[step](jittered).enhance(factors[step])
            else:
                jittered = _shift_hue(jittered, shift)
        return from_pillow(jittered)

    return apply


@transform
def photometric_distortion(
    brightness: float = 32 / 255,
    contrast: float = 0.5,
    saturation: float = 0.5,
    hue: float = 18 / 360,
    p: float = 0.5,
) -> Apply:
    """Change brightness, contrast, saturation and hue, each with probability `p`.

    Brightness comes first, and contrast before or after saturation and hue, equally likely; factors
    and shifts are drawn as in `color_jitter`. The order follows SSD (Liu et al., 2016,
    arXiv:1512.02325), which detection and segmentation use; the defaults are EoMT's
    (arXiv:2503.19108).

    Raises:
      ValueError: for a negative strength, or a `hue` above 0.5.
    """
    _check_strengths(brightness, contrast, saturation, hue)
    _check_probability(p)

    def apply(image: Pixels, rng: np.random.Generator) -> Pixels:
        distorted = to_pillow(image)

        def enhance(enhancer: type, strength: float) -> None:
            nonlocal distorted
            if rng.random() < p:
                distorted = enhancer(distorted).enhance(
                    rng.uniform(max(0.0, 1 - strength), 1 + strength)
                )

        enhance(ImageEnhance.Brightness, brightness)
        contrast_first = rng.random() < 0.5
        if contrast_first:
            enhance(ImageEnhance.Contrast, contrast)
        enhance(ImageEnhance.Color, saturation)
        if rng.random() < p:
            distorted = _shift_hue(distorted, rng.uniform(-hue, hue))
        if not contrast_first:
            enhance(ImageEnhance.Contrast, contrast)
        return from_pillow(distorted)

    return apply


@transform
def random_gray(p: float = 0.2) -> Apply:
    """Replace all colors by their luminance (ITU-R 601-2), with probability `p`."""
    _check_probability(p)

    def apply(image: Pixels, rng: np.random.Generator) -> Pixels:
        if rng.random() >= p or image.shape[2] == 1:
            return image
        return from_pillow(to_pillow(image).convert('L').convert('RGB'))

    return apply


@transform
def solarize(threshold: int = 128, p: float = 0.2) -> Apply:
    """Invert values from `threshold` up, with probability `p`."""
    _check_probability(p)

    def apply(image: Pixels, rng: np.random.Generator) -> Pixels:
        return (
            from_pillow(ImageOps.solarize(to_pillow(image), threshold))
            if rng.random() < p
            else image
        )

    return apply


@transform
def gaussian_blur(sigma_min: float = 0.1, sigma_max: float = 2.0, p: float = 0.5) -> Apply:
    """Blur by a Gaussian of 9 x 9 pixels, with probability `p`.

    Its standard deviation is uniform in `sigma_min` to `sigma_max` pixels; borders are mirrored.

    Raises:
      ValueError: unless 0 < `sigma_min` <= `sigma_max`.
    """
    if not 0 < sigma_min <= sigma_max:
        raise ValueError(f'{sigma_min=} must be positive and at most {sigma_max=}')
    _check_probability(p)

    def apply(image: Pixels, rng: np.random.Generator) -> Pixels:
        require_bytes(image)
        if rng.random() >= p:
            return image
        sigma = rng.uniform(sigma_min, sigma_max)
        blurred = _blur_rows(image.astype(np.float32), sigma)
        blurred = _blur_rows(blurred.swapaxes(0, 1), sigma).swapaxes(0, 1)
        return np.round(blurred).clip(0, 255).astype(np.uint8)

    return apply


@transform
def three_augment() -> Apply:
    """Make the image gray, solarize it or blur it, at random (DeiT III, arXiv:2204.07118)."""
    choices = random_gray(1.0), solarize(p=1.0), gaussian_blur(p=1.0)

    def apply(image: Pixels, rng: np.random.Generator) -> Pixels:
        return choices[rng.integers(len(choices))](image, rng)

    return apply


def _shift_hue(image: Image.Image, turns: float) -> Image.Image:
    """Shift the hue; a gray image stays."""
    if image.mode == 'L':
        return image
    hue, *saturation_value = image.convert('HSV').split()
    shifted = (np.asarray(hue).astype(int) + int(255 * turns)) % 256
    return Image.merge(
        'HSV', [Image.fromarray(shifted.astype(np.uint8)), *saturation_value]
    ).convert('RGB')


def _blur_rows(image: np.ndarray, sigma: float) -> np.ndarray:
    """Convolve along axis 0."""
    radius = min(RADIUS, len(image) - 1)
    weights = np.exp(-0.5 * (np.arange(-radius, radius + 1) / sigma) ** 2)
    padded = np.pad(image, [(radius, radius), (0, 0), (0, 0)], 'reflect')
    parts = (w * padded[i : i + len(image)] for i, w in enumerate(weights / weights.sum()))
    return sum(parts, start=np.zeros_like(image))


def _check_strengths(
    brightness: float, contrast: float, saturation: float, hue: float
) -> tuple[float, float, float]:
    """Return strengths in the order of `ENHANCERS`; ValueError if one is out of range."""
    amounts = {'brightness': brightness, 'contrast': contrast, 'saturation': saturation}
    for name, value in amounts.items():
        if value < 0:
            raise ValueError(f'{name}={value!r} must be at least 0')
    if not 0 <= hue <= 0.5:
        raise ValueError(f'{hue=} must be in [0, 0.5]')
    return brightness, contrast, saturation


def _check_probability(p: float) -> None:
    if not 0 <= p <= 1:
        raise ValueError(f'{p=} must be in [0, 1]')


@transform
def choice(
    *transforms: str, weights: Sequence[float] | None = None
) -> Callable[[Record, np.random.Generator], Record]:
    """Apply one of several transforms, drawn for each example.

    `choice('randaugment(2, 10)', 'color_jitter()|flip', '', weights=(2, 1, 1))` leaves a quarter of
    the examples unchanged.

    Args:
      transforms: Texts of transforms to choose from.
      weights: One weight per transform; equal by default.

    Raises:
      ValueError: for fewer than two transforms, wrong weights, or `drop_alpha` inside.
    """
    weights = (1,) * len(transforms) if weights is None else weights
    if len(transforms) < 2 or not all(isinstance(text, str) for text in transforms):
        raise ValueError(
            "write two or more texts, for example choice('flip', 'randaugment(2, 10)')"
        )
    numbers = np.array(weights, float) if isinstance(weights, tuple | list) else np.zeros(0)
    if (
        numbers.shape != (len(transforms),)
        or not (numbers >= 0).all()
        or not 0 < numbers.sum() < np.inf
    ):
        raise ValueError(f'{weights=}: write {len(transforms)} numbers of at least 0, one positive')
    parsed = list(map(parse_transforms, transforms))
    if any(option.drops_alpha for option in parsed):
        raise ValueError('drop_alpha affects the decoding of files; move it out of choice')
    bounds = np.cumsum(numbers)

    def apply(record: Record, rng: np.random.Generator) -> Record:
        drawn = int(np.searchsorted(bounds, rng.random() * bounds[-1], side='right'))
        return parsed[drawn](record, rng)

    return apply


@transform
def views(
    name: str, count: int, transforms: str, of: str = ''
) -> Callable[[Record, np.random.Generator], Record]:
    """Make views of the image, [count, H, W, C], each with its own draws.

    Two global and eight local crops (Caron et al. 2021, arXiv:2104.14294, section 3.1) are
    `views('local_image', 8, 'inception_crop(96, 5, 40)|flip')`, and then
    `views('image', 2, 'inception_crop(224, 40)|flip')`, which replaces the image. The same crops at
    two sizes are `views('large_image', 2, 'inception_crop(448, 40)|flip')`, and then
    `views('image', 2, 'resize(224)', of='large_image')`.

    Args:
      name: Field of the views, 'image' or 'NAME_image'.
      count: Number of views.
      transforms: Transforms of the image for each view.
      of: Field of equally many views, which are transformed instead of the image.

    Raises:
      ValueError: if `name` or `of` is not a field for images, or `transforms` is not text.
      UserError: if the field `of` is missing or has a different number of views.
    """
    for key, field in {'name': name, 'of': of or name}.items():
        if not isinstance(field, str) or not is_image(field):
            raise ValueError(
                f"{key}={field!r} must be 'image', or end in '_image', such as 'local_image'"
            )
    check_positive(count=count)
    if not isinstance(transforms, str):
        raise ValueError(f"{transforms=} must be a text, for example 'inception_crop(96)|flip'")
    make = parse_transforms(transforms)

    def apply(record: Record, rng: np.random.Generator) -> Record:
        if name == 'image':
            check_annotations_stay(record)
        images = _get_views(record, of, count) if of else [record['image']] * count
        return {**record, name: np.stack([make({'image': x}, rng)['image'] for x in images])}

    return apply


def _get_views(record: Record, field: str, count: int) -> np.ndarray:
    images: np.ndarray | None = record.get(field)
    if images is None or images.ndim != 4 or len(images) != count:
        raise UserError(f'views: of={field!r}: make {count} views with this name first')
    return images
