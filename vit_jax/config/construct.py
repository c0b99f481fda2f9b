"""Other names of what is in `objects` and `schema`."""

from vit_jax.config.objects import make_evaluator, model_and_task
from vit_jax.config.schema import evaluator_class, model_class, task_class

__all__ = ['evaluator_class', 'make_evaluator', 'model_and_task', 'model_class', 'task_class']
