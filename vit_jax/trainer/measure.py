"""Evaluations of a trained model, as its config or the user sets them."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from vit_jax import signatures
from vit_jax.checkpoints.averages import NO_AVERAGE
from vit_jax.config import objects, schema
from vit_jax.config.run import Data
from vit_jax.config.run import Evaluation as Entry
from vit_jax.config.schema import to_group
from vit_jax.data.dataset import raw_images
from vit_jax.data.records import first_readable
from vit_jax.data.sources import open_source
from vit_jax.data.transforms import only_text_transforms, without_annotations
from vit_jax.errors import UserError
from vit_jax.inference.load import open_run
from vit_jax.interop.preprocessing import change_size
from vit_jax.interop.trained import Size, TrainedModel
from vit_jax.runtime import mesh, sharding
from vit_jax.trainer import evaluate
from vit_jax.trainer.evaluations import Evaluation, open_data, open_evals
from vit_jax.trainer.program import EvalSteps, compile_steps

_FIT = 'train'  # the split that evaluators learn from, unless another is given
Entries = dict[str, Entry]


@dataclasses.dataclass(frozen=True)
class Measurement:
    """A trained model and evaluations of it, ready to run.

    Attributes:
      trained: The model.
      evaluations: Evaluations by the names of their results.
      steps: Compiled for them.
      read_average: Function that reads the model with the average of a decay, or 0 for none.
    """

    trained: TrainedModel
    evaluations: dict[str, Evaluation]
    steps: EvalSteps
    read_average: Callable[[float], TrainedModel]

    def run(self) -> dict[str, float]:
        """Run the evaluations; return {'NAME/METRIC': value}."""

        def variables_at(decay: float | None) -> Any:
            model = self.trained if decay is None else self.read_average(decay)
            return self.steps.layout.create(lambda loaded: loaded, model.variables)

        return evaluate.run_averages(self.steps, self.evaluations, variables_at)

    def line(self, results: dict[str, float]) -> str:
        """Return the results as a line; see `evaluate.line`."""
        headlines = {name: evaluation.headline for name, evaluation in self.evaluations.items()}
        return evaluate.line(headlines, results)


def prepare(
    trained: TrainedModel,
    *,
    source: str | None = None,
    split: str | None = None,
    classes: Sequence[int] | None = None,
    batch_size: int | None = None,
    image_size: Size | None = None,
    evaluators: Sequence[str] = (),
    fit: str | None = None,
    allowed: Sequence[str] = (),
) -> Measurement:
    """Open the evaluations in the config of a model, as the arguments change them.

    Args:
      trained: The model, ready for images of `image_size`.
      source, split, classes, batch_size: Values for every evaluation.
      image_size: Images of this height and width, see `interop.preprocessing.change_size`.
      evaluators: Evaluators instead of the config's, such as 'knn' or 'fewshot(shots=(1, 5))'.
      fit: The split that evaluators learn from; 'train' by default.
      allowed: Modules of the user that the config may name.

    Raises:
      UserError: for data or evaluators that do not exist or do not suit the model.
    """
    if trained.step is None and None in (source, split):
        raise UserError(f'{trained.path} names no data: give a source and a split')
    entries = _entries(trained, evaluators, fit, split)
    changes: dict[str, Any] = {'source': source, 'split': split, 'batch_size': batch_size}
    changes['classes'] = None if classes is None else tuple(classes)
    if image_size is not None:
        _require_crops(entries)
        entries = {name: _resize_evaluation(entry, image_size) for name, entry in entries.items()}
    changes = {key: value for key, value in changes.items() if value is not None}
    entries = {name: dataclasses.replace(entry, **changes) for name, entry in entries.items()}
    if trained.step is None:
        entries = {name: _without_texts(entry) for name, entry in entries.items()}
    titles = {name: name for name in entries}
    if split is not None and not evaluators:
        titles = _titles_by_split(entries, split)
    trained = trained.with_groups(evals={name: to_group(entries[name]) for name in titles})
    layout = sharding.make_layout(mesh.usable_devices())
    if trained.step is None:
        for entry in trained.settings.evals.values():
            _require_fit(trained, entry, layout)
    steps = compile_steps(trained.model, trained.task, layout, trained.settings.seed)
    opened = open_evals(trained.settings, layout, steps, trained)

    def read_average(decay: float) -> TrainedModel:
        path, average = str(trained.path), decay or NO_AVERAGE
        return open_run(path, image_size, step=trained.step, average=average, allowed=allowed)

    return Measurement(
        trained,
        {titles[name]: evaluation for name, evaluation in opened.items()},
        steps,
        read_average,
    )


def _resize_evaluation(entry: Entry, size: Size) -> Entry:
    """Return an evaluation on images of a different size, with the same transforms."""
    return dataclasses.replace(entry, transforms=change_size(entry.transforms, size))


def _without_texts(entry: Entry) -> Entry:
    """Return an evaluation without text transforms, unless its data have texts."""
    if not only_text_transforms(entry.transforms):
        return entry
    _, record = first_readable(open_source(entry.source, str(entry.split)), 0)
    if any(isinstance(value, str) for value in record.values()):
        return entry
    return dataclasses.replace(entry, transforms=without_annotations(entry.transforms))


def _evaluator_groups(evaluators: Sequence[str], fit: str | None) -> dict[str, dict[str, Any]]:
    """`fewshot(seeds=5)` -> {'fewshot': {'evaluator': 'fewshot', 'seeds': 5, 'fit': 'train'}}.

    The second with the same name is `fewshot_2`.

    Args:
      evaluators: Their names, with keywords or without.
      fit: The split that they learn from, if they learn; None for the default.

    Raises:
      UserError: for an unknown name, or keywords that cannot be read.
    """
    if fit is not None and not evaluators:
        raise UserError(f'--fit {fit!r}: no --evaluator learns from it')
    groups, counts = {}, collections.Counter[str]()
    for text in evaluators:
        name, keywords = signatures.parse_keywords(text, f'--evaluator {text!r}')
        fitted = {'fit': fit or _FIT} if objects.evaluator_class(name).learns else {}
        title = name.rpartition('.')[-1]
        counts[title] += 1
        title += f'_{counts[title]}' if counts[title] > 1 else ''
        groups[title] = {'evaluator': name, **keywords, **fitted}
    return groups


def _entries(
    trained: TrainedModel, evaluators: Sequence[str], fit: str | None, split: str | None
) -> Entries:
    """Return the entries of `config.evals` before the data are chosen."""
    groups_by_name = _evaluator_groups(evaluators, fit)
    if trained.settings.evals and not groups_by_name:
        return dict(trained.settings.evals)
    shared = {*schema.fields(Data), 'batch_size'}
    data = {key: value for key, value in to_group(trained.data).items() if key in shared}
    groups = {name: data | group for name, group in groups_by_name.items()} or {str(split): data}
    return {
        k: schema.make_section(Entry, keys, f'config.evals.{k}', True) for k, keys in groups.items()
    }


def _require_crops(entries: Entries) -> None:
    """Raise UserError for an image size if whole images are evaluated."""
    for name, entry in entries.items():
        if entry.sizes:
            raise UserError(
                '--image-size: the model gets whole images, padded to '
                f'config.evals.{name}.sizes, and takes images of any size; leave the flag out'
            )


def _titles_by_split(entries: Entries, split: str) -> dict[str, str]:
    """Names for the evaluations of a run on a different split; equal ones are merged.

    Returns:
      {entry of config.evals: name of its results}.
    """
    distinct: Entries = {}
    for name, entry in entries.items():
        measured = dataclasses.replace(entry, every=None, batch_size=None)
        if measured not in distinct.values():
            distinct[name] = measured
    titles = {
        name: '_'.join(filter(None, [split, entry.evaluator])) for name, entry in distinct.items()
    }
    alike = collections.Counter(titles.values())
    return {k: f'{title}_{k}' if alike[title] > 1 else title for k, title in titles.items()}


def _require_fit(trained: TrainedModel, entry: Entry, layout: sharding.Layout) -> None:
    """Check that data suit a model whose training data are unknown.

    Raises:
      UserError: if the images have other colors, or one of the two has no classes.
    """
    batch_size = entry.batch_size or trained.settings.batch_size
    source = open_data(entry, batch_size, layout).source
    have, need = raw_images(source).get('channels'), trained.channels
    if have != need:
        raise UserError(
            f'{trained.path} takes images of {need} channels, {entry.source} has {have}'
        )
    outputs, classes = (
        trained.settings.model.options.get('num_classes') or 0,
        source.info.num_classes,
    )
    if entry.evaluator is None and bool(outputs) != bool(classes):
        raise UserError(
            f'{trained.path} has {outputs} classes, {entry.source} has {classes}: '
            'fine-tune it with config.init.from, or give an --evaluator'
        )
