"""Evaluators that learn a value of each pixel from features of patches, and what they may learn."""

from __future__ import annotations

import abc
import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from vit_jax.array_types import Float, Shaped
from vit_jax.errors import UserError, check_choice
from vit_jax.evaluators import base, mean_iou
from vit_jax.evaluators.base import Arrays, Dataset
from vit_jax.ops import depth
from vit_jax.ops.patch_maps import View

TARGETS = ('segmentation', 'depth')


class Example(NamedTuple):
    """Features of an image, and what is true of it.

    Attributes:
      number: Index in the source.
      patches: Features of patches.
      mirrored: Those of the image mirrored left and right, if the evaluator wants them.
      frame: Height and width of the model's image in pixels.
      truth: Truth of each pixel of the source's image; the target's `unknown` where unknown, or
        where the model's image does not show the pixel.
      view: Place of these pixels in the model's image.
    """

    number: int
    patches: Float[np.ndarray, 'h w D']
    mirrored: Float[np.ndarray, 'h w D'] | None
    frame: tuple[int, int]
    truth: Shaped[np.ndarray, 'H W']
    view: View


class Target(abc.ABC):
    """What is learned, and its measures.

    Attributes:
      unknown: Truth of pixels that do not count.
    """

    unknown: float

    @abc.abstractmethod
    def open(self, dataset: Dataset, fit: Dataset) -> None:
        """Raise UserError unless both data have this truth."""

    @abc.abstractmethod
    def start(self) -> None:
        """Forget all measures."""

    @abc.abstractmethod
    def truth(self, record: dict[str, Any]) -> Shaped[np.ndarray, 'H W']:
        """Return the truth of each pixel."""

    @abc.abstractmethod
    def add(self, predicted: Float[np.ndarray, 'H W C'], truth: Shaped[np.ndarray, 'H W']) -> None:
        """Compare an image's predictions: scores of the classes, or C = 1 depth."""

    @abc.abstractmethod
    def result(self) -> dict[str, float]:
        """Return the measures of all images."""

    @property
    @abc.abstractmethod
    def names(self) -> tuple[str, ...]:
        """Names of the measures."""


class Segmentation(Target):
    """Classes of pixels."""

    unknown = mean_iou.NONE
    names = mean_iou.NAMES

    def __init__(self, per_class: bool):
        self._judge = mean_iou.Evaluator(per_class)

    @property
    def num_classes(self) -> int:
        """Number of classes."""
        return len(self._judge.matrix)

    def open(self, dataset: Dataset, fit: Dataset) -> None:
        base.require_segments(fit)
        self._judge.open(dataset)
        if fit.info.class_names != dataset.info.class_names:
            raise UserError(f'{dataset.source.title} has other classes than {fit.source.title}')

    def start(self) -> None:
        self._judge.start()

    def truth(self, record: dict[str, Any]) -> Shaped[np.ndarray, 'H W']:
        return mean_iou.class_map(record).astype(np.int16)

    def add(self, predicted: Float[np.ndarray, 'H W C'], truth: Shaped[np.ndarray, 'H W']) -> None:
        classes, truth = predicted.argmax(-1), truth.astype(np.int64)
        self._judge.matrix += mean_iou.count_pixels(truth, classes, self.num_classes)

    def result(self) -> dict[str, float]:
        return self._judge.result()


class Depth(Target):
    """Depth of pixels, above 0.

    Attributes:
      deepest: Largest depth that counts.
      eigen_crop: Whether only pixels within `ops.depth.eigen_crop` are measured.
    """

    unknown = depth.UNKNOWN
    names = depth.NAMES

    def __init__(self, deepest: float = math.inf, eigen_crop: bool = False):
        self.deepest, self.eigen_crop = deepest, eigen_crop
        self.start()

    def open(self, dataset: Dataset, fit: Dataset) -> None:
        for data in (dataset, fit):
            record = data.source.annotations(0)
            if record and 'depth' not in record:
                raise UserError(
                    f"{data.source.title}: the records have no 'depth', only {', '.join(record)}"
                )

    def start(self) -> None:
        self._images: list[dict[str, float]] = []

    def truth(self, record: dict[str, Any]) -> Shaped[np.ndarray, 'H W']:
        truth = record['depth']
        return np.where(truth <= self.deepest, truth, np.float32(self.unknown))

    def add(self, predicted: Float[np.ndarray, 'H W C'], truth: Shaped[np.ndarray, 'H W']) -> None:
        valid = truth > self.unknown
        if self.eigen_crop:
            inside = np.zeros_like(valid)
            inside[depth.eigen_crop(*valid.shape)] = True
            valid &= inside
        if valid.any():
            measures = depth.measure(predicted[..., 0].astype(float), truth.astype(float), valid)
            self._images.append({name: float(value) for name, value in measures.items()})

    def result(self) -> dict[str, float]:
        if not self._images:
            return {}
        return {name: float(np.mean([x[name] for x in self._images])) for name in self.names}


