"""DINOv2: self-distillation with an averaged teacher, multi-crop and masked patches.

Oquab et al., 2023, arXiv:2304.07193, section 4. Gram anchoring (DINOv3): Simeoni et al., 2025,
arXiv:2508.10104, section 4.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import Array
from jax.scipy.special import entr

from vit_jax.array_types import Float
from vit_jax.errors import UserError, check_choice
from vit_jax.ops import resize, self_distillation
from vit_jax.ops.terms import Term
from vit_jax.tasks import _views
from vit_jax.tasks._views import fold, unfold
from vit_jax.tasks.base import Apply, Batch, FrozenModel, Snapshot, Sums

LARGE = 'large_image'
GRAM = 'gram_teacher'
AVERAGE = 'average'
COPY = 'gram_average'  # of the average's parameters
SHOWN = 3  # prototypes per image in `predict`


@dataclasses.dataclass(frozen=True)
class Task(_views.Views):
    """From each crop, the student predicts the teacher's prototypes of the other global crops.

    See `Views` for the batch.

    In long training or on few images, patch features can degrade while image features still
    improve. `gram` then anchors patch similarities to a Gram teacher: a frozen model, such as an
    earlier checkpoint, or a copy of the average. It may see the same global crops at twice the
    size, in `large_image` [B G 2H 2W C], for smoother similarities (DINOv3, section 4.3).

    Attributes:
      student_temp: Temperature of the student's softmax.
      teacher_temp: Final temperature of the teacher's softmax.
      first_teacher_temp: Initial temperature of the teacher's softmax; rises linearly.
      warmup: Number of updates over which it rises.
      sinkhorn: Number of Sinkhorn iterations that balance the teacher's prototypes.
      ibot: Weight of the cross entropy of masked patches.
      koleo: Weight of the KoLeo loss, which spreads features.
      masked: Number of global crops per image with masked patches.
      mask_ratios: Range of the share of masked patches in these crops.
      gram: Weight of the Gram loss, see `ops.self_distillation.gram`; 0 for none.
      gram_start: Number of completed steps from which the Gram loss counts.
      gram_teacher: Checkpoint of the Gram teacher, a ViT that `vit_jax.load` reads; or 'average'
        for a copy of the average at `gram_start`.
      gram_refresh: Steps after which a copy of the average replaces the Gram teacher, again and
        again; 0 to keep the first.
      gram_size: Height and width of the Gram teacher's images; 0 for the checkpoint's, or for those
        of the crops.
      gram_negatives: Treatment of negative similarities: 'kept', 'cut' or 'cut_of_teacher'.
    """

    student_temp: float = 0.1
    teacher_temp: float = 0.07
    first_teacher_temp: float = 0.04
    warmup: int = 1
    sinkhorn: int = 3
    ibot: float = 1.0
    koleo: float = 0.1
    masked: int = 1
    mask_ratios: tuple[float, float] = (0.1, 0.5)
    gram: float = 0.0
    gram_start: int = 0
    gram_teacher: str = ''
    gram_refresh: int = 0
    gram_size: int = 0
    gram_negatives: str = 'kept'

    rngs = ('dropout', 'mask')
    inert = (*_views.Views.inert, 'gram_teacher')

    def __post_init__(self) -> None:
        for key in ('student_temp', 'teacher_temp', 'first_teacher_temp'):
            self.require(key, getattr(self, key) > 0, 'positive')
        weights = ('ibot', 'koleo', 'gram', 'gram_size', 'gram_start', 'gram_refresh')
        for least, keys in ((1, ('warmup', 'sinkhorn', 'masked')), (0, weights)):
            for key in keys:
                self.require(key, getattr(self, key) >= least, f'at least {least}')
        low, high = self.mask_ratios
        self.require('mask_ratios', 0 <= low <= high < 1, 'in order within [0, 1)')
        check_choice('config.task.gram_negatives', self.gram_negatives, self_distillation.NEGATIVES)
        super().__post_init__()

    @property
    def frozen(self) -> Mapping[str, str]:
        """Checkpoint of the Gram teacher, if there is one."""
        return {GRAM: self.gram_teacher} if self.gram and self.gram_teacher != AVERAGE else {}

    @property
    def frozen_sizes(self) -> Mapping[str, tuple[int, int]]:
        """Image size of the Gram teacher, if set."""
        return {GRAM: (self.gram_size, self.gram_size)} if self.gram_size else {}

    @property
    def snapshot(self) -> Snapshot | None:
        """Copy of the average as the Gram teacher."""
        if not self.gram or (self.frozen and not self.gram_refresh):
            return None
        first = self.gram_start + (self.gram_refresh if self.frozen else 0)
        return Snapshot(COPY, first, self.gram_refresh, 'encode', '_head$')

    def outputs(self, apply: Apply, batch: Batch) -> dict[str, Any]:
        """Compute scores of teacher and student, and the student's features.

        Returns:
          teacher, student: scores [B G K] of global crops, [B G+L K] of global and local ones.
          teacher_patches, student_patches: scores [B M P] of patches masked for the student.
          patch_weights: [B M], 1 / number of masked patches of the crop, 0 for padding.
          features: [B G D], student's class tokens of global crops.
          teacher_temp: teacher's temperature at this step.
          gram: [B], mean Gram loss over global crops; only in training, if it has a weight.

        Raises:
          UserError: if local crops were cut from global ones, or the Gram teacher is missing or has
            a different number of patches.
        """
        crops, local = self.global_views(batch), self.local_views(batch)
        rows, masked = len(crops), min(self.masked, crops.shape[1])
        masks = apply(crops, method='block_masks', masked=masked, ratios=self.mask_ratios)
        folded, hidden = fold(crops), fold(masks.hidden)
        teacher = apply.average(folded, places=masks.places)
        student = apply(folded, masked=hidden, places=masks.places)
        scores = [unfold(student['scores'], rows)]
        if local is not None:
            scores.append(unfold(apply(fold(local))['scores'], rows))
        temp = optax.linear_schedule(self.first_teacher_temp, self.teacher_temp, self.warmup)
        anchored = {}
        if self.gram and apply.train:
            size = folded.shape[1], folded.shape[2]
            losses = self._gram_losses(apply, batch, size, student['patches'])
            anchored = {'gram': unfold(losses, rows).mean(1)}
        return {
            **anchored,
            'teacher': unfold(teacher['scores'], rows),
            'student': jnp.concatenate(scores, axis=1),
            'teacher_patches': teacher['patch_scores'],
            'student_patches': student['patch_scores'],
            'patch_weights': masks.weights,
            'features': unfold(student['pre_logits'], rows),
            'teacher_temp': jnp.asarray(temp(apply.step), jnp.float32),
        }

    def loss(self, outputs: dict[str, Any], batch: Batch) -> dict[str, Term]:
        """Cross entropies of crops and of masked patches, KoLeo loss and Gram loss.

        The metrics, in nats, are the mean entropy of targets, and the entropy of the mean target,
        log K if all prototypes are used equally.

        Raises:
          UserError: if there is only one crop, or fewer global ones than `masked`.
        """
        self._check_crops(outputs['teacher'].shape[1], outputs['student'].shape[1])
        mask = self.mask(batch)
        targets = self._targets(outputs, mask)
        count = mask.sum()
        single = entr(targets).sum(-1).mean(1)
        usage = jnp.einsum('bgk,b->k', targets, mask) / (count * targets.shape[1])
        anchored = {}
        if 'gram' in outputs:
            anchored = {'gram': Term((outputs['gram'] * mask).sum(), count, self.gram)}
        return {
            **anchored,
            'dino': Term((self._crop_losses(targets, outputs) * mask).sum(), count),
            'ibot': Term((self._patch_losses(outputs, mask) * mask).sum(), count, self.ibot),
            'koleo': Term((self._spread(outputs, mask) * mask).sum(), count, self.koleo),
            'target_entropy': Term((single * mask).sum(), count, 0.0),
            'usage_entropy': Term(entr(usage).sum() * count, count, 0.0),
        }

    def evaluate(self, apply: Apply, batch: Batch) -> Sums:
        """Metrics of whole images in nats, each independent of other images.

        `loss` is the cross entropy between teacher and student on the same image and parameters,
        without balancing or masking; `entropy` is the entropy of the teacher.
        """
        mask, scores = self.mask(batch), apply(*self.inputs(batch))['scores']
        probs = jax.nn.softmax(scores / self.teacher_temp)
        losses = self_distillation.cross_entropy(probs, scores, self.student_temp)
        metrics = {'loss': losses, 'entropy': entr(probs).sum(-1)}
        return {name: ((values * mask).sum(), mask.sum()) for name, values in metrics.items()}

    def predict(self, apply: Apply, batch: Batch) -> dict[str, jax.Array]:
        """Return features and most likely prototypes of whole images.

        Returns:
          features: [B D], class token.
          patches: [B N D], patch tokens, if `patches` is set.
          prototype, probability: [B 3], most likely prototypes, the best one first.
        """
        outputs = apply(*self.inputs(batch))
        probs = jax.nn.softmax(outputs['scores'] / self.teacher_temp)
        probability, prototype = jax.lax.top_k(probs, min(SHOWN, probs.shape[-1]))
        return {
            **self.features(outputs),
            'prototype': prototype,
            'probability': probability,
        }

    def _gram_losses(
        self, apply: Apply, batch: Batch, size: tuple[int, int], patches: Float[Array, 'R N D']
    ) -> Float[Array, ' R']:
        """Compute the Gram loss of each global crop.

        Args:
          apply: Model and Gram teacher.
          batch: Batch with global crops as bytes.
          size: Height and width of the student's crops.
          patches: Student's patch tokens of all global crops.
        """
        crops = fold(batch[LARGE] if LARGE in batch else self.global_views(batch))
        if len(crops) != len(patches):
            raise UserError(
                f'config.data.transforms: {LARGE} and image need the same number of views'
            )
        side = math.isqrt(math.prod(size) // patches.shape[1])
        grid, images = (size[0] // side, size[1] // side), self.unscale(crops)

        def losses(patches_of: Callable[..., Array]) -> Array:
            return self_distillation.gram(
                patches, patches_of(apply, images, side, grid), self.gram_negatives
            )

        from_file = functools.partial(losses, self._file_patches)
        from_copy = functools.partial(losses, self._copied_patches)
        snapshot, choose = self.snapshot, from_copy if not self.frozen else from_file
        if snapshot and self.frozen:
            choose = functools.partial(
                jax.lax.cond, apply.step < snapshot.first, from_file, from_copy
            )
        if not self.gram_start:
            return choose()
        return jax.lax.cond(apply.step < self.gram_start, lambda: jnp.zeros(len(patches)), choose)

    def _file_patches(
        self, apply: Apply, images: Float[Array, 'R H W C'], side: int, grid: tuple[int, int]
    ) -> Float[Array, 'R N D']:
        """Compute patches of the checkpoint `gram_teacher` on a grid, of images in [0, 1]."""
        del side
        if GRAM not in apply.frozen:
            raise UserError('config.task.gram_teacher: the teacher is only loaded in training')
        model = self.frozen_models[GRAM]
        view = model.view(images)
        outputs, stride = apply.frozen[GRAM](view), model.module.stride
        if 'tokens' not in outputs or not stride:
            raise UserError(
                f'config.task.gram_teacher={self.gram_teacher}: a '
                f'{type(model.module).__module__.rpartition(".")[2]} has no patch tokens'
            )
        old = (view.shape[1] // stride, view.shape[2] // stride)
        return resize_features(outputs['tokens'][:, -math.prod(old) :], old, grid)

    def _copied_patches(
        self, apply: Apply, images: Float[Array, 'R H W C'], side: int, grid: tuple[int, int]
    ) -> Float[Array, 'R N D']:
        """Compute patches of the copied average on a grid, of images in [0, 1]."""
        own = FrozenModel(None, self.frozen_sizes.get(GRAM), self.value_range, self.normalization)
        view = own.view(images)
        old = (view.shape[1] // side, view.shape[2] // side)
        return resize_features(apply.frozen[COPY](view)['patches'], old, grid)

    def _check_crops(self, crops: int, views: int) -> None:
        if views < 2:
            raise UserError(
                'config.data.transforms: DINOv2 needs at least two crops; add '
                "views('image', 2, 'inception_crop(224, 32)|flip')"
            )
        if crops < self.masked:
            raise UserError(
                f'config.task.masked={self.masked}: there are only {crops} global crops'
            )

    def _targets(self, outputs: dict[str, Any], mask: Float[Array, ' B']) -> Array:
        """Balance the teacher's probabilities [B G K] over all global crops of the batch."""
        scores = outputs['teacher'] / outputs['teacher_temp']
        real = jnp.repeat(mask, scores.shape[1])
        targets = self_distillation.sinkhorn(fold(scores), real, self.sinkhorn)
        return targets.reshape(scores.shape)

    def _crop_losses(self, targets: Array, outputs: dict[str, Any]) -> Float[Array, ' B']:
        """Mean over pairs of a global crop and a different crop (DINO, equation 3)."""
        logs = jax.nn.log_softmax(outputs['student'] / self.student_temp)
        losses = -jnp.einsum('bgk,bvk->bgv', targets, logs, precision='highest')
        is_other = 1 - jnp.eye(losses.shape[1], losses.shape[2])
        return (losses * is_other).sum((1, 2)) / is_other.sum()

    def _patch_losses(
        self, outputs: dict[str, Any], mask: Float[Array, ' B']
    ) -> Float[Array, ' B']:
        """Mean over global crops of the mean over their masked patches (iBOT, equation 2)."""
        scores, weights = outputs['teacher_patches'], outputs['patch_weights']
        real = (weights > 0) & (mask[:, None] > 0)
        scores = scores / outputs['teacher_temp']
        targets = self_distillation.sinkhorn(fold(scores), fold(real), self.sinkhorn)
        losses = self_distillation.cross_entropy(
            targets.reshape(scores.shape), outputs['student_patches'], self.student_temp
        )
        return (losses * weights).sum(1) / outputs['teacher'].shape[1]

    def _spread(self, outputs: dict[str, Any], mask: Float[Array, ' B']) -> Float[Array, ' B']:
        """Sum over global crops of the KoLeo loss among crops of different images."""
        crops = outputs['features'].swapaxes(0, 1)
        return jax.vmap(self_distillation.koleo, (0, None))(crops, mask).sum(0)


def resize_features(
    patches: Float[Array, 'R n D'], old: tuple[int, int], new: tuple[int, int]
) -> Float[Array, 'R N D']:
    """Interpolate features to a new grid, like PyTorch's bicubic mode without antialiasing."""
    if old == new:
        return patches
    rows, columns = (resize.bicubic_matrix(*pair) for pair in zip(old, new, strict=True))
    maps = patches.astype(jnp.float32).reshape(len(patches), *old, -1)
    maps = jnp.einsum('ai,bj,rijd->rabd', rows, columns, maps, precision='highest')
    return maps.reshape(len(patches), math.prod(new), -1)
