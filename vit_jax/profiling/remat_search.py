"""Search of what blocks recompute in the backward pass, together with the batch size.

Recomputing more makes room for a larger batch, whose examples may take less time each.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from ml_collections import ConfigDict

from vit_jax.config import schema
from vit_jax.config.load import to_run
from vit_jax.errors import UserError
from vit_jax.profiling import preflight
from vit_jax.profiling.preflight import Report, RunEstimate
from vit_jax.profiling.topology import Topology

NONE = 'model.remat=False'
Trial = tuple[ConfigDict, tuple[list[Report], RunEstimate]]


def try_remat(
    config: ConfigDict, topology: Topology, *, largest: bool, **options: Any
) -> Iterator[tuple[str, Trial]]:
    """Yield each override of `model.remat`, from no recomputation to the most, with its preflight.

    Args:
      config, topology, options: See `preflight.preflight`.
      largest: Whether to take the largest batch that fits instead of the config's; policies with
        which not even one example fits are left out.

    Raises:
      UserError: if the model has no `remat`.
    """
    if 'remat' not in schema.parameters(config, 'model'):
        raise UserError('--remat fit: this model has no config.model.remat')
    config = preflight.with_override(config, NONE)
    for override in (NONE, *preflight.remat_overrides(config)):
        changed = preflight.with_override(config, override)
        if not largest:
            yield override, (changed, preflight.preflight(changed, topology, **options))
            continue
        try:
            trial = preflight.largest_batch(changed, topology, **options)
        except preflight.NothingFits:
            continue
        config = preflight.with_override(config, f'batch_size={to_run(trial[0]).batch_size}')
        yield override, trial


def choose_remat(trials: Mapping[str, Trial]) -> str:
    """Choose the override with the most examples per second.

    Raises:
      UserError: if the step fits with none.
    """
    rates = {
        override: run.rows / run.seconds
        for override, (_, (reports, run)) in trials.items()
        if all(report.fits for report in reports) and run.seconds
    }
    if not rates:
        raise UserError('--remat fit: the step does not fit, whatever is recomputed')
    return max(rates, key=lambda override: rates[override])
