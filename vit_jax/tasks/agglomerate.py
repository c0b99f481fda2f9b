"""Agglomerative training: a ViT learns the features of several frozen teachers at once.

Ranzinger et al., 2024, "AM-RADIO", arXiv:2312.06709; patches standardized by PHI-S,
arXiv:2410.01680.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Mapping
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array

from vit_jax.array_types import Float
from vit_jax.errors import UserError
from vit_jax.ops import phi_s
from vit_jax.ops.terms import Term
from vit_jax.tasks import _views
from vit_jax.tasks.base import Apply, Batch, FrozenModel, Sums

TARGET = 'target_'  # prefix of teachers' features among the outputs


@dataclasses.dataclass(frozen=True)
class Task(_views.Views):
    """Match the teachers' representations of images, and their patches where they have any.

    Teachers see the student's view, resized to their image sizes. Of two different grids of
    patches, features of the coarser are interpolated to the finer. The model is `vit_adaptors`.

    Attributes:
      teachers: Runs or checkpoints that `vit_jax.load` reads, of any family and width.
      names: Name of each teacher's adaptor, for `vit_jax.load(RUN, adaptor=NAME)`; empty for the
        last parts of `teachers`, such as 'dinov2-small'.
      statistics: For each teacher, a file of the command `standardize`, or '' for patches as they
        are; empty for none of them.
      sizes: For each teacher, the side of its images in pixels, or 0 for its own; empty for its
        own everywhere.
      weights: Weight of each teacher's losses; empty for 1.
      summary_weight: Weight of 1 - cosine of the representations.
      cosine_weight: Weight of 1 - cosine of patches.
      smooth_l1_weight: Weight of the smooth L1 loss of patches.
    """

    teachers: tuple[str, ...] = ()
    names: tuple[str, ...] = ()
    statistics: tuple[str, ...] = ()
    sizes: tuple[int, ...] = ()
    weights: tuple[float, ...] = ()
    summary_weight: float = 1.0
    cosine_weight: float = 0.9
    smooth_l1_weight: float = 0.1

    couples_rows = False
    inert = (
        *(*_views.Views.inert, 'teachers', 'names', 'statistics', 'sizes', 'weights'),
        *('summary_weight', 'cosine_weight', 'smooth_l1_weight'),
    )

    def __post_init__(self) -> None:
        for key in ('names', 'statistics', 'sizes', 'weights'):
            values = getattr(self, key)
            fits = len(values) in (0, len(self.teachers))
            self.require(key, fits, f'empty, or have {len(self.teachers)} values, one per teacher')
        self.require('names', len({*self.names}) == len(self.names), 'different from each other')
        self.require('sizes', min(self.sizes, default=0) >= 0, 'at least 0')
        self.require('weights', min(self.weights, default=0) >= 0, 'at least 0')
        for key in ('summary_weight', 'cosine_weight', 'smooth_l1_weight'):
            self.require(key, getattr(self, key) >= 0, 'at least 0')
        super().__post_init__()

    @property
    def adaptors(self) -> tuple[str, ...]:
        """Names of the adaptors; equal ones from `teachers` end in their numbers."""
        parts = [_last_part(teacher) for teacher in self.teachers]
        numbered = (f'{x}_{i}' if parts.count(x) > 1 else x for i, x in enumerate(parts))
        return self.names or tuple(numbered)

    @property
    def frozen(self) -> Mapping[str, str]:
        """Checkpoints of the teachers, and files of their statistics."""
        files = {statistics_key(i): path for i, path in enumerate(self.statistics) if path}
        return {_teacher(i): path for i, path in enumerate(self.teachers)} | files

    @property
    def frozen_sizes(self) -> Mapping[str, tuple[int, int]]:
        """Image sizes of the teachers that do not see their own."""
        return {_teacher(i): (size, size) for i, size in enumerate(self.sizes) if size}

    @property
    def frozen_files(self) -> Mapping[str, Callable[[Mapping[str, np.ndarray]], FrozenModel]]:
        """Makers of standardizations from files of statistics."""
        return {statistics_key(i): standardization for i in range(len(self.statistics))}

    def outputs(self, apply: Apply, batch: Batch) -> dict[str, Any]:
        """Return the student's outputs; in training also the teachers' features, as targets.

        Predictions and targets of patches are interpolated to the finer grid.

        Raises:
          UserError: if the model lacks an adaptor, or its width is not the teacher's.
        """
        outputs = apply(*self.inputs(batch))
        if not apply.train:
            return outputs
        if not apply.frozen:
            raise UserError('config.task.teachers: name checkpoints, which only training loads')
        (images,) = self.inputs(batch)
        side = math.isqrt(math.prod(images.shape[1:3]) // outputs['patches'].shape[1])
        grid = images.shape[1] // side, images.shape[2] // side
        matched: dict[str, Array] = {}
        for i in range(len(self.teachers)):
            matched |= self._match(apply, i, self.unscale(images), outputs, grid)
        return {**outputs, **matched}

    def _match(
        self, apply: Apply, i: int, images: Array, outputs: dict[str, Any], grid: tuple[int, int]
    ) -> dict[str, Array]:
        """Return a teacher's targets, and predictions of patches on the finer grid."""
        name, model = _teacher(i), self.frozen_models[_teacher(i)]
        view = model.view(images)
        teacher = apply.frozen[name](view)
        patches, grid_of_teacher = patches_of(teacher, model.module, view.shape)
        if patches is not None and (file := statistics_key(i)) in apply.frozen:
            if patches.shape[-1] != (width := self.frozen_models[file].module.width):
                raise UserError(
                    f'config.task.{file}={self.statistics[i]}: of patches of width {width}, but '
                    f'those of {self.teachers[i]} have {patches.shape[-1]}'
                )
            patches = apply.frozen[file](patches)
        targets = {'summary': teacher.get('pre_logits'), 'patches': patches}
        matched: dict[str, Array] = {}
        for kind, target in targets.items():
            key = f'{kind}_{i}'
            widths = (0 if x is None else x.shape[-1] for x in (target, outputs.get(key)))
            if (expected := next(widths)) != (width := next(widths)):
                raise UserError(
                    f'config.task.{name}={self.teachers[i]}: its {kind} has the width {expected}, '
                    f'but config.model.{WIDTHS[kind]}[{i}] is {width}'
                )
            if target is not None:
                matched |= {f'{TARGET}{key}': target.astype(jnp.float32), key: outputs[key]}
        key = f'patches_{i}'
        if f'{TARGET}{key}' in matched:
            finer = max(grid[0], grid_of_teacher[0]), max(grid[1], grid_of_teacher[1])
            for each, old in ((key, grid), (f'{TARGET}{key}', grid_of_teacher)):
                matched[each] = interpolate(matched[each], old, finer)
        return matched

    def loss(self, outputs: dict[str, Any], batch: Batch) -> dict[str, Term]:
        """Means over the examples for teacher I: `summary_I`, `cosine_I` and `smooth_l1_I`."""
        mask, terms = self.mask(batch), {}
        count = mask.sum()
        for i, scale in enumerate(self.weights or (1.0,) * len(self.teachers)):
            for name, (kind, function, key) in LOSSES.items():
                if (target := outputs.get(f'{TARGET}{kind}_{i}')) is None:
                    continue
                losses = function(outputs[f'{kind}_{i}'], target)
                losses = losses.reshape(len(mask), -1).mean(1)
                weight = scale * getattr(self, key)
                terms[f'{name}_{i}'] = Term((losses * mask).sum(), count, weight)
        return terms

    def evaluate(self, apply: Apply, batch: Batch) -> Sums:
        """Compare each image with its mirror image, as no teacher is loaded in evaluation.

        `loss` is 1 - cosine of the predicted representations, averaged over the teachers.
        """
        mask, (images,) = self.mask(batch), self.inputs(batch)
        plain, mirrored = apply(images), apply(images[:, :, ::-1])
        keys = [key for key in plain if key.startswith('summary_')] or ['pre_logits']
        losses = sum(distances(plain[key], mirrored[key]) for key in keys) / len(keys)
        return {'loss': ((losses * mask).sum(), mask.sum())}


