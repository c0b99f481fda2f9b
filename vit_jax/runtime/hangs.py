"""Diagnosis of hanging threads: an exception, and the stacks of all threads."""

from __future__ import annotations

import sys
import threading
import traceback


class Stalled(Exception):
    """The data loader has yielded nothing for too long; the message contains all stacks.

    The hanging thread cannot be ended: leave the process by `os._exit`.
    """


def stacks() -> str:
    """The stack traces of all threads of this process."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    return '\n'.join(
        f'-- {names.get(ident, ident)}\n{"".join(traceback.format_stack(frame))}'
        for ident, frame in sys._current_frames().items()
    )
