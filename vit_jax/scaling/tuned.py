"""The best learning rate or batch size as a power law of model and data size.

Within a factor of a few of its minimum, the log of the loss is a parabola over the log of a
hyperparameter (Li et al. 2025, arXiv:2503.04715, find it convex). One least-squares fit then gives
the curvature, which all settings of model and data size share, and the position of the minimum,

    ln best = ln scale + p ln N + q ln D,

as in that paper's Step Law, or only over compute, as in DeepSeek LLM (arXiv:2401.02954).
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from scipy import stats

from vit_jax.errors import UserError
from vit_jax.scaling import isoflop
from vit_jax.scaling.curve_fit import FARTHEST
from vit_jax.scaling.drift import MEASURED
from vit_jax.scaling.rows import Row, drop_copies, number, read_cell

WINDOW = 0.1  # log loss above the best of a setting up to which a parabola is fitted
LEVEL = 0.9  # of intervals
WIDEST = 1.0  # width of an exponent's interval above which it is not identified
UNKNOWN = 100.0  # ratio of the ends of an interval above which a value is not identified
_TIED = 0.2  # spread of one log size, given the other, below which the two are not separated


@dataclasses.dataclass(frozen=True)
class TunedLaw:
    """Best values of hyperparameters over sizes.

    Attributes:
      tuned: Columns of the hyperparameters [K].
      over: Columns of the sizes [P].
      center: Geometric means [P] of the sizes of the settings.
      largest: Largest sizes [P].
      table: ln of the best values [K 1+P]: at the center, and the exponents.
      replicates: The same without one setting each, [G K 1+P].
      settings, runs: Numbers of settings and runs.
      notes: What was left out, and why.
    """

    tuned: tuple[str, ...]
    over: tuple[str, ...]
    center: tuple[float, ...]
    largest: tuple[float, ...]
    table: np.ndarray
    replicates: np.ndarray
    settings: int
    runs: int
    notes: tuple[str, ...] = ()

    def exponent(self, hyper: int, size: int) -> tuple[float, tuple[float, float]]:
        """Return an exponent and its interval."""
        value, half = self._estimate(np.eye(1 + len(self.over))[1 + size])
        return float(value[hyper]), _ends(value[hyper], half[hyper])

    def best(self, sizes: Sequence[float]) -> list[tuple[float, tuple[float, ...]]]:
        """Return the best value of each hyperparameter and its interval; () if it has none."""
        logs = np.log(np.asarray(sizes, float) / self.center)
        value, half = self._estimate(np.array([1.0, *logs]))
        far = self.beyond(sizes) > FARTHEST
        return [
            (float(np.exp(v)), () if far else tuple(np.exp(_ends(v, h))))
            for v, h in zip(value, half, strict=True)
        ]

    def beyond(self, sizes: Sequence[float]) -> float:
        """Return the largest factor by which a size exceeds the sizes of the settings."""
        return float(np.max(np.asarray(sizes, float) / self.largest))

    def _estimate(self, direction: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return a combination [K] of the table's columns, and half of its interval [K]."""
        value, other_values = self.table @ direction, self.replicates @ direction
        count = len(other_values)
        error = np.sqrt((count - 1) / count * ((other_values - other_values.mean(0)) ** 2).sum(0))
        return value, error * stats.t.ppf((1 + LEVEL) / 2, count - 1)

    def to_json(self) -> dict[str, Any]:
        """Return the law as JSON values; inverse of `from_json`."""
        values = dataclasses.asdict(self)
        return values | {name: values[name].tolist() for name in ('table', 'replicates')}


def from_json(stored: Mapping[str, Any]) -> TunedLaw:
    """Return the law of `TunedLaw.to_json`; KeyError or TypeError for other JSON."""
    fields: dict[str, Any] = {
        field.name: stored[field.name] for field in dataclasses.fields(TunedLaw)
    }
    fields |= {name: np.array(fields[name], float) for name in ('table', 'replicates')}
    fields |= {name: tuple(value) for name, value in fields.items() if isinstance(value, list)}
    law = TunedLaw(**fields)
    shape = (len(law.tuned), 1 + len(law.over))
    if law.table.shape != shape or law.replicates.shape[1:] != shape:
        raise TypeError(f'the table of the law has the shape {law.table.shape}')
    return law


@dataclasses.dataclass(frozen=True)
class _Setting:
    """Runs [M] of one model and data size: ln sizes [P], ln hyperparameters [M K], ln losses."""

    sizes: np.ndarray
    x: np.ndarray
    y: np.ndarray


