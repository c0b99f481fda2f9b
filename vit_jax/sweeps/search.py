"""Searches and pruners by name. None of them unpickles, as a study may come from anybody."""

from __future__ import annotations

import importlib.util
from typing import Any

import optuna

from vit_jax import extras
from vit_jax.errors import UserError
from vit_jax.sweeps import asha


def make_sampler(
    search: str, seed: int, storage: optuna.storages.BaseStorage
) -> optuna.samplers.BaseSampler:
    """The sampler of that name, for studies in `storage`.

    Raises:
      UserError: if a package that it needs is missing.
    """
    if search == 'random':
        return optuna.samplers.RandomSampler(seed=seed)
    if search == 'tpe':
        return optuna.samplers.TPESampler(seed=seed, constant_liar=True)
    require_package(search)
    from vit_jax.sweeps import cma_es

    return cma_es.Sampler(seed, storage)


def require_package(search: str) -> None:
    """Raise UserError if a package that the search needs is missing."""
    if search == 'cmaes' and importlib.util.find_spec('cmaes') is None:
        raise extras.missing("the search 'cmaes'", 'sweep', 'cmaes')


def make_pruner(name: str, options: Any) -> optuna.pruners.BasePruner:
    """Optuna's pruner of that name; none for ASHA, which pauses trials instead.

    Raises:
      UserError: if it does not take these options.
    """
    classes: dict[str, Any] = {
        'none': optuna.pruners.NopPruner,
        asha.NAME: asha.Asha,
        'median': optuna.pruners.MedianPruner,
        'hyperband': optuna.pruners.HyperbandPruner,
    }
    try:
        made = classes[name](**options)
    except (TypeError, ValueError) as e:
        raise UserError(f'sweep: pruner_options of {name!r}: {e}') from e
    return optuna.pruners.NopPruner() if name == asha.NAME else made
