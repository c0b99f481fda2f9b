"""`folder:PATH`: JPEG, PNG or WebP files in a folder for each class.

    PATH/SPLIT/CLASS/*.jpg    splits are the folders
    PATH/CLASS/*.jpg          a single split, `train`
    PATH/labels.csv           lists the images with their classes, see `sources.table`
    PATH/{label}_*.jpg        classes are parts of the files' names

`labels.csv` or `labels.parquet` may also be beside a folder of images without subfolders. In a
pattern, `{label}` and `{split}` are any characters of a name, as many as possible, and `*` any
others; images without a match are left out.

Classes are sorted by name, or by number if all are numbers, as in ImageNet-v2. Files may be in
subfolders of their class. A folder without an image in any split is not a class, nor is a hidden or
a system folder. The files of a split have a fixed shuffled order, so that `train[:90%]` and
`train[90%:]` both have all classes. A split whose only folder training lacks, such as
`val/images`, has no classes. Long lists of files are kept, see `data/listing.py`.
"""

from __future__ import annotations

import collections
import itertools
import os
import pathlib
import re
from collections.abc import Sequence

from vit_jax.data import class_names, listing
from vit_jax.data.records import UnknownSplit
from vit_jax.data.sources import table
from vit_jax.data.sources.table import (
    IMAGES,
    Files,
    ImageFiles,
    in_utf8,
    is_image,
    sorted_names,
)
from vit_jax.errors import UserError, nearest, one_line

TABLE = 'labels'  # with one of table.TABLES
FIELD = re.compile(r'\{(\w*)\}')
FIELDS = {'label': '(?P<label>[^/]+)', 'split': '(?P<split>[^/]+)'}
SYSTEM = ('__MACOSX', '__pycache__', '@eaDir', '$RECYCLE.BIN', 'System Volume Information')
SPLITS = {'train', 'validation', 'valid', 'val', 'dev', 'test'}


class Source(ImageFiles):
    """One split of a folder of images; all splits have the same classes."""

    def __init__(self, path: str, split: str):
        root, title = pathlib.Path(path).expanduser(), f'source folder:{path}'
        if FIELD.search(path) and not root.exists():
            files = _by_pattern(path, split, title)
        elif (found := _find_table(root)) is not None:
            files = table.read(found, root if root.is_dir() else root.parent, split, title)
        else:
            files = _by_folders(root, split, title)
        super().__init__(title, files)


def _find_table(root: pathlib.Path) -> pathlib.Path | None:
    """The table of the images in a folder; None if their folders are their classes."""
    if root.is_file() and root.suffix.lower() in table.TABLES:
        return root
    if not root.is_dir():
        return None
    flat = _has_images(root) and not _folders(root)
    for folder in (root, *([root.absolute().parent] if flat else [])):
        found = [file for end in table.TABLES if (file := folder / f'{TABLE}{end}').is_file()]
        if len(found) > 1:
            raise UserError(f'{found[0]} and {found[1].name}: which one counts? remove the other')
        if found:
            return found[0]
    return None


def _by_pattern(path: str, split: str, title: str) -> Files:
    """The images whose names match a pattern, such as '/data/pets/{label}_*.jpg'."""
    fixed = re.split(r'[{*]', path, maxsplit=1)[0].rpartition('/')[0]
    root = pathlib.Path(fixed or ('/' if path.startswith('/') else '.')).expanduser()
    inside = path[len(fixed) :].lstrip('/')
    fields = FIELD.findall(inside)
    if unknown := [field for field in fields if field not in FIELDS]:
        raise UserError(f'{title}: {nearest("field", unknown[0], FIELDS)}')
    if 'label' not in fields or len(set(fields)) < len(fields):
        raise UserError(f'{title}: write {{label}} once, and {{split}} at most once')
    if not root.is_dir():
        raise UserError(f'{title}: there is no folder {root}')
    pieces = re.split(r'(\{\w*\}|\*)', inside)
    regex = re.compile(''.join(_as_regex(piece) for piece in pieces))
    names = [name for name in listing.files_below(root) if is_image(name)]
    if not names:
        raise UserError(f'{title}: no image ({", ".join(IMAGES)}) below {root}')
    matches = [match for name in names if (match := regex.fullmatch(name))]
    if not matches:
        raise UserError(
            f'{title}: none of the {len(names):,} images below {root} matches, such as '
            f'{one_line(in_utf8(names[0]))!r}'
        )
    if len(matches) < len(names):
        other = next(name for name in names if not regex.fullmatch(name))
        count = len(names) - len(matches)
        listing.warn_once(
            f'{title}: {count} images left out that do not match, such as {in_utf8(other)!r}'
        )
    splits = [match['split'] if 'split' in fields else 'train' for match in matches]
    if split not in splits:
        raise UnknownSplit.from_splits(title, split, sorted(set(splits)))
    labels = table.number_classes([(m['label'],) for m in matches], splits, split, title)
    chosen = [match.string for match, name in zip(matches, splits, strict=True) if name == split]
    return Files(root, chosen, *labels)


