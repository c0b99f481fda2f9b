"""The runs of a sweep, priced before any of them runs."""

from __future__ import annotations

from collections.abc import Callable

from ml_collections import ConfigDict

from vit_jax.config import load as config_lib
from vit_jax.profiling.cost import price
from vit_jax.profiling.plan import PlannedRun
from vit_jax.sweeps import space

Price = Callable[[space.Point, int], PlannedRun]  # of a point, and how many runs


def planned_runs(
    sweep: space.Sweep, examples: float | None = None, image_size: int | None = None
) -> list[PlannedRun]:
    """A line for every point, and one for all those that a search chooses, at their dearest.

    Args:
      sweep: what is to be run.
      examples, image_size: see `cost.price`.

    Raises:
      UserError: a mistake in a config, or as `cost.price`.
    """

    def price_of(point: space.Point, count: int = 1) -> PlannedRun:
        return price(config_of(sweep, point), examples, image_size, point=point, count=count)

    runs = [price_of(point, 1) for point in sweep.points]
    if chosen := len(sweep.queue()) - len(sweep.points):
        runs.append(price_of(dearest(sweep, price_of), chosen))
    return runs


def config_of(sweep: space.Sweep, point: space.Point) -> ConfigDict:
    """The config of a point."""
    changes = [*space.overrides(sweep.overrides), *space.overrides(point)]
    return config_lib.load(sweep.config, changes)


def dearest(sweep: space.Sweep, price_of: Price) -> space.Point:
    """Of what a search may choose, in each dimension the end that costs most."""
    centre, *others = space.corners(sweep)
    cost = price_of(centre, 1).flops
    best = {name: (cost, value) for name, value in centre.items()}
    for point in others:
        for name in centre:
            if point[name] != centre[name]:
                best[name] = max(best[name], (price_of(point, 1).flops, point[name]))
    return {name: value for name, (_, value) in best.items()}
