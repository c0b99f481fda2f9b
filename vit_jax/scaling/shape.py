"""Shapes that are optimal for a compute budget: the closed form of a star sweep.

Alabdulmohsin et al. 2023, "Getting ViT in Shape" (arXiv:2305.13035), section 3: the loss over one
dimension x of the shape and the compute t, with the others held at a large enough center, is

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
from vit_jax.scaling.rows import Row, cell, number, unfinished

BOUNDS = (0.02, 4.0)  # of the exponents
LEAST = 8  # runs of a ray; its law has 7 parameters
_GRID = (0.1, 0.3, 0.6, 1.0, 1.6)
_STARTS = 3  # whose search is refined
_ROUNDS = 200  # of least squares
_NEGLIGIBLE = 1e-9  # share of y below which a term is missing
_FLAT = 1e-6


@dataclasses.dataclass(frozen=True)
class StarColumns:
    """Names of the columns.

    Attributes:
      shape: the dimensions, as `config.model.width`.
      t: compute of a run.
      y: an error or a loss; `1-NAME` for one minus an accuracy.
      examples: examples seen; None without such a column.

    Raises:
      UserError: without a dimension.
    """

    shape: tuple[str, ...]
    t: str
    y: str
    examples: str | None = None

    def __post_init__(self) -> None:
        if not self.shape:
            raise UserError('--shape: name the columns of width, depth or others')

    @property
    def flags(self) -> list[tuple[str, str]]:
        """The columns in which a row needs a value, and their flags."""
        return [*((name, '--shape') for name in self.shape), (self.t, '--t'), (self.y, '--y')]


@dataclasses.dataclass(frozen=True)
class Ray:
    """Runs that differ in one dimension.

    Attributes:
      x, t, y: [M], the dimension, compute and loss of each.
    """

    x: np.ndarray
    t: np.ndarray
    y: np.ndarray


@dataclasses.dataclass(frozen=True)
class StarSweep:
    """A star sweep: runs that vary one dimension at a time around a center.

    Attributes:
      center: {dimension: value}.
      rays: {dimension: its runs, including those of the center}.
      example: the power law of the compute of an example: {dimension: exponent}, and the log of
        its scale under ''; {} if unknown.
      notes: warnings about the table.
    """

    center: dict[str, float]
    rays: dict[str, Ray]
    example: dict[str, float]
    notes: tuple[str, ...]

    def cost(self, shape: dict[str, float]) -> float | None:
        """Compute of an example of a shape; None if unknown."""
        if not self.example:
            return None
        powers = sum(p * np.log(shape[name]) for name, p in self.example.items() if name)
        return float(np.exp(self.example[''] + powers))


@dataclasses.dataclass(frozen=True)
class ShapeLaw:
    """The law of one dimension, in the units of the table.

    Attributes:
      alpha, a, beta, b, xi, c, epsilon: as in equation 2.
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
        """The loss [M] at x [M] and t, [M] or a number."""
        held = self.beta * x**self.b + self.xi
        return self.alpha * x**-self.a + held * t**-self.c + self.epsilon

    def best(self, t: float) -> float:
        """The optimal x for a budget: the minimum of equation 2."""
        ratio = self.alpha * self.a * t**self.c / (self.beta * self.b)
        return float(ratio ** (1 / (self.a + self.b)))


@dataclasses.dataclass(frozen=True)
class ShapeFit:
    """The laws of a star sweep.

    Attributes:
      laws: {dimension: its law}, for dimensions with an optimum.
      replicates: the same for each bootstrap sample.
      dof: degrees of freedom, runs less parameters, at least 2.
      rmse: root mean square error of the log of the loss.
      notes: a warning for each dimension without an optimum, and others.
    """

    laws: dict[str, ShapeLaw]
    replicates: tuple[dict[str, ShapeLaw], ...]
    dof: int
    rmse: float
    notes: tuple[str, ...]

    def exponent(self, name: str) -> tuple[float, list[float]]:
        """s of a dimension and its 90 % band; [] without a bootstrap."""
        return self._banded(self.laws[name].s, [one[name].s for one in self._with(name)])

    def best(self, name: str, t: float) -> tuple[float, list[float]]:
        """The optimum of a dimension for a budget, and its 90 % band; [] without a bootstrap."""
        found = [one[name].best(t) for one in self._with(name)]
        return self._banded(self.laws[name].best(t), found)

    def scaled(self, start: Mapping[str, float], ratio: float) -> dict[str, float]:
        """A shape that is optimal for some budget, scaled to `ratio` times that budget."""
        return {name: x * ratio ** self.laws[name].s for name, x in start.items()}

    def _with(self, name: str) -> list[dict[str, ShapeLaw]]:
        return [one for one in self.replicates if name in one]

    def _banded(self, value: float, samples: Sequence[float]) -> tuple[float, list[float]]:
        if not samples:
            return value, []
        factor = np.exp(curve_fit.half_width(np.std(np.log([samples]), axis=1), self.dof))[0]
        return value, [float(value / factor), float(value * factor)]


