"""Checks of a run folder before a start, and cleanup after a failed one."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import json
import pathlib
from collections.abc import Callable, Iterator, Sequence

import jax
from ml_collections import ConfigDict

from vit_jax.checkpoints import manifest
from vit_jax.checkpoints.best import BESTS
from vit_jax.checkpoints.checkpointer import Checkpointer
from vit_jax.config import defaults
from vit_jax.config.load import from_dict, require_run, section, to_json
from vit_jax.config.run import LEFT_OPEN, Branch, Optim, Schedule, Step
from vit_jax.errors import EXIT_FAILED, UserError
from vit_jax.optim.schedules import depends_on_total
from vit_jax.runtime import environment, processes
from vit_jax.step import TrainState
from vit_jax.storage import lock, paths, run_folder
from vit_jax.storage.model_ref import ModelRef
from vit_jax.trainer.build import Training
from vit_jax.trainer.early_stopping import Bests
from vit_jax.trainer.meter import Diverged

# Keys that may differ between two starts of a run, as they change no example and no update.
FREE = ('evals', 'every', 'checkpoint', 'parallel', 'writers')
SCHEDULES = ('optim.schedule', 'optim.decay_schedule', 'step.ema_schedule', 'step.sam_schedule')


def final_result(
    config: ConfigDict, folder: pathlib.Path, extend: bool = False
) -> dict[str, float] | None:
    """Return the final evaluation of a complete run; None if there are steps left.

    A start that saved nothing may be followed by another config, and a run to be extended may have
    another length.

    Raises:
      UserError: if the folder holds a run with a different config, or the config of something else.
    """
    if (before := stored_config(folder)) is None:
        return None
    for size in LEFT_OPEN:  # an open one was filled from the data
        if before.model.get(size) and not config.model.get(size):
            before.model[size] = config.model.get(size)
    changed = [name for name in defaults.differences(before, config) if name not in FREE]
    if extend and changed == ['total']:
        return None
    if changed:
        names = ', '.join(f'config.{name}' for name in changed)
        raise UserError(
            f'{folder} holds a run with a different config ({names} differs): choose another '
            '--workdir'
            f'{_continuation_advice(config, folder, changed)}'
        )
    return run_folder.read_result(folder)


def settle_warmup(config: ConfigDict, folder: pathlib.Path) -> ConfigDict:
    """Copy a config that averages parameters with `config.step.ema_warmup` set if it was open.

    A run or branch goes on as it began, also without the key; a new one warms up, unless its decay
    has a schedule.
    """
    step = section(config, Step)
    if not step.ema_decays or step.ema_warmup is not None:
        return config
    before = stored_config(folder)
    if before is None and (trunk := section(config, Branch).folder):
        run = ModelRef.parse(trunk).find_run()
        before = stored_config(paths.absolute(trunk if run is None else run.folder.parent))
    begun = step.ema_schedule == Schedule() if before is None else section(before, Step).ema_warmup
    if not begun:
        return config
    config = copy.deepcopy(config)
    with config.unlocked(), config.ignore_type():
        config.step.ema_warmup = begun
    return config


def stored_config(folder: pathlib.Path) -> ConfigDict | None:
    """Return the config of a run that has saved something; None if there is no such run.

    Raises:
      UserError: if the folder holds the config of something else.
    """
    if (stored := run_folder.read_config(folder)) is None:
        return None
    require_run(stored, f'choose another --workdir: {folder / run_folder.CONFIG}')
    return None if run_folder.has_saved_nothing(folder) else from_dict(stored)


def _continuation_advice(config: ConfigDict, folder: pathlib.Path, changed: Sequence[str]) -> str:
    """Advise how to continue if only length, schedule or batch size differ; else return ''."""
    if not {*changed} <= {'total', 'batch_size', *SCHEDULES}:
        return ''
    steps = run_folder.steps(folder)
    if not steps:
        return ''
    can_extend = changed == ['total'] and not depends_on_total(section(config, Optim).schedule)
    extend_advice = 'add --extend, or ' if can_extend else ''
    return (
        f'; to continue from here {extend_advice}give another --workdir '
        f'--config.branch.from={folder} --config.branch.step={steps[-1]}'
    )


def has_checkpoint(folder: pathlib.Path) -> bool:
    """Return whether the folder holds a finished checkpoint, so that the run resumes."""
    return bool(processes.on_process_0(lambda: bool(run_folder.steps(folder))))


def has_intact_checkpoint(folder: pathlib.Path) -> bool:
    """Return whether the run has an intact checkpoint to resume from; reads its files."""
    root = folder / run_folder.CHECKPOINTS
    return bool(processes.on_process_0(lambda: manifest.newest_intact(root)[0] is not None))


class DamagedRun(UserError):
    """A complete run whose newest checkpoint is damaged."""

    exit_code = EXIT_FAILED


def require_intact(folder: pathlib.Path) -> None:
    """Check the newest checkpoint of a complete run; reads its files.

    Raises:
      DamagedRun: on every process, if its files are not those that were written.
    """

    def check() -> None:
        root = folder / run_folder.CHECKPOINTS
        for step in run_folder.step_numbers(root)[-1:]:
            try:
                manifest.verify(root / str(step))
            except (run_folder.Damaged, run_folder.Unfinished) as fault:
                raise DamagedRun(
                    f'{folder} is complete, and its newest checkpoint is damaged: step {step}: '
                    f'{fault}. Restore the files, or delete {run_folder.RESULT} and start without '
                    '--strict'
                ) from fault

    processes.on_process_0(check)


def set_aside(folder: pathlib.Path) -> None:
    """Move the steps, metrics and result of a run to a new folder in `checkpoints/rejected/`.

    The caller holds the folder's lock.
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
    """Raise UserError if the folder's run was made with different data files.

    Files of a start that saved nothing are ignored.
    """
    if run_folder.read_config(folder) is None or not run_folder.has_saved_nothing(folder):
        training.data.check(folder)