def fit(rows: Sequence[Row], tuned: Sequence[str], over: Sequence[str], y: str) -> TunedLaw:
    """Fit the best values of the columns `tuned` over the columns `over`.

    A table with one run for each setting is taken as one of best values.

    Args:
      rows: Rows of a table, such as of `scaling collect`.
      tuned: Columns of hyperparameters.
      over: Columns of sizes.
      y: Column of a loss, or `1-NAME`.

    Raises:
      UserError: A value is not a number, or the law is not identified.
    """
    values, notes = _read(rows, (*over, *tuned, y), y)
    all_settings = _group(values, len(over), len(tuned))
    are_best = all(len(setting.y) == 1 for setting in all_settings)
    settings, left_out = (all_settings, []) if are_best else _inside(all_settings, tuned)
    sizes = np.array([s.sizes for s in settings]).reshape(-1, len(over))
    _require_spread(sizes, over, (*notes, *left_out))
    center = sizes.mean(0)
    x_center = np.concatenate([setting.x for setting in settings]).mean(0)
    moved = [_Setting(s.sizes - center, s.x - x_center, s.y) for s in settings]
    solve = _through if are_best else _least_squares
    table = solve(moved, tuned)
    replicates = np.array(
        [solve([s for s in moved if s is not law], tuned) for law in moved], float
    )
    shift = np.zeros_like(table)
    shift[:, 0] = x_center
    return TunedLaw(
        tuned=tuple(tuned),
        over=tuple(over),
        center=tuple(np.exp(center).tolist()),
        largest=tuple(np.exp(sizes.max(0)).tolist()),
        table=table + shift,
        replicates=replicates + shift,
        settings=len(settings),
        runs=sum(len(setting.y) for setting in settings),
        notes=(*notes, *left_out),
    )


def _read(rows: Sequence[Row], columns: Sequence[str], y: str) -> tuple[np.ndarray, list[str]]:
    """Read the logs of the columns [M columns] of rows that have them all."""
    flags = {column: '--y' if column == y else '--over or --tuned' for column in columns}
    numbered = list(enumerate(rows, start=2))
    full = [
        (line, row)
        for line, row in numbered
        if all(read_cell(row, c, flags[c]).strip() for c in columns)
    ]
    unique_rows, remarks = drop_copies(full, columns[:-1], y) if full else ([], ())
    values = np.array([[number(pair, c, flags[c]) for c in columns] for pair in unique_rows])
    values = values.reshape(len(unique_rows), len(columns))
    positive = (np.isfinite(values) & (values > 0)).all(1)
    notes = list(remarks)
    if missing := len(rows) - len(full) + int((~positive).sum()):
        notes.append(f'left out: {missing} row(s) without a positive value in each column')
    if not positive.any():
        raise UserError(f'no row has a positive value in each of the columns {", ".join(columns)}')
    return np.log(values[positive]), notes


def _group(values: np.ndarray, sizes: int, hypers: int) -> list[_Setting]:
    """Group rows whose sizes are at most 2 % apart."""
    labels = [isoflop.label_clusters(values[:, i], isoflop.ALIKE) for i in range(sizes)]
    groups: dict[tuple[int, ...], list[int]] = {}
    for row, key in enumerate(zip(*(label.tolist() for label in labels), strict=True)):
        groups.setdefault(key, []).append(row)
    return [
        _Setting(
            values[indices, :sizes].mean(0),
            values[indices, sizes : sizes + hypers],
            values[indices, sizes + hypers],
        )
        for indices in groups.values()
    ]


def _inside(settings: Sequence[_Setting], tuned: Sequence[str]) -> tuple[list[_Setting], list[str]]:
    """Keep runs near each setting's best; drop settings whose best is at the end of a range."""
    interior, at_end = [], dict.fromkeys(tuned, 0)
    for setting in settings:
        best = setting.x[setting.y.argmin()]
        low, high = setting.x.min(0), setting.x.max(0)
        ends = (high > low) & (np.isclose(best, low) | np.isclose(best, high))
        if ends.any():
            at_end[tuned[int(ends.argmax())]] += 1
            continue
        near = setting.y <= setting.y.min() + WINDOW
        if near.sum() > 1:
            interior.append(_Setting(setting.sizes, setting.x[near], setting.y[near]))
    notes = [
        f'left out: {count} of {len(settings)} settings, whose best {column} is the smallest or '
        'the largest tried: try values on both sides of it'
        for column, count in at_end.items()
        if count
    ]
    return interior, notes


