"""The default law: a mean of forms, weighted by their errors on points held out within the fit."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
from scipy import stats

from vit_jax.errors import UserError
from vit_jax.scaling import fit as fit_lib
from vit_jax.scaling import forms
from vit_jax.scaling import noise as noise_lib
from vit_jax.scaling.noise import Seeds

AUTO = 'auto'
FORMULA = 'a mean of forms, weighted by their errors on the upper half of the fitted x'
CANDIDATES = ('irreducible', 'shifted', 'm4')  # of which `power` is a special case
_LEAST = 0.05  # weight of a form that is kept
_EXACT = 1e-4  # noise of log y that points have at least
_CURVES = 3  # whose noise is compared
_BREAK = 6.0  # inner error over noise above which the points show a break


@dataclasses.dataclass(frozen=True)
class WeightedFit:
    """One form of the mean.

    Attributes:
      fit: to all points that may be seen.
      weight: the weights of all parts sum to 1.
      inner_rmse: error of log y on the upper half in x of those points, fitted to the others.
    """

    fit: fit_lib.Fit
    weight: float
    inner_rmse: float


@dataclasses.dataclass(frozen=True)
class MeanFit(fit_lib.Fit):
    """The geometric mean of several fits; form, parameters and warnings are those of the first.

    Attributes:
      parts: in the order of their weights.
    """

    parts: tuple[WeightedFit, ...] = ()

    @property
    def floor(self) -> float:
        """The mean of the forms' irreducible errors; 0 if one of them has none."""
        return float(np.prod([part.fit.floor**part.weight for part in self.parts]))

    def predict(self, x: np.ndarray) -> np.ndarray:
        """The mean curve [N] at x [N] or [N, 1]."""
        logs = [part.weight * np.log(part.fit.predict(x)) for part in self.parts]
        return np.exp(np.sum(logs, axis=0))

    def reach(self, x: np.ndarray) -> np.ndarray:
        """Distances [2, N] to the ends of the band: the mean of the forms', and between these."""
        logs = np.log([part.fit.predict(x) for part in self.parts])
        weights = np.array([part.weight for part in self.parts])
        between = np.sqrt(weights @ (logs - weights @ logs) ** 2)
        inside = np.sum([part.weight * part.fit.reach(x) for part in self.parts], axis=0)
        return np.hypot(inside, stats.t.ppf(fit_lib.BAND[1], self.dof) * between)

    @property
    def dof(self) -> float:
        """Points less the mean number of the forms' parameters, plus what seeds add, at least 2."""
        used = sum(part.weight * len(part.fit.form.names) for part in self.parts)
        return max(self.n_points - used + self.noise.dof, 2)

    @property
    def chosen(self) -> str:
        """The forms with their weights and inner errors as text."""
        return ', '.join(
            f'{part.fit.form.name} {part.weight:.2f} (inner error {part.inner_rmse:.4f})'
            for part in self.parts
        )


def fit(
    x: np.ndarray,
    y: np.ndarray,
    *,
    bootstrap: int = 0,
    seed: int = 0,
    seeds: Seeds | None = None,
) -> fit_lib.Fit:
    """Fit the forms that the number of points allows, and weight them by an inner hold-out.

    Weights are proportional to the inverse square of the error on the upper half in x, predicted
    from the lower half. On published image curves a mean extrapolates better than the form with the
    smallest inner error (docs/scaling.md). Two columns of x are fitted by `joint`.

    Args:
      x, y: [N] or [N, K] and [N]: points that may be seen.
      bootstrap, seed, seeds: as in `fit.fit`.

    Raises:
      UserError: as `fit.fit`.
    """
    if x.ndim == 2 and x.shape[1] > 1:
        return fit_lib.fit(forms.find('joint'), x, y, bootstrap=bootstrap, seed=seed, seeds=seeds)
    tried = {name: hold_out_upper(name, x, y, seeds) for name in CANDIDATES}
    inner = {name: held for name, held in tried.items() if held is not None}
    errors = {name: error for name, (error, _) in inner.items()}
    found = []
    for name, weight in _weights(errors).items():
        try:
            form = forms.find(name)
            one = fit_lib.fit(form, x, y, bootstrap=bootstrap, seed=seed, seeds=seeds)
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
    residuals = np.log(mean.predict(x)) - np.log(y)
    mean = dataclasses.replace(mean, rmse=fit_lib.rms(residuals))
    noise = min(noise for _, noise in inner.values())
    excess = min(errors.values()) / max(noise, _EXACT)
    if excess <= _BREAK:
        return mean
    return _without_band(
        mean,
        'the points show a break: the law of their lower half in x misses the upper half by '
        f'{excess:.0f} times the noise; no band',
    )


def share_noise(fits: Sequence[fit_lib.Fit | None]) -> list[fit_lib.Fit | None]:
    """The fits of a table's curves, the noise of each moved towards what they have in common.

    A few points hardly tell their noise. Fits with noise from seeds, or without a profile
    likelihood, stay as they are, and so do less than three others.
    """
    own = [(0.0, 0.0) if fit is None else _variance(fit) for fit in fits]
    variances, dof = np.array([pair for pair in own if min(pair) > 0] or [(1.0, 0.0)]).T
    if len(dof) < _CURVES:
        return list(fits)
    variance, most = noise_lib.common(variances, dof)
    total = float(dof.sum())
    return [
        # Its own errors count already.
        _moved(fit, variance, min(most, total - free)) if fit and squares and free else fit
        for fit, (squares, free) in zip(fits, own, strict=True)
    ]


