"""Curves of a table: group its rows, hold some out, fit, and compare forms."""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from vit_jax.errors import UserError
from vit_jax.scaling import averaging, curve_fit, forms, isoflop
from vit_jax.scaling.curve_fit import LOG_HUBER, Objective
from vit_jax.scaling.noise import Seeds, centers, merge, one_run_each, point_indices
from vit_jax.scaling.parallel import map_items
from vit_jax.scaling.rows import Numbered, Row, cell, label, number, ordered, without_copies

ALL = 'all'
_NAMED = 3  # rows of one reason
_UPTURN = 6  # least number of points in which a rise is looked for
_RISE = 0.01  # of log y that is mentioned
_SIGNIFICANT = 6.0  # standard errors of a mean; the lowest of several is low by chance
_WIDE_RATIO = 100.0  # of the ends of an interval of what is not identified
_MEASURED = 10.0  # times the largest fitted x up to which bands were measured: docs/predictions.md
_FLAT = 1e-6  # relative fall of a curve that is none
OBJECTIVES = {
    'delta 0.01': Objective(delta=0.01),
    'delta 0.1': Objective(delta=0.1),
    'log squares': Objective(delta=np.inf),
    'linear, delta 0.001': Objective(log=False),
    'linear squares': Objective(delta=np.inf, log=False),
}


@dataclasses.dataclass(frozen=True)
class FitOptions:
    """Columns, form and held-out points of a fit.

    Attributes:
      x: the columns of x, as many as the form takes.
      y: the column of the error or loss; `1-NAME` for one minus an accuracy.
      by: columns whose values distinguish the curves.
      holdout_column: 1 for rows that are fitted, 0 for rows that are held out.
      holdout: without such a column, the upper share of the range of x that is held out: with
        0.5, all x above half of the largest; 0 for nothing.
      beside: further shares whose extrapolation errors are measured.
      form: name of a form, or `auto`; curves with no more points than parameters get a simpler
        one.
      against: names of forms whose extrapolation is compared; see `find_variants`.
      frontier: keep only the points on the Pareto frontier.
      bootstrap: replicates for the bands.
      seed: the column of seeds: rows of a curve with the same x are averaged into one point. If
        None, rows with the same `setting` are, a column of `collect`.
      target: an x at which y is predicted; None for none.
    """

    x: tuple[str, ...]
    y: str
    by: tuple[str, ...] = ()
    holdout_column: str | None = None
    holdout: float = 0.5
    beside: tuple[float, ...] = ()
    form: str = averaging.AUTO
    against: tuple[str, ...] = ()
    frontier: bool = False
    bootstrap: int = 100
    seed: str | None = None
    target: float | None = None


@dataclasses.dataclass(frozen=True)
class Curve:
    """The points of a group, the law through all of them, and its error on points held out.

    Attributes:
      by: {column: value}.
      x, y: [N, K] and [N], ascending in x.
      kept: [N], False for points that are held out to measure the error.
      seeds: of the runs of each point.
      beaten: [M, K + 1], x and y of the points off the frontier; M is 0 without a frontier.
      fit: to all points; None if there are too few, `problem` is the reason.
      tested: the fit without the points held out; None if there are none, or too few others.
      notes: lines about its rows.
      holdout_rmse: extrapolation error of `tested`.
      against: {variant: its holdout_rmse}; None for one that cannot be fitted.
      beside: {share held out: holdout_rmse}; None where the rest cannot be fitted.
    """

    by: dict[str, str]
    x: np.ndarray
    y: np.ndarray
    kept: np.ndarray
    fit: curve_fit.Fit | None
    holdout_rmse: float | None
    against: dict[str, float | None]
    seeds: Seeds
    tested: curve_fit.Fit | None = None
    beside: dict[float, float | None] = dataclasses.field(default_factory=dict)
    beaten: np.ndarray = dataclasses.field(default_factory=lambda: np.empty((0, 2)))
    problem: str = ''
    notes: tuple[str, ...] = ()

    @property
    def label(self) -> str:
        """The name of the curve: its values of the columns `by`."""
        return label(self.by)


