"""`masks:PATH`: images with a class for every pixel, in PNG files of class ids or colors.

    PATH/images/*.jpg, PATH/masks/*.png               same names; a single split, `train`
    PATH/images/SPLIT/*.jpg, PATH/masks/SPLIT/*.png   or PATH/SPLIT/images, PATH/SPLIT/masks
    PATH/classes.txt                                  one name per line; the first has id 0
    PATH/classes.csv                                  or columns `name` and `id`, or `color` #ff8000

The mask folder may also be called `annotations` or `labels`. In a palette PNG a pixel's index is
its id, unless classes have colors. Pixels with id 255, and with ids or colors whose name is empty,
are ignored; 255 may be listed as a class.

Two more layouts are recognized by their folders:

    PATH/images/training, PATH/annotations/training, PATH/objectInfo150.txt     ADE20K
    PATH/leftImg8bit/SPLIT/CITY/*.png, PATH/gtFine/SPLIT/CITY/*_labelIds.png    Cityscapes

ADE20K (Zhou et al., 2017, doi:10.1109/CVPR.2017.544) has 150 classes, ids 1 to 150; 0 is ignored.
Cityscapes (Cordts et al., 2016, arXiv:1604.01685) is read with the 19 classes of its benchmark.
The files of a split have a fixed shuffled order.
"""

from __future__ import annotations

import csv
import pathlib
import re
from collections.abc import Iterable, Mapping
from typing import NamedTuple

import numpy as np

from vit_jax.data import images, listing
from vit_jax.data.records import BrokenRecord, Listing, Record, SourceInfo, UnknownSplit
from vit_jax.data.sources._pairs import Truth, list_folders, pair_files, split_folders
from vit_jax.errors import UserError
from vit_jax.ops.panoptic import VOID
from vit_jax.storage import paths

MASKS = Truth('mask', ('masks', 'annotations', 'labels'), ('.png',))
IGNORED = 255
UNKNOWN = VOID - 1  # id or color without a class
ADE20K = 'objectInfo150.txt'
CITYSCAPES = ('leftImg8bit', 'gtFine')
CITYSCAPES_IDS = {
    **{7: 'road', 8: 'sidewalk', 11: 'building', 12: 'wall', 13: 'fence', 17: 'pole'},
    **{19: 'traffic light', 20: 'traffic sign', 21: 'vegetation', 22: 'terrain', 23: 'sky'},
    **{24: 'person', 25: 'rider', 26: 'car', 27: 'truck', 28: 'bus', 31: 'train'},
    **{32: 'motorcycle', 33: 'bicycle'},
}
HEADS = 3  # masks checked when a source is opened
WRITE = 'write the class names to {}, one per line, starting with id 0'


class Classes(NamedTuple):
    """Classes of pixels.

    Attributes:
      names: Class names.
      numbers: {id, or color as R 65536 + G 256 + B: class}; VOID for ignored ones.
      colored: Whether the keys of `numbers` are colors.
      strict: Whether other ids are errors; else they are ignored.
    """

    names: tuple[str, ...]
    numbers: Mapping[int, int]
    colored: bool = False
    strict: bool = True


class Layout(NamedTuple):
    """Files of a data set.

    Attributes:
      images, masks: {split: folder}.
      classes: Classes of the masks' pixels.
      suffixes: Name endings of images, and of the masks that belong to them.
    """

    images: Mapping[str, pathlib.Path]
    masks: Mapping[str, pathlib.Path]
    classes: Classes
    suffixes: tuple[str, str] = ('', '')


