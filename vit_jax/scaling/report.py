"""Report of a study: fits, their uncertainty, extrapolation errors, and a manifest.

Pages are lists of blocks of `pages`.
"""

from __future__ import annotations

import collections
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from vit_jax.scaling import averaging, coverage, curve_fit, forms, manifest
from vit_jax.scaling.pages import Block, Heading, Lines, Picture, TableBlock, Text
from vit_jax.scaling.parallel import map_items
from vit_jax.scaling.rows import join_labels, label
from vit_jax.scaling.table import Curve, FitOptions, predict_at

HOLDOUT_SHARES = (
    0.5,
    0.75,
    0.875,
)  # shares to hold out, with one column of errors each: 2x, 4x, 8x
PICTURE = 'scaling.png'
_CHECKLIST = 'What a reader needs to repeat the study, after (Mis)Fitting (arXiv:2502.18969).'


def summarize(curves: Sequence[Curve], options: FitOptions, workers: int = 1) -> dict[str, Any]:
    """Convert curves and their median extrapolation error to JSON values, by several processes."""
    auto = options.form == averaging.AUTO
    compared = list(dict.fromkeys(name for curve in curves for name in curve.against))
    verdicts = map_items(coverage.holds_last, curves, 'bands', workers)
    holds = [verdict for verdict in verdicts if verdict is not None]
    return {
        'x': list(options.x),
        'y': options.y,
        'form': options.form,
        'formula': averaging.FORMULA if auto else forms.find_form(options.form).formula,
        'curves': [_curve_summary(curve, options) for curve in curves],
        'median_holdout_rmse': _median([curve.holdout_rmse for curve in curves]),
        'bands_hold_last': {'held': sum(holds), 'of': len(holds)},
        'against': {name: _comparison(curves, name) for name in compared},
        'beside': {
            f'{1 / (1 - share):g}x': _median([curve.beside.get(share) for curve in curves])
            for share in options.beside
        },
    }


def _curve_summary(curve: Curve, options: FitOptions) -> dict[str, Any]:
    result: dict[str, Any] = {'by': curve.by, 'n_holdout': int((~curve.fit_mask).sum())}
    if options.target is not None:
        result['target'], reason = predict_at(curve, options.target)
        result['target_problem'] = reason
    if curve.fit is None:
        result |= {'params': None, 'identified': False, 'warnings': [curve.problem]}
    else:
        result |= curve_fit.summarize(curve.fit)
    if isinstance(curve.fit, averaging.MeanFit):
        result['forms'] = {
            part.fit.form.name: {'weight': part.weight, 'inner_rmse': part.inner_rmse}
            for part in curve.fit.parts
        }
        result['late'] = {
            'share': curve.fit.late_share,
            'text': curve.fit.late_text,
            'laws': [
                {
                    'form': part.fit.form.name,
                    'span': part.span,
                    'weight': part.weight,
                    'inner_rmse': part.inner_rmse,
                }
                for part in curve.fit.late
            ],
        }
    if curve.seeds.several:
        result['seeds'] = {
            'runs': int(curve.seeds.counts.sum()),
            'points': len(curve.seeds.counts),
            'repeated': int((curve.seeds.counts > 1).sum()),
            'noise': curve.seeds.noise,
        }
    beside = {f'{1 / (1 - share):g}x': error for share, error in curve.beside.items()}
    return result | {
        'holdout_rmse': curve.holdout_rmse,
        'against': curve.against,
        'beside': beside,
        'notes': list(curve.notes),
    }


def _comparison(curves: Sequence[Curve], name: str) -> dict[str, Any]:
    """Compare with another form: its median error, and the number of curves where it is worse."""
    pairs = [(c.holdout_rmse, c.against[name]) for c in curves]
    measured = [(error, other) for error, other in pairs if error is not None and other is not None]
    better = sum(error < other for error, other in measured)
    return {
        'median_holdout_rmse': _median([other for _, other in pairs]),
        'better_on': better,
        'of': len(measured),
    }


def _median(values: Sequence[float | None]) -> float | None:
    numbers = [v for v in values if v is not None]
    return float(np.median(numbers)) if numbers else None


def report_blocks(
    summary: Mapping[str, Any],
    entries: Sequence[manifest.Entry],
    skipped: Sequence[str] = (),
    unfinished: Sequence[str] = (),
    law: Sequence[Block] = (),
    checklist: Sequence[Sequence[str]] = (),
) -> list[Block]:
    """Write the report on the fits of `summarize`.

    Args:
      summary: Summary of the curves.
      entries: Manifest entries of the fitted runs.
      skipped: A line for each finished run that could not be fitted.
      unfinished: Names of unfinished runs.
      law: Blocks on the law of a study at equal compute.
      checklist: Table of `checklist.tabulate`.
    """
    left_out = f', {len(unfinished)} left out as not finished' if unfinished else ''
    blocks: list[Block] = [
        Heading(f'{summary["y"]} over {", ".join(summary["x"])}', 1),
        Text(f'{len(entries)} runs{left_out}; {describe_forms(summary)}.'),
        Picture(PICTURE, 'curves'),
        _table(summary),
        Text(_explain_errors(summary)),
    ]
    blocks += law
    banded = [curve for curve in summary['curves'] if curve.get('bands')]
    if banded:
        fitted = ['auto' if 'forms' in curve else curve['form'] for curve in banded]
        blocks.append(Text(_explain_bands(fitted)))
    reasons = [*skipped, *(f'{name}: not finished' for name in unfinished)]
    if reasons:
        blocks += [Heading('Runs left out'), Lines(reasons)]
    blocks += [Text(line) for line in _describe_seeds(summary)]
    if warnings := _diagnostics(summary):
        blocks += [Heading('Limits of the data'), Lines(warnings)]
    if checklist:
        blocks += [Heading('Checklist'), Text(_CHECKLIST), TableBlock(checklist)]
    return [*blocks, *_manifest(entries)]


