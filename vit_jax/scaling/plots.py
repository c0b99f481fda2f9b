"""Figures of scaling curves: points, fits with their bands, and held-out points."""

from __future__ import annotations

import collections
import functools
import math
import re
import textwrap
from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine

from vit_jax.errors import UserError
from vit_jax.scaling import averaging, coverage, rows
from vit_jax.scaling.curve_fit import Fit
from vit_jax.scaling.table import Curve, FitOptions, predict_at
from vit_jax.viz import figures

TOGETHER = 6  # curves that share one panel
MAX_PANELS = 80
MAX_PUBLISHED = 12  # published curves in a figure
_TITLE_LETTERS = 28  # letters per line in the title of a small panel
_LEGEND_LETTERS = 115  # letters per line in the legend, mathtext's commands included
# A floor below this share of the prediction would stretch the axis far below all points.
_VISIBLE = 0.01
LABELS = {
    'data_size': 'training examples',
    'examples_seen': 'examples seen',
    'flops': 'training FLOPs',
    'chip_hours': 'chip-hours',
}


def draw_curves(
    curves: Sequence[Curve], options: FitOptions, published: Sequence[Curve] = ()
) -> Figure:
    """Draw a few curves in one panel, or many in a panel each, on logarithmic axes.

    Lines are the laws through all points, with their nominal 90 % bands as shades; a note below
    gives the measured coverage of such bands. Hollow points, right of the dotted line, were held
    out of the dashed fit; the legend has its error on them. Faint points are not on the frontier.
    With a target, a single panel has stars at the predictions, and a line at each irreducible
    error. Diamonds are published points, with their laws.

    Raises:
      UserError: There are too many curves or published curves for a figure.
    """
    if len(curves) > MAX_PANELS:
        raise UserError(
            f'{len(curves)} curves are too many for a figure (at most {MAX_PANELS}); use fewer'
        )
    curves = [curve for curve in curves if len(curve.y)]
    if published and (len(options.x) > 1 or len(curves) > TOGETHER):
        raise UserError(f'--overlay: takes one column of x and at most {TOGETHER} curves')
    if len(published) > MAX_PUBLISHED:
        raise UserError(
            f'--overlay: {len(published)} published curves, at most {MAX_PUBLISHED}: give fewer '
            'rows, or --frontier for one curve'
        )
    if len(options.x) > 1:
        return _draw_predicted(curves, options)
    if len(curves) > TOGETHER:
        return _draw_grid(curves, options)
    return _draw_shared(curves, options, published)


def _caveat(curves: Sequence[Curve]) -> str:
    """Explain the coverage of the shaded bands and the error bars; empty without any."""
    fits = [curve.fit for curve in curves if curve.fit is not None and len(curve.fit.replicates)]
    lines = [f'Shades: {coverage.caveat(map(averaging.form_name, fits))}.'] if fits else []
    if any(curve.tested is not None for curve in curves):
        lines.append('Dashes: the fits without the points held out, which are hollow.')
    if any(curve.seeds.several for curve in curves):
        lines.append('Bars: one standard deviation between seeds.')
    return '\n'.join(textwrap.fill(line, 110) for line in lines)


def _figure(width: float, height: float) -> Figure:
    layout = ConstrainedLayoutEngine(w_pad=0.08, h_pad=0.08)
    return Figure(figsize=(width, height), layout=layout)


def _draw_shared(
    curves: Sequence[Curve], options: FitOptions, published: Sequence[Curve]
) -> Figure:
    target = options.target
    figure = _figure(8, 4.6 + 0.2 * (len(curves) + len(published)))
    axes = figure.add_subplot()
    boundaries = [_boundary(curve) for curve in curves]
    shared = len(set(boundaries)) == 1
    for curve, color in zip(curves, _colors(curves), strict=True):
        _draw_curve(axes, curve, color, 4.5, _legend(curve), mark=not shared, target=target)
    for i, curve in enumerate(published, start=len(curves)):
        _draw_published(axes, curve, figures.COLORS[i % len(figures.COLORS)])
    _finish(axes, _title(options), [*curves, *published], few=False, target=target)
    axes.set_xlabel(axis_label(options.x[0]), color=figures.FAINT, fontsize=9)
    axes.set_ylabel(axis_label(options.y), color=figures.FAINT, fontsize=9)
    if shared and boundaries[0] is not None:
        _mark_held_out(axes, boundaries[0])
    _add_legend(figure, _caveat(curves))
    return figure


