"""`folder:PATH`: JPEG, PNG or WebP files in a folder for each class.

    PATH/SPLIT/CLASS/*.jpg    splits are the folders
    PATH/CLASS/*.jpg          a single split, `train`

Classes are sorted by name, or by number if all are numbers, as in ImageNet-v2. Files may be in
subfolders of their class. A folder without an image in any split is not a class, nor is a hidden or
a system folder. The files of a split have a fixed shuffled order, so that `train[:90%]` and
`train[90%:]` both have all classes. Long lists of files are kept, see `data/listing.py`.
"""

from __future__ import annotations

import itertools
import logging
import os
import pathlib
from collections.abc import Sequence

import numpy as np

from vit_jax.data import batches, images, listing
from vit_jax.data.records import Listing, Record, SourceInfo, UnknownSplit, count_labels
from vit_jax.errors import UserError

log = logging.getLogger(__name__)

SUFFIXES = ('.jpg', '.jpeg', '.png', '.webp')
SYSTEM = ('__MACOSX', '__pycache__', '@eaDir', '$RECYCLE.BIN', 'System Volume Information')
SPLITS = {'train', 'validation', 'valid', 'val', 'dev', 'test'}


class Source:
    """One split of a folder of images; all splits have the same classes."""

    def __init__(self, path: str, split: str):
        self._root = pathlib.Path(path).expanduser()
        splits = _find_splits(self._root)
        if split not in splits:
            raise UnknownSplit.from_splits(f'source folder:{path}', split, splits)
        self._folder = splits[split]
        by_class, beside = self._list()
        others = [folder for name, folder in splits.items() if name != split]
        empty = _without_images(by_class, others)
        names = _sorted({*by_class, *itertools.chain(*map(_folders, others))} - empty)
        self._report(empty, beside, splits)
        self.info = SourceInfo(len(names), tuple(map(_in_utf8, names)))
        files = [file for name in names for file in by_class.get(name, ())]
        labels = [label for label, name in enumerate(names) for _ in by_class.get(name, ())]
        shuffle = batches.shuffled(np.arange(len(files)), size=len(files), seed=0, epoch=0)
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

    def class_counts(self, indices: np.ndarray, /) -> np.ndarray:
        return count_labels(self._labels[indices], self.info.num_classes)

    def listing(self, indices: np.ndarray, /) -> Listing:
        files = [self._files[i] for i in indices.tolist()]
        names = _in_utf8('\0'.join(files))
        return Listing(
            listing.digest_of(names, self._labels[indices]),
            listing.digest_of_sizes(self._folder, files),
        )

    def record_name(self, index: int, /) -> str:
        return str(self._folder / self._files[index])

    def _list(self) -> tuple[dict[str, list[str]], int]:
        """The images of each class's folder, and the number of images in no such folder."""
        by_class: dict[str, list[str]] = {name: [] for name in _folders(self._folder)}
        others = beside = 0
        for file in listing.files_below(self._folder):
            name, inside, _ = file.partition('/')
            is_image = file.lower().endswith(SUFFIXES)
            if not inside:
                beside += is_image
            elif is_image and name in by_class:
                by_class[name].append(file)
            else:
                others += name in by_class
        kinds = ', '.join(SUFFIXES)
        if others:
            log.warning('%s: %d files left out that are not %s', self._folder, others, kinds)
        if not any(by_class.values()):
            raise UserError(f'source folder:{self._root}: no image ({kinds}) below {self._folder}')
        return by_class, beside

    def _report(self, empty: set[str], beside: int, splits: dict[str, pathlib.Path]) -> None:
        """Log the folders that are not classes, and the images in no class's folder."""
        parents = {self._root, *splits.values()}
        if found := sorted(empty | {name for parent in parents for name in _no_classes(parent)}):
            log.warning(
                '%s: folders left out that hold no image or belong to a system: %s',
                *(self._root, ', '.join(map(_in_utf8, found))),
            )
        if beside:
            log.warning(
                '%s: %d images left out that lie in no folder of a class', self._folder, beside
            )


def _without_images(by_class: dict[str, list[str]], others: Sequence[pathlib.Path]) -> set[str]:
    """The folders of classes without an image here or in the other splits."""
    names = {*by_class, *itertools.chain(*map(_folders, others))}
    lacking = {name for name in names if not by_class.get(name)}
    return {name for name in lacking if not any(_holds_image(one / name) for one in others)}


def _holds_image(folder: pathlib.Path) -> bool:
    """Whether an image lies at any depth; stops at the first."""
    for _, folders, files in os.walk(folder, followlinks=True):
        folders[:] = [name for name in folders if not name.startswith('.')]
        if any(map(_is_image, files)):
            return True
    return False


def _in_utf8(name: str) -> str:
    """A file's name in UTF-8 whatever the locale, so that all machines agree."""
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
            f'source folder:{root}: its images lie in no folder of a class; put those of each '
            f'class into a folder of its own, {root}/CLASS/*.jpg (files of labels are not read), '
            f'or for a task that needs no classes all of them into {root}/all'
        )
    if not children:
        raise UserError(
            f'source folder:{root}: has no folders; expected {root}/CLASS/*.jpg or '
            f'{root}/SPLIT/CLASS/*.jpg'
        )
    has_images = any(_has_images(folder) for folder in children.values())
    splits = {name: folder for name, folder in children.items() if _folders(folder)}
    # Stray images between the classes of folders with such names do not make these classes.
    are_splits = splits.keys() == children.keys() and splits.keys() <= SPLITS
    return splits if splits and (are_splits or not has_images) else {'train': root}


def _has_images(folder: pathlib.Path) -> bool:
    with os.scandir(folder) as entries:
        return any(_is_image(entry.name) for entry in entries)


def _is_image(name: str) -> bool:
    return name.lower().endswith(SUFFIXES) and not name.startswith('.')


def _folders(folder: pathlib.Path) -> list[str]:
    """The folders that may be classes or splits."""
    return [name for name in _all_folders(folder) if not _is_of_system(name)]


def _no_classes(folder: pathlib.Path) -> list[str]:
    """The hidden folders and those of the operating system."""
    return [name for name in _all_folders(folder) if _is_of_system(name)]


def _is_of_system(name: str) -> bool:
    return name.startswith('.') or name in SYSTEM


def _all_folders(folder: pathlib.Path) -> list[str]:
    with os.scandir(folder) as entries:
        return [entry.name for entry in entries if entry.is_dir()]
