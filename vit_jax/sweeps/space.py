"""Contents of a sweep file, and the cost of its runs before any starts.

The file defines `get_sweep(...) -> Sweep | Family` (see `config.recipes`). Dimensions are named by
config keys, as on the command line: `optim.lr`.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

from ml_collections import ConfigDict

from vit_jax.config.load import load as load_config
from vit_jax.config.recipes import run_file
from vit_jax.errors import UserError, nearest
from vit_jax.inference import fine_tune
from vit_jax.profiling.cost import PlannedRun, price

Point = dict[str, Any]
SEARCHES = ('tpe', 'cmaes', 'random')
PRUNERS = ('none', 'median', 'hyperband', 'asha')
DIRECTIONS = ('minimize', 'maximize')


@dataclasses.dataclass(frozen=True)
class Choice:
    """Choice among values.

    Attributes:
      values: Numbers, strings or bools; a bool next to an equal number becomes text, since storages
        cannot distinguish 0 from False, or 1 from True.
    """

    values: tuple[Any, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, 'values', tuple(distinct(self.values)))


@dataclasses.dataclass(frozen=True)
class Range:
    """A number from `low` to `high`, both included; an integer if both are.

    Attributes:
      low, high: Bounds.
      log: Whether to search on a logarithmic scale.
    """

    low: float
    high: float
    log: bool = False


Dimension = Choice | Range


@runtime_checkable
class Family(Protocol):
    """An object that makes a sweep, such as `sweeps.isoflop.Isoflop`; `get_sweep` may return it."""

    def sweep(self) -> Sweep:
        """Compute the points of the sweep."""
        ...


@dataclasses.dataclass(frozen=True)
class Sweep:
    """A base config, the trials that vary it, and their search and metric.

    Attributes:
      config: Base config, in the form of `--config`: FILE[:ARG].
      metric: Metric of the final evaluation, such as `test/accuracy`.
      direction: `maximize` or `minimize` it.
      points: Points to run exactly once, all with the same dimensions; see `grid`, `star`.
      space: Choices of a search, by dimension.
      trials: Number of runs of a search, including points.
      search: `tpe`, `cmaes` or `random`.
      pruner: `none`, `median`, `hyperband` or `asha`, fed by the evaluations of the runs.
      pruner_options: Keywords of Optuna's pruner, or of `vit_jax.sweeps.asha.Asha`; steps in them
        are the trainer's steps.
      overrides: Changes to the base config for every run, by dimension.
      seed: Seed of the search.
      retries: Consecutive restarts of a trial whose worker died without saving anything new; then
        it fails.
    """

    config: str
    metric: str
    direction: str = 'maximize'
    points: Sequence[Point] = ()
    space: Mapping[str, Dimension] = dataclasses.field(default_factory=dict)
    trials: int = 0
    search: str = 'tpe'
    pruner: str = 'none'
    pruner_options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    overrides: Point = dataclasses.field(default_factory=dict)
    seed: int = 0
    retries: int = 3

    def __post_init__(self) -> None:
        for name, value, valid in (
            ('direction', self.direction, DIRECTIONS),
            ('search', self.search, SEARCHES),
            ('pruner', self.pruner, PRUNERS),
        ):
            if value not in valid:
                raise UserError('sweep: ' + nearest(name, value, valid))
        if not self.points and not (self.space and self.trials > 0):
            raise UserError('sweep: give points, or a space and a number of trials')
        if self.trials and not self.space:
            raise UserError('sweep: trials are for a search, which needs a space')
        if self.trials and self.trials < len(self.points):
            raise UserError(
                f'sweep: trials={self.trials} must be at least {len(self.points)}, the '
                'number of points'
            )
        object.__setattr__(self, 'points', _distinct_points(self.points, self.space))
        _check_points(self.points, self.space)
        for name, dimension in self.space.items():
            _check_dimension(name, dimension)
        ranges = [d for d in self.space.values() if isinstance(d, Range) and d.low < d.high]
        if self.trials and self.search == 'cmaes' and len(ranges) < 2:
            raise UserError("sweep: the search 'cmaes' needs at least two ranges: search by 'tpe'")

    def queue(self) -> list[Point]:
        """Return the fixed values of every trial in order; {} if the search chooses them."""
        return [*map(dict, self.points), *({} for _ in range(self.trials - len(self.points)))]

    def dimensions(self) -> dict[str, Dimension]:
        """Return the search space; without one, the values of the points."""
        if self.space:
            return dict(self.space)
        return {
            name: Choice(tuple(dict.fromkeys(point[name] for point in self.points)))
            for name in self.points[0]
        }


def distinct(values: Sequence[Any], choices: Sequence[Any] = ()) -> list[Any]:
    """Convert bools to text if they equal a number in `values` or `choices`."""
    numbers = [v for v in (*values, *choices) if not isinstance(v, bool | str)]
    texts = [v for v in choices if isinstance(v, str)]
    return [
        str(v) if isinstance(v, bool) and (v in numbers or str(v) in texts) else v for v in values
    ]


def _distinct_points(points: Sequence[Point], space: Mapping[str, Dimension]) -> list[Point]:
    """Convert bools of the points to text like `Choice`."""
    changed = [dict(point) for point in points]
    for name in changed[0] if changed else ():
        rows = [point for point in changed if name in point]
        dimension = space.get(name)
        choices = dimension.values if isinstance(dimension, Choice) else ()
        for point, value in zip(rows, distinct([p[name] for p in rows], choices), strict=True):
            point[name] = value
    return changed


def _check_points(points: Sequence[Point], space: Mapping[str, Dimension]) -> None:
    names = set(space) or set(points[0])
    for point in points:
        if set(point) != names:
            raise UserError(f'sweep: the point {point} must have the dimensions {sorted(names)}')
        if not all(isinstance(value, (int, float, str)) for value in point.values()):
            raise UserError(f'sweep: the point {point} has values other than numbers and strings')
        for name, dimension in space.items():
            if not contains(dimension, point[name]):
                raise UserError(
                    f'sweep: a point has {name}={point[name]}, which is outside its range'
                )


def _check_dimension(name: str, dimension: Dimension) -> None:
    if isinstance(dimension, Choice):
        if not dimension.values:
            raise UserError(f'sweep: {name} has no values')
        return
    positive = dimension.low > 0 or not dimension.log
    if not (dimension.low <= dimension.high and math.isfinite(dimension.high) and positive):
        rule = 'must be positive and in order' if dimension.log else 'must be in order'
        raise UserError(f'sweep: {name}: the bounds {dimension.low}, {dimension.high} {rule}')


def contains(dimension: Dimension, value: Any) -> bool:
    """Return whether the dimension contains the value."""
    if isinstance(dimension, Choice):
        return value in dimension.values
    return not isinstance(value, str) and dimension.low <= value <= dimension.high


def choice(*values: Any) -> Choice:
    """Make a choice among these values."""
    return Choice(values)


def uniform(low: float, high: float) -> Range:
    """Make a range of real numbers, or of integers if both bounds are."""
    return Range(low, high)


def log_uniform(low: float, high: float) -> Range:
    """Make a range of positive numbers on a logarithmic scale; of integers if both bounds are."""
    return Range(low, high, log=True)


def grid(values: Mapping[str, Iterable[Any]]) -> list[Point]:
    """Combine the values of all dimensions; the last dimension varies fastest."""
    return [
        dict(zip(values, combination, strict=True))
        for combination in itertools.product(*values.values())
    ]


def star(center: Point, rays: Mapping[str, Iterable[Any]]) -> list[Point]:
    """Make the center, and points that differ from it in only one dimension.

    Varies shapes to find one exponent per dimension ("Getting ViT in Shape: Scaling Laws for
    Compute-Optimal Model Design", section 3.2): the number of runs is the sum of the rays' lengths
    instead of their product.

    Args:
      center: Value of every dimension.
      rays: Further values of dimensions; the center's value is skipped.

    Raises:
      UserError: if the center has no value for a ray's dimension.
    """
    for name in rays:
        if name not in center:
            raise UserError('sweep: ' + nearest('dimension of the center', name, center))
    return [
        dict(center),
        *(
            {**center, name: value}
            for name, values in rays.items()
            for value in values
            if value != center[name] or isinstance(value, bool) != isinstance(center[name], bool)
        ),
    ]


def load_sweep(spec: str, command: str = 'sweep create') -> Sweep:
    """Load the sweep of `FILE[:arg]`, which is executed; errors name `command`.

    Raises:
      UserError: if there is no such file, or it does not return a sweep.
    """
    study = load_study(spec, command)
    return study if isinstance(study, Sweep) else study.sweep()


def load_study(spec: str, command: str) -> Sweep | Family:
    """Run `FILE[:arg]` and return its study; raise UserError like `load_sweep`."""
    study = run_file(spec, 'get_sweep', command)
    if not isinstance(study, (Sweep, Family)):
        raise UserError(f'{command}: get_sweep of {spec!r} must return a Sweep')
    return study


def overrides(point: Mapping[str, Any]) -> list[str]:
    """Format the point as overrides of a config: `optim.lr=0.001`."""
    return [f'{name}={value}' for name, value in point.items()]


def corners(sweep: Sweep) -> list[Point]:
    """List points that together have all extreme values, to check the config."""
    if sweep.points and not sweep.trials:
        return [dict(point) for point in sweep.points]
    ends = {name: _ends(dimension) for name, dimension in sweep.space.items()}
    return star({name: values[0] for name, values in ends.items()}, ends)


def _ends(dimension: Dimension) -> tuple[Any, ...]:
    return dimension.values if isinstance(dimension, Choice) else (dimension.low, dimension.high)


def to_json(sweep: Sweep) -> dict[str, Any]:
    """Convert the sweep to JSON values."""
    return dataclasses.asdict(sweep)


def from_json(stored: Mapping[str, Any]) -> Sweep:
    """Read a sweep stored by `to_json`."""
    space = {name: _dimension(fields) for name, fields in stored['space'].items()}
    return Sweep(**{**stored, 'space': space})


def _dimension(fields: Mapping[str, Any]) -> Dimension:
    return Choice(tuple(fields['values'])) if 'values' in fields else Range(**fields)


def planned_runs(
    sweep: Sweep, examples: float | None = None, image_size: int | None = None
) -> list[PlannedRun]:
    """Compute the cost of every point, and of a search at its most expensive point.

    Args:
      sweep: Planned runs.
      examples, image_size: Arguments of `cost.price`.

    Raises:
      UserError: for a mistake in a config, or see `cost.price`.
    """

    def plan(point: Point, count: int = 1) -> PlannedRun:
        return price(config_of(sweep, point), examples, image_size, point=point, count=count)

    runs = [plan(point) for point in sweep.points]
    if searched := len(sweep.queue()) - len(sweep.points):
        most = _most_expensive(corners(sweep), lambda point: plan(point).flops)
        runs.append(plan(most, searched))
    return runs


def config_of(sweep: Sweep, point: Point) -> ConfigDict:
    """Make the config of a point."""
    changes = [*overrides(sweep.overrides), *overrides(point)]
    return fine_tune.complete_config(load_config(sweep.config, changes)).config


def _most_expensive(points: Sequence[Point], flops: Callable[[Point], float]) -> Point:
    """Combine the most expensive value of each dimension, varied around the first point."""
    center, *other_points = points
    cost = flops(center)
    best = {name: (cost, value) for name, value in center.items()}
    for point in other_points:
        for name in center:
            if point[name] != center[name]:
                best[name] = max(best[name], (flops(point), point[name]))
    return {name: value for name, (_, value) in best.items()}
