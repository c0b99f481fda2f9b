"""Image files as inputs of a model, read like its evaluation data."""

from __future__ import annotations

import dataclasses
import functools
import glob
import itertools
import logging
import os
import pathlib
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import PIL.Image

from vit_jax.array_types import Float
from vit_jax.data import images, listing, sources
from vit_jax.data.batches import ArraySpec, Spec
from vit_jax.data.plans.sizes import pad_image
from vit_jax.data.records import BrokenRecord, Record, example_rng
from vit_jax.data.sources.table import IMAGES, is_image
from vit_jax.data.transforms import Transforms, geometry, parse_transforms, without_annotations
from vit_jax.errors import UserError, modules
from vit_jax.interop import adapt
from vit_jax.interop.trained import Size, TrainedModel
from vit_jax.storage import paths
from vit_jax.viz import predictions
from vit_jax.viz.photo import Photo

log = logging.getLogger(__name__)

RESNET_SIZE = (224, 224)
Image = str | os.PathLike[str] | PIL.Image.Image | np.ndarray  # a file's path, or pixels


def list_images(names: Iterable[str]) -> list[str]:
    """List the image files of names and patterns.

    Args:
      names: Files, which need not exist; folders, searched recursively; and patterns such as
        'photos/**/*.jpg', where `*` matches a name and `**` any folders.

    Raises:
      UserError: for a folder or pattern without an image.
    """
    files: list[str] = []
    for word in names:
        path, count = pathlib.Path(word), len(files)
        if path.is_dir():
            named = [str(path / name) for name in listing.files_below(path)]
        elif glob.has_magic(word) and not path.exists():
            named = sorted(filter(os.path.isfile, glob.glob(word, recursive=True)))
        else:
            files.append(word)
            continue
        files += filter(is_image, named)
        if len(files) == count:
            raise UserError(f'no JPEG, PNG or WebP file in {word!r}: check the name')
        if left_out := len(named) - (len(files) - count):
            first = next(name for name in named if not is_image(name))
            log.warning(
                '%s: ignored %d files that are not %s, such as %s',
                *(word, left_out, ', '.join(IMAGES), pathlib.Path(first).name),
            )
    return files


@dataclasses.dataclass(frozen=True)
class PhotoReader:
    """Reader of image files that prepares them like a run's evaluation data.

    Attributes:
      transforms: Transforms of the first evaluation.
      channels: 3 for color, 1 for gray.
      size: (height, width) to crop and resize files to before the transforms; None if these accept
        images of any size.
      padded: (height, width) to pad images to after the transforms; None for no padding.
      squeezed: (height, width) to resize whole files to, whatever their aspect ratio, instead of
        the transforms; None for the transforms.
      ready: Whether the transforms already make images of the requested size, as those of
        `load.open_model` do for squares.
    """

    transforms: Transforms
    channels: int
    size: tuple[int, int] | None
    padded: tuple[int, int] | None = None
    squeezed: tuple[int, int] | None = None
    ready: bool = False

    def read(self, image: Image, size: tuple[int, int] | None = None, name: str = 'image') -> Photo:
        """Read one image.

        Args:
          image: A JPEG, PNG or WebP file of any size and color mode; or pixels, see
            `data.images.convert_image`.
          size: Crop and resize to (height, width) instead of the run's transforms.
          name: Name of pixels, in place of a file's.

        Raises:
          UserError: if there is no such file, or it is not an intact image.
        """
        with images.decoding(drop_alpha=self.transforms.drops_alpha):
            if isinstance(image, PIL.Image.Image | np.ndarray):
                path, pixels = pathlib.Path(name), images.convert_image(image, self.channels)
            else:
                path = pathlib.Path(image)
                pixels = read_image(path, self.channels)
        return make_photo({'image': pixels}, path, lambda record: self._transform(record, size))

    def _transform(self, record: Record, size: tuple[int, int] | None) -> Record:
        """Transform a record to the model's input."""
        if self.squeezed is not None:
            return geometry.resize(record, *(size or self.squeezed), 'bicubic')
        size = None if self.ready else size
        if size is not None and self.padded is not None:
            return geometry.shrink_and_pad(resize_within(record, size), size)
        if size is not None:
            return crop_and_resize(record, size)
        record = record if self.size is None else crop_and_resize(record, self.size)
        return pad_image(self.transforms(record, example_rng(0, 0)), self.padded)


