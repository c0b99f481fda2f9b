"""Runs on repeated data: the value of repeats, and the losses that new data would give."""

from __future__ import annotations

import dataclasses

import numpy as np

from vit_jax.errors import UserError
from vit_jax.scaling import curve_fit, forms
from vit_jax.scaling.curve_fit import Fit
from vit_jax.scaling.points import Points

EPOCHS = 4.0  # repeats up to this are nearly as good as new (Muennighoff et al. 2023, section 5)
_VARIED = 1.5  # least ratio of unique data at equal D for which their effect can be fitted
_MORE = 3  # least number of runs in excess of the law's parameters


def convert_to_new_data(runs: Points, bootstrap: int) -> tuple[Points, Fit | None, list[str]]:
    """Convert the losses of runs on repeated data to losses on as much new data.

    The data-constrained law of Muennighoff et al. 2023 is fitted where unique data vary; losses are
    multiplied by its ratio between new and repeated data.

    Returns:
      Runs, the law if it was used, and lines on repeats.
    """
    epochs = runs.d / runs.unique
    largest = float(epochs.max())
    if largest <= 1.01:
        return runs, None, []
    law, reason = _fit(runs, bootstrap)
    repeated = f'data were repeated up to {largest:,.4g} times'
    if law is None:
        if largest <= EPOCHS:
            return runs, None, []
        return runs, None, [f'{repeated} but count as new: {reason}']
    fresh = law.predict(np.stack([runs.n, runs.d, runs.d], axis=1))
    moved = runs.y * fresh / law.predict(_columns(runs))
    values = ', '.join(_format_param(law, name) for name in ('R_D', 'R_N'))
    line = f'{repeated}: losses are converted to new data by the law of repeats, {values}'
    return dataclasses.replace(runs, y=moved, unique=runs.d), law, [line]


def _fit(runs: Points, bootstrap: int) -> tuple[Fit | None, str]:
    """Fit the law of repeats; None and the reason if it cannot be fitted."""
    form = forms.find_form('repeated')
    unique = np.log(runs.unique)
    design = np.stack([np.ones_like(unique), np.log(runs.n), np.log(runs.d)], axis=1)
    residuals = unique - design @ np.linalg.lstsq(design, unique, rcond=None)[0]
    if np.ptp(residuals) < np.log(_VARIED):
        return (
            None,
            'all runs have the same amount of unique data; run some on smaller or larger shares',
        )
    if len(runs.y) < len(form.names) + _MORE:
        return None, f'{len(runs.y)} runs for a law of {len(form.names)} parameters'
    try:
        law = curve_fit.fit(
            form, _columns(runs), runs.y, bootstrap=min(bootstrap, 20), seeds=runs.seeds
        )
    except UserError as e:
        return None, str(e)
    if 'R_D' in law.unidentified:
        return None, 'the runs do not determine the value of a repeat'
    return law, ''


def _columns(runs: Points) -> np.ndarray:
    return np.stack([runs.n, runs.d, runs.unique], axis=1)


def _format_param(law: Fit, name: str) -> str:
    value = law.identified_params[name]
    if value is None:
        return f'{name} not identified'
    low, high = law.bands.get(name, (value, value))
    return f'{name} = {value:.3g} [{low:.3g}, {high:.3g}]'
