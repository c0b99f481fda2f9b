"""LoRA runs (`config.lora`): the checkpoint that adapters change, and the merged model."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import traverse_util

from vit_jax.config.load import from_dict, section
from vit_jax.config.run import Init, Lora
from vit_jax.errors import UserError
from vit_jax.interop import adapt
from vit_jax.interop.trained import Size, TrainedModel
from vit_jax.optim import lora
from vit_jax.step import init_variables
from vit_jax.tree_paths import param_paths, weights_digest

PyTree = Any
BASE = 'init.from'  # the name of the adapted checkpoint among a run's digests


def read_base(
    imported: TrainedModel,
    init: Init,
    adapters: lora.Adapters,
    program: tuple[Any, Any],
    params: PyTree,
    image_size: Size | None,
) -> PyTree:
    """Read from the checkpoint the parameters that a run's adapters leave unchanged.

    Args:
      imported: The checkpoint of `config.init.from`.
      init: `config.init` of the run.
      adapters: Adapters of the run.
      program: Model and task of the config.
      params: Shapes of all parameters.
      image_size: Height and width of the run's images.

    Raises:
      UserError: if the checkpoint does not fit, or lacks some of them.
    """
    model, task = program
    target = adapters.without(params)
    try:
        adapted_params, _ = adapt.adapt_checkpoint(
            imported, model, target, image_size, init.posemb, init.select, None, task
        )
    except UserError as error:
        raise UserError(f'config.init.from={init.checkpoint}: {error}') from error
    base = adapters.split(adapted_params)[1]
    if missing := sorted(adapters.held - param_paths(base).keys()):
        raise UserError(
            f'config.init.from={init.checkpoint}: lacks {missing[0]}, which would keep its random '
            'initial values: name it in config.lora.train'
        )
    return base


def base_digest(base: PyTree) -> str:
    """Return the digest of base parameters that a run stores."""
    return weights_digest(base)[:32]


def overlay(base: PyTree, trained: PyTree) -> PyTree:
    """Merge two nested dicts of parameters; `trained` overrides `base`."""
    flat = [traverse_util.flatten_dict(dict(tree), sep='/') for tree in (base, trained)]
    return traverse_util.unflatten_dict({**flat[0], **flat[1]}, sep='/')


def merge_into_base(
    run: TrainedModel, imported: TrainedModel, meta: Mapping[str, Any]
) -> TrainedModel:
    """Merge a run's adapters into their kernels, and return the complete model.

    Args:
      run: Run with only the trained parameters.
      imported: The checkpoint of its `config.init.from`.
      meta: Metadata of the run's checkpoint.

    Raises:
      UserError: if they adapt another checkpoint.
    """
    init = section(run.config, Init)
    options = section(from_dict(dict(meta['config'])), Lora)

    def initial() -> PyTree:
        example = {name: jnp.zeros((1, *s.shape), s.dtype) for name, s in run.spec.items()}
        return init_variables(run.model, run.task, example, 0)['params']

    adapters, params = lora.make_adapters(options, run.model, jax.eval_shape(initial))
    program = (run.model, run.task)
    base = read_base(imported, init, adapters, program, params, run.image_size)
    key = f'config.init.from={init.checkpoint}'
    require_same(key, base_digest(base), meta['frozen'].get(BASE))
    merged = lora.merge_adapters(overlay(base, run.params), adapters.options.scale)
    plain = run.with_groups(lora={})
    return dataclasses.replace(plain, params=jax.tree.map(np.asarray, merged))


def require_same(key: str, digest: str, saved: str | None) -> None:
    """Raise UserError if the checkpoint of a config's `key` is not the one of a saved run."""
    if saved != digest:
        raise UserError(
            f'{key}: its weights differ from the saved run: restore the file, or choose another '
            '--workdir'
        )
