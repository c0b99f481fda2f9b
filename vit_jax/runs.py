"""Run folders as later commands read them: config, model, task, restored variables."""

from __future__ import annotations

import dataclasses
import pathlib
from typing import Any

from ml_collections import ConfigDict

from vit_jax import checkpoint
from vit_jax import config as config_lib
from vit_jax.errors import UserError


@dataclasses.dataclass(frozen=True)
class Run:
    """A trained model.

    Attributes:
      workdir: the run folder.
      config: its resolved config.
      model, task: built from the config.
      variables: `params` (averaged where the run kept an average) and other
        collections, as numpy arrays.
      step: the checkpoint's step.
      class_names: names of the classes, empty where the data had none.
      image: channels and size of the raw images, see `evaluate.image_format`.
    """

    workdir: pathlib.Path
    config: ConfigDict
    model: Any
    task: Any
    variables: dict[str, Any]
    step: int
    class_names: tuple[str, ...]
    image: dict[str, Any]


def read_config(workdir: str | pathlib.Path) -> ConfigDict:
    """The config stored in a run folder.

    Raises:
      UserError: if the folder holds no run.
    """
    path = pathlib.Path(workdir) / 'config.json'
    if not path.is_file():
        raise UserError(f'--workdir {str(workdir)!r} holds no run: there is no {path.name} in it')
    return config_lib.from_json(path.read_text())


def load_run(workdir: str | pathlib.Path, step: int | None = None) -> Run:
    """The run in `workdir` at `step`, or at its newest valid checkpoint.

    Raises:
      UserError: if there is no run or no such checkpoint.
    """
    workdir = pathlib.Path(workdir).expanduser().resolve()
    config = read_config(workdir)
    model, task = config_lib.build(config)
    found, variables, meta = checkpoint.load_variables(workdir / 'checkpoints', step)
    names = tuple(meta.get('class_names', ()))
    return Run(workdir, config, model, task, variables, found, names, meta.get('image', {}))
