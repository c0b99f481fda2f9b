"""Runs of a star sweep: shapes that differ from a center in one dimension, read from a table."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Sequence

import numpy as np

from vit_jax.errors import UserError
from vit_jax.scaling.rows import Row, cell, number, unfinished

LEAST = 8  # runs of a ray; its law has 7 parameters


@dataclasses.dataclass(frozen=True)
class Columns:
    """Names of the columns.

    Attributes:
      shape: the dimensions, as `config.model.width`.
      t: compute of a run.
      y: an error or a loss; `1-NAME` for one minus an accuracy.
      examples: examples seen; None if there are none.

    Raises:
      UserError: without a dimension.
    """

    shape: tuple[str, ...]
    t: str
    y: str
    examples: str | None = None

    def __post_init__(self) -> None:
        if not self.shape:
            raise UserError('--shape: name the columns of width, depth or others')

    @property
    def flags(self) -> list[tuple[str, str]]:
        """The columns in which a row needs a value, and their flags."""
        return [*((name, '--shape') for name in self.shape), (self.t, '--t'), (self.y, '--y')]


@dataclasses.dataclass(frozen=True)
class Ray:
    """Runs that differ in one dimension.

    Attributes:
      x, t, y: [M], the dimension, compute and loss of each.
    """

    x: np.ndarray
    t: np.ndarray
    y: np.ndarray


@dataclasses.dataclass(frozen=True)
class Star:
    """A star of runs.

    Attributes:
      center: {dimension: value}.
      rays: {dimension: its runs, those of the center included}.
      example: exponents of the compute of an example, {dimension: p}, and under '' the log of its
        scale; {} if the table does not tell.
      notes: a line for each doubt about the table.
    """

    center: dict[str, float]
    rays: dict[str, Ray]
    example: dict[str, float]
    notes: tuple[str, ...]

    def cost(self, shape: dict[str, float]) -> float | None:
        """Compute of an example of a shape; None if it is not known."""
        if not self.example:
            return None
        powers = sum(p * np.log(shape[name]) for name, p in self.example.items() if name)
        return float(np.exp(self.example[''] + powers))


def read(rows: Sequence[Row], columns: Columns) -> Star:
    """The star of a table: the center is the shape from which most runs differ in one dimension.

    Raises:
      UserError: for an unknown column, a text where a number belongs, or a dimension with too few
        runs, sizes or budgets.
    """
    kept, notes = [], []
    for line, row in enumerate(rows, start=2):
        name = row.get('run') or f'line {line}'
        empty = [column for column, flag in columns.flags if not cell(row, column, flag)]
        values = [number((line, row), *flag) for flag in columns.flags] if not empty else []
        if unfinished(row):
            notes.append(f'{name}: left out, it is not finished')
        elif empty:
            notes.append(f'{name}: left out, it has no {empty[0].removeprefix("1-")}')
        elif not (np.isfinite(values).all() and min(values) > 0):
            at = int(np.argmin([np.isfinite(v) and v > 0 for v in values]))
            notes.append(f'{name}: left out, {columns.flags[at][0]} is {values[at]:g}')
        else:
            kept.append([*values, _examples(row, line, columns)])
    if not kept:
        raise UserError(f'no row can be fitted; {notes[0]}')
    table = np.array(kept)
    shapes = table[:, : len(columns.shape)]
    middle = _center(shapes)
    away = (shapes != middle).sum(axis=1)
    if far := int((away > 1).sum()):
        notes.append(f'{far} run(s) differ from the center in more than one dimension: left out')
    table, shapes = table[away < 2], shapes[away < 2]
    rays = {}
    for i, name in enumerate(columns.shape):
        chosen = np.delete(shapes == middle, i, axis=1).all(axis=1)
        rays[name] = Ray(shapes[chosen, i], table[chosen, -3], table[chosen, -2])
        _check(name, rays[name])
    center = dict(zip(columns.shape, map(float, middle), strict=True))
    example = _example(columns.shape, shapes, table[:, -3], table[:, -1])
    return Star(center, rays, example, tuple(notes))


def _examples(row: Row, line: int, columns: Columns) -> float:
    if columns.examples is None or not cell(row, columns.examples, '--examples'):
        return np.nan
    return number((line, row), columns.examples, '--examples')


def _center(shapes: np.ndarray) -> np.ndarray:
    counts = collections.Counter(map(tuple, shapes))
    near = {one: int(((shapes != one).sum(axis=1) < 2).sum()) for one in counts}
    return np.array(max(counts, key=lambda one: (near[one], counts[one])))


def _check(name: str, ray: Ray) -> None:
    for values, noun in ((ray.x, 'sizes'), (ray.t, 'budgets')):
        if (different := len(np.unique(values))) < 3:
            raise UserError(f'--shape {name}: {different} {noun} around the center, of 3 needed')
    if len(ray.y) < LEAST:
        raise UserError(f'--shape {name}: {len(ray.y)} runs around the center, of {LEAST} needed')


def _example(
    names: Sequence[str], shapes: np.ndarray, t: np.ndarray, examples: np.ndarray
) -> dict[str, float]:
    """The power law of the compute of an example, by least squares of its log."""
    known = np.isfinite(examples) & (examples > 0)
    terms = np.column_stack([np.ones(known.sum()), np.log(shapes[known])])
    if np.linalg.matrix_rank(terms) < len(names) + 1:
        return {}
    found = np.linalg.lstsq(terms, np.log(t[known] / examples[known]), rcond=None)[0]
    return dict(zip(('', *names), map(float, found), strict=True))
