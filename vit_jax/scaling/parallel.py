"""Map over several processes, with a progress bar."""

from __future__ import annotations

import concurrent.futures
import contextlib
import multiprocessing
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeVar

import scipy.linalg  # noqa: F401  # loads BLAS: a limit applies to what is loaded
from threadpoolctl import threadpool_limits

from vit_jax.runtime import console

_ITEMS_PER_WORKER = 4  # least number of items that justifies the start of a process
Item = TypeVar('Item')
Result = TypeVar('Result')


def map_items(
    function: Callable[[Item], Result], items: Sequence[Item], label: str, workers: int = 1
) -> list[Result]:
    """Apply a function to each item, in processes if there are many items and several workers.

    Args:
      function: Function of an item; both can be pickled.
      items: Items in the order of the results.
      label: Label of the progress bar.
      workers: Largest number of processes.
    """
    results: list[Result] = []
    workers = min(workers, len(items) // _ITEMS_PER_WORKER)
    with console.progress(label, len(items)) as advance, _open_map(workers) as map_each:
        for result in map_each(function, items):
            results.append(result)
            advance()
    return results


@contextlib.contextmanager
def _open_map(workers: int) -> Iterator[Callable[..., Iterable[Any]]]:
    """Provide `map` in this process, or in several others."""
    if workers < 2:
        with limit_threads():
            yield map
        return
    context = multiprocessing.get_context('spawn')  # threads of this process do not survive a fork
    with concurrent.futures.ProcessPoolExecutor(workers, context, limit_threads) as pool:
        yield pool.map


def limit_threads() -> threadpool_limits:
    """Limit BLAS to one thread: on arrays of a few points, more only wait for each other.

    A new process imports this module, and with it BLAS, before it calls the function.
    """
    return threadpool_limits(1, user_api='blas')