@dataclasses.dataclass(frozen=True)
class Variant:
    """A way to fit.

    Attributes:
      name: for tables.
      form: name of a form, or `choice.AUTO`.
      objective: to minimize.
      starts: number of starting points, the first ones; 0 for all.
    """

    name: str
    form: str
    objective: Objective = LOG_HUBER
    starts: int = 0

    def fit(self, x: np.ndarray, y: np.ndarray, *, seeds: Seeds | None = None) -> curve_fit.Fit:
        """The fit to points, without a bootstrap; raise UserError as `curve_fit.fit`."""
        if self.form == averaging.AUTO:
            return averaging.fit_average(x, y, seeds=seeds)
        form = forms.find(self.form)
        return curve_fit.fit(form, x, y, objective=self.objective, starts=self.starts, seeds=seeds)


def fit_curves(rows: Sequence[Row], options: FitOptions, workers: int = 1) -> list[Curve]:
    """Fit one curve to each group, in the order of its values, or of appearance if they are words.

    Rows without a positive finite x and y are left out, with a note on the curve. With several
    workers, as many processes fit the curves; results do not depend on their number.

    Raises:
      UserError: for an unknown column or form, text where a number belongs, or no usable row.
    """
    others = find_variants(options.against, options.form, len(options.x))
    for name in (options.form, *(other.form for other in others)):
        if name != averaging.AUTO and forms.find(name).columns != len(options.x):
            raise UserError(f'--form {name}: --x takes {forms.find(name).columns} column(s)')
    if options.target is not None and len(options.x) > 1:
        raise UserError('--target: takes one column of x; for a form of N and D: scaling optimal')
    groups: dict[tuple[str, ...], list[Numbered]] = {}
    left_out: dict[tuple[str, ...], list[tuple[str, str]]] = {}
    for numbered in enumerate(rows, start=2):
        key = tuple(cell(numbered[1], column, '--by') for column in options.by)
        group = groups.setdefault(key, [])
        if problem := _problem(numbered, options):
            left_out.setdefault(key, []).append((_name(numbered), problem))
        else:
            group.append(numbered)
    if not any(groups.values()):
        raise UserError(f'no row can be fitted; {_left_out(left_out[next(iter(groups))])[0]}')
    jobs = [
        functools.partial(
            _curve,
            dict(zip(options.by, key, strict=True)),
            groups[key],
            options,
            others,
            _left_out(left_out.get(key, [])),
        )
        for key in ordered(groups)
    ]
    curves = map_items(_call, jobs, 'fitting', workers)
    fits = averaging.share_noise([curve.fit for curve in curves])
    tested = averaging.share_noise([curve.tested for curve in curves])
    return [
        dataclasses.replace(curve, fit=law, tested=other)
        for curve, law, other in zip(curves, fits, tested, strict=True)
    ]


def _call(job: Callable[[], Curve]) -> Curve:
    return job()


def published_curves(rows: Sequence[Row], options: FitOptions) -> list[Curve]:
    """The curves of a published table, with the columns and the form of one's own.

    The column `curve`, if there is one, names the curves. On a frontier, all points are one.

    Raises:
      UserError: as `fit_curves`.
    """
    by = ('curve',) if 'curve' in rows[0] and not options.frontier else ()
    alone = dataclasses.replace(options, by=by, holdout_column=None, holdout=0.0, bootstrap=0)
    return fit_curves(
        rows, dataclasses.replace(alone, beside=(), against=(), seed=None, target=None)
    )


def _needed(options: FitOptions) -> list[tuple[str, str]]:
    """The columns in which a row needs a value, and the flags that name them."""
    return [*((x, '--x') for x in options.x), (options.y, '--y')]


def _name(numbered: Numbered) -> str:
    """The run of a row, or its line."""
    return numbered[1].get('run') or f'line {numbered[0]}'


def _left_out(rows: Sequence[tuple[str, str]]) -> tuple[str, ...]:
    """A line for each reason, with the names of the rows, or the first of many."""
    names: dict[str, list[str]] = {}
    for name, problem in rows:
        names.setdefault(problem, []).append(name)
    return tuple(
        f'left out: {", ".join(found[:_NAMED])}'
        + (f' and {len(found) - _NAMED} more' if len(found) > _NAMED else '')
        + f': {problem}'
        for problem, found in names.items()
    )


def _problem(numbered: Numbered, options: FitOptions) -> str:
    """The reason why a row cannot be fitted; empty if it can."""
    for column, flag in _needed(options):
        if not cell(numbered[1], column, flag):
            return f'has no {column.removeprefix("1-")}'
        value = number(numbered, column, flag)
        if not (np.isfinite(value) and value > 0):
            return f'{column} is {value:g}, which has no logarithm'
    return ''


