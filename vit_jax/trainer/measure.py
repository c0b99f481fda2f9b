"""Evaluations of a trained model: those of its config, or others, on its data or other data."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Sequence
from typing import Any

from vit_jax import signatures
from vit_jax.config import schema
from vit_jax.data.dataset import raw_images
from vit_jax.data.records import first_readable
from vit_jax.data.sources import open_source
from vit_jax.data.transforms import only_text_transforms, without_annotations
from vit_jax.errors import UserError
from vit_jax.interop.preprocessing import resized
from vit_jax.interop.trained import Size, TrainedModel
from vit_jax.runtime import mesh, sharding
from vit_jax.trainer import evaluate
from vit_jax.trainer.evaluate import Evaluation

_FIT = 'train'  # the split that evaluators learn from, unless another is given
Groups = dict[str, dict[str, Any]]


@dataclasses.dataclass(frozen=True)
class Measurement:
    """A trained model and evaluations of it, ready to run.

    Attributes:
      trained: the model.
      evaluations: by the names that their results get.
      steps: compiled for them.
    """

    trained: TrainedModel
    evaluations: dict[str, Evaluation]
    steps: evaluate.EvalSteps

    def run(self) -> dict[str, float]:
        """Run the evaluations; return {'NAME/METRIC': value}."""
        variables = self.steps.layout.create(lambda loaded: loaded, self.trained.variables)
        return evaluate.run(self.steps, self.evaluations, variables)

    def line(self, results: dict[str, float]) -> str:
        """The results as a line; see `evaluate.line`."""
        headlines = {name: one.headline for name, one in self.evaluations.items()}
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
) -> Measurement:
    """Open the evaluations of a model: those of its config, or as the arguments change them.

    Args:
      trained: the model, ready for images of `image_size`.
      source, split, classes, batch_size: replace those of every evaluation.
      image_size: images of this height and width, see `interop.preprocessing.resized`.
      evaluators: replace the evaluations of the config, as 'knn' or 'fewshot(shots=(1, 5))'.
      fit: the split that evaluators learn from; 'train' by default.

    Raises:
      UserError: for data or evaluators that do not exist or do not suit the model.
    """
    if trained.step is None and None in (source, split):
        raise UserError(f'{trained.path} names no data: give a source and a split')
    groups = _groups(trained, evaluators, fit, split)
    given: dict[str, Any] = {'source': source, 'split': split, 'batch_size': batch_size}
    given['classes'] = None if classes is None else tuple(classes)
    if image_size is not None:
        _require_crops(groups)
        groups = {name: _resized(group, image_size) for name, group in groups.items()}
    given = {key: value for key, value in given.items() if value is not None}
    groups = {name: group | given for name, group in groups.items()}
    if trained.step is None:
        groups = {name: _without_texts(group) for name, group in groups.items()}
    titles = {name: name for name in groups}
    if split is not None and not evaluators:
        titles = _titles_by_split(groups, split)
    trained = trained.with_groups(evals={name: groups[name] for name in titles})
    layout = sharding.make_layout(mesh.usable_devices())
    if trained.step is None:
        for group in trained.config.evals.values():
            _require_fit(trained, group, layout)
    seed = trained.config.get('seed', 0)
    steps = evaluate.compile_steps(trained.model, trained.task, layout, seed)
    opened = evaluate.open_evals(trained.config, layout, steps, trained)
    return Measurement(trained, {titles[name]: one for name, one in opened.items()}, steps)


def _resized(group: dict[str, Any], size: Size) -> dict[str, Any]:
    """An evaluation on images of another size, with the same transforms."""
    return {**group, 'transforms': resized(group.get('transforms', ''), size)}


def _without_texts(group: dict[str, Any]) -> dict[str, Any]:
    """An evaluation without text transforms, unless its data have texts."""
    transforms = group.get('transforms', '')
    if not only_text_transforms(transforms):
        return group
    _, record = first_readable(open_source(group['source'], group['split']), 0)
    if any(isinstance(value, str) for value in record.values()):
        return group
    return {**group, 'transforms': without_annotations(transforms)}


def _evaluator_groups(evaluators: Sequence[str], fit: str | None) -> Groups:
    """`fewshot(seeds=5)` -> {'fewshot': {'evaluator': 'fewshot', 'seeds': 5, 'fit': 'train'}}.

    Args:
      evaluators: their names, with keywords or without.
      fit: the split that they learn from, if they learn; None for the default.

    Raises:
      UserError: for an unknown name, or keywords that cannot be read.
    """
    if fit is not None and not evaluators:
        raise UserError(f'--fit {fit!r}: no --evaluator learns from it')
    groups = {}
    for text in evaluators:
        name, keywords = signatures.parse_keywords(text, f'--evaluator {text!r}')
        fitted = {'fit': fit or _FIT} if schema.evaluator_class(name).learns else {}
        groups[name.rpartition('.')[-1]] = {'evaluator': name, **keywords, **fitted}
    return groups


def _groups(
    trained: TrainedModel, evaluators: Sequence[str], fit: str | None, split: str | None
) -> Groups:
    """The entries of `config.evals` before the data are chosen."""
    if entries := _evaluator_groups(evaluators, fit):
        data = evaluate.data_keywords(trained.data_config, trained.config.batch_size)
        return {name: data | entry for name, entry in entries.items()}
    config = trained.config
    evals = config.evals.items() if config.evals else [(str(split), config.data)]
    return {name: dict(group) for name, group in evals}


def _require_crops(groups: Groups) -> None:
    """Raise UserError for an image size if whole images are evaluated."""
    for name, group in groups.items():
        if group.get('sizes'):
            raise UserError(
                '--image-size: the model gets whole images, padded to '
                f'config.evals.{name}.sizes, and takes those of any size; leave the flag out'
            )


def _titles_by_split(groups: Groups, split: str) -> dict[str, str]:
    """Names for the evaluations of a run on another split; equal ones are merged.

    Returns:
      {entry of config.evals: name of its results}.
    """
    kept: dict[str, Any] = {}
    for name, group in groups.items():
        measured = {k: v for k, v in group.items() if k not in ('every', 'batch_size')}
        if measured not in kept.values():
            kept[name] = measured
    titles = {
        name: '_'.join(filter(None, [split, group.get('evaluator')]))
        for name, group in kept.items()
    }
    alike = collections.Counter(titles.values())
    return {k: f'{title}_{k}' if alike[title] > 1 else title for k, title in titles.items()}


def _require_fit(trained: TrainedModel, group: Any, layout: sharding.Layout) -> None:
    """Check that data suit a model whose training data are unknown.

    Raises:
      UserError: if the images have other colors, or one of the two has no classes.
    """
    source = evaluate.open_data(group, trained.config.batch_size, layout).source
    have, need = raw_images(source).get('channels'), trained.channels
    if have != need:
        raise UserError(
            f'{trained.path} takes images of {need} channels, {group.source} has {have}'
        )
    outputs, classes = trained.config.model.get('num_classes') or 0, source.info.num_classes
    if 'evaluator' not in group and bool(outputs) != bool(classes):
        raise UserError(
            f'{trained.path} has {outputs} classes, {group.source} has {classes}: '
            'fine-tune it with config.init.from, or give an --evaluator'
        )
