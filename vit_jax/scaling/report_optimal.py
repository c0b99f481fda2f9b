"""The law of a study at equal compute in its report: N*(C), parabolas, residuals."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from vit_jax.scaling import isoflop, points, rows
from vit_jax.scaling.optimal import Analysis, AnalysisOptions, analyze
from vit_jax.scaling.pages import Block, Heading, Lines, Picture, TableBlock, Text
from vit_jax.scaling.points import Columns

PICTURE = 'optimal.png'
SIZE, FLOPS = 'parameters', 'flops'  # columns of `scaling collect`
_BEYOND = 4.0  # times the largest budget, for which the optimum is predicted
_BUDGETS = 2  # least number of budgets of a study


def find_study(
    table: Sequence[rows.Row], y: str, bootstrap: int
) -> tuple[Analysis, Columns] | None:
    """Analyze the runs of `collect` if they share budgets; None if they do not.

    Args:
      table: its rows.
      y: the column of the loss, as for `scaling optimal --y`.
      bootstrap: replicates for the bands.
    """
    if not all(name in table[0] for name in (SIZE, FLOPS)):
        return None
    usable = [row for row in table if row[SIZE] and row[FLOPS] and row.get(y.removeprefix('1-'))]
    if not usable:
        return None
    columns = Columns(SIZE, None, FLOPS, y)
    (seen,) = points.read(table, columns)
    if len(isoflop.budgets(seen.n, seen.c)) < _BUDGETS:
        return None
    return analyze(seen, AnalysisOptions(_BEYOND * float(seen.c.max()), 0.0, bootstrap)), columns


def optimal_blocks(one: Analysis, columns: Columns) -> list[Block]:
    """The section on optimal sizes."""
    ways = {name: law for name, law in one.summary.items() if law is not None}
    found: list[Block] = [Heading('Optimal sizes'), Picture(PICTURE, 'optimal sizes')]
    if ways:
        target = next(iter(ways.values()))['target']['C']
        found += [
            _methods(ways),
            Text(
                f'N* ~ C^a, D* ~ C^b; N*, D* and the loss at {target:.3g} FLOPs, {_BEYOND:g} times '
                'the largest budget. In brackets is the 90 % band, from a bootstrap with a drift '
                'beyond the runs. '
                + (f'`{one.shown}` is shown. ' if one.shown else '')
                + f'{one.points.cost.words}. {points.conventions(columns)}'
            ),
        ]
    else:
        found.append(Text('No method gives a law of the optimum; the lines below say why.'))
    if lines := list(dict.fromkeys((*one.notes, *one.points.left_out))):
        found.append(Lines(lines))
    return [*found, Heading('Residuals', 3), _residuals(one, columns)]


def _methods(ways: Mapping[str, Mapping[str, Any]]) -> TableBlock:
    lines = [['method', 'a', 'b', 'N*', 'D*', 'loss']]
    for name, law in ways.items():
        cells = [_value(law, key) for key in 'ab']
        cells += [_value(law['target'], key) for key in ('N', 'D', 'loss')]
        lines.append([name, *cells])
    return TableBlock(lines)


def _value(law: Mapping[str, Any], name: str) -> str:
    """A value with its band; a dash for what is missing or not identified."""
    if law.get(name) is None:
        return '-'
    if name not in law['bands']:
        return f'{law[name]:.4g}'
    low, high = law['bands'][name]
    return f'{law[name]:.4g} [{low:.3g}, {high:.3g}]'


def _residuals(one: Analysis, columns: Columns) -> TableBlock:
    """The relative errors of the parabolas and of the joint law at each run of a budget."""
    seen = one.points
    groups = isoflop.budgets(seen.n, seen.c)
    curves = isoflop.fitted(seen.n, seen.c, seen.y, seen.seeds.weights)
    law = one.joint.predict(seen.x) if one.joint is not None else np.full(len(seen.y), np.nan)
    lines = [['C', 'N', columns.y, 'of the parabola', 'of the joint law']]
    for i in np.concatenate(groups):
        errors = [seen.y[i] / fit[i] - 1 for fit in (curves, law)]
        shown = [f'{100 * error:+.2f} %' if np.isfinite(error) else '-' for error in errors]
        lines.append([f'{seen.c[i]:.3g}', rows.short(seen.n[i]), f'{seen.y[i]:.4g}', *shown])
    return TableBlock(lines)
