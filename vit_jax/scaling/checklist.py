"""Checklist of a study: what a reader needs to repeat its runs and its fit.

The questions come from (Mis)Fitting (Li et al. 2025, arXiv:2502.18969).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from vit_jax.runtime import environment
from vit_jax.scaling import averaging, curve_fit, points
from vit_jax.scaling.curve_fit import Fit
from vit_jax.scaling.manifest import Entry
from vit_jax.scaling.rows import short
from vit_jax.scaling.table import Curve, FitOptions

UNKNOWN = 'not recorded'
_LISTED = 4  # most values that are listed rather than counted


def tabulate(
    entries: Sequence[Entry],
    curves: Sequence[Curve],
    options: FitOptions,
    law: Fit | None = None,
    left_out: int = 0,
) -> list[list[str]]:
    """Tabulate the answers: headings, then a row for each question.

    Args:
      entries: Manifest entries of the fitted runs.
      curves: Fitted curves.
      options: Options of the fit.
      law: Joint law of a study at equal compute.
      left_out: Number of runs that were not fitted.
    """
    fits = [*_list_fits(curves), *([law] if law else [])]
    answers = {
        'data': _describe_data(entries),
        'N': points.COUNTED['parameters'],
        'FLOPs': points.COUNTED['flops'],
        'schedule': _describe_schedule(entries),
        'learning rate': _list_values(entries, 'lr'),
        'batch': _describe_batch(entries),
        'optimizer': _list_values(entries, 'optimizer'),
        'weight decay': _list_values(entries, 'weight_decay'),
        'parametrization': _list_values(entries, 'parametrization'),
        'precision': _list_values(entries, 'dtype'),
        'seeds': _list_values(entries, 'seed'),
        'runs': f'{len(entries)} fitted, {left_out} left out',
        'y': options.y,
        'form': ', '.join(dict.fromkeys(fit.form.formula for fit in fits)) or '-',
        'objective': f'Huber loss of the error of log y, delta {curve_fit.DELTA:g}, by L-BFGS-B',
        'starts': ', '.join(dict.fromkeys(map(_describe_starts, fits))) or '-',
        'bootstrap': f'{options.bootstrap} replicates, seed 0, for 90 % bands',
        'commit of the runs': _list_values(entries, 'commit'),
        'commit of the fit': environment.commit() or UNKNOWN,
    }
    return [['question', 'answer'], *(list(pair) for pair in answers.items())]


def _list_fits(curves: Sequence[Curve]) -> list[Fit]:
    """List the fits of all curves; for a mean, the fits of its forms."""
    fits: list[Fit] = []
    for curve in curves:
        if isinstance(curve.fit, averaging.MeanFit):
            fits += [part.fit for part in curve.fit.parts]
        elif curve.fit is not None:
            fits.append(curve.fit)
    return fits


def _describe_starts(fit: Fit) -> str:
    if fit.form.solve or fit.points is None:
        return f'{fit.form.name}: its own estimator'
    starts = fit.form.starts(fit.points.x, np.exp(fit.points.log_y))
    return f'{fit.form.name}: {len(starts)}'


def _describe_data(entries: Sequence[Entry]) -> str:
    examples = _list_values(entries, 'data_size')
    text = f'{_list_values(entries, "data")}; examples: {examples}'
    epochs = [entry['epochs'] for entry in entries if entry['epochs'] is not None]
    return f'{text}; epochs: {_format_range(epochs)}' if epochs else text


def _describe_schedule(entries: Sequence[Entry]) -> str:
    parts = [_list_values(entries, 'schedule')]
    for key, noun in (('warmup', 'warm-up'), ('cooldown', 'cooldown')):
        if any(entry[key] for entry in entries):
            parts.append(f'{noun} {_list_values(entries, key)}')
    return '; '.join(parts)


def _describe_batch(entries: Sequence[Entry]) -> str:
    """Describe the batch sizes, and whether they follow the FLOPs of a run."""
    sizes = [entry['batch_size'] for entry in entries if entry['batch_size'] is not None]
    if not sizes:
        return UNKNOWN
    if len(set(sizes)) == 1:
        return f'{sizes[0]} for every run'
    pairs = [(e['flops'], e['batch_size']) for e in entries if e['flops'] and e['batch_size']]
    by_cost = [size for _, size in sorted(pairs)]
    rule = 'grows with the FLOPs of a run' if by_cost == sorted(by_cost) else 'no rule in FLOPs'
    return f'{_format_range(sizes)}; {rule}'


def _list_values(entries: Iterable[Mapping[str, Any]], key: str) -> str:
    """List the different values, or the range of many numbers."""
    values = {
        value if isinstance(value, (int, float)) else str(value)
        for value in (entry[key] for entry in entries)
        if value is not None
    }
    if not values:
        return UNKNOWN
    numbers = [value for value in values if isinstance(value, (int, float))]
    if len(numbers) == len(values) > _LISTED:
        return _format_range(numbers)
    texts = [_format(value) for value in sorted(values, key=lambda v: (str(type(v)), v))]
    more = f' and {len(texts) - _LISTED} more' if len(texts) > _LISTED else ''
    return ', '.join(texts[:_LISTED]) + more


def _format_range(values: Sequence[float]) -> str:
    low, high = _format(min(values)), _format(max(values))
    return low if low == high else f'{low} to {high}'


def _format(value: Any) -> str:
    if isinstance(value, int) and value >= 10_000:
        return short(value)
    return f'{value:.4g}' if isinstance(value, float) else str(value)
