"""Runs in processes of their own, and what their folders hold."""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import subprocess
import time
from collections.abc import Callable, Iterator

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest

from helpers import forked
from helpers.digests import tree_digest
from helpers.xla import use_one_device, xla_flags
from vit_jax.__main__ import main
from vit_jax.checkpoints import manifest
from vit_jax.storage import run_folder

steps = run_folder.steps


@pytest.fixture(scope='module', autouse=True)
def undrawn() -> Iterator[None]:
    """Processes that are forked by the tests of the module that imports this draw no curves.png."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(forked.UNDRAWN, '1')
        yield


@contextlib.contextmanager
def started(repo: pathlib.Path, *words: str, devices: int = 1) -> Iterator[subprocess.Popen[str]]:
    """A command in the background, killed in the end."""
    environment = {**os.environ, 'XLA_FLAGS': xla_flags(devices)}
    pipes = {'stdout': subprocess.PIPE, 'stderr': subprocess.STDOUT, 'text': True}
    with forked.start(words, environment, cwd=repo, **pipes) as process:
        try:
            yield process
        finally:
            process.kill()


def linear(folder: object, *flags: str, **changes: object) -> list[str]:
    """The words of a training of `linear.py` in a folder, with `changes` of its config."""
    config = str(pathlib.Path(__file__).with_name('linear.py'))
    changed = [f'--config.{key}={value}' for key, value in changes.items()]
    return ['train', '--config', config, '--workdir', str(folder), *changed, *flags]


def left_alone(folder: pathlib.Path, *flags: str) -> pathlib.Path:
    """The folder of a finished training of `linear.py` on one device, for fixtures of a module."""
    with pytest.MonkeyPatch.context() as patch:
        use_one_device(patch)
        assert main(linear(folder, *flags)) == 0
    return folder


def wait_until(condition: Callable[[], bool], process: subprocess.Popen[str]) -> None:
    """Returns once it holds; fails if the process ends before that."""
    deadline = time.monotonic() + 120
    while not condition():
        assert process.poll() is None, f'ended too soon: {process.stdout.read()}'
        assert time.monotonic() < deadline
        time.sleep(0.001)


def in_checkpoint(folder: pathlib.Path, change: Callable[[dict], object]) -> None:
    """Change the metadata of the newest checkpoint, which stays intact."""
    step = steps(folder)[-1]
    file = folder / 'checkpoints' / str(step) / 'meta' / 'metadata'
    meta = json.loads(file.read_text())
    change(meta)
    file.write_text(json.dumps(meta))
    manifest.write(folder / 'checkpoints', step)


def metrics(folder: pathlib.Path) -> list[dict]:
    path = folder / 'metrics.jsonl'
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def last_step(folder: pathlib.Path) -> int:
    """The last step that was logged."""
    with contextlib.suppress(json.JSONDecodeError):  # a line that is being written
        return max((line['step'] for line in metrics(folder)), default=0)
    return 0


def is_saving(folder: pathlib.Path) -> bool:
    """Whether a save is going on, or was when the run was killed."""
    return any(folder.glob('checkpoints/*.orbax-checkpoint-tmp'))


def digest(folder: pathlib.Path, step: int | None = None) -> str:
    """Digest of a whole checkpoint, by default the last."""
    saved = folder / 'checkpoints' / str(steps(folder)[-1] if step is None else step)
    return tree_digest([read_item(saved / name) for name in ('variables', 'training')])


def read_item(path: pathlib.Path):
    """Read what Orbax wrote there, as numpy arrays."""
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as reader:
        tree = reader.metadata(path).item_metadata.tree
        as_numpy = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), tree)
        return reader.restore(path, args=ocp.args.PyTreeRestore(tree, restore_args=as_numpy))
