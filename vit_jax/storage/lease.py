"""The lock of a folder in object storage: an object that its owner renews.

Every write names the generation of the object that it replaces, and the storage refuses it if
another write came first: of several runs that want the folder, one gets it.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import pathlib
import sys
import threading
import time
import uuid
from collections.abc import Callable
from typing import Any

Record = dict[str, Any]
Refused = Callable[[Record], Exception]

EXIT_LOST = 1
_log = logging.getLogger(__name__)


def open_store(folder: pathlib.Path) -> Any:
    """Open a remote folder with TensorStore, which can make a write conditional."""
    import tensorstore

    scheme, _, rest = os.fspath(folder).partition('://')
    bucket, _, prefix = rest.partition('/')
    driver = {'gs': 'gcs', 's3': 's3'}[scheme]
    spec = {'driver': driver, 'bucket': bucket, 'path': f'{prefix}/' if prefix else ''}
    # TensorStore reads all variables for S3 except that of the endpoint.
    endpoint = os.environ.get('AWS_ENDPOINT_URL_S3') or os.environ.get('AWS_ENDPOINT_URL')
    if scheme == 's3' and endpoint:
        spec |= {'endpoint': endpoint, 'aws_region': os.environ.get('AWS_REGION', 'us-east-1')}
    return tensorstore.KvStore.open(spec).result()


class Lease:
    """The object `name` in a store, held by this process until `release`.

    Args:
      store: as from `open_store`.
      name: of the object.
      record: describes its owner.
      silent_seconds: an owner that has not renewed it for so long counts as dead.
      refused: the owner's record -> the exception to raise if the owner lives.
    """

    def __init__(
        self, store: Any, name: str, record: Record, silent_seconds: float, refused: Refused
    ):
        self._store, self._name = store, name
        self._record = {**record, 'token': uuid.uuid4().hex, 'beats': 0}
        before = store.read(name).result()
        if before.state == 'value':

            def is_renewed() -> bool:
                return store.read(name).result().stamp.generation != before.stamp.generation

            wait_for_silence(owner_of(before.value), silent_seconds, is_renewed, refused)
        self._generation = before.stamp.generation
        if not self.renew():
            raise refused(owner_of(store.read(name).result().value))

    def renew(self) -> bool:
        """Show that the owner is alive; return False if the object is no longer its own.

        A deleted object is made again, unless another owner comes first.
        """
        self._record['beats'] += 1
        if self._write(json.dumps(self._record).encode()):
            return True
        # If the answer to a write got lost, its repetition is refused although it succeeded.
        found = self._store.read(self._name).result()
        if found.state == 'missing':
            self._generation = found.stamp.generation
            return self._write(json.dumps(self._record).encode())
        if owner_of(found.value).get('token') != self._record['token']:
            return False
        self._generation = found.stamp.generation
        return True

    def release(self) -> None:
        """Delete the object if it is still this process's."""
        try:
            self._write(None)
        except (ValueError, OSError) as error:  # the run's files are complete all the same
            _log.warning('%r could not be deleted: %s', self._name, error)

    def _write(self, content: bytes | None) -> bool:
        stamp = self._store.write(self._name, content, if_equal=self._generation).result()
        if not stamp.generation:
            return False
        self._generation = stamp.generation
        return True


def describe(owner: Record) -> str:
    """Describe the owner of a folder for a message."""
    return ', '.join(f'{k} {owner.get(k, "unknown")}' for k in ('host', 'pid', 'since'))


def owner_of(content: bytes | None) -> Record:
    """The record of an owner in a file or object; empty without one."""
    try:
        owner = json.loads(content or b'')
    except ValueError:
        return {}
    return owner if isinstance(owner, dict) else {}


def wait_for_silence(
    owner: Record, seconds: float, is_renewed: Callable[[], bool], refused: Refused
) -> None:
    """Wait until an owner that may live elsewhere has proved dead.

    Args:
      owner: its record.
      seconds: without a renewal, after which it counts as dead.
      is_renewed: whether it has shown that it lives.
      refused: the owner's record -> the exception to raise if it has.
    """
    _log.warning(
        'waiting %g s to see whether the run that held the lock is alive: %s',
        seconds,
        describe(owner),
    )
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        time.sleep(min(0.5, seconds))
        if is_renewed():
            raise refused(owner)


def keep(held: contextlib.ExitStack, lease: Lease, folder: pathlib.Path, seconds: float) -> None:
    """Renew the lease every so many seconds until `held` is closed, which releases it.

    If the process was suspended for so long that another took over, it ends at once: both would
    write the same files.
    """
    stop = threading.Event()

    def beat() -> None:
        while not stop.wait(seconds):
            with contextlib.suppress(ValueError, OSError):  # the network may come back
                if not lease.renew():
                    print(f'error: another run has taken over {folder}', file=sys.stderr)
                    os._exit(EXIT_LOST)

    thread = threading.Thread(target=beat, daemon=True)
    thread.start()
    held.callback(lease.release)
    held.callback(thread.join)
    held.callback(stop.set)
