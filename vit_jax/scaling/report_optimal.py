"""Section of a report on the law of a study at equal compute: N*(C), parabolas, residuals."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from vit_jax.scaling import isoflop, plots_optimal, points, rows
from vit_jax.scaling.optimal import Analysis, AnalysisOptions, analyze
from vit_jax.scaling.pages import Block, Heading, Lines, Picture, TableBlock, Text
from vit_jax.scaling.points import Columns

PICTURE = 'optimal.png'
SIZE, FLOPS = 'parameters', 'flops'  # columns of `scaling collect`
_BEYOND = 4.0  # budget of the predicted optimum over the largest one
_BUDGETS = 2  # least number of budgets of a study


def find_study(
    table: Sequence[rows.Row], y: str, bootstrap: int
) -> tuple[Analysis, Columns] | None:
    """Analyze the runs of `collect` if they share budgets; None if they do not.

    Args:
      table: Rows of `collect`.
      y: Column of the loss, see `scaling optimal --y`.
      bootstrap: Replicates for the bands.
    """
    if not all(name in table[0] for name in (SIZE, FLOPS)):
        return None
    usable = [row for row in table if row[SIZE] and row[FLOPS] and row.get(y.removeprefix('1-'))]
    if not usable:
        return None
    columns = Columns(SIZE, None, FLOPS, y)
    (runs,) = points.read(table, columns)
    if len(isoflop.budgets(runs.n, runs.c)) < _BUDGETS:
        return None
    return analyze(runs, AnalysisOptions(_BEYOND * float(runs.c.max()), 0.0, bootstrap)), columns


def optimal_blocks(analysis: Analysis, columns: Columns) -> list[Block]:
    """Write the section on optimal sizes."""
    laws_by_method = {name: law for name, law in analysis.summary.items() if law is not None}
    blocks: list[Block] = [Heading('Optimal sizes'), Picture(PICTURE, 'optimal sizes')]
    if laws_by_method:
        target = next(iter(laws_by_method.values()))['target']['C']
        blocks += [
            _tabulate_methods(laws_by_method),
            Text(
                f'N* ~ C^a, D* ~ C^b; N*, D* and the loss at {target:.3g} FLOPs, {_BEYOND:g} times '
                'the largest budget. In brackets is the 90 % band, from a bootstrap with a drift '
                'beyond the runs. '
                + (f'`{analysis.shown}` is shown. ' if analysis.shown else '')
                + f'Published slopes: {_list_published()}, language models. '
                + f'{analysis.points.cost.text}. {points.describe_conventions(columns)}'
            ),
        ]
    else:
        blocks.append(
            Text(
                'None of the methods gives a law of the optimum; the lines below give the reasons.'
            )
        )
    if lines := list(dict.fromkeys((*analysis.notes, *analysis.points.left_out))):
        blocks.append(Lines(lines))
    return [*blocks, Heading('Residuals', 3), _tabulate_residuals(analysis, columns)]


def _list_published() -> str:
    return ', '.join(f'{name} {slope:.2f}' for name, slope in plots_optimal.PUBLISHED.items())


def _tabulate_methods(laws_by_method: Mapping[str, Mapping[str, Any]]) -> TableBlock:
    lines = [['method', 'a', 'b', 'N*', 'D*', 'loss']]
    for name, law in laws_by_method.items():
        cells = [_format_value(law, key) for key in 'ab']
        cells += [_format_value(law['target'], key) for key in ('N', 'D', 'loss')]
        lines.append([name, *cells])
    return TableBlock(lines)


def _format_value(law: Mapping[str, Any], name: str) -> str:
    """Format a value with its band; a dash if it is missing or not identified."""
    if law.get(name) is None:
        return '-'
    if name not in law['bands']:
        return f'{law[name]:.4g}'
    low, high = law['bands'][name]
    return f'{law[name]:.4g} [{low:.3g}, {high:.3g}]'


def _tabulate_residuals(analysis: Analysis, columns: Columns) -> TableBlock:
    """Tabulate the relative errors of the parabolas and the joint law at each run of a budget."""
    runs, errors = analysis.points, plots_optimal.residuals(analysis)
    lines = [['C', 'N', columns.y, *(f'error of the {name}' for name in errors)]]
    for i in np.concatenate(isoflop.budgets(runs.n, runs.c)):
        cells = [
            f'{100 * error[i]:+.2f} %' if np.isfinite(error[i]) else '-'
            for error in errors.values()
        ]
        lines.append([f'{runs.c[i]:.3g}', rows.short(runs.n[i]), f'{runs.y[i]:.4g}', *cells])
    return TableBlock(lines)
