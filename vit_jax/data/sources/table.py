"""`table:FILE`: images listed with their classes in a CSV or Parquet file.

    image,label,split             image,labels
    a/1.jpg,cat,train             1.jpg,cat;dog
    a/2.jpg,dog,val               2.jpg,

Image names are relative to the table's folder. `label` is the class of an image; `labels` are any
number of classes, separated by semicolons or as a Parquet list, and `label` of the records is then
1 or 0 for each class. Without `split` all images are in the split `train`. CSV files are UTF-8 with
commas and these names in the first row; cells with commas are in double quotes.
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
INDEX = '__index_level_0__'  # column that pandas adds to Parquet
SEPARATOR = ';'
FORM = "valid columns are 'image', 'label' (or 'labels', separated by semicolons) and 'split'"
SEVERAL = "write several classes into a column 'labels', separated by semicolons"
NAMES = "write the names of an image's classes into a column 'labels', separated by semicolons"
REMEDY = 'remove or rename the others'
MARKS = {'0', '1', 'True', 'False'}
OTHER_LISTS = re.compile(r'\||^\[.*\]$', re.DOTALL)  # cat|dog, ['cat', 'dog']
UTF16 = (b'\xff\xfe', b'\xfe\xff')


class Files(NamedTuple):
    """Image files of one split.

    Attributes:
      folder: Folder of the files.
      names: File names relative to the folder.
      classes: Class names in order; empty if the files have no classes.
      labels: Class numbers of each file.
      several: Whether a file may have any number of classes instead of one.
    """

    folder: pathlib.Path
    names: Sequence[str]
    classes: Sequence[str]
    labels: Sequence[tuple[int, ...]]
    several: bool = False


class ImageFiles:
    """Image files with their classes, in a fixed shuffled order.

    Shuffled, `train[:90%]` and `train[90%:]` both have all classes.
    """

    def __init__(self, title: str, files: Files):
        """Shuffle and index the files; `title` is the source's name in messages."""
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
        shift = np.repeat(starts - self._ends[:-1], sizes)  # vectorized for a million files
        self._classes = flat[np.arange(len(flat)) + shift]

    def __len__(self) -> int:
        return len(self._files)

    def __getitem__(self, index: int, /) -> Record:
        return images.decode_record(self.encoded(index), self.record_name(index))

    def encoded(self, index: int, /) -> Record:
        """Return the record with an encoded image."""
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
        """Return the class of each image; UserError if images have several."""
        if self._several:
            raise UserError(
                f'{self._title}: images have any number of classes; slice the split without '
                "'per class', and use only evaluations that support several classes"
            )
        if not self.info.num_classes:
            raise UserError(f'{self._title}: its images have no classes of the training split')
        return self._classes

    def class_counts(self, indices: np.ndarray, /) -> np.ndarray:
        """Count the images of each class."""
        if self._has_one_each:
            return count_labels(self._classes[indices], self.info.num_classes)
        labels = [self._classes_of(i) for i in indices.tolist()]
        return count_labels(np.concatenate([self._classes[:0], *labels]), self.info.num_classes)

    def listing(self, indices: np.ndarray, /) -> Listing:
        """Digest names and classes, and file sizes."""
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
        """Return the path of the file."""
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
            raise UserError(f'{title}: must be a {" or ".join(TABLES)} file')
        super().__init__(title, read(table, table.parent, split, title))


def read(table: pathlib.Path, folder: pathlib.Path, split: str, title: str) -> Files:
    """Read the images of a split from a table, sorted by name.

    Args:
      table: CSV or Parquet file.
      folder: Folder to which image names are relative; if the table is next to it, they may also
        begin with the folder's name.
      split: Value in the table's column `split`; 'train' without this column.
      title: Name of the source, for messages.

    Raises:
      UserError: if the table cannot be read, or a row is wrong; the message has its number.
      UnknownSplit: if the split is not in the table.
    """
    rows = _read_rows(table)
    several = 'labels' in rows.columns
    names = _image_names(rows, folder, f'{folder.name}/' if folder != table.parent else '')
    splits = rows.texts('split') if 'split' in rows.columns else ['train'] * len(names)
    labels = rows.lists('labels') if several else [(label,) for label in rows.texts('label')]
    _require_files(rows, names, folder)
    if split not in splits:
        raise UnknownSplit.from_splits(title, split, sorted(set(splits)))
    order = sorted(range(len(names)), key=names.__getitem__)
    splits = [splits[i] for i in order]
    split_names = [names[i] for i, name in zip(order, splits, strict=True) if name == split]
    numbered = number_classes([labels[i] for i in order], splits, split, title, several)
    return Files(folder, split_names, *numbered, several)


