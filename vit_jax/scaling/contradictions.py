"""Methods that contradict each other: which budgets pull them apart, and which method is shown."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

import numpy as np

from vit_jax.scaling import isoflop
from vit_jax.scaling.joint import fit_joint, optimum
from vit_jax.scaling.points import Points

_GROUPS = 4  # of runs that share no budget
_PULL = 0.25  # least share of a gap that is attributed to a budget
_MINIMA = 3  # least number of minima of parabolas that are preferred to another method
_WIDE = 0.5  # an exponent with a relative 90 % half-interval above this is not identified
_WIDE_RATIO = 100.0  # of the ends of an interval of what is not determined
Ways = Mapping[str, dict[str, Any] | None]


def compare(seen: Points, level: np.ndarray, ways: Ways, minima: int) -> tuple[str, list[str]]:
    """Choose the method that is shown, and explain contradictions.

    Two methods contradict each other if their intervals of N*, or of its exponent, are disjoint.
    Shown is one that determines N*, and is no outlier that contradicts all others: not the
    frontier, if there is another, then the one with the fewest contradictions; of these parabolas
    with three minima or more, which assume no form that all budgets share. Without contradictions,
    a joint law without warnings comes first.

    Args:
      seen: the fitted runs.
      level: [M], their losses at the mean of their budgets.
      ways: {method: its exponents and target}, None for one without a law.
      minima: number of budgets with a parabola's minimum.

    Returns:
      The name of the method, '' without any; a line for each contradiction.
    """
    laws = {name: way for name, way in ways.items() if way is not None}
    pairs = [
        (one, other)
        for one, other in itertools.combinations(laws, 2)
        if _disjoint(laws[one], laws[other])
    ]
    against = {name: sum(name in pair for pair in pairs) for name in laws}

    def rank(name: str) -> tuple[bool | int, ...]:
        trusted = name == 'isoflop' and minima >= _MINIMA
        clean = name == 'joint' and not pairs and laws[name]['identified']
        outlier = against[name] == max(len(laws) - 1, 1)
        determined = is_determined(laws[name]['target']['bands'].get('N'))
        vague = has_vague_exponent(laws[name]) or not determined
        return vague, outlier, name == 'frontier', against[name], not clean, not trusted

    shown = min(laws, key=rank, default='')
    reason = (
        'it assumes no form for all budgets' if shown == 'isoflop' else 'the least contradicted'
    )
    lines = [
        f'{one} and {other} contradict each other: {_values(laws[one])} and '
        f'{_values(laws[other])}; {_pull(seen, level, laws, (one, other))}; {shown} is shown '
        f'({reason})'
        for one, other in pairs
    ]
    return shown, lines


def _disjoint(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Whether two laws exclude each other; what is not identified excludes nothing."""
    if has_vague_exponent(one) or has_vague_exponent(other):
        return False
    both = [(one['bands'], other['bands'], 'a')]
    both.append((one['target']['bands'], other['target']['bands'], 'N'))
    return any(
        left[key][1] < right[key][0] or right[key][1] < left[key][0]
        for left, right, key in both
        if key in left and key in right and is_determined(left[key]) and is_determined(right[key])
    )


def has_vague_exponent(law: dict[str, Any]) -> bool:
    """Whether the runs do not determine the exponent a of a law."""
    low, high = law['bands'].get('a', (law['a'], law['a']))
    return high - low > 2 * _WIDE * abs(law['a'])


def is_determined(band: list[float] | None) -> bool:
    """Whether the ends of an interval differ by less than a factor of 100; True without one."""
    return band is None or band[1] <= _WIDE_RATIO * band[0]


def _values(law: dict[str, Any]) -> str:
    target = law['target']
    found = []
    for name, value, bands in (('a', law['a'], law['bands']), ('N', target['N'], target['bands'])):
        low, high = bands.get(name, (value, value))
        words = 'a' if name == 'a' else f'N*({target["C"]:.3g})'
        found.append(f'{words} = {value:.3g} [{low:.3g}, {high:.3g}]')
    return ', '.join(found)


def _pull(
    seen: Points, level: np.ndarray, laws: Mapping[str, dict[str, Any]], pair: tuple[str, str]
) -> str:
    """The budget without which the two methods come closest, if it explains a part of the gap."""
    at = float(laws[pair[0]]['target']['C'])
    sizes = {name: np.log(laws[name]['target']['N']) for name in pair}
    gap = abs(sizes[pair[0]] - sizes[pair[1]])
    best = (0.0, '')
    for runs in _groups(seen):
        kept = np.setdiff1d(np.arange(len(seen.y)), runs)
        for name, other in (pair, pair[::-1]):
            size = _size(name, seen.take(kept), level[kept], at)
            if size is None:
                continue
            closed = 1 - abs(np.log(size) - sizes[other]) / max(gap, 1e-9)
            low, high = seen.c[runs].min(), seen.c[runs].max()
            budget = (
                f'{low:.3g}' if high < low * np.exp(isoflop.SPREAD) else f'{low:.3g} to {high:.3g}'
            )
            words = (
                f'the runs at C = {budget} pull {name}, which gives N* = {size:.3g} without them'
            )
            best = max(best, (closed, words))
    return best[1] if best[0] > _PULL else 'no budget alone pulls them apart'


def _groups(seen: Points) -> list[np.ndarray]:
    """Indices of the runs of each budget, or of each range of C if runs share none."""
    shared = isoflop.budgets(seen.n, seen.c)
    return shared if len(shared) > 1 else np.array_split(np.argsort(seen.c), _GROUPS)


def _size(name: str, seen: Points, level: np.ndarray, at: float) -> float | None:
    """N* of a method at a budget; None without a law."""
    if name == 'joint':
        law, _ = fit_joint(seen, 0)
        return None if law is None else float(optimum(law.params, seen.cost, np.array([at]))[0][0])
    if name == 'isoflop':
        found, _ = isoflop.parabolas(seen.n, seen.c, level, seen.seeds.weights)
    else:
        found, _ = isoflop.frontier(seen.n, seen.c, seen.y)
    return None if found.exponent is None else found.size(at)