def _as_regex(piece: str) -> str:
    """A part of a pattern: a field in braces, a star, or a text between these."""
    return '[^/]*' if piece == '*' else FIELDS.get(piece.strip('{}'), re.escape(piece))


def _by_folders(root: pathlib.Path, split: str, title: str) -> Files:
    """The images of a folder for each class."""
    splits = _find_splits(root)
    if split not in splits:
        raise UnknownSplit.from_splits(title, split, splits)
    folder = splits[split]
    by_folder, beside = _list(root, folder)
    others = {name: other for name, other in splits.items() if name != split}
    empty = _without_images(by_folder, list(others.values()))
    by_split = {name: set(_folders(other)) - empty for name, other in others.items()}
    by_split[split] = {name for name, files in by_folder.items() if files}
    spelled = class_names.join_spellings(itertools.chain(*by_split.values()))
    classes = class_names.join_splits(
        {name: {spelled[label] for label in by_split[name]} for name in splits}, split, title
    )
    _report(root, folder, splits, empty, beside)
    by_class: dict[str, list[str]] = collections.defaultdict(list)
    for name in sorted(by_split[split]):
        by_class[spelled[name]] += by_folder[name]
    names = sorted_names(classes)
    if not names:
        files = list(itertools.chain(*by_class.values()))
        return Files(folder, files, (), [()] * len(files))
    files = [file for name in names for file in by_class[name]]
    labels = [(label,) for label, name in enumerate(names) for _ in by_class[name]]
    return Files(folder, files, names, labels)


def _list(root: pathlib.Path, folder: pathlib.Path) -> tuple[dict[str, list[str]], int]:
    """The images of each class's folder, and the number of images in no such folder."""
    by_class: dict[str, list[str]] = {name: [] for name in _folders(folder)}
    others = beside = 0
    for file in listing.files_below(folder):
        name, inside, _ = file.partition('/')
        if not inside:
            beside += is_image(file)
        elif is_image(file) and name in by_class:
            by_class[name].append(file)
        else:
            others += name in by_class
    kinds = ', '.join(IMAGES)
    if others:
        listing.warn_once(f'{folder}: {others} files left out that are not {kinds}')
    if not any(by_class.values()):
        raise UserError(f'source folder:{root}: no image ({kinds}) below {folder}')
    return by_class, beside


def _report(
    root: pathlib.Path,
    folder: pathlib.Path,
    splits: dict[str, pathlib.Path],
    empty: set[str],
    beside: int,
) -> None:
    """Log the folders that are not classes, and the images in no class's folder."""
    parents = {root, *splits.values()}
    if found := sorted(empty | {name for parent in parents for name in _no_classes(parent)}):
        names = ', '.join(map(in_utf8, found))
        listing.warn_once(
            f'{root}: folders left out that hold no image or belong to a system: {names}'
        )
    if beside:
        listing.warn_once(f'{folder}: {beside} images left out that lie in no folder of a class')


def _without_images(by_class: dict[str, list[str]], others: Sequence[pathlib.Path]) -> set[str]:
    """The folders of classes without an image here or in the other splits."""
    names = {*by_class, *itertools.chain(*map(_folders, others))}
    lacking = {name for name in names if not by_class.get(name)}
    return {name for name in lacking if not any(_holds_image(one / name) for one in others)}


def _holds_image(folder: pathlib.Path) -> bool:
    """Whether an image lies at any depth; stops at the first."""
    return any(any(map(is_image, files)) for _, files in listing.walk(os.fspath(folder)))


def _find_splits(root: pathlib.Path) -> dict[str, pathlib.Path]:
    if not root.is_dir():
        raise UserError(f'source folder:{root}: there is no such folder')
    children = {name: root / name for name in _folders(root)}
    if not children and _has_images(root):
        raise UserError(
            f'source folder:{root}: its images lie in no folder of a class; put those of each '
            f'class into a folder of its own, {root}/CLASS/*.jpg, or list them in '
            f"{root}/labels.csv, or name their classes by a pattern, 'folder:{root}/{{label}}_*'; "
            f'for a task that needs no classes, put all of them into {root}/all'
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
        return any(is_image(entry.name) for entry in entries)


def _folders(folder: pathlib.Path) -> list[str]:
    """The folders that may be classes or splits."""
    return [name for name in _all_folders(folder) if not _is_of_system(name)]


def _no_classes(folder: pathlib.Path) -> list[str]:
    """The hidden folders and the operating system's."""
    return [name for name in _all_folders(folder) if _is_of_system(name)]


def _is_of_system(name: str) -> bool:
    return name.startswith('.') or name in SYSTEM


def _all_folders(folder: pathlib.Path) -> list[str]:
    """The folders in a folder, without links that lead to it or above."""
    here = (os.path.realpath(folder),)
    with os.scandir(folder) as entries:
        return [
            entry.name
            for entry in entries
            if entry.is_dir()
            and not (entry.is_symlink() and listing.leads_upwards(entry.path, here))
        ]