def photo_reader(run: TrainedModel) -> PhotoReader:
    """Return the reader for a run's model; it does not need the data.

    Raises:
      UserError: if the model does not take images, or takes images that are neither gray nor RGB.
    """
    has_images = run.takes_images or 'patches' in run.spec
    if not (run.raw_images and has_images):
        hint = '; use translate for sentences' if run.model.translates else ', but on texts'
        raise UserError(f'{run.path}: the model was not trained on images{hint}')
    data, size, channels = run.data, run.raw_images['size'], run.raw_images['channels']
    if channels not in (1, 3):
        raise UserError(
            f'{run.path}: the model takes images of {channels} channels, but files are read as '
            'gray or RGB: use evaluate on its data, or vit_jax.load on arrays'
        )
    transforms = parse_transforms(without_annotations(data.transforms))
    padded = data.sizes[-1] if data.sizes else None
    # A custom plan may batch images of any size.
    mixed = not size or padded or data.plan
    any_size = mixed or takes_any_size(transforms, (*size, channels))
    return PhotoReader(
        transforms,
        channels,
        None if any_size else tuple(size),
        padded,
        run.image_size if predictions.find_viz(run.settings.task.name).whole else None,
        # For a rectangle, the transforms' center crop would see less than the largest such crop.
        ready=run.step is None and len({*(run.image_size or ())}) == 1,
    )


class Input(NamedTuple):
    """An image that can be read.

    Attributes:
      name: Name of the file or the record.
      image: Image, or a function that reads it or raises UserError.
      label: Class; None if unknown.
    """

    name: str
    image: Image | Callable[[], Image]
    label: int | None = None


class ImageInputs:
    """Images as inputs of a model, by number.

    Attributes:
      names: Names of files and records.
      labels: int64, if all have a class; else None.
      column: Word for an input in tables.
      predicted: Name of the embedding among a task's predictions.
      contents: Digests of file sizes and of the sources' listings.
    """

    column, predicted = 'image', 'features'

    def __init__(
        self,
        trained: TrainedModel,
        inputs: Sequence[Input],
        size: Size | None = None,
        contents: Sequence[str] = (),
    ):
        self._reader, self._inputs, self._size = photo_reader(trained), inputs, size
        self.contents = tuple(contents)
        self.names = [entry.name for entry in inputs]
        labels = [entry.label for entry in inputs]
        self.labels = None if None in labels else np.array(labels, np.int64)

    def __len__(self) -> int:
        return len(self._inputs)

    @classmethod
    def from_images(
        cls, trained: TrainedModel, images: Sequence[Image], size: Size | None
    ) -> ImageInputs:
        """Images of the caller, named by their files or their numbers."""
        names = (
            os.fspath(image) if isinstance(image, str | os.PathLike) else f'image {i}'
            for i, image in enumerate(images)
        )
        pairs = zip(names, images, strict=True)
        return cls(trained, list(itertools.starmap(Input, pairs)), size)

    @classmethod
    def from_words(
        cls, trained: TrainedModel, names: Iterable[str], split: str, size: Size | None
    ) -> ImageInputs:
        """Collect the images that a user names, in order.

        Args:
          trained: The model.
          names: Files, folders and patterns as for `list_images`; .tar files; and sources such as
            'folder:PATH' or 'tfds:cifar10', see `vit_jax.data.sources`.
          split: Split of the sources.
          size: Image size, the model's own by default.

        Raises:
          UserError: for a folder, pattern or source without images.
        """
        inputs: list[Input] = []
        contents: list[str] = []
        for word in names:
            if (name := source_name(word)) is not None:
                source = sources.open_source(name, split)
                inputs += _source_inputs(source)
                contents += source.listing()
            else:
                files = list_images([word])
                inputs += [Input(file, file) for file in files]
                contents.append(listing.digest_of_sizes(pathlib.Path(), files))
        return cls(trained, inputs, size, contents)

    def photo(self, number: int) -> Photo:
        """Return an image as the model sees it; raise UserError if it cannot be read."""
        entry = self._inputs[number]
        image = entry.image() if callable(entry.image) else entry.image
        return self._reader.read(image, self._size, entry.name)

    def read(self, number: int) -> tuple[int, Mapping[str, np.ndarray]]:
        """Return the number for random draws and an image's arrays; errors like `photo`."""
        photo = self.photo(number)
        return photo.number, photo.fields


