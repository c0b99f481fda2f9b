"""Text classification with the losses of image classification."""

from __future__ import annotations

import dataclasses

from jax import Array

from vit_jax.array_types import Int
from vit_jax.errors import UserError
from vit_jax.tasks import classify
from vit_jax.tasks.base import Batch


@dataclasses.dataclass(frozen=True)
class Task(classify.Task):
    """Predict one label per text.

    Attributes:
      text: Batch field with the token ids.
      loss_name, label_smoothing: See the task `classify`. Mixup and cutmix must be 0.
    """

    text: str = 'caption'

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require('mixup', self.mixup == 0, '0 for texts')
        self.require('cutmix', self.cutmix == 0, '0 for texts')

    def inputs(self, batch: Batch) -> tuple[Int[Array, 'B N']]:
        """Return the token ids.

        Raises:
          UserError: if the batch has no token ids.
        """
        if self.text not in batch:
            fields = ', '.join(sorted(batch))
            raise UserError(
                f'task classify_text needs texts, but the examples have {fields}: add '
                f"tokenize('{self.text}', 64) to the transforms"
            )
        return (batch[self.text],)