class Source:
    """Records {image, segments, labels}, with one segment for each present class.

    See `vit_jax.data.transforms.geometry`; ignored pixels are VOID in `segments`.
    """

    def __init__(self, path: str, split: str):
        root = pathlib.Path(path).expanduser()
        self._title = f'source masks:{path}'
        layout = _find_layout(root, self._title)
        if split not in layout.images:
            raise UnknownSplit.from_splits(self._title, split, layout.images)
        self._images, self._masks = layout.images[split], layout.masks[split]
        truth = MASKS._replace(suffixes=layout.suffixes)
        self._files = pair_files(self._images, self._masks, truth, self._title)
        self._classes = layout.classes
        classes = tuple(range(len(layout.classes.names)))
        self.info = SourceInfo(len(classes), layout.classes.names, stuff=classes)
        self._table = _class_table(layout.classes)
        self._check_binary_masks(root)

    def __len__(self) -> int:
        return len(self._files)

    def __getitem__(self, index: int, /) -> Record:
        name, mask = self._files[index]
        image = images.decode_image(
            images.read_file(self._images / name), name=self.record_name(index)
        )
        record = self.annotations(index)
        if (size := record.pop('size')) != image.shape[:2]:
            raise BrokenRecord(
                f'{self._masks / mask}: has {size[1]} x {size[0]} pixels, the image '
                f'{self._images / name} {image.shape[1]} x {image.shape[0]}'
            )
        return {'image': image, **record}

    def annotations(self, index: int) -> Record:
        """Return a mask's segments, their labels, and its `size`, height and width.

        Raises:
          BrokenRecord: if the mask cannot be read.
          UserError: if it has an id or color without a class.
        """
        classes = self._read(index)
        labels = np.flatnonzero(np.bincount(classes[classes >= 0], minlength=1))
        rows = np.full(self.info.num_classes + 1, VOID, np.int16)  # the last row is for VOID, -1
        rows[labels] = 1 + np.arange(len(labels))
        return {
            'size': classes.shape,
            'segments': rows[classes],
            'labels': labels.astype(np.int32),
        }

    def labels(self) -> np.ndarray:
        raise UserError(
            f"{self._title}: images have one class per pixel; slice the split without 'per "
            "class', such as train[:80%]"
        )

    def listing(self, indices: np.ndarray, /) -> Listing:
        """Digest names of files and classes, and sizes of images and masks."""
        files = [self._files[i] for i in indices.tolist()]
        classes = [f'{number} {label}' for number, label in self._classes.numbers.items()]
        names = ['\0'.join(pair) for pair in files]
        sizes = [
            listing.digest_of_sizes(folder, [pair[side] for pair in files])
            for side, folder in enumerate((self._images, self._masks))
        ]
        contents = listing.digest_of(sizes) if all(sizes) else ''
        return Listing(listing.digest_of(names, self._classes.names, classes), contents)

    def record_name(self, index: int, /) -> str:
        return str(self._images / self._files[index][0])

    def _read(self, index: int) -> np.ndarray:
        """Read the class of each pixel, int16 [H W], or VOID."""
        path = self._masks / self._files[index][1]
        values = _read_values(path, self._classes.colored)
        classes = self._table[values]
        if (is_unknown := classes == UNKNOWN).any():
            raise UserError(
                f'{path}: {_describe_unknown(int(values[is_unknown].min()), self._classes)}'
            )
        return classes

    def _check_binary_masks(self, root: pathlib.Path) -> None:
        """Raise UserError if the first masks have only 0 and the ignored 255."""
        classes, values = self._classes, set()
        if classes.colored or not classes.strict or classes.numbers.get(IGNORED) != VOID:
            return
        for _, mask in self._files[:HEADS]:
            try:
                values |= set(np.unique(_read_values(self._masks / mask, False)).tolist())
            except BrokenRecord:  # counted when the record is read
                return
        if values == {0, IGNORED} and len(classes.names) > 1:
            raise UserError(
                f'{self._masks}: masks have only 0 and 255, but 255 is ignored; if it is a class, '
                f"list the ids in {root / 'classes.csv'}: 'id,name', '0,background', '255,leaf'"
            )


def _find_layout(root: pathlib.Path, title: str) -> Layout:
    """Find the layout of a folder by the names of its subfolders."""
    if not root.is_dir():
        raise UserError(f'{title}: this folder does not exist')
    left, fine = (root / name for name in CITYSCAPES)
    if left.is_dir():
        splits = {name: left / name for name in list_folders(left)}
        masks = {name: fine / name for name in splits}
        numbers = {number: i for i, number in enumerate(CITYSCAPES_IDS)}
        suffixes = '_leftImg8bit', '_gtFine_labelIds'
        names = tuple(CITYSCAPES_IDS.values())
        return Layout(splits, masks, Classes(names, numbers, strict=False), suffixes)
    folders = split_folders(root, MASKS, title)
    if (root / ADE20K).is_file():
        names = _ade20k_names(root / ADE20K)
        numbers = {number: number - 1 for number in range(len(names) + 1)}  # 0 becomes VOID
        return Layout(*folders, Classes(names, numbers))
    return Layout(*folders, _read_classes(root, title))


