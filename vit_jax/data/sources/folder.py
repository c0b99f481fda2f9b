"""`folder:PATH`: JPEG, PNG or WebP files in one folder per class.

    PATH/SPLIT/CLASS/*.jpg    splits are the folders
    PATH/CLASS/*.jpg          a single split, `train`
    PATH/labels.csv           lists the images with their classes, see `sources.table`
    PATH/{label}_*.jpg        classes are parts of the file names

`labels.csv` or `labels.parquet` may also be next to a folder of images without subfolders. In a
pattern, `{label}` and `{split}` match as many characters of a name as possible, and `*` any others;
images that do not match are ignored.

Classes are sorted by name, or by number if all are numbers, as in ImageNet-v2. Files may be in
subfolders of their class. A folder without an image in any split is not a class, nor is a hidden or
system folder. The files of a split have a fixed shuffled order, so that `train[:90%]` and
`train[90%:]` both have all classes. A split whose only folder is missing from training, such as
`val/images`, has no classes. Long file lists are cached, see `data/listing.py`.
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

TABLE = 'labels'  # file name without its suffix, one of table.TABLES
FIELD = re.compile(r'\{(\w*)\}')
FIELDS = {'label': '(?P<label>[^/]+)', 'split': '(?P<split>[^/]+)'}
SYSTEM = ('__MACOSX', '__pycache__', '@eaDir', '$RECYCLE.BIN', 'System Volume Information')
SPLITS = {'train', 'validation', 'valid', 'val', 'dev', 'test'}


class Source(ImageFiles):
    """One split of a folder of images; all splits have the same classes."""

    def __init__(self, path: str, split: str):
        root, title = pathlib.Path(path).expanduser(), f'source folder:{path}'
        if FIELD.search(path) and not root.exists():
            files = _match_pattern(path, split, title)
        elif (table_file := _find_table(root)) is not None:
            files = table.read(table_file, root if root.is_dir() else root.parent, split, title)
        else:
            files = _read_folders(root, split, title)
        super().__init__(title, files)


def _find_table(root: pathlib.Path) -> pathlib.Path | None:
    """Find the table of the images in a folder; None if folders define the classes."""
    if root.is_file() and root.suffix.lower() in table.TABLES:
        return root
    if not root.is_dir():
        return None
    flat = _has_images(root) and not _folders(root)
    for folder in (root, *([root.absolute().parent] if flat else [])):
        tables = [file for end in table.TABLES if (file := folder / f'{TABLE}{end}').is_file()]
        if len(tables) > 1:
            raise UserError(f'{tables[0]} and {tables[1].name} both exist; remove one of them')
        if tables:
            return tables[0]
    return None


def _match_pattern(path: str, split: str, title: str) -> Files:
    """List the images whose names match a pattern, such as '/data/pets/{label}_*.jpg'."""
    fixed = re.split(r'[{*]', path, maxsplit=1)[0].rpartition('/')[0]
    root = pathlib.Path(fixed or ('/' if path.startswith('/') else '.')).expanduser()
    relative = path[len(fixed) :].lstrip('/')
    fields = FIELD.findall(relative)
    if unknown := [field for field in fields if field not in FIELDS]:
        raise UserError(f'{title}: {nearest("field", unknown[0], FIELDS)}')
    if 'label' not in fields or len(set(fields)) < len(fields):
        raise UserError(f'{title}: write {{label}} once, and {{split}} at most once')
    if not root.is_dir():
        raise UserError(f'{title}: the folder {root} does not exist')
    pieces = re.split(r'(\{\w*\}|\*)', relative)
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
            f'{title}: ignoring {count} images that do not match, such as {in_utf8(other)!r}'
        )
    splits = [match['split'] if 'split' in fields else 'train' for match in matches]
    if split not in splits:
        raise UnknownSplit.from_splits(title, split, sorted(set(splits)))
    labels = table.number_classes([(m['label'],) for m in matches], splits, split, title)
    split_files = [
        match.string for match, name in zip(matches, splits, strict=True) if name == split
    ]
    return Files(root, split_files, *labels)


def _as_regex(piece: str) -> str:
    """Convert a part of a pattern: a field in braces, a star, or the text between."""
    return '[^/]*' if piece == '*' else FIELDS.get(piece.strip('{}'), re.escape(piece))


def _read_folders(root: pathlib.Path, split: str, title: str) -> Files:
    """List the images of folders that are named by their classes."""
    splits = _find_splits(root)
    if split not in splits:
        raise UnknownSplit.from_splits(title, split, splits)
    folder = splits[split]
    by_folder, stray = _list_images(root, folder)
    other_splits = {name: other for name, other in splits.items() if name != split}
    empty = _find_empty_classes(by_folder, list(other_splits.values()))
    by_split = {name: set(_folders(other)) - empty for name, other in other_splits.items()}
    by_split[split] = {name for name, files in by_folder.items() if files}
    class_of = class_names.join_spellings(itertools.chain(*by_split.values()))
    classes = class_names.join_splits(
        {name: {class_of[label] for label in by_split[name]} for name in splits}, split, title
    )
    _report(root, folder, splits, empty, stray)
    by_class: dict[str, list[str]] = collections.defaultdict(list)
    for name in sorted(by_split[split]):
        by_class[class_of[name]] += by_folder[name]
    names = sorted_names(classes)
    if not names:
        files = list(itertools.chain(*by_class.values()))
        return Files(folder, files, (), [()] * len(files))
    files = [file for name in names for file in by_class[name]]
    labels = [(label,) for label, name in enumerate(names) for _ in by_class[name]]
    return Files(folder, files, names, labels)


def _list_images(root: pathlib.Path, folder: pathlib.Path) -> tuple[dict[str, list[str]], int]:
    """Return the images of each class's folder, and the number of images outside of them."""
    by_class: dict[str, list[str]] = {name: [] for name in _folders(folder)}
    ignored = stray = 0
    for file in listing.files_below(folder):
        name, relative, _ = file.partition('/')
        if not relative:
            stray += is_image(file)
        elif is_image(file) and name in by_class:
            by_class[name].append(file)
        else:
            ignored += name in by_class
    kinds = ', '.join(IMAGES)
    if ignored:
        listing.warn_once(f'{folder}: ignoring {ignored} files that are not {kinds}')
    if not any(by_class.values()):
        raise UserError(f'source folder:{root}: no image ({kinds}) below {folder}')
    return by_class, stray


