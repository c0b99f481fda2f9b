"""The entries of `config.evals`, opened and run; those that read the same data share its passes."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from ml_collections import ConfigDict

from vit_jax.config import objects
from vit_jax.data import vocabulary
from vit_jax.data.batches import Batch
from vit_jax.data.dataset import Dataset
from vit_jax.data.transforms import of_texts_alone
from vit_jax.errors import UserError, staying
from vit_jax.evaluators.base import Evaluator
from vit_jax.interop.trained import TrainedModel
from vit_jax.runtime import sharding
from vit_jax.runtime.hangs import Stopping, never
from vit_jax.trainer import compatibility
from vit_jax.trainer.evaluate import (
    EvalSteps,
    PyTree,
    entry_keywords,
    evaluate,
    open_data,
    predict,
)

Take = Callable[[Batch, Batch], None]


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """An entry of `config.evals`, ready to run.

    Attributes:
      data: that is evaluated.
      evaluator: that measures; None for what the task itself measures.
      fit: what the evaluator learns from, if it learns.
      headline: the metrics that a line of text shows; empty for all.
    """

    data: Dataset
    evaluator: Evaluator | None = None
    fit: Dataset | None = None
    headline: tuple[str, ...] = ()

    @property
    def signature(self) -> str:
        """The protocol of its numbers; empty where there is no standard for naming one."""
        return self.evaluator.signature if self.evaluator else ''


@staying()
def run(
    steps: EvalSteps,
    evaluations: Mapping[str, Evaluation],
    variables: PyTree,
    stopping: Stopping = never,
) -> dict[str, float]:
    """The results of evaluations, {'NAME/METRIC': value}.

    Evaluators of the same data are given the same predictions, which are computed once.

    Args:
      steps: compiled for the data.
      evaluations: by their names.
      variables: of the model.
      stopping: asked between two batches, and while one is awaited.

    Raises:
      Interrupted: if it says to stop.
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
    """The results in words, of each evaluation the metrics of its headline.

    Args:
      headlines: metrics by the names of evaluations; empty for all of them.
      results: {'NAME/METRIC': value}, and other numbers, which are shown too.
    """
    words = []
    for key, value in results.items():
        name, _, metric = key.partition('/')
        chosen = headlines.get(name)
        if not chosen or metric in chosen:
            words.append(f'{key} {value:.4f}')
    return '  '.join(words)


def num_examples(opened: Iterable[Evaluation]) -> int:
    """Examples that evaluations pass through the model, as often as they do."""
    opened = list(opened)
    passes = [one.data for one in opened if one.evaluator is None]
    shared = {id(data): data for one in opened if one.evaluator for data in (one.data, one.fit)}
    return sum(len(data.source) for data in (*passes, *shared.values()) if data)


def _shared(readers: Iterable[tuple[Dataset, Take]]) -> Iterator[tuple[Dataset, list[Take]]]:
    """Every data set once, with all that read it."""
    takes: dict[int, tuple[Dataset, list[Take]]] = {}
    for data, take in readers:
        takes.setdefault(id(data), (data, []))[1].append(take)
    yield from takes.values()


def open_evals(
    config: ConfigDict,
    layout: sharding.Layout,
    steps: EvalSteps,
    trained: TrainedModel | None = None,
) -> dict[str, Evaluation]:
    """The evaluation of every entry of `config.evals`; entries of the same data share them.

    Args:
      config: of the run.
      layout: of the devices.
      steps: compiled for it.
      trained: the model that the data are to suit; None to leave that unchecked.

    Raises:
      UserError: for data that are not there, do not suit the evaluator or the model, or have other
        classes.
    """
    opened: dict[str, Dataset] = {}

    def open_once(section: ConfigDict, **changes: Any) -> Dataset:
        keywords = entry_keywords(config, section, **changes)
        key = repr(sorted(keywords.items()))
        if key not in opened:
            opened[key] = open_data(section, layout=layout, **keywords)
        return opened[key]

    return {name: _open_eval(name, config, open_once, steps, trained) for name in config.evals}


def _open_eval(
    name: str,
    config: ConfigDict,
    open_once: Callable[..., Dataset],
    steps: EvalSteps,
    trained: TrainedModel | None,
) -> Evaluation:
    section, where = config.evals[name], f'config.evals.{name}'
    evaluator = objects.make_evaluator(section, where)
    has_own_classes = evaluator is not None and evaluator.learns
    by_model = trained and config.model.get('num_classes') and not has_own_classes
    data = open_once(section, numbering=trained.classes if trained and by_model else None)
    headline = objects.headline(config, section)
    if trained is not None:
        if by_model:
            compatibility.require_classes(trained, where, data)
        compatibility.require_shapes(trained, where, data)
        _check_ids(where, data, config.model.get('vocab_size'))
        vocabulary.require_ids(data.vocab, trained.model, f'{where}: {data.source.title}')
    if evaluator is None:
        return Evaluation(data, headline=headline)
    if steps.predict is None:
        raise UserError(f'{where}: task {config.task.name!r} has no predictions to evaluate')
    fit = open_once(section, split=section.fit) if evaluator.learns else None
    try:
        if (others := evaluator.fit_data(data)) is not None:
            texts = of_texts_alone(config.data.get('transforms', ''))
            fit = open_once(section, **{'transforms': texts} | others)
        evaluator.open(data, fit)
    except UserError as e:
        title = f', {fit.source.title}' if fit else ''
        raise UserError(f'{where}{title}: {e}') from e
    return Evaluation(data, evaluator, fit, headline)


def _check_ids(where: str, data: Dataset, vocab_size: int | None) -> None:
    """Raises UserError if the data have ids for which the model has no embedding."""
    if vocab_size and data.info.vocab_size > vocab_size:
        raise UserError(
            f'{where}: {data.source.title} has ids up to {data.info.vocab_size - 1}, the model '
            f'{vocab_size} of them: evaluate it on data of its own vocabulary'
        )
