"""What tells of a thread that hangs: an exception, and where every thread is."""

from __future__ import annotations

import sys
import threading
import traceback


class Stalled(Exception):
    """The data loader has yielded nothing for too long; the message has all stacks.

    The thread that hangs cannot be ended: leave the process by `os._exit`.
    """


def stacks() -> str:
    """What every thread of this process is doing."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    return '\n'.join(
        f'-- {names.get(ident, ident)}\n{"".join(traceback.format_stack(frame))}'
        for ident, frame in sys._current_frames().items()
    )
