"""Checks that data suit a model or a resumed run: shapes, classes and examples."""

from __future__ import annotations

import functools
import itertools
import logging
from collections.abc import Mapping, Sequence
from typing import Any

import jax
from ml_collections import ConfigDict

from vit_jax.config import defaults
from vit_jax.config.load import from_dict
from vit_jax.data import numbering
from vit_jax.data.batches import ArraySpec
from vit_jax.data.dataset import Dataset
from vit_jax.data.records import SourceInfo
from vit_jax.errors import UserError
from vit_jax.interop.trained import TrainedModel
from vit_jax.runtime import environment
from vit_jax.step import init_variables
from vit_jax.tree_paths import param_paths

_log = logging.getLogger(__name__)
PyTree = Any


def require_shapes(trained: TrainedModel, key: str, data: Dataset) -> None:
    """Check that a model takes the data with the same parameters; nothing is computed.

    Args:
      trained: The model; the shapes of its parameters are enough.
      key: The place in the config that names the data.
      data: Data to evaluate.

    Raises:
      UserError: if it does not; names the shapes of both images or of the parameters.
    """
    if data.spec == trained.spec:
        return

    title = data.source.title
    example = {k: jax.ShapeDtypeStruct((1, *s.shape), s.dtype) for k, s in data.spec.items()}
    init = functools.partial(init_variables, trained.model, trained.task, seed=0)
    try:
        jax.eval_shape(trained.task.inputs, example)
    except KeyError as e:
        raise UserError(
            f'{key}: {title}: its examples have {", ".join(data.spec)}, the model takes {e}'
        ) from e
    try:
        want = param_paths(jax.eval_shape(init, example)['params'])
    except UserError as e:
        raise UserError(f'{key}: {title}: {e}') from e
    have = param_paths(trained.params)
    for name in sorted(have.keys() & want.keys()):
        if have[name].shape != want[name].shape:
            raise UserError(
                f'{key}: {title} does not suit the model, whose {name} of shape '
                f'{tuple(have[name].shape)} would have to be {tuple(want[name].shape)}'
                f'{_advice(data.spec.get("image"), trained.spec.get("image"))}'
            )


def _advice(image: ArraySpec | None, expected: ArraySpec | None) -> str:
    """Describe how an image differs from the expected one; empty if one of them is unknown."""
    if image is None or expected is None:
        return ''
    height, width, channels = expected.shape[-3:]
    if image.shape[-1] != channels:
        advice = f'take images of {channels} channel{"s" if channels > 1 else ""}'
    else:
        advice = (
            f"resize them by its transforms, such as 'resize(({height}, {width}))', or give "
            'evaluate --image-size'
        )
    return f': images of {_pixels(image)}, trained on {_pixels(expected)}; {advice}'


def require_classes(trained: TrainedModel, key: str, data: Dataset) -> None:
    """Check that data and model have the same classes; `key` is as for `require_shapes`.

    Classes with names that the model knows already have its numbers, see `Subset.numbered_as`.

    Raises:
      UserError: if their number differs, or their names if both have names.
    """
    classes, info = trained.classes, data.info
    if classes is None or not info.num_classes:
        return
    same_names = info.class_names == classes.class_names
    if info.num_classes == classes.num_classes:
        if same_names or not (info.has_names and classes.has_names):
            return
        if not numbering.have_comparable_names(info, classes):
            _log.warning(
                '%s: its classes%s are matched with the classes of the model%s by number, since '
                'one side names classes by WordNet ids',
                *(data.source.title, numbering.in_brackets(info, classes)),
                numbering.in_brackets(classes, info),
            )
            return
    raise UserError(
        f'{key}: {data.source.title} has {info.num_classes} '
        f'classes{numbering.in_brackets(info, classes)}, the model has '
        f'{classes.num_classes}{numbering.in_brackets(classes, info)}; evaluate it on data with '
        'these classes, with an evaluator that learns, such as knn, or fine-tune it by '
        'config.init.from'
    )


