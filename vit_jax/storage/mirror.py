"""Growing files of a run folder in object storage, which cannot append."""

from __future__ import annotations

import concurrent.futures
import logging
import pathlib
import tempfile

from vit_jax.errors import UserError
from vit_jax.storage import paths

_log = logging.getLogger(__name__)


class Mirror:
    """A local folder for growing files, and their copies in a remote folder.

    A thread uploads whole files. If the folder is local, `folder` is that folder itself and
    there is nothing to upload.

    Attributes:
      folder: the local one to write to.
      uploads: whether it is a copy of a remote one.
    """

    def __init__(self, remote: paths.Path):
        self.folder, self._remote = remote, remote
        self.uploads = paths.is_remote(remote)
        if not self.uploads:
            return
        self._spool = tempfile.TemporaryDirectory(prefix='vit_jax-')
        self.folder = pathlib.Path(self._spool.name) / remote.name
        self.folder.mkdir()
        self._thread = concurrent.futures.ThreadPoolExecutor(1, 'mirror')
        self._sent: dict[str, tuple[int, int]] = {}
        self._last: concurrent.futures.Future[None] | None = None

    def fetch(self, name: str) -> None:
        """Download a file of the remote folder, if it exists."""
        if not self.uploads:
            return
        if (text := paths.read_text(self._remote / name, errors='replace')) is not None:
            (self.folder / name).write_text(text, encoding='utf-8')

    def publish(self) -> None:
        """Start uploading changed files, unless an upload is still under way."""
        if not self.uploads or (self._last and not self._last.done()):
            return
        self._last = self._thread.submit(self._try_to_put)

    def flush(self) -> None:
        """Upload changed files, and wait for it."""
        if self.uploads:
            self._thread.submit(self._try_to_put).result()

    def close(self) -> None:
        """Upload the last changes.

        Raises:
          UserError: if object storage cannot be reached.
        """
        if not self.uploads:
            return
        self._thread.shutdown()
        with self._spool:
            self._put()

    def _try_to_put(self) -> None:
        try:
            self._put()
        except UserError as error:
            _log.warning('%s; it is tried again', error)

    def _put(self) -> None:
        for file in self.folder.iterdir():
            status = file.stat()
            now = status.st_size, status.st_mtime_ns
            if self._sent.get(file.name) != now:
                paths.write_atomic(self._remote / file.name, file.read_bytes())
                self._sent[file.name] = now
