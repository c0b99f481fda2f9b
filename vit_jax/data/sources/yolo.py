"""`yolo:PATH`: boxes in text files, as Ultralytics, Roboflow, CVAT and Label Studio write them.

    PATH/data.yaml                     names: [cat, dog], or one a line
    PATH/images/SPLIT/a.jpg, PATH/labels/SPLIT/a.txt
    PATH/SPLIT/images/a.jpg, PATH/SPLIT/labels/a.txt
    PATH/images/a.jpg, PATH/labels/a.txt
    PATH/obj_SPLIT_data/a.jpg, PATH/obj_SPLIT_data/a.txt

Instead of `data.yaml`, `classes.txt` or `obj.names` may have a name per line. Splits are the names
at SPLIT, and the keys `train`, `val` and `test` of `data.yaml`; without a split, all images are of
`train`. A line of a text file is a box: its class, and center, width and height as shares of the
image's size, and possibly a confidence, which is ignored; or its class and the corners of a polygon
in this box; or, if `data.yaml` has `kpt_shape`, a box and its keypoints, which are ignored. Images
without a file have no boxes.
"""

from __future__ import annotations

import math
import pathlib
from typing import Any

import numpy as np
import yaml
from PIL import Image, UnidentifiedImageError

from vit_jax.data import listing
from vit_jax.data.records import Listing, UnknownSplit
from vit_jax.data.sources import coco
from vit_jax.errors import UserError
from vit_jax.storage import paths

SUFFIXES = ('.jpg', '.jpeg', '.png', '.bmp', '.webp', '.tif', '.tiff')
NAMES = ('classes.txt', 'obj.names')  # files with a name per line
KEYS = ('train', 'val', 'test')  # keys of `data.yaml` for folders of images
_ROTATED = (5, 6, 7, 8)  # EXIF orientations that exchange width and height


class Source(coco.Source):
    """Records {image, boxes, labels, crowd, areas, ids}, sorted by file name; see `coco.Source`."""

    kind = 'yolo'
    has_ids = False

    def __init__(self, path: str, split: str):
        root = pathlib.Path(path).expanduser()
        self._name = f'source {self.kind}:{path}'
        self._file, content = _read_content(root, self._name)
        names = content['names']
        self._folder, labels = _find_split(root, split, content, self._name)
        files = [f for f in listing.files_below(self._folder) if f.lower().endswith(SUFFIXES)]
        images = [self._image(number, file) for number, file in enumerate(files)]
        annotations: list[dict[str, Any]] = []
        for image in images:
            file = labels / pathlib.Path(image['file_name']).with_suffix('.txt')
            annotations += _read_boxes(file, image, content, len(annotations), self._name)
        categories = [{'id': i, 'name': name} for i, name in enumerate(names)]
        if not images:
            raise UserError(f'{self._name}: no images in {self._folder}')
        self._take({'images': images, 'categories': categories, 'annotations': annotations})

    def _image(self, number: int, file: str) -> dict[str, Any]:
        try:
            with Image.open(self._folder / file) as image:
                width, height = image.size
                if image.getexif().get(0x0112) in _ROTATED:
                    width, height = height, width
        except (OSError, UnidentifiedImageError) as error:
            raise UserError(f'{self._name}: cannot read {self._folder / file}: {error}') from error
        return {'id': number, 'file_name': file, 'width': width, 'height': height}

    def listing(self, indices: np.ndarray, /) -> Listing:
        """Digest all boxes and names, and the sizes of the images."""
        names = [self._images[i]['file_name'] for i in indices.tolist()]
        arrays = (self._objects_of(i) for i in range(len(self)))
        boxes = [
            part for record in arrays if record for part in (record['boxes'], record['labels'])
        ]
        content = listing.digest_of(self.info.class_names, *boxes)
        return Listing(content, listing.digest_of_sizes(self._folder, names))