def _title(options: FitOptions) -> str:
    return f'{axis_label(options.y)} over {axis_label(options.x[0])}'


def axis_label(column: str) -> str:
    """Label an axis for a column: `1-test/accuracy` -> `test error`."""
    if column.startswith('1-') and column.endswith('/accuracy'):
        return column.removeprefix('1-').removesuffix('/accuracy') + ' error'
    return LABELS.get(column, column)


def _colors(curves: Sequence[Curve]) -> list[Any]:
    """Choose a color for each curve; with several columns, shades of one for each first value.

    Curves of a family are in the order of the other columns, so that dark is large.
    """
    families = [next(iter(curve.by.values()), '') for curve in curves]
    if len(set(families)) == len(families):
        return [figures.COLORS[i % len(figures.COLORS)] for i in range(len(curves))]
    order, counts = list(dict.fromkeys(families)), collections.Counter[str]()
    shades = []
    for family in families:
        counts[family] += 1
        strength = 0.4 + 0.6 * counts[family] / families.count(family)
        rgb = np.array(to_rgb(figures.COLORS[order.index(family) % len(figures.COLORS)]))
        shades.append(tuple(1 - strength * (1 - rgb)))
    return shades


def _boundary(curve: Curve) -> float | None:
    """Find the x between fitted and held-out points; None if either is missing."""
    fitted, held_out = curve.x[curve.fit_mask, 0], curve.x[~curve.fit_mask, 0]
    if not (len(fitted) and len(held_out)):
        return None
    return math.sqrt(fitted.max()) * math.sqrt(max(held_out.min(), fitted.max()))


def _mark_held_out(axes: Axes, x: float) -> None:
    axes.axvline(x, color=figures.FAINT, linewidth=0.9, linestyle=':')
    across = axes.get_xaxis_transform()
    axes.text(x, 0.99, ' held out', transform=across, va='top', fontsize=8, color=figures.FAINT)


def _draw_grid(curves: Sequence[Curve], options: FitOptions) -> Figure:
    columns = math.ceil(math.sqrt(1.5 * len(curves)))
    rows = math.ceil(len(curves) / columns)
    figure = _figure(2.3 * columns, 1.9 * rows + 0.4)
    figures.heading(figure, _title(options), 13)
    for i, curve in enumerate(curves):
        axes = figure.add_subplot(rows, columns, i + 1)
        _draw_curve(axes, curve, figures.COLORS[0], size=2.5, label=None)
        title = textwrap.fill(curve.label, _TITLE_LETTERS, max_lines=3, placeholder=' ...')
        _finish(axes, title, [curve], few=True)
        _note(axes, curve)
    figure.supxlabel(_caveat(curves), x=0.01, ha='left', fontsize=7, color=figures.FAINT)
    return figure


def _draw_predicted(curves: Sequence[Curve], options: FitOptions) -> Figure:
    """Draw predicted over measured values, for forms with two columns of x."""
    figure = _figure(5.6, 5 + 0.2 * len(curves))
    axes = figure.add_subplot()
    for curve, color in zip(curves, _colors(curves), strict=True):
        if curve.fit is not None:
            predicted = curve.fit.predict(curve.x)
            _draw_points(axes, curve.y, predicted, curve.fit_mask, color, 4.5, _legend(curve))
    ends = [min(c.y.min() for c in curves), max(c.y.max() for c in curves)]
    axes.plot(ends, ends, color=figures.FAINT, linewidth=1)
    axes.set_xscale('log')
    axes.set_yscale('log')
    figures.style(axes, f'{options.y} over {", ".join(options.x)}')
    _ticks(axes, 'x', *ends)
    _ticks(axes, 'y', *ends)
    axes.set_xlabel('measured', color=figures.FAINT, fontsize=9)
    axes.set_ylabel('predicted', color=figures.FAINT, fontsize=9)
    _add_legend(figure)
    return figure


