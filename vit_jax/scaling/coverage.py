"""Expected accuracy of fits: coverage of bands on synthetic laws, and errors of planned runs."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence

import numpy as np
from threadpoolctl import threadpool_limits

from vit_jax.errors import UserError
from vit_jax.scaling import averaging, curve_fit, forms

BEYOND = 4.0  # extrapolation, in units of the largest fitted x
FAR = 10.0  # a farther one
SPAN = 64.0  # ratio of the largest fitted x to the smallest
# Results of `measure` on laws of the fitted form, see docs/predictions.md: at the points, at
# `BEYOND` and `FAR` times the largest x, and at `BEYOND` past a break.
MEASURED = {
    'power': (0.92, 0.95, 0.93, 0.00),
    'irreducible': (0.91, 0.93, 0.93, 0.30),
    'shifted': (0.93, 0.95, 0.97, 0.82),
    'm2': (0.87, 0.80, 0.78, 0.12),
}
# The same for `auto`, on 96 draws of `LAWS`, except past a break.
MEASURED_AUTO = (0.91, 0.93, 0.92)
FORMS = (averaging.AUTO, *MEASURED)
DESIGN_EXPONENT = 0.35  # of both laws
# Laws by formula: the form, its parameters for x in units of the largest, where y is 1, and the
# number of fitted parameters.
DESIGN_LAWS = {
    'a x^-b': ('power', (0.0, DESIGN_EXPONENT, 0.0, 0.0), 2),
    'a x^-b + c': ('irreducible', (np.log(0.5), DESIGN_EXPONENT, 0.5, 0.0), 3),
}
MIN_SIZES = 4  # number of different x that a design needs


@dataclasses.dataclass(frozen=True)
class Simulation:
    """Parameters of the simulation.

    Attributes:
      form: of the law and of the fit.
      points: number of points of a curve, at equal ratios over `SPAN`.
      noise: standard deviation of log y.
      curves: number of laws that are drawn.
      bootstrap: replicates of each fit.

    Raises:
      UserError: for a form of which no law can be drawn, or a number that is too small.
    """

    form: str = 'shifted'
    points: int = 12
    noise: float = 0.02
    curves: int = 100
    bootstrap: int = 100

    def __post_init__(self) -> None:
        if self.form not in FORMS:
            raise UserError(f'--form {self.form}: laws can be drawn of {", ".join(FORMS)}')
        known = 12 if self.form == averaging.AUTO else len(forms.find(self.form).names)
        least = {'points': known, 'curves': 1, 'bootstrap': 1}
        for name, number in least.items():
            if getattr(self, name) < number:
                raise UserError(f'--{name} {getattr(self, name)}: must be at least {number}')
        if not 0 < self.noise < 1:
            raise UserError(f'--noise {self.noise}: must be more than 0 and less than 1')


@dataclasses.dataclass(frozen=True)
class SyntheticLaw:
    """A law to simulate, with random parameters.

    Attributes:
      name: for tables.
      form: of the truth.
      noise: standard deviation of log y.
      correlation: of the noise of neighboring points (AR(1)).
      tuned: whether the width of bands was tuned on it.
    """

    name: str
    form: str
    noise: float
    correlation: float = 0.0
    tuned: bool = False


LAWS = (
    SyntheticLaw('power, 2 %', 'power', 0.02, tuned=True),
    SyntheticLaw('irreducible, 2 %', 'irreducible', 0.02),
    SyntheticLaw('irreducible, 5 %', 'irreducible', 0.05, tuned=True),
    SyntheticLaw('shifted, 2 %, correlated', 'shifted', 0.02, 0.6, tuned=True),
    SyntheticLaw('shifted, 5 %', 'shifted', 0.05),
    SyntheticLaw('m4, 2 %', 'm4', 0.02, tuned=True),
    SyntheticLaw('m4, 2 %, correlated', 'm4', 0.02, 0.6),
    SyntheticLaw('joint, 1 %', 'joint', 0.01),
)


@dataclasses.dataclass(frozen=True)
class Design:
    """Planned runs to which a law is to be fitted.

    Attributes:
      name: for tables.
      x: [N], different and ascending.
      counts: [N], number of seeds at each x.
      cost: in units of x.
      errors: {law: standard deviation of the log of its prediction}, in units of that of log y of
        one run.
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
    """A sentence on the measured coverage of bands.

    Args:
      fitted: names of the forms that have bands, or `auto`.
    """
    return '; '.join(map(_coverage, dict.fromkeys(fitted)))


