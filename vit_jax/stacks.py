"""Where every thread of this process is, for the message of one that hangs."""

from __future__ import annotations

import sys
import threading
import traceback


def stacks() -> str:
    """What every thread of this process is doing."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    return '\n'.join(
        f'-- {names.get(ident, ident)}\n{"".join(traceback.format_stack(frame))}'
        for ident, frame in sys._current_frames().items()
    )
