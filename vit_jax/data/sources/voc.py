"""`voc:PATH`: boxes in XML files, Everingham et al., Pascal VOC, IJCV 2010.

    PATH/Annotations/a.xml, PATH/JPEGImages/a.jpg, PATH/ImageSets/Main/SPLIT.txt
    PATH/SPLIT/a.xml, PATH/SPLIT/a.jpg         as Roboflow writes it
    PATH/a.xml, PATH/a.jpg                     as LabelImg writes it

The first folders may also be called `annotations` and `images`, and have a folder for each split
instead of lists. Without lists or folders of splits, all images are of `train`. The classes are the
names of the objects of all splits, sorted. Corners are taken as written, except that the
challenge's own files count pixels from 1. Images without an XML file are left out.
"""

from __future__ import annotations

import math
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any
from xml.etree import ElementTree

from vit_jax.data import listing
from vit_jax.data.records import UnknownSplit
from vit_jax.data.sources import coco, yolo
from vit_jax.errors import UserError
from vit_jax.storage import paths

FOLDERS = (('Annotations', 'JPEGImages'), ('annotations', 'images'))
CORNERS = ('xmin', 'ymin', 'xmax', 'ymax')
CHALLENGE = 'PASCAL VOC'  # start of `source/annotation` in the challenge's files
Files = Mapping[str, str]  # {path without suffix: path}
Tree = ElementTree.Element


class Source(yolo.Source):
    """Records {image, boxes, labels, crowd, areas, ids}, sorted by file name; see `coco.Source`.

    `crowd` marks difficult objects, which the challenge does not measure.
    """

    kind = 'voc'

    def __init__(self, path: str, split: str):
        root = pathlib.Path(path).expanduser()
        self._name = f'source {self.kind}:{path}'
        if not root.is_dir():
            raise UserError(f'{self._name}: this folder does not exist')
        pairs = ((root / texts, root / pictures) for texts, pictures in FOLDERS)
        self._file, self._folder = next((pair for pair in pairs if pair[0].is_dir()), (root, root))
        files = _by_name(self._file, ('.xml',))
        if not files:
            raise UserError(f'{self._name}: no XML files in {self._file}')
        splits = _find_splits(root, files, is_flat=self._file == root)
        if split not in splits:
            raise UnknownSplit.from_splits(self._name, split, sorted(splits))
        if missing := sorted(set(splits[split]) - set(files)):
            raise UserError(f'{self._name}: {split} lists {missing[0]}, which has no XML file')
        trees = {key: self._parse(file) for key, file in files.items()}
        texts = {name for tree in trees.values() for name in map(_name, _objects(tree))}
        names = sorted(filter(None, texts))
        if not names:
            raise UserError(f'{self._name}: no named objects in the XML files of {self._file}')
        pictures = _by_name(self._folder, yolo.SUFFIXES)
        images: list[dict[str, Any]] = []
        annotations: list[dict[str, Any]] = []
        for number, key in enumerate(sorted(splits[split])):
            if key not in pictures:
                raise UserError(f'{self._name}: {files[key]} has no image in {self._folder}')
            images.append(self._sized_image(number, pictures[key], trees[key]))
            for element in _objects(trees[key]):
                row = {'id': len(annotations) + 1, 'image_id': number}
                try:
                    row |= _read_object(element, names, _first_pixel(trees[key]))
                except (ValueError, TypeError, AttributeError):
                    raise UserError(
                        f'{self._name}: {self._file / files[key]}: object {_name(element)!r} has '
                        f'no name, or no box of four numbers, {", ".join(CORNERS)}'
                    ) from None
                annotations.append(row)
        categories = [{'id': i, 'name': name} for i, name in enumerate(names)]
        self._take({'images': images, 'categories': categories, 'annotations': annotations})

    def _parse(self, file: str) -> Tree:
        try:
            return ElementTree.fromstring(paths.read_bytes(self._file / file, paths.TABLE))
        except (OSError, ElementTree.ParseError) as error:
            first = paths.first_line(error)
            raise UserError(f'{self._name}: cannot read {self._file / file}: {first}') from error

    def _sized_image(self, number: int, file: str, tree: Tree) -> dict[str, Any]:
        """Return an image with the size of its XML file, or else its own."""
        sides = {side: tree.findtext(f'size/{side}', '').strip() for side in ('width', 'height')}
        if all(text.isdecimal() and int(text) for text in sides.values()):
            return {'id': number, 'file_name': file, **sides}
        return self._image(number, file)


def _by_name(folder: pathlib.Path, suffixes: Sequence[str]) -> dict[str, str]:
    if not folder.is_dir():
        return {}
    files = [f for f in listing.files_below(folder) if f.lower().endswith(tuple(suffixes))]
    return {str(pathlib.PurePosixPath(file).with_suffix('')): file for file in files}


def _find_splits(root: pathlib.Path, files: Files, is_flat: bool) -> dict[str, list[str]]:
    """Find the images of each split, named by their paths without suffix."""
    by_folder: dict[str, list[str]] = {}
    for key in files:
        folder, separator, _ = key.partition('/')
        by_folder.setdefault(folder if separator else 'train', []).append(key)
    splits: dict[str, list[str]] = {}
    if not is_flat:
        lists = {f.stem: f for f in sorted((root / 'ImageSets' / 'Main').glob('*.txt'))}
        for name, file in lists.items():
            # The challenge also lists the images by class, such as in `cat_train.txt`.
            if name.rpartition('_')[2] not in lists or '_' not in name:
                lines = yolo.read_lines(file, 'replace')
                splits[name] = list(filter(None, map(str.strip, lines)))
    if not splits:
        has_folders = 'train' in by_folder and all('/' in key for key in files)
        splits = by_folder if is_flat or has_folders else {'train': list(files)}
    coco.add_train(splits)
    return splits


def _objects(tree: Tree) -> list[Tree]:
    return tree.findall('object')


def _name(element: Tree) -> str:
    return element.findtext('name', '').strip()


def _first_pixel(tree: Tree) -> int:
    """Return the number of the first pixel."""
    return int(tree.findtext('source/annotation', '').startswith(CHALLENGE))


def _read_object(element: Tree, names: Sequence[str], first: int) -> dict[str, Any]:
    """Read class, box and difficulty; ValueError, TypeError or AttributeError without a box."""
    box = element.find('bndbox')
    x0, y0, x1, y1 = (float(box.findtext(corner)) for corner in CORNERS)  # type: ignore
    if not all(map(math.isfinite, (x0, y0, x1, y1))):
        raise ValueError
    return {
        'category_id': names.index(_name(element)),
        'bbox': [x0 - first, y0 - first, x1 - x0 + first, y1 - y0 + first],
        'iscrowd': int(element.findtext('difficult', '0').strip() == '1'),
    }
