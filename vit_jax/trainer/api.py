"""Training from Python, as the command `train` does it."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from ml_collections import ConfigDict

from vit_jax.config import load
from vit_jax.trainer import train as trainer


def train(
    config: str | ConfigDict,
    workdir: str | os.PathLike[str],
    overrides: Sequence[str] = (),
    **options: Any,
) -> dict[str, float]:
    """Trains to the end; called again, it resumes.

    Args:
      config: `FILE[:ARG]`, which is executed, or a config.
      workdir: the run folder; made if missing.
      overrides: such as 'optim.lr=3e-4'.
      **options: further keywords of `vit_jax.trainer.train.train`, such as `stop_at`.

    Returns:
      The final evaluation, {name: value}.

    Raises:
      UserError: for a mistake in the config, or as `vit_jax.trainer.train.train`.
    """
    if isinstance(config, str):
        checked = load.load(config, overrides)
    else:
        checked = load.override(config, overrides)
    return trainer.train(checked, os.fspath(workdir), **options)
