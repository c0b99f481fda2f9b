"""Files of a run: its config, its result, and checkpoints with all that a resumed run needs."""

from __future__ import annotations

import dataclasses
import json
import pathlib

import jax

from vit_jax import step as step_lib
from vit_jax.checkpoints.best import BESTS
from vit_jax.checkpoints.checkpointer import Checkpointer
from vit_jax.config import load as config_lib
from vit_jax.runtime import versions
from vit_jax.storage import paths, run_folder
from vit_jax.trainer.build import Training
from vit_jax.trainer.judge import Bests


def save(
    training: Training,
    checkpointer: Checkpointer,
    step: int,
    state: step_lib.TrainState,
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
        'versions': versions.everything(),
        'unevaluated': unevaluated,
        BESTS: {key: dataclasses.asdict(best) for key, best in bests.items()},
        'broken': list(training.data.source.broken.items()),
        **training.data.facts(),
    }
    checkpointer.save(step, program.layout.to_global(state), meta)


def write_config(training: Training, folder: pathlib.Path) -> None:
    """Puts the config, and what the data need beside it, into the run folder; on process 0."""
    if jax.process_index() == 0:
        paths.write_text_atomic(folder / run_folder.CONFIG, config_lib.to_json(training.config))
        training.data.save(folder)


def write_result(folder: pathlib.Path, result: dict[str, float], why: str) -> None:
    """Marks a run as complete, with the reason if it ended early; on process 0."""
    if jax.process_index() == 0:
        content = {**result, **({run_folder.ENDED: why} if why else {})}
        with paths.writing(folder):
            run_folder.sync(folder)
            paths.write_text_atomic(folder / run_folder.RESULT, json.dumps(content) + '\n')
