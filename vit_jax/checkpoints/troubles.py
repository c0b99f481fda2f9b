"""Errors of a failed save: their reason, and filters of redundant tracebacks."""

from __future__ import annotations

import functools
import logging
import os
import re
import sys
import traceback
import warnings
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
    for name in ('asyncio', 'concurrent.futures'):
        logging.getLogger(name).addFilter(_not_unheard)
    never_begun = r"coroutine '\S*(serialize|write)\S*' was never awaited"
    warnings.filterwarnings('ignore', never_begun, RuntimeWarning)


def _not_of_late_writes(before: Callable[[Any], Any], unraisable: Any) -> None:
    """Pass on to the hook `before` what is about anything else."""
    if 'Event loop is closed' not in str(unraisable.exc_value):
        before(unraisable)


def _not_unheard(record: logging.LogRecord) -> bool:
    """Logging filter that drops messages on such a write, of its task or its future.

    A task names its code in the message. A future does not, so its traceback is searched.
    """
    _, error, trace = record.exc_info or (None, None, None)
    if 'Event loop is closed' in str(error):
        return False
    told = record.getMessage()
    files = (frame.f_code.co_filename for frame, _ in traceback.walk_tb(trace))
    of_orbax = any('orbax' in text for text in (told, *files))
    return not (of_orbax and ('was never retrieved' in told or 'was destroyed but' in told))


def not_of_a_failed_save(record: logging.LogRecord) -> bool:
    """Logging filter that drops what Orbax says of a save that fails.

    Orbax logs the exception with a traceback at every layer, several hundred lines, and may miss
    metadata in the unfinished folder; the same exception is then raised to `Checkpointer`.
    """
    of_orbax, said = f'{os.sep}orbax{os.sep}' in record.pathname, record.getMessage()
    unfinished = 'Metadata file' in said and 'orbax-checkpoint-tmp' in said
    return not (of_orbax and (record.exc_info or unfinished))
