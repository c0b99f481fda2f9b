"""`table:FILE`: images that a CSV or Parquet file lists with their classes.

    image,label,split             image,labels
    a/1.jpg,cat,train             1.jpg,cat;dog
    a/2.jpg,dog,val               2.jpg,

Names of images are relative to the table's folder. `label` is the class of an image; `labels` are
its classes, any number of them, separated by semicolons or as a list of Parquet, and `label` of the
records is then a mark for each class. Without `split` all images are of the split `train`. CSV is
UTF-8 with commas and a first row of these names; a cell with a comma is in double quotes.
`folder:PATH` reads `labels.csv` or `labels.parquet`, see `sources.folder`.
"""

from __future__ import annotations

import collections
import csv
import io
import itertools
import math
import os
import pathlib
import posixpath
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from vit_jax.data import batches, class_names, images, listing
from vit_jax.data.records import Listing, Record, SourceInfo, UnknownSplit, count_labels
from vit_jax.errors import UserError, one_line
from vit_jax.storage import paths

TABLES = ('.csv', '.parquet')
IMAGES = ('.jpg', '.jpeg', '.png', '.webp')
COLUMNS = ('image', 'label', 'labels', 'split')
INDEX = '__index_level_0__'  # which pandas adds to Parquet
SEPARATOR = ';'
FORM = "its columns are 'image', 'label' (or 'labels', separated by semicolons) and 'split'"
SEVERAL = "write several classes into a column 'labels', separated by semicolons"
NAMES = "write the names of an image's classes into a column 'labels', separated by semicolons"
REMEDY = 'remove or rename the others'
MARKS = {'0', '1', 'True', 'False'}
OTHER_LISTS = re.compile(r'\||^\[.*\]$', re.DOTALL)  # cat|dog, ['cat', 'dog']
UTF16 = (b'\xff\xfe', b'\xfe\xff')


class Files(NamedTuple):
    """Image files of one split.

    Attributes:
      folder: folder of the files.
      names: file names relative to the folder.
      classes: names of the classes, in their order; none if the files have no classes.
      labels: the numbers of the classes of each file.
      several: whether a file may have any number of classes, instead of one.
    """

    folder: pathlib.Path
    names: Sequence[str]
    classes: Sequence[str]
    labels: Sequence[tuple[int, ...]]
    several: bool = False


class ImageFiles:
    """Image files with their classes, in a fixed shuffled order.

    So `train[:90%]` and `train[90%:]` both have all classes.
    """

    def __init__(self, title: str, files: Files):
        """`title` names the source in messages."""
        self._title, self._folder, self._several = title, files.folder, files.several
        names = tuple(map(in_utf8, files.classes))
        self.info = SourceInfo(len(names), names, multilabel=files.several)
        count = len(files.names)
        order = batches.shuffled(np.arange(count), size=count, seed=0, epoch=0)
        self._files = [files.names[i] for i in order.tolist()]
        sizes = np.fromiter(map(len, files.labels), np.int64, count)
        starts, sizes = (np.cumsum(sizes) - sizes)[order], sizes[order]
        self._ends = np.concatenate([np.zeros(1, np.int64), np.cumsum(sizes)])
        flat = np.fromiter(itertools.chain.from_iterable(files.labels), np.int64)
        shift = np.repeat(starts - self._ends[:-1], sizes)  # there may be a million files
        self._classes = flat[np.arange(len(flat)) + shift]

    def __len__(self) -> int:
        return len(self._files)

    def __getitem__(self, index: int, /) -> Record:
        return images.decode_record(self.encoded(index), self.record_name(index))

    def encoded(self, index: int, /) -> Record:
        """The record with its image as a file."""
        data = images.read_file(self._folder / self._files[index])
        classes = self._classes_of(index)
        if not self.info.num_classes:
            return {'image': data}
        if not self._several:
            return {'image': data, 'label': int(classes[0])}
        marks = np.zeros(self.info.num_classes, np.uint8)
        marks[classes] = 1
        return {'image': data, 'label': marks}

    def labels(self) -> np.ndarray:
        """The class of each image; UserError if images have several."""
        if self._several:
            raise UserError(
                f'{self._title}: an image has several classes or none; slice it without '
                "'per class', and leave out what compares single classes"
            )
        if not self.info.num_classes:
            raise UserError(f'{self._title}: its images have no classes that training knows')
        return self._classes

    def class_counts(self, indices: np.ndarray, /) -> np.ndarray:
        """The images of each class."""
        if self._has_one_each:
            return count_labels(self._classes[indices], self.info.num_classes)
        labels = [self._classes_of(i) for i in indices.tolist()]
        return count_labels(np.concatenate([self._classes[:0], *labels]), self.info.num_classes)

    def listing(self, indices: np.ndarray, /) -> Listing:
        """Digests of names and classes, and of sizes."""
        files = [self._files[i] for i in indices.tolist()]
        names = in_utf8('\0'.join(files))
        if self._has_one_each:
            digest = listing.digest_of(names, self._classes[indices])
        else:
            classes = map(self._classes_of, indices.tolist())
            labels = [','.join(map(str, numbers.tolist())) for numbers in classes]
            digest = listing.digest_of(names, labels)
        return Listing(digest, listing.digest_of_sizes(self._folder, files))

    def record_name(self, index: int, /) -> str:
        """The path of the file."""
        return str(self._folder / self._files[index])

    @property
    def _has_one_each(self) -> bool:
        return not self._several and self.info.num_classes > 0

    def _classes_of(self, index: int) -> np.ndarray:
        return self._classes[self._ends[index] : self._ends[index + 1]]


