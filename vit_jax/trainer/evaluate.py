"""One evaluation loop: padded batches, every example exactly once.

A task evaluates masked sums, which the devices add up; an evaluator (see `vit_jax.evaluators`) gets
the predictions on the host.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any

import jax
import numpy as np

from vit_jax.data.batches import Batch
from vit_jax.data.dataset import Dataset
from vit_jax.errors import forbid_exit
from vit_jax.runtime import sharding
from vit_jax.runtime.watchdog import Interrupted, Stopping, no_stop
from vit_jax.trainer.evaluations import Evaluation
from vit_jax.trainer.program import EvalSteps, PyTree

IN_FLIGHT = 2  # batches on the devices while the host waits for one


def evaluate(
    steps: EvalSteps, variables: PyTree, batches: Iterable[Batch], stopping: Stopping = no_stop
) -> dict[str, float]:
    """Means over one pass, {name: sum / count}, accumulated in float64 on the host.

    Metrics with a count of 0 are left out.
    """
    totals: dict[str, np.ndarray] = {}
    for sums in _results(steps.evaluate, steps.layout, variables, batches, stopping):
        for name, pair in sums.items():
            totals[name] = totals.get(name, np.zeros(2)) + np.asarray(pair, np.float64)
    return {name: float(total / count) for name, (total, count) in totals.items() if count}


def predict(
    step: Callable,
    layout: sharding.Layout,
    variables: PyTree,
    batches: Iterable[Batch],
    stopping: Stopping = no_stop,
) -> Iterator[tuple[Batch, Batch]]:
    """Yield predictions and small arrays of each batch, with the real rows of all processes."""
    for rows in _results(step, layout, variables, batches, stopping):
        yield jax.tree.map(partial(_select_real, rows[1]['mask'] > 0), rows)


def _select_real(is_real: np.ndarray, array: np.ndarray) -> np.ndarray:
    """Return the values of real examples; repeat values that a row's examples share."""
    if array.shape[: is_real.ndim] == is_real.shape:
        return array[is_real]
    return array[np.nonzero(is_real)[0]]


def _results(
    step: Callable,
    layout: sharding.Layout,
    variables: PyTree,
    batches: Iterable[Batch],
    stopping: Stopping,
) -> Iterator[Any]:
    """Yield the results of `step` for each batch, on the host; the devices work ahead."""
    waiting: collections.deque[Any] = collections.deque()
    for batch in batches:
        waiting.append(step(variables, layout.feed(batch)))
        if stopping():
            raise Interrupted
        if len(waiting) > IN_FLIGHT:
            yield jax.device_get(waiting.popleft())
    while waiting:
        yield jax.device_get(waiting.popleft())


Take = Callable[[Batch, Batch], None]


@forbid_exit()
def run(
    steps: EvalSteps,
    evaluations: Mapping[str, Evaluation],
    variables: PyTree,
    stopping: Stopping = no_stop,
) -> dict[str, float]:
    """Run evaluations; return {'NAME/METRIC': value}.

    Evaluators of the same data are given the same predictions, which are computed once.

    Args:
      steps: Compiled for the data.
      evaluations: Evaluations by name.
      variables: Variables of the model.
      stopping: Function that is polled between two batches and while waiting for one.

    Raises:
      Interrupted: if a stop is requested.
    """
    fits, updates = [], []
    for evaluation in evaluations.values():
        if evaluator := evaluation.evaluator:
            evaluator.start()
            step = steps.predicting(evaluator)
            fits += [(evaluation.fit, step, evaluator.fit)] if evaluation.fit else []
            updates.append((evaluation.data, step, evaluator.update))
    for data, step, takes in [*_shared(fits), *_shared(updates)]:
        batches = data.eval_batches(stopping)
        for predictions, batch in predict(step, steps.layout, variables, batches, stopping):
            for take in takes:
                take(predictions, batch)
    results: dict[str, float] = {}
    for name, evaluation in evaluations.items():
        if evaluation.evaluator:
            metrics = evaluation.evaluator.result()
        else:
            metrics = evaluate(steps, variables, evaluation.data.eval_batches(stopping), stopping)
            metrics |= steps.derive(metrics)
        results |= {f'{name}/{metric}': value for metric, value in metrics.items()}
    return results


def run_averages(
    steps: EvalSteps,
    evaluations: Mapping[str, Evaluation],
    variables_at: Callable[[float | None], PyTree],
    stopping: Stopping = no_stop,
) -> dict[str, float]:
    """Run evaluations, each with the average that it chooses; see `run`.

    Args:
      steps, evaluations, stopping: See `run`.
      variables_at: Variables by `Evaluation.ema_decay`.
    """
    results: dict[str, float] = {}
    for decay in dict.fromkeys(evaluation.ema_decay for evaluation in evaluations.values()):
        selected = {
            name: evaluation
            for name, evaluation in evaluations.items()
            if evaluation.ema_decay == decay
        }
        results |= run(steps, selected, variables_at(decay), stopping)
    return results


def line(headlines: Mapping[str, tuple[str, ...]], results: Mapping[str, float]) -> str:
    """Return a line of results, with the headline metrics of each evaluation.

    Args:
      headlines: Metrics by the names of evaluations; empty for all of them.
      results: {'NAME/METRIC': value}; other numbers are shown too.
    """
    columns = []
    for key, value in results.items():
        name, _, metric = key.partition('/')
        headline = headlines.get(name)
        if not headline or metric in headline:
            columns.append(f'{key} {value:.4f}')
    return '  '.join(columns)


def num_examples(opened: Iterable[Evaluation]) -> int:
    """Return the number of examples that evaluations pass through the model, repeats included."""
    opened = list(opened)
    passes = [evaluation.data for evaluation in opened if evaluation.evaluator is None]
    shared = {
        (id(data), evaluation.evaluator.patches): data
        for evaluation in opened
        if evaluation.evaluator
        for data in (evaluation.data, evaluation.fit)
    }
    return sum(len(data.source) for data in (*passes, *shared.values()) if data)


def _shared(
    readers: Iterable[tuple[Dataset, Callable, Take]],
) -> Iterator[tuple[Dataset, Callable, list[Take]]]:
    """Yield every data set once for each step that it goes through, with all of its readers."""
    takes: dict[tuple[int, int], tuple[Dataset, Callable, list[Take]]] = {}
    for data, step, take in readers:
        takes.setdefault((id(data), id(step)), (data, step, []))[2].append(take)
    yield from takes.values()