def _curve(
    by: dict[str, str],
    group: list[Numbered],
    options: FitOptions,
    others: Sequence[Variant],
    left_out: tuple[str, ...],
) -> Curve:
    against: dict[str, float | None] = dict.fromkeys([other.name for other in others])
    if not group:
        none, nowhere = np.empty(0), np.empty((0, len(options.x)))
        problem = f'no row can be fitted; {left_out[0]}'
        return Curve(
            by, nowhere, none, none > 0, None, None, against, one_run_each(0), problem=problem
        )
    group, notes = without_copies(group, options.x, options.y)
    notes = (*left_out, *notes)
    x = np.array([[number(row, column, '--x') for column in options.x] for row in group])
    y = np.array([number(row, options.y, '--y') for row in group])
    x, y, kept, seeds = _merged(x, y, _kept(x, group, options), group, options)
    beaten = np.empty((0, x.shape[1] + 1))
    if options.frontier:
        chosen = _on_frontier(x, y, kept)
        beaten = np.column_stack([x[~chosen], y[~chosen]])
        x, y, kept, seeds = x[chosen], y[chosen], kept[chosen], seeds.take(chosen)
    order = np.lexsort((y, *x.T[::-1]))
    x, y, kept, seeds = x[order], y[order], kept[order], seeds.take(order)
    notes = (*notes, *_upturn(x, y))
    try:
        law = _fit(options.form, x, y, options.bootstrap, seeds=seeds)
    except UserError as e:
        return Curve(
            by, x, y, kept, None, None, against, seeds, beaten=beaten, problem=str(e), notes=notes
        )
    tested, more = _tested(options, x, y, kept, seeds, law)
    error = curve_fit.rmse(tested, x[~kept], y[~kept]) if tested else None
    measure = functools.partial(_extrapolation, x=x, y=y, seeds=seeds)
    against = {other.name: measure(other.fit, kept=kept) for other in others}
    fit = functools.partial(_fit, options.form)
    beside = {
        share: measure(fit, kept=x[:, -1] <= (1 - share) * x[:, -1].max())
        for share in options.beside
    }
    return Curve(
        by, x, y, kept, law, error, against, seeds, tested, beside, beaten, notes=(*notes, *more)
    )


def _tested(
    options: FitOptions,
    x: np.ndarray,
    y: np.ndarray,
    kept: np.ndarray,
    seeds: Seeds,
    law: curve_fit.Fit,
) -> tuple[curve_fit.Fit | None, tuple[str, ...]]:
    """The fit without the points held out, and a line if it is missing or of another form."""
    form = options.form
    if kept.all():
        return None, ()
    try:
        # One replicate, as the profile likelihood needs no more for a band.
        found = _fit(form, x[kept], y[kept], min(options.bootstrap, 1), seeds=seeds.take(kept))
    except UserError as e:
        return None, (f'no error held out: {e} ({(~kept).sum()} held out)',)
    if form == averaging.AUTO or found.form is law.form:
        return found, ()
    return found, (f'error held out: that of {found.form.name}, for the {kept.sum()} points left',)


