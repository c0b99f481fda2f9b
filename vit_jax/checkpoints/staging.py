"""Paths of steps for Orbax, and local copies of steps in storage that it cannot reach.

Orbax writes to local folders and to gs://, but not to s3://: there a step is written to a local
folder and uploaded, and downloaded to be restored.
"""

from __future__ import annotations

import contextlib
import fnmatch
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import jax
from etils.epath import gpath

from vit_jax.checkpoints import manifest
from vit_jax.errors import UserError
from vit_jax.storage import paths


class LiteralPath(gpath.PosixGPath):
    """Path for Orbax whose `glob` takes `[*?` in the folder's own name literally.

    Orbax globs for the arrays that it has written, and if it finds none it commits without them.
    """

    def glob(self, pattern: str) -> Iterator[LiteralPath]:
        found = [self]
        for part in pattern.split('/'):
            inside = (path for folder in found if folder.is_dir() for path in folder.iterdir())
            found = [path for path in inside if fnmatch.fnmatchcase(path.name, part)]
        return iter(found)


def literal(directory: Path) -> LiteralPath:
    """The directory, local or remote, as a path for Orbax."""
    return LiteralPath(os.fspath(directory))


class Staging:
    """The place where Orbax writes the steps of `directory`: itself, or else a local folder.

    Raises:
      UserError: if several processes would have to share a local folder.
    """

    def __init__(self, directory: Path):
        self.folder, self._directory = directory, directory
        self._local: tempfile.TemporaryDirectory[str] | None = None
        if paths.orbax_writes(directory):
            return
        if jax.process_count() > 1:
            raise UserError(
                f'{directory}: several processes save to a shared folder or to gs://, not to s3://'
            )
        self._local = tempfile.TemporaryDirectory(prefix='vit_jax-')
        self.folder = Path(self._local.name)

    def put(self, step: int) -> None:
        """Copy a step that is written but not yet committed; the mark of the commit comes last."""
        if self._local is None:
            return
        paths.copy(manifest.written(self.folder, step), self._directory / str(step))
        manifest.commit(self._directory / str(step))

    def clear(self) -> None:
        """Free the local disk once no save is under way."""
        if self._local is not None:
            for step in self.folder.iterdir():
                shutil.rmtree(step)

    def close(self) -> None:
        if self._local is not None:
            self._local.cleanup()


@contextlib.contextmanager
def here(directory: Path) -> Iterator[LiteralPath]:
    """The step's directory, or a local copy if Orbax cannot read it."""
    if paths.orbax_writes(directory):
        yield literal(directory)
        return
    with tempfile.TemporaryDirectory(prefix='vit_jax-') as local:
        paths.copy(directory, copy := Path(local) / directory.name)
        yield literal(copy)
