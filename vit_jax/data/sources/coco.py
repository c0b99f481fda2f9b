"""`coco:PATH`: boxes in COCO format, Lin et al., 2014, arXiv:1405.0312.

    PATH/instances_SPLIT.json, or PATH/annotations/instances_SPLIT.json
    PATH/SPLIT/*.jpg, PATH/images/SPLIT/*.jpg, PATH/images/*.jpg or PATH/*.jpg

    PATH/SPLIT/_annotations.coco.json, PATH/SPLIT/*.jpg        as Roboflow writes it

Splits are the names at SPLIT, such as COCO's `train2017` and `val2017`; if CVAT's `default` is the
only one, it is also `train`. Categories are renumbered without the gaps in their ids; images
without objects are kept. Roboflow's category 0, which only groups the others, is left out.
"""

from __future__ import annotations

import collections
import contextlib
import logging
import math
import pathlib
import re
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

from vit_jax.data import images, listing
from vit_jax.data.records import (
    BrokenRecord,
    Listing,
    Record,
    SourceInfo,
    UnknownSplit,
    count_labels,
)
from vit_jax.errors import UserError
from vit_jax.storage import paths

log = logging.getLogger(__name__)

PREFIX = 'instances_'
BESIDE_IMAGES = '_annotations.coco.json'  # Roboflow's file in the folder of a split
ONLY_SPLIT = 'default'  # CVAT's name
NO_ANNOTATIONS = 'has no annotations: its records have only images'


class Source:
    """Records {image, boxes, labels, crowd, areas, ids}, sorted by image id.

    Boxes (x0, y0, x1, y1) are in pixels and clipped to the image. `crowd` marks boxes around many
    objects, `areas` in pixels come from the file, or else from unclipped boxes, and `ids` are the
    annotations' ids. Boxes without area are dropped, and the log counts them. A file with no other
    boxes makes records {image}.

    Evaluations use `annotations`: all finite boxes unchanged from the file, in float64.
    """

    kind = 'coco'
    has_ids = True  # whether classes have ids, and are not only numbered in some order

    def __init__(self, path: str, split: str):
        root = pathlib.Path(path).expanduser()
        self._name = f'source {self.kind}:{path}'
        self._file = find_annotations(root, split, PREFIX, self._name)
        content = read_json(self._file, self._name)
        with coco_format(self._file, self._name):
            if self._file.name == BESIDE_IMAGES:
                _drop_group(content)
            self._take(content)
            self._folder = image_folder(root, split, self._images, self._name)

    def _take(self, content: dict[str, Any]) -> None:
        """Take the images, categories and annotations of a COCO file."""
        categories = list_categories(content)
        self._images = list_images(content)
        annotations = content.get('annotations') or []
        self._objects, self._is_bare = self._sort_objects(annotations, categories)
        if self._is_bare:
            log.warning('%s: %s', self._file, NO_ANNOTATIONS)
        names = tuple(str(c['name']) for c in categories)
        ids = tuple(c['id'] for c in categories) if self.has_ids else ()
        self.info = SourceInfo(len(categories), names, class_ids=ids)

    def __len__(self) -> int:
        return len(self._images)

    def __getitem__(self, index: int, /) -> Record:
        path = self._folder / self._images[index]['file_name']
        size = self._size(index)
        image = read_image(path, size)
        return {'image': image} | (
            {} if self._is_bare else _clip_objects(self._objects_of(index), size)
        )

    def annotations(self, index: int) -> Record:
        """Return the objects unchanged from the file, and the image's `size`, height and width."""
        return {'size': self._size(index), **self._objects_of(index)}

    def _size(self, index: int) -> tuple[int, int]:
        image = self._images[index]
        return image['height'], image['width']

    def _objects_of(self, index: int) -> Record:
        return self._objects.get(self._images[index]['id'], {})

    def labels(self) -> np.ndarray:
        raise UserError(f'{self._name}: an image has several objects or none, and no class itself')

    def class_counts(self, indices: np.ndarray, /) -> np.ndarray:
        arrays = [self._objects_of(i).get('labels', ()) for i in indices.tolist()]
        labels = np.concatenate([np.zeros(0, np.int64), *arrays])
        return count_labels(labels.astype(np.int64), self.info.num_classes)

    def listing(self, indices: np.ndarray, /) -> Listing:
        """Digest the whole annotation file, and the sizes of the images."""
        names = [self._images[i]['file_name'] for i in indices.tolist()]
        return Listing(
            listing.digest_of_file(self._file), listing.digest_of_sizes(self._folder, names)
        )

    def record_name(self, index: int, /) -> str:
        return str(self._folder / self._images[index]['file_name'])

    def _sort_objects(
        self, annotations: Iterable[dict[str, Any]], categories: list[dict[str, Any]]
    ) -> tuple[dict[Any, Record], bool]:
        """Return the arrays of each image's objects, empty if no image has any, and whether all
        records lack annotations; log repairs of records.
        """
        sizes = {image['id']: (image['height'], image['width']) for image in self._images}
        labels = {category['id']: i for i, category in enumerate(categories)}
        rows: dict[Any, list[tuple[Any, ...]]] = {image: [] for image in sizes}
        repairs: collections.Counter[str] = collections.Counter()
        is_bare = True
        for annotation in annotations:
            name = f'annotation {read_number(annotation, "id", "an annotation")}'
            image, category = (
                read_id(annotation, f'{key}_id', name) for key in ('image', 'category')
            )
            if image not in sizes or category not in labels:
                unknown = f'image {image}' if image not in sizes else f'category {category}'
                raise ValueError(f'{name} refers to the unknown {unknown}')
            x, y, w, h = bbox = _bbox(annotation)
            if not all(map(math.isfinite, bbox)):
                repairs['boxes dropped because they are not finite'] += 1
                continue
            box = x, y, x + w, y + h
            clipped, repair = _clip_box(box, sizes[image])
            repairs[repair] += 1
            is_bare = is_bare and clipped is None
            area, crowd = _area(annotation, w * h, name), read_flag(annotation, 'iscrowd', name)
            rows[image].append(
                (box, labels[category], crowd, area, read_number(annotation, 'id', name))
            )
        del repairs['']
        if repairs:
            repairs_text = ', '.join(f'{count} {what}' for what, count in sorted(repairs.items()))
            log.warning('%s: %s; evaluations use finite boxes unchanged', self._file, repairs_text)
        if not any(rows.values()):
            return {}, True
        return {image: _stack_objects(objects) for image, objects in rows.items()}, is_bare