def source_name(word: str) -> str | None:
    """Return the source named by an argument; None for a file, a folder or a pattern."""
    if os.path.exists(word):
        return f'tar:{word}' if word.lower().endswith('.tar') else None
    match = re.match(r'([a-z_][\w.]*)(:(?!//)|$)', word)
    if match is None:
        return None
    is_dotted = bool(match[2]) and '.' in match[1]  # a dotted module
    return word if is_dotted or match[1] in modules('vit_jax.data.sources') else None


def _source_inputs(source: sources.Subset) -> Iterator[Input]:
    labels: Sequence[int | None] = [None] * len(source)
    if source.info.num_classes and not source.info.multilabel:
        labels = source.labels().tolist()
    for i, label in enumerate(labels):
        yield Input(source.record_name(i), functools.partial(_load, source, i), label)


def _load(source: sources.Subset, index: int) -> np.ndarray:
    try:
        record = source[index]
    except BrokenRecord as error:
        raise UserError(f'cannot read {error}') from error
    if 'image' not in record:
        raise UserError(f'{source.title}: records lack an image; they have {", ".join(record)}')
    return np.asarray(record['image'])


def makes_one_shape(transforms: Transforms, channels: int) -> bool:
    """Return whether transforms make images of one shape, whatever their size and aspect ratio."""
    outputs = (
        transforms({'image': np.zeros((*size, channels), np.uint8)}, example_rng(0, 0))['image']
        for size in ((64, 64), (64, 192), (192, 64))
    )
    return len({image.shape for image in outputs}) == 1


def takes_any_size(transforms: Transforms, shape: tuple[int, int, int]) -> bool:
    """Return whether transforms scale images of any size and aspect ratio to one size.

    Args:
      transforms: Transforms of an evaluation.
      shape: [H, W, C] of all images of its data.
    """

    def see(height: int, width: int) -> Photo:
        x = {'image': np.zeros((height, width, shape[2]), np.uint8)}
        return make_photo(x, pathlib.Path(), lambda r: transforms(r, example_rng(0, 0)))

    unscaled, other = see(*shape[:2]), see(2 * shape[0], 3 * shape[1])
    if unscaled.affine is None or other.affine is None or unscaled.image.shape != other.image.shape:
        return False
    # A crop without scaling, such as 28 of 32 pixels, would show a tiny part of a photograph.
    return not np.allclose(unscaled.affine[:, :2], other.affine[:, :2])


def make_photo(
    record: Record, path: pathlib.Path, transform: Callable[[Record], Mapping[str, Any]]
) -> Photo:
    """Make a model's inputs from an image, with the map between their pixels.

    Args:
      record: Record with the image, uint8 [Y, X, C].
      path: Path of the file.
      transform: Function from the record to the arrays of a batch; may be called twice.
    """
    original = record['image']
    height, width = original.shape[:2]
    corners = np.array([[0, 0], [width, 0], [0, height]], np.float32)
    try:
        prepared = transform({**record, 'points': corners})
    except UserError:  # a transform of the user's own may not move points
        prepared = transform(record)
    fields = {name: np.asarray(value) for name, value in prepared.items()}
    moved = fields.pop('points', None)
    affine = None if moved is None else affine_between(corners, moved)
    photo = Photo(path, original, fields, '', affine)
    return dataclasses.replace(photo, note=_note(photo))


