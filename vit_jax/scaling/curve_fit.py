"""Fit of one curve to noisy points: log-Huber loss, many starts, bootstrap bands, warnings."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import numpy as np
from scipy import optimize, stats

from vit_jax.errors import UserError
from vit_jax.scaling import profile_likelihood
from vit_jax.scaling.forms import Bounds, Form, Theta, find_form
from vit_jax.scaling.noise import Noise, Seeds, make_draws, make_wild_draws, pool_noise, single_runs

BAND = (0.05, 0.95)
WIDEN = 1.2  # factor of the bootstrap's bands, tuned on four laws of `coverage.LAWS`
DELTA = 1e-3  # Hoffmann et al. 2022, section 3.3
FARTHEST = 1000.0  # x over the largest fitted x, above which a prediction has no band
_SETTLE = 5  # repeated descents from the best minimum until the search has converged
_WIDEST = 30  # orders of magnitude of x and y for which powers of scaled values are finite
_EDGE = 1e-9  # distance within which theta counts as at a limit of the search
_WIDE = 0.5  # a parameter with a relative 90 % half-interval above this is not identified


@dataclasses.dataclass(frozen=True)
class Objective:
    """Loss that a fit minimizes: the sum of Huber losses of errors, quadratic up to `delta`.

    Attributes:
      delta: Limit of the quadratic part, in units of the errors; inf for least squares.
      log: Whether errors are errors of log y; otherwise of y over its geometric mean.
    """

    delta: float = DELTA
    log: bool = True


LOG_HUBER = Objective()


@dataclasses.dataclass(frozen=True)
class Fit:
    """A fitted curve.

    Attributes:
      form: Form of the curve.
      theta: Parameters [P] in scaled units.
      scales: Units of x [K] and of y.
      n_points: Number of fitted points.
      rmse: Root mean square of log(fitted) - log(y) on the fitted points.
      replicates: Theta [R, P] of each bootstrap sample; R may be 0.
      warnings: A line for each problem, such as a parameter that is not identified.
      unidentified: Names of the parameters that the points do not determine.
      noise: Noise of log y of a point, from errors of the fit and from seeds.
      points: Fitted points, for a profile-likelihood band; None for a bootstrap band.
    """

    form: Form
    theta: Theta
    scales: tuple[np.ndarray, float]
    n_points: int
    rmse: float
    replicates: np.ndarray
    warnings: tuple[str, ...]
    unidentified: frozenset[str] = frozenset()
    noise: Noise = dataclasses.field(default_factory=Noise)
    points: profile_likelihood.FittedPoints | None = None

    @property
    def params(self) -> dict[str, float]:
        """Parameters in the units of the table."""
        return self.form.params(self.theta, *self.scales)

    @property
    def identified_params(self) -> dict[str, float | None]:
        """Parameters; None for each one that the points do not determine."""
        params = self.params.items()
        return {name: None if name in self.unidentified else value for name, value in params}

    @property
    def bands(self) -> dict[str, list[float]]:
        """90 % band of each parameter, from the bootstrap; {} without a bootstrap."""
        if not len(self.replicates):
            return {}
        replicates = [self.form.params(theta, *self.scales) for theta in self.replicates]
        samples = {
            name: np.array([params[name] for params in replicates]) for name in self.form.names
        }
        params = self.params
        return {name: widen_band(params[name], samples[name], self.dof) for name in samples}

    @property
    def dof(self) -> float:
        """Degrees of freedom, at least 2: points minus parameters, plus the seeds' degrees."""
        return max(self.n_points - len(self.form.names) + self.noise.dof, 2)

    @property
    def floor(self) -> float:
        """Irreducible error, which the curve approaches; 0 if there is none."""
        return self.params.get('c', 0.0)

    def predict(self, x: np.ndarray) -> np.ndarray:
        """Evaluate the curve [N] at x, [N] or [N, K], in the units of the table."""
        return self._at(self.theta, x)

    def predict_band(self, x: np.ndarray) -> tuple[np.ndarray, np.ndarray] | None:
        """Compute the 90 % band of the curve at x; None without a bootstrap."""
        if not len(self.replicates):
            return None
        center, (lower, upper) = np.log(self.predict(x)), self.band_offsets(x)
        return np.exp(center - lower), np.exp(center + upper)

    def band_offsets(self, x: np.ndarray) -> np.ndarray:
        """Compute how far [2, N] the log of the curve is from the lower and upper end of its band.

        They come from the profile likelihood, or from the bootstrap if the form has its own
        estimator.
        """
        if self.points is None:
            samples = np.log([self._at(theta, x) for theta in self.replicates])
            spread = np.std(samples, axis=0, ddof=min(1, len(samples) - 1))
            return np.tile(half_width(spread, self.dof), (2, 1))
        quantile = float(stats.t.ppf(BAND[1], self.dof + self.noise.shared))
        rise = (quantile * max(self.noise.std, 1e-6)) ** 2
        if self.noise.measured:  # seeds are independent, but least absolute errors need more
            rise *= np.pi / 2
        else:
            rise *= profile_likelihood.inflation(self.form, self.theta, self.points)
        columns = _columns(np.asarray(x, float)) / self.scales[0]
        return profile_likelihood.band_offsets(self.form, self.theta, self.points, rise, columns)

    def _at(self, theta: Theta, x: np.ndarray) -> np.ndarray:
        x_scale, y_scale = self.scales
        return np.exp(self.form.log_value(theta, _columns(x) / x_scale)[0]) * y_scale


