"""Distillation: a classifier learns to match a larger one, its teacher.

Beyer et al., 2022, "Knowledge distillation: a good teacher is patient and consistent",
arXiv:2106.05237: teacher and student see the same augmented view, with mixup. Touvron et al.,
2021, arXiv:2012.12877: hard labels and a distillation token (DeiT).
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
PROJECTED = 'projected'  # output of the model `projected`


@dataclasses.dataclass(frozen=True)
class Task(classify.Task):
    """Learn one label per image and the outputs of a frozen teacher.

    A model with the pool 'distilled' learns labels by its class token and the teacher by its
    distillation token. Evaluation needs no teacher and is the same as in `classify`.

    Attributes:
      teacher: Run or checkpoint that `vit_jax.load` reads, with the classes of the data in the same
        order; for `target='features'` the classes do not matter. It sees the student's view,
        resized to its own image size.
      target: 'soft', the teacher's probabilities (KL divergence); 'hard', its most probable class;
        or 'features', the direction of its representation (1 - cosine).
      temperature: T of 'soft': T^2 KL(softmax(teacher / T) || softmax(student / T)).
      weight: Weight of the distillation loss.
      label_weight: Weight of the label loss; 0 to learn only from the teacher.
      loss_name, label_smoothing, class_weights: Label loss, see the task `classify`.
      mixup, cutmix, value_range, mean, std: See the task `classify`.
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
        """Teacher's checkpoint."""
        return {TEACHER: self.teacher}

    def outputs(self, apply: Apply, batch: Batch) -> dict[str, Any]:
        """Return the student's outputs and, in training, the teacher's target as `teacher`.

        Raises:
          UserError: if the teacher was not loaded, or teacher or student lacks the required output.
        """
        outputs = apply(*self.inputs(batch))
        if not apply.train:
            return outputs
        if TEACHER not in apply.frozen:
            raise UserError('config.task.teacher: its checkpoint is only loaded in training')
        view = self.teacher_view(self.frozen_models[TEACHER], *self.inputs(batch))
        teacher_outputs, name = apply.frozen[TEACHER](view), NAMES[self.target]
        if name not in teacher_outputs:
            raise UserError(
                f'config.task.target={self.target!r}: the teacher has no output {name}, only '
                f'{", ".join(teacher_outputs)}'
            )
        student = self._learner(outputs)
        if student.shape != teacher_outputs[name].shape:
            raise UserError(
                f'config.task.target={self.target!r}: the teacher has '
                f'{teacher_outputs[name].shape[1:]} numbers per image, the student '
                f'{student.shape[1:]}: ' + ADVICE[name].format(teacher_outputs[name].shape[-1])
            )
        return {**outputs, TEACHER: teacher_outputs[name].astype(jnp.float32)}

    def teacher_view(self, model: FrozenModel, images: Any) -> Float[Array, 'B H W C']:
        """Convert the student's images to the teacher's size and range.

        Raises:
          UserError: for sequences of patches, whose images may differ in size.
        """
        if not isinstance(images, jax.Array):
            raise UserError('task distill needs images of one size, not sequences of patches')
        low, high = self.value_range
        mean, std = self.normalization or ((-low / (high - low),), (1 / (high - low),))
        return model.view(images * jnp.asarray(std) + jnp.asarray(mean))

    def loss(self, outputs: dict, batch: Batch) -> dict[str, Term]:
        """Means over the examples: `labels`, in training `distill`, and the metrics `accuracy` and
        `agreement`, the share of images where teacher and student predict the same class.
        """
        label_outputs = {**outputs, 'logits': outputs.get('class_logits', outputs['logits'])}
        label_terms = super().loss(label_outputs, batch)
        labels = label_terms['loss']._replace(weight=self.label_weight)
        terms = {'labels': labels, 'accuracy': label_terms['accuracy']}
        if TEACHER not in outputs:
            return terms
        mask, target, student = self.mask(batch), outputs[TEACHER], self._learner(outputs)
        count = mask.sum()
        losses = TARGETS[self.target](student.astype(jnp.float32), target, self.temperature)
        terms['distill'] = Term((losses * mask).sum(), count, self.weight)
        if self.target != 'features':
            agrees = student.argmax(-1) == target.argmax(-1)
            terms['agreement'] = Term((agrees * mask).sum(), count, 0.0)
        return terms

    def _learner(self, outputs: Mapping[str, Any]) -> Array:
        """Return the student's output that is trained to match the teacher."""
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
    """1 - cosine similarity."""
    del temperature
    return optax.losses.cosine_distance(student, teacher, epsilon=1e-6)


TARGETS = {'soft': soft, 'hard': hard, 'features': features}
NAMES = {'soft': 'logits', 'hard': 'logits', 'features': 'pre_logits'}
ADVICE = {
    'logits': 'both need the classes of the data',
    'pre_logits': "set config.model.name='projected' with projection={}",
}
