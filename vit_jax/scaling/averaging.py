"""The default law: a mean of forms, weighted by their errors on an inner hold-out."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np
from scipy import stats

from vit_jax.errors import UserError
from vit_jax.scaling import curve_fit, forms
from vit_jax.scaling.noise import Seeds, common, neighbor_correlation

AUTO = 'auto'
FORMULA = 'a mean of forms, weighted by their errors on the upper half of the fitted x'
CANDIDATES = ('irreducible', 'shifted', 'm4')  # `power` is a special case of these
_MIN_WEIGHT = 0.05  # of a form that is kept
_TIE = 1.05  # ratio of inner errors that are alike
_MIN_NOISE = 1e-4  # of log y
_MIN_CURVES = 3  # whose noise can be shared
_BREAK = 6.0  # inner error over noise above which the points show a break
_OUTLIER = 3.0  # robust standard deviations up to which the last point moves the law
_SPANS = (16.0, 8.0)  # ratios of the largest x to the smallest that late laws are fitted to
_LATE = (0.4, 0.6)  # correlations from which late laws count, and from which they count most
_MOST_LATE = 0.9  # of the mean
_INSIDE = 0.3  # factor of the forms' bands, in the band of a mean
_BETWEEN = 1.5  # factor of their spread
_DRIFT = 0.042  # of log y, by which laws miss for each factor of e beyond the largest x
_LOWER = 1.5  # factor of the distance to the lower end of a band
_Key = TypeVar('_Key', bound=Hashable)


@dataclasses.dataclass(frozen=True)
class WeightedFit:
    """One form of the mean.

    Attributes:
      fit: to all points, or to those of the last `span`.
      weight: the weights of all parts sum to 1.
      inner_rmse: error of log y on the upper half of x, fitted to the lower half.
      span: ratio of the largest x to the smallest fitted; inf for all points.
    """

    fit: curve_fit.Fit
    weight: float
    inner_rmse: float
    span: float = np.inf


@dataclasses.dataclass(frozen=True)
class MeanFit(curve_fit.Fit):
    """The geometric mean of several fits; form, parameters and warnings are those of the first.

    It passes into a mean of late laws and is moved towards the point of the largest x, see
    `fit_average`.

    Attributes:
      parts: fits to all points, in the order of their weights.
      largest: the largest fitted x.
      late: fits to the points of large x.
      late_share: the share of `late` at the largest x and beyond.
      shift: how far the log of the curve is moved at the largest x and beyond.
      growth: of the errors among the last points, see `_growth`; a factor of the band.
    """

    parts: tuple[WeightedFit, ...] = ()
    largest: float = 1.0
    late: tuple[WeightedFit, ...] = ()
    late_share: float = 0.0
    shift: float = 0.0
    growth: float = 1.0

    @property
    def floor(self) -> float:
        """The mean of the forms' irreducible errors; 0 if one of them has none."""
        weights = self._weights_at(np.array([self.largest]))[:, 0]
        floors = [part.fit.floor**w for part, w in zip(self._all_parts, weights, strict=True)]
        return float(np.prod(floors) * np.exp(self.shift))

    def predict(self, x: np.ndarray) -> np.ndarray:
        """The mean curve [N] at x [N] or [N, 1]."""
        logs = np.log([part.fit.predict(x) for part in self._all_parts])
        mean = np.sum(self._weights_at(x) * logs, axis=0)
        return np.exp(mean + self.shift * self._nearness(x))

    @property
    def _all_parts(self) -> tuple[WeightedFit, ...]:
        return *self.parts, *self.late

    def _weights_at(self, x: np.ndarray) -> np.ndarray:
        """The weights [P, N] of all parts at x; those of late laws rise over the shortest span.

        They rise as the quintic smoothstep of log x: even its square root, to which the spread of
        the parts is proportional where the rise begins, has no corner there.
        """
        weights = np.array([part.weight for part in self._all_parts])
        is_late = np.arange(len(weights)) >= len(self.parts)
        rise = np.maximum(1 + np.log(self._reached(x)) / np.log(min(_SPANS)), 0.0)
        share = self.late_share * rise**3 * (10 - 15 * rise + 6 * rise**2)
        return weights[:, None] * np.where(is_late[:, None], share, 1 - share)

    def _nearness(self, x: np.ndarray) -> np.ndarray:
        """The part [N] of the shift at x: it rises to 1 at the largest fitted x, smoothly."""
        reached = self._reached(x)
        return reached**2 * (3 - 2 * reached)

    def _reached(self, x: np.ndarray) -> np.ndarray:
        """x [N] over the largest fitted one, at most 1."""
        return np.minimum(np.asarray(x, float).reshape(len(x)) / self.largest, 1.0)

    def band_offsets(self, x: np.ndarray) -> np.ndarray:
        """Distances [2, N] to the ends of the band.

        From the forms' bands, their spread, the noise of the point towards which the curve is
        moved, and a drift beyond it; wider below, where most misses were. The factors were chosen
        by coverage (docs/predictions.md).
        """
        parts, weights = self._all_parts, self._weights_at(x)
        logs = np.log([part.fit.predict(x) for part in parts])
        center = np.sum(weights * logs, axis=0)
        between = np.sqrt(np.sum(weights * (logs - center) ** 2, axis=0))
        offsets = np.array([part.fit.band_offsets(x) for part in parts])
        inside = np.sum(weights[:, None] * offsets, axis=0)
        last = self.noise.std * self._nearness(x)
        quantile = stats.t.ppf(curve_fit.BAND[1], self.dof)
        apart = quantile * np.hypot(_BETWEEN * between, last)
        beyond = _DRIFT * np.log(np.maximum(_first_column(x) / self.largest, 1.0))
        found = self.growth * np.hypot(np.hypot(_INSIDE * inside, apart), beyond)
        return found * np.array([[_LOWER], [1.0]])

    @property
    def dof(self) -> float:
        """Degrees of freedom, at least 2: points less mean number of parameters, and of seeds."""
        return max(self.n_points - self._used + self.noise.dof, 2)

    @property
    def _used(self) -> float:
        """The mean number of parameters of the forms."""
        return sum(part.weight * len(part.fit.form.names) for part in self.parts)

    @property
    def chosen(self) -> str:
        """The forms with their weights and inner errors as text."""
        texts = [
            f'{part.fit.form.name} {part.weight:.2f} (inner error {part.inner_rmse:.4f})'
            for part in self.parts
        ]
        return ', '.join([*texts, *([self.late_words] if self.late else [])])

    @property
    def late_words(self) -> str:
        """The share of late laws as text; empty without any."""
        spans = sorted({part.span for part in self.late}, reverse=True)
        names = ' and '.join(f'{span:g}x' for span in spans)
        return f'{self.late_share:.0%} of the last {names}' if self.late else ''


