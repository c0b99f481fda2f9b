"""The claim of a run to its folder: files that others delete or replace are noticed at a save."""

from __future__ import annotations

import pathlib
from collections.abc import Callable

from vit_jax.config import load as config_lib
from vit_jax.errors import UserError
from vit_jax.runtime import processes
from vit_jax.storage import lock, paths, run_folder
from vit_jax.trainer.build import Training
from vit_jax.trainer.save import write_config


def require(
    training: Training, folder: pathlib.Path, held: lock.Check, say: Callable[[str], None]
) -> None:
    """Check before a save that the folder is there and this run's; every process calls it.

    A config that was deleted or replaced is written again.

    Args:
      training: of the run.
      folder: of the run, with its config.
      held: the check of the folder's lock.
      say: prints a line for the user.

    Raises:
      UserError: if the folder is gone, which a save would make anew, or was taken over.
    """

    def check() -> None:
        if not paths.is_remote(folder) and not folder.is_dir():
            raise UserError(
                f'{folder} was deleted during the run, which cannot save itself any more'
            )
        with paths.writing(folder):
            held()
            stored = paths.read_text(folder / run_folder.CONFIG, errors='replace')
            if stored != config_lib.to_json(training.config):
                say(f'{run_folder.CONFIG} was replaced during the run: written again')
                write_config(training, folder)

    processes.on_process_0(check)
