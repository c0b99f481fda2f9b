"""Files that can be made anew, in the user's cache folder."""

from __future__ import annotations

import contextlib
import hashlib
import os
import pathlib
from collections.abc import Callable, Sequence

from vit_jax.errors import UserError
from vit_jax.storage import paths


def folder(kind: str) -> pathlib.Path:
    """The folder for files of a kind, in $XDG_CACHE_HOME or ~/.cache; it may not exist yet."""
    home = os.environ.get('XDG_CACHE_HOME') or '~/.cache'
    return pathlib.Path(home).expanduser() / 'vit_jax' / kind


def key(files: Sequence[pathlib.Path]) -> str:
    """A name for what is made of files: it changes with their paths, sizes and times."""
    digest = hashlib.sha256()
    for file in files:
        stat = file.stat()
        digest.update(f'{file.resolve()}\0{stat.st_size}\0{stat.st_mtime_ns}\n'.encode())
    return digest.hexdigest()[:32]


def made_once(file: pathlib.Path, make: Callable[[pathlib.Path], None]) -> pathlib.Path:
    """Return `file`, which `make(path)` writes if there is none; it appears whole or not at all.

    Raises:
      UserError: if the folder cannot be written to, or is full.
    """
    if file.exists():
        return file
    partial = file.with_name(f'.{file.name}.{os.getpid()}.partial')
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        make(partial)
        paths.sync(partial)
        partial.replace(file)
    except OSError as error:
        raise UserError(
            f'{file.parent}: cannot keep {file.name} ({paths.first_line(error)}): free space, or '
            'name another cache folder by XDG_CACHE_HOME'
        ) from error
    finally:
        with contextlib.suppress(OSError):
            partial.unlink(missing_ok=True)
    return file