class Evaluator(base.Evaluator):
    """Base class: `learn` from examples of the fit split, `finish`, then `predict`.

    Pixels are counted in the source's images, without those that a crop removed.

    Attributes:
      target: What is learned.
    """

    learns = True
    headline = ('mIoU', 'pixel_accuracy', 'RMSE', 'delta1')

    def __init__(
        self, target: str, per_class: bool, deepest: float = math.inf, eigen_crop: bool = False
    ):
        check_choice('target', target, TARGETS)
        self.target: Target = (
            Depth(deepest, eigen_crop) if target == 'depth' else Segmentation(per_class)
        )

    def open(self, dataset: Dataset, fit: Dataset | None = None) -> None:
        """Raise UserError if the images have no segments, or no depth."""
        assert fit is not None
        self.target.open(dataset, fit)
        self._data, self._fit_data = dataset, fit
        self.start()

    @property
    def count(self) -> int:
        """Number of images to learn from."""
        return len(self._fit_data.source)

    def start(self) -> None:
        self.target.start()
        self._is_ready, self._is_finite = False, True
        self.reset()

    def names(self) -> tuple[str, ...]:
        return self.target.names

    def fit(self, predictions: Arrays, batch: Arrays) -> None:
        for example in self._examples(self._fit_data, predictions, batch):
            self.learn(example)

    def update(self, predictions: Arrays, batch: Arrays) -> None:
        for example in self._examples(self._data, predictions, batch):
            if not self._is_ready:
                self.finish()
                self._is_ready = True
            values = self.predict(example.patches)
            if example.mirrored is not None:
                values = (values + self.predict(example.mirrored)[:, ::-1]) / 2
            predicted = example.view.enlarge(values)
            self._is_finite &= bool(np.isfinite(predicted).all())
            if self._is_finite:
                self.target.add(predicted, example.truth)

    def result(self) -> dict[str, float]:
        self.reset()  # free the features
        return self.target.result() if self._is_finite else dict.fromkeys(self.names(), math.nan)

    def _examples(self, data: Dataset, predictions: Arrays, batch: Arrays) -> Iterator[Example]:
        """Yield the examples of a batch; none once features are not finite."""
        self._is_finite &= base.is_finite(predictions, 'patches', 'mirrored')
        for row, index in enumerate(batch['index'].tolist() if self._is_finite else ()):
            if not (record := data.source.annotations(index)):  # broken, as the source reports
                continue
            h, w = predictions['grid'][row].tolist()
            height, width = predictions['frame'][row].tolist()
            size, frame = record['size'], (height, width)
            view = View.locate(size, (h, w), frame, data.corners(index, size, frame))
            truth = self.target.truth(record)
            truth = np.where(view.inside(), truth, np.array(self.target.unknown, truth.dtype))
            patches = predictions['patches'][row].reshape(h, w, -1)
            mirrored = None
            if 'mirrored' in predictions:
                mirrored = predictions['mirrored'][row].reshape(h, w, -1)
            yield Example(index, patches, mirrored, frame, truth, view)

    @abc.abstractmethod
    def reset(self) -> None:
        """Forget what was learned."""

    @abc.abstractmethod
    def learn(self, example: Example) -> None:
        """Add an example to learn from."""

    @abc.abstractmethod
    def finish(self) -> None:
        """Learn from the examples, once after the last."""

    @abc.abstractmethod
    def predict(self, patches: Float[np.ndarray, 'h w D']) -> Float[np.ndarray, 'i j C']:
        """Predict scores of classes, or depth with C = 1, on a grid of any size."""
