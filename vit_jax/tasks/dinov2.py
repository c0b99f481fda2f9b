"""Self-distillation with an average teacher, several crops, and hidden patches: DINOv2.

Oquab et al., 2023, arXiv:2304.07193, section 4. Gram anchoring, of DINOv3: Simeoni et al., 2025,
arXiv:2508.10104, section 4.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import Array
from jax.scipy.special import entr

from vit_jax.array_types import Float
from vit_jax.errors import UserError, check_choice
from vit_jax.ops import resize, self_distillation, sequences
from vit_jax.ops.sequences import Normalization
from vit_jax.ops.terms import Term
from vit_jax.tasks import base
from vit_jax.tasks.base import Apply, Batch, Sums

GLOBAL = ('image', 'second_image')
LOCAL = 'local_image'
LARGE = 'large_image'
GRAM = 'gram_teacher'
SHOWN = 3  # prototypes of an image in `predict`


@dataclasses.dataclass(frozen=True)
class Task(base.Task):
    """From each crop, the student predicts the teacher's prototypes of the other global crops.

    In training, `image` holds global crops [B G H W C], which the transform `views` makes;
    `second_image`, if the data have it, further ones with other transforms; `local_image` local
    crops of another size. In evaluation, `image` holds whole images.

    Where features of patches become worse while those of whole images become better, as in long
    training or on few images, `gram` anchors the similarities of an image's patches to those of a
    model that is not trained, such as an earlier self. It may see the same global crops at twice
    the size, in `large_image` [B G 2H 2W C], for smoother similarities (DINOv3, section 4.3).

    Attributes:
      student_temp: temperature of the student's softmax.
      teacher_temp: of the teacher's.
      first_teacher_temp: initial temperature of the teacher, which rises linearly.
      warmup: updates over which it rises.
      sinkhorn: iterations by which the teacher's prototypes get equal shares.
      ibot: weight of the cross entropy of hidden patches.
      koleo: weight of the term that spreads features.
      masked: global crops of an image that have hidden patches.
      mask_ratios: range of the share of hidden patches in these.
      gram: weight of the Gram loss, see `ops.self_distillation.gram`; 0 for none.
      gram_teacher: the checkpoint whose similarities it keeps, a ViT that `vit_jax.load` reads.
      gram_size: height and width of the images that it sees; 0 for those of its checkpoint.
      gram_negatives: what similarities below 0 count as: 'kept', 'cut' or 'cut_of_teacher'.
      value_range: range to which bytes 0..255 are scaled for the model.
      mean, std: normalization of each channel of images in [0, 1]; empty for `value_range`.
      patches: whether `predict` returns the tokens of patches too, as its pictures need.
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
    gram_teacher: str = ''
    gram_size: int = 0
    gram_negatives: str = 'kept'
    value_range: tuple[float, float] = (-1.0, 1.0)
    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()
    patches: bool = False

    rngs = ('dropout', 'mask')
    couples_rows = True
    inert = (*base.Task.inert, 'gram_teacher')

    def __post_init__(self) -> None:
        for key in ('student_temp', 'teacher_temp', 'first_teacher_temp'):
            self.require(key, getattr(self, key) > 0, 'positive')
        weights = ('ibot', 'koleo', 'gram', 'gram_size')
        for least, keys in ((1, ('warmup', 'sinkhorn', 'masked')), (0, weights)):
            for key in keys:
                self.require(key, getattr(self, key) >= least, f'at least {least}')
        low, high = self.mask_ratios
        self.require('mask_ratios', 0 <= low <= high < 1, 'in order within [0, 1)')
        check_choice('config.task.gram_negatives', self.gram_negatives, self_distillation.NEGATIVES)
        is_whole = len(self.std) == len(self.mean) and min(self.std, default=1) > 0
        self.require('std', is_whole, 'positive, and given with mean for as many channels')

    @property
    def normalization(self) -> Normalization | None:
        """Mean and standard deviation of images, if they are given."""
        return (self.mean, self.std) if self.std else None

    @property
    def frozen(self) -> Mapping[str, str]:
        """The checkpoint whose similarities are kept, if any are."""
        return {GRAM: self.gram_teacher} if self.gram else {}

    @property
    def frozen_sizes(self) -> Mapping[str, tuple[int, int]]:
        """The size of its images, if it is given."""
        return {GRAM: (self.gram_size, self.gram_size)} if self.gram_size else {}

    def inputs(self, batch: Batch) -> tuple[Float[Array, 'B H W C']]:
        """Whole images, or the first global crops."""
        return (self._global(batch)[:, 0],)

    def outputs(self, apply: Apply, batch: Batch) -> dict[str, Any]:
        """Scores of teacher and student, and the student's features.

        Returns:
          teacher, student: scores [B G K] of global crops, [B G+L K] of global and local ones.
          teacher_patches, student_patches: scores [B M P] of patches hidden from the student.
          patch_weights: [B M], 1 / the number of hidden patches of the crop, 0 for padding.
          features: [B G D], the student's class tokens of global crops.
          teacher_temp: the teacher's temperature at this step.
          gram: [B], the mean of the Gram loss over global crops; in training, if it has a weight.

        Raises:
          UserError: if local crops were cut from global ones, or the Gram teacher is missing or has
            other patches.
        """
        if LOCAL in batch and batch[LOCAL].ndim != 5:
            raise UserError(
                f'config.data.transforms: write the views of {LOCAL} before the views of image, '
                'which replace it'
            )
        crops = self._global(batch)
        rows, masked = len(crops), min(self.masked, crops.shape[1])
        masks = apply(crops, method='block_masks', masked=masked, ratios=self.mask_ratios)
        folded, hidden = fold(crops), fold(masks.hidden)
        teacher = apply.average(folded, places=masks.places)
        student = apply(folded, hidden=hidden, places=masks.places)
        scores = [unfold(student['scores'], rows)]
        if LOCAL in batch:
            local = self._scaled(fold(batch[LOCAL]))
            scores.append(unfold(apply(local)['scores'], rows))
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
        """Cross entropies of crops and of hidden patches, and the spread of features.

        The metrics, in nats, are entropies of single targets and of the mean target, which is
        log K where all prototypes are used alike.

        Raises:
          UserError: if there is but one global crop, or there are fewer than have hidden patches.
        """
        self._check_crops(outputs['teacher'].shape[1])
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
        """Measures of whole images in nats, each independent of other images.

        `loss` is the cross entropy of a student that is the teacher, from what the teacher says of
        the same image, neither balanced nor masked; `entropy` is that of the teacher alone.
        """
        mask, scores = self.mask(batch), apply(*self.inputs(batch))['scores']
        probs = jax.nn.softmax(scores / self.teacher_temp)
        losses = self_distillation.cross_entropy(probs, scores, self.student_temp)
        each = {'loss': losses, 'entropy': entr(probs).sum(-1)}
        return {name: ((values * mask).sum(), mask.sum()) for name, values in each.items()}

    def predict(self, apply: Apply, batch: Batch) -> dict[str, jax.Array]:
        """Features and nearest prototypes of whole images.

        Returns:
          features: [B D], the class token.
          patches: [B N D], the tokens of patches, if they are asked for.
          prototype, probability: [B 3], the likeliest prototypes, the best one first.
        """
        made = apply(*self.inputs(batch))
        probs = jax.nn.softmax(made['scores'] / self.teacher_temp)
        probability, prototype = jax.lax.top_k(probs, min(SHOWN, probs.shape[-1]))
        more = {'patches': made['patches'].astype(jnp.float32)} if self.patches else {}
        return {
            'features': made['pre_logits'].astype(jnp.float32),
            'prototype': prototype,
            'probability': probability,
            **more,
        }

    def _global(self, batch: Batch) -> Float[Array, 'B G H W C']:
        """The global crops, scaled; a whole image is one."""
        found = [batch[name] for name in GLOBAL if name in batch]
        crops = [x if x.ndim == 5 else x[:, None] for x in found]
        return self._scaled(jnp.concatenate(crops, axis=1))

    def _scaled(self, images: Array) -> Array:
        return sequences.to_range(images, self.value_range, self.normalization)

    def _gram_losses(
        self, apply: Apply, batch: Batch, size: tuple[int, int], patches: Float[Array, 'R N D']
    ) -> Float[Array, ' R']:
        """The Gram loss of each global crop.

        Args:
          apply: with the Gram teacher.
          batch: with global crops as bytes.
          size: height and width of the student's crops.
          patches: the student's, of all global crops.
        """
        if GRAM not in apply.frozen:
            raise UserError('config.task.gram_teacher: it is read in training runs alone')
        model, side = self.frozen_models[GRAM], math.isqrt(math.prod(size) // patches.shape[1])
        crops = fold(batch[LARGE] if LARGE in batch else self._global(batch))
        if len(crops) != len(patches):
            raise UserError(f'config.data.transforms: {LARGE} and image need as many views')
        view = model.view(self._unscaled(crops))
        made, stride = apply.frozen[GRAM](view), model.module.stride
        if 'tokens' not in made or not stride:
            raise UserError(
                f'config.task.gram_teacher={self.gram_teacher}: a '
                f'{type(model.module).__module__.rpartition(".")[2]} makes no tokens of patches'
            )
        old = (view.shape[1] // stride, view.shape[2] // stride)
        found = made['tokens'][:, -math.prod(old) :]
        found = resized(found, old, (size[0] // side, size[1] // side))
        return self_distillation.gram(patches, found, self.gram_negatives)

    def _unscaled(self, images: Array) -> Float[Array, '*B C']:
        """Bytes or scaled images in [0, 1]."""
        low, high = self.value_range
        mean, std = self.normalization or ((-low / (high - low),), (1 / (high - low),))
        return self._scaled(images) * jnp.asarray(std) + jnp.asarray(mean)

    def _check_crops(self, crops: int) -> None:
        if crops < 2:
            raise UserError(
                'config.data.transforms: DINOv2 learns from two global crops or more; write '
                "views('image', 2, 'inception_crop(224, 32)|flip')"
            )
        if crops < self.masked:
            raise UserError(f'config.task.masked={self.masked}: there are {crops} global crops')

    def _targets(self, outputs: dict[str, Any], mask: Float[Array, ' B']) -> Array:
        """The teacher's probabilities [B G K], balanced over all global crops of the batch."""
        scores = outputs['teacher'] / outputs['teacher_temp']
        real = jnp.repeat(mask, scores.shape[1])
        targets = self_distillation.sinkhorn(fold(scores), real, self.sinkhorn)
        return targets.reshape(scores.shape)

    def _crop_losses(self, targets: Array, outputs: dict[str, Any]) -> Float[Array, ' B']:
        """The mean over pairs of different crops, of which one is global (DINO, equation 3)."""
        logs = jax.nn.log_softmax(outputs['student'] / self.student_temp)
        losses = -jnp.einsum('bgk,bvk->bgv', targets, logs, precision='highest')
        others = 1 - jnp.eye(losses.shape[1], losses.shape[2])
        return (losses * others).sum((1, 2)) / others.sum()

    def _patch_losses(
        self, outputs: dict[str, Any], mask: Float[Array, ' B']
    ) -> Float[Array, ' B']:
        """The mean over global crops of that over their hidden patches (iBOT, equation 2)."""
        scores, weights = outputs['teacher_patches'], outputs['patch_weights']
        real = (weights > 0) & (mask[:, None] > 0)
        scores = scores / outputs['teacher_temp']
        targets = self_distillation.sinkhorn(fold(scores), fold(real), self.sinkhorn)
        losses = self_distillation.cross_entropy(
            targets.reshape(scores.shape), outputs['student_patches'], self.student_temp
        )
        return (losses * weights).sum(1) / outputs['teacher'].shape[1]

    def _spread(self, outputs: dict[str, Any], mask: Float[Array, ' B']) -> Float[Array, ' B']:
        """The sum over global crops of the KoLeo term among crops of different images."""
        crops = outputs['features'].swapaxes(0, 1)
        return jax.vmap(self_distillation.koleo, (0, None))(crops, mask).sum(0)


def resized(
    patches: Float[Array, 'R n D'], old: tuple[int, int], new: tuple[int, int]
) -> Float[Array, 'R N D']:
    """Features on another grid, by PyTorch's bicubic interpolation without antialiasing."""
    if old == new:
        return patches
    rows, columns = (resize.bicubic_matrix(*pair) for pair in zip(old, new, strict=True))
    maps = patches.astype(jnp.float32).reshape(len(patches), *old, -1)
    maps = jnp.einsum('ai,bj,rijd->rabd', rows, columns, maps, precision='highest')
    return maps.reshape(len(patches), math.prod(new), -1)


def fold(x: Array) -> Array:
    """[B V ...] -> [B V, ...], the views of an example one after the other."""
    return x.reshape(-1, *x.shape[2:])


def unfold(x: Array, rows: int) -> Array:
    """The inverse of `fold` for `rows` examples."""
    return x.reshape(rows, -1, *x.shape[1:])
