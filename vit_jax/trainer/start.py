"""What a run starts from: its own checkpoint, another run's state or parameters, or nothing."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import pathlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
from ml_collections import ConfigDict

from vit_jax import step as step_lib
from vit_jax.checkpoints import checkpointer as checkpointer_lib
from vit_jax.checkpoints import manifest
from vit_jax.checkpoints.checkpointer import Checkpointer
from vit_jax.config import defaults, schema
from vit_jax.config import load as config_lib
from vit_jax.config.allowed import dotted_names
from vit_jax.config.origin import Branch, Init
from vit_jax.errors import UserError
from vit_jax.inference import load as inference_lib
from vit_jax.interop import load as interop_lib
from vit_jax.runtime import processes
from vit_jax.storage import lock, paths, run_folder
from vit_jax.trainer import suits
from vit_jax.trainer.build import Training
from vit_jax.trainer.judge import Bests
from vit_jax.trainer.meter import Diverged

# What may differ between two starts of one run: it changes no example and no update.
FREE = ('evals', 'every', 'checkpoint', 'parallel', 'writers')
# What a branch is there to change.
BRANCHED = (*FREE, 'total', 'early_stop', 'optim.schedule', 'init', 'branch')


@dataclasses.dataclass(frozen=True)
class Origin:
    """What a new run starts from.

    Attributes:
      params: nested arrays; what is not there is initialised.
      state: whole, of the run that this one branches from; None if it branches from none.
      step: of `state`.
      hardware: that `state` was saved on.
      history: the metrics of the run that this one branches from, up to `step`.
      notes: where it comes from and what was changed to make it fit, a line each.
    """

    params: Any = dataclasses.field(default_factory=dict)
    state: step_lib.TrainState | None = None
    step: int = 0
    hardware: str = ''
    history: tuple[dict[str, Any], ...] = ()
    notes: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class Beginning:
    """Where a run goes on, or starts.

    Attributes:
      state: on the devices.
      step: of `state`.
      hardware: that `state` was saved on.
      unevaluated: whether the run was stopped before the evaluations after `step` were finished.
      broken: records of the training data that could not be read, and why.
      bests: the best results up to `step`.
    """

    state: step_lib.TrainState
    step: int
    hardware: str
    unevaluated: bool = False
    broken: Mapping[int, str] = dataclasses.field(default_factory=dict)
    bests: Bests = dataclasses.field(default_factory=dict)


def finished(
    config: ConfigDict, folder: pathlib.Path, extend: bool = False
) -> dict[str, float] | None:
    """The final evaluation of a run that is complete; None if there is something to do.

    A start that saved nothing does not stand in the way of another config, nor does a run of
    another length if it is to be extended.

    Raises:
      UserError: if the folder holds a run of another config, or the config of something else.
    """
    if (stored := run_folder.read_config(folder)) is None:
        return None
    config_lib.require_run(stored, f'choose another --workdir: {folder / run_folder.CONFIG}')
    if run_folder.saved_nothing(folder):
        return None
    before = config_lib.from_dict(stored)
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


def _going_on(folder: pathlib.Path, changed: Sequence[str]) -> str:
    """How a run is made longer, if it is that what its config is changed for."""
    if 'total' not in changed or not {*changed} <= {'total', 'optim.schedule'}:
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
    return bool(processes.on_process_0(lambda: int(bool(run_folder.steps(folder)))))


def intact(folder: pathlib.Path) -> bool:
    """Whether a checkpoint is left that the run can resume from; reads its files."""
    root = folder / run_folder.CHECKPOINTS
    return bool(processes.on_process_0(lambda: int(manifest.newest_intact(root)[0] is not None)))


def set_aside(folder: pathlib.Path) -> None:
    """Moves what is left of a run out of its way, so that it starts anew; hold the folder's lock.

    All of it goes to a new folder in `checkpoints/rejected/`: the steps, metrics and result.
    """

    def move() -> int:
        place = manifest.set_all_aside(folder / run_folder.CHECKPOINTS)
        for name in (run_folder.METRICS, run_folder.RESULT):
            if (text := paths.read_text(folder / name, errors='replace')) is not None:
                paths.make_folder(place)
                paths.write_text_atomic(place / name, text)
                (folder / name).unlink()
        return 0

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
def traceless(folder: pathlib.Path, existed: bool) -> Iterator[None]:
    """Leave an empty folder empty if a mistake ends the run before its first checkpoint.

    Whoever holds the folder's lock enters it. A run that has diverged stays, to be looked at.

    Args:
      folder: the run folder.
      existed: whether it was there before it was locked; if not, it goes too.
    """
    ours = jax.process_index() == 0 and all(p.name == lock.LOCK for p in folder.iterdir())
    try:
        yield
    except Diverged:
        raise
    except UserError:
        if ours and run_folder.saved_nothing(folder):
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


def find_origin(training: Training, allowed: Sequence[str] = ()) -> Origin:
    """Reads what `config.branch` or `config.init` names, if any, and fits it to the run.

    Args:
      training: of the run.
      allowed: modules of the user's own that the config of the other run may name, besides those
        that this one's names itself.

    Raises:
      UserError: if there is no such checkpoint, it does not fit, it names code that is not
        allowed, or one has to be named.
    """
    if defaults.arguments(training.config, 'branch')['from_']:
        return branch(training)
    init = Init(**defaults.arguments(training.config, 'init'))
    if init.from_ is None:
        raise UserError(
            'config.init.from: name the checkpoint to fine-tune, as --config.init.from=FILE; '
            '--config.init.from= trains from scratch'
        )
    if not (path := init.from_):
        return Origin()
    own = [name for _, name in dotted_names(training.config)]
    imported = interop_lib.read(path, allowed=[*allowed, *own])
    try:
        params, notes = interop_lib.fit(
            imported,
            training.program.model,
            training.program.abstract_state.params,
            training.data.image_size,
            init.posemb,
            init.select,
        )
    except UserError as e:
        raise UserError(f'config.init.from={path}: {e}') from e
    return Origin(params, notes=(f'from {path} ({imported.source})', *notes))


def branch(training: Training) -> Origin:
    """The whole state of another run at a kept step, to be continued with another schedule.

    With a later cooldown it is bit for bit what a run with that cooldown would have come to: one
    long run at a schedule that does not depend on its end gives a finished model of every length
    (Zhai et al. 2022, "Scaling Vision Transformers", section 3.4).

    Raises:
      UserError: if there is no such run or checkpoint, or its state does not fit.
    """
    section, program = Branch(**defaults.arguments(training.config, 'branch')), training.program
    trunk, step = paths.absolute(section.from_), section.step
    if step < 1:
        raise UserError('config.branch.step: name the kept step to branch off, from 1 on')
    if step >= training.timetable.total:
        raise UserError(
            f'config.branch.step={step}: the run ends at step {training.timetable.total}; give a '
            'later config.total'
        )
    try:
        before = inference_lib.stored_config(trunk)
        _, state, meta = checkpointer_lib.restore(
            trunk / run_folder.CHECKPOINTS, step, program.target
        )
    except UserError as e:
        raise UserError(f'config.branch: {e}') from e
    history = tuple(line for line in run_folder.read_metrics(trunk) if line['step'] <= step)
    return Origin(
        state=program.layout.from_global(state),
        step=step,
        hardware=meta.get('hardware', program.hardware),
        history=history,
        notes=(f'branches off {trunk} after step {step}', *changes(before, training, history)),
    )


def changes(
    before: ConfigDict, training: Training, history: tuple[dict[str, Any], ...]
) -> list[str]:
    """A line for each thing that makes a branch something else than that run cooled down."""
    changed = defaults.differences(before, training.config)
    lines = [f'there, config.{name} is another' for name in changed if name not in BRANCHED]
    for line in history:
        rate, now = line.get('train/lr'), float(training.timetable.lr(line['step'] - 1))
        if rate is not None and not math.isclose(rate, now, rel_tol=1e-5):
            lines.append(
                f'there, the learning rate of step {line["step"]} was {rate:g}, not {now:g}: '
                'give the warm-up in steps, and no shape that depends on config.total'
            )
            break
    return lines


def restore(
    training: Training,
    checkpointer: Checkpointer,
    origin: Origin | None,
    allowed: Sequence[str] = (),
    strict: bool = False,
) -> Beginning:
    """The newest intact checkpoint of the run, or what a new one starts from.

    Args:
      training: of the run.
      checkpointer: of its folder.
      origin: of a new run; if None it is looked for where no checkpoint is found.
      allowed: as for `find_origin`.
      strict: as for `Checkpointer.restore_latest`.
    """
    program = training.program
    found = checkpointer.restore_latest(program.target, strict=strict)
    if found is not None:
        step, saved, meta = found
        suits.require_same_classes(meta.get('class_names', ()), training.data.info)
        return Beginning(
            program.layout.from_global(saved),
            step,
            meta.get('hardware', program.hardware),
            meta.get('unevaluated', False),
            dict(meta.get('broken', ())),
            training.judge.begin(meta),
        )
    origin = origin or find_origin(training, allowed)
    bests = training.judge.begin({})
    if origin.state is not None:
        return Beginning(origin.state, origin.step, origin.hardware, bests=bests)
    state = program.layout.create(program.init, origin.params)
    return Beginning(state, 0, program.hardware, bests=bests)


def check_stop(stop_at: int | None, start: int) -> None:
    """Raise UserError if the run is past the step after which it is to stop."""
    if stop_at is not None and stop_at <= start:
        raise UserError(
            f'--stop-at {stop_at}: the run is after step {start} already; give a later step, or '
            'leave it out to train to the end'
        )


def write_history(folder: pathlib.Path, origin: Origin) -> None:
    """Puts the metrics of the run that is continued before those to come; on process 0."""
    if origin.state is not None and jax.process_index() == 0:
        text = ''.join(json.dumps(line) + '\n' for line in origin.history)
        paths.write_text_atomic(folder / run_folder.METRICS, text)