def _coverage(form: str) -> str:
    if form == averaging.AUTO:
        on, beyond, far = (f'{100 * share:.0f} %' for share in MEASURED_AUTO)
        return (
            f'on synthetic laws of eight kinds, bands of 90 % held {beyond} at '
            f'{BEYOND:g} times the largest x and {far} at {FAR:g} times, {on} at the points; '
            'past a break they are useless'
        )
    if form not in MEASURED:
        return f'the coverage of bands of the form {form} is unknown'
    on, beyond, far, broken = (f'{100 * share:.0f} %' for share in MEASURED[form])
    return (
        f'on known laws of the form {form}, bands of 90 % held {on} of the curve at its points, '
        f'{beyond} at {BEYOND:g} times the largest x, {far} at {FAR:g} times, {broken} past a break'
    )


def measure(setting: Simulation, seed: int = 0) -> dict[str, float]:
    """The share of true values that lie in the bands.

    Returns:
      'fitted': of the curve at its points;
      'beyond' and 'far': at `BEYOND` and `FAR` times the largest of them;
      'past a break': at `BEYOND`, if the exponent halves after the last point;
      and each exponent and limit of the law. For `auto` instead of the last three, 'beyond' and
      'far' of each of `LAWS`, and of the laws on which bands were tuned and were not.
    """
    if setting.form == averaging.AUTO:
        return _measure_auto(setting, seed)
    rng = np.random.default_rng(seed)
    with threadpool_limits(1, user_api='blas'):
        found = [_measure_one(setting, rng) for _ in range(setting.curves)]
    return {name: float(np.mean([one[name] for one in found])) for name in found[0]}