def standardization(arrays: Mapping[str, np.ndarray]) -> FrozenModel:
    """Make the standardization of a file of the command `standardize`.

    Raises:
      UserError: if the file holds anything else.
    """
    mean, matrix = (arrays.get(name) for name in phi_s.ARRAYS)
    if mean is None or matrix is None or matrix.shape != (mean.size, mean.size):
        raise UserError(
            'the file holds no statistics: write them with `python -m vit_jax standardize`'
        )
    return FrozenModel(Standardize(mean.size))


def patches_of(
    outputs: Mapping[str, Any], module: Any, shape: tuple[int, ...]
) -> tuple[Float[Array, 'B N D'] | None, tuple[int, int]]:
    """Return a model's patches and their grid for images of a shape; None if it has no tokens."""
    stride = getattr(module, 'stride', 0)
    if not stride or getattr(outputs.get('tokens'), 'ndim', 0) != 3:
        return None, (0, 0)
    grid = shape[1] // stride, shape[2] // stride
    return outputs['tokens'][:, -math.prod(grid) :], grid


def interpolate(
    patches: Float[Array, 'B n D'], old: tuple[int, int], new: tuple[int, int]
) -> Float[Array, 'B N D']:
    """Interpolate features bilinearly to a grid that is at least as fine."""
    if old == new:
        return patches
    maps = patches.reshape(len(patches), *old, -1)
    shape = (len(patches), *new, maps.shape[-1])
    return jax.image.resize(maps, shape, 'bilinear').reshape(len(patches), math.prod(new), -1)


