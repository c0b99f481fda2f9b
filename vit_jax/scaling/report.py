"""The report of a study: fits, their uncertainty, extrapolation errors, and a manifest."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from vit_jax.scaling import coverage, manifest, page
from vit_jax.scaling.rows import label

BESIDE = (0.5, 0.75, 0.875)  # shares held out whose errors stand side by side: 2x, 4x, 8x
PICTURE = 'scaling.png'


def blocks(
    summary: Mapping[str, Any],
    entries: Sequence[manifest.Entry],
    skipped: Sequence[str] = (),
    unfinished: Sequence[str] = (),
) -> list[page.Block]:
    """The page about the fits of `summary.summarize`.

    Args:
      summary: of the curves.
      entries: of the runs that were fitted.
      skipped: a line for each finished run that could not be fitted.
      unfinished: names of the runs that are not finished.
    """
    left_out = f', {len(unfinished)} left out as not finished' if unfinished else ''
    found: list[page.Block] = [
        page.Heading(f'{summary["y"]} over {", ".join(summary["x"])}', 1),
        page.Text(
            f'{len(entries)} runs{left_out}; {len(summary["curves"])} curves of the form '
            f'`{summary["formula"]}`.'
        ),
        page.Picture(PICTURE, 'curves'),
        _table(summary),
        page.Text(_held_out(summary)),
    ]
    banded = [curve for curve in summary['curves'] if curve.get('bands')]
    if banded := ['auto' if 'forms' in curve else curve['form'] for curve in banded]:
        found.append(page.Text(_banded(banded)))
    reasons = [*skipped, *(f'{name}: not finished' for name in unfinished)]
    if reasons:
        found += [page.Heading('Runs left out'), page.Lines(reasons)]
    found += [page.Text(line) for line in _seeds(summary)]
    if doubts := _doubts(summary):
        found += [page.Heading('Limits of the data'), page.Lines(doubts)]
    return [*found, *_manifest(entries)]


def _manifest(entries: Sequence[manifest.Entry]) -> list[page.Block]:
    found: list[page.Block] = [page.Heading('Manifest')]
    if doubts := manifest.doubts(entries):
        found.append(page.Lines(doubts))
    versions = ', '.join(f'{name} {version}' for name, version in manifest.versions().items())
    return [
        *found,
        page.Table(manifest.table(entries)),
        page.Text(f'Fitted with {versions}.'),
    ]


def _held_out(summary: Mapping[str, Any]) -> str:
    median = summary['median_holdout_rmse']
    end = ', of which there are none' if median is None else f'; its median is {median:.4f}'
    return (
        'Error held out is the root mean square of log(predicted) - log(measured) on points that '
        f'were not fitted to{end}. Columns 2x, 4x and 8x have it for fits to x up to a half, a '
        'quarter and an eighth of the largest.'
    )


def _banded(forms: Sequence[str]) -> str:
    return (
        'In brackets is the 90 % band, from a moving-block bootstrap. It shows the noise of the '
        'points, not whether the form is the right one: that is what the error held out is '
        f'for. Measured coverage: {coverage.caveat(forms)} (`scaling coverage`).'
    )


def _seeds(summary: Mapping[str, Any]) -> list[str]:
    """A sentence on the noise between seeds for each curve that has several."""
    return [
        f'{label(curve["by"])}: {seeds["runs"]} runs at {seeds["points"]} points, '
        f'{seeds["repeated"]} of them with several seeds, whose standard deviation is '
        f'{100 * seeds["noise"]:.2g} % of {summary["y"]}. Their geometric means are fitted, '
        'weighted by the number of runs; the noise of the bands is that between seeds together '
        'with the errors of the fit.'
        for curve in summary['curves']
        if (seeds := curve.get('seeds'))
    ]


def _doubts(summary: Mapping[str, Any]) -> list[str]:
    return [
        f'{label(curve["by"])}: {warning}'
        for curve in summary['curves']
        for warning in (*curve['notes'], *curve['warnings'])
    ]


def _table(summary: Mapping[str, Any]) -> page.Block:
    fitted = [curve for curve in summary['curves'] if curve['params']]
    if not fitted:
        return page.Text('No curve has points enough to be fitted.')
    names = list(dict.fromkeys(name for curve in fitted for name in curve['params']))
    rows = [['curve', 'points', 'form', *names, 'error held out', *fitted[0]['beside']]]
    for curve in fitted:
        cells = [_cell(curve, name) for name in names]
        errors = [curve['holdout_rmse'], *curve['beside'].values()]
        shown = ['-' if error is None else f'{error:.4f}' for error in errors]
        rows.append([label(curve['by']), str(curve['n_fit']), _form(curve), *cells, *shown])
    return page.Table(rows)


def _form(curve: Mapping[str, Any]) -> str:
    """The form; of a mean, each with its weight and the inner error that gave it."""
    if 'forms' not in curve:
        return str(curve['form'])
    return ', '.join(
        f'{name} {part["weight"]:.2f} (inner error {part["inner_rmse"]:.4f})'
        for name, part in curve['forms'].items()
    )


def _cell(curve: Mapping[str, Any], name: str) -> str:
    if name not in curve['params']:
        return '-'
    value = f'{curve["params"][name]:.4g}'
    if name not in curve['bands']:
        return value
    low, high = curve['bands'][name]
    return f'{value} [{low:.3g}, {high:.3g}]'
