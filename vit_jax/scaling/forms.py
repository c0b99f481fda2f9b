"""Forms of scaling laws: values, gradients, starting points and bounds.

Forms are fitted in scaled units (x and y over their geometric means) to make all parameters of
order one; `Form.params` converts them to the units of the table.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Mapping

import numpy as np
from scipy import optimize, special

from vit_jax.errors import UserError, nearest

Theta = np.ndarray  # [P], the parameters in scaled units
Bounds = list[tuple[float, float]]
EXPONENTS = np.geomspace(0.03, 3.0, 12)  # grid from which the search for a joint law starts
MIN_TERM = 1e-12
MAX_EXPONENT = 5.0
MAX_SHIFT = 100.0  # d over the largest x
MIN_ALPHA = 1e-2
MAX_DECAY = 1e3  # repeats with this constant are as good as new data up to about 1000 epochs


@dataclasses.dataclass(frozen=True)
class Form:
    """A parametric curve.

    Attributes:
      name: Value of `--form`.
      formula: Formula in terms of `names`.
      names: Names of the parameters in the units of the table.
      source: Paper, with section or equation.
      log_value: (theta [P], x [N, K]) -> log y [N] and its gradient [N, P].
      starts: (x, y) -> starting points of the search.
      bounds: (x, y) -> a closed interval for each element of theta.
      params: (theta, scales of x [K], scale of y) -> {name: value}.
      interpreted: Limits and exponents, {name: index in theta}; a fit warns if the points do not
        determine them.
      uninterpreted: Other parameters except scales, {name: index in theta}.
      scale_of: {scale: its exponent}; a scale is as well determined as its exponent.
      columns: Number K of columns of x.
      solve: (x, y) -> theta, if the paper has its own estimator; None to minimize the log-Huber
        loss.
      scaled_by: Column [K] whose mean scales each column of x, where columns share a unit; None
        if each column has its own scale.
    """

    name: str
    formula: str
    names: tuple[str, ...]
    source: str
    log_value: Callable[[Theta, np.ndarray], tuple[np.ndarray, np.ndarray]]
    starts: Callable[[np.ndarray, np.ndarray], list[Theta]]
    bounds: Callable[[np.ndarray, np.ndarray], Bounds]
    params: Callable[[Theta, np.ndarray, float], dict[str, float]]
    interpreted: Mapping[str, int]
    uninterpreted: Mapping[str, int] = dataclasses.field(default_factory=dict)
    scale_of: Mapping[str, str] = dataclasses.field(default_factory=lambda: {'a': 'b'})
    columns: int = 1
    solve: Callable[[np.ndarray, np.ndarray], Theta] | None = None
    scaled_by: tuple[int, ...] | None = None

    def __reduce__(self) -> tuple[Callable[[str], Form], tuple[str]]:
        """Pickle a form by its name: its functions cannot be pickled."""
        return find_form, (self.name,)

    def scales(self, x: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, float]:
        """Compute the units of a fit: geometric means of x [K] and of y."""
        means = np.exp(np.log(x).mean(axis=0))
        if self.scaled_by is not None:
            means = means[list(self.scaled_by)]
        return means, float(np.exp(np.log(y).mean()))


def find_form(name: str) -> Form:
    """Look up a form by name.

    Raises:
      UserError: The name is unknown; suggests the nearest.
    """
    if name not in FORMS:
        raise UserError(nearest('form', name, FORMS))
    return FORMS[name]


def simplify(form: Form, points: int) -> Form:
    """Replace a form by a simpler one until it has fewer parameters than there are points."""
    while points <= len(form.names) and form.name in _SIMPLER:
        form = FORMS[_SIMPLER[form.name]]
    return form


def _shifted_value(theta: Theta, x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    log_a, b, c, d = theta
    log_x = np.log(x[:, 0] + d)
    power = np.exp(log_a - b * log_x)
    y = power + c
    return np.log(y), _relative(y, power, -power * log_x, 1.0, -b * power / (x[:, 0] + d))


def _relative(y: np.ndarray, *slopes: np.ndarray | float) -> np.ndarray:
    """Divide slopes of y [N] by y: the gradient of log y [N, P]. A search spends its time here."""
    gradient = np.empty((len(y), len(slopes)))
    for i, slope in enumerate(slopes):
        gradient[:, i] = slope
    gradient /= y[:, None]
    return gradient


def _shifted_starts(x: np.ndarray, y: np.ndarray, has_c: bool, has_d: bool) -> list[Theta]:
    floors = (0.0, 0.5 * y.min(), 0.9 * y.min()) if has_c else (0.0,)
    shifts = (0.0, x.min(), np.median(x), x.max()) if has_d else (0.0,)
    return [_regress(x[:, 0], y, c, d) for c, d in itertools.product(floors, shifts)]


def _regress(x: np.ndarray, y: np.ndarray, c: float, d: float) -> Theta:
    """Fit the least-squares line of log(y - c) over log(x + d)."""
    slope, log_a = np.polyfit(np.log(x + d), np.log(y - c), 1)
    return np.array([log_a, -slope, c, d])


def _shifted_bounds(x: np.ndarray, y: np.ndarray, has_c: bool, has_d: bool) -> Bounds:
    return [
        (-50.0, 50.0),
        (0.0, MAX_EXPONENT),
        (0.0, y.max() if has_c else 0.0),
        (0.0, MAX_SHIFT * x.max() if has_d else 0.0),
    ]


def _shifted_params(theta: Theta, x_scale: np.ndarray, y_scale: float) -> dict[str, float]:
    log_a, b, c, d = theta
    a = np.exp(log_a + b * np.log(x_scale[0])) * y_scale
    return {'a': float(a), 'b': float(b), 'c': float(c * y_scale), 'd': float(d * x_scale[0])}


def _shifted_form(
    name: str,
    formula: str,
    source: str,
    solve: Callable[[np.ndarray, np.ndarray], Theta] | None = None,
) -> Form:
    names = tuple(n for n in 'abcd' if n in formula)
    has_c, has_d = 'c' in names, 'd' in names

    def params(theta: Theta, x_scale: np.ndarray, y_scale: float) -> dict[str, float]:
        values = _shifted_params(theta, x_scale, y_scale)
        return {n: values[n] for n in names}

    return Form(
        name=name,
        formula=formula,
        names=names,
        source=source,
        log_value=_shifted_value,
        starts=lambda x, y: _shifted_starts(x, y, has_c, has_d),
        bounds=lambda x, y: _shifted_bounds(x, y, has_c, has_d),
        params=params,
        interpreted={n: 'abcd'.index(n) for n in names if n in 'bc'},
        uninterpreted={'d': 3} if has_d else {},
        solve=solve,
    )


def _solve_m2(x: np.ndarray, y: np.ndarray) -> Theta:
    """Solve least squares of log(y - c) - log a + b log x exactly: a linear fit for each c."""

    def cost(log_gap: float) -> float:
        log_a, b, c, _ = _regress(x[:, 0], y, y.min() - np.exp(log_gap), 0.0)
        return float(np.sum((np.log(y - c) - log_a + b * np.log(x[:, 0])) ** 2))

    gaps = np.linspace(np.log(1e-3 * y.min()), np.log(y.min()), 60)
    best = int(np.argmin([cost(gap) for gap in gaps]))
    bounds = gaps[max(best - 1, 0)], gaps[min(best + 1, len(gaps) - 1)]
    log_gap = optimize.minimize_scalar(cost, bounds=bounds, method='bounded').x
    return _regress(x[:, 0], y, max(y.min() - np.exp(log_gap), 0.0), 0.0)


def _m4_value(theta: Theta, x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    log_a, b, c, e, alpha = theta
    log_x, width = np.log(x[:, 0]), e - c
    z = _inverse_log_odds(log_a - b * log_x - (1 - alpha) * np.log(width), alpha)
    above, below = width * special.expit(z), width * special.expit(-z)  # y - c and e - y
    y = c + above
    slope = 1 / above + alpha / below
    slopes = (1.0, -log_x, 1 / above, alpha / below, np.log(below))
    return np.log(y), _relative(slope * y, *slopes)


def _inverse_log_odds(target: np.ndarray, alpha: float) -> np.ndarray:
    """Find z with log sigmoid(z) - alpha log sigmoid(-z) = target, by Newton's method.

    The left side is monotone and either convex or concave, so every start converges.
    """
    z = target / max(alpha, 1.0)
    for _ in range(60):
        low = special.log_expit(z)
        odds = np.exp(low)
        change = (low - alpha * (low - z) - target) / (1 - odds + alpha * odds)
        z = z - change
        if np.abs(change).max() < 1e-8:  # the next one would be its square
            break
    return np.minimum(np.maximum(z, -30.0), 30.0)


def _m4_starts(x: np.ndarray, y: np.ndarray) -> list[Theta]:
    starts = []
    for share, room in itertools.product((0.0, 0.5, 0.9), (1.01, 1.2)):
        c, e = share * y.min(), room * y.max()
        terms = np.stack([np.ones(len(y)), -np.log(x[:, 0]), np.log(e - y)], axis=1)
        log_a, b, alpha = np.linalg.lstsq(terms, np.log(y - c), rcond=None)[0]
        starts.append(np.array([log_a, b, c, e, alpha]))
    return starts


def _m4_bounds(x: np.ndarray, y: np.ndarray) -> Bounds:
    return [
        (-50.0, 50.0),
        (0.0, MAX_EXPONENT),
        (0.0, y.min()),
        ((1 + 1e-6) * y.max(), 10 * y.max()),
        (MIN_ALPHA, 20.0),
    ]


def _m4_params(theta: Theta, x_scale: np.ndarray, y_scale: float) -> dict[str, float]:
    log_a, b, c, e, alpha = theta
    a = np.exp(log_a + b * np.log(x_scale[0]) + (1 - alpha) * np.log(y_scale))
    named = {'a': a, 'b': b, 'c': c * y_scale, 'e': e * y_scale, 'alpha': alpha}
    return {name: float(value) for name, value in named.items()}


def _joint_value(theta: Theta, x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Compute the log of E + A N^-alpha + B D^-beta [M] at x [M, 2], and its gradient [M, 5]."""
    log_a, alpha, log_b, beta, e = theta
    log_n, log_d = np.log(x).T
    model, data = np.exp(log_a - alpha * log_n), np.exp(log_b - beta * log_d)
    y = e + model + data
    return np.log(y), _relative(y, model, -model * log_n, data, -data * log_d, 1.0)


