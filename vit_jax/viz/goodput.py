"""The parts of runs' time, drawn over time."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from vit_jax.storage import times
from vit_jax.storage.times import Account
from vit_jax.viz import figures

BINS = 240
COLORS = {
    times.STEPS: '#149e78',
    times.DATA: '#c8961a',
    times.EVALUATION: '#2f6fde',
    times.SAVING: '#a24bc4',
    times.START: '#9aa1ae',
    times.RESTORE: '#6f7787',
    times.COMPILE: '#e2661a',
    times.LOST: '#d43d6b',
    times.BETWEEN: '#e4e6eb',
    times.UNKNOWN: '#1f2430',
}
_UNITS = ((3 * 86400, 86400, 'days'), (3 * 3600, 3600, 'hours'), (300, 60, 'minutes'))


def draw(accounts: Mapping[str, Account]) -> Figure:
    """Draw a panel for each run, by name: the share of each part in each moment."""
    figure = Figure(figsize=(9, 1.2 + 1.7 * len(accounts)), layout='constrained')
    drawn: dict[str, None] = {}
    for i, (name, account) in enumerate(accounts.items()):
        axes = figure.add_subplot(len(accounts), 1, i + 1)
        figures.style(axes, f'{name}: {account.goodput:.1%} steps')
        whole = max(account.wall, 1e-9)
        scale, unit = next(((s, u) for least, s, u in _UNITS if whole >= least), (1, 'seconds'))
        edges = np.linspace(0, whole / scale, BINS + 1)
        bins = times.binned(account, BINS)
        total = np.array([max(sum(parts.values()), 1e-12) for parts in bins])
        below = np.zeros(BINS)
        for part, color in COLORS.items():
            share = np.array([parts.get(part, 0.0) for parts in bins]) / total
            if share.any():
                drawn[part] = None
                axes.stairs(below + share, edges, baseline=below, fill=True, color=color)
                below = below + share
        axes.set_xlim(0, edges[-1])
        axes.set_ylim(0, 1)
        axes.set_yticks([0, 0.5, 1], ['0 %', '50 %', '100 %'])
        axes.set_xlabel(unit, color=figures.FAINT, fontsize=9)
    handles = [Patch(color=color, label=part) for part, color in COLORS.items() if part in drawn]
    figure.legend(handles=handles, loc='outside lower center', ncols=5, fontsize=9, frameon=False)
    return figure