def _read_values(path: pathlib.Path, colored: bool) -> np.ndarray:
    """Read the ids of pixels, or their colors as numbers, int [H W].

    Raises:
      BrokenRecord: if the file cannot be read.
      UserError: if it has colors instead of ids.
    """
    values = images.read_values(path, colors=colored)
    if colored:
        return values @ [65536, 256, 1]
    if values.ndim != 2:
        raise UserError(
            f'{path}: has colors instead of class ids; list the color of each class in '
            "classes.csv: 'name,color', 'leaf,#00ff00'"
        )
    return values


def _class_table(classes: Classes) -> np.ndarray:
    """Tabulate the class of every possible id or color, int16; VOID, or UNKNOWN."""
    other = UNKNOWN if classes.strict else VOID
    table = np.full(2 ** (24 if classes.colored else 16), other, np.int16)
    table[list(classes.numbers)] = list(classes.numbers.values())
    return table


def _describe_unknown(value: int, classes: Classes) -> str:
    if classes.colored:
        return (
            f'the color #{value:06x} has no class; list it, or list it without a name to ignore it'
        )
    largest = max(number for number, label in classes.numbers.items() if label != VOID)
    return (
        f'the id {value} has no class: there are {len(classes.names)}, up to id {largest}; correct '
        'the mask or the list of classes'
    )


def _read_classes(root: pathlib.Path, title: str) -> Classes:
    """Read the classes from a file in the folder; UserError if there is none."""
    text, table = root / 'classes.txt', root / 'classes.csv'
    if text.is_file() and table.is_file():
        raise UserError(f'{text} and {table.name} both exist; remove one of them')
    if table.is_file():
        return _read_table(table)
    if not text.is_file():
        raise UserError(f'{title}: {WRITE.format(text)}')
    names = [line.strip() for line in _read_lines(text)]
    while names and not names[-1]:
        names.pop()
    if not any(names):
        raise UserError(f'{text}: has no class; {WRITE.format(text)}')
    return _number_classes(text, list(enumerate(names)), False)


def _read_table(table: pathlib.Path) -> Classes:
    rows = [row for row in csv.reader(_read_lines(table), skipinitialspace=True) if any(row)]
    header = [cell.strip().lower() for cell in rows[0]] if rows else []
    key = next((column for column in ('id', 'color') if column in header), None)
    if key is None or 'name' not in header:
        raise UserError(f"{table}: its first line is 'id,name' or 'name,color'")
    class_rows = []
    for number, row in enumerate(rows[1:], 2):
        if len(row) != len(header):
            raise UserError(f'{table}: row {number}: has {len(row)} cells of {len(header)}')
        cells = {name: cell.strip() for name, cell in zip(header, row, strict=True)}
        pattern = r'\d{1,5}' if key == 'id' else r'#[0-9a-fA-F]{6}'
        if not re.fullmatch(pattern, cells[key]):
            form = 'a number' if key == 'id' else 'of the form #ff8000'
            raise UserError(f'{table}: row {number}: the {key} {cells[key]!r} is not {form}')
        value = int(cells[key]) if key == 'id' else int(cells[key][1:], 16)
        class_rows.append((value, cells['name']))
    return _number_classes(table, class_rows, key == 'color')


def _number_classes(
    file: pathlib.Path, class_rows: Iterable[tuple[int, str]], colored: bool
) -> Classes:
    """Number the classes of listed ids or colors; equal names are one class."""
    names: dict[str, int] = {}
    numbers = {} if colored else {IGNORED: VOID}
    for value, name in class_rows:
        if numbers.get(value, VOID) != VOID:
            raise UserError(f'{file}: lists {value} twice')
        numbers[value] = names.setdefault(name, len(names)) if name else VOID
    if not names:
        raise UserError(f'{file}: has no class')
    return Classes(tuple(names), numbers, colored)


def _ade20k_names(file: pathlib.Path) -> tuple[str, ...]:
    """Read the first name of each class, in order of ids, from a tab-separated file."""
    rows = [line.split('\t') for line in _read_lines(file)[1:] if line.strip()]
    names = tuple(row[-1].split(',')[0].strip() for row in rows)
    if not names or any(row[0].strip() != str(i) for i, row in enumerate(rows, 1)):
        raise UserError(f"{file}: is not ADE20K's list of classes, with ids from 1")
    return names


def _read_lines(file: pathlib.Path) -> list[str]:
    try:
        return paths.read_bytes(file, paths.TABLE).decode('utf-8-sig').splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f'{file}: cannot be read as UTF-8: {paths.first_line(error)}') from error
