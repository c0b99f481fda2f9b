"""Curves of a table: groups of rows, held-out points, fits, and comparison of forms."""

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
from vit_jax.scaling.noise import Seeds, centers, merge_seeds, point_indices, single_runs
from vit_jax.scaling.parallel import map_items
from vit_jax.scaling.rows import Numbered, Row, drop_copies, label, number, read_cell, sort_keys

ALL = 'all'
_NAMED = 3  # most rows named for the same reason
_UPTURN = 6  # least number of points for the search of a rise
_RISE = 0.01  # least rise of log y that is reported
_SIGNIFICANT = 6.0  # standard errors of a mean; the lowest of several is low by chance
_WIDE_RATIO = 100.0  # ratio of the ends of an interval above which a value is not identified
_MEASURED = 10.0  # x over the largest fitted x up to which docs/predictions.md measured bands
_FLAT = 1e-6  # relative fall up to which a curve counts as flat
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
      x: Columns of x, as many as the form takes.
      y: Column of the error or loss; `1-NAME` for one minus an accuracy.
      by: Columns whose values distinguish the curves.
      holdout_column: Column with 1 for rows to fit and 0 for rows to hold out.
      holdout: Upper share of the range of x to hold out if there is no such column: with 0.5, all
        x above half of the largest; 0 for nothing.
      beside: Further shares whose extrapolation errors are measured.
      form: Name of a form, or `auto`; curves with too few points get a simpler form.
      against: Names of forms whose extrapolation is compared; see `find_variants`.
      frontier: Whether to keep only the points on the Pareto frontier.
      bootstrap: Replicates for the bands.
      seed: Column of seeds: rows of a curve with the same x are averaged into one point. None
        averages rows with the same `setting`, a column of `collect`.
      target: X at which y is predicted; None for no prediction.
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
    """Points of a group, the law through all of them, and its error on held-out points.

    Attributes:
      by: {column: value}.
      x, y: Points, [N, K] and [N], ascending in x.
      fit_mask: Mask [N] of the fitted points; the others are held out to measure the error.
      seeds: Seeds of the runs of each point.
      beaten: X and y [M, K + 1] of the points off the frontier; M is 0 without a frontier.
      fit: Fit to all points; None if there are too few, with the reason in `problem`.
      tested: Fit without the held-out points; None if there are none, or too few others.
      notes: Lines about its rows.
      holdout_rmse: Extrapolation error of `tested`.
      against: {variant: its holdout_rmse}; None for a variant that cannot be fitted.
      beside: {share held out: holdout_rmse}; None if the other points cannot be fitted.
    """

    by: dict[str, str]
    x: np.ndarray
    y: np.ndarray
    fit_mask: np.ndarray
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
        """Name of the curve: its values of the columns `by`."""
        return label(self.by)


@dataclasses.dataclass(frozen=True)
class Variant:
    """Variant of a fit.

    Attributes:
      name: Name in tables.
      form: Name of a form, or `averaging.AUTO`.
      objective: Loss to minimize.
      starts: Number of starting points, the first ones; 0 for all.
    """

    name: str
    form: str
    objective: Objective = LOG_HUBER
    starts: int = 0

    def fit(self, x: np.ndarray, y: np.ndarray, *, seeds: Seeds | None = None) -> curve_fit.Fit:
        """Fit points without a bootstrap; raise UserError like `curve_fit.fit`."""
        if self.form == averaging.AUTO:
            return averaging.fit_average(x, y, seeds=seeds)
        form = forms.find_form(self.form)
        return curve_fit.fit(form, x, y, objective=self.objective, starts=self.starts, seeds=seeds)


