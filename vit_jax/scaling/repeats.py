"""Runs on repeated data: how much repeats were worth, and the losses that new data would give."""

from __future__ import annotations

import dataclasses

import numpy as np

from vit_jax.errors import UserError
from vit_jax.scaling import curve_fit, forms
from vit_jax.scaling.curve_fit import Fit
from vit_jax.scaling.points import Points

EPOCHS = 4.0  # Muennighoff et al. 2023, section 5: up to this, repeats are nearly as good as new
_VARIED = 1.5  # ratio of unique data at equal D from which their effect can be fitted
_MORE = 3  # runs beyond the number of parameters that the law needs


def to_new_data(seen: Points, bootstrap: int) -> tuple[Points, Fit | None, list[str]]:
    """Move the losses of runs on repeated data to those of as much new data.

    The data-constrained law of Muennighoff et al. 2023 is fitted where unique data vary; losses are
    multiplied by its ratio between new and repeated data.

    Returns:
      The runs, the law if it was used, and lines on repeats.
    """
    epochs = seen.d / seen.unique
    most = float(epochs.max())
    if most <= 1.01:
        return seen, None, []
    law, reason = _fit(seen, bootstrap)
    repeated = f'data were repeated up to {most:,.4g} times'
    if law is None:
        if most <= EPOCHS:
            return seen, None, []
        return seen, None, [f'{repeated} and count as new here, which they are not: {reason}']
    fresh = law.predict(np.stack([seen.n, seen.d, seen.d], axis=1))
    moved = seen.y * fresh / law.predict(_columns(seen))
    values = ', '.join(_words(law, name) for name in ('R_D', 'R_N'))
    line = f'{repeated}: losses are moved to those of new data by the law of repeats, {values}'
    return dataclasses.replace(seen, y=moved, unique=seen.d), law, [line]


def _fit(seen: Points, bootstrap: int) -> tuple[Fit | None, str]:
    """The law of repeats, or None and the reason."""
    form = forms.find('repeated')
    unique = np.log(seen.unique)
    design = np.stack([np.ones_like(unique), np.log(seen.n), np.log(seen.d)], axis=1)
    rest = unique - design @ np.linalg.lstsq(design, unique, rcond=None)[0]
    if np.ptp(rest) < np.log(_VARIED):
        return None, 'all runs share one amount of unique data; run smaller or larger shares of it'
    if len(seen.y) < len(form.names) + _MORE:
        return None, f'{len(seen.y)} runs for a law of {len(form.names)} parameters'
    try:
        law = curve_fit.fit(
            form, _columns(seen), seen.y, bootstrap=min(bootstrap, 20), seeds=seen.seeds
        )
    except UserError as e:
        return None, str(e)
    if 'R_D' in law.unidentified:
        return None, 'the runs do not determine what a repeat is worth'
    return law, ''


def _columns(seen: Points) -> np.ndarray:
    return np.stack([seen.n, seen.d, seen.unique], axis=1)


def _words(law: Fit, name: str) -> str:
    value = law.known[name]
    if value is None:
        return f'{name} not identified'
    low, high = law.bands.get(name, (value, value))
    return f'{name} = {value:.3g} [{low:.3g}, {high:.3g}]'
