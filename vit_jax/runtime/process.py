"""Start and end of this process: its time, Ctrl-C, exit with its parent or despite threads."""

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

RETRY_SECONDS = 0.01  # until an interrupt is raised again
READS_SECONDS = 5.0  # for reads of data whose batches are no longer needed

_start_time: float | None = None
_interrupts: list[int] = []


def record_start() -> None:
    """Record when the process began; for processes that run a single command."""
    global _start_time
    age = time.process_time()  # without /proc: the CPU time so far
    with contextlib.suppress(OSError, ValueError, IndexError):
        fields = pathlib.Path('/proc/self/stat').read_text().rpartition(')')[2].split()
        ticks = int(fields[19]) / os.sysconf('SC_CLK_TCK')  # proc(5): starttime, since boot
        age = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks
    _start_time = time.time() - age


def start_time() -> float | None:
    """Return the recorded Unix time; None in a process that does not run a single command."""
    return _start_time


def remember_interrupts() -> None:
    """Remember that Ctrl-C was pressed, in addition to raising KeyboardInterrupt.

    Interrupted code may turn KeyboardInterrupt into another exception, as imports of compiled
    modules do. If SIGINT is ignored, as under nohup, it stays ignored.
    """
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _receive)
        sys.unraisablehook = _raise_later


def _receive(number: int, frame: FrameType | None) -> None:
    _interrupts.append(number)
    if _loads_compiled_module(frame):
        _interrupt_soon()
    else:
        raise KeyboardInterrupt


def _loads_compiled_module(frame: FrameType | None) -> bool:
    """Return whether a compiled module is being initialized; many crash if that is interrupted."""
    while frame is not None:
        if isinstance(frame.f_locals.get('self'), importlib.machinery.ExtensionFileLoader):
            return True
        frame = frame.f_back
    return False


def _raise_later(unraisable: Any) -> None:
    """Interrupt again if Python dropped it in a destructor or garbage collector callback."""
    if issubclass(unraisable.exc_type, KeyboardInterrupt):
        _interrupt_soon()
    else:
        sys.__unraisablehook__(unraisable)


def _interrupt_soon() -> None:
    main = threading.main_thread().ident
    threading.Timer(RETRY_SECONDS, signal.pthread_kill, (main, signal.SIGINT)).start()


def was_interrupted(error: BaseException) -> bool:
    """Return whether Ctrl-C ended the command."""
    return isinstance(error, KeyboardInterrupt) or bool(_interrupts)


def report_interrupt(error: BaseException) -> int:
    """Print one line that the command was interrupted, and return the exit code."""
    hint = f': {error}' if isinstance(error, KeyboardInterrupt) and str(error) else ''
    print(f'interrupted{hint}', file=sys.stderr)
    return EXIT_INTERRUPTED


def end_with_parent(clean_up: Callable[[], None]) -> None:
    """End this process when its standard input closes: a pipe whose other end the parent holds.

    The pipe closes even if the parent was killed by SIGKILL, or ended before this call. The parent
    must not write to it.

    Args:
      clean_up: Function called in a thread before the end.
    """

    def wait() -> None:
        sys.stdin.buffer.read()
        clean_up()
        os._exit(1)

    threading.Thread(target=wait, name='lifeline', daemon=True).start()


def exit_if_threads_hang(code: int) -> None:
    """Leave the job; exit at once if interrupted, or if a thread that was left behind may hang.

    An ordinary exit waits for all threads, including those that read batches ahead. It would also
    leave the job again if that failed.
    """
    if code != EXIT_INTERRUPTED:
        processes = sys.modules.get('vit_jax.runtime.processes')  # needs JAX
        has_left = processes is None or processes.leave(code)  # waits for the others of the job
        if (
            has_left
            and not watchdog.has_abandoned_thread()
            and watchdog.wait_for_reads(READS_SECONDS)
        ):
            return
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