def _draw_curve(
    axes: Axes,
    curve: Curve,
    color: Any,
    size: float,
    label: str | None,
    mark: bool = True,
    target: float | None = None,
) -> None:
    if len(curve.beaten):
        x, y = curve.beaten.T
        axes.plot(x, y, 'o', color=color, markersize=0.7 * size, alpha=0.3, markeredgewidth=0)
    _draw_points(axes, curve.x[:, 0], curve.y, curve.fit_mask, color, size, label)
    _seed_bars(axes, curve, color)
    if curve.fit is None or not _has_line(curve.fit):
        return
    predicted = None if target is None else predict_at(curve, target)[0]
    if predicted:
        _draw_target(axes, curve.fit, predicted, color)
    ends = [curve.x.min(), curve.x.max(), *([predicted['x']] if predicted else [])]
    grid = np.geomspace(min(ends), max(ends), 200)
    axes.plot(grid, curve.fit.predict(grid), color=color, linewidth=1.4)
    if curve.tested is not None:
        axes.plot(grid, curve.tested.predict(grid), '--', color=color, linewidth=0.9)
    if (band := curve.fit.predict_band(grid)) is not None:
        axes.fill_between(grid, *band, color=color, alpha=0.18, linewidth=0)
    if mark and (boundary := _boundary(curve)) is not None:
        axes.axvline(boundary, color=color, linewidth=0.8, linestyle=':')


def _has_line(fit: Fit) -> bool:
    """Whether a law has a line: without a band, it needs points that it might have missed."""
    return bool(len(fit.replicates)) or fit.n_points >= 2 * len(fit.form.names)


def _draw_published(axes: Axes, curve: Curve, color: Any) -> None:
    """Draw published points and the law through them."""
    style: dict[str, Any] = {
        'linestyle': '',
        'marker': 'D',
        'markersize': 4,
        'markerfacecolor': 'none',
    }
    label = f'{_legend(curve)} (published)'
    if len(curve.beaten):
        axes.plot(*curve.beaten.T, color=color, alpha=0.3, **style)
    axes.plot(curve.x[:, 0], curve.y, color=color, label=label, **style)
    if curve.fit is not None and _has_line(curve.fit):
        grid = np.geomspace(curve.x.min(), curve.x.max(), 100)
        axes.plot(grid, curve.fit.predict(grid), '-.', color=color, linewidth=0.9)


def _seed_bars(axes: Axes, curve: Curve, color: Any) -> None:
    """Draw one standard deviation of the runs up and down from each mean over seeds."""
    has_seeds = curve.seeds.counts > 1
    if not has_seeds.any():
        return
    y, ratio = curve.y[has_seeds], np.exp(curve.seeds.stds[has_seeds])
    lengths = np.stack([y - y / ratio, y * ratio - y])
    axes.errorbar(
        curve.x[has_seeds, 0], y, lengths, fmt='none', ecolor=color, elinewidth=1.1, capsize=2.5
    )


def _draw_target(axes: Axes, fit: Fit, predicted: dict[str, Any], color: Any) -> None:
    """Draw a star at a prediction with its interval, and a line at an irreducible error."""
    target = predicted['x']
    if predicted['band']:
        axes.plot([target] * 2, predicted['band'], color=color, linewidth=2, alpha=0.6)
    axes.plot(
        [target],
        [predicted['y']],
        '*',
        color=color,
        markersize=14,
        markeredgecolor='white',
        zorder=5,
    )
    if floor := _floor(fit, target):
        axes.axhline(floor, color=color, linewidth=0.9, linestyle='--')
        across = axes.get_yaxis_transform()
        name = ' irreducible' if len(axes.texts) < 2 else ''
        text = axes.text(
            0, floor, f'{name} ${_number(floor)}$', transform=across, va='bottom', fontsize=8
        )
        text.set_color(color)
        figures.set_formula(text)


def _floor(fit: Fit, target: float) -> float:
    """Look up the irreducible error; 0 if it is unknown, or negligible next to the prediction."""
    if fit.unidentified & {'c', 'E'}:
        return 0.0
    return fit.floor if fit.floor > _VISIBLE * fit.predict(np.array([target]))[0] else 0.0


def _draw_points(
    axes: Axes,
    x: np.ndarray,
    y: np.ndarray,
    fit_mask: np.ndarray,
    color: Any,
    size: float,
    label: str | None,
) -> None:
    plot = functools.partial(axes.plot, color=color, linestyle='', marker='o', markersize=size)
    plot(x[fit_mask], y[fit_mask], label=label, alpha=0.75, markeredgewidth=0)
    plot(x[~fit_mask], y[~fit_mask], markerfacecolor='white', markeredgewidth=0.7, alpha=0.6)


