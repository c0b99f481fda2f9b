"""The one evaluation loop: padded batches, every example exactly once.

A task evaluates masked sums, which the devices add up; an evaluator (see `vit_jax.evaluators`) gets
the predictions on the host.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any

import jax
import numpy as np

from vit_jax.config import objects
from vit_jax.config.run import Data, Inference
from vit_jax.config.run import Evaluation as Entry
from vit_jax.data import vocabulary
from vit_jax.data.batches import Batch, Process, Shape
from vit_jax.data.dataset import Dataset, open_dataset
from vit_jax.data.records import SourceInfo
from vit_jax.data.transforms import only_text_transforms
from vit_jax.errors import UserError, forbid_exit
from vit_jax.evaluators.base import Evaluator, OtherModel
from vit_jax.interop.trained import TrainedModel
from vit_jax.nn.maps import AttentionMap
from vit_jax.runtime import sharding
from vit_jax.runtime.watchdog import Interrupted, Stopping, no_stop
from vit_jax.step import make_attention_step, make_eval_step, make_predict_step
from vit_jax.tasks.base import Task
from vit_jax.trainer import compatibility

PyTree = Any
IN_FLIGHT = 2  # batches on the devices while the host waits for one


@dataclasses.dataclass(frozen=True)
class EvalSteps:
    """The compiled steps of evaluations.

    Attributes:
      layout: of the devices that the steps are compiled for.
      evaluate, predict: the compiled steps; `predict` is None for a task without one.
      shapes: (variables, batch), or their shapes -> the shapes of the results of `predict`.
      attention_step: (variables, batch that every device has whole) -> (the model's outputs, its
        attention maps); None for a model without them.
      derive: {metric: mean} of a whole pass -> further metrics computed from them.
    """

    layout: sharding.Layout
    evaluate: Callable
    predict: Callable | None
    shapes: Callable
    derive: Callable[[dict[str, float]], dict[str, float]]
    attention_step: Callable | None = None


def compile_steps(model: Any, task: Task, layout: sharding.Layout, seed: int = 0) -> EvalSteps:
    """Make the steps of evaluations, compiled at their first calls.

    Args:
      model, task: of the config.
      layout: of the devices.
      seed: of the random numbers of models and tasks.
    """
    options: dict[str, Any] = {'seed': seed, 'axis_name': layout.axis_name}
    eval_step = make_eval_step(model, task, **options)
    predict_step = make_predict_step(model, task, **options)
    predict = layout.compile_eval(predict_step) if task.predicts else None
    # One of jit is traced once, here or for the first batch.
    alone: Any = make_predict_step(model, task, seed=seed) if layout.axis_name else predict
    return EvalSteps(
        layout=layout,
        evaluate=layout.compile_eval(eval_step),
        predict=predict,
        shapes=partial(jax.eval_shape, alone),
        derive=task.derive,
        attention_step=_attention_step(model, task, layout, seed) if model.attends else None,
    )


def _attention_step(model: Any, task: Task, layout: sharding.Layout, seed: int) -> Callable:
    step = make_attention_step(model, task, seed=seed, axis_name=layout.axis_name)
    compiled = layout.compile_eval(step)

    def run(variables: PyTree, batch: Batch) -> tuple[dict[str, Any], list[AttentionMap]]:
        outputs, intermediates, inputs = compiled(variables, layout.put_copies(batch))
        return outputs, model.attention_maps(intermediates, *inputs)

    return run


def open_data(
    data: Data,
    batch_size: int,
    layout: sharding.Layout,
    seed: int = 0,
    numbering: SourceInfo | None = None,
) -> Dataset:
    """The data of `config.data` or of an entry of `config.evals`, for these devices.

    Args:
      data: the section.
      batch_size: of a global batch.
      layout: evaluation batches have a multiple of its shards.
      seed: of training.
      numbering: as for `open_dataset`.

    Raises:
      UserError: as `open_dataset`.
    """
    return open_dataset(
        data,
        batch_size,
        seed=seed,
        multiple=layout.num_shards,
        process=Process.holding(layout.shards_here, layout.num_shards),
        numbering=numbering,
    )


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
    steps: EvalSteps, variables: PyTree, batches: Iterable[Batch], stopping: Stopping = no_stop
) -> Iterator[tuple[Batch, Batch]]:
    """Yield predictions and small arrays of each batch, with the real rows of all processes."""
    assert steps.predict is not None
    for rows in _results(steps.predict, steps.layout, variables, batches, stopping):
        yield jax.tree.map(partial(_of_examples, rows[1]['mask'] > 0), rows)


def _of_examples(real: np.ndarray, array: np.ndarray) -> np.ndarray:
    """The values of the real examples; a value shared by the examples of a row is repeated."""
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


Take = Callable[[Batch, Batch], None]


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """An entry of `config.evals`, ready to run.

    Attributes:
      data: to evaluate on.
      evaluator: computes the metrics; None for those of the task.
      fit: the data that the evaluator learns from, if it learns.
      headline: the metrics that a line of text shows; empty for all.
    """

    data: Dataset
    evaluator: Evaluator | None = None
    fit: Dataset | None = None
    headline: tuple[str, ...] = ()

    @property
    def signature(self) -> str:
        """The signature of the evaluation protocol; empty if there is no standard one."""
        return self.evaluator.signature if self.evaluator else ''


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
      steps: compiled for the data.
      evaluations: by their names.
      variables: of the model.
      stopping: polled between two batches and while waiting for one.

    Raises:
      Interrupted: if a stop is requested.
    """
    fits, updates = [], []
    for one in evaluations.values():
        if one.evaluator:
            one.evaluator.start()
            fits += [(one.fit, one.evaluator.fit)] if one.fit else []
            updates.append((one.data, one.evaluator.update))
    for data, takes in [*_shared(fits), *_shared(updates)]:
        for predictions, batch in predict(steps, variables, data.eval_batches(stopping), stopping):
            for take in takes:
                take(predictions, batch)
    results: dict[str, float] = {}
    for name, one in evaluations.items():
        if one.evaluator:
            found = one.evaluator.result()
        else:
            found = evaluate(steps, variables, one.data.eval_batches(stopping), stopping)
            found |= steps.derive(found)
        results |= {f'{name}/{metric}': value for metric, value in found.items()}
    return results


