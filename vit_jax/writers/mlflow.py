"""MLflow at `MLFLOW_TRACKING_URI`, such as `sqlite:///mlflow.db` or `http://HOST:5000`."""

from __future__ import annotations

import hashlib
import os
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from vit_jax.array_types import UInt8
from vit_jax.extras import needed_by
from vit_jax.storage import servers
from vit_jax.writers import base
from vit_jax.writers.base import RunStart, markdown

EXTRA = 'mlflow'
EXPERIMENT = 'vit_jax'  # unless MLFLOW_EXPERIMENT_NAME names another
MAX_PARAMS = 100  # in a call
MAX_LENGTH = 500  # characters of a value, in any version of MLflow
MAX_NAME = 250  # characters
# MLflow would try for minutes; a run sends again later what the server has missed.
QUICK = {'MLFLOW_HTTP_REQUEST_MAX_RETRIES': '2', 'MLFLOW_HTTP_REQUEST_TIMEOUT': '30'}
BUSY = ('TEMPORARILY_UNAVAILABLE', 'REQUEST_LIMIT_EXCEEDED', 'DEADLINE_EXCEEDED')
SERVER_ERROR = re.compile('error code (408|425|429|5[0-9][0-9])')
REFUSED = re.compile(r'[^/\w.\- :]')  # in names


class Writer(base.Writer):
    """Write to an MLflow run with the run folder's name; a resumed run continues it.

    Steps that a resumed run repeats are not written again.

    Args:
      run: Run whose config becomes the parameters of the MLflow run.

    Raises:
      UserError: if the package is not installed.
    """

    def __init__(self, run: RunStart):
        for name, default in QUICK.items():
            os.environ.setdefault(name, default)
        with needed_by("config.writers: 'mlflow'", EXTRA):
            import mlflow
        self.require_answer()
        self._run, self._entities = run, mlflow.entities
        self._client = mlflow.MlflowClient()
        self._id = run.identity('mlflow', self._create)
        self._client.update_run(self._id, status='RUNNING')

    @classmethod
    def require_access(cls) -> None:
        """Check that the server, if there is one, accepts connections."""
        with needed_by("config.writers: 'mlflow'", EXTRA):
            cls.require_answer()

    @classmethod
    def require_answer(cls) -> None:
        """Check that the server, if there is one, accepts connections."""
        import mlflow

        servers.require_web_server(mlflow.get_tracking_uri(), "config.writers: 'mlflow'")

    @classmethod
    def may_pass(cls, error: Exception) -> bool:
        """Return whether the server does not answer, or reports a temporary failure."""
        busy = getattr(error, 'error_code', '') in BUSY or SERVER_ERROR.search(str(error))
        return bool(busy) or super().may_pass(error)

    def _create(self) -> str:
        """Create the run in MLflow; return its id."""
        name = os.environ.get('MLFLOW_EXPERIMENT_NAME', EXPERIMENT)
        existing = self._client.get_experiment_by_name(name)
        experiment = existing.experiment_id if existing else self._client.create_experiment(name)
        run_id = self._client.create_run(experiment, run_name=self._run.folder.name).info.run_id
        param, config = self._entities.Param, self._run.config
        flat = [param(escape(name), str(value)[:MAX_LENGTH]) for name, value in _flat(config)]
        for first in range(0, len(flat), MAX_PARAMS):
            self._client.log_batch(run_id, params=flat[first : first + MAX_PARAMS])
        return run_id

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        """Write the {name: value} that no earlier start has written."""
        milliseconds, unwritten = int(time.time() * 1000), self._run.unwritten(step, values)
        metric = self._entities.Metric
        if metrics := [
            metric(escape(name), x, milliseconds, step) for name, x in unwritten.items()
        ]:
            self._client.log_batch(self._id, metrics=metrics)

    def image(self, step: int, name: str, pixels: UInt8[np.ndarray, 'Y X 3']) -> None:
        """Keep a picture of a step as an artifact, NAME/STEP.png."""
        self._client.log_image(self._id, pixels, artifact_file=f'{escape(name)}/{step}.png')

    def texts(self, step: int, name: str, rows: Sequence[Mapping[str, str]]) -> None:
        """Keep a table of a step as an artifact, NAME/STEP.md."""
        self._client.log_text(self._id, markdown(rows), artifact_file=f'{escape(name)}/{step}.md')

    def close(self) -> None:
        self._client.set_terminated(self._id)


def escape(name: str) -> str:
    """Replace each character that MLflow refuses by its code: `_28_` for `(`.

    Names that are too long end in a digest.
    """
    name = REFUSED.sub(lambda match: f'_{ord(match[0]):x}_', name)
    parts = [part.replace('.', '_') if part.strip('.') == '' else part for part in name.split('/')]
    name = '/'.join(part or '_' for part in parts)
    if len(name) <= MAX_NAME:
        return name
    digest = hashlib.sha256(name.encode()).hexdigest()[:16]
    return f'{name[: MAX_NAME - len(digest) - 1]}_{digest}'


def _flat(config: Mapping[str, Any], prefix: str = '') -> Iterator[tuple[str, Any]]:
    for key, value in config.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f'{prefix}{key}.')
        else:
            yield f'{prefix}{key}', value
