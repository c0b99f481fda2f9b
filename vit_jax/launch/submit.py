"""Submission of a script, a task or a manifest."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys
import tempfile
from collections.abc import Sequence

from vit_jax.errors import UserError


def slurm(script: str) -> str:
    """Submit an sbatch script and return the number of the job.

    Raises:
      UserError: without sbatch, or if it refuses.
    """
    hint = 'run this on a login node of the cluster, or with --dry-run'
    printed = _run(['sbatch', '--parsable'], script, hint)
    return printed.strip().partition(';')[0]  # the name of the cluster may follow


def sky(name: str, task: str) -> str:
    """Submit a SkyPilot task as a managed job and return what SkyPilot prints.

    Raises:
      UserError: without SkyPilot, or if it refuses.
    """
    hint = "install it (uv tool install 'skypilot[gcp]'), or use --dry-run"
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder) / f'{name}.yaml'
        path.write_text(task)
        return _run(['sky', 'jobs', 'launch', '--yes', '--detach-run', str(path)], '', hint)


def kubernetes(manifest: str) -> str:
    """Create what a manifest describes in the current cluster and return what kubectl prints.

    Raises:
      UserError: without kubectl, or if it refuses.
    """
    hint = 'install it with access to the cluster, or use --dry-run'
    return _run(['kubectl', 'create', '-f', '-'], manifest, hint)


def _run(words: Sequence[str], given: str, hint: str) -> str:
    environ = dict(os.environ)
    if not sys.flags.safe_path:
        environ.pop('PYTHONSAFEPATH', None)  # set by this program; a job inherits the rest
    try:
        done = subprocess.run(
            words, input=given, capture_output=True, text=True, check=False, env=environ
        )
    except FileNotFoundError as e:
        raise UserError(f'launch: {words[0]} was not found; {hint}') from e
    if done.returncode:
        said = (done.stderr.strip() or done.stdout.strip() or 'it does not say why').splitlines()
        raise UserError(f'launch: {words[0]} refused: {said[-1]}')
    return done.stdout