def _report(
    root: pathlib.Path,
    folder: pathlib.Path,
    splits: dict[str, pathlib.Path],
    empty: set[str],
    stray: int,
) -> None:
    """Log the folders that are not classes, and the images outside of class folders."""
    parents = {root, *splits.values()}
    if ignored := sorted(empty | {name for parent in parents for name in _system_folders(parent)}):
        names = ', '.join(map(in_utf8, ignored))
        listing.warn_once(
            f'{root}: ignoring folders without images or of the operating system: {names}'
        )
    if stray:
        listing.warn_once(f'{folder}: ignoring {stray} images outside of class folders')


def _find_empty_classes(by_class: dict[str, list[str]], others: Sequence[pathlib.Path]) -> set[str]:
    """Find class folders without an image in this split or the others."""
    names = {*by_class, *itertools.chain(*map(_folders, others))}
    lacking = {name for name in names if not by_class.get(name)}
    return {name for name in lacking if not any(_holds_image(other / name) for other in others)}


def _holds_image(folder: pathlib.Path) -> bool:
    """Return whether a folder has an image at any depth."""
    return any(any(map(is_image, files)) for _, files in listing.walk(os.fspath(folder)))


def _find_splits(root: pathlib.Path) -> dict[str, pathlib.Path]:
    if not root.is_dir():
        raise UserError(f'source folder:{root}: this folder does not exist')
    children = {name: root / name for name in _folders(root)}
    if not children and _has_images(root):
        raise UserError(
            f'source folder:{root}: images are not in class folders; move each class into a '
            f'folder, {root}/CLASS/*.jpg, or list them in {root}/labels.csv, or give the classes '
            f"by a pattern, 'folder:{root}/{{label}}_*'; for a task without classes, move all "
            f'images into {root}/all'
        )
    if not children:
        raise UserError(
            f'source folder:{root}: has no folders; expected {root}/CLASS/*.jpg or '
            f'{root}/SPLIT/CLASS/*.jpg'
        )
    has_images = any(_has_images(folder) for folder in children.values())
    splits = {name: folder for name, folder in children.items() if _folders(folder)}
    # Stray images between class folders do not turn folders named like splits into classes.
    are_splits = splits.keys() == children.keys() and splits.keys() <= SPLITS
    return splits if splits and (are_splits or not has_images) else {'train': root}


def _has_images(folder: pathlib.Path) -> bool:
    with os.scandir(folder) as entries:
        return any(is_image(entry.name) for entry in entries)


def _folders(folder: pathlib.Path) -> list[str]:
    """List the folders that may be classes or splits."""
    return [name for name in _all_folders(folder) if not _is_of_system(name)]


def _system_folders(folder: pathlib.Path) -> list[str]:
    """List the hidden folders and the operating system's."""
    return [name for name in _all_folders(folder) if _is_of_system(name)]


def _is_of_system(name: str) -> bool:
    return name.startswith('.') or name in SYSTEM


def _all_folders(folder: pathlib.Path) -> list[str]:
    """List the subfolders, without links to the folder or its parents."""
    chain = (os.path.realpath(folder),)
    with os.scandir(folder) as entries:
        return [
            entry.name
            for entry in entries
            if entry.is_dir()
            and not (entry.is_symlink() and listing.leads_upwards(entry.path, chain))
        ]
