"""Counts of a data set: examples, classes, and unreadable files."""

from __future__ import annotations

import contextlib
import dataclasses

import numpy as np

from vit_jax.data.dataset import Dataset
from vit_jax.data.records import BrokenRecord, counted
from vit_jax.data.splits import Subset
from vit_jax.errors import UserError


@dataclasses.dataclass(frozen=True)
class Census:
    """The result of `count`.

    Attributes:
      title: of the data.
      examples: their number.
      classes: {name: number of examples, or of objects if an example has several}; empty if there
        are none, or they are not known.
      broken: names and reasons of the records found broken so far.
    """

    title: str
    examples: int
    classes: dict[str, int]
    broken: tuple[str, ...]


def count(data: Dataset, read_all: bool = False) -> Census:
    """Count examples and classes, from annotations alone or by reading every example.

    Args:
      data: its examples may have been read in part.
      read_all: read every example, to find all broken files and the classes of all objects.

    Raises:
      UserError: if too many are broken.
    """
    source, info = data.source, data.info
    if read_all:
        _read(source)
    names = info.class_names or tuple(map(str, range(info.num_classes)))
    counts = _counts(source, read_all) if names else None
    found = () if counts is None else counts.tolist()
    broken = tuple(source.broken[index] for index in sorted(source.broken))
    return Census(source.title, len(source), dict(zip(names, found, strict=False)), broken)


def _counts(source: Subset, read_all: bool) -> np.ndarray | None:
    """The examples or objects of each class; None if that would take reading the images."""
    if (counts := source.class_counts()) is not None:
        return counts
    try:
        labels = source.labels()
    except UserError:  # of several objects, or none
        if not read_all:
            return None
        found = [source.annotations(i).get('labels', ()) for i in range(len(source))]
        labels = np.concatenate([np.asarray(one, np.int64) for one in found])
    return counted(labels, source.info.num_classes)


def _read(source: Subset) -> None:
    for index in range(len(source)):
        with contextlib.suppress(BrokenRecord):  # the source remembers it
            source[index]