def fit_average(
    x: np.ndarray,
    y: np.ndarray,
    *,
    bootstrap: int = 0,
    seed: int = 0,
    seeds: Seeds | None = None,
) -> curve_fit.Fit:
    """Fit the forms that the number of points allows, and weight them by an inner hold-out.

    Weights are proportional to the inverse square of the error on the upper half in x, predicted
    from the lower half. On published image curves a mean extrapolates better than the form with the
    smallest inner error (docs/scaling.md). It is moved to the point of the largest x. Where errors
    of neighbors are correlated, the forms miss the points, and the mean passes into one, likewise
    weighted, of fits to the points within a factor of 16 and of 8 of the largest x.
    Two columns of x are fitted by `joint`.

    Args:
      x, y: [N] or [N, K], and [N].
      bootstrap, seed, seeds: as in `curve_fit.fit`.

    Raises:
      UserError: as `curve_fit.fit`.
    """
    if x.ndim == 2 and x.shape[1] > 1:
        return curve_fit.fit(forms.find('joint'), x, y, bootstrap=bootstrap, seed=seed, seeds=seeds)
    tried = {name: hold_out_upper(name, x, y, seeds) for name in CANDIDATES}
    inner = {name: held for name, held in tried.items() if held is not None}
    errors = {name: error for name, (error, _) in inner.items()}
    fitted = functools.partial(_fitted, x, y, bootstrap=bootstrap, seed=seed, seeds=seeds)
    parts = fitted({(name, np.inf): errors[name] for name in _ranked(errors)})
    if not parts:
        return _few(x, y, seeds)
    first = parts[0].fit
    fields = {field.name: getattr(first, field.name) for field in dataclasses.fields(first)}
    mean = MeanFit(**fields, parts=parts, largest=float(_first_column(x).max()))
    mean = _moved(_with_late_laws(mean, x, y, seeds, fitted), x, y)
    residuals = _errors(mean, x, y)
    mean = dataclasses.replace(mean, rmse=curve_fit.rms(residuals), growth=_growth(residuals))
    noise = min(noise for _, noise in inner.values())
    excess = min(errors.values()) / max(noise, _MIN_NOISE)
    if excess <= _BREAK:
        return mean
    return _without_band(
        mean,
        'the points show a break: the law of their lower half in x misses the upper half by '
        f'{excess:.0f} times the noise; no band',
    )


