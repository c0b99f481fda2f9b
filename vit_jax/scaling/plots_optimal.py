"""Figures of compute-optimal sizes and shapes: contours, losses at equal compute, star sweeps."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine

from vit_jax.errors import UserError
from vit_jax.scaling import isoflop, rows
from vit_jax.scaling.joint import optimum
from vit_jax.scaling.optimal import Analysis
from vit_jax.scaling.points import Columns
from vit_jax.scaling.shape import Ray, ShapeFit, ShapeLaw, StarColumns, StarSweep
from vit_jax.viz import figures

MAX_CURVES = 12
CONTOURS = 12
BUDGETS = 5  # number of budgets at which the law is drawn
# Exponents of N* ~ C^a for language models: Hoffmann et al. 2022, table 2, isoFLOP profiles;
# Llama 3 (arXiv:2407.21783), section 3.2.1, with D* ~ C^.537; Kaplan et al. 2020, section 6.1.
PUBLISHED = {'Chinchilla': 0.49, 'Llama 3': 0.463, 'Kaplan et al. 2020': 0.73}
_LEAST = 0.1  # percent that an axis of errors shows at least
_FEW = 3  # optima through which a law without a band has no line
_BY_LAW, _BY_PARABOLA = figures.COLORS[1], figures.COLORS[2]
_COLORS = {'joint': _BY_LAW, 'isoflop': _BY_PARABOLA, 'frontier': 'black'}


def draw_optima(analyses: Sequence[Analysis], columns: Columns, details: bool = False) -> Figure:
    """Draw two panels for each curve, four with `details`.

    The left one has the joint law's contours of equal loss over C and N, the runs, and N* by the
    joint law, parabolas and the frontier, with the bands of the joint law and of the law shown. The
    right one has the runs of each budget, the parabola through them, and the joint law at that
    budget. Details are published slopes of N*, and the errors of both laws at each run.

    Raises:
      UserError: There are too many curves for a figure.
    """
    if len(analyses) > MAX_CURVES:
        raise UserError(
            f'{len(analyses)} curves are too many for a figure (at most {MAX_CURVES}); use fewer'
        )
    heights = [4.5, 2.6] if details else [4.5]
    figure = Figure(
        figsize=(10.5, sum(heights) * len(analyses) + 0.3),
        layout=ConstrainedLayoutEngine(w_pad=0.08, h_pad=0.08),
    )
    grid = figure.add_gridspec(
        len(heights) * len(analyses), 2, height_ratios=heights * len(analyses)
    )
    for i, analysis in enumerate(analyses):
        name = f': {rows.label(analysis.points.by)}' if analysis.points.by else ''
        row = i * len(heights)
        axes = figure.add_subplot(grid[row, 0])
        _draw_contours(axes, analysis, f'optimal size{name}', published=details)
        _draw_budgets(figure.add_subplot(grid[row, 1]), analysis, columns)
        if details:
            for j, errors in enumerate(residuals(analysis).items()):
                _draw_residuals(figure.add_subplot(grid[row + 1, j]), analysis, *errors)
    return figure


def residuals(analysis: Analysis) -> dict[str, np.ndarray]:
    """Compute the relative errors [M] of both laws at the runs of budgets; NaN without a law."""
    runs = analysis.points
    groups = isoflop.budgets(runs.n, runs.c)
    indices = np.concatenate(groups) if groups else np.empty(0, int)
    fitted = {
        'parabolas': isoflop.evaluate_parabolas(runs.n, runs.c, runs.y, runs.seeds.weights),
        'joint law': analysis.joint.predict(runs.x) if analysis.joint else None,
    }
    errors = {name: np.full(len(runs.y), np.nan) for name in fitted}
    for name, values in fitted.items():
        if values is not None:
            errors[name][indices] = runs.y[indices] / values[indices] - 1
    return errors


def _draw_residuals(axes: Axes, analysis: Analysis, name: str, errors: np.ndarray) -> None:
    """Draw the errors of a law in percent over N, in the colors of the budgets."""
    runs = analysis.points
    for i, indices in enumerate(isoflop.budgets(runs.n, runs.c)):
        color = figures.COLORS[i % len(figures.COLORS)]
        axes.plot(runs.n[indices], 100 * errors[indices], 'o', color=color, markersize=4, alpha=0.8)
    axes.axhline(0, color=figures.FAINT, linewidth=0.8)
    axes.set_xscale('log')
    rms = 100 * float(np.sqrt(np.nanmean(errors**2))) if np.isfinite(errors).any() else np.nan
    ending = f'{rms:.2f} % rms' if np.isfinite(rms) else 'there is none'
    figures.style(axes, f'error of the {name}: {ending}')
    low, high = float(runs.n.min()), float(runs.n.max())
    figures.log_ticks(axes.xaxis, low, high, few=False, labels=rows.number_format(high))
    axes.set_xlabel('model size N', color=figures.FAINT, fontsize=9)
    axes.set_ylabel('%', color=figures.FAINT, fontsize=9)
    low, high = axes.get_ylim()
    axes.set_ylim(min(low, -_LEAST), max(high, _LEAST))


def _draw_contours(axes: Axes, analysis: Analysis, title: str, published: bool) -> None:
    points = analysis.points
    law = analysis.summary[analysis.shown] if analysis.shown else None
    target = law.get('target') if law else None
    ends = [points.c.min(), max(points.c.max(), target['C'] if target else 0.0)]
    budgets = np.geomspace(ends[0] / 1.3, ends[1] * 1.3, 60)
    low, high = points.n.min() / 1.5, points.n.max() * 1.5
    if analysis.joint is not None:
        sizes = optimum(analysis.joint.params, points.cost, budgets)[0]
        low, high = min(low, sizes.min()), max(high, sizes.max())
        _plot_contours(axes, analysis, budgets, np.geomspace(low, high, 60))
        axes.plot(
            budgets, sizes, color=_BY_LAW, linewidth=1.8, label=_describe_way(analysis, 'joint')
        )
    for method, optima, mark in (
        ('isoflop', analysis.parabolas, 'o'),
        ('frontier', analysis.frontier, ''),
    ):
        color = _COLORS[method]
        if analysis.summary[method] is not None and _has_line(analysis, method, optima):
            line = np.exp(optima.log_scale) * budgets**optima.exponent
            axes.plot(
                budgets,
                line,
                color=color,
                linewidth=1.1,
                linestyle='--',
                label=_describe_way(analysis, method),
            )
            if mark:
                axes.plot(optima.c, optima.n, mark, color=color, markersize=6)
    for method in dict.fromkeys(('joint', analysis.shown)):
        summary = analysis.summary.get(method)
        if summary and (summary['a'] is not None or method == analysis.shown):
            _plot_band(axes, analysis, method, budgets)
    if published and law is not None:
        _plot_published(axes, analysis, budgets)
    _plot_runs(axes, analysis)
    if target and target['N'] is not None:
        if 'N' in target['bands']:
            ends = target['bands']['N']
            axes.plot(
                [target['C']] * 2, ends, color=_COLORS[analysis.shown], linewidth=2, alpha=0.6
            )
        axes.plot(
            target['C'],
            target['N'],
            '*',
            color=_COLORS[analysis.shown],
            markersize=15,
            markeredgecolor='white',
            label=f'N* = {rows.short(target["N"])} by {analysis.shown}',
        )
    _set_scales(axes, title, budgets[[0, -1]], np.array([low, high]))
    axes.set_ylim(low, high)
    axes.set_xlim(budgets[0], budgets[-1])
    axes.set_xlabel('training FLOPs C', color=figures.FAINT, fontsize=9)
    axes.set_ylabel('model size N', color=figures.FAINT, fontsize=9)
    axes.legend(
        fontsize=8, loc='upper left', bbox_to_anchor=(0, -0.13), frameon=False, borderaxespad=0
    )


def _describe_way(analysis: Analysis, way: str) -> str:
    law = analysis.summary[way]
    assert law is not None
    if law['a'] is None:
        return f'{way}: its exponent is not identified'
    text = f'{way}: N* ~ C^{law["a"]:.3f}'
    if 'a' not in law['bands']:
        return text
    low, high = law['bands']['a']
    return f'{text} [{low:.3f}, {high:.3f}]'


def _plot_contours(axes: Axes, analysis: Analysis, budgets: np.ndarray, sizes: np.ndarray) -> None:
    assert analysis.joint is not None
    c, n = np.meshgrid(budgets, sizes)
    flat = np.stack([n.ravel(), analysis.points.cost.data(n.ravel(), c.ravel())], axis=1)
    loss = analysis.joint.predict(flat).reshape(c.shape)
    low, high = analysis.points.y.min() * 0.9, analysis.points.y.max() * 1.2
    levels = np.geomspace(max(low, loss.min()), high, CONTOURS)
    axes.contour(c, n, loss, levels=levels, cmap='viridis', norm=LogNorm(low, high), linewidths=0.8)


def _has_line(analysis: Analysis, law: str, optima: isoflop.Optima) -> bool:
    """Whether optima support a line: a power law through so few needs a band."""
    return len(optima.c) > _FEW or bool(analysis.replicates.get(law))


def _plot_band(axes: Axes, analysis: Analysis, law: str, budgets: np.ndarray) -> None:
    band = analysis.size_band(law, budgets)
    if band is not None:
        axes.fill_between(budgets, *band, color=_COLORS[law], alpha=0.2, linewidth=0)


def _plot_published(axes: Axes, analysis: Analysis, budgets: np.ndarray) -> None:
    """Draw published slopes of N* through the optimum of the law shown at the middle budget."""
    center = float(np.sqrt(budgets[0] * budgets[-1]))
    if analysis.shown == 'joint':
        assert analysis.joint is not None
        cost = analysis.points.cost
        size = float(optimum(analysis.joint.params, cost, np.array([center]))[0][0])
    else:
        optima = analysis.parabolas if analysis.shown == 'isoflop' else analysis.frontier
        size = optima.size(center)
    slopes = sorted(PUBLISHED.values())
    label = f'published slopes {", ".join(f"{slope:.2f}" for slope in slopes)}'
    for slope in slopes:
        line = size * (budgets / center) ** slope
        axes.plot(budgets, line, ':', color=figures.FAINT, linewidth=1.1, label=label)
        label = '_'  # not in the legend again


def _plot_runs(axes: Axes, analysis: Analysis) -> None:
    points, fit_mask = analysis.points, analysis.fit_mask
    shared = {'linestyle': '', 'marker': 'o', 'markersize': 3.5, 'color': figures.FAINT}
    axes.plot(points.c[fit_mask], points.n[fit_mask], alpha=0.6, markeredgewidth=0, **shared)  # type: ignore[arg-type]
    axes.plot(points.c[~fit_mask], points.n[~fit_mask], markerfacecolor='white', **shared)  # type: ignore[arg-type]


def _draw_budgets(axes: Axes, analysis: Analysis, columns: Columns) -> None:
    points = analysis.points
    shared = isoflop.budgets(points.n, points.c)
    groups = shared or [np.arange(len(points.y))]
    for i, indices in enumerate(groups):
        color = figures.COLORS[i % len(figures.COLORS)]
        axes.plot(points.n[indices], points.y[indices], 'o', color=color, markersize=4, alpha=0.8)
        if len(groups) > 1:
            _draw_budget(axes, analysis, indices, color)
    title = f'{columns.y} at equal compute' if shared else f'{columns.y}: sizes share no budget'
    _set_scales(axes, title, points.n, points.y)
    axes.set_xlim(right=points.n.max() * (points.n.max() / points.n.min()) ** 0.2)
    lines = '; lines: the joint law, dashes: parabolas' if shared else ''
    axes.set_xlabel(f'model size N{lines}', color=figures.FAINT, fontsize=9)


def _draw_budget(axes: Axes, analysis: Analysis, indices: np.ndarray, color: str) -> None:
    points = analysis.points
    budget = float(np.exp(np.log(points.c[indices]).mean()))
    n = np.geomspace(points.n[indices].min(), points.n[indices].max(), 60)
    if analysis.joint is not None:
        x = np.stack([n, points.cost.data(n, np.full(60, budget))], axis=1)
        axes.plot(n, analysis.joint.predict(x), color=color, linewidth=1.2)
    parabola = isoflop.parabola(points.n[indices], points.y[indices], points.seeds.weights[indices])
    axes.plot(n, parabola(np.log(n)), '--', color=color, linewidth=0.9)
    axes.annotate(
        f'C = {rows.number_format(points.c.max())(budget)}',
        (n[-1], float(parabola(np.log(n[-1])))),
        xytext=(6, -2),
        textcoords='offset points',
        fontsize=7.5,
        color=color,
    )


def _set_scales(axes: Axes, title: str, x: np.ndarray, y: np.ndarray) -> None:
    axes.set_xscale('log')
    axes.set_yscale('log')
    figures.style(axes, title)
    for axis, values in ((axes.xaxis, x), (axes.yaxis, y)):
        low, high = float(values.min()), float(values.max())
        figures.log_ticks(axis, low, high, few=False, labels=rows.number_format(high))


def draw_shape(
    star: StarSweep, shapes: ShapeFit, columns: StarColumns, target: float | None = None
) -> Figure:
    """Draw a panel for each dimension: its runs, and the law with its minima at several budgets.

    Colors are budgets, dark for large ones. A star is the optimum for the target.
    """
    count = len(star.rays)
    figure = Figure(figsize=(4.2 * count, 4.4), layout=ConstrainedLayoutEngine(w_pad=0.08))
    for i, (name, ray) in enumerate(star.rays.items()):
        axes = figure.add_subplot(1, count, i + 1)
        law = shapes.laws.get(name)
        noun = name.rpartition('.')[2]
        title = noun if law is None else f'{noun} ~ {_format_exponent(shapes, name)}'
        _draw_ray(axes, ray, law, target)
        axes.set_xscale('log')
        axes.set_yscale('log')
        figures.style(axes, title)
        ends = [ray.x.min(), ray.x.max(), *([law.best(target)] if law and target else [])]
        for axis, values in ((axes.xaxis, np.array(ends)), (axes.yaxis, ray.y)):
            low, high = float(values.min()), float(values.max())
            figures.log_ticks(axis, low, high, few=True, labels=rows.number_format(high))
        axes.set_xlabel(noun, color=figures.FAINT, fontsize=9)
        if i == 0:
            axes.set_ylabel(columns.y, color=figures.FAINT, fontsize=9)
    figure.supxlabel(
        f'Lines: the law at budgets {columns.t}, dark for large ones; dots: its minima; '
        'star: the optimum for the target.',
        x=0.01,
        ha='left',
        fontsize=8,
        color=figures.FAINT,
    )
    return figure


def _format_exponent(shapes: ShapeFit, name: str) -> str:
    s, band = shapes.exponent(name)
    return f't^{s:.3f}' + (f' [{band[0]:.3f}, {band[1]:.3f}]' if band else '')


def _draw_ray(axes: Axes, ray: Ray, law: ShapeLaw | None, target: float | None) -> None:
    palette = colormaps['viridis_r']
    low, high = np.log(ray.t.min()), np.log(ray.t.max())
    shade = 0.15 + 0.85 * (np.log(ray.t) - low) / (high - low)
    axes.scatter(ray.x, ray.y, c=shade, cmap=palette, vmin=0, vmax=1, s=16, linewidths=0)
    if law is None:
        return
    ends = ray.x.min(), ray.x.max()
    if target is not None:
        ends = min(ends[0], law.best(target)), max(ends[1], law.best(target))
    x = np.geomspace(*ends, 120)
    budgets = np.geomspace(ray.t.min(), ray.t.max(), BUDGETS)
    for i, t in enumerate(budgets):
        color = palette(0.15 + 0.85 * i / (BUDGETS - 1))
        axes.plot(x, law.value(x, t), color=color, linewidth=1.2)
        if ends[0] <= law.best(t) <= ends[1]:
            best = np.array([law.best(t)])
            axes.plot(best, law.value(best, t), 'o', color=color)
    if target is not None:
        best = np.array([law.best(target)])
        axes.plot(
            best,
            law.value(best, target),
            '*',
            color=figures.COLORS[1],
            markersize=14,
            markeredgecolor='white',
        )
