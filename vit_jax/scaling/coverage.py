"""Coverage of bootstrap bands, measured on known laws that are sampled with noise and fitted."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

import numpy as np
from threadpoolctl import threadpool_limits

from vit_jax.errors import UserError
from vit_jax.scaling import fit as fit_lib
from vit_jax.scaling import forms

SPAN = 64.0  # ratio of the largest fitted x to the smallest
BEYOND = 4.0  # x of the extrapolation, over the largest fitted x
# 'fitted', 'beyond' and 'past a break' of `measure`, by
# `scaling coverage --points 8 --curves 60 --bootstrap 60 --form FORM`.
MEASURED = {
    'power': (0.71, 0.77, 0.00),
    'irreducible': (0.75, 0.75, 0.17),
    'shifted': (0.79, 0.90, 0.68),
    'm2': (0.70, 0.60, 0.00),
}
FORMS = tuple(MEASURED)


def caveat(fitted: Iterable[str]) -> str:
    """A sentence on the measured coverage of bands, for their readers.

    Args:
      fitted: names of the forms that have bands.
    """
    return '; '.join(map(_coverage, dict.fromkeys(fitted)))


def _coverage(form: str) -> str:
    if form not in MEASURED:
        return f'the coverage of bands of the form {form} is not known'
    on, beyond, broken = (f'{100 * share:.0f} %' for share in MEASURED[form])
    return (
        f'on known laws of the form {form}, bands of 90 % held {on} of the curve at its points, '
        f'{beyond} at {BEYOND:g} times the largest x, {broken} there past a break'
    )


@dataclasses.dataclass(frozen=True)
class Setting:
    """Parameters of the simulation.

    Attributes:
      form: of the law and of the fit.
      points: of a curve, their x in equal ratios over `SPAN`.
      noise: standard deviation of log y.
      curves: number of laws that are drawn.
      bootstrap: replicates of each fit.

    Raises:
      UserError: for a form from which no law is drawn, or a number that is too small.
    """

    form: str = forms.DEFAULT
    points: int = 12
    noise: float = 0.02
    curves: int = 100
    bootstrap: int = 100

    def __post_init__(self) -> None:
        if self.form not in FORMS:
            raise UserError(f'--form {self.form}: laws can be drawn of {", ".join(FORMS)}')
        least = {'points': len(forms.find(self.form).names), 'curves': 1, 'bootstrap': 1}
        for name, number in least.items():
            if getattr(self, name) < number:
                raise UserError(f'--{name} {getattr(self, name)}: must be at least {number}')
        if not 0 < self.noise < 1:
            raise UserError(f'--noise {self.noise}: must be more than 0 and less than 1')


def measure(setting: Setting, seed: int = 0) -> dict[str, float]:
    """The share of true values that lie in the bands.

    Returns:
      'fitted': of the curve, at the x of its points;
      'beyond': at `BEYOND` times the largest of them;
      'past a break': there, if the exponent halves after the last point;
      and one for each exponent and limit of the law.
    """
    rng = np.random.default_rng(seed)
    with threadpool_limits(1, user_api='blas'):
        found = [_one(setting, rng) for _ in range(setting.curves)]
    return {name: float(np.mean([one[name] for one in found])) for name in found[0]}


def _one(setting: Setting, rng: np.random.Generator) -> dict[str, float]:
    """Whether the bands of one curve contain its law, {name: share}."""
    form = forms.find(setting.form)
    x = np.geomspace(1.0, SPAN, setting.points)
    law = _draw(form, rng)
    y = value(law, x) * np.exp(setting.noise * rng.standard_normal(len(x)))
    seed = int(rng.integers(2**31))
    curve = fit_lib.fit(form, x, y, bootstrap=setting.bootstrap, seed=seed)
    far = np.array([BEYOND * SPAN])
    held = {
        'fitted': _held(curve, x, value(law, x)),
        'beyond': _held(curve, far, value(law, far)),
        'past a break': _held(curve, far, broken(law, far)),
    }
    bands = curve.bands
    return held | {
        name: float(bands[name][0] <= law[name] <= bands[name][1]) for name in form.interpreted
    }


def _draw(form: forms.Form, rng: np.random.Generator) -> dict[str, float]:
    """A random law with a typical exponent, and a limit that is a share of the last error."""
    law = {'a': 1.0, 'b': rng.uniform(0.2, 0.8), 'c': 0.0, 'd': 0.0}
    if 'd' in form.names:
        law['d'] = rng.uniform(0.0, 4.0)
    if 'c' in form.names:
        law['c'] = rng.uniform(0.1, 1.0) * float(value(law, np.array([SPAN]))[0])
    return law


def value(law: dict[str, float], x: np.ndarray) -> np.ndarray:
    """The law at `x`, without noise."""
    return law['a'] * (x + law['d']) ** -law['b'] + law['c']


def broken(law: dict[str, float], x: np.ndarray) -> np.ndarray:
    """The law with half its exponent after the last point."""
    reducible = law['a'] * (SPAN + law['d']) ** -law['b']
    ratio = (x + law['d']) / (SPAN + law['d'])
    return reducible * ratio ** (-law['b'] / 2) + law['c']


def _held(curve: fit_lib.Fit, x: np.ndarray, truth: np.ndarray) -> float:
    """The share of x [N] at which the truth [N] lies in the band."""
    band = curve.predict_band(x)
    assert band is not None
    return float(np.mean((band[0] <= truth) & (truth <= band[1])))