def half_width(spread: np.ndarray, dof: float) -> np.ndarray:
    """Compute half of a 90 % band: Student's quantile times the standard deviation, widened."""
    return WIDEN * stats.t.ppf(BAND[1], dof) * spread


def widen_band(value: float, samples: np.ndarray, dof: float) -> list[float]:
    """Compute the 90 % band [low, high] of a positive value from its bootstrap samples.

    The distances from the value to the 5th and 95th percentile are widened as in `half_width`.
    """
    factor = float(WIDEN * stats.t.ppf(BAND[1], dof) / stats.norm.ppf(BAND[1]))
    low, high = (float(q) for q in np.quantile(samples, BAND))
    low, high = min(low, value), max(high, value)
    return [max(value - factor * (value - low), 0.0), value + factor * (high - value)]


def fit(
    form: Form,
    x: np.ndarray,
    y: np.ndarray,
    *,
    bootstrap: int = 0,
    seed: int = 0,
    objective: Objective = LOG_HUBER,
    starts: int = 0,
    seeds: Seeds | None = None,
) -> Fit:
    """Fit a form to points.

    Args:
      form: Form of the curve.
      x: Positive values, [N] or [N, K].
      y: Positive errors or losses [N], lower is better.
      bootstrap: Number of replicates for the bands.
      seed: Seed of the bootstrap.
      objective: Loss to minimize, unless the form has its own estimator.
      starts: Number of starting points, the first ones; 0 for all.
      seeds: Seeds of the runs of each point, if points are means. Their numbers weight the errors,
        unless the form has its own estimator, and with the residuals they determine the noise.

    Raises:
      UserError: There are fewer points than parameters, x has a single value, a value is not
        positive, or the search does not converge.
    """
    x, y = _columns(np.asarray(x, float)), np.asarray(y, float)
    _check(form, x, y)
    order = np.lexsort((y, *x.T[::-1]))
    x, y = x[order], y[order]
    seeds = single_runs(len(y)) if seeds is None else seeds.take(order)
    weights = seeds.weights
    scales = form.scales(x, y)
    x, y = x / scales[0], y / scales[1]
    bounds = form.bounds(x, y)
    if form.solve:
        theta = form.solve(x, y)
    else:
        points = tuple((array.shape, array.tobytes()) for array in (x, y, weights))
        theta = np.array(_search_once(form.name, points, objective, starts))
    fitted, jacobian = form.log_value(theta, x)
    residuals = np.log(y) - fitted
    noise = pool_noise(weights * residuals, len(y) - len(form.names), seeds)
    rng = np.random.default_rng(seed)
    if form.columns > 1 and not noise.measured:
        draw = make_wild_draws(weights * residuals, weights[:, None] * jacobian, rng)
    else:
        draw = make_draws(weights * residuals, len(form.names), noise, rng)
    replicates = _bootstrap(form, x, fitted, draw, theta, bootstrap, weights)
    errors = _half_intervals(
        theta, bounds, weights * residuals, weights[:, None] * jacobian, replicates
    )
    lines, unidentified = diagnostics(form, theta, bounds, errors, len(y), scales)
    return Fit(
        form=form,
        theta=theta,
        scales=scales,
        n_points=len(y),
        rmse=rms(residuals),
        replicates=replicates,
        warnings=(*([noise.problem] if noise.problem else []), *lines),
        unidentified=unidentified,
        noise=noise,
        points=None
        if form.solve
        else profile_likelihood.FittedPoints(x, np.log(y), weights, bounds),
    )


