"""The time at which this process began."""

from __future__ import annotations

import contextlib
import os
import pathlib
import time

_known: list[float] = []


def note() -> None:
    """Note when the process began, which has nothing to do but one command."""
    age = time.process_time()  # where the system does not tell: what it has computed so far
    with contextlib.suppress(OSError, ValueError, IndexError):
        fields = pathlib.Path('/proc/self/stat').read_text().rpartition(')')[2].split()
        ticks = int(fields[19]) / os.sysconf('SC_CLK_TCK')  # proc(5): starttime, since boot
        age = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks
    _known[:] = [time.time() - age]


def noted() -> float | None:
    """The Unix time noted; None in a process that does other things too."""
    return _known[0] if _known else None