def _bbox(annotation: dict[str, Any]) -> list[float]:
    """Read the box (x, y, w, h) of an annotation; ValueError without a valid box."""
    bbox = annotation.get('bbox')
    try:
        x, y, width, height = map(float, bbox or ())
    except (TypeError, ValueError) as error:
        name = f'annotation {annotation["id"]}'
        raise ValueError(f'{name}: bbox {bbox!r} is not four numbers') from error
    return [x, y, width, height]


def _area(annotation: dict[str, Any], box_area: float, name: str) -> float:
    """Read the area of an annotation, by default its box's; ValueError if it is not an area."""
    area = annotation.get('area')
    if area is None:
        return box_area
    with contextlib.suppress(TypeError, ValueError):
        if 0 <= float(area) < math.inf:
            return float(area)
    raise ValueError(f'{name}: area {area!r} is not a number of at least 0')


def _clip_box(
    box: tuple[float, ...], size: tuple[float, float]
) -> tuple[tuple[float, ...] | None, str]:
    """Clip a box (x0, y0, x1, y1) to an image (height, width); return it and its defect, or ''."""
    (x0, y0, x1, y1), (height, width) = box, size
    clipped = max(x0, 0), max(y0, 0), min(x1, width), min(y1, height)
    if x1 <= x0 or y1 <= y0:
        return None, 'boxes dropped because they have no area'
    if clipped[0] >= clipped[2] or clipped[1] >= clipped[3]:
        return None, 'boxes dropped because they are outside of their image'
    # Sums of decimal fractions may exceed the edge by a rounding error.
    beyond = max(-x0, -y0, x1 - width, y1 - height) > 0.5
    return clipped, 'boxes clipped at the edge of their image' if beyond else ''


