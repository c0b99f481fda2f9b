"""Curves and their fits as JSON values."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from vit_jax.scaling import choice, forms
from vit_jax.scaling import fit as fit_lib
from vit_jax.scaling.table import Curve, FitOptions


def summarize(curves: Sequence[Curve], options: FitOptions) -> dict[str, Any]:
    """All curves and their median extrapolation error as JSON values."""
    auto = options.form == choice.AUTO
    compared = list(dict.fromkeys(name for curve in curves for name in curve.against))
    return {
        'x': list(options.x),
        'y': options.y,
        'form': options.form,
        'formula': choice.FORMULA if auto else forms.find(options.form).formula,
        'curves': [_curve_summary(curve) for curve in curves],
        'median_holdout_rmse': _median([curve.holdout_rmse for curve in curves]),
        'against': {name: _comparison(curves, name) for name in compared},
        'beside': {
            f'{1 / (1 - share):g}x': _median([curve.beside.get(share) for curve in curves])
            for share in options.beside
        },
    }


def _curve_summary(curve: Curve) -> dict[str, Any]:
    result: dict[str, Any] = {'by': curve.by, 'n_holdout': int((~curve.kept).sum())}
    if curve.fit is None:
        result |= {'params': None, 'identified': False, 'warnings': [curve.problem]}
    else:
        result |= fit_lib.summary(curve.fit)
    if isinstance(curve.fit, choice.MeanFit):
        result['forms'] = {
            part.fit.form.name: {'weight': part.weight, 'inner_rmse': part.inner_rmse}
            for part in curve.fit.parts
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
    """The other form's median error, and on how many curves this form extrapolates better."""
    pairs = [(c.holdout_rmse, c.against[name]) for c in curves]
    both = [(ours, other) for ours, other in pairs if ours is not None and other is not None]
    better = sum(ours < other for ours, other in both)
    return {
        'median_holdout_rmse': _median([other for _, other in pairs]),
        'better_on': better,
        'of': len(both),
    }


def _median(values: Sequence[float | None]) -> float | None:
    known = [v for v in values if v is not None]
    return float(np.median(known)) if known else None