def _require_spread(sizes: np.ndarray, over: Sequence[str], notes: Sequence[str]) -> None:
    """Raise UserError if the settings are too few, or do not separate the exponents."""
    needed = len(over) + 3
    names = ' and '.join(over)
    if len(sizes) < needed:
        reasons = f' ({"; ".join(notes)})' if notes else ''
        raise UserError(
            f'{len(sizes)} setting(s) of {names} with a best value inside of what was tried; a law '
            f'needs {needed}{reasons}'
        )
    for index, name in enumerate(over):
        other_columns = np.column_stack([np.ones(len(sizes)), np.delete(sizes, index, axis=1)])
        residual = (
            sizes[:, index]
            - other_columns @ np.linalg.lstsq(other_columns, sizes[:, index], rcond=None)[0]
        )
        if np.ptp(residual) > _TIED:
            continue
        if len(over) == 1:
            raise UserError(f'all settings have nearly the same {name}: vary it')
        other = ' and '.join(column for column in over if column != name)
        raise UserError(
            f'{name} follows from {other} in this table, so their exponents are not separated: '
            f'vary both, or give --over {other}'
        )


def _through(settings: Sequence[_Setting], tuned: Sequence[str]) -> np.ndarray:
    """Fit the law to best values, [K 1+P]."""
    del tuned
    x = np.concatenate([setting.x for setting in settings])
    design = np.array([[1.0, *setting.sizes] for setting in settings])
    return np.linalg.lstsq(design, x, rcond=None)[0].T


def _least_squares(settings: Sequence[_Setting], tuned: Sequence[str]) -> np.ndarray:
    """Fit the minimum of parabolas of one curvature, [K 1+P].

    ln loss = constant of the setting + x' H x / 2 - x' H T z with z = (1, ln sizes): linear in H
    and H T, for the table T of the law.

    Raises:
      UserError: The loss has no minimum over the hyperparameters.
    """
    count = len(tuned)
    pairs = list(itertools.combinations_with_replacement(range(count), 2))
    designs, losses = [], []
    for setting in settings:
        z = np.array([1.0, *setting.sizes])
        squares = [setting.x[:, i] * setting.x[:, j] / (1 + (i == j)) for i, j in pairs]
        lines = [-setting.x[:, i] * value for i in range(count) for value in z]
        design = np.column_stack([*squares, *lines])
        designs.append(design - design.mean(0))
        losses.append(setting.y - setting.y.mean())
    design = np.concatenate(designs)
    if np.linalg.matrix_rank(design) < design.shape[1]:
        raise UserError(
            f'the runs do not identify a minimum over {" and ".join(tuned)}: try three values or '
            'more of each'
        )
    solution = np.linalg.lstsq(design, np.concatenate(losses), rcond=None)[0]
    curvature = np.empty((count, count))
    for (i, j), value in zip(pairs, solution, strict=False):
        curvature[i, j] = curvature[j, i] = value
    if np.linalg.eigvalsh(curvature).min() <= 0:
        raise UserError(
            f'the loss has no minimum over {" and ".join(tuned)}: the runs scatter by more than it '
            'depends on them'
        )
    return np.linalg.solve(curvature, solution[len(pairs) :].reshape(count, -1))


def _ends(value: float, half: float) -> tuple[float, float]:
    return float(value - half), float(value + half)


def describe(law: TunedLaw) -> list[str]:
    """Describe the law: a line for each hyperparameter, then how it was fitted."""
    lines = []
    for index, column in enumerate(law.tuned):
        (value, band), factors = law.best(law.center)[index], []
        for size, name in enumerate(law.over):
            exponent, ends = law.exponent(index, size)
            formatted = f'{exponent:.3f}' if ends[1] - ends[0] <= WIDEST else '-'
            factors.append(f'({name} / {law.center[size]:.3g})^{formatted} {_interval(ends)}')
        lines.append(f'best {column} = {format_value(value, band)} * {" * ".join(factors)}')
    lines.append(
        f'{law.runs} runs of {law.settings} settings; {LEVEL:.0%} intervals by leaving out each '
        'setting in turn'
    )
    return [*lines, *law.notes]


def predict(law: TunedLaw, sizes: Sequence[float]) -> list[str]:
    """Describe the best values at a model and data size."""
    sizes_text = ', '.join(
        f'{name} = {size:.4g}' for name, size in zip(law.over, sizes, strict=True)
    )
    optima = zip(law.tuned, law.best(sizes), strict=True)
    lines = [f'at {sizes_text}: best {column} {format_value(*best)}' for column, best in optima]
    if (ratio := law.beyond(sizes)) > MEASURED:
        end = ': no interval' if ratio > FARTHEST else ''
        lines.append(f'at {sizes_text}: {ratio:.3g} times beyond the sizes of the settings{end}')
    return lines


def format_value(value: float, band: tuple[float, ...]) -> str:
    """Format a value and its interval; a dash if it is not identified."""
    if not band:
        return f'{value:.4g}'
    formatted = f'{value:.4g}' if band[1] <= UNKNOWN * band[0] else '-'
    return f'{formatted} {_interval(band)}'


def _interval(ends: Sequence[float]) -> str:
    return f'[{ends[0]:.3g}, {ends[1]:.3g}]'
