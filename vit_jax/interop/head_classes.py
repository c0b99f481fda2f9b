"""The checkpoint's classes for those of a run, by their names or by `config.init.classes`.

A head of 21,841 classes already contains the 1,000 of ImageNet-1k. The file of
`config.init.classes` has a line for each class of the run, in their order: the number of the same
class in the checkpoint, from 0.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np
from flax import traverse_util

from vit_jax.data import class_ids
from vit_jax.data.records import SourceInfo
from vit_jax.errors import UserError
from vit_jax.interop.trained import TrainedModel
from vit_jax.storage import paths


@dataclasses.dataclass(frozen=True)
class Order:
    """What becomes of a head that has the right number of outputs.

    Attributes:
      chosen: the numbers of the checkpoint's classes in the order of the run's; None for a new
        head.
      why: for people.
    """

    chosen: np.ndarray | None
    why: str


def by_name(trained: TrainedModel, classes: SourceInfo) -> Order | None:
    """The order of a checkpoint's classes for data, by their names.

    Args:
      trained: the checkpoint.
      classes: of the data. Where they are a part of the checkpoint's, the others follow.

    Returns:
      None to keep the order: it is the same, or one side does not name its classes.
    """
    known = trained.classes
    if known is None or not classes.num_classes:
        return None
    chosen = class_ids.numbers(classes, known, 'config.data')
    if chosen is None and not class_ids.comparable(classes, known):
        return None
    if chosen is None or class_ids.ABSENT in chosen:
        return Order(
            None,
            f'the checkpoint has other classes{class_ids.listed(known, classes)} than the '
            f'data{class_ids.listed(classes, known)}',
        )
    if np.array_equal(chosen, np.arange(len(chosen))):
        return None
    names = class_ids.some(known.class_names)
    return Order(chosen, f'its classes ({names}) are put into the order of the data, by name')


def columns(flat: Mapping[str, np.ndarray], head: str, chosen: np.ndarray) -> dict[str, np.ndarray]:
    """The arrays of a head with the chosen outputs first, and the others behind them."""
    arrays = {name: np.asarray(x) for name, x in flat.items() if name.startswith(f'{head}/')}
    count = next(iter(arrays.values())).shape[-1]
    order = np.append(chosen, np.setdiff1d(np.arange(count), chosen))
    return {name: array[..., order] for name, array in arrays.items()}


def read_classes(path: str) -> np.ndarray:
    """The numbers of a file of classes, int64 [classes of the run].

    Raises:
      UserError: if there is no such file, or a line is no number.
    """
    where = f'config.init.classes={path}'
    try:
        lines = paths.read_bytes(paths.absolute(path)).decode().splitlines()
    except (OSError, UnicodeDecodeError) as e:
        raise UserError(f'{where}: cannot be read ({e})') from None
    for number, line in enumerate(lines, 1):
        if not line.strip().isdecimal():
            raise UserError(f'{where}, line {number}: {line!r} is not the number of a class')
    return np.array([int(line) for line in lines], np.int64)


def take_classes(imported: TrainedModel, model: Any, chosen: np.ndarray) -> TrainedModel:
    """A checkpoint whose head has only the chosen classes, with a note about it.

    Args:
      imported: the checkpoint.
      model: the new Linen module; the last of its `head_layers` has an output for each class.
      chosen: numbers of the checkpoint's classes, in the order of the model's.

    Raises:
      UserError: if the checkpoint has no such head or no such class, or the run has another number
        of classes.
    """
    head, wanted = model.head_layers[-1], model.num_classes
    flat = traverse_util.flatten_dict(dict(imported.params), sep='/')
    of_classes = {name: np.asarray(x) for name, x in flat.items() if name.startswith(f'{head}/')}
    if not of_classes:
        raise UserError(f'config.init.classes: the checkpoint has no {head} to take classes from')
    if len(chosen) != wanted:
        raise UserError(
            f'config.init.classes: {len(chosen)} lines, but the run has {wanted} classes'
        )
    outputs = next(iter(of_classes.values())).shape[-1]
    count = imported.model_config.get('num_classes') or outputs
    if chosen.max() >= count:
        raise UserError(
            f'config.init.classes: there is no class {chosen.max()} in a head of {count} '
            'classes, which are counted from 0'
        )
    taken = np.append(chosen, np.arange(count, outputs))  # a detector's last one is no class
    flat |= {name: array[..., taken] for name, array in of_classes.items()}
    params: dict[str, Any] = traverse_util.unflatten_dict(flat, sep='/')
    note = f'{head}: {wanted} of its {count} classes are taken'
    return dataclasses.replace(imported, params=params).with_notes(note)