class Source(ImageFiles):
    """One split of a table; all splits have the same classes."""

    def __init__(self, path: str, split: str):
        table = pathlib.Path(path).expanduser()
        title = f'source table:{path}'
        if table.suffix.lower() not in TABLES:
            raise UserError(f'{title}: name a file that ends in {" or ".join(TABLES)}')
        super().__init__(title, read(table, table.parent, split, title))


def read(table: pathlib.Path, folder: pathlib.Path, split: str, title: str) -> Files:
    """The images of a split that a table lists, sorted by name.

    Args:
      table: a CSV or Parquet file.
      folder: the images' names are relative to it; they may also begin with its own name, if the
        table is beside it.
      split: of the table's column `split`; 'train' without one.
      title: name of the source, for messages.

    Raises:
      UserError: if the table cannot be read, or a row is wrong; it names the row. `UnknownSplit`
        for a split that is not in the table.
    """
    rows = _rows(table)
    several = 'labels' in rows.columns
    names = _names(rows, folder, f'{folder.name}/' if folder != table.parent else '')
    splits = rows.texts('split') if 'split' in rows.columns else ['train'] * len(names)
    found = rows.lists('labels') if several else [(label,) for label in rows.texts('label')]
    _require_files(rows, names, folder)
    if split not in splits:
        raise UnknownSplit.from_splits(title, split, sorted(set(splits)))
    order = sorted(range(len(names)), key=names.__getitem__)
    splits = [splits[i] for i in order]
    chosen = [names[i] for i, name in zip(order, splits, strict=True) if name == split]
    numbered = number_classes([found[i] for i in order], splits, split, title, several)
    return Files(folder, chosen, *numbered, several)


def number_classes(
    names: Sequence[tuple[str, ...]],
    splits: Sequence[str],
    split: str,
    title: str,
    several: bool = False,
) -> tuple[list[str], list[tuple[int, ...]]]:
    """Number the classes of all files in the order of their names.

    Args:
      names: class names of each file.
      splits: split of each file.
      split: split to read.
      title: name of the source, for messages.
      several: whether a file may have any number of classes, instead of one.

    Returns:
      The names of the classes, and the numbers of the classes of each file of `split`.

    Raises:
      UserError: as `class_names.join_splits`.
    """
    spelled = class_names.join_spellings(itertools.chain(*names))
    by_split: dict[str, set[str]] = {name: set() for name in splits}
    for part, labels in zip(splits, names, strict=True):
        by_split[part].update(map(spelled.__getitem__, labels))
    classes = sorted_names(class_names.join_splits(by_split, split, title, several))
    number = {name: i for i, name in enumerate(classes)}
    numbers = [
        tuple(sorted({number[spelled[label]] for label in labels if spelled[label] in number}))
        for part, labels in zip(splits, names, strict=True)
        if part == split
    ]
    return classes, numbers