def line(headlines: Mapping[str, tuple[str, ...]], results: Mapping[str, float]) -> str:
    """A line of results, with the headline metrics of each evaluation.

    Args:
      headlines: metrics by the names of evaluations; empty for all of them.
      results: {'NAME/METRIC': value}; other numbers are shown too.
    """
    words = []
    for key, value in results.items():
        name, _, metric = key.partition('/')
        chosen = headlines.get(name)
        if not chosen or metric in chosen:
            words.append(f'{key} {value:.4f}')
    return '  '.join(words)


def num_examples(opened: Iterable[Evaluation]) -> int:
    """The number of examples that evaluations pass through the model, repeats included."""
    opened = list(opened)
    passes = [one.data for one in opened if one.evaluator is None]
    shared = {id(data): data for one in opened if one.evaluator for data in (one.data, one.fit)}
    return sum(len(data.source) for data in (*passes, *shared.values()) if data)


def _shared(readers: Iterable[tuple[Dataset, Take]]) -> Iterator[tuple[Dataset, list[Take]]]:
    """Yield every data set once, with all of its readers."""
    takes: dict[int, tuple[Dataset, list[Take]]] = {}
    for data, take in readers:
        takes.setdefault(id(data), (data, []))[1].append(take)
    yield from takes.values()


