"""Coordinate check: change of each layer's output in a few steps, by width.

Yang et al., 2022, arXiv:2203.03466, appendix D.1. In a parametrization whose hyperparameters
transfer, the changes keep their size as the model widens. If they grow, wide models diverge at the
learning rate of narrow ones.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from flax import traverse_util
from ml_collections import ConfigDict

from vit_jax.config import load, objects
from vit_jax.config.run import STANDARD
from vit_jax.errors import UserError
from vit_jax.optim import mup
from vit_jax.runtime import mesh
from vit_jax.signatures import parameters
from vit_jax.trainer import build
from vit_jax.tree_paths import unroll
from vit_jax.viz.charts import Change

_BLOCK = re.compile(r'(block_\d+|blocks)/__call__$')


def check_coordinates(
    config: ConfigDict,
    multiples: Sequence[int],
    steps: int,
    seeds: int = 1,
    report: Callable[[], None] = lambda: None,
) -> list[Change]:
    """Train for a few steps at each width, in both parametrizations.

    Args:
      config: Config to check; `optim.parametrization` names the widths of the base model.
      multiples: Multiples of these widths to train at.
      steps: Number of steps at the config's constant learning rate.
      seeds: Number of initializations, and orders of the examples, to average over.
      report: Function called after each training.

    Raises:
      UserError: if the parametrization is the standard one, or a model cannot be built.
    """
    run = load.to_run(config)
    text = run.optim.parametrization
    if text == STANDARD:
        raise UserError(
            'config.optim.parametrization: name the widths of the base model, such as '
            "'mup(width=64, mlp_dim=256, num_heads=1)'"
        )
    base = mup.base_fields(text, parameters(objects.model_class(str(run.model.name))))
    rows = []
    for name, parametrized in (('standard', STANDARD), ('mup', text)):
        for times in multiples:
            widths = {key: value * times for key, value in base.items()}
            sums: dict[str, float] = {}
            for seed in range(seeds):
                changes = _changes(_short(config, widths, parametrized, steps, seed), steps)
                sums = {layer: sums.get(layer, 0) + rms for layer, rms in changes.items()}
                report()
            rows += [Change(name, times, layer, rms / seeds) for layer, rms in sums.items()]
    return rows


def _short(
    config: ConfigDict, widths: Mapping[str, int], text: str, steps: int, seed: int
) -> ConfigDict:
    """Make the config of a few steps at a constant rate, with these widths."""
    config = copy.deepcopy(config)
    with config.unlocked(), config.ignore_type():
        config.model.update(widths)
        config.optim.update(parametrization=text, schedule={'name': 'constant'})
        config.update(total=f'{steps} steps', seed=config.seed + seed, evals={})
    return load.override(config, ())


def _changes(config: ConfigDict, steps: int) -> dict[str, float]:
    """Compute the RMS of the changes by all steps, on the first batch, by layer."""
    training = build.build(config, mesh.usable_devices())
    program, batches = training.program, training.data.train_batches()
    state = program.layout.create(program.init)
    first_batch = next(batches)

    @jax.jit
    def outputs(params: Any, batch: Any) -> dict[str, jax.Array]:
        variables = {'params': params, **state.collections}
        result, intermediates = program.model.apply(
            variables,
            *program.task.inputs(batch),
            capture_intermediates=True,
            mutable=['intermediates'],
        )
        block_outputs = traverse_util.flatten_dict(intermediates['intermediates'], sep='/')
        blocks = unroll({k: v[0] for k, v in block_outputs.items() if _BLOCK.search(k)})
        return {k.removesuffix('/__call__'): v for k, v in blocks.items()} | result

    outputs_before = outputs(state.params, first_batch)
    batch = first_batch
    for _ in range(steps):
        state, _ = program.train_step(state, program.layout.put_batch(batch))
        batch = next(batches, first_batch)
    outputs_after = outputs(state.params, first_batch)
    return {
        layer: float(np.sqrt(np.mean(np.square(np.asarray(x, np.float64) - outputs_before[layer]))))
        for layer, x in outputs_after.items()
    }
