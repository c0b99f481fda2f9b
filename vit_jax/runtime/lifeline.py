"""Child processes that end with their parent, however the parent ends."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable


def end_with_parent(clean_up: Callable[[], None]) -> None:
    """End this process when its standard input closes: a pipe whose other end the parent holds.

    The pipe closes even if the parent was killed by SIGKILL, or ended before this call. The parent
    must write nothing into it.

    Args:
      clean_up: called before the end, in a thread.
    """

    def wait() -> None:
        sys.stdin.buffer.read()
        clean_up()
        os._exit(1)

    threading.Thread(target=wait, name='lifeline', daemon=True).start()
