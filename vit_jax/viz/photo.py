"""An image file as a model sees it, and the context shared by all examples of a call."""

from __future__ import annotations

import argparse
import dataclasses
import pathlib
import zlib
from collections.abc import Callable, Mapping
from typing import Any, Protocol, runtime_checkable

import numpy as np
from PIL import Image

from vit_jax.array_types import Float, UInt8
from vit_jax.errors import UserError
from vit_jax.viz import figures

SAMPLING = ('guidance', 'steps', 'sampler')  # options of a generating task that have flags

Fields = Mapping[str, np.ndarray]  # arrays of one example, or of its prediction


@runtime_checkable
class Vocabulary(Protocol):
    """Part of a tokenizer that pictures need."""

    def decode(self, ids: Any, /) -> str: ...

    def pieces(self, ids: Any, /) -> list[str]: ...


@dataclasses.dataclass(frozen=True)
class Photo:
    """An image file, and the model's input made from it.

    Attributes:
      path: Path of the file.
      original: Pixels [Y, X, C] of the file.
      fields: Its arrays in a batch, such as `image` [H, W, C].
      note: Description of the transforms.
      affine: A in (x', y') = A (x, y, 1), from pixels of the original to pixels of `image`; None if
        a transform does not track the positions of pixels.
    """

    path: pathlib.Path
    original: UInt8[np.ndarray, 'Y X C']
    fields: Fields
    note: str
    affine: Float[np.ndarray, '2 3'] | None = None

    @property
    def image(self) -> np.ndarray:
        """Model's input image [H, W, C], or its windows [n, S, S, C]."""
        return self.fields['image']

    @property
    def number(self) -> int:
        """A hash of the file's pixels, used as the example's index for random draws."""
        return zlib.crc32(self.original.tobytes()) >> 1  # 31 bits, like an index

    @property
    def seen(self) -> tuple[int, int]:
        """Height and width of `image` in pixels, without padding at the right and the bottom; for
        an image cut into windows, before the cut.
        """
        if 'scaled_size' in self.fields:
            height, width = self.fields['scaled_size'].tolist()
            return height, width
        if 'pixel_mask' not in self.fields:
            return self.image.shape[0], self.image.shape[1]
        mask = self.fields['pixel_mask']
        return int(mask[:, 0].sum()), int(mask[0].sum())

    def view(self, side: int) -> UInt8[np.ndarray, 'Y X 3']:
        """Render the model's view at the file's resolution, with a shorter side of at least `side`.

        Height and width are a multiple of the model's. If the transforms do not track the positions
        of pixels, it is the enlarged model's image. For windows it is the first one.
        """
        image = self.image[0] if self.image.ndim > 3 else self.image
        height, width = image.shape[:2]
        factor = max(1, -(-side // min(height, width)))
        if self.affine is None:
            return figures.as_picture(image, side)
        inverse = np.linalg.inv(self.affine[:, :2])
        spacing = float(np.sqrt(abs(np.linalg.det(inverse)))) / factor  # pixels of the file
        reduction = max(1, int(spacing + 1e-6))  # rounding must not make 3 of 4
        file = Image.fromarray(figures.as_picture(self.original)).reduce(reduction)
        linear, start = inverse / factor / reduction, -inverse @ self.affine[:, 2] / reduction
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
        """Invert `to_original`, with the same errors."""
        linear, shift = self._map()
        return points @ linear.T + shift

    def _map(self) -> tuple[Float[np.ndarray, '2 2'], Float[np.ndarray, '2']]:
        if self.affine is None:
            raise UserError(
                f'{self.path}: the transforms of this run do not track the positions of pixels: '
                'let them take the record and move its points'
            )
        return self.affine[:, :2], self.affine[:, 2]


@dataclasses.dataclass(frozen=True)
class Context:
    """Context shared by all examples of a call.

    Attributes:
      class_names: Class names of the run's data; empty if there are none.
      flags: Flags of the command `predict`, including flags of the task's `Viz`.
      vocab: Decoder of token ids; None if the data have no text.
      model: Name of the model, for titles.
      class_ids: Class ids in the data's files; empty if unknown.
      encode: Function (field, text) -> ids that applies the data's transforms; None without
        `vocab`.
    """

    class_names: tuple[str, ...] = ()
    flags: argparse.Namespace = dataclasses.field(default_factory=argparse.Namespace)
    vocab: Vocabulary | None = None
    model: str = ''
    class_ids: tuple[int, ...] = ()
    encode: Callable[[str, str], np.ndarray] | None = None

    def class_name(self, label: int) -> str:
        """Return the name of a class, or its number if the data have no names."""
        return self.class_names[label] if label < len(self.class_names) else f'class {label}'

    def category_id(self, label: int) -> int:
        """Return the id of a class in the data's files, or its number if the id is unknown."""
        return self.class_ids[label] if label < len(self.class_ids) else label

    def texts(self, fields: Fields) -> dict[str, str]:
        """Decode the arrays of token ids to texts; empty without a vocabulary."""
        if self.vocab is None:
            return {}
        rows = {k: v for k, v in fields.items() if v.ndim == 1 and v.dtype.kind == 'i'}
        return {name: self.vocab.decode(ids) for name, ids in rows.items()}


def add_sampling_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags that `with_sampling_flags` reads."""
    add = parser.add_argument
    add(
        '--guidance',
        type=float,
        metavar='W',
        help="guidance scale of generated images, 1 for none (default: the task's)",
    )
    add(
        '--steps',
        type=int,
        metavar='N',
        help="number of steps from noise to images (default: the task's)",
    )
    add('--sampler', choices=('heun', 'euler'), help="solver (default: the task's)")


def with_sampling_flags(task: Any, flags: argparse.Namespace, *names: str) -> Any:
    """Apply the flags that are set to the task; `names` are further flags."""
    options = {name: getattr(flags, name) for name in (*SAMPLING, *names)}
    return dataclasses.replace(task, **{k: v for k, v in options.items() if v is not None})