@functools.lru_cache(maxsize=64)  # hold-outs of a table fit the same points several times
def _search_once(
    name: str, points: tuple[tuple[tuple[int, ...], bytes], ...], objective: Objective, starts: int
) -> tuple[float, ...]:
    """Search from the starts of a form; x, y and weights come as shapes and bytes."""
    form = find_form(name)
    x, y, weights = (np.frombuffer(content).reshape(shape) for shape, content in points)
    begins = form.starts(x, y)[: starts or None]
    bounds = form.bounds(x, y)
    return tuple(map(float, search(form, x, y, begins, bounds, objective, weights=weights)))


def _check(form: Form, x: np.ndarray, y: np.ndarray) -> None:
    if len(y) < len(form.names):
        raise UserError(
            f'{len(y)} points cannot determine the {len(form.names)} parameters of the form '
            f'{form.name!r}; give more points or a simpler form'
        )
    if x.shape[1] != form.columns:
        raise UserError(
            f'the form {form.name!r} takes {form.columns} columns of x, not {x.shape[1]}'
        )
    if not (np.isfinite(x).all() and np.isfinite(y).all() and x.min() > 0 and y.min() > 0):
        raise UserError('x and y must be finite and positive: their logarithms are fitted')
    if max(np.ptp(np.log10(x), axis=0).max(), np.ptp(np.log10(y))) > _WIDEST:
        raise UserError(
            f'x or y spans more than {_WIDEST} orders of magnitude; rescale it or leave rows out'
        )
    if (x.min(axis=0) == x.max(axis=0)).any():
        raise UserError('all points have the same x; a fit needs several')


def require_more(form: Form, points: int, seeds: Seeds | None) -> None:
    """Raise UserError unless there are more points than parameters, or seeds that show the noise.

    Otherwise a curve goes through any points.
    """
    if points <= len(form.names) and not (seeds and seeds.several and points == len(form.names)):
        raise UserError(
            f'{points} points cannot determine the {len(form.names)} parameters of the form '
            f'{form.name!r}; give more points or a simpler form'
        )


def _columns(x: np.ndarray) -> np.ndarray:
    return x[:, None] if x.ndim == 1 else x


def search(
    form: Form,
    x: np.ndarray,
    y: np.ndarray,
    starts: list[Theta],
    bounds: Bounds,
    objective: Objective = LOG_HUBER,
    settle: bool = True,
    weights: np.ndarray | float = 1.0,
) -> Theta:
    """Find the best local minimum from all starts.

    Raises:
      UserError: The search does not converge; never if `settle` is off.
    """
    low, high = np.array(bounds).T
    weights = 1.0 if np.all(weights == 1.0) else weights
    descend = functools.partial(
        optimize.minimize,
        _loss,
        args=(form, x, np.log(y), objective, weights),
        jac=True,
        method='L-BFGS-B',
        bounds=bounds,
        options={'maxiter': 500},
    )
    minima = [descend(np.clip(start, low, high)) for start in starts]
    best = min(minima, key=lambda result: result.fun)
    return _settle_search(descend, best) if settle else best.x


def _loss(
    theta: Theta,
    form: Form,
    x: np.ndarray,
    log_y: np.ndarray,
    objective: Objective,
    weights: np.ndarray | float = 1.0,
) -> tuple[float, np.ndarray]:
    """Compute the objective over its delta, if finite, and its gradient; weights [N] of errors."""
    fitted, jacobian = form.log_value(theta, x)
    errors = fitted - log_y
    if not objective.log:
        errors, jacobian = np.exp(fitted) - np.exp(log_y), np.exp(fitted)[:, None] * jacobian
    if not isinstance(weights, float):
        errors, jacobian = weights * errors, np.multiply(jacobian.T, weights).T
    if np.isinf(objective.delta):
        errors = errors / DELTA
        return float(np.sum(errors**2) / 2), errors @ jacobian / DELTA
    errors = errors / objective.delta
    clipped = np.minimum(np.maximum(errors, -1.0), 1.0)  # np.clip takes several times as long
    return float((clipped * (errors - clipped / 2)).sum()), clipped @ jacobian / objective.delta


def _settle_search(descend: Callable[[Theta], Any], best: Any) -> Theta:
    """Descend again until another descent finds nothing lower."""
    for _ in range(_SETTLE):
        again = descend(best.x)
        if not np.isfinite(again.fun):
            break
        if again.fun >= best.fun * (1 - 1e-6) - 1e-9:
            return best.x
        best = again
    raise UserError('the fit did not converge; give more points or a simpler form')


def _bootstrap(
    form: Form,
    x: np.ndarray,
    fitted: np.ndarray,
    draw: Callable[[], np.ndarray],
    theta: Theta,
    count: int,
    weights: np.ndarray,
) -> np.ndarray:
    """Refit the curve with redrawn errors.

    Returns:
      Theta of each replicate, [count, P]; searches start from the fit.
    """
    replicates = np.empty((count, len(theta)))
    for i in range(count):
        y = np.exp(fitted + draw() / weights)
        if form.solve:
            replicates[i] = form.solve(x, y)
        else:
            bounds = form.bounds(x, y)
            replicates[i] = search(form, x, y, [theta], bounds, settle=False, weights=weights)
    return replicates


