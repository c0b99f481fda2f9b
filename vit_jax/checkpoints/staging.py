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
from vit_jax.storage import paths, run_folder, step_folder


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


def _lasting() -> type:
    """The class of folders in which Orbax writes a step that is to survive a power cut.

    Orbax syncs the arrays, but neither the other files nor folders. Here all of them are on the
    disk before the step gets its name, and that name before the save is finished, after which older
    steps are deleted. The thread of the save does this. It reads what other processes have written
    for the manifest, and so their hosts have handed it to the shared file system.
    """
    import orbax.checkpoint as ocp  # takes a quarter of a second

    class LastingPath(ocp.path.atomicity.AtomicRenameTemporaryPath):
        async def finalize(self) -> None:
            step, checkpoints = Path(self.get_final()), Path(self.get_final()).parent
            run_folder.sync(checkpoints.parent)
            paths.sync_all(Path(self.get()))
            await super().finalize()
            for place in (step / step_folder.COMMITTED, step, checkpoints, checkpoints.parent):
                paths.sync(place)

    return LastingPath


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

    def path_class(self) -> type | None:
        """Orbax's class for the folder of a step that it writes; None for Orbax's own choice."""
        return None if paths.is_remote(self._directory) else _lasting()

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
