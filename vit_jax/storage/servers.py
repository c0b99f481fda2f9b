"""Check that the servers of object storage answer.

Without a network, gcsfs would retry each request for half a minute.
"""

from __future__ import annotations

import functools
import logging
import os
import socket
import time
import urllib.parse
import urllib.request

from vit_jax.errors import UserError

GOOGLE = 'https://storage.googleapis.com'
TRIES = 3
SECONDS = 10.0  # for a connection
PAUSE = 1.0  # between two tries


class Unreachable(UserError):
    """A server does not answer."""


def quiet_gcsfs() -> None:
    """Silence the log of gcsfs, whose errors callers report, unless `GCSFS_DEBUG` is set."""
    if 'GCSFS_DEBUG' not in os.environ:
        logging.getLogger('gcsfs').setLevel(logging.CRITICAL)


def require_answer(scheme: str) -> None:
    """Check once that the server of `gs://` accepts connections; other schemes are not checked.

    With a proxy, the check is left to the libraries.

    Raises:
      Unreachable: if it does not within a few seconds.
    """
    if scheme in ('gs', 'gcs') and not urllib.request.getproxies():
        connect(os.environ.get('STORAGE_EMULATOR_HOST') or GOOGLE, 'gs://')


@functools.cache
def connect(url: str, what: str) -> None:
    """Check once that a server accepts connections.

    Args:
      url: address of the server.
      what: its name, for the message.

    Raises:
      Unreachable: if it does not within a few seconds.
    """
    parts = urllib.parse.urlsplit(url if '://' in url else f'http://{url}')
    host, port = parts.hostname or '', parts.port or (443 if parts.scheme == 'https' else 80)
    for attempt in range(TRIES):
        try:
            socket.create_connection((host, port), SECONDS).close()
        except OSError as error:
            reason = error.strerror or str(error)
        else:
            return
        if attempt < TRIES - 1:
            time.sleep(PAUSE)
    raise Unreachable(
        f'{what} cannot be reached: nothing answers at {host}:{port} ({reason}); is this machine '
        'connected to the network?'
    )
