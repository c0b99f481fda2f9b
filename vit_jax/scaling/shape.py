"""Optimal shapes for a compute budget: the closed form of a star sweep.

Alabdulmohsin et al. 2023, "Getting ViT in Shape" (arXiv:2305.13035), section 3: the loss over one
dimension x of the shape and the compute t, with the other dimensions fixed at a large enough
center, is

    f(x, t) = alpha x^-a + (beta x^b + xi) t^-c + epsilon        (their equation 2)

with a minimum at x* = (alpha a t^c / (beta b))^(1 / (a + b)), which grows as t^s, s = c / (a + b).
All dimensions share the exponent c.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
from collections.abc import Callable, Mapping, Sequence

import numpy as np
from scipy import optimize
from threadpoolctl import threadpool_limits

from vit_jax.errors import UserError
from vit_jax.scaling import curve_fit
from vit_jax.scaling.rows import Row, is_unfinished, number, read_cell

BOUNDS = (0.02, 4.0)  # bounds of the exponents
LEAST = 8  # least number of runs of a ray; its law has 7 parameters
_GRID = (0.1, 0.3, 0.6, 1.0, 1.6)
_STARTS = 3  # number of starts that are refined
_ROUNDS = 200  # most evaluations of least squares
_NEGLIGIBLE = 1e-9  # share of y below which a term counts as missing
_FLAT = 1e-6


@dataclasses.dataclass(frozen=True)
class StarColumns:
    """Names of the columns.

    Attributes:
      shape: Dimensions, such as `config.model.width`.
      t: Compute of a run.
      y: Error or loss; `1-NAME` for one minus an accuracy.
      examples: Examples seen; None without such a column.

    Raises:
      UserError: `shape` is empty.
    """

    shape: tuple[str, ...]
    t: str
    y: str
    examples: str | None = None

    def __post_init__(self) -> None:
        if not self.shape:
            raise UserError('--shape is empty: name columns such as config.model.width')

    @property
    def flags(self) -> list[tuple[str, str]]:
        """Columns in which a row needs a value, and their flags."""
        return [*((name, '--shape') for name in self.shape), (self.t, '--t'), (self.y, '--y')]


@dataclasses.dataclass(frozen=True)
class Ray:
    """Runs that differ in one dimension.

    Attributes:
      x, t, y: Dimension, compute and loss [M] of each run.
    """

    x: np.ndarray
    t: np.ndarray
    y: np.ndarray


@dataclasses.dataclass(frozen=True)
class StarSweep:
    """Star sweep: runs that vary one dimension at a time around a center.

    Attributes:
      center: {dimension: value}.
      rays: {dimension: its runs, including the center's runs}.
      example: Power law of the compute of an example: {dimension: exponent}, and the log of its
        scale under ''; {} if unknown.
      notes: Warnings about the table.
    """

    center: dict[str, float]
    rays: dict[str, Ray]
    example: dict[str, float]
    notes: tuple[str, ...]

    def cost(self, shape: dict[str, float]) -> float | None:
        """Predict the compute of an example for a shape; None if unknown."""
        if not self.example:
            return None
        powers = sum(p * np.log(shape[name]) for name, p in self.example.items() if name)
        return float(np.exp(self.example[''] + powers))


@dataclasses.dataclass(frozen=True)
class ShapeLaw:
    """Law of one dimension, in the units of the table.

    Attributes:
      alpha, a, beta, b, xi, c, epsilon: Parameters of equation 2.
    """

    alpha: float
    a: float
    beta: float
    b: float
    xi: float
    c: float
    epsilon: float

    @property
    def s(self) -> float:
        """Exponent of the optimum over compute."""
        return self.c / (self.a + self.b)

    def value(self, x: np.ndarray, t: np.ndarray | float) -> np.ndarray:
        """Predict the loss [M] at x [M] and t, [M] or a number."""
        growing = self.beta * x**self.b + self.xi
        return self.alpha * x**-self.a + growing * t**-self.c + self.epsilon

    def best(self, t: float) -> float:
        """Find the optimal x for a budget: the minimum of equation 2."""
        ratio = self.alpha * self.a * t**self.c / (self.beta * self.b)
        return float(ratio ** (1 / (self.a + self.b)))


@dataclasses.dataclass(frozen=True)
class ShapeFit:
    """Laws of a star sweep.

    Attributes:
      laws: {dimension: its law}, for dimensions with an optimum.
      replicates: Laws of each bootstrap sample.
      dof: Degrees of freedom, runs minus parameters, at least 2.
      rmse: Root mean square error of the log of the loss.
      notes: Warnings, including one for each dimension without an optimum.
    """

    laws: dict[str, ShapeLaw]
    replicates: tuple[dict[str, ShapeLaw], ...]
    dof: int
    rmse: float
    notes: tuple[str, ...]

    def exponent(self, name: str) -> tuple[float, list[float]]:
        """Compute s of a dimension and its 90 % band; [] without a bootstrap."""
        samples = [law.s for law in self._laws_of(name)]
        return self._add_band(self.laws[name].s, samples)

    def best(self, name: str, t: float) -> tuple[float, list[float]]:
        """Find a dimension's optimum for a budget, and its 90 % band; [] without a bootstrap."""
        samples = [law.best(t) for law in self._laws_of(name)]
        return self._add_band(self.laws[name].best(t), samples)

    def scaled(self, start: Mapping[str, float], ratio: float) -> dict[str, float]:
        """Scale a shape that is optimal for some budget to `ratio` times the budget."""
        return {name: x * ratio ** self.laws[name].s for name, x in start.items()}

    def _laws_of(self, name: str) -> list[ShapeLaw]:
        return [laws[name] for laws in self.replicates if name in laws]

    def _add_band(self, value: float, samples: Sequence[float]) -> tuple[float, list[float]]:
        if not samples:
            return value, []
        factor = np.exp(curve_fit.half_width(np.std(np.log([samples]), axis=1), self.dof))[0]
        return value, [float(value / factor), float(value * factor)]


def read_star(rows: Sequence[Row], columns: StarColumns) -> StarSweep:
    """Read the star sweep of a table: most runs differ from its center in at most one dimension.

    Raises:
      UserError: A column is unknown, a cell is not a number, or a dimension has too few runs,
        sizes or budgets.
    """
    usable, notes = [], []
    for line, row in enumerate(rows, start=2):
        name = row.get('run') or f'line {line}'
        empty = [column for column, flag in columns.flags if not read_cell(row, column, flag)]
        values = [number((line, row), *flag) for flag in columns.flags] if not empty else []
        if is_unfinished(row):
            notes.append(f'{name}: left out, it is not finished')
        elif empty:
            notes.append(f'{name}: left out, it has no {empty[0].removeprefix("1-")}')
        elif not (np.isfinite(values).all() and min(values) > 0):
            index = int(np.argmin([np.isfinite(v) and v > 0 for v in values]))
            notes.append(f'{name}: left out, {columns.flags[index][0]} is {values[index]:g}')
        else:
            usable.append([*values, _examples(row, line, columns)])
    if not usable:
        raise UserError(f'no row can be fitted; {notes[0]}')
    table = np.array(usable)
    shapes = table[:, : len(columns.shape)]
    middle = _center(shapes)
    distance = (shapes != middle).sum(axis=1)
    if far_runs := int((distance > 1).sum()):
        notes.append(
            f'{far_runs} run(s) differ from the center in more than one dimension: left out'
        )
    table, shapes = table[distance < 2], shapes[distance < 2]
    rays = {}
    for i, name in enumerate(columns.shape):
        is_on_ray = np.delete(shapes == middle, i, axis=1).all(axis=1)
        rays[name] = Ray(shapes[is_on_ray, i], table[is_on_ray, -3], table[is_on_ray, -2])
        _require_enough(name, rays[name])
    center = dict(zip(columns.shape, map(float, middle), strict=True))
    example = _fit_example_cost(columns.shape, shapes, table[:, -3], table[:, -1])
    return StarSweep(center, rays, example, tuple(notes))


def _examples(row: Row, line: int, columns: StarColumns) -> float:
    if columns.examples is None or not read_cell(row, columns.examples, '--examples'):
        return np.nan
    return number((line, row), columns.examples, '--examples')


def _center(shapes: np.ndarray) -> np.ndarray:
    counts = collections.Counter(map(tuple, shapes))
    near = {shape: int(((shapes != shape).sum(axis=1) < 2).sum()) for shape in counts}
    return np.array(max(counts, key=lambda shape: (near[shape], counts[shape])))


def _require_enough(name: str, ray: Ray) -> None:
    for values, noun in ((ray.x, 'sizes'), (ray.t, 'budgets')):
        if (different := len(np.unique(values))) < 3:
            raise UserError(f'--shape {name}: {different} {noun} around the center; run at least 3')
    if len(ray.y) < LEAST:
        raise UserError(
            f'--shape {name}: {len(ray.y)} runs around the center; add some, {LEAST} are needed'
        )


def _fit_example_cost(
    names: Sequence[str], shapes: np.ndarray, t: np.ndarray, examples: np.ndarray
) -> dict[str, float]:
    """Fit the power law of the compute of an example, by least squares of its log."""
    usable = np.isfinite(examples) & (examples > 0)
    terms = np.column_stack([np.ones(usable.sum()), np.log(shapes[usable])])
    if np.linalg.matrix_rank(terms) < len(names) + 1:
        return {}
    coefficients = np.linalg.lstsq(terms, np.log(t[usable] / examples[usable]), rcond=None)[0]
    return dict(zip(('', *names), map(float, coefficients), strict=True))


def fit_shapes(star: StarSweep, bootstrap: int = 0, seed: int = 0) -> ShapeFit:
    """Fit the laws of all dimensions at once, by least squares of relative errors.

    For fixed exponents the other parameters follow from non-negative least squares (variable
    projection), so only c and each dimension's a and b are searched.

    Raises:
      UserError: The search does not converge.
    """
    with threadpool_limits(1, user_api='blas'):
        rays = list(star.rays.values())
        exponents = _search(rays)
        fitted_laws = _laws(star, exponents)
        curves = [law.value(ray.x, ray.t) for law, ray in zip(fitted_laws, rays, strict=True)]
        errors = [np.log(ray.y / curve) for ray, curve in zip(rays, curves, strict=True)]
        runs, used = sum(len(ray_errors) for ray_errors in errors), 1 + 6 * len(rays)
        pool = np.concatenate(errors) * np.sqrt(runs / max(runs - used, 1))
        rng, replicates = np.random.default_rng(seed), []
        for _ in range(bootstrap):
            redrawn = [
                dataclasses.replace(
                    ray, y=curve * np.exp(rng.choice(pool - pool.mean(), len(curve)))
                )
                for ray, curve in zip(rays, curves, strict=True)
            ]
            refitted = _laws(
                dataclasses.replace(star, rays=dict(zip(star.rays, redrawn, strict=True))),
                _refine(redrawn, exponents).x,
            )
            replicates.append(_select_optimal(star, refitted)[0])
    laws, notes = _select_optimal(star, fitted_laws)
    return ShapeFit(
        laws, tuple(replicates), max(runs - used, 2), curve_fit.rms(np.concatenate(errors)), notes
    )


def _select_optimal(
    star: StarSweep, fitted_laws: Sequence[ShapeLaw]
) -> tuple[dict[str, ShapeLaw], tuple[str, ...]]:
    """Select the laws with a minimum, with a line for each of the others."""
    laws, notes = {}, []
    for (name, ray), law in zip(star.rays.items(), fitted_laws, strict=True):
        falls = np.max(law.alpha * ray.x**-law.a / ray.y)
        grows = np.max(law.beta * ray.x**law.b * ray.t**-law.c / ray.y)
        if min(falls, grows) < _NEGLIGIBLE:
            verdict = 'better' if falls < _NEGLIGIBLE else 'worse'
            notes.append(f'{name}: no optimum: in these runs, larger is never {verdict}')
            continue
        laws[name] = law
        best = [law.best(t) for t in (ray.t.min(), ray.t.max())]
        if best[1] < ray.x.min() or best[0] > ray.x.max():
            notes.append(f'{name}: its optimum is outside the sizes that were run')
    return laws, tuple(notes)


def _search(rays: Sequence[Ray]) -> np.ndarray:
    """Search the exponents [1 + 2 K]: c, then a and b of each dimension."""
    starts = []
    for c in _GRID:
        pairs = [min(itertools.product(_GRID, _GRID), key=_cost_of(ray, c)) for ray in rays]
        starts.append(np.array([c, *itertools.chain(*pairs)]))
    starts.sort(key=lambda position: float(np.sum(_errors(position, rays) ** 2)))
    best = min(
        (_refine(rays, position) for position in starts[:_STARTS]), key=lambda result: result.cost
    )
    again = _refine(rays, best.x)
    if not best.success or again.cost < best.cost * (1 - 1e-3) - _FLAT**2:
        raise UserError('the law of shapes did not converge; give more runs or fewer dimensions')
    return again.x


def _cost_of(ray: Ray, c: float) -> Callable[[tuple[float, float]], float]:
    return lambda pair: float(np.sum(_project(ray, c, *pair)[1] ** 2))


def _refine(rays: Sequence[Ray], position: np.ndarray) -> optimize.OptimizeResult:
    start = np.clip(position, BOUNDS[0] * 1.01, BOUNDS[1] * 0.99)
    return optimize.least_squares(_errors, start, bounds=BOUNDS, args=(rays,), max_nfev=_ROUNDS)


def _errors(position: np.ndarray, rays: Sequence[Ray]) -> np.ndarray:
    pairs = position[1:].reshape(-1, 2)
    return np.concatenate(
        [_project(ray, position[0], *pair)[1] for ray, pair in zip(rays, pairs, strict=True)]
    )


def _project(ray: Ray, c: float, a: float, b: float) -> tuple[np.ndarray, np.ndarray]:
    """Find the best (alpha, beta, xi, epsilon) >= 0 in scaled units, and relative errors [M]."""
    x, t = _scale_ray(ray)
    terms = np.stack([x**-a, x**b * t**-c, t**-c, np.ones_like(x)], axis=1) / ray.y[:, None]
    linear = optimize.nnls(terms, np.ones_like(x))[0]
    return linear, terms @ linear - 1


def _scale_ray(ray: Ray) -> tuple[np.ndarray, np.ndarray]:
    return ray.x / _scale(ray.x), ray.t / _scale(ray.t)


def _scale(values: np.ndarray) -> float:
    return float(np.exp(np.log(values).mean()))


def _laws(star: StarSweep, position: np.ndarray) -> list[ShapeLaw]:
    """Convert exponents to laws in the units of the table."""
    c, laws = float(position[0]), []
    for ray, (a, b) in zip(star.rays.values(), position[1:].reshape(-1, 2), strict=True):
        alpha, beta, xi, epsilon = _project(ray, c, a, b)[0]
        x, t = _scale(ray.x), _scale(ray.t)
        law = ShapeLaw(alpha * x**a, a, beta * x**-b * t**c, b, xi * t**c, c, epsilon)
        laws.append(ShapeLaw(*map(float, dataclasses.astuple(law))))
    return laws