def replaced_config_note(training: Training, folder: pathlib.Path) -> tuple[str, ...]:
    """Note that a different config replaces the one of a start that saved nothing."""
    stored = run_folder.read_config(folder)
    if stored is None or not run_folder.has_saved_nothing(folder):
        return ()
    try:
        keys = defaults.differences(from_dict(stored), training.config)
    except UserError:  # it names a model that does not exist
        keys = ['model']
    if not (changed := [f'config.{name}' for name in keys if name not in FREE]):
        return ()
    return (
        f'replaces the {run_folder.CONFIG} of a start that saved nothing: other '
        + ', '.join(changed),
    )


@contextlib.contextmanager
def clear_on_error(folder: pathlib.Path, existed: bool, check_lock: lock.Check) -> Iterator[None]:
    """Leave an empty folder empty if a mistake ends the run before its first checkpoint.

    The caller holds the folder's lock. The files of a run that diverged stay for inspection.

    Args:
      folder: Run folder.
      existed: Whether it existed before it was locked; if not, it is removed too.
      check_lock: Check of its lock.

    Raises:
      lock.Taken: instead of another failure, if another run has taken the folder.
    """
    is_writer = jax.process_index() == 0 and all(p.name == lock.LOCK for p in folder.iterdir())
    try:
        yield
    except (Diverged, lock.Taken):
        raise
    except Exception as error:
        mistake = isinstance(error, UserError) or processes.peer_user_error()
        if mistake and is_writer and folder.is_dir() and run_folder.has_saved_nothing(folder):
            _clear(folder, existed)
        if not mistake and folder.is_dir():
            with contextlib.suppress(OSError):
                check_lock()
        raise


def _clear(folder: pathlib.Path, existed: bool) -> None:
    run_folder.clear(folder)
    if paths.is_remote(folder):
        return  # there the lock removes itself, and no folder is left
    (folder / lock.LOCK).unlink(missing_ok=True)
    if not existed:
        remove_if_empty(folder)


def remove_if_empty(folder: pathlib.Path) -> None:
    """Remove a folder unless it holds files."""
    with contextlib.suppress(OSError):
        folder.rmdir()


def require_own_folder(
    training: Training, folder: pathlib.Path, check_lock: lock.Check, say: Callable[[str], None]
) -> None:
    """Check before a save that the folder exists and belongs to this run; on every process.

    A config that was deleted or replaced is written again.

    Args:
      training: Run to save.
      folder: Run folder, with its config.
      check_lock: Check of the folder's lock.
      say: Function that prints a line for the user.

    Raises:
      UserError: if the folder was deleted, as a save would make it again, or taken over.
    """

    def check() -> None:
        if not paths.is_remote(folder) and not folder.is_dir():
            raise UserError(f'{folder} was deleted during the run, so its state cannot be saved')
        with paths.writing(folder):
            check_lock()
            stored = paths.read_text(folder / run_folder.CONFIG, errors='replace')
            if stored != to_json(training.config):
                say(f'{run_folder.CONFIG} was replaced during the run: written again')
                write_config(training, folder)

    processes.on_process_0(check)


def save(
    training: Training,
    checkpointer: Checkpointer,
    step: int,
    state: TrainState,
    bests: Bests,
    *,
    unevaluated: bool = False,
) -> None:
    """Start an asynchronous save of everything that a resumed run needs.

    If the state is `unevaluated`, that run begins with the evaluations of this step.

    Raises:
      UserError: as `Checkpointer.save`.
    """
    program = training.program
    meta = {
        'config': training.config.to_dict(),
        'data': {'step': step},
        'hardware': program.hardware,
        'versions': environment.versions(),
        'numerics': environment.numeric_settings(),
        'frozen': dict(program.frozen.digests) if program.frozen else {},
        'unevaluated': unevaluated,
        BESTS: {key: dataclasses.asdict(best) for key, best in bests.items()},
        'broken': list(training.data.source.broken.items()),
        **training.data.facts(),
    }
    saved = dataclasses.replace(state, frozen=None)
    saved = program.adapters.own(saved) if program.adapters else saved
    checkpointer.save(step, program.layout.to_global(saved), meta)


def write_config(training: Training, folder: pathlib.Path) -> None:
    """Write the config and the files that later commands need into the run folder; on process 0."""
    if jax.process_index() == 0:
        paths.write_text_atomic(folder / run_folder.CONFIG, to_json(training.config))
        training.data.save(folder)
        if training.program.frozen:
            training.program.frozen.save(folder)


def write_result(folder: pathlib.Path, result: dict[str, float], why: str) -> None:
    """Mark a run as complete, with the reason for an early end; on process 0."""
    if jax.process_index() == 0:
        content = {**result, **({run_folder.ENDED: why} if why else {})}
        with paths.writing(folder):
            run_folder.sync(folder)
            paths.write_text_atomic(folder / run_folder.RESULT, json.dumps(content) + '\n')
