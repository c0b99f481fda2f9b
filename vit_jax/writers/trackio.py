"""Trackio, Hugging Face's free tracker: on this machine, or in a Space.

`trackio show` draws the runs of this machine. `TRACKIO_SPACE_ID=me/runs` logs to a Space, and
`TRACKIO_DIR` changes the local folder.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Mapping, Sequence

import numpy as np

from vit_jax.array_types import UInt8
from vit_jax.errors import visible
from vit_jax.extras import needed_by
from vit_jax.writers import base
from vit_jax.writers.base import RunStart

EXTRA = 'trackio'
PROJECT = 'vit_jax'  # unless TRACKIO_PROJECT names another


class Writer(base.Writer):
    """Write to a Trackio run named after the run folder; a resumed run continues it.

    Steps that a resumed run repeats are not written again.

    Args:
      run: Run whose config becomes the config of the Trackio run.

    Raises:
      UserError: if the package is not installed.
    """

    def __init__(self, run: RunStart):
        with needed_by("config.writers: 'trackio'", EXTRA):
            import trackio
        name = run.identity('trackio', lambda: f'{run.folder.name}-{uuid.uuid4().hex[:6]}')
        self._run, self._trackio = run, trackio
        self._there = trackio.init(
            project=os.environ.get('TRACKIO_PROJECT', PROJECT),
            name=name,
            space_id=os.environ.get('TRACKIO_SPACE_ID'),
            config=dict(run.config),
            resume='allow',
            embed=False,  # no dashboard inside of a notebook
        )

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        """Write the {name: value} that no earlier start has written."""
        if unwritten := self._run.unwritten(step, values):
            self._there.log({visible(k): v for k, v in unwritten.items()}, step=step)

    def image(self, step: int, name: str, pixels: UInt8[np.ndarray, 'Y X 3']) -> None:
        """Write a picture of a step that no earlier start has written."""
        if not self._run.is_written(step, name):
            self._there.log({visible(name): self._trackio.Image(pixels)}, step=step)

    def texts(self, step: int, name: str, rows: Sequence[Mapping[str, str]]) -> None:
        """Write a table of a step that no earlier start has written."""
        if rows and not self._run.is_written(step, name):
            columns = list(rows[0])
            cells = [[visible(row[column]) for column in columns] for row in rows]
            table = self._trackio.Table(columns=columns, data=cells)
            self._there.log({visible(name): table}, step=step)

    def close(self) -> None:
        self._trackio.finish()
