"""`folder:PATH`: a class a folder, JPEG, PNG or WebP.

    PATH/SPLIT/CLASS/*.jpg    splits are the folders
    PATH/CLASS/*.jpg          one split, `train`, that holds everything

Classes are sorted by name, or by number if all are numbers, as in ImageNet-v2. Files may be in
subfolders of their class. The files of a split come in a fixed shuffled order, so that
`train[:90%]` and `train[90%:]` both have all classes. The names of many files are listed once, see
`data/listing.py`.
"""

from __future__ import annotations

import logging
import os
import pathlib

import numpy as np

from vit_jax.data import images, listing, order
from vit_jax.data.records import Listing, Record, SourceInfo, UnknownSplit
from vit_jax.errors import UserError

log = logging.getLogger(__name__)

SUFFIXES = ('.jpg', '.jpeg', '.png', '.webp')


class Source:
    """One split of a folder of images; the classes are those of all splits together."""

    def __init__(self, path: str, split: str):
        self._root = pathlib.Path(path).expanduser()
        splits = _find_splits(self._root)
        if split not in splits:
            raise UnknownSplit.of(f'source folder:{path}', split, splits)
        names = _sorted({name for folder in splits.values() for name in _folders(folder)})
        self.info = SourceInfo(len(names), tuple(map(_in_utf8, names)))
        self._folder = splits[split]
        files, labels = self._list(names)
        shuffle = order.shuffled(np.arange(len(files)), size=len(files), seed=0, epoch=0)
        self._files = [files[i] for i in shuffle]
        self._labels = np.array(labels, np.int64)[shuffle]

    def __len__(self) -> int:
        return len(self._files)

    def __getitem__(self, index: int, /) -> Record:
        return images.decoded(self.encoded(index), self.record_name(index))

    def encoded(self, index: int, /) -> Record:
        data = images.read_file(self._folder / self._files[index])
        return {'image': data, 'label': int(self._labels[index])}

    def labels(self) -> np.ndarray:
        return self._labels

    def listing(self, indices: np.ndarray, /) -> Listing:
        files = [self._files[i] for i in indices.tolist()]
        names = _in_utf8('\0'.join(files))
        return Listing(
            listing.digest_of(names, self._labels[indices]),
            listing.digest_of_sizes(self._folder, files),
        )

    def record_name(self, index: int, /) -> str:
        return str(self._folder / self._files[index])

    def _list(self, classes: list[str]) -> tuple[list[str], list[int]]:
        by_class: dict[str, list[str]] = {name: [] for name in classes}
        others = 0
        for file in listing.files_below(self._folder):
            name, inside, _ = file.partition('/')
            if inside and file.lower().endswith(SUFFIXES):
                by_class[name].append(file)
            else:
                others += bool(inside)
        files = [file for mine in by_class.values() for file in mine]
        labels = [label for label, mine in enumerate(by_class.values()) for _ in mine]
        if others:
            kinds = ', '.join(SUFFIXES)
            log.warning('%s: %d files left out that are not %s', self._folder, others, kinds)
        if not files:
            raise UserError(
                f'source folder:{self._root}: no image ({", ".join(SUFFIXES)}) below {self._folder}'
            )
        return files, labels


def _in_utf8(name: str) -> str:
    """A name of a file, which Python has read by the locale, as every other machine reads it."""
    return os.fsencode(name).decode('utf-8', 'surrogateescape')


def _sorted(names: set[str]) -> list[str]:
    if all(map(str.isdecimal, names)):
        return sorted(names, key=lambda name: (int(name), name))
    return sorted(names)


def _find_splits(root: pathlib.Path) -> dict[str, pathlib.Path]:
    if not root.is_dir():
        raise UserError(f'source folder:{root}: there is no such folder')
    children = {name: root / name for name in _folders(root)}
    if not children and _has_images(root):
        raise UserError(
            f'source folder:{root}: its images lie in no folder of a class; without classes, put '
            f'all of them into one, such as {root}/all'
        )
    if not children:
        raise UserError(
            f'source folder:{root}: has no folders; expected {root}/CLASS/*.jpg or '
            f'{root}/SPLIT/CLASS/*.jpg'
        )
    has_images = any(_has_images(folder) for folder in children.values())
    splits = {name: folder for name, folder in children.items() if _folders(folder)}
    return splits if splits and not has_images else {'train': root}


def _has_images(folder: pathlib.Path) -> bool:
    with os.scandir(folder) as entries:
        return any(entry.name.lower().endswith(SUFFIXES) for entry in entries)


def _folders(folder: pathlib.Path) -> list[str]:
    with os.scandir(folder) as entries:
        return [e.name for e in entries if e.is_dir() and not e.name.startswith('.')]
