"""A check for tests: whether a task's loss is a sum over rows."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from vit_jax.tasks.base import Batch, Task


def check(task: Task, outputs: dict[str, Any], batch: Batch, *, rtol: float = 1e-4) -> None:
    """Check that `task` may leave `couples_rows` false.

    Args:
      task: whose loss is computed.
      outputs: of the model, with a row for every example, or scalars; random numbers will do.
      batch: with at least two rows.
      rtol: relative tolerance of sums and counts.

    Raises:
      AssertionError: if a term's sum or count over all rows is not that of the first row plus that
        of the others, as when the loss compares rows or takes a mean.
    """
    rows = len(jax.tree.leaves(batch)[0])
    whole = _numbers(task, outputs, batch, slice(0, rows))
    parts = [_numbers(task, outputs, batch, part) for part in (slice(0, 1), slice(1, rows))]
    for name, numbers in whole.items():
        added = np.sum([part[name] for part in parts], axis=0)
        np.testing.assert_allclose(
            added,
            numbers,
            rtol=rtol,
            atol=1e-6,
            err_msg=f'{type(task).__module__}: the term {name!r} of the loss couples the rows of a '
            'batch: set couples_rows = True, or make it a sum over rows',
        )


def _numbers(task: Task, outputs: dict[str, Any], batch: Batch, rows: slice) -> dict[str, Any]:
    """Sum and count of each term for some rows."""
    taken = jax.tree.map(lambda x: x[rows] if np.ndim(x) else x, (outputs, batch))
    terms = jax.jit(task.loss)(*taken)
    return {name: np.array([term.sum, term.count], np.float64) for name, term in terms.items()}
