"""Default law: a mean of forms, weighted by their errors on an inner hold-out."""

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
from vit_jax.scaling.noise import Seeds, common_variance, neighbor_correlation

AUTO = 'auto'
FORMULA = 'a mean of forms, weighted by their errors on the upper half of the fitted x'
CANDIDATES = ('irreducible', 'shifted', 'm4')  # `power` is a special case of these
_MIN_WEIGHT = 0.05  # least weight of a form in the mean
_TIE = 1.05  # largest ratio of inner errors that count as equal
_MIN_NOISE = 1e-4  # least noise of log y
_MIN_CURVES = 3  # least number of curves that share their noise
_BREAK = 6.0  # inner error over noise above which the points show a break
_OUTLIER = 3.0  # robust standard deviations up to which the last point moves the law
_SPANS = (16.0, 8.0)  # largest x over the smallest one in the fit of a late law
_LATE = (0.4, 0.6)  # correlations from which late laws count, and from which they count most
_MOST_LATE = 0.9  # largest share of late laws in the mean
_INSIDE = 0.3  # factor of the forms' bands in the band of a mean
_BETWEEN = 1.5  # factor of the spread of the forms
_DRIFT = 0.042  # error of log y for each factor of e beyond the largest x
_LOWER = 1.5  # factor of the distance to the lower end of a band
_Key = TypeVar('_Key', bound=Hashable)


@dataclasses.dataclass(frozen=True)
class WeightedFit:
    """A form in the mean.

    Attributes:
      fit: Fit to all points, or to the points of the last `span`.
      weight: Weight in the mean; all weights sum to 1.
      inner_rmse: Error of log y on the upper half of x, fitted to the lower half.
      span: Ratio of the largest x to the smallest one fitted; inf for all points.
    """

    fit: curve_fit.Fit
    weight: float
    inner_rmse: float
    span: float = np.inf