def _note(photo: Photo) -> str:
    """Describe the sizes of a file and of the model's input, and the part that the model sees."""
    height, width = photo.original.shape[:2]
    mode = 'gray' if photo.original.shape[2] == 1 else 'RGB'
    note = f'{width} x {height} pixels read as {_pixels(photo.image)} {mode}'
    if photo.affine is None:
        return note
    corners = photo.to_original(np.array([(0, 0), photo.seen[::-1]], np.float64))
    low, high = corners.min(axis=0), corners.max(axis=0)
    left, top = np.maximum(np.round(low).astype(int), 0)
    right, bottom = np.minimum(np.round(high).astype(int), (width, height))
    if (bottom - top, right - left) == (height, width):
        return note
    return f'{note}, cropped to rows {top}-{bottom}, columns {left}-{right}'


def _pixels(image: np.ndarray) -> str:
    height, width = image.shape[-3:-1]
    return f'{width} x {height}'


def affine_between(
    before: Float[np.ndarray, '3 2'], after: Float[np.ndarray, '3 2']
) -> Float[np.ndarray, '2 3']:
    """Return the affine map from three points (x, y), not on a line, to three others."""
    return np.linalg.solve(np.column_stack([before, np.ones(3)]), after).T


def read_image(path: pathlib.Path, channels: int) -> np.ndarray:
    """Read a file as uint8 [H, W, channels]; raise UserError if it is not an intact image."""
    try:
        data = paths.read_bytes(path, paths.IMAGE)
        return images.decode_image(data, name=str(path), channels=channels)
    except OSError as error:
        raise UserError(f'cannot read {str(path)!r}: {error.strerror}') from error
    except BrokenRecord as error:
        raise UserError(f'not a readable JPEG, PNG or WebP image: {error}') from error


def resize_within(record: Record, size: tuple[int, int]) -> Record:
    """Resize an image to the largest of its aspect ratio within `size`."""
    shape = record['image'].shape[:2]
    scale = min(size[0] / shape[0], size[1] / shape[1])
    height, width = (max(1, round(side * scale)) for side in shape)
    return geometry.resize(record, height, width, 'bicubic')


def crop_and_resize(record: Record, size: tuple[int, int]) -> Record:
    """Crop the middle of an image to the aspect ratio of `size`, and resize it to `size`."""
    height, width = record['image'].shape[:2]
    scale = min(height / size[0], width / size[1])
    crop = max(1, round(size[0] * scale)), max(1, round(size[1] * scale))
    y, x = (height - crop[0]) // 2, (width - crop[1]) // 2
    return geometry.resize(geometry.crop(record, y, x, *crop), *size, 'bicubic')


def input_size(trained: TrainedModel) -> Size:
    """Height and width of a checkpoint's images.

    A ResNet takes images of any size. A ViT without a position embedding does not determine the
    number of tokens, and a wrong number may exhaust the memory.

    Raises:
      UserError: if the size is unknown.
    """
    size = trained.prepared_size or trained.image_size or trained.model.own_size
    if size := size or (None if trained.model.stride else RESNET_SIZE):
        return size
    raise UserError(f'{trained.path}: its image size is unknown: give --image-size')


def arbitrary_size(trained: TrainedModel) -> Size:
    """Return a size for a model whose parameters do not depend on it.

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
            'the parameters depend on the image size, which is unknown '
            f'({changes[0]}): give the image size'
        )
    return size


def example_spec(trained: TrainedModel, size: Size) -> Spec:
    """Return the arrays of one example of the training data, images or views of this size."""
    if 'image' not in trained.spec:
        return trained.spec or {'image': ArraySpec((*size, trained.channels), np.dtype(np.uint8))}
    *views, height, width, _ = trained.spec['image'].shape
    before, after = (*views, height, width), (*views, *size)
    return {
        name: ArraySpec((*after, *s.shape[len(after) :]), s.dtype)
        if s.shape[: len(before)] == before
        else s
        for name, s in trained.spec.items()
    }


def own_normalization(trained: TrainedModel) -> str:
    """Describe the normalization of a model's images by its task."""
    mean, std = trained.task.normalization
    return (
        f'its images are in [0, 1] minus the mean {mean}, divided by the standard '
        f'deviation {std}, not in [-1, 1]'
    )
