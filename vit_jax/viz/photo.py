"""An image file as a model sees it, and the context shared by all examples of a call."""

from __future__ import annotations

import argparse
import colorsys
import dataclasses
import math
import pathlib
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import numpy as np
from PIL import Image

from vit_jax.array_types import Float, UInt8
from vit_jax.errors import UserError
from vit_jax.viz import figures

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Fields = Mapping[str, np.ndarray]  # the arrays of one example, or of the prediction for it


@runtime_checkable
class Vocabulary(Protocol):
    """The part of a tokenizer that pictures need."""

    def decode(self, ids: Any, /) -> str: ...

    def pieces(self, ids: Any, /) -> list[str]: ...


@dataclasses.dataclass(frozen=True)
class Photo:
    """An image file, and the model's input made from it.

    Attributes:
      path: of the file.
      original: its pixels [Y, X, C].
      fields: its arrays in a batch, such as `image` [H, W, C].
      note: a description of the transforms, for people.
      affine: A in (x', y') = A (x, y, 1), from pixels of the original to those of `image`; None
        if a transform does not track the positions of pixels.
    """

    path: pathlib.Path
    original: UInt8[np.ndarray, 'Y X C']
    fields: Fields
    note: str
    affine: Float[np.ndarray, '2 3'] | None = None

    @property
    def image(self) -> np.ndarray:
        """The model's input image [H, W, C]."""
        return self.fields['image']

    @property
    def number(self) -> int:
        """A hash of the file's pixels, the example's index from which random numbers are drawn."""
        return zlib.crc32(self.original.tobytes()) >> 1  # 31 bits, as in an index

    @property
    def seen(self) -> tuple[int, int]:
        """Height and width in pixels of `image` without its padding at the right and the bottom."""
        if 'pixel_mask' not in self.fields:
            return self.image.shape[0], self.image.shape[1]
        mask = self.fields['pixel_mask']
        return int(mask[:, 0].sum()), int(mask[0].sum())

    def view(self, side: int) -> UInt8[np.ndarray, 'Y X 3']:
        """The model's view in the detail of the file, its shorter side at least `side`.

        The height and width are a multiple of the model's. If the transforms do not track the
        positions of pixels, it is the model's image, enlarged.
        """
        height, width = self.image.shape[:2]
        factor = max(1, -(-side // min(height, width)))
        if self.affine is None:
            return figures.as_picture(self.image, side)
        inverse = np.linalg.inv(self.affine[:, :2])
        spacing = float(np.sqrt(abs(np.linalg.det(inverse)))) / factor  # pixels of the file
        reduced = max(1, int(spacing + 1e-6))  # rounding must not make 3 of 4
        file = Image.fromarray(figures.as_picture(self.original)).reduce(reduced)
        linear, start = inverse / factor / reduced, -inverse @ self.affine[:, 2] / reduced
        # Pixels enlarged beyond the file's detail stay visible as pixels.
        resample = Image.Resampling.NEAREST if spacing < 0.5 else Image.Resampling.BICUBIC
        data = np.column_stack([linear, start]).ravel().tolist()
        size = (factor * width, factor * height)
        return np.asarray(file.transform(size, Image.Transform.AFFINE, data, resample))

    def to_original(self, points: Float[np.ndarray, '*N 2']) -> Float[np.ndarray, '*N 2']:
        """Map points (x, y) of the model's image to the file, both in pixels.

        Raises:
          UserError: if a transform does not track the positions of pixels.
        """
        linear, shift = self._map()
        return (points - shift) @ np.linalg.inv(linear).T

    def from_original(self, points: Float[np.ndarray, '*N 2']) -> Float[np.ndarray, '*N 2']:
        """The inverse of `to_original`, with the same errors."""
        linear, shift = self._map()
        return points @ linear.T + shift

    def _map(self) -> tuple[Float[np.ndarray, '2 2'], Float[np.ndarray, '2']]:
        if self.affine is None:
            raise UserError(
                f'{self.path}: the transforms of this run do not record where pixels come from; '
                'let them take the record, and move its points'
            )
        return self.affine[:, :2], self.affine[:, 2]


@dataclasses.dataclass(frozen=True)
class Context:
    """Context shared by all examples of a call.

    Attributes:
      class_names: of the run's data; empty if they have none.
      class_ids: of the classes in the files of the run's data; empty where they are not known.
      flags: of the command `predict`, including those of the task's `Viz`.
      vocab: decodes token ids; None if the data have no text.
      encode: (field, text) -> ids, as the data's transforms make them; None as for `vocab`.
      model: name of the model, for titles.
    """

    class_names: tuple[str, ...] = ()
    flags: argparse.Namespace = dataclasses.field(default_factory=argparse.Namespace)
    vocab: Vocabulary | None = None
    model: str = ''
    class_ids: tuple[int, ...] = ()
    encode: Callable[[str, str], np.ndarray] | None = None

    def class_name(self, label: int) -> str:
        """The name of a class, or its number where the data has no names."""
        return self.class_names[label] if label < len(self.class_names) else f'class {label}'

    def category_id(self, label: int) -> int:
        """The id of a class in the files of the data, or its number where that is not known."""
        return self.class_ids[label] if label < len(self.class_ids) else label

    def texts(self, fields: Fields) -> dict[str, str]:
        """The arrays of token ids, decoded to texts; empty without a vocabulary."""
        if self.vocab is None:
            return {}
        rows = {k: v for k, v in fields.items() if v.ndim == 1 and v.dtype.kind == 'i'}
        return {name: self.vocab.decode(ids) for name, ids in rows.items()}


LABEL_SIZE = 8.0  # points of the labels' letters
SMALL_LABEL_SIZE = (
    5.0  # of the letters of labels of objects narrower than their labels, and in small images
)
# The most luminance behind white letters: a contrast of 4.5, as W3C requires (WCAG 2.1, 1.4.3).
MAX_LUMINANCE = 1.05 / 4.5 - 0.05
GAMMA = 2.2

Box = tuple[float, float, float, float]  # x, y, width, height
Color = tuple[float, float, float]


def label_size(text: str, inch: float, points: float = LABEL_SIZE) -> tuple[float, float]:
    """Width and height in pixels of a label in letters of this size, at `inch` pixels an inch."""
    return (0.6 * points * len(text) + 4) / 72 * inch, (1.25 * points + 3) / 72 * inch


def write_label(
    axes: Axes, place: Box, text: str, ground: Color, inch: float, points: float = LABEL_SIZE
) -> None:
    """Write white letters on the color `ground`, in a place of `find_place`."""
    axes.text(
        place[0] + 2 / 72 * inch,
        place[1] + place[3] / 2,
        text,
        va='center',
        fontsize=points,
        color='white',
        bbox={'facecolor': ground, 'edgecolor': 'none', 'pad': 1.0 if points < LABEL_SIZE else 1.5},
    )


def find_label_box(
    box: Box,
    room: tuple[float, float],
    size: tuple[float, float],
    taken: Sequence[Box],
    boxes: Sequence[Box] = (),
) -> Box:
    """The place of a label of this width and height: beside or in its box, within the image, where
    it covers least of other labels and of objects, each by the share that is covered.
    """

    def clash(place: Box) -> float:
        labels = sum(overlap(place, other) / math.prod(room) for other in taken)
        return 4 * labels + sum(overlap(place, one) / max(math.prod(one[2:]), 1) for one in boxes)

    return min(_label_boxes(box, room, size), key=clash)


def _label_boxes(box: Box, room: tuple[float, float], size: tuple[float, float]) -> Iterator[Box]:
    """Places around and in a box, moved into the image; the best ones first."""
    x, y, width, height = box
    wide, tall = room
    ends = [(left, top) for top in (y - tall, y + height) for left in (x, x + width - wide)]
    inner = [(left, top) for top in (y, y + height - tall) for left in (x, x + width - wide)]
    sides = [(left, top) for left in (x + width, x - wide) for top in (y, y + height - tall)]
    for left, top in (*ends, *inner, *sides):
        inside = max(0, min(left, size[1] - wide)), max(0, min(top, size[0] - tall))
        yield (*inside, *room)


def overlap(a: Box, b: Box) -> float:
    """The area that two boxes have in common."""
    sides = [min(a[i] + a[i + 2], b[i] + b[i + 2]) - max(a[i], b[i]) for i in (0, 1)]
    return max(0, sides[0]) * max(0, sides[1])


def class_color(label: int) -> Color:
    """The color of a class: saturated, dark enough for white letters; neighbors differ most."""
    hue = (0.6 + label * (math.sqrt(5) - 1) / 2) % 1
    rgb = colorsys.hsv_to_rgb(hue, 0.85, 0.75)
    share = min(1, MAX_LUMINANCE / luminance(rgb)) ** (1 / GAMMA)
    return rgb[0] * share, rgb[1] * share, rgb[2] * share


def luminance(rgb: Sequence[float]) -> float:
    """The luminance of a color of sRGB, 0 to 1, with its curve approximated by a power."""
    weights = (0.2126, 0.7152, 0.0722)
    return sum(w * c**GAMMA for w, c in zip(weights, rgb, strict=True))