def _clip_objects(objects: Record, size: tuple[int, int]) -> Record:
    """Clip the boxes of an image's objects, and drop objects without a box."""
    boxes = [_clip_box(box, size)[0] for box in objects['boxes'].tolist()]
    has_box = np.array([box is not None for box in boxes], bool)
    rows = {name: array[has_box] for name, array in objects.items()}
    rows['boxes'] = np.array([box for box in boxes if box is not None], np.float32).reshape(-1, 4)
    return rows | {'areas': rows['areas'].astype(np.float32)}


def _stack_objects(objects: list[tuple[Any, ...]]) -> Record:
    boxes, labels, crowd, areas, ids = zip(*objects, strict=True) if objects else [()] * 5
    return {
        'boxes': np.array(boxes, np.float64).reshape(-1, 4),
        'labels': np.array(labels, np.int32),
        'crowd': np.array(crowd, bool),
        'areas': np.array(areas, np.float64),
        'ids': np.array(ids, np.int64),
    }


def find_annotations(root: pathlib.Path, split: str, prefix: str, name: str) -> pathlib.Path:
    """Find the annotations of a split: prefixSPLIT.json in a folder or in its folder `annotations`.

    Raises:
      UserError: if it does not exist; the message names the source `name`.
    """
    if not root.is_dir():
        raise UserError(f'{name}: this folder does not exist')
    files = {
        file.stem.removeprefix(prefix): file
        for folder in (root / 'annotations', root)
        for file in sorted(folder.glob(f'{prefix}*.json'))
    }
    if prefix == PREFIX:
        files |= {file.parent.name: file for file in sorted(root.glob(f'*/{BESIDE_IMAGES}'))}
    if not files:
        other = f', and no SPLIT/{BESIDE_IMAGES}' * (prefix == PREFIX)
        raise UserError(
            f'{name}: no {prefix}SPLIT.json in this folder or its folder annotations{other}'
        )
    add_train(files)
    if split not in files:
        raise UnknownSplit.from_splits(name, split, sorted(files))
    return files[split]


def add_train(splits: dict[str, Any]) -> None:
    """Add the name `train` for CVAT's split `default` if this is the only one."""
    if set(splits) == {ONLY_SPLIT}:
        splits['train'] = splits[ONLY_SPLIT]


def _drop_group(content: dict[str, Any]) -> None:
    """Drop the category 0 that is the supercategory of all others and has no annotations."""
    categories = content['categories']
    group = {row['name'] for row in categories if row['id'] == 0}
    parents = {row.get('supercategory') for row in categories if row['id'] != 0}
    used = any(row.get('category_id') == 0 for row in content.get('annotations') or [])
    if group == parents and not used:
        content['categories'] = [row for row in categories if row['id'] != 0]


def read_json(file: pathlib.Path, name: str) -> dict[str, Any]:
    """Read a JSON object from a file; UserError if it cannot be read."""
    try:
        content = paths.parse_json(paths.read_bytes(file, paths.TABLE))
    except (OSError, ValueError) as error:
        raise UserError(f'{name}: cannot read {file}: {error}') from error
    if not isinstance(content, dict):
        raise UserError(f'{name}: {file} is not in COCO format: it is not a JSON object')
    return content


def list_images(content: dict[str, Any], *, sized: bool = True) -> list[dict[str, Any]]:
    """List the images of a file, sorted by id, numbers before texts.

    Args:
      content: Content of the file.
      sized: Whether images must have a size.

    Raises:
      ValueError: for an image without an id or a size, or two with the same id.
    """
    records = _sort_by_id(content['images'], 'images')
    for image in records if sized else ():
        name = f'image {image["id"]}'
        image |= {side: read_number(image, side, name) for side in ('height', 'width')}
        if min(image['height'], image['width']) <= 0:
            raise ValueError(f'{name}: has {image["width"]} x {image["height"]} pixels')
    return records