@dataclasses.dataclass(frozen=True)
class MeanFit(curve_fit.Fit):
    """Geometric mean of several fits, with the form, parameters and warnings of the first.

    Towards large x it passes into a mean of late laws, and it is shifted towards the point of the
    largest x; see `fit_average`.

    Attributes:
      parts: Fits to all points, in the order of their weights.
      largest: Largest fitted x.
      late: Fits to the points of large x.
      late_share: Share of `late` at the largest x and beyond.
      shift: Shift of the log of the curve at the largest x and beyond.
      growth: Factor of the band: growth of the errors towards the last points, see `_growth`.
    """

    parts: tuple[WeightedFit, ...] = ()
    largest: float = 1.0
    late: tuple[WeightedFit, ...] = ()
    late_share: float = 0.0
    shift: float = 0.0
    growth: float = 1.0

    @property
    def floor(self) -> float:
        """Mean of the forms' irreducible errors; 0 if one of them has none."""
        weights = self._weights_at(np.array([self.largest]))[:, 0]
        floors = [part.fit.floor**w for part, w in zip(self._all_parts, weights, strict=True)]
        return float(np.prod(floors) * np.exp(self.shift))

    def predict(self, x: np.ndarray) -> np.ndarray:
        """Evaluate the mean curve [N] at x [N] or [N, 1]."""
        logs = np.log([part.fit.predict(x) for part in self._all_parts])
        mean = np.sum(self._weights_at(x) * logs, axis=0)
        return np.exp(mean + self.shift * self._nearness(x))

    @property
    def _all_parts(self) -> tuple[WeightedFit, ...]:
        return *self.parts, *self.late

    def _weights_at(self, x: np.ndarray) -> np.ndarray:
        """Weight all parts [P, N] at x; the weights of late laws rise over the shortest span.

        They rise as the quintic smoothstep of log x. The spread of the parts grows like its square
        root where the rise begins, and even that has no corner.
        """
        weights = np.array([part.weight for part in self._all_parts])
        is_late = np.arange(len(weights)) >= len(self.parts)
        rise = np.maximum(1 + np.log(self._clip_to_fitted(x)) / np.log(min(_SPANS)), 0.0)
        share = self.late_share * rise**3 * (10 - 15 * rise + 6 * rise**2)
        return weights[:, None] * np.where(is_late[:, None], share, 1 - share)

    def _nearness(self, x: np.ndarray) -> np.ndarray:
        """Share [N] of the shift at x, which rises smoothly to 1 at the largest fitted x."""
        ratio = self._clip_to_fitted(x)
        return ratio**2 * (3 - 2 * ratio)

    def _clip_to_fitted(self, x: np.ndarray) -> np.ndarray:
        """Divide x [N] by the largest fitted x; at most 1."""
        return np.minimum(np.asarray(x, float).reshape(len(x)) / self.largest, 1.0)

    def band_offsets(self, x: np.ndarray) -> np.ndarray:
        """Compute the distances [2, N] to the ends of the band.

        The band has four sources: the forms' bands, their spread, the noise of the point to which
        the curve is shifted, and a drift beyond it. It is wider below, where most misses were. The
        factors were chosen by coverage (docs/predictions.md).
        """
        parts, weights = self._all_parts, self._weights_at(x)
        logs = np.log([part.fit.predict(x) for part in parts])
        center = np.sum(weights * logs, axis=0)
        between = np.sqrt(np.sum(weights * (logs - center) ** 2, axis=0))
        offsets = np.array([part.fit.band_offsets(x) for part in parts])
        mean_offset = np.sum(weights[:, None] * offsets, axis=0)
        last_noise = self.noise.std * self._nearness(x)
        quantile = stats.t.ppf(curve_fit.BAND[1], self.dof)
        spread = quantile * np.hypot(_BETWEEN * between, last_noise)
        beyond = _DRIFT * np.log(np.maximum(_first_column(x) / self.largest, 1.0))
        widths = self.growth * np.hypot(np.hypot(_INSIDE * mean_offset, spread), beyond)
        return widths * np.array([[_LOWER], [1.0]])

    @property
    def dof(self) -> float:
        """Degrees of freedom, at least 2: points minus mean number of parameters, plus seeds."""
        return max(self.n_points - self._used + self.noise.dof, 2)

    @property
    def _used(self) -> float:
        """Mean number of parameters of the forms."""
        return sum(part.weight * len(part.fit.form.names) for part in self.parts)

    @property
    def chosen(self) -> str:
        """Forms with their weights and inner errors as text."""
        texts = [
            f'{part.fit.form.name} {part.weight:.2f} (inner error {part.inner_rmse:.4f})'
            for part in self.parts
        ]
        return ', '.join([*texts, *([self.late_text] if self.late else [])])

    @property
    def late_text(self) -> str:
        """Share of late laws as text; empty without any."""
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
    smallest inner error (docs/laws.md). The mean is shifted to the point of the largest x.
    Correlated errors of neighbors show that the forms miss the points; then the mean passes into a
    weighted mean of fits to the points within a factor of 16 and of 8 of the largest x. Two columns
    of x are fitted by `joint`.

    Args:
      x, y: Points, [N] or [N, K], and [N].
      bootstrap, seed, seeds: See `curve_fit.fit`.

    Raises:
      UserError: See `curve_fit.fit`.
    """
    if x.ndim == 2 and x.shape[1] > 1:
        return curve_fit.fit(
            forms.find_form('joint'), x, y, bootstrap=bootstrap, seed=seed, seeds=seeds
        )
    hold_outs = {name: hold_out_upper(name, x, y, seeds) for name in CANDIDATES}
    inner = {name: result for name, result in hold_outs.items() if result is not None}
    errors = {name: error for name, (error, _) in inner.items()}
    fit_forms = functools.partial(_fit_forms, x, y, bootstrap=bootstrap, seed=seed, seeds=seeds)
    parts = fit_forms({(name, np.inf): errors[name] for name in _rank_forms(errors)})
    if not parts:
        return _fit_few(x, y, seeds)
    first = parts[0].fit
    fields = {field.name: getattr(first, field.name) for field in dataclasses.fields(first)}
    mean = MeanFit(**fields, parts=parts, largest=float(_first_column(x).max()))
    mean = _shift_to_last(_add_late_laws(mean, x, y, seeds, fit_forms), x, y)
    residuals = _errors(mean, x, y)
    mean = dataclasses.replace(mean, rmse=curve_fit.rms(residuals), growth=_growth(residuals))
    noise = min(noise for _, noise in inner.values())
    excess = min(errors.values()) / max(noise, _MIN_NOISE)
    if excess <= _BREAK:
        return mean
    return _drop_band(
        mean,
        'the points show a break: the law of their lower half in x misses the upper half by '
        f'{excess:.0f} times the noise; no band',
    )


def _fit_forms(
    x: np.ndarray,
    y: np.ndarray,
    errors: Mapping[tuple[str, float], float],
    *,
    bootstrap: int,
    seed: int,
    seeds: Seeds | None,
) -> tuple[WeightedFit, ...]:
    """Fit each form to the points of its span, for {(form, span): inner error}, in this order.

    Forms that have a negligible weight or cannot be fitted are left out. Only the first form shows
    bands of its parameters, so only the first is bootstrapped.
    """
    fits: list[WeightedFit] = []
    sizes = _first_column(x)
    for (name, span), weight in _weights(errors).items():
        in_span = sizes >= sizes.max() / span
        span_seeds = seeds.take(in_span) if seeds else None
        count = min(bootstrap, 1) if fits or np.isfinite(span) else bootstrap
        try:
            form = forms.find_form(name)
            fit = curve_fit.fit(
                form, x[in_span], y[in_span], bootstrap=count, seed=seed, seeds=span_seeds
            )
        except UserError:
            continue
        fits.append(WeightedFit(fit, weight, errors[name, span], span))
    total = sum(part.weight for part in fits)
    return tuple(dataclasses.replace(part, weight=part.weight / total) for part in fits)


def _errors(mean: MeanFit, x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Compute the errors [N] of the log of the mean, in the order of x."""
    return (np.log(y) - np.log(mean.predict(x)))[np.argsort(_first_column(x))]


