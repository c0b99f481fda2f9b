"""What the task of a run predicts for single examples."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import jax
import numpy as np

from vit_jax import step
from vit_jax.errors import UserError
from vit_jax.inference.load import Run

Example = Mapping[str, np.ndarray]  # the arrays of one example


def predictor(run: Run, seed: int = 0) -> Callable[[Example, int], dict[str, np.ndarray]]:
    """A compiled function (example, its number) -> {name: array} of this example.

    What a task draws at random is a function of the seed and the number.

    Raises:
      UserError: if the task of the run predicts nothing.
    """
    if not run.task.predicts:
        raise UserError(f'task {run.config.task.name!r} has no predictions')
    compiled = jax.jit(step.make_predict_step(run.model, run.task, seed=seed))

    def predict(example: Example, index: int) -> dict[str, np.ndarray]:
        predictions, _ = compiled(run.variables, batch_of_one(example, index))
        return {name: np.asarray(value[0]) for name, value in predictions.items()}

    return predict


def batch_of_one(example: Example, index: int = 0) -> dict[str, np.ndarray]:
    """The batch that holds this example alone."""
    batch = {name: np.asarray(value)[None] for name, value in example.items()}
    return {**batch, 'index': np.array([index], np.int32), 'mask': np.ones(1, np.float32)}
