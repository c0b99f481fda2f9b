"""The one evaluation loop: padded batches, every example exactly once.

What a task evaluates are masked sums, added up on the devices; an evaluator (see
`vit_jax.evaluators`) gets the predictions themselves on the host.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import jax
import numpy as np
from ml_collections import ConfigDict

from vit_jax import step as step_lib
from vit_jax.config import defaults
from vit_jax.data.batches import Batch, Process
from vit_jax.data.dataset import Dataset, Section, open_dataset
from vit_jax.nn.attention_maps import AttentionMap
from vit_jax.runtime import sharding
from vit_jax.runtime.hangs import Interrupted, Stopping, never
from vit_jax.signatures import keyword_only
from vit_jax.tasks.base import Task

PyTree = Any
IN_FLIGHT = 2  # batches on the devices while one is awaited


@dataclasses.dataclass(frozen=True)
class EvalSteps:
    """The compiled steps of evaluations.

    Attributes:
      layout: that the steps are compiled for.
      evaluate, predict: the compiled steps; `predict` is None for a task without one.
      look: (variables, batch that every device has whole) -> (the model's outputs, its attention
        maps); None for a model without them.
      derive: {metric: mean} of a whole pass -> what follows from them, for a task that has it.
    """

    layout: sharding.Layout
    evaluate: Callable
    predict: Callable | None
    derive: Callable[[dict[str, float]], dict[str, float]]
    look: Callable | None = None


def compile_steps(model: Any, task: Task, layout: sharding.Layout, seed: int = 0) -> EvalSteps:
    """The steps of evaluations, compiled at their first calls.

    Args:
      model, task: of the config.
      layout: of the devices.
      seed: of what models and tasks draw at random.
    """
    options: dict[str, Any] = {'seed': seed, 'axis_name': layout.axis_name}
    eval_step = step_lib.make_eval_step(model, task, **options)
    predict_step = step_lib.make_predict_step(model, task, **options)
    return EvalSteps(
        layout=layout,
        evaluate=layout.compile_eval(eval_step),
        predict=layout.compile_eval(predict_step) if task.predicts else None,
        derive=task.derive,
        look=_looker(model, task, layout, seed) if model.attends else None,
    )


def _looker(model: Any, task: Task, layout: sharding.Layout, seed: int) -> Callable:
    look_step = step_lib.make_look_step(model, task, seed=seed, axis_name=layout.axis_name)
    compiled = layout.compile_eval(look_step)

    def look(variables: PyTree, batch: Batch) -> tuple[dict[str, Any], list[AttentionMap]]:
        outputs, intermediates, inputs = compiled(variables, layout.put_copies(batch))
        return outputs, model.attention_maps(intermediates, *inputs)

    return look


def open_data(
    section: ConfigDict, batch_size: int, layout: sharding.Layout, seed: int = 0, **changes: Any
) -> Dataset:
    """The data of `config.data` or of an entry of `config.evals`, for these devices.

    Args:
      section: what it says beside the keywords of `open_dataset` is not of the data.
      batch_size: where the section has none of its own.
      layout: evaluation batches have a multiple of its shards.
      seed: of training.
      changes: keywords of `open_dataset` that replace those of the section.

    Raises:
      UserError: as `open_dataset`.
    """
    return open_dataset(
        **data_keywords(section, batch_size, **changes),
        seed=seed,
        multiple=layout.num_shards,
        process=Process.holding(layout.shards_here, layout.num_shards),
    )


def entry_keywords(config: ConfigDict, section: ConfigDict, **changes: Any) -> dict[str, Any]:
    """The keywords of `open_dataset` for an entry of `config.evals`; see `open_data`.

    Text is read by the vocabulary of training unless the entry names another.
    """
    vocab = section.get('vocab', config.data.get('vocab'))
    return data_keywords(section, config.batch_size, **changes, vocab=vocab)


def data_keywords(section: ConfigDict, batch_size: int, **changes: Any) -> dict[str, Any]:
    """The keywords of `open_dataset` in a section; see `open_data`."""
    known = {'batch_size', *keyword_only(Section)}
    given = {k: v for k, v in defaults.keywords(section).items() if k in known}
    return {'batch_size': batch_size} | given | changes


def evaluate(
    steps: EvalSteps, variables: PyTree, batches: Iterable[Batch], stopping: Stopping = never
) -> dict[str, float]:
    """Means over one pass: {name: sum / count}, accumulated in float64 on the host; without those
    of which nothing was counted.
    """
    totals: dict[str, np.ndarray] = {}
    for sums in _results(steps.evaluate, steps.layout, variables, batches, stopping):
        for name, pair in sums.items():
            totals[name] = totals.get(name, np.zeros(2)) + np.asarray(pair, np.float64)
    return {name: float(total / count) for name, (total, count) in totals.items() if count}


def predict(
    steps: EvalSteps, variables: PyTree, batches: Iterable[Batch], stopping: Stopping = never
) -> Iterator[tuple[Batch, Batch]]:
    """Predictions and the small arrays of the batches, of all processes, one for each example."""
    assert steps.predict is not None
    for rows in _results(steps.predict, steps.layout, variables, batches, stopping):
        yield jax.tree.map(partial(_of_examples, rows[1]['mask'] > 0), rows)


def _of_examples(real: np.ndarray, array: np.ndarray) -> np.ndarray:
    """The values of the real examples; one that a row of several examples shares is repeated."""
    if array.shape[: real.ndim] == real.shape:
        return array[real]
    return array[np.nonzero(real)[0]]


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
        waiting.append(step(variables, layout.put_batch(batch)))
        if stopping():
            raise Interrupted
        if len(waiting) > IN_FLIGHT:
            yield jax.device_get(waiting.popleft())
    while waiting:
        yield jax.device_get(waiting.popleft())
