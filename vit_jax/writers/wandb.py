"""Weights & Biases, configured by its environment variables, such as `WANDB_MODE=offline`."""

from __future__ import annotations

import os
import uuid
from collections.abc import Mapping, Sequence

import numpy as np

from vit_jax.array_types import UInt8
from vit_jax.errors import UserError, visible
from vit_jax.extras import needed_by
from vit_jax.storage import servers
from vit_jax.writers import base
from vit_jax.writers.base import RunStart

EXTRA = 'wandb'
PROJECT = 'vit_jax'  # unless WANDB_PROJECT names another
ADDRESS = 'https://api.wandb.ai'  # unless WANDB_BASE_URL names another


class Writer(base.Writer):
    """Write to a W&B run with the run folder's name; a resumed run continues it.

    Steps that a resumed run repeats are not written again.

    Args:
      run: Run whose config becomes the config of the W&B run.

    Raises:
      UserError: if the package is not installed.
    """

    def __init__(self, run: RunStart):
        with needed_by("config.writers: 'wandb'", EXTRA):
            import wandb
        self.require_answer()
        self._run, self._wandb = run, wandb
        self._there = wandb.init(
            project=os.environ.get('WANDB_PROJECT', PROJECT),
            name=run.folder.name,
            id=run.identity('wandb', lambda: uuid.uuid4().hex[:12]),
            resume='allow',
            config=dict(run.config),
            dir=os.fspath(run.local),
            settings=wandb.Settings(console='off'),  # the progress bar would be a line a second
        )

    @classmethod
    def require_access(cls) -> None:
        """Check that there is an API key, unless the run stays on this machine.

        Raises:
          UserError: if there is none.
        """
        with needed_by("config.writers: 'wandb'", EXTRA):
            import wandb
        if _is_online() and not wandb.api.api_key:
            raise UserError(
                "config.writers: 'wandb' has no API key: run `wandb login`, or set WANDB_API_KEY "
                'or WANDB_MODE=offline'
            )

    @classmethod
    def require_answer(cls) -> None:
        """Check that the server accepts connections, unless the run stays on this machine."""
        if _is_online():
            address = os.environ.get('WANDB_BASE_URL', ADDRESS)
            servers.require_web_server(address, "config.writers: 'wandb'")

    @classmethod
    def may_pass(cls, error: Exception) -> bool:
        """Return whether the server does not answer; a refused key is permanent."""
        kinds = [kind.__name__ for kind in type(error).__mro__]
        silent = 'CommError' in kinds and 'AuthenticationError' not in kinds
        return silent or super().may_pass(error)

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        """Write the {name: value} that no earlier start has written."""
        if unwritten := self._run.unwritten(step, values):
            self._there.log({visible(k): v for k, v in unwritten.items()}, step=step)

    def image(self, step: int, name: str, pixels: UInt8[np.ndarray, 'Y X 3']) -> None:
        """Write a picture of a step that no earlier start has written."""
        if not self._run.is_written(step, name):
            self._there.log({visible(name): self._wandb.Image(pixels)}, step=step)

    def texts(self, step: int, name: str, rows: Sequence[Mapping[str, str]]) -> None:
        """Write a table of a step that no earlier start has written."""
        if rows and not self._run.is_written(step, name):
            columns = list(rows[0])
            cells = [[visible(row[column]) for column in columns] for row in rows]
            self._there.log(
                {visible(name): self._wandb.Table(columns=columns, data=cells)}, step=step
            )

    def close(self) -> None:
        self._there.finish()


def _is_online() -> bool:
    return os.environ.get('WANDB_MODE', 'online') == 'online'
