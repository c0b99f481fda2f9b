"""The trials of a rehearsal: their results, and those that are commands of their own."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import NamedTuple

OK, FAILED, SKIPPED = 'ok', 'failed', 'not tried'


class Row(NamedTuple):
    """The result of one trial.

    Attributes:
      name: of it.
      result: one of OK, FAILED and SKIPPED.
      seconds: that it took.
      note: what was found.
    """

    name: str
    result: str
    seconds: float
    note: str


def of_command(name: str, command: Sequence[str]) -> tuple[Row, str]:
    """The row of a command of its own, and what it printed."""
    began = time.perf_counter()
    done = subprocess.run(command, env=same_modules(), capture_output=True, text=True, check=False)
    seconds = time.perf_counter() - began
    reason = (done.stderr.strip().splitlines() or ['it does not fit'])[-1].removeprefix('error: ')
    if done.returncode:
        return Row(name, FAILED, seconds, reason), done.stdout
    return Row(name, OK, seconds, 'it fits'), done.stdout


def same_modules() -> dict[str, str]:
    """The environment of a process that imports the same modules as this one."""
    return {**os.environ, 'PYTHONPATH': os.pathsep.join(filter(None, sys.path))}
