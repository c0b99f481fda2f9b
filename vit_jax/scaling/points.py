"""Runs with a model size N, data D, compute C and a loss, from the rows of a table."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np

from vit_jax.errors import UserError
from vit_jax.scaling.noise import SETTING, Seeds, centers, group_indices, merge_seeds
from vit_jax.scaling.rows import (
    Numbered,
    Row,
    drop_copies,
    is_unfinished,
    number,
    read_cell,
    sort_keys,
)

COUNTED = {
    'parameters': 'all parameters, embeddings and head included',
    'flops': 'exact: 3 times the forward pass, embeddings and head included',
}
SEEN, SIZE = 'examples_seen', 'data_size'  # columns of `collect`
_USUAL = (1.0, 20.0)  # C / (N D); 6 for a forward and a backward pass of dense layers
_EXACT = 0.01  # relative deviation of C / (N D) up to which C counts as proportional to N D


@dataclasses.dataclass(frozen=True)
class Columns:
    """Names of the columns; one of n, d and c may be None and then follows from C = 6 N D.

    `unique` has the amount of different data, in the unit of D; without it, the columns
    `examples_seen` and `data_size` of `collect` give the repetitions of data, if present.

    Raises:
      UserError: Two of n, d and c are None.
    """

    n: str | None
    d: str | None
    c: str | None
    y: str
    by: tuple[str, ...] = ()
    unique: str | None = None

    def __post_init__(self) -> None:
        if sum(name is not None for name in (self.n, self.d, self.c)) < 2:
            raise UserError('give two of --n, --d and --c; the third follows from C = 6 N D')

    def flags(self) -> list[tuple[str, str]]:
        """List the columns in which a row needs a value, and their flags."""
        named = [(self.n, '--n'), (self.d, '--d'), (self.c, '--c'), (self.y, '--y')]
        named.insert(-1, (self.unique, '--unique'))
        return [(column, flag) for column, flag in named if column is not None]


@dataclasses.dataclass(frozen=True)
class Cost:
    """Compute of a run, C = k N^p D^q."""

    k: float = 6.0
    p: float = 1.0
    q: float = 1.0

    def data(self, n: np.ndarray, c: np.ndarray) -> np.ndarray:
        """Compute the data D that a budget leaves for a model size N; infinite for N = 0."""
        with np.errstate(divide='ignore'):
            return (c / (self.k * n**self.p)) ** (1 / self.q)

    @property
    def text(self) -> str:
        """Formula of the compute as text."""
        if (self.p, self.q) == (1.0, 1.0):
            return f'C = {self.k:.4g} N D'
        return f'C = {self.k:.4g} N^{self.p:.4g} D^{self.q:.4g}'


@dataclasses.dataclass(frozen=True)
class Points:
    """Runs of one curve, ascending in C.

    Attributes:
      by: {column: value} that distinguishes the curve.
      n, d, c, y: Size, data, compute and loss [M], all positive.
      unique: Data [M] without repeats in the unit of D, at most D.
      seeds: Seeds of the runs of each point.
      cost: C as a function of N and D.
      left_out: A line for each row that was left out.
      notes: Warnings about the table.
    """

    by: dict[str, str]
    n: np.ndarray
    d: np.ndarray
    c: np.ndarray
    y: np.ndarray
    unique: np.ndarray
    seeds: Seeds
    cost: Cost
    left_out: tuple[str, ...]
    notes: tuple[str, ...]

    @property
    def x(self) -> np.ndarray:
        """N and D as columns [M, 2]."""
        return np.stack([self.n, self.d], axis=1)

    def take(self, indices: np.ndarray) -> Points:
        """Select points by a mask [M] or indices."""
        arrays = {name: getattr(self, name)[indices] for name in ('n', 'd', 'c', 'y', 'unique')}
        return dataclasses.replace(self, **arrays, seeds=self.seeds.take(indices))


def read(rows: Sequence[Row], columns: Columns) -> list[Points]:
    """Read the runs of each curve, in the order of the values of `columns.by`.

    Raises:
      UserError: A column is unknown, a cell is not a number, or no row is usable.
    """
    groups: dict[tuple[str, ...], list[Numbered]] = {}
    for line, row in enumerate(rows, start=2):
        key = tuple(read_cell(row, column, '--by') for column in columns.by)
        groups.setdefault(key, []).append((line, row))
    labels = {key: dict(zip(columns.by, key, strict=True)) for key in sort_keys(groups)}
    curves = [_points(by, groups[key], columns) for key, by in labels.items()]
    if not any(len(points.y) for points in curves):
        raise UserError(f'no row can be fitted; {curves[0].left_out[0]}')
    return curves


def _points(by: dict[str, str], group: Sequence[Numbered], columns: Columns) -> Points:
    left_out, usable = [], []
    for numbered in group:
        if problem := _find_problem(numbered, columns):
            left_out.append(f'{numbered[1].get("run") or f"line {numbered[0]}"}: {problem}')
        else:
            usable.append(numbered)
    flags = columns.flags()
    usable, copies = drop_copies(usable, [column for column, _ in flags[:-1]], columns.y)
    values = [[number(numbered, *flag) for flag in flags] for numbered in usable]
    names = [flag.strip('-') for _, flag in flags]
    table = dict(zip(names, np.array(values).reshape(-1, len(names)).T, strict=True))
    cost, notes = _infer_cost(table, columns)
    settings = [row.get(SETTING, '') for _, row in usable]
    n, d, c, y = _complete(table, cost)
    unique = d / _epochs(usable, table, d)
    (n, d, c, unique, y), seeds, more = _merge_runs(
        np.stack([n, d, c, unique], axis=1), y, settings
    )
    order = np.lexsort((n, c))
    points = Points(by, n, d, c, y, unique, seeds, cost, tuple(left_out), (*copies, *notes, *more))
    return points.take(order)


def _find_problem(numbered: Numbered, columns: Columns) -> str:
    """Explain why a row is left out; empty for a usable row."""
    if is_unfinished(numbered[1]):
        return 'left out, it is not finished'
    for column, flag in columns.flags():
        if not read_cell(numbered[1], column, flag):
            return f'left out, it has no {column.removeprefix("1-")}'
        value = number(numbered, column, flag)
        if not (np.isfinite(value) and value > 0):
            return f'left out, {column} is {value:g}; it must be positive and finite'
    return ''


def _infer_cost(table: dict[str, np.ndarray], columns: Columns) -> tuple[Cost, list[str]]:
    """Infer the cost: C = 6 N D, or with all three columns the power law through their values."""
    if None in (columns.n, columns.d, columns.c) or not len(table['y']):
        return Cost(), []
    log_n, log_d, log_c = (np.log(table[name]) for name in ('n', 'd', 'c'))
    ratio = log_c - log_n - log_d
    mean = float(np.exp(ratio.mean()))
    questions = []
    if not _USUAL[0] <= mean <= _USUAL[1]:
        questions.append(
            f'C is {mean:.3g} N D, where 6 N D is usual: are N parameters, D tokens (images times '
            'patches) and C FLOPs, forward and backward?'
        )
    if np.ptp(ratio) <= 2 * _EXACT:
        return Cost(k=mean), questions
    terms = np.stack([np.ones_like(log_n), log_n, log_d], axis=1)
    (log_k, p, q), _, rank, _ = np.linalg.lstsq(terms, log_c, rcond=None)
    low, high = np.exp([ratio.min(), ratio.max()])
    note = f'C / (N D) runs from {low:.3g} to {high:.3g}'
    if rank < 3 or min(p, q) <= 0.2:
        return Cost(k=mean), [f'{note}; its mean is used', *questions]
    cost = Cost(float(np.exp(log_k)), float(p), float(q))
    return cost, [f'{note}; a power law is used', *questions]


def _complete(table: dict[str, np.ndarray], cost: Cost) -> tuple[np.ndarray, ...]:
    n, d, c = (table.get(name) for name in 'ndc')
    if n is None:
        assert c is not None and d is not None
        n = c / (cost.k * d)
    if d is None:
        assert c is not None
        d = c / (cost.k * n)
    return n, d, cost.k * n * d if c is None else c, table['y']


def _epochs(
    usable: Sequence[Numbered], table: Mapping[str, np.ndarray], d: np.ndarray
) -> np.ndarray:
    """Count the epochs [M] of each run, at least 1; 1 if the table lacks the columns."""
    if 'unique' in table:
        return np.maximum(d / table['unique'], 1.0)
    counts = [(row.get(SEEN), row.get(SIZE)) for _, row in usable]
    if not counts or not all(map(all, counts)):
        return np.ones(len(d))
    examples, size = (
        np.array([number(numbered, column, '--csv') for numbered in usable])
        for column in (SEEN, SIZE)
    )
    with np.errstate(divide='ignore', invalid='ignore'):
        return np.nan_to_num(np.maximum(examples / size, 1.0), nan=1.0, posinf=1.0)


def _merge_runs(
    x: np.ndarray, y: np.ndarray, settings: Sequence[str]
) -> tuple[tuple[np.ndarray, ...], Seeds, list[str]]:
    """Merge the runs of each setting, or of each row of x without one, by geometric means.

    Args:
      x: N, D, C and unique data [M, 4].
      y: Losses [M].
      settings: Names [M]; '' where missing.

    Returns:
      N, D, C, unique data and the loss of each point; the seeds of its runs; a line on merged
      rows.
    """
    which = group_indices([name or tuple(index) for name, index in zip(settings, x, strict=True)])
    log_y, seeds = merge_seeds(np.log(y), which)
    if not seeds.several:
        return (*x.T, y), seeds, []
    merged = centers(x, which)
    if not seeds.noise:
        return (*merged.T, np.exp(log_y)), seeds, []
    index = int(np.argmax(seeds.counts))
    note = (
        f'{int((seeds.counts > 1).sum())} point(s) with several rows, such as '
        f'N = {merged[index, 0]:.4g}, D = {merged[index, 1]:.4g}: the mean of their log losses is '
        f'weighted by their number; they differ by {100 * seeds.noise:.2g} %'
    )
    return (*merged.T, np.exp(log_y)), seeds, [note]


def describe_conventions(columns: Columns) -> str:
    """Describe in two sentences what N and C count, as far as the columns show."""
    fallback = 'as in the table; whether it counts embeddings and head is unknown'
    n = '6 N D solved for N' if columns.n is None else COUNTED.get(columns.n, fallback)
    c = '6 N D' if columns.c is None else COUNTED.get(columns.c, fallback)
    return f'N: {n}. C: {c}.'
