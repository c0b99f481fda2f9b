"""Report exhausted device or host memory in one line, with remedies."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator

from vit_jax.errors import EXIT_FAILED, UserError

# Messages of JAX, Python's threads, the kernel, the dynamic linker and C++.
EXHAUSTED = (
    *('RESOURCE_EXHAUSTED', "can't start new thread", 'annot allocate memory'),
    *('failed to map segment', 'bad_alloc'),
)
_SIZE = r'([\d.]+) ?([KMGTP]?)i?(?:B|bytes)?\b'
_BOTH = re.compile(rf'Used {_SIZE} of {_SIZE} hbm')  # XLA for TPUs, while compiling
# XLA on CPUs; on GPUs (two allocators); on TPUs, while running; NumPy.
_NEEDED = re.compile(
    r'(?:[Oo]ut of memory (?:allocating|while trying to allocate)|Failed to allocate request for|'
    rf'Attempting to (?:reserve|allocate)|Unable to allocate) {_SIZE}'
)
_FREE = re.compile(rf'There are {_SIZE} free')
# Steps that were dispatched fail on CPUs with INTERNAL, and quotas of services are also exhausted.
_DEVICE = re.compile(r'(?s)Error dispatching.*Out of memory|RESOURCE_EXHAUSTED.*(memory|allocat)')
_KERNEL = re.compile(r'memory space [sv]mem')  # of a core: for kernels, at any batch size
REMEDIES = (
    'raise config.step.accum_steps, set config.model.remat=True, shard the state by '
    'config.parallel.fsdp or lower config.batch_size; `preflight CONFIG` compares them for a device'
)


class OutOfMemory(UserError):
    """A run that does not fit into the memory of its devices or host.

    Args:
      message: The line.
      resumable: Whether the run has trained, so that launchers may start it again.
    """

    def __init__(self, message: str, resumable: bool = False) -> None:
        super().__init__(message)
        self.exit_code = EXIT_FAILED if resumable else 2


def is_exhausted(error: BaseException) -> bool:
    """Return whether an array could not be allocated, on a device or the host."""
    text = str(error)
    if _DEVICE.search(text) is not None:
        return _KERNEL.search(text) is None
    return isinstance(error, MemoryError)


def sizes(text: str) -> str:
    """Return the memory needed and available, by a backend's message; empty if it has no numbers.

    A needed size without an available one is a single allocation on top of the memory in use.
    """
    if pair := _BOTH.search(text):
        return f'{_gib(pair[1], pair[2])} needed, {_gib(pair[3], pair[4])} available'
    if (needed := _NEEDED.search(text)) is None:
        return ''
    line = f'{_gib(needed[1], needed[2])} needed'
    if free := _FREE.search(text):
        return f'{line}, {_gib(free[1], free[2])} available'
    return f'{line} beyond what is in use'


def _gib(number: str, unit: str) -> str:
    size = float(number) * 1024.0 ** ('KMGTP'.index(unit) + 1 if unit else 0) / 2**30
    return f'{size:,.1f} GiB' if size >= 0.05 else f'{size:.2g} GiB'


@contextlib.contextmanager
def report_exhaustion(has_trained: Callable[[], bool] = lambda: False) -> Iterator[None]:
    """Report exhausted memory in a run as one line.

    Args:
      has_trained: Whether a step of this start is complete.

    Raises:
      OutOfMemory: with exit code 2 before the first complete step, and 1 after it.
    """
    try:
        yield
    except Exception as error:
        if not is_exhausted(error):
            raise
        text = ' '.join(str(error).split())
        amount = sizes(text) or text[:300] or type(error).__name__
        resumes = '; the same command resumes from the last checkpoint' if has_trained() else ''
        raise OutOfMemory(
            f'out of memory ({amount}){resumes}: {REMEDIES}', has_trained()
        ) from error
