"""`masks:PATH`: images whose pixels have classes, as PNG files of class ids or colors.

    PATH/images/*.jpg, PATH/masks/*.png               of the same names; a single split, `train`
    PATH/images/SPLIT/*.jpg, PATH/masks/SPLIT/*.png   or PATH/SPLIT/images, PATH/SPLIT/masks
    PATH/classes.txt                                  a name a line; the first is of id 0
    PATH/classes.csv                                  or columns `name` and `id`, or `color` #ff8000

The masks' folder may also be called `annotations` or `labels`. In a palette PNG the number of a
pixel is its id, unless classes have colors. Pixels of id 255, and of ids or colors whose name is
empty, are ignored; 255 may be listed as a class.

Two more layouts are recognized by their folders:

    PATH/images/training, PATH/annotations/training, PATH/objectInfo150.txt     of ADE20K
    PATH/leftImg8bit/SPLIT/CITY/*.png, PATH/gtFine/SPLIT/CITY/*_labelIds.png    of Cityscapes

ADE20K (Zhou et al., 2017, doi:10.1109/CVPR.2017.544) has 150 classes, ids 1 to 150; 0 is ignored.
Of Cityscapes (Cordts et al., 2016, arXiv:1604.01685) the 19 classes of its benchmark are taken.
The files of a split have a fixed shuffled order.
"""

from __future__ import annotations

import csv
import pathlib
import re
from collections.abc import Iterable, Mapping
from typing import NamedTuple

import numpy as np

from vit_jax.data import batches, images, listing
from vit_jax.data.records import BrokenRecord, Listing, Record, SourceInfo, UnknownSplit
from vit_jax.data.sources.table import is_image
from vit_jax.errors import UserError
from vit_jax.ops.panoptic import VOID
from vit_jax.storage import paths

IMAGES, MASKS = 'images', ('masks', 'annotations', 'labels')  # folders
IGNORED = 255
UNKNOWN = VOID - 1  # an id or a color of no class
ADE20K = 'objectInfo150.txt'
CITYSCAPES = ('leftImg8bit', 'gtFine')
CITYSCAPES_IDS = {
    **{7: 'road', 8: 'sidewalk', 11: 'building', 12: 'wall', 13: 'fence', 17: 'pole'},
    **{19: 'traffic light', 20: 'traffic sign', 21: 'vegetation', 22: 'terrain', 23: 'sky'},
    **{24: 'person', 25: 'rider', 26: 'car', 27: 'truck', 28: 'bus', 31: 'train'},
    **{32: 'motorcycle', 33: 'bicycle'},
}
HEADS = 3  # masks that are looked at when a source is opened
WRITE = "write the classes' names to {}, one a line, the first of id 0"


class Classes(NamedTuple):
    """The classes of pixels.

    Attributes:
      names: names of the classes.
      numbers: the class of each id, or of each color as R 65536 + G 256 + B; VOID for ignored ones.
      colored: whether `numbers` are of colors.
      strict: whether other ids are errors; else they are ignored.
    """

    names: tuple[str, ...]
    numbers: Mapping[int, int]
    colored: bool = False
    strict: bool = True


class Layout(NamedTuple):
    """The files of a data set.

    Attributes:
      images, masks: the folder of each split.
      classes: classes of the pixels of masks.
      suffixes: endings of the names of images and masks that replace each other.
    """

    images: Mapping[str, pathlib.Path]
    masks: Mapping[str, pathlib.Path]
    classes: Classes
    suffixes: tuple[str, str] = ('', '')


class Source:
    """Records {image, segments, labels}: a segment for each class that is present, by class.

    See `vit_jax.data.transforms.geometry`; ignored pixels are VOID in `segments`.
    """

    def __init__(self, path: str, split: str):
        root = pathlib.Path(path).expanduser()
        self._title = f'source masks:{path}'
        layout = _find_layout(root, self._title)
        if split not in layout.images:
            raise UnknownSplit.from_splits(self._title, split, layout.images)
        self._images, self._masks = layout.images[split], layout.masks[split]
        names = _pairs(self._images, self._masks, layout.suffixes, self._title)
        count = len(names)
        order = batches.shuffled(np.arange(count), size=count, seed=0, epoch=0)
        self._files = [names[i] for i in order.tolist()]
        self._classes = layout.classes
        classes = tuple(range(len(layout.classes.names)))
        self.info = SourceInfo(len(classes), layout.classes.names, stuff=classes)
        self._table = _class_table(layout.classes)
        self._look(root)

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
        """The segments of a mask, their labels, and the mask's `size`, height and width.

        Raises:
          BrokenRecord: if the mask cannot be read.
          UserError: if it has an id or a color of no class.
        """
        classes = self._read(index)
        labels = np.flatnonzero(np.bincount(classes[classes >= 0], minlength=1))
        rows = np.full(self.info.num_classes + 1, VOID, np.int16)  # the last is of VOID, -1
        rows[labels] = 1 + np.arange(len(labels))
        return {
            'size': classes.shape,
            'segments': rows[classes],
            'labels': labels.astype(np.int32),
        }

    def labels(self) -> np.ndarray:
        raise UserError(
            f"{self._title}: an image has several classes, one a pixel; slice it without 'per "
            "class', as train[:80%]"
        )

    def listing(self, indices: np.ndarray, /) -> Listing:
        """The digests of the names of files and classes, and of the sizes of both kinds."""
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
        """The class of each pixel, int16 [H W], or VOID."""
        path = self._masks / self._files[index][1]
        values = _read_values(path, self._classes.colored)
        classes = self._table[values]
        if (wrong := classes == UNKNOWN).any():
            raise UserError(f'{path}: {_unknown(int(values[wrong].min()), self._classes)}')
        return classes

    def _look(self, root: pathlib.Path) -> None:
        """Raise UserError if the first masks have nothing but 0 and the ignored 255."""
        classes, seen = self._classes, set()
        if classes.colored or not classes.strict or classes.numbers.get(IGNORED) != VOID:
            return
        for _, mask in self._files[:HEADS]:
            try:
                seen |= set(np.unique(_read_values(self._masks / mask, False)).tolist())
            except BrokenRecord:  # counted when it is read
                return
        if seen == {0, IGNORED} and len(classes.names) > 1:
            raise UserError(
                f'{self._masks}: masks of 0 and 255 alone, but 255 is ignored; if it is a class, '
                f"list the ids in {root / 'classes.csv'}: 'id,name', '0,background', '255,leaf'"
            )


