"""Nearest neighbors of patches: segmentation or depth without training.

Each patch takes the mean truth of its nearest patches in a memory of the fit split, weighted by a
softmax of cosine similarities, interpolated to pixels (Balazevic et al., 2023, arXiv:2306.01667,
section 3.1).
"""

from __future__ import annotations

import numpy as np

from vit_jax.array_types import Float
from vit_jax.errors import UserError
from vit_jax.evaluators import _dense
from vit_jax.evaluators.base import Patches, at_least
from vit_jax.evaluators.knn import ROWS, normalize


class Evaluator(_dense.Evaluator):
    """`mIoU`, `pixel_accuracy` and `mean_class_accuracy`, or `RMSE`, `abs_rel` and `delta1`.

    For the metrics see `patch_probe`.

    Args:
      target: 'segmentation' by the masks of the data, or 'depth'.
      layers: Layers whose features are concatenated: -1 for the last block's output.
      k: Number of neighbors.
      temperature: Temperature of the softmax; a lower one gives distant neighbors less weight.
      bank: Most patches in memory, chosen at random, equally many of each image.
      max_depth: Largest depth that counts; None for all.
      seed: Seed of the choice of patches.
      per_class: Whether to add `IoU_CLASS` for each class that occurs.
    """

    def __init__(
        self,
        target: str = 'segmentation',
        layers: tuple[int, ...] = (-1,),
        k: int = 30,
        temperature: float = 0.02,
        bank: int = 50_000,
        max_depth: float | None = None,
        seed: int = 0,
        per_class: bool = False,
    ):
        super().__init__(target, per_class, np.inf if max_depth is None else max_depth)
        at_least(1, k=k, bank=bank)
        if temperature <= 0:
            raise UserError(f'{temperature=}: must be positive')
        if max_depth is not None and max_depth <= 0:
            raise UserError(f'{max_depth=}: must be positive')
        self.patches = Patches(tuple(layers))
        self._k, self._temperature, self._bank, self._seed = k, temperature, bank, seed
        self.reset()

    def reset(self) -> None:
        self._memory: list[tuple[np.ndarray, np.ndarray]] = []
        self._keys = self._values = np.zeros((0, 0), np.float32)

    def learn(self, example: _dense.Example) -> None:
        is_labeled = example.truth != self.target.unknown
        values = example.view.pool(self._encode(example.truth, is_labeled))
        counts = example.view.pool(is_labeled[..., None].astype(np.float32))
        chosen = self._choose(example.number, np.flatnonzero(counts))
        means = values.reshape(-1, values.shape[-1])[chosen] / counts.reshape(-1, 1)[chosen]
        patches = example.patches.reshape(-1, example.patches.shape[-1])[chosen]
        self._memory.append((normalize(patches), means))

    def finish(self) -> None:
        keys, values = zip(*self._memory, strict=True)
        self._memory = []
        self._keys, self._values = np.concatenate(keys), np.concatenate(values)
        if not len(self._keys):
            raise UserError('patch_knn: no pixel of the fit split has a known truth')

    def predict(self, patches: Float[np.ndarray, 'h w D']) -> Float[np.ndarray, 'h w C']:
        height, width, _ = patches.shape
        queries = normalize(patches.reshape(height * width, -1))
        parts = [self._average(x) for x in np.split(queries, range(ROWS, len(queries), ROWS))]
        return np.concatenate(parts).reshape(height, width, -1)

    def _encode(self, truth: np.ndarray, valid: np.ndarray) -> Float[np.ndarray, 'H W C']:
        """Return one-hot classes, or depths; zeros where the truth is unknown."""
        if isinstance(self.target, _dense.Segmentation):
            one_hot = truth[..., None] == np.arange(self.target.num_classes)
            return one_hot.astype(np.float32)
        return np.where(valid, truth, 0)[..., None]

    def _choose(self, index: int, patches: np.ndarray) -> np.ndarray:
        """Choose an image's share of the memory at random."""
        rng = np.random.default_rng((self._seed, index))
        share = self._bank / self.count
        return rng.permutation(patches)[: int(share) + (rng.random() < share % 1)]

    def _average(self, queries: Float[np.ndarray, 'n D']) -> Float[np.ndarray, 'n C']:
        similarity = queries @ self._keys.T
        k = min(self._k, len(self._keys))
        nearest = np.argpartition(-similarity, k - 1, axis=-1)[:, :k]
        similarity = np.take_along_axis(similarity, nearest, axis=-1)
        weights = np.exp((similarity - similarity.max(-1, keepdims=True)) / self._temperature)
        weights /= weights.sum(-1, keepdims=True)
        return np.einsum('nk,nkc->nc', weights, self._values[nearest])
