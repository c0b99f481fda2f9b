"""Processes that end with the one that started them, in whatever way that one ends."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable


def end_with_parent(clean_up: Callable[[], None]) -> None:
    """End this process when its standard input does, a pipe of which its parent has the other end.

    Not even SIGKILL leaves a pipe open, and a parent that is gone before this is called has closed
    it as well. Whoever starts the process writes nothing into the pipe.

    Args:
      clean_up: called before the end, in a thread.
    """

    def wait() -> None:
        sys.stdin.buffer.read()
        clean_up()
        os._exit(1)

    threading.Thread(target=wait, name='lifeline', daemon=True).start()
