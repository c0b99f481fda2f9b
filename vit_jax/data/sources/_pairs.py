"""Folders of images with a file of the pixels' truth for each, such as a mask or a depth map."""

from __future__ import annotations

import pathlib
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from vit_jax.data import batches, listing
from vit_jax.data.sources.table import is_image
from vit_jax.errors import UserError

IMAGES = 'images'  # folder
Folders = dict[str, pathlib.Path]  # {split: folder}


class Truth(NamedTuple):
    """Files that belong to images.

    Attributes:
      name: What such a file holds, for messages.
      folders: Names of their folder, the usual one first.
      endings: Endings of their names in lower case, the usual one first.
      suffixes: What images' names, and theirs, have before the ending.
    """

    name: str
    folders: tuple[str, ...]
    endings: tuple[str, ...]
    suffixes: tuple[str, str] = ('', '')


def split_folders(root: pathlib.Path, truth: Truth, title: str) -> tuple[Folders, Folders]:
    """Find the folders of each split's images, and of the files that belong to them.

    They are images/SPLIT or SPLIT/images; without splits, `train`.

    Raises:
      UserError: if one is missing.
    """
    if (folder := root / IMAGES).is_dir():
        other = _truth_folder(root, truth, title)
        has_images = any(is_image(file.name) for file in folder.iterdir())
        splits = [] if has_images else list_folders(folder)
        if splits:
            return {n: folder / n for n in splits}, {n: other / n for n in splits}
        return {'train': folder}, {'train': other}
    splits = [name for name in list_folders(root) if (root / name / IMAGES).is_dir()]
    if not splits:
        kinds = ' or '.join(ending[1:].upper() for ending in truth.endings)
        raise UserError(
            f'{title}: has no folder {IMAGES}; put the images into {root}/{IMAGES} and {kinds} '
            f'files with the same names into {root}/{truth.folders[0]}'
        )
    truth_folders = {name: _truth_folder(root / name, truth, title) for name in splits}
    return {name: root / name / IMAGES for name in splits}, truth_folders


def _truth_folder(root: pathlib.Path, truth: Truth, title: str) -> pathlib.Path:
    for name in truth.folders:
        if (root / name).is_dir():
            return root / name
    raise UserError(f'{title}: has {root / IMAGES}, but no folder {root / truth.folders[0]}')


def list_folders(folder: pathlib.Path) -> list[str]:
    """List the subfolders that are not hidden, sorted."""
    return sorted(
        child.name
        for child in folder.iterdir()
        if child.is_dir() and not child.name.startswith('.')
    )


def pair_files(
    folder: pathlib.Path, truth_folder: pathlib.Path, truth: Truth, title: str
) -> list[tuple[str, str]]:
    """Pair image names with their files, in a fixed shuffled order.

    Raises:
      UserError: if there are no images, or a file is missing.
    """
    names = [name for name in listing.files_below(folder) if is_image(name)]
    if not names:
        raise UserError(f'{title}: no image below {folder}')
    existing = set(listing.files_below(truth_folder)) if truth_folder.is_dir() else set()
    by_key = {_lower_ending(name, truth): name for name in existing}  # 0.PNG belongs to 0.jpg
    stems = [name.rpartition('.')[0].removesuffix(truth.suffixes[0]) for name in names]
    pairs = []
    for name, stem in zip(names, stems, strict=True):
        keys = [f'{stem}{truth.suffixes[1]}{ending}' for ending in truth.endings]
        pairs.append((name, next((by_key[key] for key in keys if key in by_key), keys[0])))
    if missing := [pair for pair in pairs if pair[1] not in existing]:
        name, other = missing[0]
        stem = other.rpartition('.')[0]
        wrong = next((file for file in existing if file.rpartition('.')[0] == stem), None)
        kinds = ' or '.join(ending[1:].upper() for ending in truth.endings)
        hint = f'; {truth_folder / wrong} is not a {kinds} file' if wrong else ''
        count = f' ({len(missing):,} of {len(names):,} lack {truth.name}s)'
        raise UserError(
            f'{folder / name}: its {truth.name} {truth_folder / other} is missing{hint}'
            f'{count if len(missing) > 1 else ""}'
        )
    unused = existing - {pair[1] for pair in pairs}
    endings = tuple(truth.suffixes[1] + ending for ending in truth.endings)
    if count_unused := sum(_lower_ending(name, truth).endswith(endings) for name in unused):
        listing.warn_once(
            f'{truth_folder}: ignoring {count_unused} {truth.name}s without an image in {folder}'
        )
    return shuffle(pairs)


def shuffle(pairs: Sequence[tuple[str, str]]) -> list[tuple[str, str]]:
    """Return the pairs in a shuffled order that depends only on their number."""
    count = len(pairs)
    order = batches.shuffled(np.arange(count), size=count, seed=0, epoch=0)
    return [pairs[i] for i in order.tolist()]


def _lower_ending(name: str, truth: Truth) -> str:
    """Convert the ending of a file's name to lower case, if it is one of the truth's."""
    stem, dot, ending = name.rpartition('.')
    return f'{stem}{dot}{ending.lower()}' if dot + ending.lower() in truth.endings else name
