"""A user's image files, made into what the model of a run was trained to see."""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Mapping
from typing import Any

import numpy as np

from vit_jax.data import images
from vit_jax.data.records import BrokenRecord
from vit_jax.data.rng import example_rng
from vit_jax.data.transforms import Transforms, parse_transforms
from vit_jax.data.transforms import image as image_transforms
from vit_jax.errors import UserError
from vit_jax.inference.load import Run, eval_section
from vit_jax.viz.predictions import Photo


@dataclasses.dataclass(frozen=True)
class PhotoReader:
    """Reads image files the way a run reads its evaluation data.

    Attributes:
      transforms: of the first evaluation.
      channels: 3 for colour, 1 for grey.
      size: (height, width) that all images of the data have before the transforms;
        None where they come in any size, which the transforms then take care of.
    """

    transforms: Transforms
    channels: int
    size: tuple[int, int] | None

    def read(self, path: str | pathlib.Path, size: tuple[int, int] | None = None) -> Photo:
        """Reads one file.

        Args:
          path: a JPEG, PNG or WebP file of any size and colour mode.
          size: crop and resize to (height, width) instead of the run's transforms.

        Raises:
          UserError: if there is no such file, or it is no intact image.
        """
        path = pathlib.Path(path)
        original = read_image(path, self.channels)
        if size is not None:
            fields = {'image': fit(original, size)}
        else:
            image = original if self.size is None else fit(original, self.size)
            fields = transform(self.transforms, {'image': image})
        colour = 'grey' if self.channels == 1 else 'RGB'
        note = f'{_pixels(original)} pixels read as {_pixels(fields["image"])} {colour}'
        return Photo(path, original, fields, note)


class _OfFile(dict):
    """A record without what only data sets tell, such as a label; it is None to who asks."""

    def __missing__(self, name: str) -> None:
        return None


def transform(transforms: Transforms, record: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """The arrays that transforms make of a record which has no more than a file tells."""
    rng, made = example_rng(0, 0), dict(record)
    for step in transforms.steps:
        made = step(_OfFile(made), rng)
    return {name: np.asarray(value) for name, value in made.items() if value is not None}


def photo_reader(run: Run) -> PhotoReader:
    """The reader for a run's model; the data themselves are not needed.

    Raises:
      UserError: if the run's model does not take images.
    """
    if not run.image:
        raise UserError(f'{run.workdir}: the model of this run was not trained on images')
    spec = eval_section(run.config).get('transforms', '')
    size = run.image['size']
    return PhotoReader(parse_transforms(spec), run.image['channels'], tuple(size) if size else None)


def read_image(path: pathlib.Path, channels: int) -> np.ndarray:
    """A file as uint8 [H, W, channels]; raises UserError if it is no intact image."""
    try:
        return images.decode_image(path.read_bytes(), name=str(path), channels=channels)
    except OSError as error:
        raise UserError(f'cannot read {str(path)!r}: {error.strerror}') from error
    except BrokenRecord as error:
        raise UserError(f'no JPEG, PNG or WebP image that can be read: {error}') from error


def fit(image: np.ndarray, size: tuple[int, int]) -> np.ndarray:
    """Crops the middle to the aspect ratio of `size`, and resizes that to `size`."""
    height, width = image.shape[:2]
    scale = min(height / size[0], width / size[1])
    crop = max(1, round(size[0] * scale)), max(1, round(size[1] * scale))
    record = image_transforms.central_crop(crop)({'image': image})
    return image_transforms.resize(size, 'bicubic')(record)['image']


def _pixels(image: np.ndarray) -> str:
    return f'{image.shape[0]} x {image.shape[1]}'
