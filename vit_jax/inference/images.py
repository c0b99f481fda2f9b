"""Reading of a user's image files as inputs of a run's model."""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from vit_jax.array_types import Float
from vit_jax.data import images
from vit_jax.data.batches import ArraySpec, Spec
from vit_jax.data.plans.sizes import pad_image
from vit_jax.data.records import BrokenRecord, Record, example_rng
from vit_jax.data.transforms import Transforms, geometry, parse_transforms, without_annotations
from vit_jax.errors import UserError
from vit_jax.interop import adapt
from vit_jax.interop.trained import Size, TrainedModel
from vit_jax.storage import paths
from vit_jax.viz import predictions
from vit_jax.viz.photo import Photo


@dataclasses.dataclass(frozen=True)
class PhotoReader:
    """Reads image files the way a run reads its evaluation data.

    Attributes:
      transforms: of the first evaluation.
      channels: 3 for color, 1 for gray.
      size: (height, width) to crop a file to before the transforms; None if these take images of
        any size.
      padded: (height, width) that images are padded to after the transforms; None for no padding.
      ready: whether the transforms make images of the size that is asked for, as `load.open_model`
        does for squares.
      squeezed: (height, width) that whole files are resized to, whatever their aspect ratio,
        instead of the transforms; None for the transforms.
    """

    transforms: Transforms
    channels: int
    size: tuple[int, int] | None
    padded: tuple[int, int] | None = None
    squeezed: tuple[int, int] | None = None
    ready: bool = False

    def read(self, path: str | pathlib.Path, size: tuple[int, int] | None = None) -> Photo:
        """Reads one file.

        Args:
          path: a JPEG, PNG or WebP file of any size and color mode.
          size: crop and resize to (height, width) instead of the run's transforms.

        Raises:
          UserError: if there is no such file, or it is no intact image.
        """
        path = pathlib.Path(path)
        with images.decoding(drop_alpha=self.transforms.drops_alpha):
            record = {'image': read_image(path, self.channels)}
        return make_photo(record, path, lambda record: self._transform(record, size))

    def _transform(self, record: Record, size: tuple[int, int] | None) -> Record:
        """A record with the model's input."""
        if self.squeezed is not None:
            return geometry.resize(record, *(size or self.squeezed), 'bicubic')
        size = None if self.ready else size
        if size is not None and self.padded is not None:
            return geometry.shrink_and_pad(resize_within(record, size), size)
        if size is not None:
            return crop_and_resize(record, size)
        record = record if self.size is None else crop_and_resize(record, self.size)
        return pad_image(self.transforms(record, example_rng(0, 0)), self.padded)


def make_photo(
    record: Record, path: pathlib.Path, transform: Callable[[Record], Mapping[str, Any]]
) -> Photo:
    """A model's inputs from an image, with the map from its pixels to those of the original.

    Args:
      record: with the image, as uint8 [Y, X, C].
      path: of the file.
      transform: from the record to the arrays of a batch; may be called twice.
    """
    original = record['image']
    height, width = original.shape[:2]
    corners = np.array([[0, 0], [width, 0], [0, height]], np.float32)
    try:
        made = transform({**record, 'points': corners})
    except UserError:  # a transform of the user's own may not move points
        made = transform(record)
    fields = {name: np.asarray(value) for name, value in made.items()}
    moved = fields.pop('points', None)
    affine = None if moved is None else affine_between(corners, moved)
    photo = Photo(path, original, fields, '', affine)
    return dataclasses.replace(photo, note=_note(photo))


def _note(photo: Photo) -> str:
    """The sizes of a file and of the model's input, and the part of the file that is seen."""
    height, width = photo.original.shape[:2]
    mode = 'gray' if photo.original.shape[2] == 1 else 'RGB'
    note = f'{height} x {width} pixels read as {_pixels(photo.image)} {mode}'
    if photo.affine is None:
        return note
    seen = photo.to_original(np.array([(0, 0), photo.seen[::-1]], np.float64))
    low, high = seen.min(axis=0), seen.max(axis=0)
    left, top = np.maximum(np.round(low).astype(int), 0)
    right, bottom = np.minimum(np.round(high).astype(int), (width, height))
    if (bottom - top, right - left) == (height, width):
        return note
    return f'{note}, cropped to rows {top}-{bottom}, columns {left}-{right}'


def affine_between(
    before: Float[np.ndarray, '3 2'], after: Float[np.ndarray, '3 2']
) -> Float[np.ndarray, '2 3']:
    """The affine map of three points (x, y), not on a line, to three others."""
    return np.linalg.solve(np.column_stack([before, np.ones(3)]), after).T


