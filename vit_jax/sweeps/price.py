"""The cost of a sweep before any of its runs starts."""

from __future__ import annotations

from collections.abc import Callable

from ml_collections import ConfigDict

from vit_jax.config import load as config_lib
from vit_jax.inference import fine_tune
from vit_jax.profiling.cost import PlannedRun, price
from vit_jax.sweeps import space

Price = Callable[[space.Point, int], PlannedRun]  # (point, number of runs) -> cost


def planned_runs(
    sweep: space.Sweep, examples: float | None = None, image_size: int | None = None
) -> list[PlannedRun]:
    """An entry for every point, and one for all points of a search, at their highest cost.

    Args:
      sweep: the planned runs.
      examples, image_size: see `cost.price`.

    Raises:
      UserError: for a mistake in a config, or as `cost.price`.
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
    return fine_tune.complete(config_lib.load(sweep.config, changes)).config


def dearest(sweep: space.Sweep, price_of: Price) -> space.Point:
    """The most expensive point of a search: in each dimension the end that costs most."""
    center, *others = space.corners(sweep)
    cost = price_of(center, 1).flops
    best = {name: (cost, value) for name, value in center.items()}
    for point in others:
        for name in center:
            if point[name] != center[name]:
                best[name] = max(best[name], (price_of(point, 1).flops, point[name]))
    return {name: value for name, (_, value) in best.items()}