def require_same_classes(saved: Sequence[str], info: SourceInfo, key: str = 'config.data') -> None:
    """Check that a run's data have the classes that they had when it was saved.

    Args:
      saved: Names of the classes in the checkpoint.
      info: Facts about the data.
      key: The place in the config, for the message.

    Raises:
      UserError: for a class with another name.
    """
    pairs = itertools.zip_longest(saved, info.class_names) if saved else ()
    for label, (before, after) in enumerate(pairs):
        if before != after:
            raise UserError(
                f'{key}: class {label} is {after!r}, and was {before!r} when the run was '
                'saved; bring the data back as they were, or train them in another --workdir'
            )


def require_same_function(saved: Mapping[str, Any] | None, config: ConfigDict) -> None:
    """Check that a config makes the model and task of a checkpoint, if its config is known.

    Raises:
      UserError: names the key and both values.
    """
    if not isinstance(saved, Mapping):
        return
    for key, before, after in defaults.function_changes(from_dict(dict(saved)), config):
        raise UserError(
            f'config.{key} is {after!r}, and was {before!r} when the run was saved: set it back, '
            'or train in another --workdir'
        )


def require_same_numerics(meta: Mapping[str, Any]) -> None:
    """Check that JAX has the settings that a checkpoint was made with, if its `meta` has them.

    Random numbers, dtypes and products depend on them.

    Raises:
      UserError: names the setting and both values.
    """
    saved = meta.get('numerics', {})
    for name, current in environment.numeric_settings().items():
        before = saved.get(name, current)
        if before != current:
            raise UserError(
                f'{name} is {current!r}, and was {before!r} when the run was saved: set the '
                f'environment variable {name.upper()} back, or train in another --workdir'
            )


def require_same_count(saved: int | None, data: Dataset) -> None:
    """Check that a run's data have as many examples as when it was saved, if that is known.

    The order of all epochs depends on their number.

    Raises:
      UserError: if they are more or fewer.
    """
    if saved is not None and saved != data.num_examples:
        raise UserError(
            f'config.data: {data.source.title} has {data.num_examples:,} examples, and had '
            f'{saved:,} when the run was saved; bring the data back as they were, or train on them '
            'in another --workdir'
        )


def require_same_class_counts(saved: Sequence[int] | None, data: Dataset) -> None:
    """Check that classes have as many examples as when a run was saved, if that is known.

    The weights of classes may depend on their numbers.

    Raises:
      UserError: if one has more or fewer.
    """
    if saved is not None and data.class_counts is not None and [*saved] != [*data.class_counts]:
        raise UserError(
            f'config.data: the classes of {data.source.title} have different numbers of examples '
            'than when the run was saved; bring the data back as they were, or train on them in '
            'another --workdir'
        )


def require_same_listing(saved: Mapping[str, str] | None, data: Dataset) -> tuple[str, ...]:
    """Check that a run's data list the same examples as when it was saved.

    Args:
      saved: Listing in the checkpoint; None for an old checkpoint without one.
      data: Training data of the run.

    Returns:
      A line if only sizes or checksums of files differ, such as of a repaired file.

    Raises:
      UserError: for examples with different names, labels or annotations, or in a different order.
    """
    listing, title = data.listing, data.source.title
    if saved is None:
        return ()
    if saved['examples'] != listing.examples:
        raise UserError(
            f'config.data: {title} has as many examples as when the run was saved, but with '
            'different names or labels; bring the data back as they were, or train on them in '
            'another --workdir'
        )
    if saved['contents'] and saved['contents'] != listing.contents:
        return (
            f'config.data: files of {title} have different sizes or checksums than when the run '
            'was saved: it continues with the new ones',
        )
    return ()


def _pixels(image: ArraySpec) -> str:
    height, width, channels = image.shape[-3:]
    return f'{width} x {height} ({channels} channel{"s" if channels > 1 else ""})'
