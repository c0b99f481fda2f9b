"""A classification task that trains, and cannot be evaluated."""

from vit_jax.errors import UserError
from vit_jax.tasks import classify

REASON = 'this task has no evaluation'


class Task(classify.Task):
    def evaluate(self, apply, batch):
        raise UserError(REASON)
