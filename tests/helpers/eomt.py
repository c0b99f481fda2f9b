"""Small EoMTs of transformers to compare with, a batch, and the random points of their loss."""

from __future__ import annotations

import functools
import unittest.mock
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from helpers.transformers_models import perturbed
from vit_jax.tasks import segment
from vit_jax.tasks._mask_points import prediction_keys

CLASSES, QUERIES, SIDE, OBJECTS, POINTS = 4, 5, 32, 3, 64
SHAPE: dict[str, Any] = {
    **{'hidden_size': 32, 'num_hidden_layers': 3, 'num_attention_heads': 4, 'patch_size': 8},
    **{'image_size': SIDE, 'num_blocks': 2, 'num_queries': QUERIES, 'num_register_tokens': 2},
    **{'train_num_points': POINTS, 'num_upscale_blocks': 2, 'num_labels': CLASSES},
}
TASK = segment.Task(points=POINTS)


def reference(dinov3: bool = False, **changes: Any) -> Any:
    """A model of transformers, with parameters none of which is zero or one."""
    import torch
    import transformers

    torch.manual_seed(0)
    shape = SHAPE | changes
    if dinov3:
        config = transformers.EomtDinov3Config(**{'intermediate_size': 48, **shape})
        return perturbed(transformers.EomtDinov3ForUniversalSegmentation(config))
    config = transformers.EomtConfig(**{'mlp_ratio': 2, **shape})
    return perturbed(transformers.EomtForUniversalSegmentation(config))


@functools.cache
def batch(seed: int = 0) -> dict[str, jax.Array]:
    """Two images, the first with two segments and the second with three."""
    rng = np.random.default_rng(seed)
    real = np.arange(OBJECTS) < np.array([[2], [3]])
    coarse = rng.integers(0, 1 + real.sum(1)[:, None, None], (2, 4, 4))
    return {
        'image': jnp.asarray(rng.integers(0, 256, (2, SIDE, SIDE, 3)), jnp.uint8),
        'labels': jnp.asarray(rng.integers(CLASSES, size=(2, OBJECTS)) * real, jnp.int32),
        'object_mask': jnp.asarray(real),
        'segments': jnp.asarray(coarse.repeat(8, 1).repeat(8, 2), jnp.int16),
        'mask': jnp.ones(2),
    }


def inputs(batch: dict[str, jax.Array]) -> dict[str, Any]:
    """The arguments of transformers for a batch."""
    import torch

    (images,) = TASK.inputs(batch)
    real = np.asarray(batch['object_mask'])
    masks = np.asarray(batch['segments'])[:, None] == np.arange(1, OBJECTS + 1)[:, None, None]
    return {
        'pixel_values': torch.from_numpy(np.array(images.transpose(0, 3, 1, 2))),
        'mask_labels': [torch.from_numpy(m[r]).float() for m, r in zip(masks, real, strict=True)],
        'class_labels': [
            torch.from_numpy(np.asarray(labels)[r]).long()
            for labels, r in zip(batch['labels'], real, strict=True)
        ],
    }


class GivenPoints:
    """Stands in for `torch.rand`: the points that our loss draws.

    transformers draws, for each prediction, the last one last: points of the cost for each image,
    and of the loss for all matched masks of the batch at once.
    """

    def __init__(self, theirs: Any, keys: Any, predictions: int):
        """The points of `predictions` with these keys [B 2]."""
        self.keys = prediction_keys(keys, predictions)
        self.turn = (prediction for prediction in range(predictions))
        self.waiting: list[np.ndarray] = []
        self.hooks = [
            theirs.criterion.matcher.register_forward_pre_hook(self._start),
            theirs.criterion.matcher.register_forward_hook(self._matched),
        ]

    def __call__(self, *shape: Any, device: Any = None) -> Any:
        import torch

        draw = self.waiting.pop(0)
        assert draw.shape == shape
        return torch.from_numpy(np.array(draw))

    def __enter__(self) -> GivenPoints:
        self.patch = unittest.mock.patch('torch.rand', self)
        self.patch.start()
        return self

    def __exit__(self, *error: Any) -> None:
        self.patch.stop()
        for hook in self.hooks:
            hook.remove()

    def _start(self, *_: Any) -> None:
        self.own = self.keys[:, next(self.turn)]
        self.waiting = [uniform(key, POINTS)[None] for key in self.own[:, 0]]

    def _matched(self, module: Any, inputs: Any, pairs: Any) -> None:
        """Each image's queries and their segments; the masks of the loss are in this order."""
        each = [
            jax.random.split(jax.random.fold_in(key, int(row)))
            for key, (_, rows) in zip(self.own[:, 1], pairs, strict=True)
            for row in rows
        ]
        certain = POINTS - int(TASK.importance * POINTS)
        for place, count in ((0, int(POINTS * TASK.oversample)), (1, certain)):
            self.waiting.append(np.stack([uniform(pair[place], count) for pair in each]))


def uniform(key: Any, count: int) -> np.ndarray:
    """`count` points of a key."""
    return np.asarray(jax.random.uniform(key, (count, 2)))
