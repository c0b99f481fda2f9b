"""Errors of a failed save: their reason, and filters of redundant tracebacks."""

from __future__ import annotations

import functools
import logging
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any


class Place:
    """A local folder, held open to detect that it was deleted, and perhaps made again."""

    def __init__(self, folder: Path):
        self._folder, self._file = folder, os.open(folder, os.O_RDONLY)

    def is_gone(self) -> bool:
        try:
            return not os.path.samestat(os.fstat(self._file), self._folder.stat())
        except FileNotFoundError:
            return True

    def close(self) -> None:
        os.close(self._file)


def of_the_disk(error: BaseException | None) -> str | None:
    """The disk's reason for refusing a write, or None if the error is about something else."""
    while error is not None:
        if isinstance(error, OSError) and error.strerror:
            return error.strerror
        if number := re.search(r"os_error_code='(\d+)'", str(error)):  # TensorStore's wording
            return os.strerror(int(number[1]))
        error = error.__cause__ or error.__context__
    return None


def hide_late_writes() -> None:
    """Keep quiet about writes that end after another of the same save has failed.

    Nobody waits for these any more, and each would print a traceback, most of them before the
    failure is known here.
    """
    before = sys.unraisablehook
    if getattr(before, 'func', None) is not _not_of_late_writes:
        sys.unraisablehook = functools.partial(_not_of_late_writes, before)
    logging.getLogger('asyncio').addFilter(_not_unheard)


def _not_of_late_writes(before: Callable[[Any], Any], unraisable: Any) -> None:
    """Pass on to the hook `before` what is about anything else."""
    if 'Event loop is closed' not in str(unraisable.exc_value):
        before(unraisable)


def _not_unheard(record: logging.LogRecord) -> bool:
    """Logging filter that drops what asyncio says of such a write when it is collected."""
    said = record.getMessage()
    return 'was never retrieved' not in said or 'orbax' not in said


def not_a_traceback_of_orbax(record: logging.LogRecord) -> bool:
    """Logging filter that drops Orbax's tracebacks.

    Orbax logs a failed save at every layer, several hundred lines; the same exception is then
    raised to `Checkpointer`.
    """
    return not (record.exc_info and f'{os.sep}orbax{os.sep}' in record.pathname)
