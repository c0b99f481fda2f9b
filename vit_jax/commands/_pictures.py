"""Writes the pictures of commands."""

from __future__ import annotations

import io
import pathlib
from collections.abc import Iterable, Sequence
from typing import Any

from vit_jax.commands._parser import check_output, writing
from vit_jax.errors import UserError


def save_figure(figure: Any, path: str | pathlib.Path, flag: str) -> Any:
    """Writes a figure, and returns its path.

    Raises:
      UserError: if it cannot be written; names `flag`, which gave the path.
    """
    from vit_jax.viz import figures

    with writing(path, flag):
        return figures.save(figure, path)


def check_picture(path: str | pathlib.Path, flag: str) -> None:
    """Raise UserError that names the flag if the picture it gives has another format, or could not
    be written.
    """
    from vit_jax.viz import figures

    figures.check_format(path, flag)
    check_output(path, flag)


def is_folder(out: str) -> bool:
    """Whether `--out` names a folder for images, not a single picture of all."""
    from vit_jax.storage import paths

    path = paths.path(out)
    return path.is_dir() or not path.suffix


def image_names(files: Sequence[str | pathlib.Path], samples: int | None = None) -> list[str]:
    """NAME.png for each file, or NAME_0.png, NAME_1.png, ... for its samples."""
    endings = [''] if samples is None else [f'_{i}' for i in range(samples)]
    return [f'{pathlib.Path(file).stem}{ending}.png' for file in files for ending in endings]


def save_images(images: Iterable[Any], names: Sequence[str], folder: str, flag: str) -> Any:
    """Writes images, and returns the folder.

    Args:
      images: uint8 [Y X 3]; the next is made when the last is written.
      names: of `image_names`.
      folder: made if missing.
      flag: that named the folder.

    Raises:
      UserError: if one cannot be written.
    """
    from PIL import Image

    from vit_jax.storage import paths

    target = paths.path(folder)
    with writing(folder, flag):
        paths.make_folder(target)
        for image, name in zip(images, names, strict=True):
            encoded = io.BytesIO()
            Image.fromarray(image).save(encoded, format='png')
            paths.write_atomic(target / name, encoded.getvalue())
    return target


def check_names(
    names: Sequence[str], files: Sequence[str | pathlib.Path], folder: str, flag: str
) -> None:
    """Raises UserError if `save_images` would overwrite one of the files, or one of its images."""
    taken = {pathlib.Path(file).resolve() for file in files}
    for name in names:
        path = (pathlib.Path(folder) / name).resolve()
        if path in taken:
            raise UserError(
                f'{flag} {folder!r}: {name} is a file given, or that of another one: choose '
                'another folder, or give one file of a name'
            )
        taken.add(path)
