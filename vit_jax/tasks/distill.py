"""Distillation: a classifier learns what a larger one, its teacher, says of the same images.

Beyer et al., 2022, "Knowledge distillation: a good teacher is patient and consistent",
arXiv:2106.05237: teacher and student see the same augmented view, mixup included. Touvron et al.,
2021, arXiv:2012.12877: hard labels, and a token for the teacher's (DeiT).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import Array

from vit_jax.array_types import Float
from vit_jax.errors import UserError, check_choice
from vit_jax.ops.terms import Term
from vit_jax.tasks import classify
from vit_jax.tasks.base import Apply, Batch, FrozenModel

TEACHER = 'teacher'
PROJECTED = 'projected'  # the output of the model of that name


@dataclasses.dataclass(frozen=True)
class Task(classify.Task):
    """One label an image, and the outputs of a teacher, which is not trained.

    A model with the pool 'distilled' learns labels by its class token and the teacher by its
    distillation token. Evaluation, which needs no teacher, is that of `classify`.

    Attributes:
      teacher: a run, or a checkpoint that `vit_jax.load` reads, with the classes of the data in
        their order, or for `target='features'` any. It gets the student's view, resized if its
        images have another size.
      target: 'soft', the teacher's probabilities (KL divergence); 'hard', its most probable class;
        or 'features', the direction of its representation (1 - cosine).
      temperature: T of 'soft': T^2 KL(softmax(teacher / T) || softmax(student / T)).
      weight: of the teacher's term in the loss.
      label_weight: of the labels' term; 0 for the teacher alone.
      loss_name, label_smoothing, class_weights: of the labels' term, see the task `classify`.
      mixup, cutmix, value_range, mean, std: see the task `classify`.
    """

    teacher: str = ''
    target: str = 'soft'
    temperature: float = 1.0
    weight: float = 1.0
    label_weight: float = 0.0

    inert = (
        *classify.Task.inert,
        *('teacher', 'target', 'temperature', 'weight', 'label_weight'),
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice('config.task.target', self.target, TARGETS)
        self.require('temperature', self.temperature > 0, 'positive')
        self.require('weight', self.weight > 0, 'positive')
        self.require('label_weight', self.label_weight >= 0, 'at least 0')

    @property
    def frozen(self) -> Mapping[str, str]:
        """The teacher's checkpoint."""
        return {TEACHER: self.teacher}

    def outputs(self, apply: Apply, batch: Batch) -> dict[str, Any]:
        """The student's outputs, and in training as `teacher` the target of the teacher.

        Raises:
          UserError: if the teacher was not read, or it or the student lacks the output needed.
        """
        found = apply(*self.inputs(batch))
        if not apply.train:
            return found
        if TEACHER not in apply.frozen:
            raise UserError('config.task.teacher: its checkpoint is read in training runs alone')
        view = self.teacher_view(self.frozen_models[TEACHER], *self.inputs(batch))
        made, wanted = apply.frozen[TEACHER](view), NAMES[self.target]
        if wanted not in made:
            raise UserError(
                f'config.task.target={self.target!r}: the teacher makes no {wanted}, only '
                f'{", ".join(made)}'
            )
        ours = self._learner(found)
        if ours.shape != made[wanted].shape:
            raise UserError(
                f'config.task.target={self.target!r}: the teacher makes {made[wanted].shape[1:]} '
                f'numbers an image, the student {ours.shape[1:]}: '
                + ADVICE[wanted].format(made[wanted].shape[-1])
            )
        return {**found, TEACHER: made[wanted].astype(jnp.float32)}

    def teacher_view(self, model: FrozenModel, images: Any) -> Float[Array, 'B H W C']:
        """The student's images as the teacher takes them.

        Raises:
          UserError: for sequences of patches, of which several sizes may be in a batch.
        """
        if not isinstance(images, jax.Array):
            raise UserError('task distill needs images of one size, not sequences of patches')
        low, high = self.value_range
        mean, std = self.normalization or ((-low / (high - low),), (1 / (high - low),))
        return model.view(images * jnp.asarray(std) + jnp.asarray(mean))

    def loss(self, outputs: dict, batch: Batch) -> dict[str, Term]:
        """Means over the examples: `labels`, in training `distill`, and the metrics `accuracy` and
        `agreement`, the share of images of which teacher and student name the same class.
        """
        of_labels = {**outputs, 'logits': outputs.get('class_logits', outputs['logits'])}
        found = super().loss(of_labels, batch)
        labels = found['loss']._replace(weight=self.label_weight)
        terms = {'labels': labels, 'accuracy': found['accuracy']}
        if TEACHER not in outputs:
            return terms
        mask, target, ours = self.mask(batch), outputs[TEACHER], self._learner(outputs)
        count = mask.sum()
        each = TARGETS[self.target](ours.astype(jnp.float32), target, self.temperature)
        terms['distill'] = Term((each * mask).sum(), count, self.weight)
        if self.target != 'features':
            same = ours.argmax(-1) == target.argmax(-1)
            terms['agreement'] = Term((same * mask).sum(), count, 0.0)
        return terms

    def _learner(self, outputs: Mapping[str, Any]) -> Array:
        """The output of the student that follows the teacher."""
        if self.target == 'features':
            return outputs.get(PROJECTED, outputs['pre_logits'])
        return outputs.get('distillation_logits', outputs['logits'])


def soft(
    student: Float[Array, 'B C'], teacher: Float[Array, 'B C'], temperature: float
) -> Float[Array, ' B']:
    """T^2 KL(softmax(teacher / T) || softmax(student / T)), in nats."""
    probs = jax.nn.softmax(teacher / temperature)
    logs = jax.nn.log_softmax(student / temperature)
    return temperature**2 * optax.losses.kl_divergence(logs, probs)


def hard(
    student: Float[Array, 'B C'], teacher: Float[Array, 'B C'], temperature: float
) -> Float[Array, ' B']:
    """Cross entropy with the teacher's most probable class, in nats."""
    del temperature
    return optax.softmax_cross_entropy_with_integer_labels(student, teacher.argmax(-1))


def features(
    student: Float[Array, 'B D'], teacher: Float[Array, 'B D'], temperature: float
) -> Float[Array, ' B']:
    """1 - the cosine of both."""
    del temperature
    return optax.losses.cosine_distance(student, teacher, epsilon=1e-6)


TARGETS = {'soft': soft, 'hard': hard, 'features': features}
NAMES = {'soft': 'logits', 'hard': 'logits', 'features': 'pre_logits'}
ADVICE = {
    'logits': 'both need the classes of the data',
    'pre_logits': "take config.model.name='projected' with projection={}",
}