def distances(x: Float[Array, '*B D'], y: Float[Array, '*B D']) -> Float[Array, '*B']:
    """1 - cosine similarity."""
    return optax.losses.cosine_distance(x, y, epsilon=1e-6)


def smooth_l1(x: Float[Array, '*B D'], y: Float[Array, '*B D']) -> Float[Array, '*B']:
    """Mean over the channels of d^2 / 2 where the difference d is below 1, else |d| - 1/2."""
    return optax.losses.huber_loss(x, y, delta=1.0).mean(-1)


def statistics_key(i: int) -> str:
    """Name the statistics of teacher `i` among a run's frozen variables."""
    return f'statistics[{i}]'


def _teacher(i: int) -> str:
    return f'teachers[{i}]'


def _last_part(reference: str) -> str:
    name = reference.rstrip('/').rpartition('/')[2]
    return re.sub(r'\.(npz|safetensors|pth|pt|bin)$', '', name)


Loss = Callable[[Array, Array], Array]
# Terms: the kind of feature, its loss, and the task's field with the weight.
LOSSES: Mapping[str, tuple[str, Loss, str]] = {
    'summary': ('summary', distances, 'summary_weight'),
    'cosine': ('patches', distances, 'cosine_weight'),
    'smooth_l1': ('patches', smooth_l1, 'smooth_l1_weight'),
}
WIDTHS = {'summary': 'summary_widths', 'patches': 'patch_widths'}


class Standardize(nn.Module):
    """y = matrix (x - mean), with `mean` [D] and `matrix` [D D] of `vit_jax.ops.phi_s`.

    Attributes:
      width: D, number of channels.
    """

    width: int

    def setup(self) -> None:
        self.mean = self.param('mean', nn.initializers.zeros, (self.width,))
        self.matrix = self.param('matrix', lambda key: jnp.eye(self.width))

    def __call__(self, x: Float[Array, '*B D']) -> Float[Array, '*B D']:
        return jnp.matmul(x.astype(jnp.float32) - self.mean, self.matrix.T, precision='highest')

    def invert(self, y: Float[Array, '*B D']) -> Float[Array, '*B D']:
        """Return the features that were standardized."""
        # The matrix is a rotation divided by phi: its rows have the length 1 / phi.
        variance = self.width / jnp.square(self.matrix).sum()
        return jnp.matmul(y, self.matrix, precision='highest') * variance + self.mean
