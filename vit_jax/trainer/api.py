"""Training and evaluation from Python, as the commands `train` and `evaluate` do them."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from ml_collections import ConfigDict

from vit_jax.checkpoints.averages import Average
from vit_jax.config import load
from vit_jax.inference.load import Path, open_model
from vit_jax.interop.trained import Size
from vit_jax.runtime import compile_cache, environment
from vit_jax.storage.model_ref import Step
from vit_jax.trainer import measure
from vit_jax.trainer import train as trainer


def train(
    config: str | ConfigDict,
    workdir: str | os.PathLike[str],
    overrides: Sequence[str] = (),
    **options: Any,
) -> dict[str, float]:
    """Train to the end; a second call resumes.

    Args:
      config: `FILE[:ARG]`, which is executed, or a config.
      workdir: The run folder; made if missing.
      overrides: Such as 'optim.lr=3e-4'.
      **options: Further keywords of `vit_jax.trainer.train.train`, such as `stop_at`.

    Returns:
      The final evaluation, {name: value}.

    Raises:
      UserError: for a mistake in the config, or as `vit_jax.trainer.train.train`.
    """
    environment.keep_freed_memory_from_now()
    compile_cache.enable_for_python()
    if isinstance(config, str):
        checked = load.load(config, overrides)
    else:
        checked = load.override(config, overrides)
    return trainer.train(checked, os.fspath(workdir), **options)


def evaluate(
    path: Path,
    *,
    step: Step = None,
    average: Average = 1,
    adaptor: str = '',
    image_size: Size | None = None,
    allowed: Sequence[str] = (),
    **choices: Any,
) -> dict[str, float]:
    """Evaluate a model exactly: every example counts once.

    Args:
      path: A run folder, or a checkpoint as for `vit_jax.load`; one of another code base needs
        `source` and `split`.
      step, average, adaptor: Of a run, see `vit_jax.inference.load.read`.
      image_size: Crop and resize to this height and width instead of the model's own.
      allowed: Modules of your own that the config of a run may name.
      **choices: Further keywords of `vit_jax.trainer.measure.prepare`, such as `split='train'` or
        `evaluators=['knn(k=5)']`.

    Returns:
      {'EVALUATION/METRIC': value}.

    Raises:
      UserError: if the model cannot be read, or does not suit the data.
    """
    environment.keep_freed_memory_from_now()
    compile_cache.enable_for_python()
    chosen: dict[str, Any] = {'step': step, 'average': average, 'adaptor': adaptor}
    trained = open_model(path, image_size, allowed=allowed, **chosen)
    prepared = measure.prepare(trained, image_size=image_size, allowed=allowed, **choices)
    return prepared.run()