class _Rows(NamedTuple):
    """The cells of a table.

    Attributes:
      table: its file.
      numbers: row numbers, as a spreadsheet shows them.
      columns: the cells of each.
    """

    table: pathlib.Path
    numbers: Sequence[int]
    columns: Mapping[str, Sequence[Any]]

    def error(self, at: int, problem: str) -> UserError:
        """The error of the row at a position."""
        return UserError(f'{self.table}: row {self.numbers[at]}: {one_line(problem)}')

    def texts(self, name: str) -> list[str]:
        """The cells of a column, none of which may be empty."""
        cells = list(map(_text, self.columns[name]))
        if '' in cells:
            raise self.error(cells.index(''), f'has no {name}')
        if name == 'label':
            for at, text in enumerate(cells):
                if SEPARATOR in text or OTHER_LISTS.search(text):
                    raise self.error(at, f'{text!r}: {SEVERAL}')
        return cells

    def lists(self, name: str) -> list[tuple[str, ...]]:
        """The texts in the cells of a column that holds several in each.

        Raises:
          UserError: if they are separated otherwise, or marks of all classes.
        """
        cells = self.columns[name]
        if _are_marks(cells):
            raise UserError(f'{self.table}: its column {name!r} holds marks of 0 and 1; {NAMES}')
        lists = [tuple(_texts(cell)) for cell in cells]
        names = {text for texts in lists for text in texts}
        for at, text in ((at, text) for at, texts in enumerate(lists) for text in texts):
            by_comma = ',' in text and any(part.strip() in names for part in text.split(','))
            if by_comma or OTHER_LISTS.search(text):
                raise self.error(at, f'{text!r}: {SEVERAL}')
        return lists


def _are_marks(cells: Sequence[Any]) -> bool:
    """Whether lists of Parquet hold 0 or 1 for each class; numbers of classes do not repeat."""
    lists = [cell for cell in cells if isinstance(cell, list)]
    return (
        len({len(cell) for cell in lists}) == 1
        and all(value in (0, 1) for cell in lists for value in cell)
        and any(len(set(cell)) < len(cell) for cell in lists)
    )


def _text(cell: Any) -> str:
    if cell is None or (isinstance(cell, float) and math.isnan(cell)):
        return ''
    if isinstance(cell, float) and cell.is_integer():  # pandas, where a column has gaps
        cell = int(cell)
    return str(cell).strip()


def _texts(cell: Any) -> Iterator[str]:
    parts = cell if isinstance(cell, list) else _text(cell).split(SEPARATOR)
    return filter(None, map(_text, parts))


def _rows(table: pathlib.Path) -> _Rows:
    """The columns of a table, checked by their names."""
    kinds = {'.csv': _read_csv, '.parquet': _read_parquet}
    try:
        rows = kinds[table.suffix.lower()](table)
    except OSError as error:
        raise UserError(f'{table}: cannot be read: {paths.first_line(error)}') from error
    known = rows.columns.keys()
    wrong = [name for name in known if name not in COLUMNS]
    if 'image' not in known:
        raise UserError(f"{table}: has no column 'image': {FORM}, not {_listed(known)}")
    if wrong:
        marks = [name for name in wrong if set(map(_text, rows.columns[name])) <= MARKS]
        hint = f'{_listed(marks)} hold marks of 0 and 1; {NAMES}' if marks else REMEDY
        raise UserError(f'{table}: unknown column {wrong[0]!r}: {FORM}; {hint}')
    if ('label' in known) == ('labels' in known):
        raise UserError(f"{table}: needs a column 'label' or 'labels', not both: {FORM}")
    if not rows.numbers:
        raise UserError(f'{table}: lists no image')
    return rows


def _listed(names: Iterable[str]) -> str:
    return one_line(', '.join(map(repr, names)))[:100]


def _read_csv(table: pathlib.Path) -> _Rows:
    reader = csv.reader(
        io.StringIO(_decoded(table), newline=''), strict=True, skipinitialspace=True
    )
    header: list[str] = []
    numbers: list[int] = []
    cells: list[list[str]] = []
    number = 0
    try:
        for number, row in enumerate(reader, 1):
            if not any(map(str.strip, row)):
                continue
            if not header:
                header = [name.strip().lower() for name in row]
                continue
            if len(row) != len(header):
                raise UserError(
                    f'{table}: row {number}: has {len(row)} cells, and the first row '
                    f'{len(header)}: write a cell that contains a comma in double quotes'
                )
            numbers.append(number)
            cells.append(row)
    except csv.Error as error:
        raise UserError(f'{table}: row {number + 1}: {error}') from error
    if len(header) == 1 and (other := next((c for c in ';\t|' if c in header[0]), '')):
        raise UserError(f'{table}: its columns are separated by {other!r}; write commas')
    if twice := [name for name, count in collections.Counter(header).items() if count > 1]:
        raise UserError(f'{table}: two columns are called {twice[0]!r}')
    columns = list(zip(*cells, strict=True)) or [()] * len(header)
    return _Rows(table, numbers, dict(zip(header, columns, strict=True)))