def diagnostics(
    form: Form,
    theta: Theta,
    bounds: Bounds,
    errors: np.ndarray,
    points: int,
    scales: tuple[np.ndarray, float],
) -> tuple[tuple[str, ...], frozenset[str]]:
    """List the problems of a fit.

    Args:
      form, theta, bounds, scales: Form, parameters and units of the fit.
      errors: Half the 90 % interval [P] of each parameter; inf at the upper limit of the search.
      points: Number of fitted points.

    Returns:
      A line each, and the names of the parameters that the points do not determine.
    """
    warnings, unknown = [], set()
    if points < 2 * len(form.names):
        warnings.append(
            f'too few points: {points} for {len(form.names)} parameters; '
            'the curve fits them whatever the law is'
        )
    values = form.params(theta, *scales)
    for name, i in {**form.interpreted, **form.uninterpreted}.items():
        line = ''
        if bounds[i][0] < bounds[i][1] and theta[i] <= bounds[i][0] + _EDGE:
            line = _explain_zero(name, values[name])
        elif errors[i] > _WIDE * abs(theta[i]):
            unknown.add(name)
            line = f'{name} is not identified: {_allowed_range(theta[i], errors[i], values[name])}'
        if line and name in form.interpreted:
            warnings.append(line)
    unknown |= {scale for scale, exponent in form.scale_of.items() if exponent in unknown}
    return tuple(warnings), frozenset(unknown & set(form.names))


def _explain_zero(name: str, value: float) -> str:
    if name in ('c', 'E'):
        return f'no bend: {name} = 0, the points show no irreducible error'
    return f'{name} = {value:.3g}: y does not fall as x grows, so there is no law to fit'


def _allowed_range(theta: float, error: float, value: float) -> str:
    if np.isinf(error):
        return 'the search ended at its limit'
    low, high = (max(theta + move, 0.0) * value / theta for move in (-error, error))
    return f'the points allow {low:.2g} to {high:.2g}'


def _half_intervals(
    theta: Theta,
    bounds: Bounds,
    residuals: np.ndarray,
    jacobian: np.ndarray,
    replicates: np.ndarray,
) -> np.ndarray:
    """Compute half the 90 % interval of each parameter [P], by linearization or bootstrap.

    The wider of the two counts. Infinite at the upper limit of the search, zero for parameters
    that are not fitted.
    """
    low, high = np.array(bounds).T
    is_inside = (low < high) & (theta > low + _EDGE) & (theta < high - _EDGE)
    noise = np.sum(residuals**2) / max(len(residuals) - int(is_inside.sum()), 1)
    covariance = np.linalg.pinv(jacobian[:, is_inside].T @ jacobian[:, is_inside], hermitian=True)
    errors = np.zeros(len(theta))
    errors[is_inside] = 1.645 * np.sqrt(np.maximum(np.diag(covariance), 0) * noise)
    if len(replicates):
        errors = np.maximum(errors, np.ptp(np.quantile(replicates, BAND, axis=0), axis=0) / 2)
    errors[(low < high) & (theta >= high - _EDGE)] = np.inf
    return errors


def distance_note(label: str, ratio: float, measured: float) -> str:
    """Comment on a prediction at `ratio` times the largest fitted x; '' up to `measured`."""
    if ratio <= measured:
        return ''
    far = f'{label} is {ratio:.3g} times the largest one fitted'
    if ratio > FARTHEST:
        return f'{far}: too far for a band; run larger ones'
    return f'{far}: how often bands hold was measured up to {measured:.0f} times'


def rmse(curve: Fit, x: np.ndarray, y: np.ndarray) -> float:
    """Compute the root mean square of log(predicted) - log(y) (extrapolation error if held out)."""
    return rms(np.log(curve.predict(np.asarray(x, float))) - np.log(np.asarray(y, float)))


def rms(values: np.ndarray) -> float:
    """Compute the root mean square."""
    return float(np.sqrt(np.mean(values**2)))


def summarize(curve: Fit) -> dict[str, Any]:
    """Convert a fit to JSON values."""
    return {
        'form': curve.form.name,
        'params': curve.identified_params,
        'bands': curve.bands,
        'n_fit': curve.n_points,
        'fit_rmse': curve.rmse,
        'noise': curve.noise.std,
        'identified': not curve.warnings,
        'warnings': list(curve.warnings),
    }