def _joint_starts(x: np.ndarray, y: np.ndarray, count: int = 4) -> list[Theta]:
    """Minimize the relative squared error by variable projection (Golub and Pereyra 1973).

    For fixed exponents, E, A and B follow from non-negative least squares, so only alpha and beta
    are searched: two variables instead of five, and well conditioned. The refined minima come
    first, by their error, then the grid points at which they started.
    """
    grid = sorted(
        itertools.product(EXPONENTS, EXPONENTS), key=lambda exponents: _joint_error(exponents, x, y)
    )
    distant: list[tuple[float, float]] = []
    for point in grid:
        if all(np.abs(np.log(np.divide(point, other))).max() > 1 for other in distant):
            distant.append(point)
    begins = [np.array(point) for point in distant[:count]]
    refined = sorted(
        (_refine_joint(exponents, x, y) for exponents in begins),
        key=lambda exponents: _joint_error(exponents, x, y),
    )
    minima: list[np.ndarray] = []
    for exponents in refined:
        if not any(np.allclose(exponents, other, rtol=1e-4) for other in minima):
            minima.append(exponents)
    return [_joint_theta(exponents, x, y) for exponents in (*minima, *begins)]


def _refine_joint(at: np.ndarray, x: np.ndarray, y: np.ndarray) -> np.ndarray:
    tight = {'xtol': 1e-14, 'ftol': 1e-14, 'gtol': 1e-14}
    bounds = ([1e-3, 1e-3], [5.0, 5.0])
    return optimize.least_squares(
        lambda exponents: _project_joint(exponents, x, y)[1],
        at,
        bounds=bounds,
        max_nfev=60,
        **tight,
    ).x


