"""The default law: a mean of forms, weighted by their errors on an inner hold-out."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

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
_CORRELATED = 0.9  # upper limit on the correlation of neighboring errors


@dataclasses.dataclass(frozen=True)
class WeightedFit:
    """One form of the mean.

    Attributes:
      fit: to all points.
      weight: the weights of all parts sum to 1.
      inner_rmse: error of log y on the upper half of x, fitted to the lower half.
    """

    fit: curve_fit.Fit
    weight: float
    inner_rmse: float


@dataclasses.dataclass(frozen=True)
class MeanFit(curve_fit.Fit):
    """The geometric mean of several fits; form, parameters and warnings are those of the first.

    It is moved towards the point of the largest x, see `fit_average`.

    Attributes:
      parts: in the order of their weights.
      largest: the largest fitted x.
      correlation: of the errors of neighboring points, from 0 to 0.9.
      shift: how far the log of the curve is moved at the largest x and beyond.
    """

    parts: tuple[WeightedFit, ...] = ()
    largest: float = 1.0
    correlation: float = 0.0
    shift: float = 0.0

    @property
    def floor(self) -> float:
        """The mean of the forms' irreducible errors; 0 if one of them has none."""
        floors = [part.fit.floor**part.weight for part in self.parts]
        return float(np.prod(floors) * np.exp(self.shift))

    def predict(self, x: np.ndarray) -> np.ndarray:
        """The mean curve [N] at x [N] or [N, 1]."""
        logs = [part.weight * np.log(part.fit.predict(x)) for part in self.parts]
        return np.exp(np.sum(logs, axis=0) + self.shift * self._nearness(x))

    def _nearness(self, x: np.ndarray) -> np.ndarray:
        """The part [N] of the shift at x: 1 from the largest fitted x on."""
        return np.minimum(np.asarray(x, float).reshape(len(x)) / self.largest, 1.0)

    def band_offsets(self, x: np.ndarray) -> np.ndarray:
        """Distances [2, N] to the ends of the band.

        From the forms' bands, their spread, and the noise of the point towards which the curve is
        moved. As the correlation r of neighboring errors shows that the forms miss the points, the
        band is wider by 1 + r.
        """
        logs = np.log([part.fit.predict(x) for part in self.parts])
        weights = np.array([part.weight for part in self.parts])
        between = np.sqrt(weights @ (logs - weights @ logs) ** 2)
        inside = np.sum([part.weight * part.fit.band_offsets(x) for part in self.parts], axis=0)
        last = np.sqrt(self.correlation) * self.noise.std * self._nearness(x)
        quantile = stats.t.ppf(curve_fit.BAND[1], self.dof)
        apart = quantile * np.hypot(between, last)
        return (1 + self.correlation) * np.hypot(inside, apart)

    @property
    def dof(self) -> float:
        """Degrees of freedom, at least 2: points less mean number of parameters, and of seeds."""
        used = sum(part.weight * len(part.fit.form.names) for part in self.parts)
        return max(self.n_points - used + self.noise.dof, 2)

    @property
    def chosen(self) -> str:
        """The forms with their weights and inner errors as text."""
        return ', '.join(
            f'{part.fit.form.name} {part.weight:.2f} (inner error {part.inner_rmse:.4f})'
            for part in self.parts
        )


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
    smallest inner error (docs/scaling.md). Where errors of neighbors are correlated by r, the mean
    is moved to the point of the largest x by the square root of r of its error there: such errors
    last. Two columns of x are fitted by `joint`.

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
    found = []
    for name, weight in _weights(errors).items():
        try:
            form = forms.find(name)
            one = curve_fit.fit(form, x, y, bootstrap=bootstrap, seed=seed, seeds=seeds)
        except UserError:
            continue
        found.append(WeightedFit(one, weight, errors[name]))
    if not found:
        return _few(x, y, seeds)
    total = sum(part.weight for part in found)
    parts = tuple(dataclasses.replace(part, weight=part.weight / total) for part in found)
    first = parts[0].fit
    fields = {field.name: getattr(first, field.name) for field in dataclasses.fields(first)}
    mean = MeanFit(**fields, parts=parts)
    mean = _anchored(mean, x, y)
    residuals = np.log(mean.predict(x)) - np.log(y)
    mean = dataclasses.replace(mean, rmse=curve_fit.rms(residuals))
    noise = min(noise for _, noise in inner.values())
    excess = min(errors.values()) / max(noise, _MIN_NOISE)
    if excess <= _BREAK:
        return mean
    return _without_band(
        mean,
        'the points show a break: the law of their lower half in x misses the upper half by '
        f'{excess:.0f} times the noise; no band',
    )


