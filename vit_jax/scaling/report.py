"""scaling.md: the fits, their uncertainty, and their extrapolation errors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from vit_jax.scaling import coverage
from vit_jax.scaling.rows import label


def markdown(
    summary: Mapping[str, Any], n_taken: int, n_runs: int, skipped: Sequence[str] = ()
) -> str:
    """A Markdown page about the fits of `table.summary`, with the picture in the same folder.

    Args:
      summary: of the curves.
      n_taken: number of runs to be fitted.
      n_runs: number of all runs; the others are not finished.
      skipped: a line for each of the `n_taken` runs that could not be fitted.
    """
    left_out = f', {n_runs - n_taken} left out as not finished' if n_taken < n_runs else ''
    median = summary['median_holdout_rmse']
    doubts = [
        f'- {label(curve["by"])}: {warning}'
        for curve in summary['curves']
        for warning in curve['warnings']
    ]
    parts = [
        f'# {summary["y"]} over {", ".join(summary["x"])}',
        f'{n_taken - len(skipped)} runs{left_out}; {len(summary["curves"])} curves of the form '
        f'`{summary["formula"]}`.',
        '![curves](scaling.png)',
        _table(summary),
        'Error held out is the root mean square of log(predicted) - log(measured) on points that '
        'were not fitted to'
        + (
            f'; its median is {median:.4f}.' if median is not None else ', of which there are none.'
        ),
    ]
    if banded := [curve['form'] for curve in summary['curves'] if curve.get('bands')]:
        parts.append(
            'In brackets is the 90 % band of a moving-block bootstrap. It shows the noise of the '
            'points, not whether the form is the right one: that is what the error held out is '
            f'for. Measured coverage: {coverage.caveat(banded)} (`scaling coverage`).'
        )
    if skipped:
        parts += ['## Runs left out', '\n'.join(f'- {line}' for line in skipped)]
    if doubts:
        parts += ['## Limits of the data', '\n'.join(doubts)]
    return '\n\n'.join(parts) + '\n'


def _table(summary: Mapping[str, Any]) -> str:
    fitted = [curve for curve in summary['curves'] if curve['params']]
    if not fitted:
        return 'No curve has points enough to be fitted.'
    names = max((list(curve['params']) for curve in fitted), key=len)
    lines = [['curve', 'points', *names, 'error held out']]
    lines.append(['---'] * len(lines[0]))
    for curve in fitted:
        error = curve['holdout_rmse']
        cells = [_cell(curve, name) for name in names]
        shown = '-' if error is None else f'{error:.4f}'
        lines.append([label(curve['by']), str(curve['n_fit']), *cells, shown])
    return '\n'.join(f'| {" | ".join(line)} |' for line in lines)


def _cell(curve: Mapping[str, Any], name: str) -> str:
    if name not in curve['params']:
        return '-'
    value = f'{curve["params"][name]:.4g}'
    if name not in curve['bands']:
        return value
    low, high = curve['bands'][name]
    return f'{value} [{low:.3g}, {high:.3g}]'
