"""Expected accuracy of fits: coverage of bands on synthetic laws, and errors of planned runs."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence

import numpy as np
from threadpoolctl import threadpool_limits

from vit_jax.errors import UserError
from vit_jax.scaling import averaging, curve_fit, forms
from vit_jax.scaling.table import Curve

BEYOND = 4.0  # x of an extrapolation over the largest fitted x
FAR = 10.0  # the same for a far extrapolation
LAST = 0.8  # share of the largest x from which points count as last
SPAN = 64.0  # ratio of the largest fitted x to the smallest
# Results of `measure` on laws of the fitted form, see docs/predictions.md: at the points, at
# `BEYOND` and `FAR` times the largest x, and at `BEYOND` past a break.
MEASURED = {
    'power': (0.92, 0.95, 0.93, 0.00),
    'irreducible': (0.91, 0.93, 0.93, 0.30),
    'shifted': (0.93, 0.95, 0.97, 0.82),
    'm2': (0.87, 0.80, 0.78, 0.12),
}
# For `auto` on published curves, at twice the largest x: bands that held the truth, and all bands.
MEASURED_REAL = {
    'image': (70, 72),
    'language model': (5, 5),
    'BIG-Bench': (10, 10),
    'translation': (5, 5),
}
# For `auto`, on draws of each of `LAWS`, at `BEYOND` and `FAR` times the largest x.
MEASURED_KINDS = {
    'power, 2 %': (0.96, 0.91),
    'irreducible, 2 %': (0.93, 0.92),
    'irreducible, 5 %': (0.91, 0.88),
    'shifted, 5 %': (0.94, 0.92),
    'm4, 2 %': (0.94, 0.93),
    'm4, 2 %, correlated': (0.95, 0.95),
    'shifted, 2 %, 40 correlated points': (0.94, 0.92),
    'irreducible, 2 %, kinked': (0.90, 0.88),
    'shifted, 1 %, wiggly': (0.93, 0.91),
    'irreducible, growing noise': (0.93, 0.93),
}
FORMS = (averaging.AUTO, *MEASURED)
DESIGN_EXPONENT = 0.35  # exponent of both laws
# {formula: (form, parameters for x in units of the largest x, where y is 1, number of fitted ones)}
DESIGN_LAWS = {
    'a x^-b': ('power', (0.0, DESIGN_EXPONENT, 0.0, 0.0), 2),
    'a x^-b + c': ('irreducible', (np.log(0.5), DESIGN_EXPONENT, 0.5, 0.0), 3),
}
MIN_SIZES = 4  # number of different x that a design needs


@dataclasses.dataclass(frozen=True)
class Simulation:
    """Parameters of the simulation.

    Attributes:
      form: Form of the law and of the fit.
      points: Number of points of a curve, at equal ratios over `SPAN`.
      noise: Standard deviation of log y.
      curves: Number of laws to draw.
      bootstrap: Replicates of each fit.

    Raises:
      UserError: The form cannot be drawn at random, or a number is too small.
    """

    form: str = 'shifted'
    points: int = 12
    noise: float = 0.02
    curves: int = 100
    bootstrap: int = 100

    def __post_init__(self) -> None:
        if self.form not in FORMS:
            raise UserError(
                f'--form {self.form}: cannot be simulated; choose one of {", ".join(FORMS)}'
            )
        least_points = 12 if self.form == averaging.AUTO else len(forms.find_form(self.form).names)
        least = {'points': least_points, 'curves': 1, 'bootstrap': 1}
        for name, number in least.items():
            if getattr(self, name) < number:
                raise UserError(f'--{name} {getattr(self, name)}: must be at least {number}')
        if not 0 < self.noise < 1:
            raise UserError(f'--noise {self.noise}: must be more than 0 and less than 1')


@dataclasses.dataclass(frozen=True)
class SyntheticLaw:
    """A law to simulate, with random parameters.

    Attributes:
      name: Name in tables.
      form: Form of the truth.
      noise: Standard deviation of log y.
      correlation: Correlation of the noise of neighboring points (AR(1)).
      points: Number of points; 0 for the simulation's number.
      kink: Largest change of the exponent among the points.
      wiggle: Amplitude of a sine of log x in log y, with a period of 1 to 3.
      growth: Noise of the last point over the noise of the first.
    """

    name: str
    form: str
    noise: float
    correlation: float = 0.0
    points: int = 0
    kink: float = 0.0
    wiggle: float = 0.0
    growth: float = 1.0


LAWS = (
    SyntheticLaw('power, 2 %', 'power', 0.02),
    SyntheticLaw('irreducible, 2 %', 'irreducible', 0.02),
    SyntheticLaw('irreducible, 5 %', 'irreducible', 0.05),
    SyntheticLaw('shifted, 5 %', 'shifted', 0.05),
    SyntheticLaw('m4, 2 %', 'm4', 0.02),
    SyntheticLaw('m4, 2 %, correlated', 'm4', 0.02, 0.6),
    SyntheticLaw('shifted, 2 %, 40 correlated points', 'shifted', 0.02, 0.9, 40),
    SyntheticLaw('irreducible, 2 %, kinked', 'irreducible', 0.02, points=20, kink=0.1),
    SyntheticLaw('shifted, 1 %, wiggly', 'shifted', 0.01, points=30, wiggle=0.02),
    SyntheticLaw('irreducible, growing noise', 'irreducible', 0.025, points=20, growth=5.0),
)


@dataclasses.dataclass(frozen=True)
class Design:
    """Planned runs for the fit of a law.

    Attributes:
      name: Name in tables.
      x: Different values of x [N], ascending.
      counts: Number [N] of seeds at each x.
      cost: Total cost in units of x.
      errors: {law: standard deviation of the log of its prediction}, in units of the standard
        deviation of log y of one run.
    """

    name: str
    x: np.ndarray
    counts: np.ndarray
    cost: float
    errors: dict[str, float]

    @property
    def runs(self) -> int:
        """Number of runs."""
        return int(self.counts.sum())


def caveat(fitted: Iterable[str]) -> str:
    """Describe the measured coverage of bands.

    Args:
      fitted: Names of the forms with bands, or `auto`.
    """
    return '; '.join(map(_describe_coverage, dict.fromkeys(fitted)))


def _describe_coverage(form: str) -> str:
    if form == averaging.AUTO:
        real = ', '.join(
            f'{coverage} of {of} {name}' for name, (coverage, of) in MEASURED_REAL.items()
        )
        shares = [100 * share for share, _ in MEASURED_KINDS.values()]
        return (
            f'bands of 90 % held {real} curves at twice the largest x, and {np.mean(shares):.0f} % '
            f'of synthetic laws at {BEYOND:g} times ({min(shares):.0f} to '
            f'{max(shares):.0f} % by kind of law); past a break they are useless'
        )
    if form not in MEASURED:
        return f'the coverage of the bands of {form} has not been measured'
    on, beyond, far, broken = (f'{100 * share:.0f} %' for share in MEASURED[form])
    return (
        f'on known laws of the form {form}, bands of 90 % held {on} of the curve at its points, '
        f'{beyond} at {BEYOND:g} times the largest x, {far} at {FAR:g} times, {broken} past a break'
    )


def measure(setting: Simulation, seed: int = 0) -> dict[str, float]:
    """Measure the share of true values inside the bands.

    Returns:
      'fitted': the curve at its points;
      'beyond' and 'far': at `BEYOND` and `FAR` times the largest x;
      'past a break': at `BEYOND`, if the exponent halves after the last point;
      and each exponent and limit of the law. For `auto`, 'beyond' and 'far' of each of `LAWS`.
    """
    if setting.form == averaging.AUTO:
        return _measure_auto(setting, seed)
    rng = np.random.default_rng(seed)
    with threadpool_limits(1, user_api='blas'):
        curves = [_measure_one(setting, rng) for _ in range(setting.curves)]
    return {name: float(np.mean([shares[name] for shares in curves])) for name in curves[0]}


def _measure_one(setting: Simulation, rng: np.random.Generator) -> dict[str, float]:
    """Return whether the bands of one curve contain its law, {name: share}."""
    form = forms.find_form(setting.form)
    x = np.geomspace(1.0, SPAN, setting.points)
    law = _draw(form, rng)
    y = law_value(law, x) * np.exp(setting.noise * rng.standard_normal(len(x)))
    seed = int(rng.integers(2**31))
    curve = curve_fit.fit(form, x, y, bootstrap=setting.bootstrap, seed=seed)
    beyond, far = np.array([BEYOND * SPAN]), np.array([FAR * SPAN])
    shares = {
        'fitted': _covered_share(curve, x, law_value(law, x)),
        'beyond': _covered_share(curve, beyond, law_value(law, beyond)),
        'far': _covered_share(curve, far, law_value(law, far)),
        'past a break': _covered_share(curve, beyond, broken_law_value(law, beyond)),
    }
    bands = curve.bands
    return shares | {
        name: float(bands[name][0] <= law[name] <= bands[name][1]) for name in form.interpreted
    }


def _draw(form: forms.Form, rng: np.random.Generator) -> dict[str, float]:
    """Draw a law with a typical exponent, and a limit that is a share of the last error."""
    law = {'a': 1.0, 'b': rng.uniform(0.2, 0.8), 'c': 0.0, 'd': 0.0}
    if 'd' in form.names:
        law['d'] = rng.uniform(0.0, 4.0)
    if 'c' in form.names:
        law['c'] = rng.uniform(0.1, 1.0) * float(law_value(law, np.array([SPAN]))[0])
    return law


def law_value(law: dict[str, float], x: np.ndarray) -> np.ndarray:
    """Evaluate the law at `x`, without noise."""
    return law['a'] * (x + law['d']) ** -law['b'] + law['c']


def broken_law_value(law: dict[str, float], x: np.ndarray) -> np.ndarray:
    """Evaluate the law with half its exponent after the last point."""
    reducible = law['a'] * (SPAN + law['d']) ** -law['b']
    ratio = (x + law['d']) / (SPAN + law['d'])
    return reducible * ratio ** (-law['b'] / 2) + law['c']


def _measure_auto(setting: Simulation, seed: int) -> dict[str, float]:
    """Measure the shares for `auto`, on `setting.curves` curves of each synthetic law."""
    with threadpool_limits(1, user_api='blas'):
        is_inside = np.array([_simulate_each(setting, seed, i) for i in range(setting.curves)])
    shares: dict[str, float] = {}
    means = (
        np.ma.masked_invalid(is_inside).mean(axis=0).filled(np.nan)
    )  # NaN: a curve without a band
    for law, (beyond, far) in zip(LAWS, means, strict=True):
        shares |= {f'{law.name}: beyond': float(beyond), f'{law.name}: far': float(far)}
    return shares


def _simulate_each(setting: Simulation, seed: int, number: int) -> list[list[float]]:
    """Simulate one curve of each of `LAWS`; the result does not depend on the number of curves."""
    rng = np.random.default_rng([seed, number])
    return [_simulate(law, setting, rng) for law in LAWS]


def _simulate(law: SyntheticLaw, setting: Simulation, rng: np.random.Generator) -> list[float]:
    """Check whether the band contains the law at `BEYOND` and at `FAR`; NaN without a band."""
    x = np.geomspace(1.0, SPAN, law.points or setting.points)[:, None]
    truth = draw_curve(law, rng)
    y = np.exp(truth(x) + draw_noise(law, len(x), rng))
    curve = averaging.fit_average(x, y, bootstrap=setting.bootstrap, seed=int(rng.integers(2**31)))
    if not len(curve.replicates):
        return [np.nan] * 2
    ends = (np.array([[times * SPAN]]) for times in (BEYOND, FAR))
    return [_covered_share(curve, end, np.exp(truth(end))) for end in ends]


def draw_curve(law: SyntheticLaw, rng: np.random.Generator) -> Callable[[np.ndarray], np.ndarray]:
    """Draw the log of a law as a function of x [N, 1], with its kink or wiggle."""
    form, theta = forms.find_form(law.form), draw_law(law.form, rng)
    position, change = SPAN ** rng.uniform(0.3, 0.7), law.kink * rng.uniform(-1.0, 1.0)
    period, phase = rng.uniform(1.0, 3.0), rng.uniform(0.0, 2 * np.pi)

    def log_value(x: np.ndarray) -> np.ndarray:
        bent = change * np.maximum(np.log(x[:, 0] / position), 0.0)
        waves = law.wiggle * np.sin(2 * np.pi * np.log(x[:, 0]) / period + phase)
        return form.log_value(theta, x)[0] + bent + waves

    return log_value


def draw_law(form: str, rng: np.random.Generator) -> forms.Theta:
    """Draw the parameters of a law with typical exponents, for x from 1 to `SPAN`."""
    b = rng.uniform(0.2, 0.8)
    if form == 'm4':
        c, alpha = rng.uniform(0.1, 0.4), rng.uniform(0.3, 1.5)
        log_a = np.log(0.6 * (1 - c)) - alpha * np.log(0.4 * (1 - c))
        return np.array([log_a, b, c, 1.0, alpha])
    d = rng.uniform(0.0, 4.0) if form == 'shifted' else 0.0
    c = 0.0 if form == 'power' else rng.uniform(0.1, 1.0) * (SPAN + d) ** -b
    return np.array([0.0, b, c, d])


def draw_noise(law: SyntheticLaw, count: int, rng: np.random.Generator) -> np.ndarray:
    """Draw errors [N] of log y, correlated between neighbors, that grow with x."""
    errors = rng.standard_normal(count)
    for i in range(1, count):
        fresh = np.sqrt(1 - law.correlation**2) * errors[i]
        errors[i] = law.correlation * errors[i - 1] + fresh
    return law.noise * law.growth ** np.linspace(-0.5, 0.5, count) * errors


def holds_last(curve: Curve) -> bool | None:
    """Return whether the band of the fit without held-out points contains the last of these points.

    The mean of the points from 80 % of the largest x on counts, each moved along the fit to the
    largest x. None without a band.
    """
    if curve.tested is None or curve.tested.points is None or curve.x.shape[1] > 1:
        return None
    last = ~curve.fit_mask & (curve.x[:, 0] >= LAST * curve.x.max())
    largest = np.array([curve.x.max()])
    band = curve.tested.predict_band(largest) if last.any() else None
    if band is None:
        return None
    errors = np.log(curve.y[last] / curve.tested.predict(curve.x[last]))
    value = float(curve.tested.predict(largest)[0] * np.exp(errors.mean()))
    return bool(band[0][0] <= value <= band[1][0])


def _covered_share(curve: curve_fit.Fit, x: np.ndarray, truth: np.ndarray) -> float:
    """Compute the share of x [N] at which the band contains the truth [N]."""
    band = curve.predict_band(x)
    assert band is not None
    return float(np.mean((band[0] <= truth) & (truth <= band[1])))


def designs(flops: Sequence[float], seeds: int, target: float) -> list[Design]:
    """Compare the planned runs with alternatives.

    Choshen et al. 2024 (arXiv:2410.11840) find that seeds vary so much that several small models
    can predict better than one large model.

    Args:
      flops: FLOPs of each planned run.
      seeds: Number of seeds of repeated runs.
      target: FLOPs of the prediction.

    Returns:
      The runs as planned; with more seeds of each; with more seeds of the smaller half; and
      without the largest, with as many more seeds of the others as fit its cost. [] for too few
      sizes.
    """
    x, counts = np.unique(np.asarray(flops, float), return_counts=True)
    if len(x) < MIN_SIZES:
        return []
    small = np.arange(len(x)) < len(x) // 2
    plans = [('as planned', counts)]
    if seeds > 1:
        plans += [
            (f'{seeds} seeds of each', seeds * counts),
            (f'{seeds} seeds of the smaller half', np.where(small, seeds * counts, counts)),
        ]
    spare = counts[-1] * x[-1]
    smaller = np.append(counts[:-1], 0)
    times = 1 + int(spare // (smaller @ x))
    if len(x) > MIN_SIZES and times > 1:
        plans.append((f'without the largest, {times} seeds of the others', times * smaller))
    return [_design(name, x, seed_counts, target) for name, seed_counts in plans]


def _design(name: str, x: np.ndarray, counts: np.ndarray, target: float) -> Design:
    used = counts > 0
    errors = {
        law: prediction_error(law, x[used], counts[used], target, float(x[-1]))
        for law in DESIGN_LAWS
    }
    return Design(name, x[used], counts[used], float(counts @ x), errors)


def prediction_error(
    law: str, x: np.ndarray, counts: np.ndarray, target: float, largest: float
) -> float:
    """Standard deviation of the log of the prediction at a target, by linearization.

    Args:
      law: A key of `DESIGN_LAWS`.
      x: X [N] of the points.
      counts: Number [N] of runs at each point.
      target: X of the prediction.
      largest: X at which the law is 1.
    """
    form, theta, used = DESIGN_LAWS[law]
    slopes = [
        forms.find_form(form).log_value(np.array(theta), targets[:, None] / largest)[1][:, :used]
        for targets in (x, np.array([target]))
    ]
    information = slopes[0].T @ (counts[:, None] * slopes[0])
    return float(np.sqrt(slopes[1][0] @ np.linalg.solve(information, slopes[1][0])))
