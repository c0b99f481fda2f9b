"""The file of the metrics while a run appends to it."""

from __future__ import annotations

import os
import pathlib
from collections.abc import Callable

from vit_jax.storage import lock
from vit_jax.storage.paths import write_atomic


class Lines:
    """A file that lines are appended to; what a full disk cuts off goes on once there is room.

    Args:
      path: of the file.
      held: the check of its folder's lock.
      say: prints a line for the user.
    """

    def __init__(
        self,
        path: pathlib.Path,
        held: lock.Check = lambda: None,
        say: Callable[[str], None] = lambda _: None,
    ):
        self._path, self._held, self._say = path, held, say
        self._file = path.open('a+b', buffering=0)
        self._file.seek(0)
        size = os.fstat(self._file.fileno()).st_size
        self._written, self._unwritten = bytearray(self._file.read(size)), b''

    def add(self, line: str) -> None:
        self._unwritten += line.encode() + b'\n'

    def write(self) -> None:
        """Write what has been added.

        A file that others have deleted, replaced, cut off or added to is written again. A folder
        that was deleted is left to the next save to report.

        Raises:
          OSError: if that fails.
          lock.Taken: if another run has taken over the folder.
        """
        if self._path.parent.is_dir():
            self._held()
            if not self._is_whole():
                self._write_again()
        while self._unwritten:
            count = self._file.write(self._unwritten)
            self._written += self._unwritten[:count]
            self._unwritten = self._unwritten[count:]

    def close(self) -> None:
        """Write what has been added, and wait until the disk has it."""
        with self._file:
            self.write()
            os.fsync(self._file.fileno())

    def _is_whole(self) -> bool:
        try:
            there = self._path.lstat()
        except FileNotFoundError:
            return False
        same = os.path.samestat(os.fstat(self._file.fileno()), there)
        return same and there.st_size == len(self._written)

    def _write_again(self) -> None:
        write_atomic(self._path, bytes(self._written))
        self._file.close()
        self._file = self._path.open('a+b', buffering=0)
        self._say(f'{self._path.name} was deleted or changed during the run: written again')