def number_classes(
    names: Sequence[tuple[str, ...]],
    splits: Sequence[str],
    split: str,
    title: str,
    several: bool = False,
) -> tuple[list[str], list[tuple[int, ...]]]:
    """Number the classes of all files, sorted by name.

    Args:
      names: Class names of each file.
      splits: Split of each file.
      split: Split to read.
      title: Name of the source, for messages.
      several: Whether a file may have any number of classes instead of one.

    Returns:
      The class names, and the class numbers of each file of `split`.

    Raises:
      UserError: see `class_names.join_splits`.
    """
    class_of = class_names.join_spellings(itertools.chain(*names))
    by_split: dict[str, set[str]] = {name: set() for name in splits}
    for part, labels in zip(splits, names, strict=True):
        by_split[part].update(map(class_of.__getitem__, labels))
    classes = sorted_names(class_names.join_splits(by_split, split, title, several))
    number = {name: i for i, name in enumerate(classes)}
    numbers = [
        tuple(sorted({number[class_of[label]] for label in labels if class_of[label] in number}))
        for part, labels in zip(splits, names, strict=True)
        if part == split
    ]
    return classes, numbers


class _Rows(NamedTuple):
    """Cells of a table.

    Attributes:
      table: File of the table.
      numbers: Row numbers as shown in a spreadsheet.
      columns: {name: cells}.
    """

    table: pathlib.Path
    numbers: Sequence[int]
    columns: Mapping[str, Sequence[Any]]

    def error(self, position: int, problem: str) -> UserError:
        """Make an error about the row at a position."""
        return UserError(f'{self.table}: row {self.numbers[position]}: {one_line(problem)}')

    def texts(self, name: str) -> list[str]:
        """Return the cells of a column as texts; UserError if one is empty."""
        cells = list(map(_cell_text, self.columns[name]))
        if '' in cells:
            raise self.error(cells.index(''), f'has no {name}')
        if name == 'label':
            for position, text in enumerate(cells):
                if SEPARATOR in text or OTHER_LISTS.search(text):
                    raise self.error(position, f'{text!r}: {SEVERAL}')
        return cells

    def lists(self, name: str) -> list[tuple[str, ...]]:
        """Return the texts in each cell of a column with several per cell.

        Raises:
          UserError: if they are not separated by semicolons, or if cells hold 0 and 1 per class.
        """
        cells = self.columns[name]
        if _are_binary(cells):
            raise UserError(f'{self.table}: its column {name!r} has values 0 and 1; {NAMES}')
        lists = [tuple(_cell_texts(cell)) for cell in cells]
        names = {text for texts in lists for text in texts}
        for position, text in (
            (position, text) for position, texts in enumerate(lists) for text in texts
        ):
            by_comma = ',' in text and any(part.strip() in names for part in text.split(','))
            if by_comma or OTHER_LISTS.search(text):
                raise self.error(position, f'{text!r}: {SEVERAL}')
        return lists


def _are_binary(cells: Sequence[Any]) -> bool:
    """Return whether Parquet lists hold 0 or 1 per class; class numbers would not repeat."""
    lists = [cell for cell in cells if isinstance(cell, list)]
    return (
        len({len(cell) for cell in lists}) == 1
        and all(value in (0, 1) for cell in lists for value in cell)
        and any(len(set(cell)) < len(cell) for cell in lists)
    )


def _cell_text(cell: Any) -> str:
    if cell is None or (isinstance(cell, float) and math.isnan(cell)):
        return ''
    if isinstance(cell, float) and cell.is_integer():  # written by pandas for a column with gaps
        cell = int(cell)
    return str(cell).strip()


def _cell_texts(cell: Any) -> Iterator[str]:
    parts = cell if isinstance(cell, list) else _cell_text(cell).split(SEPARATOR)
    return filter(None, map(_cell_text, parts))


def _read_rows(table: pathlib.Path) -> _Rows:
    """Read the columns of a table, and check their names."""
    kinds = {'.csv': _read_csv, '.parquet': _read_parquet}
    try:
        rows = kinds[table.suffix.lower()](table)
    except OSError as error:
        raise UserError(f'{table}: cannot be read: {paths.first_line(error)}') from error
    present = rows.columns.keys()
    unknown = [name for name in present if name not in COLUMNS]
    if 'image' not in present:
        raise UserError(f"{table}: has no column 'image': {FORM}, not {_quote(present)}")
    if unknown:
        binary = [name for name in unknown if set(map(_cell_text, rows.columns[name])) <= MARKS]
        hint = f'{_quote(binary)} have values 0 and 1; {NAMES}' if binary else REMEDY
        raise UserError(f'{table}: unknown column {unknown[0]!r}: {FORM}; {hint}')
    if ('label' in present) == ('labels' in present):
        raise UserError(f"{table}: needs either a column 'label' or 'labels': {FORM}")
    if not rows.numbers:
        raise UserError(f'{table}: lists no image')
    return rows