def _decoded(table: pathlib.Path) -> str:
    data = paths.read_bytes(table, paths.TABLE)
    if data.startswith(UTF16):
        raise UserError(f'{table}: is UTF-16; save it as UTF-8 (in Excel, "CSV UTF-8")')
    try:
        return data.decode('utf-8-sig')
    except UnicodeDecodeError as error:
        row = data.count(b'\n', 0, error.start) + 1
        raise UserError(
            f'{table}: row {row}: is not UTF-8; save it as UTF-8 (in Excel, "CSV UTF-8")'
        ) from error


def _read_parquet(table: pathlib.Path) -> _Rows:
    import pyarrow
    from pyarrow import parquet

    try:
        found = parquet.read_table(table)
        found.validate(full=True)
    except pyarrow.ArrowException as error:
        raise UserError(f'{table}: is not a Parquet file: {paths.first_line(error)}') from error
    columns = {name.strip().lower(): found[name].to_pylist() for name in found.column_names}
    columns.pop(INDEX, None)
    return _Rows(table, range(1, found.num_rows + 1), columns)


def _names(rows: _Rows, folder: pathlib.Path, prefix: str) -> list[str]:
    """The names of the images in their folder, each of which occurs once."""
    found: dict[str, int] = {}
    for at, text in enumerate(rows.texts('image')):
        name = posixpath.normpath(text)
        if name.startswith(('/', '../')) or name in ('.', '..'):
            raise rows.error(
                at, f'{text!r} lies outside of {folder}; write names relative to that folder'
            )
        name = name.removeprefix(prefix)
        if (first := found.setdefault(name, at)) != at:
            one = "; several classes of an image stand in one cell of the column 'labels'"
            raise rows.error(at, f'{text!r} is in row {rows.numbers[first]} too{one}')
    return list(found)


def _require_files(rows: _Rows, names: Sequence[str], folder: pathlib.Path) -> None:
    """Raise UserError for images that do not exist; log those that the table does not list."""
    listed = set(names)
    there: set[str] = set()
    for inside in {posixpath.dirname(name) for name in names}:
        prefix = f'{inside}/' if inside else ''
        if (folder / inside).is_dir():
            with os.scandir(folder / inside) as entries:
                there |= {prefix + entry.name for entry in entries if not entry.is_dir()}
    if missing := [at for at, name in enumerate(names) if name not in there]:
        more = f' ({len(missing):,} of {len(names):,} images are missing)'
        raise rows.error(
            missing[0],
            f'there is no {folder / names[missing[0]]}{_hint(names[missing[0]], there)}'
            f'{more if len(missing) > 1 else ""}',
        )
    if others := sum(is_image(name) for name in there - listed):
        listing.warn_once(f'{rows.table}: {others} images left out that it does not list')


def _hint(name: str, there: Iterable[str]) -> str:
    """The remedy for a name that is not a file: its suffix, or other slashes."""
    if '\\' in name:
        return '; write / between folder and file'
    with_suffix = (name + suffix for suffix in IMAGES)
    found = next((other for other in with_suffix if other in set(there)), '')
    return f'; did you mean {found!r}?' if found else ''


def is_image(name: str) -> bool:
    """Whether a file is an image by its name; hidden ones are not."""
    return name.lower().endswith(IMAGES) and not posixpath.basename(name).startswith('.')


def in_utf8(name: str) -> str:
    """A file's name in UTF-8 whatever the locale, so that all machines agree."""
    return os.fsencode(name).decode('utf-8', 'surrogateescape')


def sorted_names(names: set[str]) -> list[str]:
    """Names of classes in their order: by number if all are numbers, else by name."""
    if all(map(str.isdecimal, names)):
        return sorted(names, key=lambda name: (int(name), name))
    return sorted(names)
