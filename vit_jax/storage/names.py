"""Names of local folders and files, some of which libraries misinterpret."""

from __future__ import annotations

import pathlib
import re

from vit_jax.errors import UserError

_LONGEST = 255  # bytes of a name, on any file system in use
# TensorStore takes `\` for `/`, and Orbax's paths `/gs/` for gs://.
_TAKEN_FOR_ANOTHER = re.compile(r'[^/]*\\[^/]*|/gs:(?=/|$)|^/(gs|s3|az|hf)(?=/|$)')


def local(name: str) -> pathlib.Path:
    """The path of that name, with `~` expanded.

    Raises:
      UserError: if a part of it is too long, or its `~` is of an unknown user.
    """
    if longest := max((p for p in name.split('/') if len(p.encode()) > _LONGEST), default=''):
        raise UserError(f'{longest[:40]}...: a name of more than {_LONGEST} bytes; shorten it')
    try:
        return pathlib.Path(name).expanduser()
    except RuntimeError as error:
        home = name.partition('/')[0]
        raise UserError(f'{name}: there is no home {home}; write ./{name} for that name') from error


def require_utf8(name: str) -> None:
    """Raise UserError if Python did not read the name as UTF-8, as other layers do."""
    try:
        name.encode()
    except UnicodeEncodeError as error:
        raise UserError(
            f'{name!a} is not read as UTF-8: set PYTHONUTF8=1 or a UTF-8 locale, or rename it'
        ) from error


def require_storable(name: str) -> None:
    """Raise UserError if TensorStore or epath would take the absolute path for another."""
    require_utf8(name)
    if taken := _TAKEN_FOR_ANOTHER.search(name):
        raise UserError(
            f'{name}: arrays cannot be stored below a folder named {taken[0].strip("/")!r}; '
            'choose another name'
        )