def _add_late_laws(
    mean: MeanFit, x: np.ndarray, y: np.ndarray, seeds: Seeds | None, fit_forms: Callable[..., Any]
) -> MeanFit:
    """Add fits to the last points to the mean if its errors are correlated."""
    correlation = neighbor_correlation(_errors(mean, x, y), mean._used)
    share = _MOST_LATE * float(np.interp(correlation, _LATE, (0.0, 1.0)))
    spans = [span for span in _SPANS if _first_column(x).min() < mean.largest / span]
    errors = {}
    for span, name in itertools.product(spans if share else (), CANDIDATES):
        if hold_out := hold_out_upper(name, x, y, seeds, span):
            errors[name, span] = hold_out[0]
    late = fit_forms(errors)
    return dataclasses.replace(mean, late=late, late_share=share if late else 0.0)


def _shift_to_last(mean: MeanFit, x: np.ndarray, y: np.ndarray) -> MeanFit:
    """Shift the mean towards the point of the largest x, at most as far as it is not an outlier."""
    errors = _errors(mean, x, y)
    limit = _OUTLIER * 1.4826 * float(np.median(np.abs(errors - np.median(errors))))
    return dataclasses.replace(mean, shift=float(np.clip(errors[-1], -limit, limit)))


def _growth(errors: np.ndarray) -> float:
    """Divide the RMS of the last third of errors [N] by the RMS of all; at least 1."""
    last = errors[-max(len(errors) // 3, 3) :]
    return max(curve_fit.rms(last) / max(curve_fit.rms(errors), 1e-12), 1.0)


def share_noise(fits: Sequence[curve_fit.Fit | None]) -> list[curve_fit.Fit | None]:
    """Shrink the noise of each fit of a table towards their common noise.

    A few points hardly determine their noise. Fits with noise from seeds, or without a profile
    likelihood, do not change. Fewer than three other fits do not change either.
    """
    estimates = [(0.0, 0.0) if fit is None else _variance(fit) for fit in fits]
    variances, dof = np.array([pair for pair in estimates if min(pair) > 0] or [(1.0, 0.0)]).T
    if len(dof) < _MIN_CURVES:
        return list(fits)
    variance, prior_dof = common_variance(variances, dof)
    total = float(dof.sum())
    return [
        # The fit's errors are part of the total.
        _blend_noise(fit, variance, min(prior_dof, total - free))
        if fit and squares and free
        else fit
        for fit, (squares, free) in zip(fits, estimates, strict=True)
    ]


def _variance(fit: curve_fit.Fit) -> tuple[float, float]:
    """Estimate the noise variance of a fit from its errors, with their degrees of freedom."""
    if fit.noise.measured or fit.points is None:
        return 0.0, 0.0
    parts = fit.parts if isinstance(fit, MeanFit) else (WeightedFit(fit, 1.0, 0.0),)
    dof = [part.weight * _residual_dof(part.fit) for part in parts]
    squares = [n * part.fit.noise.std**2 for n, part in zip(dof, parts, strict=True)]
    return sum(squares) / max(sum(dof), 1e-9), sum(dof)


def _residual_dof(fit: curve_fit.Fit) -> int:
    return max(fit.n_points - len(fit.form.names), 0)


def _blend_noise(fit: curve_fit.Fit, variance: float, worth: float) -> curve_fit.Fit:
    """Blend a common variance, worth so many points, into the noise of a fit or its parts."""
    if isinstance(fit, MeanFit):
        parts, late = (
            tuple(
                dataclasses.replace(part, fit=_blend_noise(part.fit, variance, worth))
                for part in fits
            )
            for fits in (fit.parts, fit.late)
        )
        return dataclasses.replace(fit, parts=parts, late=late, noise=parts[0].fit.noise)
    total = _residual_dof(fit) * fit.noise.std**2 + worth * variance
    std = float(np.sqrt(total / (_residual_dof(fit) + worth)))
    noise = dataclasses.replace(fit.noise, std=std, shared=worth)
    return dataclasses.replace(fit, noise=noise)


def _drop_band(fit: curve_fit.Fit, reason: str) -> curve_fit.Fit:
    no_replicates = fit.replicates[:0]
    return dataclasses.replace(fit, replicates=no_replicates, warnings=(reason, *fit.warnings))


def form_name(fit: curve_fit.Fit) -> str:
    """Name the form of a fit; `auto` for a mean."""
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
      name: Name of a form.
      x, y, seeds: See `fit_average`.
      span: Ratio of the largest x in the lower half to the smallest one fitted.

    Returns:
      Error of log y above, and noise below; None if the points are too few.
    """
    form = forms.find_form(name)
    if len(y) <= len(form.names):
        return None
    x = _first_column(x)
    upper = x > x.max() / 2
    if upper.all():
        return None
    below = ~upper & (x >= x[~upper].max() / span)
    dof = int(below.sum()) - len(form.names)
    if dof <= 0:
        return None
    try:
        seeds_below = None if seeds is None else seeds.take(below)
        fit = curve_fit.fit(form, x[below], y[below], seeds=seeds_below)
    except UserError:
        return None
    return curve_fit.rmse(fit, x[upper], y[upper]), fit.rmse * np.sqrt(below.sum() / dof)


def _first_column(x: np.ndarray) -> np.ndarray:
    return x[:, 0] if x.ndim == 2 else x


def _weights(errors: Mapping[_Key, float]) -> dict[_Key, float]:
    """Weight by the inverse square of the errors, without negligible weights."""
    raw = {key: 1 / max(error, 1e-9) ** 2 for key, error in errors.items()}
    total = sum(raw.values())
    return {key: value / total for key, value in raw.items() if value >= _MIN_WEIGHT * total}


def _rank_forms(errors: Mapping[str, float]) -> list[str]:
    """Sort forms by their errors; among equal errors, forms with fewer parameters come first."""
    tie = max(_TIE * min(errors.values(), default=0.0), _MIN_NOISE)

    def rank(name: str) -> tuple[bool, int, float]:
        tied = errors[name] <= tie
        return not tied, len(forms.find_form(name).names) if tied else 0, errors[name]

    return sorted(errors, key=rank)


def _fit_few(x: np.ndarray, y: np.ndarray, seeds: Seeds | None) -> curve_fit.Fit:
    """Fit the largest form with fewer parameters than points, and add a note."""
    form = forms.simplify(forms.find_form('shifted'), len(y))
    curve_fit.require_more(form, len(y), seeds)
    fit = curve_fit.fit(form, x, y, seeds=seeds)
    note = f'{len(y)} points are too few to hold some out: fitted by {form.name}'
    return _drop_band(fit, f'{note}; they cannot show a break: no band')
