"""SigLIP 2: the losses of SigLIP, of captioning and of self-distillation on one image encoder.

Tschannen et al., 2025, arXiv:2502.14786, sections 2.2 and 2.3. Each loss is computed by its own
task: `siglip`, `caption` and `dinov2`.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from vit_jax.array_types import Int
from vit_jax.config.run import Duration
from vit_jax.errors import UserError
from vit_jax.ops.terms import Term
from vit_jax.tasks import caption, dinov2, siglip
from vit_jax.tasks._views import LOCAL
from vit_jax.tasks.base import Apply, Batch, Sums
from vit_jax.tasks.translate import shift_right

GLOBAL = 'global_image'
DISTILLED = ('dino', 'ibot', 'target_entropy', 'usage_entropy')  # terms of `dinov2`


@dataclasses.dataclass(frozen=True)
class Distilling(siglip.Task):
    """A task of contrast with texts that also distills views of images from a step on.

    See `Task` for the batch and the fields.
    """

    dino: float = 1.0
    ibot: float = 0.25
    start: Duration = '80%'
    mask_ratios: tuple[float, float] = (0.5, 0.5)
    student_temp: float = 0.1
    teacher_temp: float = 0.07
    sinkhorn: int = 3

    rngs = ('dropout', 'mask')
    durations = ('start',)
    inert = (
        *siglip.Task.inert,
        *('dino', 'ibot', 'start', 'mask_ratios'),
        *('student_temp', 'teacher_temp', 'sinkhorn'),
    )

    def __post_init__(self) -> None:
        for key in ('dino', 'ibot'):
            self.require(key, getattr(self, key) >= 0, 'at least 0')
        super().__post_init__()
        _ = self.distiller  # it checks its fields

    @property
    def distiller(self) -> dinov2.Task:
        """Task of self-distillation."""
        return dinov2.Task(
            value_range=self.value_range,
            mean=self.mean,
            std=self.std,
            student_temp=self.student_temp,
            teacher_temp=self.teacher_temp,
            first_teacher_temp=self.teacher_temp,
            sinkhorn=self.sinkhorn,
            ibot=self.ibot,
            koleo=0.0,
            mask_ratios=self.mask_ratios,
        )

    def comparing(self, apply: Apply) -> Comparing:
        """Wrap the model for the task `dinov2`."""
        return Comparing(apply)

    def outputs(self, apply: Apply, batch: Batch) -> dict[str, Any]:
        """Return the model's outputs; those of the task `dinov2` as `views`, zeros before `start`;
        and `started`, 1 from `start` on. A batch of evaluation may lack views.

        Raises:
          UserError: if a training batch has no views.
        """
        outputs: dict[str, Any] = super().outputs(apply, batch)
        has_views = {GLOBAL, LOCAL} <= batch.keys()
        if not (self.dino or self.ibot) or not (apply.train or has_views):
            return outputs
        views, part = self._views(batch), self.distiller

        def compare(apply: Apply) -> dict[str, Any]:
            return part.outputs(self.comparing(apply), views)

        if not (apply.train and isinstance(self.start, int) and self.start):
            return {**outputs, 'views': compare(apply), 'started': np.int32(1)}
        started = jnp.asarray(apply.step >= self.start, jnp.int32)
        # Shapes come from a copy, as an `apply` counts its calls.
        shapes = jax.eval_shape(lambda: compare(copy.copy(apply)))
        distilled = when(started, functools.partial(compare, apply), shapes)
        return {**outputs, 'views': distilled, 'started': started}

    def loss(self, outputs: dict[str, Any], batch: Batch) -> dict[str, Term]:
        """Compute the terms of all losses, each with its count; metrics as of their tasks.

        Raises:
          UserError: if the batch has no token ids of captions.
        """
        terms = self.text_terms(outputs, batch)
        if 'views' not in outputs:
            return terms
        weights = {'dino': self.dino, 'ibot': self.ibot}

        def distill() -> dict[str, tuple[Array, Array]]:
            found = self.distiller.loss(outputs['views'], batch)
            return {name: (found[name].sum, jnp.asarray(found[name].count)) for name in DISTILLED}

        sums = when(outputs['started'], distill, jax.eval_shape(distill))
        return terms | {
            name: Term(total, count, weights.get(name, 0.0))
            for name, (total, count) in sums.items()
        }

    def text_terms(self, outputs: dict[str, Any], batch: Batch) -> dict[str, Term]:
        """Compute the terms of losses with texts, `contrast` and its metrics."""
        return rename(super().loss(outputs, batch), 'contrast', 1.0)

    def evaluate(self, apply: Apply, batch: Batch) -> Sums:
        """Compute the losses with texts of whole images, captions token by token.

        `loss` is their weighted sum.
        """
        terms = self.text_terms(super().outputs(apply, batch), batch)
        total = sum(term.weight * term.sum for term in terms.values() if term.weight)
        sums = {name: (term.sum, term.count) for name, term in terms.items()}
        return {'loss': (total, terms['contrast'].count), **sums}

    def _views(self, batch: Batch) -> Batch:
        """Return the batch of self-distillation."""
        if not {GLOBAL, LOCAL} <= batch.keys():
            raise UserError(
                f'task {type(self).__module__.rpartition(".")[2]} distills views, but the examples '
                f'have {", ".join(sorted(batch))}: '
                f"add views('{GLOBAL}', 1, 'inception_crop(224)|flip') and views('{LOCAL}', 8, "
                "'inception_crop(96, 5, 40)|flip') to the transforms, or set config.task.dino=0 "
                'and config.task.ibot=0'
            )
        return {'image': batch[GLOBAL], LOCAL: batch[LOCAL]}


@dataclasses.dataclass(frozen=True)
class Task(Distilling):
    """Contrast images with texts, predict the texts, and from a step on distill views of images.

    In training, `image` holds whole images, which only the losses with texts see. The transforms
    `views('global_image', 1, ...)` and `views('local_image', 8, ...)` make the views: the teacher,
    an average of the student, sees the global one, the student the local ones, and the global one
    with hidden patches. Before `start`, views cost nothing on the devices.

    The teacher is the first average of `config.step.ema_decay`. With `config.step.ema_start` equal
    to `start` it begins as a copy of the student.

    Attributes:
      loss_name, text, repeats, chunk, locked_image, value_range, mean, std, prompts: See the task
        `siglip`.
      captions: Weight of the decoder's loss.
      parallel: Share of captions predicted in parallel, see the task `caption`.
      dino: Weight of the cross entropy of local views and the global one; 0.25 to 1 in the paper,
        by size.
      ibot: Weight of the cross entropy of hidden patches; a quarter of `dino` in the paper.
      start: Beginning of self-distillation, as a share of the run or in steps.
      mask_ratios: Range of the share of hidden patches.
      student_temp, teacher_temp, sinkhorn: See the task `dinov2`.
    """

    captions: float = 1.0
    parallel: float = 0.5

    inert = (*Distilling.inert, 'parallel')

    def __post_init__(self) -> None:
        self.require('captions', self.captions >= 0, 'at least 0')
        super().__post_init__()
        _ = self.captioner  # it checks its fields

    @property
    def captioner(self) -> caption.Task:
        """Task of the decoder."""
        return caption.Task(parallel=self.parallel, caption=self.text)

    def augment(self, key: jax.Array, batch: Batch) -> Batch:
        """Add `parallel`, see the task `caption`."""
        return self.captioner.augment(key, batch)

    def inputs(self, batch: Batch) -> tuple[Any, ...]:
        """Return images, token ids, ids shifted right, and `parallel` if the batch has them."""
        images, ids = super().inputs(batch)
        if ids is None or not self.captions:
            return images, ids
        drawn = (batch['parallel'],) if 'parallel' in batch else ()
        return images, ids, shift_right(ids), *drawn

    def text_terms(self, outputs: dict[str, Any], batch: Batch) -> dict[str, Term]:
        """Compute the terms of contrast and of captioning."""
        terms = super().text_terms(outputs, batch)
        if 'logits' in outputs:
            terms |= rename(self.captioner.loss(outputs, batch), 'captions', self.captions)
        return terms


def when(started: Int[Array, ''] | np.int32, function: Callable[[], Any], shapes: Any) -> Any:
    """Return the result of a function if `started` is 1; else zeros, without computing it."""
    if isinstance(started, np.int32):
        return function()
    return jax.lax.cond(
        started > 0,
        function,
        lambda: jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes),
    )


def rename(terms: Mapping[str, Term], name: str, weight: float) -> dict[str, Term]:
    """Name the term `loss` after its task, and give it a weight."""
    return {
        **{key: term for key, term in terms.items() if key != 'loss'},
        name: terms['loss']._replace(weight=weight),
    }


class Comparing:
    """A model whose call compares images with prototypes, for the task `dinov2`.

    Args:
      apply: Model of the task `siglip2`.
    """

    def __init__(self, apply: Apply):
        self._apply = apply
        self.train, self.step, self.frozen = apply.train, apply.step, apply.frozen

    def __call__(self, *inputs: Any, method: str | None = None, **options: Any) -> Any:
        options = options if method else {'train': self.train, **options}
        return self._apply(*inputs, method=method or 'compare', **options)

    def average(self, *inputs: Any, method: str | None = None, **options: Any) -> Any:
        return self._apply.average(*inputs, method=method or 'compare', **options)
