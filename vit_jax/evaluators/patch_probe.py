"""Linear probe of patches: segmentation or depth by one layer on frozen features of patches.

Batch norm and a 1 x 1 convolution on the patches' features, interpolated to pixels (Oquab et al.,
2023, arXiv:2304.07193, section 7.4). The features of the fit split are computed once and kept in
memory, so that its images are not augmented.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from vit_jax.array_types import Float
from vit_jax.errors import UserError, check_choice
from vit_jax.evaluators import _dense
from vit_jax.evaluators.base import Patches, at_least
from vit_jax.ops.probe_protocol import Protocol

MIN_DEPTH = 1e-3  # depth of the first bin
GIB = 2**30
SHORT = Protocol(500, 16, 1e-2, 1e-4, warmup=50, pixels=32)
# The authors' code for ADE20K and NYU, whose images it augments. NYU's depth has 256 bins up to
# 10 m, and is measured in Eigen's crop on the average with the mirrored image.
SEGMENTATION = Protocol(40_000, 16, 1e-3, 1e-4, warmup=1500)
DEPTH = Protocol(
    *(38_400, 16, 1e-4, 1e-2),
    warmup=12_800,
    decay='cosine',
    clip=35.0,
    norm=False,
    upsample=4,
    class_token=True,
    deepest=10.0,
    uniform=True,
    mean_steps=100,
    eigen_crop=True,
    flip=True,
)
DINOV2 = {'segmentation': SEGMENTATION, 'depth': DEPTH}
DINOV3 = {
    'segmentation': SEGMENTATION._replace(weight_decay=1e-3, decay='cosine'),
    'depth': DEPTH._replace(
        learning_rate=3e-4,
        weight_decay=1e-4,
        b2=0.99,
        norm=True,
        upsample=1,
        class_token=False,
        uniform=False,
    ),
}
PROTOCOLS = {
    'short': {'segmentation': SHORT, 'depth': SHORT._replace(uniform=True)},
    'dinov2': DINOV2,
    'dinov3': DINOV3,
    'tips': DINOV2,  # which the paper refers to
}


class Evaluator(_dense.Evaluator):
    """`mIoU`, `pixel_accuracy` and `mean_class_accuracy`, or `RMSE`, `abs_rel` and `delta1`.

    For the metrics see `mean_iou` and `ops.depth.measure`; depth is averaged over images.

    Args:
      target: 'segmentation' by the masks of the data, or 'depth'.
      protocol: Training of the layer: 'short'; 'dinov2' as in the paper's code; 'dinov3' likewise,
        without dropout and changes of momentum; or 'tips', the same as 'dinov2'.
      layers: Layers whose features are concatenated: -1 for the last block's output.
      steps, images, learning_rate, weight_decay: Steps, images per step, highest learning rate and
        weight decay of AdamW; None for the protocol's.
      bins: Number of depths that are averaged.
      max_depth: Largest depth that counts; None for the largest of the fit split.
      flip: Whether to average predictions over the image and its mirror image; None for the
        protocol's.
      eigen_crop: Whether depth is measured only in the part of an image that NYU's sensor sees
        (arXiv:1406.2283); None for the protocol's.
      memory: Most GiB of features to keep.
      seed: Seed of initial parameters, order of images, and choice of pixels.
      per_class: Whether to add `IoU_CLASS` for each class that occurs.
    """

    def __init__(
        self,
        target: str = 'segmentation',
        protocol: str = 'short',
        layers: tuple[int, ...] = (-1,),
        steps: int | None = None,
        images: int | None = None,
        learning_rate: float | None = None,
        weight_decay: float | None = None,
        bins: int = 256,
        max_depth: float | None = None,
        flip: bool | None = None,
        eigen_crop: bool | None = None,
        memory: float = 8.0,
        seed: int = 0,
        per_class: bool = False,
    ):
        check_choice('protocol', protocol, PROTOCOLS)
        check_choice('target', target, _dense.TARGETS)
        options: dict[str, Any] = {
            'steps': steps,
            'images': images,
            'learning_rate': learning_rate,
            'weight_decay': weight_decay,
            'deepest': max_depth,
            'flip': flip,
            'eigen_crop': eigen_crop,
        }
        options = {name: value for name, value in options.items() if value is not None}
        self.protocol = PROTOCOLS[protocol][target]._replace(**options)
        super().__init__(
            target, per_class, self.protocol.deepest, eigen_crop=self.protocol.eigen_crop
        )
        at_least(1, steps=self.protocol.steps, images=self.protocol.images)
        at_least(2, bins=bins)
        at_least(0, weight_decay=self.protocol.weight_decay)
        positive = {'learning_rate': self.protocol.learning_rate, 'memory': memory}
        for name, value in (positive | {'max_depth': self.protocol.deepest}).items():
            if value <= 0:
                raise UserError(f'{name}={value}: must be positive')
        self.patches = Patches(tuple(layers), self.protocol.class_token, self.protocol.flip)
        self._bins, self._memory, self._seed = bins, memory, seed
        self._count = 0
        self._features = self._truth = np.zeros(0)

    def reset(self) -> None:
        self._count = 0
        self._features = self._truth = np.zeros(0)
        self._trained: Any = None

    def learn(self, example: _dense.Example) -> None:
        truth = example.view.sample(example.truth, example.frame, self.target.unknown)
        rows = example.patches, truth
        if not self._count:
            require_memory(rows, self.count, self._memory)
            self._features, self._truth = (np.empty((self.count, *x.shape), x.dtype) for x in rows)
        if example.patches.shape != self._features.shape[1:]:
            raise UserError('patch_probe needs images of one size: add a resize to the transforms')
        self._features[self._count], self._truth[self._count] = rows
        self._count += 1

    def finish(self) -> None:
        from vit_jax.ops import linear_head  # here, since it imports JAX

        features, truth = self._features[: self._count], self._truth[: self._count]
        if not (truth != self.target.unknown).any():
            raise UserError('patch_probe: no pixel of the fit split has a known truth')
        self._output = self._make_output(truth)
        head = linear_head.initial(features.shape[-1], self._output, self.protocol, self._seed)
        self._trained = linear_head.train(
            features, truth, self._output, self.protocol, head, self._seed
        )

    def predict(self, patches: Float[np.ndarray, 'h w D']) -> Float[np.ndarray, 'i j C']:
        from vit_jax.ops import linear_head  # here, since it imports JAX

        return linear_head.predict(patches, self._output, self.protocol, self._trained)

    def _make_output(self, truth: np.ndarray) -> Any:
        from vit_jax.ops import linear_head  # here, since it imports JAX

        if isinstance(self.target, _dense.Segmentation):
            return linear_head.classes(self.target.num_classes, self.target.unknown)
        assert isinstance(self.target, _dense.Depth)
        deepest = min(self.target.deepest, float(truth.max()))
        return linear_head.depths(self._bins, MIN_DEPTH, deepest)


def require_memory(arrays: tuple[np.ndarray, ...], count: int, most: float) -> None:
    """Raise UserError if `count` examples of the size of `arrays` take more than `most` GiB."""
    needed = count * sum(x.nbytes for x in arrays) / GIB
    if needed > most:
        raise UserError(
            f'patch_probe: the features of {count:,} images take {needed:.1f} GiB, more than '
            f'memory={most:g}: fit to fewer images, such as '
            f"fit='train[:{max(1, int(count * most / needed))}]', or raise memory"
        )