def photo_reader(run: TrainedModel) -> PhotoReader:
    """The reader for a run's model; does not need the data.

    Raises:
      UserError: if the run's model does not take images, or takes other channels than files have.
    """
    if not run.raw_images:
        raise UserError(
            f'{run.path}: the model of this run was not trained on images; '
            'for sentences, use translate'
        )
    section, size, channels = run.data_config, run.raw_images['size'], run.raw_images['channels']
    if channels not in (1, 3):
        raise UserError(
            f'{run.path}: the model takes images of {channels} channels, and files are read as '
            'gray or RGB: use evaluate on its data, or vit_jax.load on arrays'
        )
    transforms = parse_transforms(without_annotations(section.get('transforms', '')))
    padded = tuple(section.sizes[-1]) if section.get('sizes') else None
    # A plan of one's own makes batches of images of any size, if the transforms leave them so.
    mixed = not size or padded or section.get('plan')
    any_size = mixed or takes_any_size(transforms, (*size, channels))
    return PhotoReader(
        transforms,
        channels,
        None if any_size else tuple(size),
        padded,
        run.image_size if predictions.find(run.config.task.name).whole else None,
        # Of a rectangle, a crop of the middle sees less than the largest part of that shape.
        ready=run.step is None and len({*(run.image_size or ())}) == 1,
    )


def takes_any_size(transforms: Transforms, shape: tuple[int, int, int]) -> bool:
    """Whether transforms bring images of any size and aspect ratio to the same size, by scaling.

    Args:
      transforms: those of an evaluation.
      shape: [H, W, C] of all images of its data.
    """

    def see(height: int, width: int) -> Photo:
        record = {'image': np.zeros((height, width, shape[2]), np.uint8)}
        return make_photo(record, pathlib.Path(), lambda r: transforms(r, example_rng(0, 0)))

    own, other = see(*shape[:2]), see(2 * shape[0], 3 * shape[1])
    if own.affine is None or other.affine is None or own.image.shape != other.image.shape:
        return False
    # A crop without scaling, as of 28 of 32 pixels, would show few pixels of a photograph.
    return not np.allclose(own.affine[:, :2], other.affine[:, :2])


def read_image(path: pathlib.Path, channels: int) -> np.ndarray:
    """A file as uint8 [H, W, channels]; raises UserError if it is no intact image."""
    try:
        data = paths.read_bytes(path, paths.IMAGE)
        return images.decode_image(data, name=str(path), channels=channels)
    except OSError as error:
        raise UserError(f'cannot read {str(path)!r}: {error.strerror}') from error
    except BrokenRecord as error:
        raise UserError(f'no JPEG, PNG or WebP image that can be read: {error}') from error


def resize_within(record: Record, size: tuple[int, int]) -> Record:
    """Resizes an image to the largest of its aspect ratio within `size`."""
    shape = record['image'].shape[:2]
    scale = min(size[0] / shape[0], size[1] / shape[1])
    height, width = (max(1, round(side * scale)) for side in shape)
    return geometry.resize(record, height, width, 'bicubic')


def crop_and_resize(record: Record, size: tuple[int, int]) -> Record:
    """Crops the middle of an image to the aspect ratio of `size`, and resizes that to `size`."""
    height, width = record['image'].shape[:2]
    scale = min(height / size[0], width / size[1])
    crop = max(1, round(size[0] * scale)), max(1, round(size[1] * scale))
    y, x = (height - crop[0]) // 2, (width - crop[1]) // 2
    return geometry.resize(geometry.crop(record, y, x, *crop), *size, 'bicubic')


def _pixels(image: np.ndarray) -> str:
    return f'{image.shape[0]} x {image.shape[1]}'


RESNET_SIZE = (224, 224)


def input_size(trained: TrainedModel) -> Size:
    """Height and width of the images that a checkpoint gets.

    A ResNet takes images of any size. A ViT without a position embedding does not determine the
    number of its tokens, and a wrong one may exhaust the memory.

    Raises:
      UserError: if the size is unknown.
    """
    size = trained.prepared_size or trained.image_size
    if size := size or (None if trained.model.stride else RESNET_SIZE):
        return size
    raise UserError(f'{trained.path}: the size of its images is unknown: give --image-size')


def arbitrary_size(trained: TrainedModel) -> Size:
    """A size for a model whose parameters do not depend on it.

    Raises:
      UserError: if they do.
    """
    size = (trained.model.stride or 32,) * 2
    try:
        _, changes = adapt.resize(trained.params, trained.model, None, size)
    except UserError as error:
        changes = [str(error)]
    if changes:
        raise UserError(
            'the parameters are for images of one size, which is unknown '
            f'({changes[0]}): give the image size'
        )
    return size


def example_spec(trained: TrainedModel, size: Size) -> Spec:
    """The arrays of one example of the training data, with images of this size."""
    if 'image' not in trained.spec:
        return trained.spec or {'image': ArraySpec((*size, trained.channels), np.dtype(np.uint8))}
    before = trained.spec['image'].shape[:2]
    return {
        name: ArraySpec((*size, *s.shape[2:]), s.dtype) if s.shape[:2] == before else s
        for name, s in trained.spec.items()
    }


def own_normalization(trained: TrainedModel) -> str:
    """The range of a model's images, for people; empty if its task does not normalize."""
    if trained.task.normalization is None:
        return ''
    mean, std = trained.task.normalization
    return (
        f'it takes images in [0, 1] less its mean {mean}, divided by its standard '
        f'deviation {std}, not images in [-1, 1]'
    )
