"""RandAugment (Cubuk et al. 2020) with the ranges of its authors' TensorFlow code.

The levels of AugReg (Steiner et al. 2022) are defined by these ranges: light1 is
`randaugment(2, 0)`, light2 (2, 10), medium (2, 15), strong (2, 20). A magnitude of 10 is
the end of each range; larger ones exceed it. Posterize gets weaker as the magnitude
grows, and does nothing at 20.

Two operations of that code are faulty, but the published models of AugReg and big_vision were
trained with them; `variant='big_vision'` reproduces them:

- solarize computes its threshold in a byte, where 256 is 0: at magnitudes of 10 and 20 it inverts
  the whole image, at 15 the upper half. By default the threshold keeps rising, and from 10 on
  nothing is inverted.
- contrast uses, instead of the image's mean, the mean count of a histogram of 256 bins, which
  depends only on the number of pixels: 196 for 224 x 224. By default it is the image's mean.

The other fourteen agree up to rounding: values within one or two, and positions in shears within a
pixel.

Boxes, masks and points follow rotations, shears and shifts, see `geometry`; an object hidden by
cutout's gray square keeps its box. Bytes are identical to Pillow's operations, see `pixels`.

`randaugment_increasing` is the variant of DeiT, Swin and MAE, in which larger magnitudes are always
stronger: fifteen of the operations, without cutout. Factors of color, contrast, brightness and
sharpness are above or below 1. As in timm, where `randaugment_increasing(2, 9)` is
'rand-m9-mstd0.5-inc1', each operation draws a magnitude, and whether it is applied at all.
Uncovered areas are gray; in timm they have the mean color of the data set.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence

import numpy as np

from vit_jax.data.records import Record
from vit_jax.data.transforms import geometry, pixels
from vit_jax.data.transforms.geometry import check_movable, check_only_image
from vit_jax.data.transforms.pillow import Matrix, require_bytes
from vit_jax.data.transforms.pixels import VALUES, Pixels, Tables, blend, look_up
from vit_jax.data.transforms.registry import in_pixels, transform

# New image, and the matrix by which its pixels moved, or None.
Moved = tuple[Pixels, Matrix | None]
# (image, level = magnitude / 10, rng)
Operation = Callable[[Pixels, float, np.random.Generator], Moved]

GRAY = 128  # fill of uncovered areas
SHIFT = 0.45  # shift at magnitude 10, as a share of the width or height


@transform
@in_pixels(translate=100 / 224, cutout=40 / 224)
def randaugment(
    num_layers: int = 2,
    magnitude: float = 10,
    translate: int = 100,
    cutout: int = 40,
    variant: str = 'paper',
) -> Callable[[Record, np.random.Generator], Record]:
    """Apply `num_layers` operations, each drawn from all sixteen.

    Args:
      num_layers: Operations per image.
      magnitude: Magnitude, 0 to 10 for the ranges of the paper's code; larger ones exceed them.
      translate: Shift in pixels at magnitude 10; 100 is meant for images of 224 pixels. Use 14 for
        32 pixels, where 100 would move everything out of the image.
      cutout: Half the side of the gray square in pixels at magnitude 10; 40 is meant for images of
        224 pixels, use 6 for 32.
      variant: `paper`, or `big_vision` with the solarize and contrast of that code.

    Raises:
      ValueError: for an unknown `variant`, or a number out of range.
    """
    if variant not in VARIANTS:
        raise ValueError(f'{variant=} must be one of {", ".join(VARIANTS)}')
    if isinstance(num_layers, bool) or not isinstance(num_layers, int) or num_layers < 1:
        raise ValueError(f'{num_layers=} must be a positive integer')
    for name, value in {'magnitude': magnitude, 'translate': translate, 'cutout': cutout}.items():
        if not isinstance(value, (int, float)) or value < 0:
            raise ValueError(f'{name}={value!r} must be a number, 0 or more')
    operations = tuple((make_operations(translate, cutout) | VARIANTS[variant]).values())

    def apply(record: Record, rng: np.random.Generator) -> Record:
        choices = rng.integers(len(operations), size=num_layers)
        return operate([operations[choice] for choice in choices], record, magnitude / 10, rng)

    return apply


def operate(
    operations: Sequence[Operation], record: Record, level: float, rng: np.random.Generator
) -> Record:
    """Apply operations to a record, one after the other."""
    check_movable(record, cut=True)  # for any draw, even if no pixels move
    check_only_image(record)
    clip = record['image']
    require_bytes(clip)
    images = list(geometry.split_frames(clip))
    for operation in operations:
        moved = _apply_alike(operation, images, level, rng)
        images, matrix = [image for image, _ in moved], moved[0][1]
        if matrix is not None:
            record = geometry.follow(record, matrix)
    frames = images[0] if len(images) == 1 else np.stack(images)
    return {**record, 'image': frames.reshape(clip.shape)}


def _apply_alike(
    operation: Operation, images: list[Pixels], level: float, rng: np.random.Generator
) -> list[Moved]:
    return geometry.with_same_draws(lambda image: operation(image, level, rng), images, rng)


def make_operations(translate: int, cutout: int) -> dict[str, Operation]:
    """Return the sixteen operations by name; those that move pixels draw their direction."""
    return {
        'autocontrast': _by_tables(lambda image, level: _stretch_tables(image)),
        'equalize': _by_tables(lambda image, level: _equalize_tables(image)),
        'invert': _by_tables(lambda image, level: VALUES[::-1]),
        'rotate': lambda image, level, rng: _rotate(image, _sign(rng) * 30 * level),
        'posterize': _by_tables(lambda image, level: _posterize_table(int(4 * level))),
        'solarize': _by_tables(lambda image, level: _solarize_table(int(256 * level))),
        'color': _enhance(pixels.gray),
        'contrast': _without_move(_contrast),
        'brightness': _by_tables(lambda image, level: _scale_table(0, _factor(level))),
        'sharpness': _enhance(pixels.smooth),
        'shear_x': lambda image, level, rng: _skew(image, x=(_sign(rng) * 0.3 * level, 0)),
        'shear_y': lambda image, level, rng: _skew(image, y=(_sign(rng) * 0.3 * level, 0)),
        'translate_x': lambda image, level, rng: _skew(
            image, x=(0, _sign(rng) * translate * level)
        ),
        'translate_y': lambda image, level, rng: _skew(
            image, y=(0, _sign(rng) * translate * level)
        ),
        'cutout': _without_move(lambda image, level, rng: _cutout(image, int(cutout * level), rng)),
        'solarize_add': _by_tables(lambda image, level: _lift_table(int(110 * level))),
    }


def _solarize_wrapped(image: Pixels, level: float, rng: np.random.Generator) -> Pixels:
    return look_up(image, _solarize_table(int(256 * level) % 256))


def _contrast(image: Pixels, level: float, rng: np.random.Generator) -> Pixels:
    """Change contrast relative to the image's mean luminance."""
    counts = pixels.counts(pixels.gray(image))[0]
    mean = int(float(counts @ np.arange(256)) / int(counts.sum()) + 0.5)
    return look_up(image, _scale_table(mean, _factor(level)))


