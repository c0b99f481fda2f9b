"""An adaptor of a student of several teachers (the task `agglomerate`) as the model of a run."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np

from vit_jax.errors import UserError
from vit_jax.interop import files
from vit_jax.interop.trained import TrainedModel
from vit_jax.storage import run_folder
from vit_jax.tasks.agglomerate import standardization, statistics_key
from vit_jax.tree_paths import weights_digest


def choose(run: TrainedModel, name: str, meta: Mapping[str, Any]) -> TrainedModel:
    """Return the model with the features of one adaptor, in the teacher's own space.

    The inverse of PHI-S becomes a part of the adaptor's last layer.

    Args:
      run: Run as it was read.
      name: Name of the adaptor.
      meta: Metadata of the run's checkpoint.

    Raises:
      UserError: if there is no such adaptor, or its statistics are missing or differ.
    """
    names = getattr(run.task, 'adaptors', ())
    if name not in names:
        listed = ', '.join(names) or 'none, as only the task agglomerate trains some'
        raise UserError(f'{run.path}: no adaptor {name!r}; its adaptors: {listed}')
    chosen = names.index(name)
    params = {
        key: value
        for key, value in run.params.items()
        if not key.startswith('adaptor_') or key.endswith(f'_{chosen}')
    }
    key, patches = statistics_key(chosen), f'adaptor_patches_{chosen}'
    if patches in params and key in run.task.frozen:
        adaptor = params[patches]
        last = _unstandardize(adaptor['fc2'], _read_statistics(run, key, meta))
        params[patches] = {**adaptor, 'fc2': last}
    widths = {
        field: tuple(w if i == chosen else 0 for i, w in enumerate(getattr(run.model, field)))
        for field in ('summary_widths', 'patch_widths')
    }
    model = {**run.model_config, **widths, 'adaptor': chosen}
    return dataclasses.replace(run.with_groups(model=model), params=params)


def _read_statistics(run: TrainedModel, key: str, meta: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """Read the statistics from the run folder, or from the file in its config if it has none."""
    copy = run.path / run_folder.kept_file(key)
    file = str(copy) if copy.is_file() else run.task.frozen[key]
    arrays, _ = files.read_arrays(file)
    if weights_digest({'params': arrays})[:32] != meta['frozen'].get(key):
        raise UserError(
            f'{file}: not the statistics that {run.path} was trained with (config.task.{key}): '
            'restore the file'
        )
    return arrays


def _unstandardize(
    layer: Mapping[str, np.ndarray], statistics: Mapping[str, np.ndarray]
) -> dict[str, np.ndarray]:
    """Return a dense layer with the outputs of `layer`, no longer standardized."""
    module = standardization(statistics).module

    def invert(y: Any) -> np.ndarray:
        return np.asarray(module.apply({'params': statistics}, jnp.asarray(y), method='invert'))

    return {'kernel': invert(layer['kernel']) - statistics['mean'], 'bias': invert(layer['bias'])}
