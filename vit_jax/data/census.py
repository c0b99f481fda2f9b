"""What is in a data set: examples, classes, and files that cannot be read."""

from __future__ import annotations

import contextlib
import dataclasses

import numpy as np

from vit_jax.data.dataset import Dataset
from vit_jax.data.records import BrokenRecord
from vit_jax.data.splits import Subset
from vit_jax.errors import UserError


@dataclasses.dataclass(frozen=True)
class Census:
    """What `count` finds.

    Attributes:
      title: of the data.
      examples: their number.
      classes: {name: examples of it, or objects where an example has several}; empty if there are
        none, or they are not known.
      broken: names and reasons of the records found broken so far.
    """

    title: str
    examples: int
    classes: dict[str, int]
    broken: tuple[str, ...]


def count(data: Dataset, read_all: bool = False) -> Census:
    """Counts what the format of the data tells without its images, or reads every example.

    Args:
      data: its examples may have been read in part.
      read_all: find every broken file, and the classes of objects whatever it takes.

    Raises:
      UserError: if too many are broken.
    """
    source, info = data.source, data.info
    if read_all:
        _read(source)
    names = info.class_names or tuple(map(str, range(info.num_classes)))
    labels = _labels(source, read_all) if names else None
    found = () if labels is None else np.bincount(labels, minlength=len(names)).tolist()
    broken = tuple(source.broken[index] for index in sorted(source.broken))
    return Census(source.title, len(source), dict(zip(names, found, strict=False)), broken)


def _labels(source: Subset, read_all: bool) -> np.ndarray | None:
    """The class of every example or object; None if only the images tell, and are not read."""
    try:
        return source.labels()
    except UserError:  # of several objects, or none
        if not (read_all or source.has_annotations):
            return None
        found = [source.annotations(i).get('labels', ()) for i in range(len(source))]
        return np.concatenate([np.asarray(labels, np.int64) for labels in found])


def _read(source: Subset) -> None:
    for index in range(len(source)):
        with contextlib.suppress(BrokenRecord):  # the source remembers it
            source[index]
