"""Contradictions between methods: the budgets that cause them, and the method to show."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

import numpy as np

from vit_jax.scaling import isoflop
from vit_jax.scaling.joint import fit_joint, optimum
from vit_jax.scaling.points import Points

_GROUPS = 4  # number of ranges of C if runs share no budget
_PULL = 0.25  # least share of a gap that is attributed to a budget
_MINIMA = 3  # least number of minima of parabolas that are preferred to another method
_WIDE = 0.5  # an exponent with a relative 90 % half-interval above this is not identified
_WIDE_RATIO = 100.0  # ratio of the ends of an interval above which a value is not determined
Ways = Mapping[str, dict[str, Any] | None]


def compare(
    runs: Points, level: np.ndarray, laws_by_method: Ways, minima: int
) -> tuple[str, list[str]]:
    """Choose the method to show, and explain contradictions.

    Two methods contradict each other if their intervals of N*, or of its exponent, are disjoint.
    The method shown determines N* and does not contradict all the others. The frontier comes last;
    fewer contradictions come first; then parabolas with three minima or more, which do not assume a
    form that all budgets share. Without contradictions, a joint law without warnings comes first.

    Args:
      runs: Fitted runs.
      level: Losses [M] at the mean of their budgets.
      laws_by_method: {method: its exponents and target}; None for a method without a law.
      minima: Number of budgets with a parabola's minimum.

    Returns:
      Name of the method, '' without any; a line for each contradiction.
    """
    laws = {
        name: method_law for name, method_law in laws_by_method.items() if method_law is not None
    }
    pairs = [
        (first, second)
        for first, second in itertools.combinations(laws, 2)
        if _are_disjoint(laws[first], laws[second])
    ]
    against = {name: sum(name in pair for pair in pairs) for name in laws}

    def rank(name: str) -> tuple[bool | int, ...]:
        trusted = name == 'isoflop' and minima >= _MINIMA
        clean = name == 'joint' and not pairs and laws[name]['identified']
        outlier = against[name] == max(len(laws) - 1, 1)
        determined = is_determined(laws[name]['target']['bands'].get('N'))
        vague = has_vague_exponent(laws[name]) or not determined
        return vague, outlier, name == 'frontier', against[name], not clean, not trusted

    preferred = min(laws, key=rank, default='')
    reason = (
        'it does not assume a form for all budgets'
        if preferred == 'isoflop'
        else 'the least contradicted'
    )
    lines = [
        f'{first} and {second} contradict each other: {_describe_law(laws[first])} and '
        f'{_describe_law(laws[second])}; {_blame_budget(runs, level, laws, (first, second))}; '
        f'{preferred} is shown ({reason})'
        for first, second in pairs
    ]
    return preferred, lines


def _are_disjoint(first_band: dict[str, Any], second: dict[str, Any]) -> bool:
    """Return whether two laws exclude each other; unidentified values exclude nothing."""
    if has_vague_exponent(first_band) or has_vague_exponent(second):
        return False
    intervals = [(first_band['bands'], second['bands'], 'a')]
    intervals.append((first_band['target']['bands'], second['target']['bands'], 'N'))
    return any(
        left[key][1] < right[key][0] or right[key][1] < left[key][0]
        for left, right, key in intervals
        if key in left and key in right and is_determined(left[key]) and is_determined(right[key])
    )


def has_vague_exponent(law: dict[str, Any]) -> bool:
    """Return whether the runs leave the exponent a of a law undetermined."""
    low, high = law['bands'].get('a', (law['a'], law['a']))
    return high - low > 2 * _WIDE * abs(law['a'])


def is_determined(band: list[float] | None) -> bool:
    """Return whether an interval spans less than a factor of 100; True without one."""
    return band is None or band[1] <= _WIDE_RATIO * band[0]


def _describe_law(law: dict[str, Any]) -> str:
    target = law['target']
    texts = []
    for name, value, bands in (('a', law['a'], law['bands']), ('N', target['N'], target['bands'])):
        low, high = bands.get(name, (value, value))
        symbol = 'a' if name == 'a' else f'N*({target["C"]:.3g})'
        texts.append(f'{symbol} = {value:.3g} [{low:.3g}, {high:.3g}]')
    return ', '.join(texts)


def _blame_budget(
    runs: Points, level: np.ndarray, laws: Mapping[str, dict[str, Any]], pair: tuple[str, str]
) -> str:
    """Name the budget without which two methods come closest, if it explains part of the gap."""
    target = float(laws[pair[0]]['target']['C'])
    sizes = {name: np.log(laws[name]['target']['N']) for name in pair}
    gap = abs(sizes[pair[0]] - sizes[pair[1]])
    best = (0.0, '')
    for group in _group_runs(runs):
        other_indices = np.setdiff1d(np.arange(len(runs.y)), group)
        for name, other_name in (pair, pair[::-1]):
            size = _size(name, runs.take(other_indices), level[other_indices], target)
            if size is None:
                continue
            closed = 1 - abs(np.log(size) - sizes[other_name]) / max(gap, 1e-9)
            low, high = runs.c[group].min(), runs.c[group].max()
            budget = (
                f'{low:.3g}' if high < low * np.exp(isoflop.SPREAD) else f'{low:.3g} to {high:.3g}'
            )
            text = f'the runs at C = {budget} pull {name}, which gives N* = {size:.3g} without them'
            best = max(best, (closed, text))
    return best[1] if best[0] > _PULL else 'no single budget pulls them apart'


def _group_runs(runs: Points) -> list[np.ndarray]:
    """Index the runs of each budget, or of each range of C if runs do not share budgets."""
    shared = isoflop.budgets(runs.n, runs.c)
    return shared if len(shared) > 1 else np.array_split(np.argsort(runs.c), _GROUPS)


def _size(name: str, runs: Points, level: np.ndarray, target: float) -> float | None:
    """Predict N* at a budget by a method; None without a law."""
    if name == 'joint':
        law, _ = fit_joint(runs, 0)
        return (
            None if law is None else float(optimum(law.params, runs.cost, np.array([target]))[0][0])
        )
    if name == 'isoflop':
        optima, _ = isoflop.parabolas(runs.n, runs.c, level, runs.seeds.weights)
    else:
        optima, _ = isoflop.frontier(runs.n, runs.c, runs.y)
    return None if optima.exponent is None else optima.size(target)