def _upturn(x: np.ndarray, y: np.ndarray) -> tuple[str, ...]:
    """A line if y rises again at the largest x, compared with its noise.

    Second differences of log y tell the noise; means of a sixth of the points are compared.
    """
    if x.shape[1] > 1 or len(y) < _UPTURN:
        return ()
    log_y, width = np.log(y), max(2, len(y) // _UPTURN)
    means = np.convolve(log_y, np.ones(width) / width, 'valid')
    lowest = int(np.argmin(means))
    rise = float(means[-1] - means[lowest])
    noise = float(np.median(np.abs(np.diff(log_y, 2)))) / (0.6745 * np.sqrt(6))
    if rise <= max(_RISE, _SIGNIFICANT * noise / np.sqrt(width)):
        return ()
    return (
        f'y rises again by {100 * np.expm1(rise):.2g} % beyond x = {x[lowest + width - 1, 0]:.3g}: '
        'no form here does; leave those rows out, or give the best y up to each x',
    )


def predict_at(curve: Curve, target: float) -> tuple[dict[str, Any] | None, str]:
    """Predict y at an x outside or inside of the points of a curve.

    Returns:
      x, y, the 90 % interval `band`, None without a bootstrap or too far away, and a `note` on the
      distance; or None, and the reason.
    """
    fit = curve.fit
    if fit is None:
        return None, curve.problem
    ends, at = curve.x[:, 0], np.array([target])
    parts = fit.parts if isinstance(fit, averaging.MeanFit) else ()
    parameters = min(len(part.form.names) for part in [fit, *(one.fit for one in parts)])
    first, last = fit.predict(np.array([ends.min(), ends.max()]))
    if last >= first * (1 - _FLAT):
        return None, 'y does not fall as x grows, so there is no law to fit'
    if len(ends) < 2 * parameters and not ends.min() <= target <= ends.max():
        return None, f'{len(ends)} points for {parameters} parameters do not reach beyond them'
    found = fit.predict_band(at)
    band = None if found is None else [float(end[0]) for end in found]
    ratio = target / float(ends.max())
    if ratio > curve_fit.FARTHEST:
        band = None
    if band is not None and band[1] > _WIDE_RATIO * band[0]:
        return None, f'not identified: the points allow {band[0]:.2g} to {band[1]:.2g}'
    note = curve_fit.distance_note('x', ratio, _MEASURED)
    return {'x': target, 'y': float(fit.predict(at)[0]), 'band': band, 'note': note}, ''


def _merged(
    x: np.ndarray,
    y: np.ndarray,
    kept: np.ndarray,
    group: list[Numbered],
    options: FitOptions,
) -> tuple[np.ndarray, np.ndarray, np.ndarray, Seeds]:
    """Geometric means of x and y over seeds; a point is fitted if all of its runs are."""
    which = point_indices(group, x, options.seed)
    log_y, seeds = merge(np.log(y), which)
    if not seeds.several:
        return x, y, kept, seeds
    held = np.bincount(which, ~kept) > 0
    return centers(x, which), np.exp(log_y), ~held, seeds


def _kept(x: np.ndarray, group: list[Numbered], options: FitOptions) -> np.ndarray:
    """Mask of the fitted points; with two columns of x, the last decides."""
    if options.holdout_column is None:
        return x[:, -1] <= (1 - options.holdout) * x[:, -1].max()
    marks = np.array([number(row, options.holdout_column, '--holdout-column') for row in group])
    if not np.isin(marks, (0, 1)).all():
        raise UserError(f'--holdout-column {options.holdout_column}: 1 (fit on it) or 0 (held out)')
    return marks == 1


def _on_frontier(x: np.ndarray, y: np.ndarray, kept: np.ndarray) -> np.ndarray:
    """Mask of the frontier; fitted points are compared among themselves only.

    Values of x less than 2 % apart count as equal, as runs of whole steps miss a common budget.
    """
    if x.shape[1] != 1:
        raise UserError('--frontier: takes one column of x')
    level = isoflop.leveled(x[:, 0])
    chosen = isoflop.pareto_frontier(level, y)
    chosen[kept] = isoflop.pareto_frontier(level[kept], y[kept])
    return chosen


def _fit(
    name: str, x: np.ndarray, y: np.ndarray, bootstrap: int = 0, *, seeds: Seeds | None = None
) -> curve_fit.Fit:
    """Fit a form, or a simpler one if there are no more points than parameters."""
    if name == averaging.AUTO:
        return averaging.fit_average(x, y, bootstrap=bootstrap, seeds=seeds)
    form = forms.find(name)
    taken = forms.with_fewer(form, len(y))
    try:
        curve_fit.require_more(taken, len(y), seeds)
        found = curve_fit.fit(taken, x, y, bootstrap=bootstrap, seeds=seeds)
    except UserError:
        curve_fit.require_more(form, len(y), seeds)
        return curve_fit.fit(form, x, y)  # raises the error for the requested form
    if taken is form:
        return found
    note = (
        f'{len(y)} points for the {len(form.names)} parameters of {form.name}: fitted by '
        f'{taken.name} instead'
    )
    return dataclasses.replace(found, warnings=(note, *found.warnings))


def _extrapolation(
    fit: Callable[..., curve_fit.Fit],
    x: np.ndarray,
    y: np.ndarray,
    kept: np.ndarray,
    seeds: Seeds,
) -> float | None:
    if kept.all():
        return None
    try:
        found = fit(x[kept], y[kept], seeds=seeds.take(kept))
        return curve_fit.rmse(found, x[~kept], y[~kept])
    except UserError:
        return None


def find_variants(names: Sequence[str], form: str, columns: int) -> list[Variant]:
    """The variants of `--against`: names of forms, or `all`.

    Args:
      names: of forms; `all` stands for every other form, and for the fitted form (`shifted` for
        `auto`) with other objectives and from its first starting point alone.
      form: the fitted one.
      columns: number of columns of x.

    Raises:
      UserError: for an unknown name.
    """
    found = []
    for name in names:
        if name == ALL:
            found += _all(form, columns)
        elif name == averaging.AUTO:
            found.append(Variant(name, name))
        else:
            found.append(Variant(name, forms.find(name).name))
    return list({variant.name: variant for variant in found}.values())


def _all(form: str, columns: int) -> list[Variant]:
    others = [averaging.AUTO] if columns == 1 else []
    others += [other.name for other in forms.FORMS.values() if other.columns == columns]
    base = form if form != averaging.AUTO else 'shifted' if columns == 1 else 'joint'
    if forms.find(base).solve:
        return [Variant(name, name) for name in others if name != form]
    return [
        *(Variant(name, name) for name in others if name != form),
        *(Variant(f'{base}, {name}', base, value) for name, value in OBJECTIVES.items()),
        Variant(f'{base}, first start', base, starts=1),
    ]


def usable(rows: Sequence[Row], options: FitOptions) -> tuple[list[Row], list[str]]:
    """The rows that can be fitted, and a line with the reason for each other one.

    Raises:
      UserError: for an unknown column, or a value that is not a number.
    """
    found, skipped = [], []
    for line, row in enumerate(rows, start=2):
        if problem := _problem((line, row), options):
            skipped.append(f'{_name((line, row))}: {problem}')
        else:
            found.append(row)
    return found, skipped


def require_fit(curves: Sequence[Curve]) -> None:
    """Raise UserError if no curve could be fitted."""
    if all(curve.fit is None for curve in curves):
        raise UserError(f'no curve can be fitted; {curves[0].label}: {curves[0].problem}')


def require_growth(rows: Sequence[Row], options: FitOptions) -> None:
    """Raise UserError if x is the same in all rows; the message names columns that differ."""
    flags = _needed(options)
    found = [(i, row) for i, row in enumerate(rows, start=2) if all(cell(row, *f) for f in flags)]
    for one in found[:1]:
        number(one, options.x[0], '--x')  # raises for text, the likelier mistake
    rows = [row for _, row in found]
    if len(rows) < 2 or any(len({cell(row, x, '--x') for row in rows}) > 1 for x in options.x):
        return
    known = {'run', options.y.removeprefix('1-'), *options.by}
    # Metrics, which have a /, are results and not causes.
    names = [name for name in rows[0] if name and '/' not in name and name not in known]
    differing = [name for name in names if len({row[name] for row in rows} - {None, ''}) > 1]
    same = ', '.join(f'{x}={cell(rows[0], x, "--x")}' for x in options.x)
    raise UserError(
        f'--x: {same} is the same in all {len(rows)} rows; columns that differ: '
        f'{", ".join(differing) or "none"}'
    )


def holdout_share(text: str) -> float:
    """The upper share of the range of x that is held out: `0.5` -> 0.5, `4x` -> 0.75.

    Raises:
      UserError: for another text, or a share that leaves nothing to fit.
    """
    if text.strip().endswith('x'):
        return 1 - 1 / holdout_factor(text)
    try:
        value = float(text)
    except ValueError as e:
        raise UserError(f'--holdout {text!r}: write a share below 1, or a factor, as 4x') from e
    if not 0 <= value < 1:
        raise UserError(
            f'--holdout {value}: must be at least 0 and less than 1, or a factor, as 4x'
        )
    return value


def holdout_factor(text: str) -> float:
    """`4x` -> 4: all above a quarter of the largest x is held out.

    Raises:
      UserError: for another text, or a factor that holds out nothing.
    """
    match = re.fullmatch(r'(\d+(?:\.\d+)?)x', text.strip())
    if match is None or float(match[1]) <= 1:
        raise UserError(f'--holdout {text}: write a factor above 1, as 4x')
    return float(match[1])
