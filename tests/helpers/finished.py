"""Runs that many tests read: trained once, by whichever worker needs them first."""

from __future__ import annotations

import fcntl
import os
import pathlib
from collections.abc import Callable

import pytest

from helpers.xla import use_one_device

ROOT = pathlib.Path(__file__).resolve().parents[2]


def made_once(
    factory: pytest.TempPathFactory, name: str, make: Callable[[pathlib.Path], None]
) -> pathlib.Path:
    """The folder of a finished run; do not write to it.

    Args:
      name: under which all workers know it.
      make: leaves the run in the folder `run` of the one that it is given.
    """
    base = factory.getbasetemp()
    if 'PYTEST_XDIST_WORKER' in os.environ:
        base = base.parent  # common to all workers
    folder = base / name
    with (base / f'{name}.lock').open('w') as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / 'run' / 'result.json').exists():
            folder.mkdir(exist_ok=True)
            make(folder)
    return folder / 'run'


def smoke_run_of(factory: pytest.TempPathFactory, experiment: str) -> pathlib.Path:
    """The run of an experiment at its smoke size, trained by the command line on one device."""
    from vit_jax import __main__

    words = ['train', '--config', f'{ROOT / experiment}:smoke', '--workdir']

    def train(folder: pathlib.Path) -> None:
        with pytest.MonkeyPatch.context() as patch:
            use_one_device(patch)
            assert __main__.main([*words, str(folder / 'run')]) == 0

    return made_once(factory, experiment.replace('/', '_'), train)