def _measure_one(setting: Simulation, rng: np.random.Generator) -> dict[str, float]:
    """Whether the bands of one curve contain its law, {name: share}."""
    form = forms.find(setting.form)
    x = np.geomspace(1.0, SPAN, setting.points)
    law = _draw(form, rng)
    y = law_value(law, x) * np.exp(setting.noise * rng.standard_normal(len(x)))
    seed = int(rng.integers(2**31))
    curve = curve_fit.fit(form, x, y, bootstrap=setting.bootstrap, seed=seed)
    beyond, far = np.array([BEYOND * SPAN]), np.array([FAR * SPAN])
    held = {
        'fitted': _held(curve, x, law_value(law, x)),
        'beyond': _held(curve, beyond, law_value(law, beyond)),
        'far': _held(curve, far, law_value(law, far)),
        'past a break': _held(curve, beyond, broken_law_value(law, beyond)),
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
        law['c'] = rng.uniform(0.1, 1.0) * float(law_value(law, np.array([SPAN]))[0])
    return law


def law_value(law: dict[str, float], x: np.ndarray) -> np.ndarray:
    """The law at `x`, without noise."""
    return law['a'] * (x + law['d']) ** -law['b'] + law['c']


def broken_law_value(law: dict[str, float], x: np.ndarray) -> np.ndarray:
    """The law with half its exponent after the last point."""
    reducible = law['a'] * (SPAN + law['d']) ** -law['b']
    ratio = (x + law['d']) / (SPAN + law['d'])
    return reducible * ratio ** (-law['b'] / 2) + law['c']


def _measure_auto(setting: Simulation, seed: int) -> dict[str, float]:
    """Shares for `auto`, of `setting.curves` curves of each synthetic law."""
    rng = np.random.default_rng(seed)
    with threadpool_limits(1, user_api='blas'):
        found = {
            law: np.nanmean([_simulate(law, setting, rng) for _ in range(setting.curves)], axis=0)
            for law in LAWS
        }
    groups = {law.name: [law] for law in LAWS} | {
        'tuned': [law for law in LAWS if law.tuned],
        'not tuned': [law for law in LAWS if not law.tuned],
    }
    shares = {'fitted': float(np.mean([held[0] for held in found.values()]))}
    for name, laws in groups.items():
        _, beyond, far = np.mean([found[law] for law in laws], axis=0)
        shares |= {f'{name}: beyond': float(beyond), f'{name}: far': float(far)}
    return shares


def _simulate(law: SyntheticLaw, setting: Simulation, rng: np.random.Generator) -> list[float]:
    """Shares at the points, at `BEYOND` and at `FAR`; NaN for a curve without a band."""
    form = forms.find(law.form)
    theta = draw_law(law.form, rng)
    x, out = design_points(law.form, setting.points)
    y = np.exp(form.log_value(theta, x)[0] + draw_noise(law, len(x), rng))
    curve = averaging.fit_average(x, y, bootstrap=setting.bootstrap, seed=int(rng.integers(2**31)))
    if curve.predict_band(out) is None:
        return [np.nan] * 3
    spans = (x, out[:1], out[1:])
    return [_held(curve, at, np.exp(form.log_value(theta, at)[0])) for at in spans]


def draw_law(form: str, rng: np.random.Generator) -> forms.Theta:
    """Parameters of a random law with typical exponents, in the units of `design_points`."""
    if form == 'joint':
        (alpha, beta), e = rng.uniform(0.25, 0.6, 2), rng.uniform(0.3, 1.0)
        return np.array([0.0, alpha, 0.0, beta, e])
    b = rng.uniform(0.2, 0.8)
    if form == 'm4':
        c, alpha = rng.uniform(0.1, 0.4), rng.uniform(0.3, 1.5)
        log_a = np.log(0.6 * (1 - c)) - alpha * np.log(0.4 * (1 - c))
        return np.array([log_a, b, c, 1.0, alpha])
    d = rng.uniform(0.0, 4.0) if form == 'shifted' else 0.0
    c = 0.0 if form == 'power' else rng.uniform(0.1, 1.0) * (SPAN + d) ** -b
    return np.array([0.0, b, c, d])


def design_points(form: str, points: int) -> tuple[np.ndarray, np.ndarray]:
    """The fitted x [N, K], and those at 4 and 10 times the largest [2, K].

    For the joint law, N and D span a factor of 8 each on a grid, and compute one of 64.
    """
    if form != 'joint':
        return np.geomspace(1.0, SPAN, points)[:, None], SPAN * np.array([[4.0], [10.0]])
    side = np.geomspace(1.0, np.sqrt(SPAN), 4)
    grid = np.stack(np.meshgrid(side, side), axis=-1).reshape(-1, 2)
    return grid, np.sqrt(SPAN * np.array([4.0, 10.0]))[:, None] * np.ones((1, 2))


def draw_noise(law: SyntheticLaw, count: int, rng: np.random.Generator) -> np.ndarray:
    """Errors [N] of log y, correlated between neighbors."""
    errors = rng.standard_normal(count)
    for i in range(1, count):
        fresh = np.sqrt(1 - law.correlation**2) * errors[i]
        errors[i] = law.correlation * errors[i - 1] + fresh
    return law.noise * errors


def _held(curve: curve_fit.Fit, x: np.ndarray, truth: np.ndarray) -> float:
    """The share of x [N] at which the truth [N] lies in the band."""
    band = curve.predict_band(x)
    assert band is not None
    return float(np.mean((band[0] <= truth) & (truth <= band[1])))


def designs(flops: Sequence[float], seeds: int, target: float) -> list[Design]:
    """The planned runs, and alternatives.

    Choshen et al. 2024 (arXiv:2410.11840) find that seeds vary so much that several small models
    can predict better than one large model.

    Args:
      flops: of each planned run.
      seeds: number of seeds of repeated runs.
      target: FLOPs at which the law predicts.

    Returns:
      The runs as planned; with more seeds of each; with more seeds of the smaller half; and
      without the largest, with as many seeds of the others as cost no more. [] for too few sizes.
    """
    x, counts = np.unique(np.asarray(flops, float), return_counts=True)
    if len(x) < MIN_SIZES:
        return []
    small = np.arange(len(x)) < len(x) // 2
    found = [('as planned', counts)]
    if seeds > 1:
        found += [
            (f'{seeds} seeds of each', seeds * counts),
            (f'{seeds} seeds of the smaller half', np.where(small, seeds * counts, counts)),
        ]
    spare = counts[-1] * x[-1]
    rest = np.append(counts[:-1], 0)
    times = 1 + int(spare // (rest @ x))
    if len(x) > MIN_SIZES and times > 1:
        found.append((f'without the largest, {times} seeds of the others', times * rest))
    return [_design(name, x, number, target) for name, number in found]


def _design(name: str, x: np.ndarray, counts: np.ndarray, target: float) -> Design:
    used = counts > 0
    expected = {
        law: prediction_error(law, x[used], counts[used], target, float(x[-1]))
        for law in DESIGN_LAWS
    }
    return Design(name, x[used], counts[used], float(counts @ x), expected)


def prediction_error(
    law: str, x: np.ndarray, counts: np.ndarray, target: float, largest: float
) -> float:
    """Standard deviation of the log of the prediction at a target, by linearization.

    Args:
      law: one of `LAWS`.
      x: [N], of the points.
      counts: [N], number of runs at each.
      target: x of the prediction.
      largest: the x at which the law is 1.
    """
    form, theta, used = DESIGN_LAWS[law]
    slopes = [
        forms.find(form).log_value(np.array(theta), at[:, None] / largest)[1][:, :used]
        for at in (x, np.array([target]))
    ]
    information = slopes[0].T @ (counts[:, None] * slopes[0])
    return float(np.sqrt(slopes[1][0] @ np.linalg.solve(information, slopes[1][0])))
