"""Distances between generated and real images in the feature space of any model.

They are metrics of the task `generate`, whose samples are compared with the evaluated images:

    evaluate --workdir RUN --split test --evaluator "frechet(features='runs/a')"

FID (Heusel et al., 2017, arXiv:1706.08500) is the Frechet distance in the features of one specific
Inception network. Other features give different numbers, so the metric names contain theirs.
"""

from __future__ import annotations

import hashlib
import logging
import math
import pathlib
import re
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np

from vit_jax.array_types import Float, UInt8
from vit_jax.errors import UserError
from vit_jax.evaluators import base
from vit_jax.evaluators.base import Arrays, Dataset, OtherModel, at_least
from vit_jax.storage import paths

_log = logging.getLogger(__name__)
ROWS = 64  # images per call of a TorchScript model
BLOCK = 1024  # rows of a distance matrix computed at a time
Images = UInt8[np.ndarray, 'B H W C']
Features = Float[np.ndarray, 'N D']
Extract = Callable[[Images], Features]


class Evaluator(base.Evaluator):
    """`frechet_F`, `kernel_F`, `precision_F` and `recall_F` for features named F.

    Args:
      features: Run or checkpoint whose task predicts `features`, such as a classifier. With
        pytorch-fid's or torch-fidelity's Inception (.pth) the Frechet distance is FID. A
        TorchScript file (.pt), such as NVIDIA's Inception, needs torch and is called as
        `f(images, return_features=True)` on bytes [B 3 H W].
      reference: .npz file with the mean `mu` [D] and the covariance `sigma` [D D] of the features
        of real images, as stored by FID tools, instead of the evaluated images; only gives
        `frechet_F`.
      neighbors: Number k of neighbors, for precision and recall.
      subsets, subset_size: Random subsets that the kernel distance is averaged over.
      seed: Seed for choosing the subsets.
    """

    predictions = ('samples',)

    def __init__(
        self,
        *,
        features: str,
        reference: str = '',
        neighbors: int = 3,
        subsets: int = 100,
        subset_size: int = 1000,
        seed: int = 0,
    ):
        at_least(1, neighbors=neighbors, subsets=subsets)
        at_least(2, subset_size=subset_size)
        self._reference = read_statistics(reference) if reference else None
        self.neighbors, self.subsets, self.subset_size = neighbors, subsets, subset_size
        self.seed, self._features, self._name = seed, features, feature_name(features)
        self._digest = ''
        self.start()

    def read_models(self, read: Callable[[str], OtherModel]) -> None:
        """Read the feature model; raise UserError if it does not predict features."""
        self._extract: Extract
        if self._features.endswith('.pt'):
            self._extract, self._digest = torchscript(self._features)
            return
        model = read(self._features)
        if 'features' not in model.names:
            raise UserError(
                f'features {self._features!r}: the task {model.task!r} does not predict features; '
                'use a classifier or a masked autoencoder'
            )
        self._extract = lambda images: model.predict(images)['features']
        self._digest = model.digest

    def open(self, dataset: Dataset, fit: Dataset | None = None) -> None:
        """Raise UserError if there are too few images for `neighbors`."""
        if (size := len(dataset.source)) <= self.neighbors:
            raise UserError(f'neighbors={self.neighbors}, but there are only {size} images')

    def start(self) -> None:
        self._real: list[Features] = []
        self._samples: list[Features] = []
        self._finite = True

    def update(self, predictions: Arrays, batch: Arrays) -> None:
        """Add a batch; raise UserError if the task does not generate samples."""
        if 'samples' not in predictions:
            raise UserError("the task does not generate samples: evaluate a run of 'generate'")
        samples = predictions['samples']
        self._finite &= bool(np.all(predictions.get('finite', True)))
        self._samples.append(self._extract(samples.reshape(-1, *samples.shape[2:])))
        if self._reference is None:
            self._real.append(self._extract(predictions['image']))

    def result(self) -> dict[str, float]:
        samples = np.concatenate(self._samples).astype(np.float64)
        real = np.concatenate(self._real).astype(np.float64) if self._real else samples[:0]
        finite = self._finite and np.isfinite(samples).all() and np.isfinite(real).all()
        self.start()  # free the large features
        if not finite:
            return dict.fromkeys(self.names(), math.nan)
        count = len(samples) if self._reference else min(len(samples), len(real))
        warn_of_few(self._name, count, samples.shape[1])
        if self._reference is not None:
            require_width(self._reference, samples.shape[1])
            return {f'frechet_{self._name}': frechet(self._reference, statistics(samples))}
        metrics = (
            frechet(statistics(real), statistics(samples)),
            kernel_distance(real, samples, self.subsets, self.subset_size, self.seed),
            *precision_and_recall(real, samples, self.neighbors),
        )
        return dict(zip(self.names(), metrics, strict=True))

    def digest(self) -> str:
        mean = b'' if self._reference is None else self._reference.mean.tobytes()
        return hashlib.sha256(self._digest.encode() + mean).hexdigest()[:16]

    def names(self) -> tuple[str, ...]:
        kinds = ('frechet', 'kernel', 'precision', 'recall')
        return tuple(f'{kind}_{self._name}' for kind in kinds[: 1 if self._reference else 4])


