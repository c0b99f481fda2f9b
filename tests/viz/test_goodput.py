"""The picture of what the time of runs went into."""

from __future__ import annotations

import pytest

from vit_jax.storage import times
from vit_jax.viz import charts, figures


@pytest.mark.slow
@pytest.mark.parametrize('hours', [0.001, 100], ids=['seconds', 'days'])
def test_every_part_has_its_color_and_the_legend_fits(hours):
    assert charts.TIME_COLORS.keys() == times.MEANING.keys()
    length = 3600 * hours
    spans = [
        times.Span(1e9 + i * length, 1e9 + (i + 1) * length, {name: length})
        for i, name in enumerate(times.MEANING)
    ]
    account = times.Account(1, spans)
    figure = charts.draw_goodput({'a': account, 'b': account})
    figures.pixels(figure)
    colors = {patch.get_facecolor() for patch in figure.axes[0].patches}
    assert len(colors) == len(times.MEANING)
    assert figure.axes[0].get_xlim()[1] < 600
    legend = figure.legends[0].get_window_extent()
    assert legend.x0 >= 0 and legend.x1 <= figure.bbox.x1 and legend.y0 >= 0