def _contrast_by_count(image: Pixels, level: float, rng: np.random.Generator) -> Pixels:
    """Change contrast relative to a gray of 1/256 of the number of pixels, at most white."""
    gray = min(image.shape[0] * image.shape[1] // 256, 255)
    return look_up(image, _scale_table(gray, _factor(level)))


def _stretch_tables(image: Pixels) -> Tables:
    """Make tables that stretch each channel to the full range."""
    tables = np.empty((image.shape[2], 256), np.uint8)
    for table, occurs in zip(tables, pixels.counts(image) > 0, strict=True):
        low, high = int(occurs.argmax()), 255 - int(occurs[::-1].argmax())
        scale = 255.0 / max(high - low, 1)
        wide = np.arange(256) * scale + -low * scale
        table[:] = wide.clip(0, 255).astype(np.uint8) if high > low else VALUES
    return tables


def _equalize_tables(image: Pixels) -> Tables:
    """Make tables from each channel's cumulative counts."""
    tables = np.empty((image.shape[2], 256), np.uint8)
    for table, counts in zip(tables, pixels.counts(image), strict=True):
        largest = np.flatnonzero(counts)[-1]
        step = int(counts.sum() - counts[largest]) // 255
        before = np.cumsum(counts) - counts
        table[:] = np.minimum((before + step // 2) // step, 255) if step else VALUES
    return tables


@functools.cache
def _posterize_table(bits: int) -> Tables:
    return VALUES & np.uint8(256 - 2 ** (8 - min(max(bits, 1), 8)))


@functools.cache
def _solarize_table(threshold: int) -> Tables:
    return np.where(np.arange(256) < threshold, VALUES, VALUES[::-1])


@functools.cache
def _lift_table(addition: int) -> Tables:
    """Make a table that lightens the dark half by `addition`."""
    lifted = np.minimum(np.arange(256) + addition, 255).astype(np.uint8)
    return np.where(np.arange(256) < 128, lifted, VALUES)


@functools.lru_cache
def _scale_table(gray: int, factor: float) -> Tables:
    """Make a table that scales the distance of values from a gray by a factor."""
    column = VALUES[:, None, None]
    return blend(np.full_like(column, gray), column, factor)[:, 0, 0]


def _factor(level: float) -> float:
    """Return the factor of Pillow's enhancements, from 0.1 to 1.9 at a level of 1."""
    return 1.8 * level + 0.1


def _without_move(change: Callable[[Pixels, float, np.random.Generator], Pixels]) -> Operation:
    """Make an operation that moves no pixels."""
    return lambda image, level, rng: (change(image, level, rng), None)


def _by_tables(make: Callable[[Pixels, float], Tables]) -> Operation:
    """Make an operation that replaces every value by an entry of tables."""
    return _without_move(lambda image, level, rng: look_up(image, make(image, level)))


def _sign(rng: np.random.Generator) -> int:
    return 1 if rng.random() < 0.5 else -1


def _enhance(weakest: Callable[[Pixels], Pixels]) -> Operation:
    """Make an enhancement that extrapolates from the image without the property, like Pillow's."""
    return _without_move(lambda image, level, rng: blend(weakest(image), image, _factor(level)))


def _rotate(image: Pixels, degrees: float) -> Moved:
    """Rotate about the center, counterclockwise."""
    angle = -math.radians(degrees % 360)
    cos, sin = round(math.cos(angle), 15), round(math.sin(angle), 15)
    x, y = -image.shape[1] / 2, -image.shape[0] / 2
    matrix = (cos, sin, cos * x + sin * y - x, -sin, cos, -sin * x + cos * y - y)
    return pixels.move(image, matrix, GRAY), matrix


def _skew(image: Pixels, x: tuple[float, float] = (0, 0), y: tuple[float, float] = (0, 0)) -> Moved:
    """Shear and shift each axis: output pixel (i, j) shows input (i + shear j + shift, ...)."""
    matrix = (1, x[0], x[1], y[0], 1, y[1])
    return pixels.move(image, matrix, GRAY), matrix


def _cutout(image: Pixels, half: int, rng: np.random.Generator) -> Pixels:
    """Draw a gray square around a random pixel, clipped at borders (DeVries and Taylor 2017)."""
    x, y = (int(rng.integers(side)) for side in image.shape[1::-1])
    image = image.copy()
    image[max(0, y - half) : y + half, max(0, x - half) : x + half] = GRAY
    return image


# Replacements of operations by name.
VARIANTS: dict[str, dict[str, Operation]] = {
    'paper': {},
    'big_vision': {
        'solarize': _without_move(_solarize_wrapped),
        'contrast': _without_move(_contrast_by_count),
    },
}


@transform
def randaugment_increasing(
    num_layers: int = 2, magnitude: float = 9, std: float = 0.5, p: float = 0.5
) -> Callable[[Record, np.random.Generator], Record]:
    """Apply `num_layers` operations, each drawn from all fifteen, with probability `p`.

    Args:
      num_layers: Operations per image.
      magnitude: Mean of the normal distribution of magnitudes, 0 to 10; draws are clipped to the
        same range.
      std: Standard deviation of magnitudes.
      p: Probability of each operation.

    Raises:
      ValueError: for a number out of range.
    """
    if isinstance(num_layers, bool) or not isinstance(num_layers, int) or num_layers < 1:
        raise ValueError(f'{num_layers=} must be a positive integer')
    for name, value, most in (('magnitude', magnitude, 10), ('std', std, 10), ('p', p, 1)):
        if not isinstance(value, int | float) or not 0 <= value <= most:
            raise ValueError(f'{name}={value!r} must be a number from 0 to {most}')
    operations = tuple(increasing_operations().values())

    def apply(record: Record, rng: np.random.Generator) -> Record:
        check_movable(record, cut=True)  # for any draw
        for choice in rng.integers(len(operations), size=num_layers):
            if rng.random() < p:
                level = float(np.clip(rng.normal(magnitude, std), 0, 10)) / 10
                record = operate([operations[choice]], record, level, rng)
        return record

    return apply


def increasing_operations() -> dict[str, Operation]:
    """Return the fifteen operations of `randaugment` by name, some at different levels."""
    operations = make_operations(translate=0, cutout=0)
    del operations['cutout']
    # They keep 4 bits, and pixels below 256, at level 1; reversed, at level 0.
    operations['posterize'] = _reverse_levels(operations['posterize'], 4)
    operations['solarize'] = _reverse_levels(operations['solarize'], 256)
    for name in ('color', 'contrast', 'brightness', 'sharpness'):
        operations[name] = _draw_sign(operations[name])
    for name, axis in (('translate_x', 0), ('translate_y', 1)):
        operations[name] = _relative_shift(name, axis)
    return operations


def _reverse_levels(operation: Operation, steps: int) -> Operation:
    """Reverse the levels of an operation, in `steps` steps, rounded down."""
    return lambda image, level, rng: operation(image, 1 - int(steps * level) / steps, rng)


def _draw_sign(operation: Operation) -> Operation:
    """Draw 1 - 0.9 level or 1 + 0.9 level for an operation with factors from 0.1 to 1.9."""

    def apply(image: Pixels, level: float, rng: np.random.Generator) -> Moved:
        sign = 1 if rng.random() < 0.5 else -1
        return operation(image, (1 + sign * level) / 2, rng)

    return apply


def _relative_shift(name: str, axis: int) -> Operation:
    """Make a shift by a share of the image's side."""

    def apply(image: Pixels, level: float, rng: np.random.Generator) -> Moved:
        shift = make_operations(translate=round(SHIFT * image.shape[1 - axis]), cutout=0)[name]
        return shift(image, level, rng)

    return apply