class Statistics(NamedTuple):
    """Mean and covariance of features."""

    mean: Float[np.ndarray, 'D']
    covariance: Float[np.ndarray, 'D D']


def statistics(features: Features) -> Statistics:
    """Compute the mean and the unbiased covariance of at least two rows of features."""
    return Statistics(features.mean(axis=0), np.atleast_2d(np.cov(features, rowvar=False)))


def frechet(a: Statistics, b: Statistics) -> float:
    """|m - m'|^2 + tr(C + C' - 2 (C C')^(1/2)), the squared distance of two normal distributions.

    The trace of the root equals the trace of (C^(1/2) C' C^(1/2))^(1/2), which is symmetric, so
    that rounding cannot make the root complex.
    """
    values, vectors = np.linalg.eigh(a.covariance)
    root = (vectors * np.sqrt(np.maximum(values, 0))) @ vectors.T
    squares = np.linalg.eigvalsh(root @ b.covariance @ root)
    shift = np.square(a.mean - b.mean).sum()
    traces = np.trace(a.covariance) + np.trace(b.covariance)
    return float(shift + traces - 2 * np.sqrt(np.maximum(squares, 0)).sum())


def kernel_distance(real: Features, samples: Features, subsets: int, size: int, seed: int) -> float:
    """KID: the unbiased squared MMD by (x y / D + 1)^3, mean over random subsets of `size` rows.

    Binkowski et al., 2018, arXiv:1801.01401, section 4. Subsets are at most as large as the smaller
    set.
    """
    size, rng = min(size, len(real), len(samples)), np.random.default_rng(seed)
    subset_pairs = (
        (
            real[rng.choice(len(real), size, replace=False)],
            samples[rng.choice(len(samples), size, False)],
        )
        for _ in range(subsets)
    )
    return float(np.mean([mmd(x, y) for x, y in subset_pairs]))


def mmd(x: Features, y: Features) -> float:
    """Estimate the squared MMD of two sets of the same size without bias."""
    size, width = x.shape

    def kernel(a: Features, b: Features) -> Any:
        return (a @ b.T / width + 1) ** 3

    within = [k.sum() - np.trace(k) for k in (kernel(x, x), kernel(y, y))]
    return float(sum(within) / (size * (size - 1)) - 2 * kernel(x, y).mean())


def precision_and_recall(real: Features, samples: Features, k: int) -> tuple[float, float]:
    """Compute the share of samples near a real image, and the share of real images near a sample.

    Kynkaanniemi et al., 2019, arXiv:1904.06991, section 2: near means within the distance from a
    point to its k-th nearest neighbor of the same kind.
    """
    return _near(samples, real, k), _near(real, samples, k)