def _read_content(root: pathlib.Path, name: str) -> tuple[pathlib.Path, dict[str, Any]]:
    """Read `data.yaml`, with `names` as a list of texts; or the names of another file."""
    if not root.is_dir():
        raise UserError(f'{name}: this folder does not exist')
    files = sorted({*root.glob('*.yaml'), *root.glob('*.yml')}, key=lambda f: f.stem != 'data')
    files += [root / file for file in NAMES if (root / file).is_file()]
    if not files:
        raise UserError(
            f'{name}: no data.yaml with the names of the classes in this folder, nor '
            + ' or '.join(NAMES)
        )
    try:
        if files[0].name in NAMES:
            content = {'names': list(filter(None, map(str.strip, read_lines(files[0]))))}
        else:
            content = yaml.safe_load(paths.read_bytes(files[0], paths.TABLE))
    except (OSError, ValueError, yaml.YAMLError) as error:
        first = str(error).partition('\n')[0]
        raise UserError(f'{name}: cannot read {files[0]}: {first}') from error
    names = content.get('names') if isinstance(content, dict) else None
    if isinstance(names, dict) and sorted(names) == list(range(len(names))):
        names = [names[i] for i in range(len(names))]
    if not isinstance(names, list) or not names:
        raise UserError(
            f'{name}: {files[0]} has no list of names, such as names: [cat, dog], or names with '
            'numbers from 0'
        )
    return files[0], content | {'names': list(map(str, names))}


def _find_split(
    root: pathlib.Path, split: str, content: dict[str, Any], name: str
) -> tuple[pathlib.Path, pathlib.Path]:
    """Find the folders of images and of labels."""
    folders = {f.parent.name: f for f in sorted(root.glob('[!.]*/images')) if f.is_dir()}
    pairs = {key: (folder, folder.parent / 'labels') for key, folder in folders.items()}
    for folder in sorted((root / 'images').glob('[!.]*')):
        if folder.is_dir():
            pairs[folder.name] = folder, root / 'labels' / folder.name
    for folder in sorted(root.glob('obj_*_data')):
        pairs[folder.name[len('obj_') : -len('_data')]] = folder, folder
    if not pairs and (root / 'images').is_dir():
        pairs['train'] = root / 'images', root / 'labels'
    if not pairs:
        raise UserError(f'{name}: neither images/SPLIT nor SPLIT/images is in this folder')
    by_folder = {pair[0].resolve(): pair for pair in pairs.values()}
    for key in [key for key in KEYS if key not in pairs]:
        value = content.get(key)
        if isinstance(value, list) or str(value).endswith('.txt') or '*' in str(value):
            raise UserError(
                f'{name}: {key}: {value} of its data.yaml is not a folder: put the images into '
                f'images/{key} and their boxes into labels/{key}'
            )
        parts = pathlib.PurePosixPath(str(value)).parts
        inside = root.joinpath(*(part for part in parts if part not in ('/', '..')))
        for folder in (inside.resolve(), pathlib.Path(str(value)).resolve()):
            if folder in by_folder:
                pairs[key] = by_folder[folder]
    coco.add_train(pairs)
    if split not in pairs:
        raise UnknownSplit.from_splits(name, split, sorted(pairs))
    return pairs[split]


def read_lines(file: pathlib.Path, errors: str = 'strict') -> list[str]:
    """Read the lines of a text file, without a byte order mark."""
    return paths.read_bytes(file, paths.TABLE).decode('utf-8-sig', errors).splitlines()


def _read_boxes(
    file: pathlib.Path, image: dict[str, Any], content: dict[str, Any], first: int, name: str
) -> list[dict[str, Any]]:
    """Read the boxes of an image, numbered from `first`; `content` is that of `data.yaml`."""
    if not file.is_file():
        return []
    annotations = []
    classes, has_keypoints = len(content['names']), bool(content.get('kpt_shape'))
    for row, line in enumerate(filter(str.strip, read_lines(file, 'replace')), 1):
        try:
            label, (x, y, w, h) = _parse_line(line, classes, has_keypoints)
        except ValueError:
            raise UserError(
                f'{name}: {file}, line {row}: {line[:60]!r} is not a class below {classes}, and '
                'center, width and height'
            ) from None
        width, height = image['width'], image['height']
        box = [(x - w / 2) * width, (y - h / 2) * height, w * width, h * height]
        annotations.append(
            {'id': first + row, 'image_id': image['id'], 'category_id': label, 'bbox': box}
        )
    return annotations


def _parse_line(line: str, classes: int, has_keypoints: bool) -> tuple[int, tuple[float, ...]]:
    """Parse a class and its center, width and height; ValueError for other lines."""
    label, *values = map(float, line.split())
    if label not in range(classes) or not all(map(math.isfinite, values)):
        raise ValueError
    if has_keypoints:
        values = values[:4]
    elif len(values) >= 6 and len(values) % 2 == 0:  # a polygon
        (x0, x1), (y0, y1) = ((min(side), max(side)) for side in (values[::2], values[1::2]))
        values = [(x0 + x1) / 2, (y0 + y1) / 2, x1 - x0, y1 - y0]
    if len(values) not in (4, 5):  # the fifth is a confidence
        raise ValueError
    return int(label), tuple(values[:4])
