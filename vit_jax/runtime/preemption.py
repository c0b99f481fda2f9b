"""Orderly stops on signals."""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import signal
import sys
import threading
from collections.abc import Iterator
from types import FrameType
from typing import Any

import jax
from jax.experimental import multihost_utils

from vit_jax.errors import EXIT_INTERRUPTED
from vit_jax.runtime import processes

_log = logging.getLogger(__name__)
_ORDERLY = b'\nstopping after this step, with the state saved; Ctrl-C once more stops at once\n'
_AT_ONCE = 'the same command, started again, continues from the last checkpoint'
_UNWIND_SECONDS = 3.0  # for interrupted code to unwind after a second Ctrl-C
_AGREE_SECONDS = 10.0  # for all processes to wait for data after the same step
_NOTICE = 'RECEIVED_PREEMPTION_NOTICE'  # key by which XLA announces a SIGTERM to all processes
_calls = itertools.count(1)
_FINAL = (signal.SIGTERM, signal.SIGHUP)  # may be repeated while the state is saved


class Preemption:
    """Turns SIGTERM, SIGINT and SIGHUP into a flag that the loop reads between two steps.

    A context manager. Python lets only the main thread handle signals: in other threads, only
    `request` sets the flag, and signals keep their handlers. Further SIGTERMs and
    SIGHUPs are ignored, also after its end, so that the save and the exit are finished; a second
    SIGINT (Ctrl-C) stops at once, and ends the process after a few seconds if something hangs. If
    SIGHUP is ignored, as under nohup, it stays ignored.

    With several processes, a signal to any of them makes all of them agree on a later step;
    SIGTERM is then left to `jax.distributed`, which watches for it.

    A nested instance, such as for a run inside a worker, passes requests on to the outer one.
    """

    def __init__(self) -> None:
        self._flag = self._agreed = False
        self._outer: Any = None
        self._previous: dict[int, Any] = {}
        self._called = self._tried = 0
        self._ended = contextlib.ExitStack()

    def __enter__(self) -> Preemption:
        if threading.current_thread() is not threading.main_thread():
            return self
        self._outer = getattr(signal.getsignal(signal.SIGINT), '__self__', None)
        if isinstance(self._outer, Preemption):
            self._flag, self._agreed = self._outer._flag, self._outer._agreed
        watched = (
            [signal.SIGINT] if jax.distributed.is_initialized() else [signal.SIGINT, signal.SIGTERM]
        )
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # a closed terminal
            watched.append(signal.SIGHUP)
        self._previous = {number: signal.signal(number, self._receive) for number in watched}
        if not isinstance(self._outer, Preemption):
            self._ended.enter_context(_second_ctrl_c())
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.close()
        if self._flag:
            # At once: between the old handler and this one another signal could come.
            self._previous |= dict.fromkeys({*_FINAL} & self._previous.keys(), signal.SIG_IGN)
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        if isinstance(self._outer, Preemption):
            self._outer._flag, self._outer._agreed = self._flag, self._agreed

    def request(self) -> None:
        """Act as if a signal had arrived; one process may call it for all."""
        self._flag = True
        if jax.distributed.is_initialized():
            os.kill(os.getpid(), signal.SIGTERM)

    def should_stop(self, *, waiting: bool = False) -> bool:
        """Return whether to save and exit now; all processes must call it equally often.

        Args:
          waiting: Whether the process waits for data, with the state unchanged since the last other
            call; such calls may differ in number. Several processes then stop only if all of them
            wait after the same call.
        """
        if not jax.distributed.is_initialized():
            return self._flag
        if waiting:
            self._agreed = self._agreed or self._all_wait()
        elif not self._agreed:
            # Numbers of calls, not steps: the next run of a worker starts again at step 0.
            self._called = next(_calls)
            self._agreed = multihost_utils.reached_preemption_sync_point(self._called)
        return self._agreed

    def _all_wait(self) -> bool:
        """Return whether all processes were asked to stop, and wait after the same call.

        A process in the middle of the next step has no consistent state: then none may save the
        last one, and all continue to wait. The barrier opens for all or for none.
        """
        client = processes.client()
        if client is None or self._tried == self._called or not _has_notice(client):
            return False
        self._tried = self._called
        try:
            client.wait_at_barrier(f'vit_jax/waits/{self._called}', int(1000 * _AGREE_SECONDS))
        except jax.errors.JaxRuntimeError:
            _log.warning(
                'a stop was requested while this process waits for data, and another does not: the '
                'state can be saved once data arrive'
            )
            return False
        return True

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT:
            if self._flag:
                raise KeyboardInterrupt(_AT_ONCE)
            os.write(sys.stderr.fileno(), _ORDERLY)  # print is not reentrant
        self.request()


def _has_notice(client: Any) -> bool:
    try:
        client.key_value_try_get(_NOTICE)
    except jax.errors.JaxRuntimeError:  # there is none
        return False
    return True


@contextlib.contextmanager
def _second_ctrl_c() -> Iterator[None]:
    """End the process if the code inside does not end soon after a second Ctrl-C.

    Python calls handlers between two instructions of the main thread, which may never come if it
    waits in XLA, or for a disk. A thread reads the signals' numbers from a pipe.
    """
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    old_handler = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    has_left = threading.Event()
    thread = threading.Thread(target=_count, args=(reader, has_left), name='ctrl-c', daemon=True)
    thread.start()
    try:
        yield
    finally:
        has_left.set()
        signal.set_wakeup_fd(old_handler)
        os.close(writer)


def _count(reader: int, has_left: threading.Event) -> None:
    count = 0
    with open(reader, 'rb', buffering=0) as numbers:
        while number := numbers.read(1):
            if number[0] == signal.SIGINT and count and not has_left.wait(_UNWIND_SECONDS):
                with contextlib.suppress(OSError):
                    os.write(2, f'\ninterrupted: {_AT_ONCE}\n'.encode())
                os._exit(EXIT_INTERRUPTED)
            count += number[0] in (signal.SIGINT, *_FINAL)