def _find_layout(root: pathlib.Path, title: str) -> Layout:
    """The layout of a folder, by the names of its folders."""
    if not root.is_dir():
        raise UserError(f'{title}: there is no such folder')
    left, fine = (root / name for name in CITYSCAPES)
    if left.is_dir():
        splits = {name: left / name for name in _folders(left)}
        masks = {name: fine / name for name in splits}
        numbers = {number: i for i, number in enumerate(CITYSCAPES_IDS)}
        suffixes = '_leftImg8bit', '_gtFine_labelIds'
        names = tuple(CITYSCAPES_IDS.values())
        return Layout(splits, masks, Classes(names, numbers, strict=False), suffixes)
    folders = _split_folders(root, title)
    if (root / ADE20K).is_file():
        names = _ade20k_names(root / ADE20K)
        numbers = {number: number - 1 for number in range(len(names) + 1)}  # 0 becomes VOID
        return Layout(*folders, Classes(names, numbers))
    return Layout(*folders, _read_classes(root, title))


def _split_folders(
    root: pathlib.Path, title: str
) -> tuple[dict[str, pathlib.Path], dict[str, pathlib.Path]]:
    """The folders of images and of masks of each split."""
    if (found := root / IMAGES).is_dir():
        masks = _masks_folder(root, title)
        has_images = any(is_image(one.name) for one in found.iterdir())
        splits = [] if has_images else _folders(found)
        if splits:
            return {n: found / n for n in splits}, {n: masks / n for n in splits}
        return {'train': found}, {'train': masks}
    splits = [name for name in _folders(root) if (root / name / IMAGES).is_dir()]
    if not splits:
        raise UserError(
            f'{title}: has no folder {IMAGES}; put the images into {root}/{IMAGES} and PNG files '
            f'of the same names into {root}/{MASKS[0]}'
        )
    masks_of = {name: _masks_folder(root / name, title) for name in splits}
    return {name: root / name / IMAGES for name in splits}, masks_of


def _masks_folder(root: pathlib.Path, title: str) -> pathlib.Path:
    for name in MASKS:
        if (root / name).is_dir():
            return root / name
    raise UserError(f'{title}: has no folder {root / MASKS[0]} beside {root / IMAGES}')


def _folders(folder: pathlib.Path) -> list[str]:
    return sorted(
        one.name for one in folder.iterdir() if one.is_dir() and not one.name.startswith('.')
    )


def _pairs(
    folder: pathlib.Path, masks: pathlib.Path, suffixes: tuple[str, str], title: str
) -> list[tuple[str, str]]:
    """The names of each image and its mask; UserError if there is none, or a mask is missing."""
    names = [name for name in listing.files_below(folder) if is_image(name)]
    if not names:
        raise UserError(f'{title}: no image below {folder}')
    there = set(listing.files_below(masks)) if masks.is_dir() else set()
    pngs = {_with_png(name): name for name in there}  # 0.PNG is the mask of 0.jpg too
    stems = [name.rpartition('.')[0].removesuffix(suffixes[0]) for name in names]
    wanted = [f'{stem}{suffixes[1]}.png' for stem in stems]
    pairs = [(name, pngs.get(mask, mask)) for name, mask in zip(names, wanted, strict=True)]
    if missing := [pair for pair in pairs if pair[1] not in there]:
        name, mask = missing[0]
        stem = mask.removesuffix('.png')
        other = next((one for one in there if one.rpartition('.')[0] == stem), None)
        hint = f'; {masks / other} is not a PNG file' if other else ''
        more = f' ({len(missing):,} of {len(names):,} have none)' if len(missing) > 1 else ''
        raise UserError(f'{folder / name}: its mask {masks / mask} is missing{hint}{more}')
    listed = {mask for _, mask in pairs}
    unused = (_with_png(name) for name in there - listed)
    if count := sum(name.endswith(f'{suffixes[1]}.png') for name in unused):
        listing.warn_once(f'{masks}: {count} masks left out that have no image in {folder}')
    return pairs


