"""Searches and pruners of a sweep, by name.

CMA-ES is implemented here because Optuna's sampler stores pickles, through which anyone with access
to the storage could run code.
"""

from __future__ import annotations

import collections
import importlib.util
import math
from collections.abc import Mapping
from typing import Any

import cmaes
import numpy as np
import optuna
from optuna.distributions import BaseDistribution, FloatDistribution, IntDistribution
from optuna.search_space import intersection_search_space
from optuna.storages import BaseStorage
from optuna.trial import FrozenTrial, TrialState

from vit_jax import extras
from vit_jax.errors import UserError
from vit_jax.sweeps import asha

GENERATION = 'cma:generation'  # attribute of a trial: the generation that it was drawn in
Ranges = Mapping[str, FloatDistribution | IntDistribution]


def make_sampler(search: str, seed: int, storage: BaseStorage) -> optuna.samplers.BaseSampler:
    """Make the sampler of a search, for studies in `storage`.

    Raises:
      UserError: if a package that it needs is missing.
    """
    if search == 'random':
        return optuna.samplers.RandomSampler(seed=seed)
    if search == 'tpe':
        return optuna.samplers.TPESampler(seed=seed, constant_liar=True)
    require_package(search)
    return CmaEs(seed, storage)


def require_package(search: str) -> None:
    """Raise UserError if a package that the search needs is missing."""
    if search == 'cmaes' and importlib.util.find_spec('cmaes') is None:
        raise extras.missing_error("the search 'cmaes'", 'sweep', 'cmaes')


def make_pruner(name: str, options: Any) -> optuna.pruners.BasePruner:
    """Make Optuna's pruner by name; for ASHA, which pauses trials, one that never prunes.

    Raises:
      UserError: if it does not accept these options.
    """
    classes: dict[str, Any] = {
        'none': optuna.pruners.NopPruner,
        asha.NAME: asha.Asha,
        'median': optuna.pruners.MedianPruner,
        'hyperband': optuna.pruners.HyperbandPruner,
    }
    try:
        pruner = classes[name](**options)
    except (TypeError, ValueError) as e:
        raise UserError(f'sweep: pruner_options of {name!r}: {e}') from e
    return optuna.pruners.NopPruner() if name == asha.NAME else pruner


class CmaEs(optuna.samplers.BaseSampler):
    """Optuna's interface to CMA-ES over the ranges that all complete trials share.

    Other dimensions, and the first trial, are drawn at random. A sample is a function of the
    seed, the number of its trial, and the complete trials.
    """

    def __init__(self, seed: int, storage: BaseStorage):
        self._seed, self._storage = seed, storage
        self._random = optuna.samplers.RandomSampler(seed=seed)

    def infer_relative_search_space(
        self, study: optuna.Study, trial: FrozenTrial
    ) -> dict[str, BaseDistribution]:
        shared = intersection_search_space(study.get_trials(deepcopy=False))
        ranges: dict[str, BaseDistribution] = {
            name: distribution
            for name, distribution in shared.items()
            if isinstance(distribution, FloatDistribution | IntDistribution)
            and not distribution.single()
        }
        return ranges if len(ranges) > 1 else {}

    def sample_relative(
        self, study: optuna.Study, trial: FrozenTrial, search_space: dict[str, Any]
    ) -> dict[str, Any]:
        if not search_space:
            return {}
        optimizer = replay(study, search_space, self._seed + trial.number)
        self._record(study.study_name, trial.number, optimizer.generation)
        units = optimizer.ask()
        return {
            name: from_unit(distribution, unit)
            for (name, distribution), unit in zip(search_space.items(), units, strict=True)
        }

    def _record(self, study: str, trial: int, generation: int) -> None:
        study_id = self._storage.get_study_id_from_name(study)
        trial_id = self._storage.get_trial_id_from_study_id_trial_number(study_id, trial)
        self._storage.set_trial_system_attr(trial_id, GENERATION, generation)

    def sample_independent(
        self,
        study: optuna.Study,
        trial: FrozenTrial,
        param_name: str,
        param_distribution: BaseDistribution,
    ) -> Any:
        return self._random.sample_independent(study, trial, param_name, param_distribution)


def replay(study: optuna.Study, ranges: Ranges, seed: int) -> cmaes.CMA:
    """Make CMA-ES in the unit cube, after all complete generations.

    Args:
      study: Study whose trials are replayed in the order of their numbers.
      ranges: Ranges of the dimensions.
      seed: Seed of the next samples.
    """
    size = len(ranges)
    optimizer = cmaes.CMA(
        mean=np.full(size, 0.5),
        sigma=1 / 6,
        bounds=np.tile([0.0, 1.0], (size, 1)),
        seed=seed,
        n_max_resampling=10 * size,
    )
    sign = 1 if study.direction == optuna.study.StudyDirection.MINIMIZE else -1
    generations = collections.defaultdict(list)
    for trial in study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,)):
        if isinstance(generation := trial.system_attrs.get(GENERATION), int):
            units = np.array([to_unit(d, trial.params[name]) for name, d in ranges.items()])
            generations[generation].append((units, sign * trial.values[0]))
    count = optimizer.population_size
    while len(results := generations[optimizer.generation]) >= count:
        optimizer.tell(results[:count])
    return optimizer


def to_unit(distribution: FloatDistribution | IntDistribution, value: float) -> float:
    """Map a value of the range to [0, 1]."""
    low, high = _edges(distribution)
    clipped = min(max(value, distribution.low), distribution.high)
    return ((math.log(clipped) if distribution.log else clipped) - low) / (high - low)


def from_unit(distribution: FloatDistribution | IntDistribution, unit: float) -> float:
    """Invert `to_unit`; return an integer for a range of integers."""
    low, high = _edges(distribution)
    position = low + float(unit) * (high - low)
    value = math.exp(position) if distribution.log else position
    if isinstance(distribution, IntDistribution):
        value = round(value)
    return min(max(value, distribution.low), distribution.high)


def _edges(distribution: FloatDistribution | IntDistribution) -> tuple[float, float]:
    """Return the ends of a range; half a step wider for integers, so all are equally likely."""
    margin = 0.5 if isinstance(distribution, IntDistribution) else 0.0
    low, high = distribution.low - margin, distribution.high + margin
    return (math.log(low), math.log(high)) if distribution.log else (low, high)