def _legend(curve: Curve) -> str:
    label = curve.label.replace('$', r'\$')
    if curve.fit is None or not _has_line(curve.fit):
        return f'{label}: too few points'
    error = '' if curve.holdout_rmse is None else f'; error held out {curve.holdout_rmse:.4f}'
    if isinstance(curve.fit, averaging.MeanFit) and len(curve.fit.parts) > 1:
        mixed = ', '.join(f'{part.fit.form.name} {part.weight:.2f}' for part in curve.fit.parts)
        mixed += f', {curve.fit.late_text}' if curve.fit.late else ''
        heading, law = f'{label}: mean of {mixed};', f'${formula(curve.fit)}${error}'
        return heading + (' ' if len(heading + law) < _LEGEND_LETTERS else '\n') + law
    return f'{label}: ${formula(curve.fit)}${error}'


def formula(fit: Fit) -> str:
    """Write the law with its numbers in mathtext: `1.27 x^-0.0853` with the exponent raised.

    A tilde precedes values that the points do not determine, which have one digit.
    """
    numbers = {
        name: rf'{{\sim}}{_number(value, 1)}' if name in fit.unidentified else _number(value)
        for name, value in fit.params.items()
    }
    names = '|'.join(sorted(numbers, key=len, reverse=True))

    def put(match: re.Match[str]) -> str:
        number = numbers[match[3]]
        return number if match[1] is None else f'^{{{match[2]}{number}}}'

    text = re.sub(rf'(\^(-?))?\b({names})\b', put, fit.form.formula).replace(' ', r'\,')
    return text if '=' in text else rf'y\,=\,{text}'


def _number(value: float, digits: int = 3) -> str:
    """Format a number; very large and small ones as a power of ten."""
    mantissa, _, exponent = f'{value:.{digits}g}'.partition('e')
    return rf'{mantissa}{{\cdot}}10^{{{int(exponent)}}}' if exponent else mantissa


def _add_legend(figure: Figure, note: str = '') -> None:
    """Put the legend below the axes and the note."""
    legend = figure.legend(
        title=note or None,
        title_fontsize=7,
        alignment='left',
        loc='outside lower left',
        frameon=False,
        fontsize=8.5,
        labelcolor='linecolor',
        handlelength=1.4,
        labelspacing=0.25,
    )
    legend.get_title().set_color(figures.FAINT)
    for text in legend.get_texts():
        figures.set_formula(text)


def _note(axes: Axes, curve: Curve) -> None:
    """Write the law and the error held out below the axes."""
    lines = []
    if isinstance(curve.fit, averaging.MeanFit) and len(curve.fit.parts) > 1:
        lines.append(f'mean of {len(curve.fit.parts)} forms')
    elif curve.fit is not None and _has_line(curve.fit):
        lines.append(f'${formula(curve.fit)}$')
    if curve.holdout_rmse is not None:
        lines.append(f'held out {curve.holdout_rmse:.3f}')
    text = axes.set_xlabel('\n'.join(lines), loc='left', fontsize=6.5, color=figures.FAINT)
    figures.set_formula(text)


def _finish(
    axes: Axes, title: str, curves: Sequence[Curve], few: bool, target: float | None = None
) -> None:
    axes.set_xscale('log')
    axes.set_yscale('log')
    figures.style(axes, title, size=8 if few else 11)
    axes.tick_params(labelsize=7 if few else 9)
    x = [c.x for c in curves] + [c.beaten[:, :1] for c in curves if len(c.beaten)]
    y = [c.y for c in curves] + [c.beaten[:, -1] for c in curves if len(c.beaten)]
    if target is not None:
        laws = [c.fit for c in curves if c.fit and predict_at(c, target)[0]]
        x += [np.array([[target]])] * bool(laws)
        y += [law.predict(np.array([target])) for law in laws]
        y += [np.array([floor]) for law in laws if (floor := _floor(law, target))]
    _ticks(axes, 'x', float(min(v.min() for v in x)), float(max(v.max() for v in x)), few)
    _ticks(axes, 'y', float(min(v.min() for v in y)), float(max(v.max() for v in y)), few)


def _ticks(axes: Axes, which: str, low: float, high: float, few: bool = False) -> None:
    axis = axes.xaxis if which == 'x' else axes.yaxis
    # Three digits do not distinguish neighboring ticks of a narrow range.
    wide = high > 1.3 * low or high >= 1000
    format_number = rows.number_format(high) if wide else '{:.4g}'.format
    figures.log_ticks(axis, low, high, few=few, labels=format_number)