def _joint_error(
    exponents: tuple[float, float] | np.ndarray, x: np.ndarray, y: np.ndarray
) -> float:
    return float(np.sum(_project_joint(np.asarray(exponents), x, y)[1] ** 2))


def _joint_theta(exponents: np.ndarray, x: np.ndarray, y: np.ndarray) -> Theta:
    e, a, b = _project_joint(exponents, x, y)[0]
    return np.array(
        [np.log(max(a, MIN_TERM)), exponents[0], np.log(max(b, MIN_TERM)), exponents[1], e]
    )


def _project_joint(
    exponents: np.ndarray, x: np.ndarray, y: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Find the best (E, A, B) >= 0 for these exponents, and the relative errors [M]."""
    terms = (
        np.stack([np.ones_like(y), x[:, 0] ** -exponents[0], x[:, 1] ** -exponents[1]], axis=1)
        / y[:, None]
    )
    linear = optimize.nnls(terms, np.ones_like(y))[0]
    return linear, terms @ linear - 1


def _joint_bounds(x: np.ndarray, y: np.ndarray, largest: float) -> list[tuple[float, float]]:
    """Bound theta by closed intervals; `largest` bounds the exponents."""
    term, exponent = (-50.0, 50.0), (0.0, largest)
    return [term, exponent, term, exponent, (0.0, float(y.max()))]


def _joint_params(theta: Theta, x_scale: np.ndarray, y_scale: float) -> dict[str, float]:
    """Convert theta to the units of the table."""
    log_a, alpha, log_b, beta, e = theta
    a, b = np.exp([log_a + alpha * np.log(x_scale[0]), log_b + beta * np.log(x_scale[1])]) * y_scale
    named = {'E': e * y_scale, 'A': a, 'alpha': alpha, 'B': b, 'beta': beta}
    return {name: float(number) for name, number in named.items()}


def _repeated_value(theta: Theta, x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Compute the log of the data-constrained law [M] at x [M, 3], and its gradient [M, 7].

    Muennighoff et al. 2023, equations 5 to 7: the value of repeated data, and of parameters beyond
    the optimum for the unique data, decays exponentially.
    """
    log_a, alpha, log_b, beta, e, r_data, r_model = theta
    size, data = x[:, 0], x[:, 1]
    unique = np.minimum(x[:, 2], data)
    best = (np.log(alpha) + log_a - np.log(beta) - log_b + beta * np.log(unique)) / alpha
    base = np.minimum(np.exp(np.clip(best, -700, 700)), size)
    useful_data, _, slope_data = _discount_repeats(data, unique, r_data)
    useful_size, slope_base, slope_model = _discount_repeats(size, base, r_model)
    model_term = np.exp(log_a - alpha * np.log(useful_size))
    data_term = np.exp(log_b - beta * np.log(useful_data))
    # The model's term depends on log base, which depends on the parameters.
    shift = np.where(base < size, -alpha * model_term * slope_base / useful_size, 0.0)
    gradient = np.stack(
        [
            model_term + shift / alpha,
            -model_term * np.log(useful_size) + shift * (1 / alpha - best) / alpha,
            data_term - shift / alpha,
            -data_term * np.log(useful_data) + shift * (np.log(unique) - 1 / beta) / alpha,
            np.ones_like(size),
            -beta * data_term * slope_data / useful_data,
            -alpha * model_term * slope_model / useful_size,
        ],
        axis=1,
    )
    y = e + model_term + data_term
    return np.log(y), gradient / y[:, None]


def _discount_repeats(
    total: np.ndarray, unique: np.ndarray, decay: float
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Discount a total with repeats, with its slopes in log unique and in the decay."""
    repeats = total / unique - 1
    discount = np.exp(-repeats / decay)
    worth = unique * (1 + decay * (1 - discount))
    return worth, worth - total * discount, unique * (1 - discount - repeats / decay * discount)


def _repeated_starts(x: np.ndarray, y: np.ndarray) -> list[Theta]:
    """Start from joint laws of the runs with few repeats, or of all runs, and several decays."""
    fresh = x[:, 1] <= 2 * x[:, 2]
    if fresh.sum() < 8 or min(len(np.unique(x[fresh, i])) for i in (0, 1)) < 3:
        fresh[:] = True
    laws = _joint_starts(x[fresh, :2], y[fresh])[:2]
    return [np.append(law, decays) for law in laws for decays in ((15.0, 5.0), (5.0, 15.0))]


def _repeated_bounds(x: np.ndarray, y: np.ndarray) -> Bounds:
    term, exponent = (-50.0, 50.0), (1e-3, MAX_EXPONENT)
    decay = (0.05, MAX_DECAY)
    return [term, exponent, term, exponent, (0.0, float(y.max())), decay, decay]


def _repeated_params(theta: Theta, x_scale: np.ndarray, y_scale: float) -> dict[str, float]:
    decays = {'R_D': float(theta[5]), 'R_N': float(theta[6])}
    return _joint_params(theta[:5], x_scale, y_scale) | decays


_REVISITING = 'Alabdulmohsin et al. 2022, section 3'
FORMS = {
    form.name: form
    for form in (
        _shifted_form('power', 'a x^-b', f'{_REVISITING}, M1'),
        _shifted_form('irreducible', 'a x^-b + c', f'the function of M2, {_REVISITING}'),
        _shifted_form('shifted', 'a (x + d)^-b + c', 'Zhai et al. 2021, section 2'),
        _shifted_form('m2', 'a x^-b + c', f'{_REVISITING}, M2', _solve_m2),
        Form(
            name='m4',
            formula='(y - c) / (e - y)^alpha = a x^-b',
            names=('a', 'b', 'c', 'e', 'alpha'),
            source=f'{_REVISITING}, M4',
            log_value=_m4_value,
            starts=_m4_starts,
            bounds=_m4_bounds,
            params=_m4_params,
            interpreted={'b': 1, 'c': 2},
            uninterpreted={'e': 3, 'alpha': 4},
        ),
        Form(
            name='joint',
            formula='E + A N^-alpha + B D^-beta',
            names=('E', 'A', 'alpha', 'B', 'beta'),
            source='Hoffmann et al. 2022, section 3.3, equation 2',
            log_value=_joint_value,
            starts=_joint_starts,
            bounds=lambda x, y: _joint_bounds(x, y, MAX_EXPONENT),
            params=_joint_params,
            interpreted={'alpha': 1, 'beta': 3, 'E': 4},
            scale_of={'A': 'alpha', 'B': 'beta'},
            columns=2,
        ),
        Form(
            name='repeated',
            formula="E + A N'^-alpha + B D'^-beta, D' = U + U R_D (1 - exp((1 - D / U) / R_D))",
            names=('E', 'A', 'alpha', 'B', 'beta', 'R_D', 'R_N'),
            source='Muennighoff et al. 2023, equations 5 to 7',
            log_value=_repeated_value,
            starts=_repeated_starts,
            bounds=_repeated_bounds,
            params=_repeated_params,
            interpreted={'alpha': 1, 'beta': 3, 'E': 4},
            uninterpreted={'R_D': 5, 'R_N': 6},
            scale_of={'A': 'alpha', 'B': 'beta'},
            columns=3,
            scaled_by=(0, 1, 1),
        ),
    )
}
_SIMPLER = {'shifted': 'irreducible', 'irreducible': 'power', 'm2': 'power', 'm4': 'm2'}
