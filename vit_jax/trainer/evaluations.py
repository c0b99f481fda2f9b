"""Evaluations of a config, opened: their data, and the evaluators that measure on them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping

import jax

from vit_jax.config import objects
from vit_jax.config.run import Data, Inference
from vit_jax.config.run import Evaluation as Entry
from vit_jax.data import vocabulary
from vit_jax.data.batches import Process, Shape
from vit_jax.data.dataset import Dataset, open_dataset
from vit_jax.data.records import SourceInfo
from vit_jax.data.transforms import only_text_transforms, without_annotations
from vit_jax.errors import UserError
from vit_jax.evaluators.base import Evaluator, OtherModel
from vit_jax.interop.trained import TrainedModel
from vit_jax.runtime import sharding
from vit_jax.trainer import compatibility
from vit_jax.trainer.program import EvalSteps, PyTree


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """An entry of `config.evals`, ready to run.

    Attributes:
      data: Data to evaluate on.
      evaluator: Evaluator that measures; None for the metrics of the task.
      fit: The data that the evaluator learns from, if it learns.
      headline: Metrics that a line of text shows; empty for all.
      ema_decay: Average to evaluate, see `config.run.Evaluation`.
    """

    data: Dataset
    evaluator: Evaluator | None = None
    fit: Dataset | None = None
    headline: tuple[str, ...] = ()
    ema_decay: float | None = None

    @property
    def signature(self) -> str:
        """Signature of the evaluation protocol; empty if there is no standard one."""
        return self.evaluator.signature if self.evaluator else ''


def open_data(
    data: Data,
    batch_size: int,
    layout: sharding.Layout,
    seed: int = 0,
    numbering: SourceInfo | None = None,
) -> Dataset:
    """Return the data of `config.data` or of an entry of `config.evals`, for these devices.

    Args:
      data: Section of the config.
      batch_size: Size of a global batch.
      layout: Device layout; evaluation batches have a multiple of its shards.
      seed: Seed of training.
      numbering: See `open_dataset`.

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


def open_evals(
    run: Inference,
    layout: sharding.Layout,
    steps: EvalSteps,
    trained: TrainedModel | None = None,
) -> dict[str, Evaluation]:
    """Open every entry of `config.evals`; entries with the same data share them.

    Args:
      run: Config.
      layout: Device layout.
      steps: Steps compiled for it.
      trained: Model that the data must suit; None for no check.

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
    entry, key = run.evals[name], f'config.evals.{name}'
    evaluator = objects.make_evaluator(entry, key)
    if evaluator is not None and evaluator.patches:
        entry = dataclasses.replace(entry, transforms=only_images(entry.transforms))
    has_own_classes = evaluator is not None and evaluator.learns
    by_model = trained and run.model.options.get('num_classes') and not has_own_classes
    data = open_once(entry, trained.classes if trained and by_model else None)
    headline = objects.headline(entry, run.task)
    if trained is not None:
        if by_model:
            compatibility.require_classes(trained, key, data)
        compatibility.require_shapes(trained, key, data)
        if by_model and evaluator is None and trained.num_classes and not data.info.num_classes:
            raise UserError(
                f'{key}: the examples of {data.source.title} have no classes to compare '
                "with the model's: name labeled data, or remove the evaluation"
            )
        _check_ids(key, data, run.model.options.get('vocab_size'))
        vocabulary.require_ids(data.vocab, trained.model, f'{key}: {data.source.title}')
    if evaluator is None:
        return Evaluation(data, headline=headline, ema_decay=entry.ema_decay)
    if steps.predict is None and not evaluator.patches:
        raise UserError(f'{key}: task {run.task.name!r} has no predictions to evaluate')
    fit = open_once(dataclasses.replace(entry, split=entry.fit)) if evaluator.learns else None
    try:
        if (fit_split := evaluator.fit_data(data)) is not None:
            texts = only_text_transforms(run.data.transforms)
            fit = open_once(dataclasses.replace(entry, **{'transforms': texts} | fit_split))
        evaluator.read_models(_other_model)
        evaluator.open(data, fit)
    except UserError as e:
        title = f', {fit.source.title}' if fit else ''
        raise UserError(f'{key}{title}: {e}') from e
    return Evaluation(data, evaluator, fit, headline, entry.ema_decay)


def only_images(transforms: str) -> str:
    """Return transforms of nothing but the images of records."""
    return '|'.join(filter(None, ["keep('image')", without_annotations(transforms)]))


def check_predictions(
    steps: EvalSteps, evaluations: Mapping[str, Evaluation], variables: PyTree
) -> None:
    """Raise UserError if an evaluator measures arrays that the task does not predict.

    Args:
      steps: Steps of the task; nothing is computed.
      evaluations: Evaluations by their names in `config.evals`.
      variables: Variables of the model, or their shapes.
    """
    for name, evaluation in evaluations.items():
        evaluator = evaluation.evaluator
        if evaluator is None or not (evaluator.predictions or evaluator.patches):
            continue
        plan = evaluation.data.plan
        # An evaluation pads its last batch, which may be the only one.
        shape = Shape(plan.batch_size, 1, evaluation.data.spec, plan.slots)
        batch = {
            key: jax.ShapeDtypeStruct((shape.rows, *s.shape), s.dtype)
            for key, s in shape.arrays.items()
        }
        if evaluator.patches:
            try:
                steps.patches(evaluator.patches)[1](variables, batch)
            except UserError as e:
                raise UserError(f'config.evals.{name}: {e}') from e
            continue
        predicted = steps.shapes(variables, batch)[0]
        if missing := [key for key in evaluator.predictions if key not in predicted]:
            raise UserError(
                f'config.evals.{name}: its evaluator measures {missing[0]!r}, which the task does '
                f'not predict, only {", ".join(sorted(predicted))}'
            )


def _other_model(path: str) -> OtherModel:
    from vit_jax.inference.predict import other_model  # here, as few evaluators need one

    return other_model(path)


def _check_ids(key: str, data: Dataset, vocab_size: int | None) -> None:
    """Raise UserError if the data have ids without an embedding in the model."""
    if vocab_size and data.info.vocab_size > vocab_size:
        raise UserError(
            f'{key}: {data.source.title} has ids up to {data.info.vocab_size - 1}, the model '
            f'only {vocab_size} ids: evaluate it on data with the vocabulary of its training'
        )
