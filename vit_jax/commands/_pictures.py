"""Writes the pictures of commands."""

from __future__ import annotations

import io
import pathlib
from collections.abc import Iterable, Sequence
from typing import Any

from vit_jax.errors import UserError


def save_figure(figure: Any, path: str | pathlib.Path, flag: str) -> Any:
    """Writes a figure, and returns its path.

    Raises:
      UserError: if it cannot be written; `flag` is what named the path.
    """
    from vit_jax.viz import figures

    try:
        return figures.save(figure, path)
    except OSError as e:
        raise UserError(f'{flag} {str(path)!r} cannot be written: {e.strerror}') from e


def save_images(
    images: Iterable[Any], of: Sequence[str | pathlib.Path], folder: str, flag: str
) -> Any:
    """Writes an image for each file `of` which it was made, as NAME.png, and returns the folder.

    Args:
      images: uint8 [Y X 3]; the next is made when the last is written.
      of: the files.
      folder: made if missing.
      flag: what named the folder.

    Raises:
      UserError: if one cannot be written.
    """
    from PIL import Image

    from vit_jax.storage import paths

    target = paths.path(folder)
    try:
        paths.make_folder(target)
        for image, file in zip(images, of, strict=True):
            encoded = io.BytesIO()
            Image.fromarray(image).save(encoded, format='png')
            paths.write_atomic(target / _name(file), encoded.getvalue())
    except OSError as e:
        raise UserError(f'{flag} {folder!r} cannot be written: {e.strerror}') from e
    return target


def check_names(of: Sequence[str | pathlib.Path], folder: str, flag: str) -> None:
    """Raises UserError if `save_images` would write over one of the files, or one image twice."""
    taken = {pathlib.Path(file).resolve() for file in of}
    for file in of:
        path = (pathlib.Path(folder) / _name(file)).resolve()
        if path in taken:
            raise UserError(
                f'{flag} {folder!r}: {_name(file)} is a file given, or that of another one: choose '
                'another folder, or give one file of a name'
            )
        taken.add(path)


def _name(file: str | pathlib.Path) -> str:
    return f'{pathlib.Path(file).stem}.png'
