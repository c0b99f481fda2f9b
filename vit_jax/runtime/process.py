"""The time at which this process began."""

from __future__ import annotations

import contextlib
import importlib.machinery
import os
import pathlib
import signal
import sys
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

from vit_jax.errors import EXIT_INTERRUPTED
from vit_jax.runtime import watchdog

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


_SOON = 0.01  # seconds
READS_SECONDS = 5.0  # for batches that nobody takes any more
_seen: list[int] = []


def watch() -> None:
    """Remembers that Ctrl-C was pressed, beside raising KeyboardInterrupt as Python does.

    Interrupted code may turn KeyboardInterrupt into another exception, as imports of compiled
    modules do. If SIGINT is ignored, as under nohup, it stays ignored.
    """
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _receive)
        sys.unraisablehook = _raise_later


def _receive(number: int, frame: FrameType | None) -> None:
    _seen.append(number)
    if _loads_compiled_module(frame):
        _interrupt_soon()
    else:
        raise KeyboardInterrupt


def _loads_compiled_module(frame: FrameType | None) -> bool:
    """Whether a compiled module is setting itself up: many crash if that is interrupted."""
    while frame is not None:
        if isinstance(frame.f_locals.get('self'), importlib.machinery.ExtensionFileLoader):
            return True
        frame = frame.f_back
    return False


def _raise_later(unraisable: Any) -> None:
    """Interrupts again if Python dropped it, in a destructor or a garbage collector callback."""
    if issubclass(unraisable.exc_type, KeyboardInterrupt):
        _interrupt_soon()
    else:
        sys.__unraisablehook__(unraisable)


def _interrupt_soon() -> None:
    main = threading.main_thread().ident
    threading.Timer(_SOON, signal.pthread_kill, (main, signal.SIGINT)).start()


def interrupted(error: BaseException) -> bool:
    """Whether Ctrl-C ended the command."""
    return isinstance(error, KeyboardInterrupt) or bool(_seen)


def report(error: BaseException) -> int:
    """Prints one line that the command was interrupted, and returns the exit code."""
    more = f': {error}' if isinstance(error, KeyboardInterrupt) and str(error) else ''
    print(f'interrupted{more}', file=sys.stderr)
    return EXIT_INTERRUPTED


def leave(code: int) -> None:
    """Ends the process at once if it was interrupted, or has left a thread behind that may hang.

    An ordinary exit waits for threads, also for those that read batches in advance.
    """
    if code != EXIT_INTERRUPTED:
        if not watchdog.abandoned() and watchdog.reads_end(READS_SECONDS):
            return
        if (jax := sys.modules.get('jax')) is not None:
            jax.distributed.shutdown()  # waits for the other processes, if there are any
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