def open_evals(
    run: Inference,
    layout: sharding.Layout,
    steps: EvalSteps,
    trained: TrainedModel | None = None,
) -> dict[str, Evaluation]:
    """Open every entry of `config.evals`; entries with the same data share them.

    Args:
      run: its config.
      layout: of the devices.
      steps: compiled for it.
      trained: the model that the data must suit; None for no check.

    Raises:
      UserError: for data that do not exist, do not suit the evaluator or the model, or have other
        classes.
    """
    opened: dict[str, Dataset] = {}

    def open_once(entry: Entry, numbering: SourceInfo | None = None) -> Dataset:
        data = Data(**{key.name: getattr(entry, key.name) for key in dataclasses.fields(Data)})
        batch_size = entry.batch_size or run.batch_size
        key = repr((data, batch_size, numbering))
        if key not in opened:
            opened[key] = open_data(data, batch_size, layout, numbering=numbering)
        return opened[key]

    return {name: _open_eval(name, run, open_once, steps, trained) for name in run.evals}


def _open_eval(
    name: str,
    run: Inference,
    open_once: Callable[..., Dataset],
    steps: EvalSteps,
    trained: TrainedModel | None,
) -> Evaluation:
    entry, where = run.evals[name], f'config.evals.{name}'
    evaluator = objects.make_evaluator(entry, where)
    has_own_classes = evaluator is not None and evaluator.learns
    by_model = trained and run.model.options.get('num_classes') and not has_own_classes
    data = open_once(entry, trained.classes if trained and by_model else None)
    headline = objects.headline(entry, run.task)
    if trained is not None:
        if by_model:
            compatibility.require_classes(trained, where, data)
        compatibility.require_shapes(trained, where, data)
        if by_model and evaluator is None and trained.num_classes and not data.info.num_classes:
            raise UserError(
                f'{where}: the examples of {data.source.title} have no classes to compare '
                "with the model's: name labeled data, or remove the evaluation"
            )
        _check_ids(where, data, run.model.options.get('vocab_size'))
        vocabulary.require_ids(data.vocab, trained.model, f'{where}: {data.source.title}')
    if evaluator is None:
        return Evaluation(data, headline=headline)
    if steps.predict is None:
        raise UserError(f'{where}: task {run.task.name!r} has no predictions to evaluate')
    fit = open_once(dataclasses.replace(entry, split=entry.fit)) if evaluator.learns else None
    try:
        if (others := evaluator.fit_data(data)) is not None:
            texts = only_text_transforms(run.data.transforms)
            fit = open_once(dataclasses.replace(entry, **{'transforms': texts} | others))
        evaluator.read_models(_other_model)
        evaluator.open(data, fit)
    except UserError as e:
        title = f', {fit.source.title}' if fit else ''
        raise UserError(f'{where}{title}: {e}') from e
    return Evaluation(data, evaluator, fit, headline)


def check_predictions(
    steps: EvalSteps, evaluations: Mapping[str, Evaluation], variables: PyTree
) -> None:
    """Raise UserError if an evaluator measures arrays that the task does not predict.

    Args:
      steps: of the task; nothing is computed.
      evaluations: by their names in `config.evals`.
      variables: of the model, or their shapes.
    """
    for name, one in evaluations.items():
        if one.evaluator is None or not one.evaluator.predictions:
            continue
        plan = one.data.plan
        # An evaluation pads its last batch, which may be the only one.
        shape = Shape(plan.batch_size, 1, one.data.spec, plan.slots)
        batch = {
            key: jax.ShapeDtypeStruct((shape.rows, *s.shape), s.dtype)
            for key, s in shape.arrays.items()
        }
        predicted = steps.shapes(variables, batch)[0]
        if missing := [key for key in one.evaluator.predictions if key not in predicted]:
            raise UserError(
                f'config.evals.{name}: its evaluator measures {missing[0]!r}, which the task does '
                f'not predict, only {", ".join(sorted(predicted))}'
            )


def _other_model(path: str) -> OtherModel:
    from vit_jax.inference.predict import other_model  # here, as few evaluators need one

    return other_model(path)


def _check_ids(where: str, data: Dataset, vocab_size: int | None) -> None:
    """Raise UserError if the data have ids without an embedding in the model."""
    if vocab_size and data.info.vocab_size > vocab_size:
        raise UserError(
            f'{where}: {data.source.title} has ids up to {data.info.vocab_size - 1}, the model '
            f'{vocab_size} of them: evaluate it on data of its own vocabulary'
        )
