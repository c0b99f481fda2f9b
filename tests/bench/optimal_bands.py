"""Measure how often 90 % bands of `scaling optimal` hold on published isoFLOP studies.

    python tests/bench/optimal_bands.py TABLE.csv

The table has the columns experiment, params, tokens, budget and loss. Laws are fitted to budgets up
to 1/3, 1/10 and 1/30 of a study's largest one, and asked for every larger budget up to 35 times
away. The truth is the minimum of the parabola through that budget's own runs; a band holds if the
truth lies inside it.
"""

from __future__ import annotations

import collections
import csv
import sys
from collections.abc import Iterator

import numpy as np

from vit_jax.scaling import isoflop, optimal, points

READ = ('params', 'tokens', 'budget', 'loss')
COLUMNS = points.Columns('params', 'tokens', 'budget', 'loss')
HOLDOUTS = (3, 10, 30)
NEAR = 35.0  # budgets over the largest fitted one up to which bands are counted
BINS = ((1, 4), (4, 12), (12, NEAR))


def main(path: str) -> None:
    studies = collections.defaultdict(list)
    with open(path) as file:
        for row in csv.DictReader(file):
            studies[row['experiment']].append({name: row[name] for name in READ})
    held = collections.defaultdict(list)
    for name, rows in studies.items():
        for key, factor, holds in count(rows):
            low = next(low for low, high in BINS if low < factor <= high)
            held[(*key, name)].append(holds)
            held[(*key, f'{low} to {dict(BINS)[low]:.0f} times')].append(holds)
            held[(*key, 'all')].append(holds)
    for (way, quantity, group), values in sorted(held.items()):
        print(f'{way:9}{quantity:6}{group:45}{np.mean(values):5.2f} of {len(values)}')


def count(rows: list[dict[str, str]]) -> Iterator[tuple[tuple[str, str], float, bool]]:
    """Yield ((method, quantity), target over the largest budget fitted, whether the band holds)."""
    budgets = sorted({float(row['budget']) for row in rows})
    done = set()
    for holdout in HOLDOUTS:
        limit = max((c for c in budgets if c <= budgets[-1] / holdout * 1.001), default=0.0)
        kept = [row for row in rows if float(row['budget']) <= limit]
        if limit in done or len({row['budget'] for row in kept}) < 3:
            continue
        done.add(limit)
        (seen,) = points.read(kept, COLUMNS)
        for c in (c for c in budgets if limit < c <= NEAR * limit):
            truth = optimum([row for row in rows if float(row['budget']) == c])
            if truth is None:
                continue
            found = optimal.analyze(seen, optimal.AnalysisOptions(target=c))
            for way, law in found.summary.items():
                for quantity, value in zip(('N', 'loss'), truth, strict=True):
                    band = law and law['target']['bands'].get(quantity)
                    if not band or law['target'].get(quantity) is None:
                        continue
                    holds = bool(band[0] <= value <= band[1])
                    yield (way, quantity), c / limit, holds
                    if way == found.shown:
                        yield ('shown', quantity), c / limit, holds


def optimum(rows: list[dict[str, str]]) -> tuple[float, float] | None:
    """N* and the loss there of one budget's runs; None without a minimum between its sizes."""
    if len(rows) < 5:
        return None
    n, y = (np.array([float(row[name]) for row in rows]) for name in ('params', 'loss'))
    curve = isoflop.parabola(n, y, np.ones(len(n)))
    at = float(curve.deriv().roots()[0].real)
    if curve.coef[2] <= 0 or not np.log(n.min()) < at < np.log(n.max()):
        return None
    return float(np.exp(at)), float(curve(at))


if __name__ == '__main__':
    main(sys.argv[1])
