"""An orderly stop on a signal."""

from __future__ import annotations

import itertools
import os
import signal
import sys
from types import FrameType
from typing import Any

import jax
from jax.experimental import multihost_utils

_ORDERLY = b'\nstopping after this step, with the state saved; Ctrl-C once more stops at once\n'
_AT_ONCE = 'the same command, started again, continues from the last checkpoint'
_calls = itertools.count(1)
_FINAL = (signal.SIGTERM, signal.SIGHUP)  # may be repeated while the state is saved


class Preemption:
    """Turns SIGTERM, SIGINT and SIGHUP into a flag that the loop reads between two steps.

    A context manager for the main thread. Further SIGTERMs and SIGHUPs are ignored, also after
    its end, so that the save and the exit are finished; a second SIGINT (Ctrl-C) stops at once. A
    SIGHUP that is ignored, as under nohup, stays ignored.

    With several processes, a signal to any one of them makes all of them agree on
    one later step; SIGTERM is then left to `jax.distributed`, which watches for it.

    An inner one, such as that of a run inside of a worker's, passes a request on to the outer one.
    """

    def __init__(self) -> None:
        self._flag = self._agreed = False
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> Preemption:
        self._outer = getattr(signal.getsignal(signal.SIGINT), '__self__', None)
        if isinstance(self._outer, Preemption):
            self._flag, self._agreed = self._outer._flag, self._outer._agreed
        watched = [signal.SIGINT] if _distributed() else [signal.SIGINT, signal.SIGTERM]
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # a closed terminal
            watched.append(signal.SIGHUP)
        self._previous = {number: signal.signal(number, self._receive) for number in watched}
        return self

    def __exit__(self, *_: object) -> None:
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
        if _distributed():
            os.kill(os.getpid(), signal.SIGTERM)

    def reached(self) -> bool:
        """Whether to save now and exit; all processes must call it equally often."""
        if not _distributed():
            return self._flag
        # Numbers of calls, not steps: steps start anew with the next run of a worker.
        if not self._agreed:
            self._agreed = multihost_utils.reached_preemption_sync_point(next(_calls))
        return self._agreed

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT:
            if self._flag:
                raise KeyboardInterrupt(_AT_ONCE)
            os.write(sys.stderr.fileno(), _ORDERLY)  # print is not reentrant
        self.request()


def _distributed() -> bool:
    return jax.distributed.is_initialized()
