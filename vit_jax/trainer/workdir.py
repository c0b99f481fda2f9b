"""A run's folder before the run starts in it, and after a start that failed."""

from __future__ import annotations

import contextlib
import pathlib
from collections.abc import Iterator, Sequence

import jax
from ml_collections import ConfigDict

from vit_jax.checkpoints import manifest
from vit_jax.config import defaults, schema
from vit_jax.config import load as config_lib
from vit_jax.errors import UserError
from vit_jax.runtime import processes
from vit_jax.storage import lock, paths, run_folder
from vit_jax.trainer.build import Training
from vit_jax.trainer.meter import Diverged

# What may differ between two starts of one run: it changes no example and no update.
FREE = ('evals', 'every', 'checkpoint', 'parallel', 'writers')
SCHEDULES = ('optim.schedule', 'optim.decay_schedule', 'step.ema_schedule')


def finished(
    config: ConfigDict, folder: pathlib.Path, extend: bool = False
) -> dict[str, float] | None:
    """The final evaluation of a run that is complete; None if there is something to do.

    A start that saved nothing does not stand in the way of another config, nor does a run of
    another length if it is to be extended.

    Raises:
      UserError: if the folder holds a run of another config, or the config of something else.
    """
    if (before := stored_config(folder)) is None:
        return None
    for size in schema.LEFT_OPEN:  # an open one was filled from the data
        if before.model.get(size) and not config.model.get(size):
            before.model[size] = config.model.get(size)
    changed = [name for name in defaults.differences(before, config) if name not in FREE]
    if extend and changed == ['total']:
        return None
    if changed:
        names = ', '.join(f'config.{name}' for name in changed)
        raise UserError(
            f'{folder} holds a run of another config ({names} differs): choose another --workdir'
            f'{_going_on(folder, changed)}'
        )
    return run_folder.read_result(folder)


def stored_config(folder: pathlib.Path) -> ConfigDict | None:
    """The config of a run that has saved something; None if there is no such run.

    Raises:
      UserError: if the folder holds the config of something else.
    """
    if (stored := run_folder.read_config(folder)) is None:
        return None
    config_lib.require_run(stored, f'choose another --workdir: {folder / run_folder.CONFIG}')
    return None if run_folder.saved_nothing(folder) else config_lib.from_dict(stored)


def _going_on(folder: pathlib.Path, changed: Sequence[str]) -> str:
    """Advice on making a run longer, if its config is changed for that alone; else empty."""
    if 'total' not in changed or not {*changed} <= {'total', *SCHEDULES}:
        return ''
    steps = run_folder.steps(folder)
    if not steps:
        return ''
    here = '' if len(changed) > 1 else 'add --extend if the schedule does not depend on it, or '
    return (
        f'; to go on from here {here}give another --workdir '
        f'--config.branch.from={folder} --config.branch.step={steps[-1]}'
    )


def begun(folder: pathlib.Path) -> bool:
    """Whether the folder holds a finished checkpoint, so that the run resumes."""
    return bool(processes.on_process_0(lambda: bool(run_folder.steps(folder))))


def intact(folder: pathlib.Path) -> bool:
    """Whether a checkpoint is left that the run can resume from; reads its files."""
    root = folder / run_folder.CHECKPOINTS
    return bool(processes.on_process_0(lambda: manifest.newest_intact(root)[0] is not None))


def set_aside(folder: pathlib.Path) -> None:
    """Moves what is left of a run out of its way, so that it starts anew; hold the folder's lock.

    All of it goes to a new folder in `checkpoints/rejected/`: the steps, metrics and result.
    """

    def move() -> None:
        place = manifest.set_all_aside(folder / run_folder.CHECKPOINTS)
        for name in (run_folder.METRICS, run_folder.RESULT):
            if (text := paths.read_text(folder / name, errors='replace')) is not None:
                paths.make_folder(place)
                paths.write_text_atomic(place / name, text)
                (folder / name).unlink()

    processes.on_process_0(move)


def check_data(training: Training, folder: pathlib.Path) -> None:
    """Raise UserError if the folder's run was made with other data files.

    What a start that saved nothing has left counts for nothing.
    """
    if run_folder.read_config(folder) is None or not run_folder.saved_nothing(folder):
        training.data.check(folder)


def replaced(training: Training, folder: pathlib.Path) -> tuple[str, ...]:
    """A line if the config of a start that saved nothing is about to be replaced by another."""
    stored = run_folder.read_config(folder)
    if stored is None or not run_folder.saved_nothing(folder):
        return ()
    try:
        found = defaults.differences(config_lib.from_dict(stored), training.config)
    except UserError:  # it names what there is not
        found = ['model']
    if not (changed := [f'config.{name}' for name in found if name not in FREE]):
        return ()
    return (
        f'replaces the {run_folder.CONFIG} of a start that saved nothing: other '
        + ', '.join(changed),
    )


@contextlib.contextmanager
def cleared_on_error(folder: pathlib.Path, existed: bool) -> Iterator[None]:
    """Leave an empty folder empty if a mistake ends the run before its first checkpoint.

    Whoever holds the folder's lock enters it. A run that has diverged stays, to be looked at.

    Args:
      folder: the run folder.
      existed: whether it was there before it was locked; if not, it goes too.
    """
    ours = jax.process_index() == 0 and all(p.name == lock.LOCK for p in folder.iterdir())
    try:
        yield
    except (Diverged, lock.Taken):
        raise
    except UserError:
        if ours and folder.is_dir() and run_folder.saved_nothing(folder):
            _clear(folder, existed)
        raise


def _clear(folder: pathlib.Path, existed: bool) -> None:
    run_folder.clear(folder)
    if paths.is_remote(folder):
        return  # there the lock deletes itself, and no folder is left
    (folder / lock.LOCK).unlink(missing_ok=True)
    if not existed:
        with contextlib.suppress(OSError):
            folder.rmdir()
