"""Classification of texts, with the losses of images' classification."""

from __future__ import annotations

import dataclasses

from jax import Array

from vit_jax.array_types import Int
from vit_jax.errors import UserError
from vit_jax.tasks import classify
from vit_jax.tasks.base import Batch


@dataclasses.dataclass(frozen=True)
class Task(classify.Task):
    """One label a text.

    Attributes:
      text: the field of the data that holds the ids of the texts.
      loss_name, label_smoothing: see the task `classify`, whose mixtures are of images alone.
    """

    text: str = 'caption'

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require('mixup', self.mixup == 0, '0 for texts')
        self.require('cutmix', self.cutmix == 0, '0 for texts')

    def inputs(self, batch: Batch) -> tuple[Int[Array, 'B N']]:
        """The ids of the texts.

        Raises:
          UserError: if the batch has none.
        """
        if self.text not in batch:
            found = ', '.join(sorted(batch))
            raise UserError(
                f'task classify_text needs texts, but the examples have {found}: add '
                f"tokenize('{self.text}', 64) to the transforms"
            )
        return (batch[self.text],)