def _anchored(mean: MeanFit, x: np.ndarray, y: np.ndarray) -> MeanFit:
    """The mean, moved by the part of its error at the largest x that lasts beyond it."""
    at = x[:, 0] if x.ndim == 2 else x
    order = np.argsort(at)
    errors = (np.log(y) - np.log(mean.predict(x)))[order]
    used = sum(part.weight * len(part.fit.form.names) for part in mean.parts)
    r = float(np.clip(neighbor_correlation(errors, used), 0.0, _CORRELATED))
    most = _OUTLIER * 1.4826 * float(np.median(np.abs(errors - np.median(errors))))
    shift = float(np.sqrt(r) * np.clip(errors[-1], -most, most))
    return dataclasses.replace(mean, largest=float(at[order[-1]]), correlation=r, shift=shift)


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
        parts = tuple(
            dataclasses.replace(part, fit=_with_shared_noise(part.fit, variance, worth))
            for part in fit.parts
        )
        return dataclasses.replace(fit, parts=parts, noise=parts[0].fit.noise)
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
    name: str, x: np.ndarray, y: np.ndarray, seeds: Seeds | None = None
) -> tuple[float, float] | None:
    """Fit a form below half of the largest x, and measure its error above.

    Returns:
      The error of log y above, and the noise below; None if the points are too few.
    """
    form = forms.find(name)
    if len(y) <= len(form.names):
        return None
    x = x[:, 0] if x.ndim == 2 else x
    below = x <= x.max() / 2
    free = int(below.sum()) - len(form.names)
    if free <= 0 or below.all():
        return None
    try:
        seen = None if seeds is None else seeds.take(below)
        found = curve_fit.fit(form, x[below], y[below], seeds=seen)
    except UserError:
        return None
    return curve_fit.rmse(found, x[~below], y[~below]), found.rmse * np.sqrt(below.sum() / free)


def _weights(errors: dict[str, float]) -> dict[str, float]:
    """Weights by the inverse square of the errors, without negligible forms.

    In their order; of forms whose errors are alike, the one with the fewest parameters first.
    """
    if not errors:
        return {}
    raw = {name: 1 / max(error, 1e-9) ** 2 for name, error in errors.items()}
    total = sum(raw.values())
    kept = {name: value / total for name, value in raw.items() if value >= _MIN_WEIGHT * total}
    tie = max(_TIE * min(errors.values()), _MIN_NOISE)

    def rank(name: str) -> tuple[bool, int, float]:
        tied = errors[name] <= tie
        return not tied, len(forms.find(name).names) if tied else 0, -kept[name]

    return {name: kept[name] for name in sorted(kept, key=rank)}


def _few(x: np.ndarray, y: np.ndarray, seeds: Seeds | None) -> curve_fit.Fit:
    """Fit the largest form with fewer parameters than points, and add a note."""
    form = forms.with_fewer(forms.find('shifted'), len(y))
    curve_fit.require_more(form, len(y), seeds)
    found = curve_fit.fit(form, x, y, seeds=seeds)
    note = f'{len(y)} points are too few to hold some out: fitted by {form.name}'
    return _without_band(found, f'{note}; they cannot show a break: no band')
