"""A user's image files, made into what the model of a run was trained to see."""

from __future__ import annotations

import dataclasses
import pathlib
from typing import Any

import numpy as np
from ml_collections import ConfigDict

from vit_jax.data import images
from vit_jax.data.records import BrokenRecord
from vit_jax.data.rng import example_rng
from vit_jax.data.transforms import image as image_transforms
from vit_jax.data.transforms import parse_transforms
from vit_jax.errors import UserError
from vit_jax.inference.load import Run


@dataclasses.dataclass(frozen=True)
class Photo:
    """A file as the model gets it.

    Attributes:
      path: of the file.
      image: [H, W, C] after the transforms of the run's evaluation.
      note: what was done to it, for people.
    """

    path: pathlib.Path
    image: np.ndarray
    note: str

    @property
    def batch(self) -> dict[str, np.ndarray]:
        """The image as a batch of one."""
        return {'image': self.image[None]}


@dataclasses.dataclass(frozen=True)
class Reader:
    """Reads files the way a run reads its evaluation data.

    Attributes:
      transforms: of the first evaluation.
      channels: 3 for colour, 1 for grey.
      size: (height, width) that all images of the data have before the transforms;
        None where they come in any size, which the transforms then take care of.
    """

    transforms: Any
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
        original = decode(path, self.channels)
        if size is not None:
            image = fit(original, size)
        else:
            image = original if self.size is None else fit(original, self.size)
            record = {'image': image, 'label': 0}
            image = self.transforms(record, example_rng(0, 0))['image']
        colour = 'grey' if self.channels == 1 else 'RGB'
        return Photo(path, image, f'{_pixels(original)} pixels read as {_pixels(image)} {colour}')


def reader(run: Run) -> Reader:
    """The reader for a run's model; the data themselves are not needed.

    Raises:
      UserError: if the run's model does not take images.
    """
    if not run.image:
        instead = '; use translate' if hasattr(run.model, 'decode_step') else ''
        raise UserError(f'{run.workdir}: the model of this run was not trained on images{instead}')
    spec = eval_section(run.config).get('transforms', '')
    size = run.image['size']
    return Reader(parse_transforms(spec), run.image['channels'], tuple(size) if size else None)


def eval_section(config: ConfigDict) -> ConfigDict:
    """The data section of the first evaluation; that of training if there is none."""
    return next(iter(config.evals.values()), config.data)


def decode(path: pathlib.Path, channels: int) -> np.ndarray:
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


def as_picture(image: np.ndarray, side: int = 1) -> np.ndarray:
    """An image of any range and channels as uint8 RGB, its shorter side at least `side`."""
    if image.dtype != np.uint8:
        low, high = image.min(), image.max()
        image = np.round((image - low) / max(high - low, 1e-12) * 255).astype(np.uint8)
    factor = -(-side // min(image.shape[:2]))
    image = image.repeat(factor, axis=0).repeat(factor, axis=1)
    return np.ascontiguousarray(np.broadcast_to(image, (*image.shape[:2], 3)))


def _pixels(image: np.ndarray) -> str:
    return f'{image.shape[0]} x {image.shape[1]}'
