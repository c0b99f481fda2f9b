"""Ends a process whose step never ends, so that its launcher restarts the job."""

from __future__ import annotations

import os
import sys
import threading
import time

import jax

from vit_jax.errors import EXIT_FAILED
from vit_jax.runtime.hangs import stacks


class Watchdog:
    """Ends the process with all stacks if nothing is finished for `seconds`; a context manager.

    One hanging process keeps all others of the job waiting in a collective, for ever and
    without an error. A wait inside of XLA cannot be interrupted, so the process ends by
    `os._exit`, with code 1.

    Args:
      seconds: longer than the longest step, compilation, evaluation or save; None for no watch.
    """

    def __init__(self, seconds: float | None):
        self._seconds = seconds
        self._last, self._done = time.monotonic(), 'nothing'
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name='step-watchdog', daemon=True)

    def __enter__(self) -> Watchdog:
        self.beat(self._done)
        if self._seconds is not None:
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()

    def beat(self, done: str) -> None:
        """Records what was finished just now."""
        self._last, self._done = time.monotonic(), done

    def _watch(self) -> None:
        assert self._seconds is not None
        while not self._stop.wait(max(0.0, self._last + self._seconds - time.monotonic())):
            if time.monotonic() - self._last >= self._seconds:
                self._end()

    def _end(self) -> None:
        print(
            f'error: process {jax.process_index()} of {jax.process_count()}: {self._done} was '
            f'finished, and nothing else in {self._seconds:g} s: it hangs, or waits for a process '
            'that does; the same command, started again on all processes, continues from the last '
            f'checkpoint. Every thread:\n{stacks()}',
            file=sys.stderr,
            flush=True,
        )
        os._exit(EXIT_FAILED)
