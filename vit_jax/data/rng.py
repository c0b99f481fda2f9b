"""Random numbers of an example, independent of the process and thread that draws them."""

from __future__ import annotations

import threading

import numpy as np

_local = threading.local()


def example_rng(seed: int, example: int) -> np.random.Generator:
    """The generator of one example, valid until the thread's next call.

    Philox is keyed, not seeded, so that a new key costs a microsecond.
    """
    if not hasattr(_local, 'rng'):
        _local.rng = np.random.Generator(np.random.Philox(key=0))
        _local.state = _local.rng.bit_generator.state
    _local.state['state']['key'][:] = seed, example
    _local.rng.bit_generator.state = _local.state
    return _local.rng