def fit_curves(rows: Sequence[Row], options: FitOptions, workers: int = 1) -> list[Curve]:
    """Fit one curve to each group, in the order of its values, or of appearance if they are words.

    Rows without a positive finite x and y are left out, with a note on the curve. Results do not
    depend on the number of workers (processes).

    Raises:
      UserError: A column or form is unknown, a cell is not a number, or no row is usable.
    """
    variants = find_variants(options.against, options.form, len(options.x))
    for name in (options.form, *(other.form for other in variants)):
        if name != averaging.AUTO and forms.find_form(name).columns != len(options.x):
            raise UserError(f'--form {name}: --x takes {forms.find_form(name).columns} column(s)')
    if options.target is not None and len(options.x) > 1:
        raise UserError('--target: takes one column of x; for a form of N and D: scaling optimal')
    groups: dict[tuple[str, ...], list[Numbered]] = {}
    left_out: dict[tuple[str, ...], list[tuple[str, str]]] = {}
    for numbered in enumerate(rows, start=2):
        key = tuple(read_cell(numbered[1], column, '--by') for column in options.by)
        group = groups.setdefault(key, [])
        if problem := _find_problem(numbered, options):
            left_out.setdefault(key, []).append((_name(numbered), problem))
        else:
            group.append(numbered)
    if not any(groups.values()):
        raise UserError(
            f'no row can be fitted; {_summarize_left_out(left_out[next(iter(groups))])[0]}'
        )
    jobs = [
        functools.partial(
            _fit_group,
            dict(zip(options.by, key, strict=True)),
            groups[key],
            options,
            variants,
            _summarize_left_out(left_out.get(key, [])),
        )
        for key in sort_keys(groups)
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
    """Fit the curves of a published table with the same columns and form.

    The column `curve`, if present, names the curves. On a frontier, all points are one curve.

    Raises:
      UserError: See `fit_curves`.
    """
    by = ('curve',) if 'curve' in rows[0] and not options.frontier else ()
    plain = dataclasses.replace(options, by=by, holdout_column=None, holdout=0.0, bootstrap=0)
    return fit_curves(
        rows, dataclasses.replace(plain, beside=(), against=(), seed=None, target=None)
    )


def _required_columns(options: FitOptions) -> list[tuple[str, str]]:
    """List the columns in which a row needs a value, and the flags that name them."""
    return [*((x, '--x') for x in options.x), (options.y, '--y')]


def _name(numbered: Numbered) -> str:
    """Name a row by its run, or by its line."""
    return numbered[1].get('run') or f'line {numbered[0]}'


def _summarize_left_out(rows: Sequence[tuple[str, str]]) -> tuple[str, ...]:
    """Write a line for each reason, with the names of the first rows."""
    names: dict[str, list[str]] = {}
    for name, problem in rows:
        names.setdefault(problem, []).append(name)
    return tuple(
        f'left out: {", ".join(group[:_NAMED])}'
        + (f' and {len(group) - _NAMED} more' if len(group) > _NAMED else '')
        + f': {problem}'
        for problem, group in names.items()
    )


def _find_problem(numbered: Numbered, options: FitOptions) -> str:
    """Explain why a row cannot be fitted; empty if it can."""
    for column, flag in _required_columns(options):
        if not read_cell(numbered[1], column, flag):
            return f'has no {column.removeprefix("1-")}'
        value = number(numbered, column, flag)
        if not (np.isfinite(value) and value > 0):
            return f'{column} is {value:g}, which has no logarithm'
    return ''


def _fit_group(
    by: dict[str, str],
    group: list[Numbered],
    options: FitOptions,
    variants: Sequence[Variant],
    left_out: tuple[str, ...],
) -> Curve:
    against: dict[str, float | None] = dict.fromkeys([other.name for other in variants])
    if not group:
        empty, no_x = np.empty(0), np.empty((0, len(options.x)))
        problem = f'no row can be fitted; {left_out[0]}'
        return Curve(
            by, no_x, empty, empty > 0, None, None, against, single_runs(0), problem=problem
        )
    group, notes = drop_copies(group, options.x, options.y)
    notes = (*left_out, *notes)
    x = np.array([[number(row, column, '--x') for column in options.x] for row in group])
    y = np.array([number(row, options.y, '--y') for row in group])
    x, y, fit_mask, seeds = _merge_seeds(x, y, _mask_fitted(x, group, options), group, options)
    beaten = np.empty((0, x.shape[1] + 1))
    if options.frontier:
        on_frontier = _mask_frontier(x, y, fit_mask)
        beaten = np.column_stack([x[~on_frontier], y[~on_frontier]])
        x, y, fit_mask, seeds = (
            x[on_frontier],
            y[on_frontier],
            fit_mask[on_frontier],
            seeds.take(on_frontier),
        )
    order = np.lexsort((y, *x.T[::-1]))
    x, y, fit_mask, seeds = x[order], y[order], fit_mask[order], seeds.take(order)
    notes = (*notes, *_note_upturn(x, y))
    try:
        law = _fit(options.form, x, y, options.bootstrap, seeds=seeds)
    except UserError as e:
        return Curve(
            by,
            x,
            y,
            fit_mask,
            None,
            None,
            against,
            seeds,
            beaten=beaten,
            problem=str(e),
            notes=notes,
        )
    tested, more = _fit_without_held_out(options, x, y, fit_mask, seeds, law)
    error = curve_fit.rmse(tested, x[~fit_mask], y[~fit_mask]) if tested else None
    measure = functools.partial(_extrapolation_error, x=x, y=y, seeds=seeds)
    against = {other.name: measure(other.fit, fit_mask=fit_mask) for other in variants}
    fit = functools.partial(_fit, options.form)
    beside = {
        share: measure(fit, fit_mask=x[:, -1] <= (1 - share) * x[:, -1].max())
        for share in options.beside
    }
    return Curve(
        by,
        x,
        y,
        fit_mask,
        law,
        error,
        against,
        seeds,
        tested,
        beside,
        beaten,
        notes=(*notes, *more),
    )


def _fit_without_held_out(
    options: FitOptions,
    x: np.ndarray,
    y: np.ndarray,
    fit_mask: np.ndarray,
    seeds: Seeds,
    law: curve_fit.Fit,
) -> tuple[curve_fit.Fit | None, tuple[str, ...]]:
    """Fit the points that are not held out, with a line if this fails or takes another form."""
    form = options.form
    if fit_mask.all():
        return None, ()
    try:
        # The profile likelihood needs only one replicate for a band.
        fit = _fit(
            form, x[fit_mask], y[fit_mask], min(options.bootstrap, 1), seeds=seeds.take(fit_mask)
        )
    except UserError as e:
        return None, (f'no error held out: {e} ({(~fit_mask).sum()} held out)',)
    if form == averaging.AUTO or fit.form is law.form:
        return fit, ()
    note = f'error held out: measured for {fit.form.name}, on a fit to {fit_mask.sum()} points'
    return fit, (note,)


def _note_upturn(x: np.ndarray, y: np.ndarray) -> tuple[str, ...]:
    """Report whether y rises again at the largest x, compared with its noise.

    Second differences of log y estimate the noise; means of a sixth of the points are compared.
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
        f'y rises again by {100 * np.expm1(rise):.2g} % beyond x = {x[lowest + width - 1, 0]:.3g}, '
        'which none of the forms can follow: leave those rows out, or give the best y up to each x',
    )


def predict_at(curve: Curve, target: float) -> tuple[dict[str, Any] | None, str]:
    """Predict y at an x outside or inside the points of a curve.

    Returns:
      x, y, the 90 % interval `band` (None without a bootstrap or too far away), and a `note` on the
      distance; or None, and the reason.
    """
    fit = curve.fit
    if fit is None:
        return None, curve.problem
    fitted_x, target_x = curve.x[:, 0], np.array([target])
    parts = fit.parts if isinstance(fit, averaging.MeanFit) else ()
    parameters = min(len(law.form.names) for law in [fit, *(part.fit for part in parts)])
    first_y, last = fit.predict(np.array([fitted_x.min(), fitted_x.max()]))
    if last >= first_y * (1 - _FLAT):
        return None, 'y does not fall as x grows, so there is no law to fit'
    if len(fitted_x) < 2 * parameters and not fitted_x.min() <= target <= fitted_x.max():
        return None, f'{len(fitted_x)} points for {parameters} parameters do not reach beyond them'
    interval = fit.predict_band(target_x)
    band = None if interval is None else [float(end[0]) for end in interval]
    ratio = target / float(fitted_x.max())
    if ratio > curve_fit.FARTHEST:
        band = None
    if band is not None and band[1] > _WIDE_RATIO * band[0]:
        return None, f'not identified: the points allow {band[0]:.2g} to {band[1]:.2g}'
    note = curve_fit.distance_note('x', ratio, _MEASURED)
    return {'x': target, 'y': float(fit.predict(target_x)[0]), 'band': band, 'note': note}, ''


def _merge_seeds(
    x: np.ndarray,
    y: np.ndarray,
    fit_mask: np.ndarray,
    group: list[Numbered],
    options: FitOptions,
) -> tuple[np.ndarray, np.ndarray, np.ndarray, Seeds]:
    """Average x and y geometrically over seeds; a point is fitted if all its runs are."""
    which = point_indices(group, x, options.seed)
    log_y, seeds = merge_seeds(np.log(y), which)
    if not seeds.several:
        return x, y, fit_mask, seeds
    held_out = np.bincount(which, ~fit_mask) > 0
    return centers(x, which), np.exp(log_y), ~held_out, seeds


def _mask_fitted(x: np.ndarray, group: list[Numbered], options: FitOptions) -> np.ndarray:
    """Mask the points to fit; with two columns of x, the last decides."""
    if options.holdout_column is None:
        return x[:, -1] <= (1 - options.holdout) * x[:, -1].max()
    marks = np.array([number(row, options.holdout_column, '--holdout-column') for row in group])
    if not np.isin(marks, (0, 1)).all():
        raise UserError(
            f'--holdout-column {options.holdout_column}: each row needs 1 (fitted) or 0 (held out)'
        )
    return marks == 1


def _mask_frontier(x: np.ndarray, y: np.ndarray, fit_mask: np.ndarray) -> np.ndarray:
    """Mask the frontier; fitted points are compared only with each other.

    Values of x less than 2 % apart count as equal: runs of whole steps miss a common budget.
    """
    if x.shape[1] != 1:
        raise UserError('--frontier: takes one column of x')
    level = isoflop.merge_close(x[:, 0])
    mask = isoflop.pareto_frontier(level, y)
    mask[fit_mask] = isoflop.pareto_frontier(level[fit_mask], y[fit_mask])
    return mask


def _fit(
    name: str, x: np.ndarray, y: np.ndarray, bootstrap: int = 0, *, seeds: Seeds | None = None
) -> curve_fit.Fit:
    """Fit a form, or a simpler one if there are no more points than parameters."""
    if name == averaging.AUTO:
        return averaging.fit_average(x, y, bootstrap=bootstrap, seeds=seeds)
    form = forms.find_form(name)
    simpler = forms.simplify(form, len(y))
    try:
        curve_fit.require_more(simpler, len(y), seeds)
        fit = curve_fit.fit(simpler, x, y, bootstrap=bootstrap, seeds=seeds)
    except UserError:
        curve_fit.require_more(form, len(y), seeds)
        return curve_fit.fit(form, x, y)  # raises the error for the requested form
    if simpler is form:
        return fit
    note = (
        f'{len(y)} points for the {len(form.names)} parameters of {form.name}: fitted by '
        f'{simpler.name} instead'
    )
    return dataclasses.replace(fit, warnings=(note, *fit.warnings))


def _extrapolation_error(
    fit_points: Callable[..., curve_fit.Fit],
    x: np.ndarray,
    y: np.ndarray,
    fit_mask: np.ndarray,
    seeds: Seeds,
) -> float | None:
    if fit_mask.all():
        return None
    try:
        fit = fit_points(x[fit_mask], y[fit_mask], seeds=seeds.take(fit_mask))
        return curve_fit.rmse(fit, x[~fit_mask], y[~fit_mask])
    except UserError:
        return None


def find_variants(names: Sequence[str], form: str, columns: int) -> list[Variant]:
    """Find the variants of `--against`: names of forms, or `all`.

    Args:
      names: Names of forms; `all` means every other form, and the fitted form (`shifted` for
        `auto`) with other objectives and from only its first starting point.
      form: Fitted form.
      columns: Number of columns of x.

    Raises:
      UserError: A name is unknown.
    """
    variants = []
    for name in names:
        if name == ALL:
            variants += _all_variants(form, columns)
        elif name == averaging.AUTO:
            variants.append(Variant(name, name))
        else:
            variants.append(Variant(name, forms.find_form(name).name))
    return list({variant.name: variant for variant in variants}.values())


def _all_variants(form: str, columns: int) -> list[Variant]:
    names = [averaging.AUTO] if columns == 1 else []
    names += [other.name for other in forms.FORMS.values() if other.columns == columns]
    base = form if form != averaging.AUTO else 'shifted' if columns == 1 else 'joint'
    if forms.find_form(base).solve:
        return [Variant(name, name) for name in names if name != form]
    return [
        *(Variant(name, name) for name in names if name != form),
        *(Variant(f'{base}, {name}', base, value) for name, value in OBJECTIVES.items()),
        Variant(f'{base}, first start', base, starts=1),
    ]


def select_usable(rows: Sequence[Row], options: FitOptions) -> tuple[list[Row], list[str]]:
    """Select the rows that can be fitted, with a line for each of the others.

    Raises:
      UserError: A column is unknown, or a value is not a number.
    """
    usable, skipped = [], []
    for line, row in enumerate(rows, start=2):
        if problem := _find_problem((line, row), options):
            skipped.append(f'{_name((line, row))}: {problem}')
        else:
            usable.append(row)
    return usable, skipped


def require_fit(curves: Sequence[Curve]) -> None:
    """Raise UserError if no curve could be fitted."""
    if all(curve.fit is None for curve in curves):
        raise UserError(f'no curve can be fitted; {curves[0].label}: {curves[0].problem}')


def require_growth(rows: Sequence[Row], options: FitOptions) -> None:
    """Raise UserError if x is the same in all rows; the message names columns that differ."""
    flags = _required_columns(options)
    complete = [
        (line, row)
        for line, row in enumerate(rows, start=2)
        if all(read_cell(row, *f) for f in flags)
    ]
    for numbered in complete[:1]:
        number(numbered, options.x[0], '--x')  # raises for text, the likelier mistake
    rows = [row for _, row in complete]
    if len(rows) < 2 or any(len({read_cell(row, x, '--x') for row in rows}) > 1 for x in options.x):
        return
    used = {'run', options.y.removeprefix('1-'), *options.by}
    # Metrics, whose names have a slash, are results, not causes.
    names = [name for name in rows[0] if name and '/' not in name and name not in used]
    differing = [name for name in names if len({row[name] for row in rows} - {None, ''}) > 1]
    same = ', '.join(f'{x}={read_cell(rows[0], x, "--x")}' for x in options.x)
    raise UserError(
        f'--x: {same} is the same in all {len(rows)} rows; columns that differ: '
        f'{", ".join(differing) or "none"}'
    )


def parse_holdout_share(text: str) -> float:
    """Parse the upper share of the range of x to hold out: `0.5` -> 0.5, `4x` -> 0.75.

    Raises:
      UserError: The text is neither a share nor a factor, or would leave nothing to fit.
    """
    if text.strip().endswith('x'):
        return 1 - 1 / parse_holdout_factor(text)
    try:
        value = float(text)
    except ValueError as e:
        raise UserError(f'--holdout {text!r}: write a share below 1, or a factor such as 4x') from e
    if not 0 <= value < 1:
        raise UserError(
            f'--holdout {value}: must be at least 0 and less than 1, or a factor such as 4x'
        )
    return value


def parse_holdout_factor(text: str) -> float:
    """Parse a factor: `4x` -> 4 holds out all above a quarter of the largest x.

    Raises:
      UserError: The text is not a factor, or is at most 1.
    """
    match = re.fullmatch(r'(\d+(?:\.\d+)?)x', text.strip())
    if match is None or float(match[1]) <= 1:
        raise UserError(f'--holdout {text}: write a factor above 1, such as 4x')
    return float(match[1])