def _quote(names: Iterable[str]) -> str:
    return one_line(', '.join(map(repr, names)))[:100]


def _read_csv(table: pathlib.Path) -> _Rows:
    reader = csv.reader(io.StringIO(_decode(table), newline=''), strict=True, skipinitialspace=True)
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
                    f'{table}: row {number}: has {len(row)} cells, but the first row '
                    f'{len(header)}; put cells with commas in double quotes'
                )
            numbers.append(number)
            cells.append(row)
    except csv.Error as error:
        raise UserError(f'{table}: row {number + 1}: {error}') from error
    if len(header) == 1 and (other := next((c for c in ';\t|' if c in header[0]), '')):
        raise UserError(f'{table}: its columns are separated by {other!r}; write commas')
    if repeated := [name for name, count in collections.Counter(header).items() if count > 1]:
        raise UserError(f'{table}: two columns have the name {repeated[0]!r}')
    columns = list(zip(*cells, strict=True)) or [()] * len(header)
    return _Rows(table, numbers, dict(zip(header, columns, strict=True)))


def _decode(table: pathlib.Path) -> str:
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
        content = parquet.read_table(table)
        content.validate(full=True)
    except pyarrow.ArrowException as error:
        raise UserError(f'{table}: is not a Parquet file: {paths.first_line(error)}') from error
    columns = {name.strip().lower(): content[name].to_pylist() for name in content.column_names}
    columns.pop(INDEX, None)
    return _Rows(table, range(1, content.num_rows + 1), columns)


def _image_names(rows: _Rows, folder: pathlib.Path, prefix: str) -> list[str]:
    """Return the image names relative to the folder; UserError if one occurs twice."""
    positions: dict[str, int] = {}
    for position, text in enumerate(rows.texts('image')):
        name = posixpath.normpath(text)
        if name.startswith(('/', '../')) or name in ('.', '..'):
            raise rows.error(
                position, f'{text!r} is outside of {folder}; write names relative to that folder'
            )
        name = name.removeprefix(prefix)
        if (first_position := positions.setdefault(name, position)) != position:
            hint = "; write several classes of an image in one cell of the column 'labels'"
            raise rows.error(
                position, f'{text!r} is also in row {rows.numbers[first_position]}{hint}'
            )
    return list(positions)


def _require_files(rows: _Rows, names: Sequence[str], folder: pathlib.Path) -> None:
    """Raise UserError for missing images; log images that the table does not list."""
    required = set(names)
    existing: set[str] = set()
    for parent in {posixpath.dirname(name) for name in names}:
        prefix = f'{parent}/' if parent else ''
        if (folder / parent).is_dir():
            with os.scandir(folder / parent) as entries:
                existing |= {prefix + entry.name for entry in entries if not entry.is_dir()}
    if missing := [position for position, name in enumerate(names) if name not in existing]:
        more = f' ({len(missing):,} of {len(names):,} images are missing)'
        raise rows.error(
            missing[0],
            f'{folder / names[missing[0]]} does not exist{_hint(names[missing[0]], existing)}'
            f'{more if len(missing) > 1 else ""}',
        )
    if unlisted := sum(is_image(name) for name in existing - required):
        listing.warn_once(f'{rows.table}: ignoring {unlisted} images that it does not list')


def _hint(name: str, existing: Iterable[str]) -> str:
    """Suggest a remedy for a missing file: its suffix, or other slashes."""
    if '\\' in name:
        return '; write / between folder and file'
    with_suffix = (name + suffix for suffix in IMAGES)
    match = next((other for other in with_suffix if other in set(existing)), '')
    return f'; did you mean {match!r}?' if match else ''


def is_image(name: str) -> bool:
    """Return whether a file is an image by its name; hidden ones are not."""
    return name.lower().endswith(IMAGES) and not posixpath.basename(name).startswith('.')


def in_utf8(name: str) -> str:
    """Decode a file name as UTF-8 in any locale, so that all machines agree."""
    return os.fsencode(name).decode('utf-8', 'surrogateescape')


def sorted_names(names: set[str]) -> list[str]:
    """Sort class names by number if all are numbers, else alphabetically."""
    if all(map(str.isdecimal, names)):
        return sorted(names, key=lambda name: (int(name), name))
    return sorted(names)
