"""TIPS: contrast with two captions, self-distillation and masked prediction on one image encoder.

Maninis et al., 2025, arXiv:2410.16512; second version: arXiv:2604.12012. Each loss is computed by
its own task: `siglip` and `dinov2`.
"""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import jax.numpy as jnp

from vit_jax.config.run import Duration
from vit_jax.ops.self_distillation import CropMasks
from vit_jax.ops.terms import Term
from vit_jax.tasks import siglip, siglip2
from vit_jax.tasks.base import Apply, Batch

HEADS = ('dino_head', 'ibot_head')


@dataclasses.dataclass(frozen=True)
class Task(siglip2.Distilling):
    """Contrast images with two captions each, and distill views of images.

    The class token is contrasted with `text`; the second one, the first register, with
    `second_text`, such as a synthetic caption beside one from the web. See the task `siglip2` for
    the views and for the teacher. The model is `tips_student`.

    Attributes:
      loss_name, text, repeats, chunk, locked_image, value_range, mean, std, prompts: See the task
        `siglip`.
      second_text: Batch field with the token ids of further captions; '' for none.
      dino, ibot: Weights of the cross entropies of local views, and of patches.
      start, mask_ratios, student_temp, teacher_temp, sinkhorn: See the task `siglip2`.
      visible: Whether the loss of patches covers visible ones too (iBOT++, TIPSv2).
      average: What the teacher takes from the run's average: only 'heads', the encoder being the
        student's own (TIPSv2), or 'all'.
    """

    loss_name: str = 'softmax'
    second_text: str = ''
    ibot: float = 2.0
    start: Duration = 0
    visible: bool = True
    average: str = 'heads'

    inert = (*siglip2.Distilling.inert, 'second_text', 'visible', 'average')

    def __post_init__(self) -> None:
        self.require('average', self.average in ('heads', 'all'), "'heads' or 'all'")
        self.require('second_text', self.second_text != self.text, 'another field than text')
        super().__post_init__()

    def inputs(self, batch: Batch) -> tuple[Any, ...]:
        """Return images, token ids, and those of the second captions if the batch has them."""
        second = (batch[self.second_text],) if self.second_text in batch else ()
        return *super().inputs(batch), *second

    def comparing(self, apply: Apply) -> siglip2.Comparing:
        """Wrap the model for the task `dinov2`."""
        return Comparing(apply, self.visible, HEADS if self.average == 'heads' else ())

    def text_terms(self, outputs: dict[str, Any], batch: Batch) -> dict[str, Term]:
        """Compute the mean of both contrasts, of which either counts half."""
        terms = super().text_terms(outputs, batch)
        if 'second_text' not in outputs:
            return terms
        pairs = {name: outputs[f'second_{name}'] for name in ('image', 'text')}
        second = siglip.Task.loss(
            self, {**outputs, **pairs}, {**batch, self.text: batch[self.second_text]}
        )
        second = siglip2.rename(second, 'contrast', 0.5)
        return {
            **terms,
            'contrast': terms['contrast']._replace(weight=0.5),
            **{f'second_{name}': term for name, term in second.items()},
        }


class Comparing(siglip2.Comparing):
    """A model for the task `dinov2`, as in `siglip2`.

    Args:
      apply: Model of the task `tips`.
      visible: Whether all patches are compared, not only hidden ones.
      parts: Modules of the teacher that are averages; by default all.
    """

    def __init__(self, apply: Apply, visible: bool, parts: tuple[str, ...]):
        super().__init__(apply)
        self._visible, self._parts = visible, parts

    def __call__(self, *inputs: Any, method: str | None = None, **options: Any) -> Any:
        found = super().__call__(*inputs, method=method, **options)
        return everywhere(found) if method == 'block_masks' and self._visible else found

    def average(self, *inputs: Any, method: str | None = None, **options: Any) -> Any:
        own: Any = self._apply
        if self._parts and (averages := getattr(own, 'ema', None)):
            self._apply = copy.copy(own)
            chosen = {name: averages[name] for name in self._parts}
            self._apply.ema = {**own.params, **chosen}  # type: ignore[attr-defined]
        found = super().average(*inputs, method=method, **options)
        self._apply = own
        return found


def everywhere(masks: CropMasks) -> CropMasks:
    """Compare all patches, each with the same weight; the same ones stay hidden."""
    rows, crops, patches = masks.hidden.shape
    places = jnp.broadcast_to(jnp.arange(crops * patches), (rows, crops * patches))
    return masks._replace(places=places, weights=jnp.full(places.shape, 1 / patches))
