"""Check that the servers of object storage answer.

Without a network, gcsfs would retry each request for half a minute.
"""

from __future__ import annotations

import errno
import functools
import logging
import os
import socket
import time
import urllib.parse
import urllib.request

from vit_jax.errors import Unavailable, causes

GOOGLE = 'https://storage.googleapis.com'
TRIES = 3
SECONDS = 10.0  # for a connection
PAUSE = 1.0  # between two tries
TEMPORARY = (408, 425, 429)  # HTTP's client errors that time may mend
NETWORK = (
    *(errno.ENETDOWN, errno.ENETUNREACH, errno.EHOSTDOWN, errno.EHOSTUNREACH, errno.ETIMEDOUT),
    *(errno.ECONNREFUSED, errno.ECONNRESET, errno.ECONNABORTED, errno.EPIPE, errno.EBUSY),
)
# Classes of botocore, aiohttp and http.client that derive from no error of Python's.
LIBRARIES = {'HTTPClientError', 'IncompleteReadError', 'ClientPayloadError', 'IncompleteRead'}


class Unreachable(Unavailable):
    """A server does not answer."""


def is_network_error(error: BaseException) -> bool:
    """Return whether an error, or one that it was raised from, is of the network or a busy server.

    Libraries of the web derive theirs from OSError, without a number.
    """
    for cause in causes(error):
        status = getattr(cause, 'code', getattr(getattr(cause, 'response', None), 'status_code', 0))
        if isinstance(status, int) and status >= 400:
            return status in TEMPORARY or status >= 500
        if isinstance(cause, Unreachable | ConnectionError | TimeoutError | socket.gaierror):
            return True
        if LIBRARIES & {kind.__name__ for kind in type(cause).__mro__}:
            return True
        if isinstance(cause, FileNotFoundError | PermissionError):
            return False
        if isinstance(cause, OSError) and not isinstance(cause, ValueError):  # such as a wrong URL
            return cause.errno is None or cause.errno in NETWORK
    return False


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


def require_web_server(address: str, server: str) -> None:
    """Check that a server accepts connections; files, and servers behind a proxy, are not checked.

    Args:
      address: Address of the server, or of files.
      server: Its name, for the message.

    Raises:
      Unreachable: if it does not within a few seconds.
    """
    if address.startswith(('http://', 'https://')) and not urllib.request.getproxies():
        require_connection(address, server, tries=2, seconds=5.0)


@functools.cache
def connect(url: str, server: str) -> None:
    """Check as `require_connection`, once for each server that accepts."""
    require_connection(url, server)


def require_connection(url: str, server: str, tries: int = TRIES, seconds: float = SECONDS) -> None:
    """Check that a server accepts connections.

    Args:
      url: Address of the server.
      server: Its name, for the message.
      tries: Number of attempts.
      seconds: Time limit for a connection.

    Raises:
      Unreachable: if it does not within a few seconds.
    """
    url_parts = urllib.parse.urlsplit(url if '://' in url else f'http://{url}')
    host, port = (
        url_parts.hostname or '',
        url_parts.port or (443 if url_parts.scheme == 'https' else 80),
    )
    for attempt in range(tries):
        try:
            socket.create_connection((host, port), seconds).close()
        except OSError as error:
            reason = error.strerror or str(error)
        else:
            return
        if attempt < tries - 1:
            time.sleep(PAUSE)
    raise Unreachable(
        f'{server} cannot be reached: nothing answers at {host}:{port} ({reason}); is this machine '
        'connected to the network?'
    )