def _near(queries: Features, points: Features, k: int) -> float:
    """Compute the share of queries within the k-nearest-neighbor ball of any point."""
    radii = np.concatenate(
        [np.partition(block, k, axis=1)[:, k] for block in _distances(points, points)]
    )
    return float(
        np.mean(np.concatenate([(d <= radii).any(1) for d in _distances(queries, points)]))
    )


def _distances(a: Features, b: Features) -> Iterator[Float[np.ndarray, 'n M']]:
    """Yield squared distances from blocks of rows of `a` to all of `b`."""
    squares = np.square(b).sum(1)
    for first in range(0, len(a), BLOCK):
        rows = a[first : first + BLOCK]
        distances = np.square(rows).sum(1)[:, None] - 2 * rows @ b.T + squares
        yield np.maximum(distances, 0)


def warn_of_few(name: str, count: int, width: int) -> None:
    """Warn that the Frechet distance is biased if there are fewer images than features."""
    if count <= width:
        _log.warning(
            'frechet_%s: %s images for %s features: the covariance has at most rank %s, which '
            'makes the distance too large; compare only distances of the same number of images, or '
            'use kernel_%s',
            *(name, f'{count:,}', f'{width:,}', f'{count - 1:,}', name),
        )


def feature_name(path: str) -> str:
    """Return the name of features in metrics: the last part of a path without its suffix."""
    last = pathlib.PurePath(path.rstrip('/')).name
    stem = last.removesuffix('.npz').removesuffix('.safetensors').removesuffix('.pt')
    return re.sub(r'\W+', '_', stem).strip('_') or 'features'


def read_statistics(path: str) -> Statistics:
    """Read `mu` and `sigma` from an .npz file.

    Raises:
      UserError: if the file cannot be read, or does not contain these arrays.
    """
    try:
        with paths.open_file(path) as file, np.load(file, allow_pickle=False) as arrays:
            mean, covariance = (np.asarray(arrays[key], np.float64) for key in ('mu', 'sigma'))
    except OSError as error:
        raise UserError(f'reference {path!r} cannot be read: {error.strerror or error}') from error
    except (KeyError, ValueError) as error:
        raise UserError(f'reference {path!r} has no arrays mu and sigma') from error
    if mean.ndim != 1 or covariance.shape != 2 * mean.shape:
        shapes = f'{list(mean.shape)} and {list(covariance.shape)}'
        raise UserError(f'reference {path!r}: mu and sigma are {shapes}, not [D] and [D D]')
    return Statistics(mean, covariance)


def require_width(reference: Statistics, width: int) -> None:
    """Raise UserError unless the reference has `width` features."""
    if len(reference.mean) != width:
        raise UserError(
            f'the reference has {len(reference.mean)} features, but the model {width}: use '
            "statistics of this model's features"
        )


def torchscript(path: str) -> tuple[Extract, str]:
    """Load a TorchScript model; return a function from images to features, and the file's digest.

    Raises:
      UserError: if torch is not installed, or the file cannot be read.
    """
    try:
        import torch
    except ImportError as error:
        raise UserError(f'features {path!r}: install torch to read it') from error
    try:
        model = torch.jit.load(str(paths.local(path)), map_location='cpu').eval()
        digest = paths.sha256(paths.local(path))
    except (OSError, RuntimeError, ValueError) as error:
        reason = str(error).strip().split('\n')[0]
        raise UserError(f'features {path!r} cannot be read: {reason}') from error

    def extract(images: Images) -> Features:
        color = np.broadcast_to(images, (*images.shape[:3], 3)).transpose(0, 3, 1, 2)
        with torch.no_grad():
            parts = torch.split(torch.from_numpy(np.ascontiguousarray(color)), ROWS)
            features = [model(part, return_features=True) for part in parts]
        return torch.cat(features).float().numpy()

    return extract, digest
