"""Counts of a data set: examples, classes and unreadable files; and published counts.

With published counts a run can be planned without its data.
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

ANY = (512, 512)  # placeholder for images of varying size


@dataclasses.dataclass(frozen=True)
class Census:
    """Result of `count`.

    Attributes:
      title: Name of the data.
      examples: Number of examples.
      classes: {name: number of examples, or of objects if an example has several}; empty without
        classes, or if their counts are unknown.
      broken: Names of broken records, with the reasons.
    """

    title: str
    examples: int
    classes: dict[str, int]
    broken: tuple[str, ...]


def count(data: Dataset, read_all: bool = False) -> Census:
    """Count examples and classes, from the annotations or by reading every example.

    Args:
      data: Data set, possibly read in part.
      read_all: Whether to read every example, to find all broken files and all objects' classes.

    Raises:
      UserError: if too many records are broken.
    """
    source, info = data.source, data.info
    if read_all:
        _read_all(source)
    names = info.class_names or tuple(map(str, range(info.num_classes)))
    counts = _count_classes(source, read_all) if names else None
    class_counts = () if counts is None else counts.tolist()
    broken = tuple(source.broken[index] for index in sorted(source.broken))
    return Census(source.title, len(source), dict(zip(names, class_counts, strict=False)), broken)


def _count_classes(source: Subset, read_all: bool) -> np.ndarray | None:
    """Count the examples or objects of each class; None if that required reading images."""
    if (counts := source.class_counts()) is not None:
        return counts
    try:
        labels = source.labels()
    except UserError:  # examples have several objects, or none
        if not read_all:
            return None
        labels_of_examples = [source.annotations(i).get('labels', ()) for i in range(len(source))]
        labels = np.concatenate([np.asarray(array, np.int64) for array in labels_of_examples])
    return count_labels(labels, source.info.num_classes)


def _read_all(source: Subset) -> None:
    for index in range(len(source)):
        with contextlib.suppress(BrokenRecord):  # the source lists it in `broken`
            source[index]


@dataclasses.dataclass(frozen=True)
class PublishedData:
    """Published facts about a data set.

    Attributes:
      classes: Number of classes.
      splits: {name: number of examples}.
      size: Height and width in pixels of all images; None if they differ.
      fields: Names of object fields, such as 'boxes'; empty if images have one class each.
      stuff: Classes with at most one segment per image.
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
# Counts from TFDS; imagenet21k is the release of fall 2011, which is not in TFDS. Data sets with
# objects are named SOURCE:NAME.
DATASETS = {
    'imagenet2012': PublishedData(1000, {'train': 1_281_167, 'validation': 50_000}),
    'imagenet21k': PublishedData(21_843, {'train': 14_197_122}),
    'cifar10': PublishedData(10, {'train': 50_000, 'test': 10_000}, (32, 32)),
    'cifar100': PublishedData(100, {'train': 50_000, 'test': 10_000}, (32, 32)),
    'oxford_iiit_pet': PublishedData(37, {'train': 3_680, 'test': 3_669}),
    'oxford_flowers102': PublishedData(102, {'train': 1_020, 'validation': 1_020, 'test': 6_149}),
    'coco:coco': PublishedData(80, COCO, fields=BOXES),
    'coco_masks:coco': PublishedData(80, COCO, fields=MASKS),
    'panoptic:coco': PublishedData(133, COCO, fields=MASKS, stuff=tuple(range(80, 133))),
    'masks:ADEChallengeData2016': PublishedData(
        150, ADE20K, fields=('segments',), stuff=tuple(range(150))
    ),
    'masks:cityscapes': PublishedData(
        19, CITYSCAPES, (1024, 2048), fields=('segments',), stuff=tuple(range(19))
    ),
}


def open_source(name: str, split: str) -> Subset:
    """Open a source like `sources.open_source`, or black images in place of a data set in DATASETS.

    Black images replace every `tfds:NAME` in DATASETS, and `folder:PATH/NAME`, `coco:PATH/coco` and
    the other kinds if their folder does not exist.

    Raises:
      UserError: see `sources.open_source`.
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
    return select(name, split, lambda base: _BlackImages(DATASETS[dataset], name, base))


class _BlackImages:
    """Black images, as many as the split has examples, with equal shares of all classes."""

    def __init__(self, facts: PublishedData, name: str, split: str):
        if split not in facts.splits:
            raise UserError(f'source {name}: ' + nearest('split', split, facts.splits))
        self._facts, self._length = facts, facts.splits[split]
        names = tuple(map(str, range(facts.classes)))
        self.info = SourceInfo(facts.classes, names, stuff=facts.stuff)

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int, /) -> Record:
        image = np.zeros((*(self._facts.size or ANY), 3), np.uint8)
        label = index % self._facts.classes
        if not self._facts.fields:
            return {'image': image, 'label': label}
        mask = np.zeros(image.shape[:2], bool)
        mask[:8, :8] = True
        values = {
            'boxes': np.array([[0, 0, 8, 8]], np.float32),
            'masks': mask[None],
            'crowd': np.zeros(1, bool),
            'segments': mask.astype(np.int16),
        }
        objects = {name: values[name] for name in self._facts.fields}
        return {'image': image, **objects, 'labels': np.array([label], np.int32)}

    def labels(self) -> np.ndarray:
        # Labels of two bytes are sorted much faster than labels of eight.
        return np.resize(np.arange(self._facts.classes, dtype=np.uint16), self._length)

    def record_name(self, index: int, /) -> str:
        return f'example {index}'