def _variance(fit: fit_lib.Fit) -> tuple[float, float]:
    """The noise variance of a fit from its own errors, and their degrees of freedom."""
    if fit.noise.measured or fit.points is None:
        return 0.0, 0.0
    parts = fit.parts if isinstance(fit, MeanFit) else (WeightedFit(fit, 1.0, 0.0),)
    dof = [part.weight * _free(part.fit) for part in parts]
    squares = [n * part.fit.noise.std**2 for n, part in zip(dof, parts, strict=True)]
    return sum(squares) / max(sum(dof), 1e-9), sum(dof)


def _free(fit: fit_lib.Fit) -> int:
    return max(fit.n_points - len(fit.form.names), 0)


def _moved(fit: fit_lib.Fit, variance: float, worth: float) -> fit_lib.Fit:
    """The fit, or each part of a mean, with a common variance that is worth some observations."""
    if isinstance(fit, MeanFit):
        parts = tuple(
            dataclasses.replace(part, fit=_moved(part.fit, variance, worth)) for part in fit.parts
        )
        return dataclasses.replace(fit, parts=parts, noise=parts[0].fit.noise)
    total = _free(fit) * fit.noise.std**2 + worth * variance
    std = float(np.sqrt(total / (_free(fit) + worth)))
    noise = dataclasses.replace(fit.noise, std=std, shared=worth)
    return dataclasses.replace(fit, noise=noise)


def _without_band(fit: fit_lib.Fit, reason: str) -> fit_lib.Fit:
    none = fit.replicates[:0]
    return dataclasses.replace(fit, replicates=none, warnings=(reason, *fit.warnings))


def name(fit: fit_lib.Fit) -> str:
    """The name of its form; `auto` for a mean."""
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
        found = fit_lib.fit(form, x[below], y[below], seeds=seen)
    except UserError:
        return None
    return fit_lib.rmse(found, x[~below], y[~below]), found.rmse * np.sqrt(below.sum() / free)


def _weights(errors: dict[str, float]) -> dict[str, float]:
    """Weights by the inverse square of the errors, without forms that hardly count."""
    if not errors:
        return {}
    raw = {name: 1 / max(error, 1e-9) ** 2 for name, error in errors.items()}
    total = sum(raw.values())
    kept = {name: value / total for name, value in raw.items() if value >= _LEAST * total}
    return dict(sorted(kept.items(), key=lambda item: -item[1]))


def _few(x: np.ndarray, y: np.ndarray, seeds: Seeds | None) -> fit_lib.Fit:
    """The largest form that has fewer parameters than there are points, with a note."""
    form = forms.with_fewer(forms.find('shifted'), len(y))
    found = fit_lib.fit(form, x, y, seeds=seeds)
    note = f'{len(y)} points are too few to hold some out: fitted by {form.name}'
    return _without_band(found, f'{note}; they cannot tell a break: no band')


EXPONENT = 0.35  # of both laws
# Laws by their formula: the form, its parameters for x in units of the largest, where y is 1, and
# how many of these are fitted.
LAWS = {
    'a x^-b': ('power', (0.0, EXPONENT, 0.0, 0.0), 2),
    'a x^-b + c': ('irreducible', (np.log(0.5), EXPONENT, 0.5, 0.0), 3),
}
LEAST = 4  # different x that a design needs


@dataclasses.dataclass(frozen=True)
class Design:
    """Runs of which a law is to be fitted.

    Attributes:
      name: for tables.
      x: [N], different and ascending.
      counts: [N], runs with each x, which differ in the seed.
      cost: in units of x.
      errors: {law: standard deviation of the log of its prediction}, in units of that of log y of a
        run.
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


def error(law: str, x: np.ndarray, counts: np.ndarray, target: float, largest: float) -> float:
    """Standard deviation of the log of the prediction at a target, by linearization.

    Args:
      law: one of `LAWS`.
      x: [N], of the points.
      counts: [N], runs of each.
      target: where the law predicts.
      largest: the x at which the law is 1.
    """
    form, theta, used = LAWS[law]
    slopes = [
        forms.find(form).log_value(np.array(theta), at[:, None] / largest)[1][:, :used]
        for at in (x, np.array([target]))
    ]
    information = slopes[0].T @ (counts[:, None] * slopes[0])
    return float(np.sqrt(slopes[1][0] @ np.linalg.solve(information, slopes[1][0])))


def designs(flops: Sequence[float], seeds: int, target: float) -> list[Design]:
    """The planned runs, and others to compare with.

    Choshen et al. 2024 (arXiv:2410.11840) find that seeds vary so much that several small models
    can predict better than one large model.

    Args:
      flops: of each planned run.
      seeds: of each run, where runs are repeated.
      target: FLOPs at which the law predicts.

    Returns:
      As planned; more seeds of every run; of the smaller half of the sizes alone; and instead of
      the largest runs, as many seeds of the others as cost no more. Nothing for too few sizes.
    """
    x, counts = np.unique(np.asarray(flops, float), return_counts=True)
    if len(x) < LEAST:
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
    if len(x) > LEAST and times > 1:
        found.append((f'without the largest, {times} seeds of the others', times * rest))
    return [_design(name, x, number, target) for name, number in found]


def _design(name: str, x: np.ndarray, counts: np.ndarray, target: float) -> Design:
    used = counts > 0
    expected = {law: error(law, x[used], counts[used], target, float(x[-1])) for law in LAWS}
    return Design(name, x[used], counts[used], float(counts @ x), expected)
