"""Computations of their own while a program is being traced.

What JAX computes in the thread that traces becomes a part of the program. Another thread traces
nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent import futures

import jax

from vit_jax.runtime import processes

Function = Callable[[], float]


def largest(device: jax.Device, several: bool, function: Function) -> float:
    """Call a function that computes on a device.

    Args:
      device: of this process.
      several: whether all processes of the job call this; the result is then the largest of theirs.
      function: returns no NaN.
    """

    def found() -> float:
        with jax.default_device(device):
            own = function()
        return max(processes.gather(own), default=0.0) if several else own

    return apart(found)


def apart(function: Function) -> float:
    """Call a function in a thread of its own."""
    with futures.ThreadPoolExecutor(1) as pool:
        return pool.submit(function).result()