def _fitted(
    x: np.ndarray,
    y: np.ndarray,
    errors: Mapping[tuple[str, float], float],
    *,
    bootstrap: int,
    seed: int,
    seeds: Seeds | None,
) -> tuple[WeightedFit, ...]:
    """Fit each form to the points of its span, for {(form, span): inner error}, in this order.

    Forms of negligible weight, and those of which no fit is found, are left out. Only the first
    form shows bands of its parameters, so only that is bootstrapped.
    """
    fits: list[WeightedFit] = []
    at = _first_column(x)
    for (name, span), weight in _weights(errors).items():
        last = at >= at.max() / span
        some = seeds.take(last) if seeds else None
        count = min(bootstrap, 1) if fits or np.isfinite(span) else bootstrap
        try:
            form = forms.find(name)
            one = curve_fit.fit(form, x[last], y[last], bootstrap=count, seed=seed, seeds=some)
        except UserError:
            continue
        fits.append(WeightedFit(one, weight, errors[name, span], span))
    total = sum(part.weight for part in fits)
    return tuple(dataclasses.replace(part, weight=part.weight / total) for part in fits)


def _errors(mean: MeanFit, x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Errors [N] of the log of the mean, in the order of x."""
    return (np.log(y) - np.log(mean.predict(x)))[np.argsort(_first_column(x))]


def _with_late_laws(
    mean: MeanFit, x: np.ndarray, y: np.ndarray, seeds: Seeds | None, fitted: Callable[..., Any]
) -> MeanFit:
    """The mean with fits to the last points, if its errors are correlated."""
    correlation = neighbor_correlation(_errors(mean, x, y), mean._used)
    share = _MOST_LATE * float(np.interp(correlation, _LATE, (0.0, 1.0)))
    spans = [span for span in _SPANS if _first_column(x).min() < mean.largest / span]
    errors = {}
    for span, name in itertools.product(spans if share else (), CANDIDATES):
        if held := hold_out_upper(name, x, y, seeds, span):
            errors[name, span] = held[0]
    late = fitted(errors)
    return dataclasses.replace(mean, late=late, late_share=share if late else 0.0)


def _moved(mean: MeanFit, x: np.ndarray, y: np.ndarray) -> MeanFit:
    """The mean, moved to the point of the largest x, if that is no outlier."""
    errors = _errors(mean, x, y)
    most = _OUTLIER * 1.4826 * float(np.median(np.abs(errors - np.median(errors))))
    return dataclasses.replace(mean, shift=float(np.clip(errors[-1], -most, most)))


def _growth(errors: np.ndarray) -> float:
    """The root mean square of the last third of errors [N] over that of all; at least 1."""
    last = errors[-max(len(errors) // 3, 3) :]
    return max(curve_fit.rms(last) / max(curve_fit.rms(errors), 1e-12), 1.0)


def share_noise(fits: Sequence[curve_fit.Fit | None]) -> list[curve_fit.Fit | None]:
    """Shrink the noise of each fit of a table towards their common noise.

    A few points hardly determine their noise. Fits with noise from seeds, or without a profile
    likelihood, stay as they are, and so do fewer than three others.
    """
    own = [(0.0, 0.0) if fit is None else _variance(fit) for fit in fits]
    variances, dof = np.array([pair for pair in own if min(pair) > 0] or [(1.0, 0.0)]).T
    if len(dof) < _MIN_CURVES:
        return list(fits)
    variance, most = common(variances, dof)
    total = float(dof.sum())
    return [
        # Its own errors count already.
        _with_shared_noise(fit, variance, min(most, total - free))
        if fit and squares and free
        else fit
        for fit, (squares, free) in zip(fits, own, strict=True)
    ]


def _variance(fit: curve_fit.Fit) -> tuple[float, float]:
    """The noise variance of a fit from its own errors, and their degrees of freedom."""
    if fit.noise.measured or fit.points is None:
        return 0.0, 0.0
    parts = fit.parts if isinstance(fit, MeanFit) else (WeightedFit(fit, 1.0, 0.0),)
    dof = [part.weight * _free(part.fit) for part in parts]
    squares = [n * part.fit.noise.std**2 for n, part in zip(dof, parts, strict=True)]
    return sum(squares) / max(sum(dof), 1e-9), sum(dof)


def _free(fit: curve_fit.Fit) -> int:
    return max(fit.n_points - len(fit.form.names), 0)


def _with_shared_noise(fit: curve_fit.Fit, variance: float, worth: float) -> curve_fit.Fit:
    """The fit, or each part of a mean, with a common variance that counts as so many points."""
    if isinstance(fit, MeanFit):
        parts, late = (
            tuple(
                dataclasses.replace(part, fit=_with_shared_noise(part.fit, variance, worth))
                for part in some
            )
            for some in (fit.parts, fit.late)
        )
        return dataclasses.replace(fit, parts=parts, late=late, noise=parts[0].fit.noise)
    total = _free(fit) * fit.noise.std**2 + worth * variance
    std = float(np.sqrt(total / (_free(fit) + worth)))
    noise = dataclasses.replace(fit.noise, std=std, shared=worth)
    return dataclasses.replace(fit, noise=noise)


def _without_band(fit: curve_fit.Fit, reason: str) -> curve_fit.Fit:
    none = fit.replicates[:0]
    return dataclasses.replace(fit, replicates=none, warnings=(reason, *fit.warnings))


def form_name(fit: curve_fit.Fit) -> str:
    """The name of the form of a fit; `auto` for a mean."""
    return AUTO if isinstance(fit, MeanFit) else fit.form.name


def hold_out_upper(
    name: str,
    x: np.ndarray,
    y: np.ndarray,
    seeds: Seeds | None = None,
    span: float = np.inf,
) -> tuple[float, float] | None:
    """Fit a form below half of the largest x, and measure its error above.

    Args:
      name: of a form.
      x, y, seeds: as in `fit_average`.
      span: ratio of the largest x below to the smallest that is fitted.

    Returns:
      The error of log y above, and the noise below; None if the points are too few.
    """
    form = forms.find(name)
    if len(y) <= len(form.names):
        return None
    x = _first_column(x)
    upper = x > x.max() / 2
    if upper.all():
        return None
    below = ~upper & (x >= x[~upper].max() / span)
    free = int(below.sum()) - len(form.names)
    if free <= 0:
        return None
    try:
        seen = None if seeds is None else seeds.take(below)
        found = curve_fit.fit(form, x[below], y[below], seeds=seen)
    except UserError:
        return None
    return curve_fit.rmse(found, x[upper], y[upper]), found.rmse * np.sqrt(below.sum() / free)


def _first_column(x: np.ndarray) -> np.ndarray:
    return x[:, 0] if x.ndim == 2 else x


def _weights(errors: Mapping[_Key, float]) -> dict[_Key, float]:
    """Weights by the inverse square of the errors, without negligible ones."""
    raw = {key: 1 / max(error, 1e-9) ** 2 for key, error in errors.items()}
    total = sum(raw.values())
    return {key: value / total for key, value in raw.items() if value >= _MIN_WEIGHT * total}


def _ranked(errors: Mapping[str, float]) -> list[str]:
    """Names of forms by their errors; of those alike, the one with the fewest parameters first."""
    tie = max(_TIE * min(errors.values(), default=0.0), _MIN_NOISE)

    def rank(name: str) -> tuple[bool, int, float]:
        tied = errors[name] <= tie
        return not tied, len(forms.find(name).names) if tied else 0, errors[name]

    return sorted(errors, key=rank)


def _few(x: np.ndarray, y: np.ndarray, seeds: Seeds | None) -> curve_fit.Fit:
    """Fit the largest form with fewer parameters than points, and add a note."""
    form = forms.with_fewer(forms.find('shifted'), len(y))
    curve_fit.require_more(form, len(y), seeds)
    found = curve_fit.fit(form, x, y, seeds=seeds)
    note = f'{len(y)} points are too few to hold some out: fitted by {form.name}'
    return _without_band(found, f'{note}; they cannot show a break: no band')
