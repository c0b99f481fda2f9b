"""Counts of a data set: examples, classes and unreadable files; and known counts of public data.

The known counts let a run be planned without its data.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import pathlib
import re

import numpy as np

from vit_jax.data import sources
from vit_jax.data.dataset import Dataset
from vit_jax.data.records import BrokenRecord, Record, SourceInfo, count_labels
from vit_jax.data.splits import Subset, select
from vit_jax.errors import UserError, nearest

ANY = (512, 512)  # stands for images of all sizes


@dataclasses.dataclass(frozen=True)
class Census:
    """The result of `count`.

    Attributes:
      title: name of the data.
      examples: their number.
      classes: {name: number of examples, or of objects if an example has several}; empty without
        classes, or if their counts are unknown.
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
    """The examples or objects of each class; None if counting would have to read images."""
    if (counts := source.class_counts()) is not None:
        return counts
    try:
        labels = source.labels()
    except UserError:  # of several objects, or none
        if not read_all:
            return None
        found = [source.annotations(i).get('labels', ()) for i in range(len(source))]
        labels = np.concatenate([np.asarray(one, np.int64) for one in found])
    return count_labels(labels, source.info.num_classes)


def _read(source: Subset) -> None:
    for index in range(len(source)):
        with contextlib.suppress(BrokenRecord):  # the source remembers it
            source[index]


@dataclasses.dataclass(frozen=True)
class Known:
    """Facts about a data set without its examples.

    Attributes:
      classes: number of classes.
      splits: {name: number of examples}.
      size: height and width in pixels of all images; None if they differ.
      fields: of objects, such as 'boxes'; none if images have one class each.
      stuff: the classes with at most one segment in an image.
    """

    classes: int
    splits: dict[str, int]
    size: tuple[int, int] | None = None
    fields: tuple[str, ...] = ()
    stuff: tuple[int, ...] = ()


COCO = {'train2017': 118_287, 'val2017': 5_000}
ADE20K = {'training': 20_210, 'validation': 2_000}
CITYSCAPES = {'train': 2_975, 'val': 500, 'test': 1_525}
BOXES, MASKS = ('boxes', 'crowd'), ('boxes', 'masks', 'crowd')
# The numbers of TFDS; imagenet21k is the release of fall 2011, which is not in TFDS. Data sets of
# objects have the name of their source before their own.
DATASETS = {
    'imagenet2012': Known(1000, {'train': 1_281_167, 'validation': 50_000}),
    'imagenet21k': Known(21_843, {'train': 14_197_122}),
    'cifar10': Known(10, {'train': 50_000, 'test': 10_000}, (32, 32)),
    'cifar100': Known(100, {'train': 50_000, 'test': 10_000}, (32, 32)),
    'oxford_iiit_pet': Known(37, {'train': 3_680, 'test': 3_669}),
    'oxford_flowers102': Known(102, {'train': 1_020, 'validation': 1_020, 'test': 6_149}),
    'coco:coco': Known(80, COCO, fields=BOXES),
    'coco_masks:coco': Known(80, COCO, fields=MASKS),
    'panoptic:coco': Known(133, COCO, fields=MASKS, stuff=tuple(range(80, 133))),
    'masks:ADEChallengeData2016': Known(150, ADE20K, fields=('segments',), stuff=tuple(range(150))),
    'masks:cityscapes': Known(
        19, CITYSCAPES, (1024, 2048), fields=('segments',), stuff=tuple(range(19))
    ),
}


def open_source(name: str, split: str) -> Subset:
    """Open a source like `sources.open_source`, or black images that stand in for a known data set.

    Known are `tfds:NAME` of DATASETS, and, if the folder does not exist, `folder:PATH/NAME`,
    `coco:PATH/coco` and others with the name of their source.

    Raises:
      UserError: as `sources.open_source`.
    """
    kind, _, path = name.partition(':')
    if kind == 'tfds':
        dataset = re.split('[/:]', path)[0]
    else:
        folder = pathlib.Path(path).expanduser()
        dataset = '' if folder.is_dir() else folder.name
        dataset = dataset if kind == 'folder' else f'{kind}:{dataset}'
    if dataset not in DATASETS:
        return sources.open_source(name, split)
    return _select(dataset, name, split)


@functools.cache
def _select(dataset: str, name: str, split: str) -> Subset:
    return select(name, split, lambda base: _StandIn(DATASETS[dataset], name, base))


class _StandIn:
    """Black images in the number of the split's examples, with classes in equal shares."""

    def __init__(self, known: Known, name: str, split: str):
        if split not in known.splits:
            raise UserError(f'source {name}: ' + nearest('split', split, known.splits))
        self._known, self._length = known, known.splits[split]
        names = tuple(map(str, range(known.classes)))
        self.info = SourceInfo(known.classes, names, stuff=known.stuff)

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int, /) -> Record:
        image = np.zeros((*(self._known.size or ANY), 3), np.uint8)
        label = index % self._known.classes
        if not self._known.fields:
            return {'image': image, 'label': label}
        mask = np.zeros(image.shape[:2], bool)
        mask[:8, :8] = True
        values = {
            'boxes': np.array([[0, 0, 8, 8]], np.float32),
            'masks': mask[None],
            'crowd': np.zeros(1, bool),
            'segments': mask.astype(np.int16),
        }
        found = {name: values[name] for name in self._known.fields}
        return {'image': image, **found, 'labels': np.array([label], np.int32)}

    def labels(self) -> np.ndarray:
        # Two bytes a label are sorted much faster than eight.
        return np.resize(np.arange(self._known.classes, dtype=np.uint16), self._length)

    def record_name(self, index: int, /) -> str:
        return f'example {index}'
