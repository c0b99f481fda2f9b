"""The file with the frequency of each color in a data set, for the weights of rare ones."""

from __future__ import annotations

import json
import os

import numpy as np

from vit_jax.array_types import Int64
from vit_jax.errors import UserError
from vit_jax.storage import paths


def write(path: str | os.PathLike[str], counts: Int64[np.ndarray, 'Q'], source: str) -> None:
    """Writes the counts of the bins of `ops.color_bins`, and their source, as JSON."""
    paths.write_text_atomic(path, json.dumps({'source': source, 'counts': counts.tolist()}) + '\n')


def read(path: str | os.PathLike[str]) -> Int64[np.ndarray, 'Q']:
    """The counts.

    Raises:
      UserError: if there is no such file, or it is of another kind.
    """
    text = paths.read_text(paths.path(path), errors='replace')
    if text is None:
        raise UserError(
            f'config.task.prior: there is no {os.fspath(path)!r}; make it of the training data by '
            '`python -m vit_jax colors SOURCE --out FILE`'
        )
    try:
        counts = np.array(paths.parse_json(text)['counts'])
    except (ValueError, KeyError, TypeError, OverflowError) as error:
        raise UserError(f'config.task.prior: {os.fspath(path)!r} holds no counts') from error
    if counts.ndim != 1 or counts.dtype != np.int64 or counts.min() < 0 or not counts.sum():
        raise UserError(f'config.task.prior: {os.fspath(path)!r} holds invalid counts')
    return counts