def _with_png(name: str) -> str:
    """The name of a file with its ending in lower case if that is `.png`."""
    stem, dot, ending = name.rpartition('.')
    return f'{stem}{dot}png' if ending.lower() == 'png' else name


def _read_values(path: pathlib.Path, colored: bool) -> np.ndarray:
    """The ids of pixels, or their colors as numbers, int [H W].

    Raises:
      BrokenRecord: if the file cannot be read.
      UserError: if it has colors instead of ids.
    """
    values = images.read_values(path, colors=colored)
    if colored:
        return values @ [65536, 256, 1]
    if values.ndim != 2:
        raise UserError(
            f'{path}: is a picture in colors, not of class ids; list the color of each class '
            "in classes.csv: 'name,color', 'leaf,#00ff00'"
        )
    return values


def _class_table(classes: Classes) -> np.ndarray:
    """The class of every possible id or color, int16; VOID, or UNKNOWN."""
    other = UNKNOWN if classes.strict else VOID
    table = np.full(2 ** (24 if classes.colored else 16), other, np.int16)
    table[list(classes.numbers)] = list(classes.numbers.values())
    return table


def _unknown(value: int, classes: Classes) -> str:
    if classes.colored:
        return f'the color #{value:06x} is of no class; list it, without a name to ignore it'
    largest = max(number for number, label in classes.numbers.items() if label != VOID)
    return (
        f'the id {value} is of no class: there are {len(classes.names)}, up to the id {largest}; '
        'correct the mask or the list of classes'
    )


def _read_classes(root: pathlib.Path, title: str) -> Classes:
    """The classes that a file in the folder lists; UserError if there is none."""
    text, table = root / 'classes.txt', root / 'classes.csv'
    if text.is_file() and table.is_file():
        raise UserError(f'{text} and {table.name}: which one counts? remove the other')
    if table.is_file():
        return _read_table(table)
    if not text.is_file():
        raise UserError(f'{title}: {WRITE.format(text)}')
    names = [line.strip() for line in _lines(text)]
    while names and not names[-1]:
        names.pop()
    if not any(names):
        raise UserError(f'{text}: has no class; {WRITE.format(text)}')
    return _numbered(text, list(enumerate(names)), False)


def _read_table(table: pathlib.Path) -> Classes:
    rows = [row for row in csv.reader(_lines(table), skipinitialspace=True) if any(row)]
    header = [cell.strip().lower() for cell in rows[0]] if rows else []
    key = next((one for one in ('id', 'color') if one in header), None)
    if key is None or 'name' not in header:
        raise UserError(f"{table}: its first line is 'id,name' or 'name,color'")
    listed = []
    for number, row in enumerate(rows[1:], 2):
        if len(row) != len(header):
            raise UserError(f'{table}: row {number}: has {len(row)} cells of {len(header)}')
        cells = {name: cell.strip() for name, cell in zip(header, row, strict=True)}
        pattern = r'\d{1,5}' if key == 'id' else r'#[0-9a-fA-F]{6}'
        if not re.fullmatch(pattern, cells[key]):
            form = 'a number' if key == 'id' else 'of the form #ff8000'
            raise UserError(f'{table}: row {number}: the {key} {cells[key]!r} is not {form}')
        value = int(cells[key]) if key == 'id' else int(cells[key][1:], 16)
        listed.append((value, cells['name']))
    return _numbered(table, listed, key == 'color')


def _numbered(file: pathlib.Path, listed: Iterable[tuple[int, str]], colored: bool) -> Classes:
    """The classes of listed ids or colors; those of one name are one class."""
    names: dict[str, int] = {}
    numbers = {} if colored else {IGNORED: VOID}
    for value, name in listed:
        if numbers.get(value, VOID) != VOID:
            raise UserError(f'{file}: lists {value} twice')
        numbers[value] = names.setdefault(name, len(names)) if name else VOID
    if not names:
        raise UserError(f'{file}: has no class')
    return Classes(tuple(names), numbers, colored)


def _ade20k_names(file: pathlib.Path) -> tuple[str, ...]:
    """The first name of each class, in the order of ids; the file has tabs between columns."""
    rows = [line.split('\t') for line in _lines(file)[1:] if line.strip()]
    names = tuple(row[-1].split(',')[0].strip() for row in rows)
    if not names or any(row[0].strip() != str(i) for i, row in enumerate(rows, 1)):
        raise UserError(f'{file}: is not the list of classes of ADE20K, with ids from 1')
    return names


def _lines(file: pathlib.Path) -> list[str]:
    try:
        return paths.read_bytes(file, paths.TABLE).decode('utf-8-sig').splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f'{file}: cannot be read as UTF-8: {paths.first_line(error)}') from error