def list_categories(content: dict[str, Any]) -> list[dict[str, Any]]:
    """List the categories of a file, sorted by id; ValueError if an id is not a number."""
    categories = _sort_by_id(content['categories'], 'categories')
    for category in categories:
        read_number(category, 'id', f'category {category["id"]}')
    return categories


def _sort_by_id(rows: list[dict[str, Any]], kind: str) -> list[dict[str, Any]]:
    rows_by_id = [{**row, 'id': read_id(row, 'id', f'one of the {kind}')} for row in rows]
    if len({row['id'] for row in rows_by_id}) < len(rows_by_id):
        raise ValueError(f'two {kind} have the same id')
    return sorted(rows_by_id, key=lambda row: (isinstance(row['id'], str), row['id']))


def read_id(row: dict[str, Any], key: str, name: str) -> int | str:
    """Read the id of a row at `key`, digits as a number; ValueError if it is missing."""
    value = row.get(key)
    if isinstance(value, str):
        return int(value) if re.fullmatch(r'-?[0-9]+', value) else value
    return read_number(row, key, name)


def read_number(row: dict[str, Any], key: str, name: str) -> int:
    """Read an integer of a row at `key`, possibly from a text; ValueError if there is none."""
    value = row.get(key)
    if type(value) is int:
        return value
    if value is None:
        raise ValueError(f'{name}: {key!r} is missing')
    with contextlib.suppress(TypeError, ValueError, OverflowError):
        if not isinstance(value, bool) and (number := int(value)) == float(value):
            return number
    raise ValueError(f'{name}: {key} {value!r} is not an integer')


def read_flag(row: dict[str, Any], key: str, name: str) -> bool:
    """Read a 0 or 1 of a row at `key`, False if absent or null; ValueError for other values."""
    value = row.get(key)
    if value in (None, 0, 1):
        return bool(value)
    if value in ('0', '1'):
        return value == '1'
    raise ValueError(f'{name}: {key} is {value!r}, neither 0 nor 1')


@contextlib.contextmanager
def coco_format(file: pathlib.Path, name: str) -> Iterator[None]:
    """Turn errors of a malformed file into a one-line UserError."""
    try:
        yield
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
        problem = f'{error} is missing' if isinstance(error, KeyError) else str(error)
        raise UserError(f'{name}: {file} is not in COCO format: {problem}') from error


def image_folder(
    root: pathlib.Path, split: str, image_records: list[dict[str, Any]], name: str
) -> pathlib.Path:
    """Find the folder that contains the listed images.

    Raises:
      ValueError: if no image is listed, or a path leaves the folder.
      UserError: if no image exists.
    """
    if not image_records:
        raise ValueError('it lists no images')
    require_inside(image_records)
    images_folder = root / 'images'
    folders = (root / split, images_folder / split, images_folder, images_folder / ONLY_SPLIT, root)
    for image in image_records[:100]:
        for folder in folders:
            if (folder / image['file_name']).is_file():
                return folder
    searched = ', '.join(str(folder) for folder in folders)
    raise UserError(f'{name}: no image found in {searched}: {image_records[0]["file_name"]}, ...')


def require_inside(image_records: Iterable[dict[str, Any]]) -> None:
    """Raise ValueError unless every listed file is inside its folder."""
    for entry in image_records:
        if not paths.stays_inside(name := entry['file_name']):
            raise ValueError(f'file_name {name!r} is outside of its folder')


def read_image(path: pathlib.Path, size: tuple[int, int]) -> np.ndarray:
    """Read an image, uint8 [H, W, 3]; BrokenRecord if it is missing or has the wrong size."""
    image = images.decode_image(images.read_file(path), name=str(path))
    require_size(path, image, size)
    return image


def require_size(path: pathlib.Path, image: np.ndarray, size: tuple[int, int]) -> None:
    """Raise BrokenRecord unless an image [H W C] has the size of its annotations."""
    if image.shape[:2] != size:
        raise BrokenRecord(
            f'{path}: has {image.shape[1]} x {image.shape[0]} pixels, but {size[1]} x {size[0]} in '
            'its annotations'
        )