def read_star(rows: Sequence[Row], columns: StarColumns) -> StarSweep:
    """Read the star sweep of a table: most runs differ from its center in at most one dimension.

    Raises:
      UserError: for an unknown column, text where a number belongs, or a dimension with too few
        runs, sizes or budgets.
    """
    kept, notes = [], []
    for line, row in enumerate(rows, start=2):
        name = row.get('run') or f'line {line}'
        empty = [column for column, flag in columns.flags if not cell(row, column, flag)]
        values = [number((line, row), *flag) for flag in columns.flags] if not empty else []
        if unfinished(row):
            notes.append(f'{name}: left out, it is not finished')
        elif empty:
            notes.append(f'{name}: left out, it has no {empty[0].removeprefix("1-")}')
        elif not (np.isfinite(values).all() and min(values) > 0):
            at = int(np.argmin([np.isfinite(v) and v > 0 for v in values]))
            notes.append(f'{name}: left out, {columns.flags[at][0]} is {values[at]:g}')
        else:
            kept.append([*values, _examples(row, line, columns)])
    if not kept:
        raise UserError(f'no row can be fitted; {notes[0]}')
    table = np.array(kept)
    shapes = table[:, : len(columns.shape)]
    middle = _center(shapes)
    away = (shapes != middle).sum(axis=1)
    if far := int((away > 1).sum()):
        notes.append(f'{far} run(s) differ from the center in more than one dimension: left out')
    table, shapes = table[away < 2], shapes[away < 2]
    rays = {}
    for i, name in enumerate(columns.shape):
        chosen = np.delete(shapes == middle, i, axis=1).all(axis=1)
        rays[name] = Ray(shapes[chosen, i], table[chosen, -3], table[chosen, -2])
        _check(name, rays[name])
    center = dict(zip(columns.shape, map(float, middle), strict=True))
    example = _example(columns.shape, shapes, table[:, -3], table[:, -1])
    return StarSweep(center, rays, example, tuple(notes))


def _examples(row: Row, line: int, columns: StarColumns) -> float:
    if columns.examples is None or not cell(row, columns.examples, '--examples'):
        return np.nan
    return number((line, row), columns.examples, '--examples')


def _center(shapes: np.ndarray) -> np.ndarray:
    counts = collections.Counter(map(tuple, shapes))
    near = {one: int(((shapes != one).sum(axis=1) < 2).sum()) for one in counts}
    return np.array(max(counts, key=lambda one: (near[one], counts[one])))


def _check(name: str, ray: Ray) -> None:
    for values, noun in ((ray.x, 'sizes'), (ray.t, 'budgets')):
        if (different := len(np.unique(values))) < 3:
            raise UserError(f'--shape {name}: {different} {noun} around the center, of 3 needed')
    if len(ray.y) < LEAST:
        raise UserError(f'--shape {name}: {len(ray.y)} runs around the center, of {LEAST} needed')


def _example(
    names: Sequence[str], shapes: np.ndarray, t: np.ndarray, examples: np.ndarray
) -> dict[str, float]:
    """The power law of the compute of an example, by least squares of its log."""
    known = np.isfinite(examples) & (examples > 0)
    terms = np.column_stack([np.ones(known.sum()), np.log(shapes[known])])
    if np.linalg.matrix_rank(terms) < len(names) + 1:
        return {}
    found = np.linalg.lstsq(terms, np.log(t[known] / examples[known]), rcond=None)[0]
    return dict(zip(('', *names), map(float, found), strict=True))


def fit_shapes(star: StarSweep, bootstrap: int = 0, seed: int = 0) -> ShapeFit:
    """Fit the laws of all dimensions at once, by least squares of relative errors.

    For given exponents the other parameters follow from non-negative least squares (variable
    projection), so that only c and each dimension's a and b are searched.

    Raises:
      UserError: if the search does not converge.
    """
    with threadpool_limits(1, user_api='blas'):
        rays = list(star.rays.values())
        at = _search(rays)
        found = _laws(star, at)
        curves = [law.value(ray.x, ray.t) for law, ray in zip(found, rays, strict=True)]
        errors = [np.log(ray.y / curve) for ray, curve in zip(rays, curves, strict=True)]
        runs, used = sum(len(one) for one in errors), 1 + 6 * len(rays)
        pool = np.concatenate(errors) * np.sqrt(runs / max(runs - used, 1))
        rng, drawn = np.random.default_rng(seed), []
        for _ in range(bootstrap):
            new = [
                dataclasses.replace(
                    ray, y=curve * np.exp(rng.choice(pool - pool.mean(), len(curve)))
                )
                for ray, curve in zip(rays, curves, strict=True)
            ]
            again = _laws(
                dataclasses.replace(star, rays=dict(zip(star.rays, new, strict=True))),
                _refine(new, at).x,
            )
            drawn.append(_with_optimum(star, again)[0])
    laws, notes = _with_optimum(star, found)
    return ShapeFit(
        laws, tuple(drawn), max(runs - used, 2), curve_fit.rms(np.concatenate(errors)), notes
    )