def describe_forms(summary: Mapping[str, Any]) -> str:
    """Count the curves and the forms that were fitted: a mean may fall back to a simpler form."""
    used = collections.Counter(
        f'by {summary["formula"]}'
        if len(curve.get('forms', ())) > 1
        else f'of the form `{forms.find_form(curve["form"]).formula}`'
        for curve in summary['curves']
        if curve['params']
    )
    total = len(summary['curves'])
    start = f'{total} curve{"s" if total > 1 else ""}'
    if len(used) == 1 and used.total() == total:
        return f'{start} {next(iter(used))}'
    return ', '.join([start, *(f'{count} {form}' for form, count in used.items())])


def _table(summary: Mapping[str, Any]) -> Block:
    fitted = [curve for curve in summary['curves'] if curve['params']]
    if not fitted:
        return Text('No curve has enough points for a fit.')
    names = list(dict.fromkeys(name for curve in fitted for name in curve['params']))
    rows = [['curve', 'points', 'form', *names, 'error held out', *fitted[0]['beside']]]
    for curve in fitted:
        cells = [with_band(curve, name) for name in names]
        errors = [curve['holdout_rmse'], *curve['beside'].values()]
        shown = ['-' if error is None else f'{error:.4f}' for error in errors]
        rows.append([label(curve['by']), str(curve['n_fit']), _form(curve), *cells, *shown])
    return TableBlock(rows)


def _form(curve: Mapping[str, Any]) -> str:
    """Name the form; for a mean, each form with its weight and inner error."""
    if 'forms' not in curve:
        return str(curve['form'])
    texts = [
        f'{name} {part["weight"]:.2f} (inner error {part["inner_rmse"]:.4f})'
        for name, part in curve['forms'].items()
    ]
    return ', '.join([*texts, curve['late']['text']] if curve['late']['text'] else texts)


def with_band(curve: Mapping[str, Any], name: str) -> str:
    """Format a parameter of a curve of `summarize` and its interval; a dash if not identified."""
    if curve['params'].get(name) is None:
        return '-'
    value = f'{curve["params"][name]:.4g}'
    if name not in curve['bands']:
        return value
    low, high = curve['bands'][name]
    return f'{value} [{low:.3g}, {high:.3g}]'


def _explain_errors(summary: Mapping[str, Any]) -> str:
    median = summary['median_holdout_rmse']
    end = ' (there are none)' if median is None else f'; its median is {median:.4f}'
    return (
        'The laws are fitted to all points; a dash marks a parameter that they do not determine. '
        'Error held out is the root mean square of log(predicted) - log(measured) on held-out '
        f'points, for a fit without them{end}. Columns 2x, 4x and 8x show it for fits to x up to a '
        'half, a quarter and an eighth of the largest x.'
    )


def _explain_bands(forms: Sequence[str]) -> str:
    return (
        'In brackets is the 90 % band, from a moving-block bootstrap. It shows the noise of the '
        'points, not whether the form is right; the error held out shows that. '
        f'Measured coverage: {coverage.caveat(forms)} (`scaling coverage`).'
    )


def _describe_seeds(summary: Mapping[str, Any]) -> list[str]:
    """Describe the noise between seeds of each curve that has several."""
    return [
        f'{label(curve["by"])}: {seeds["runs"]} runs at {seeds["points"]} points, '
        f'{seeds["repeated"]} of them with several seeds, whose standard deviation is '
        f'{100 * seeds["noise"]:.2g} % of {summary["y"]}. Their geometric means are fitted, '
        'weighted by the number of runs; the bands include the noise between seeds and the errors '
        'of the fit.'
        for curve in summary['curves']
        if (seeds := curve.get('seeds'))
    ]


def _diagnostics(summary: Mapping[str, Any]) -> list[str]:
    return join_labels(
        (label(curve['by']), warning)
        for curve in summary['curves']
        for warning in (*curve['notes'], *curve['warnings'])
    )


def _manifest(entries: Sequence[manifest.Entry]) -> list[Block]:
    blocks: list[Block] = [Heading('Manifest')]
    if warnings := manifest.diagnostics(entries):
        blocks.append(Lines(warnings))
    versions = ', '.join(f'{name} {version}' for name, version in manifest.versions().items())
    return [
        *blocks,
        TableBlock(manifest.make_table(entries)),
        Text(f'Fitted with {versions}.'),
    ]
