"""Self-distillation with an average teacher and multi-crop (Caron et al. 2021, section 3)."""

import dataclasses

import jax
import jax.numpy as jnp
import optax
from jax.scipy.special import entr
from jaxtyping import Array, Float

from vit_jax.ops import sequences
from vit_jax.ops.terms import Term
from vit_jax.tasks import base
from vit_jax.tasks.base import Apply, Batch, Sums


@dataclasses.dataclass(frozen=True)
class Task(base.Task):
    """From each view, the student predicts the teacher's prototypes of the other global views.

    `image` holds global views [B G H W C], in evaluation whole images; `local_image` local views.

    Attributes:
      student_temp, teacher_temp: temperatures of the softmax.
      first_temp: of the teacher at first; rises over `warmup` steps ("Implementation details").
      sinkhorn: iterations that give prototypes equal shares (arXiv:2006.09882, section 3.1); with 0
        the mean of the teacher's logits is subtracted (equation 4, without its momentum).
    """

    student_temp: float = 0.1
    teacher_temp: float = 0.07
    first_temp: float = 0.04
    warmup: int = 1
    sinkhorn: int = 0

    rngs = ('dropout',)
    couples_rows = True

    def inputs(self, batch: Batch, name: str = 'image') -> tuple[Float[Array, 'N H W C']]:
        return (sequences.to_range(batch[name].reshape(-1, *batch[name].shape[-3:]), (-1.0, 1.0)),)

    def outputs(self, apply: Apply, batch: Batch) -> dict[str, Array]:
        """Logits of the teacher [B G K] and of the student [B V K], global views first."""
        rows, names = len(batch['image']), [n for n in ('image', 'local_image') if n in batch]
        made = [apply.average(*self.inputs(batch)), *(apply(*self.inputs(batch, n)) for n in names)]
        temp = optax.linear_schedule(self.first_temp, self.teacher_temp, self.warmup)(apply.step)
        teacher, *student = (x['logits'].reshape(rows, -1, x['logits'].shape[-1]) for x in made)
        return {'teacher': teacher, 'student': jnp.concatenate(student, 1), 'teacher_temp': temp}

    def loss(self, outputs: dict[str, Array], batch: Batch) -> dict[str, Term]:
        """Cross entropy over pairs of views, and entropies of single targets and of their mean."""
        mask, count = self.mask(batch), self.mask(batch).sum()
        targets = self._centered(outputs['teacher'] / outputs['teacher_temp'], mask)
        logs = jax.nn.log_softmax(outputs['student'] / self.student_temp)
        pairs = -jnp.einsum('bgk,bvk->bgv', targets, logs)
        others = 1 - jnp.eye(*pairs.shape[1:])  # a view does not predict itself
        losses = (pairs * others).sum((1, 2)) / others.sum()
        usage = jnp.einsum('bgk,b->k', targets, mask) / (count * targets.shape[1])
        return {
            'loss': Term((losses * mask).sum(), count),
            'target_entropy': Term((entr(targets).sum(-1).mean(1) * mask).sum(), count, 0.0),
            'usage_entropy': Term(entr(usage).sum() * count, count, 0.0),
        }

    def _centered(self, logits: Float[Array, 'B G K'], mask: Float[Array, ' B']) -> Array:
        """Teacher probabilities, balanced so that no prototype wins in all real rows."""
        if not self.sinkhorn:
            mean = jnp.einsum('bgk,b->k', logits, mask) / (mask.sum() * logits.shape[1])
            return jax.nn.softmax(logits - mean)
        absent = jnp.where(mask > 0, 0, -jnp.inf)[:, None, None]
        for _ in range(self.sinkhorn):
            logits = jax.nn.log_softmax(logits - jax.nn.logsumexp(logits + absent, (0, 1)))
        return jnp.exp(logits)

    def evaluate(self, apply: Apply, batch: Batch) -> Sums:
        """Entropy of an image's prototypes, independent of other images."""
        mask, probs = self.mask(batch), self.predict(apply, batch)['probs']
        entropy = entr(probs).sum(-1).reshape(len(mask), -1).mean(1)
        return {'entropy': ((entropy * mask).sum(), mask.sum())}

    def predict(self, apply: Apply, batch: Batch) -> dict[str, jax.Array]:
        """`features` [B D], `patches` [B N D] and prototypes `probs` [B K] of whole images."""
        made = apply(*self.inputs(batch))
        probs = jax.nn.softmax(made['logits'] / self.teacher_temp)
        return {'features': made['pre_logits'], 'patches': made['tokens'][:, 1:], 'probs': probs}