def _with_optimum(
    star: StarSweep, found: Sequence[ShapeLaw]
) -> tuple[dict[str, ShapeLaw], tuple[str, ...]]:
    """The laws with a minimum, and a line for each other one."""
    laws, notes = {}, []
    for (name, ray), law in zip(star.rays.items(), found, strict=True):
        falls = np.max(law.alpha * ray.x**-law.a / ray.y)
        grows = np.max(law.beta * ray.x**law.b * ray.t**-law.c / ray.y)
        if min(falls, grows) < _NEGLIGIBLE:
            verdict = 'better' if falls < _NEGLIGIBLE else 'worse'
            notes.append(f'{name}: no optimum: in these runs, a larger one is never {verdict}')
            continue
        laws[name] = law
        best = [law.best(t) for t in (ray.t.min(), ray.t.max())]
        if best[1] < ray.x.min() or best[0] > ray.x.max():
            notes.append(f'{name}: its optimum is outside the sizes that were run')
    return laws, tuple(notes)


def _search(rays: Sequence[Ray]) -> np.ndarray:
    """The exponents [1 + 2 K]: c, then a and b of each dimension."""
    starts = []
    for c in _GRID:
        pairs = [min(itertools.product(_GRID, _GRID), key=_cost_of(ray, c)) for ray in rays]
        starts.append(np.array([c, *itertools.chain(*pairs)]))
    starts.sort(key=lambda at: float(np.sum(_errors(at, rays) ** 2)))
    found = min((_refine(rays, at) for at in starts[:_STARTS]), key=lambda one: one.cost)
    again = _refine(rays, found.x)
    if not found.success or again.cost < found.cost * (1 - 1e-3) - _FLAT**2:
        raise UserError('the law of shapes did not converge; give more runs or fewer dimensions')
    return again.x


def _cost_of(ray: Ray, c: float) -> Callable[[tuple[float, float]], float]:
    return lambda pair: float(np.sum(_project(ray, c, *pair)[1] ** 2))


def _refine(rays: Sequence[Ray], at: np.ndarray) -> optimize.OptimizeResult:
    start = np.clip(at, BOUNDS[0] * 1.01, BOUNDS[1] * 0.99)
    return optimize.least_squares(_errors, start, bounds=BOUNDS, args=(rays,), max_nfev=_ROUNDS)


def _errors(at: np.ndarray, rays: Sequence[Ray]) -> np.ndarray:
    pairs = at[1:].reshape(-1, 2)
    return np.concatenate(
        [_project(ray, at[0], *pair)[1] for ray, pair in zip(rays, pairs, strict=True)]
    )


def _project(ray: Ray, c: float, a: float, b: float) -> tuple[np.ndarray, np.ndarray]:
    """The best (alpha, beta, xi, epsilon) >= 0 for x and t in scaled units; relative errors [M]."""
    x, t = _scaled(ray)
    terms = np.stack([x**-a, x**b * t**-c, t**-c, np.ones_like(x)], axis=1) / ray.y[:, None]
    linear = optimize.nnls(terms, np.ones_like(x))[0]
    return linear, terms @ linear - 1


def _scaled(ray: Ray) -> tuple[np.ndarray, np.ndarray]:
    return ray.x / _scale(ray.x), ray.t / _scale(ray.t)


def _scale(values: np.ndarray) -> float:
    return float(np.exp(np.log(values).mean()))


def _laws(star: StarSweep, at: np.ndarray) -> list[ShapeLaw]:
    """The laws in the units of the table."""
    c, found = float(at[0]), []
    for ray, (a, b) in zip(star.rays.values(), at[1:].reshape(-1, 2), strict=True):
        alpha, beta, xi, epsilon = _project(ray, c, a, b)[0]
        x, t = _scale(ray.x), _scale(ray.t)
        law = ShapeLaw(alpha * x**a, a, beta * x**-b * t**c, b, xi * t**c, c, epsilon)
        found.append(ShapeLaw(*map(float, dataclasses.astuple(law))))
    return found
