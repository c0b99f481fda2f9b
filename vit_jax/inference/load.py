"""Trained models as commands read them: config, model, task, restored variables."""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Sequence
from typing import Any

from ml_collections import ConfigDict

from vit_jax.checkpoints import checkpointer
from vit_jax.checkpoints.best import Step
from vit_jax.config import objects
from vit_jax.config.allowed import require_allowed
from vit_jax.config.load import from_dict, require_run
from vit_jax.data.records import SourceInfo
from vit_jax.errors import UserError
from vit_jax.interop import load as interop
from vit_jax.interop.imported import ImportedModel
from vit_jax.storage import paths, run_folder

RESNET_SIZE = (224, 224)


@dataclasses.dataclass(frozen=True)
class Run:
    """A trained model.

    Attributes:
      workdir: the run folder, or the checkpoint of another code base.
      config: its resolved config.
      model, task: built from the config.
      variables: `params` (averaged where the run kept an average) and other
        collections, as numpy arrays.
      step: the checkpoint's step; None where that is not known.
      class_names: names of the classes, empty where the data had none.
      image: channels and size of the raw images, see `data.dataset.raw_images`.
      input_size: height and width of the images that the model gets; None where that is not known.
    """

    workdir: pathlib.Path
    config: ConfigDict
    model: Any
    task: Any
    variables: dict[str, Any]
    step: int | None
    class_names: tuple[str, ...]
    image: dict[str, Any]
    input_size: interop.Size | None = None

    @property
    def trained_on(self) -> SourceInfo | None:
        """The classes of its training data; None for a checkpoint of another code base."""
        if self.step is None:
            return None
        outputs = self.config.model.get('num_classes') or 0
        return SourceInfo(len(self.class_names) or outputs, self.class_names)


def read_config(workdir: str | pathlib.Path, allowed: Sequence[str] = ()) -> ConfigDict:
    """The config stored in a run folder, to make objects of what it names.

    Args:
      workdir: the run folder.
      allowed: modules of the user's own that the config may name.

    Raises:
      UserError: if the folder holds no run, or its config names code that is not allowed.
    """
    config = stored_config(workdir)
    require_allowed(config, allowed, str(paths.path(workdir) / run_folder.CONFIG))
    return config


def stored_config(workdir: str | pathlib.Path) -> ConfigDict:
    """The config stored in a run folder, to look at: what it names may be anybody's code.

    Its vocabulary is the one that the folder keeps.

    Raises:
      UserError: if the folder holds no run, or another program's config.
    """
    folder = paths.path(workdir)
    if (stored := run_folder.read_config(folder)) is None:
        raise UserError(
            f'--workdir {str(workdir)!r} holds no run: there is no {run_folder.CONFIG} in it'
        )
    require_run(stored, str(folder / run_folder.CONFIG))
    config = from_dict(stored)
    kept = folder / run_folder.VOCAB
    for section in (config.data, *config.evals.values()):
        if 'vocab' in section and kept.is_file():
            section.vocab = str(kept)
    return config


def load_run(
    workdir: str | pathlib.Path,
    step: Step = None,
    image_size: interop.Size | None = None,
    average: int = 1,
    allowed: Sequence[str] = (),
) -> Run:
    """The run in `workdir` at `step`, or at its newest valid checkpoint.

    Args:
      workdir: the run folder.
      step: of a kept checkpoint, or 'best'.
      image_size: height and width of the images to come, for which a learned position embedding is
        resized.
      average: how many checkpoints to take the mean of, that of `step` and those before.
      allowed: modules of the user's own that the config may name.

    Raises:
      UserError: if there is no run, no such checkpoint or not as many, its config names code that
        is not allowed, or images of this size do not fit it.
    """
    workdir = paths.absolute(workdir)
    config = read_config(workdir, allowed)
    model, task = objects.model_and_task(config)
    found, variables, meta = checkpointer.load_mean(workdir / run_folder.CHECKPOINTS, step, average)
    trained_on = tuple(meta.get('input_size') or ()) or None
    if image_size is not None:
        variables['params'] = interop.resize(variables['params'], model, trained_on, image_size)
    names = tuple(meta.get('class_names', ()))
    image, size = meta.get('image', {}), image_size or trained_on
    return Run(workdir, config, model, task, variables, found, names, image, size)


def own_run(path: str | pathlib.Path) -> tuple[pathlib.Path, Step] | None:
    """The run folder and the step that the path of a checkpoint names; None if it is no run's.

    Raises:
      UserError: if object storage cannot be reached.
    """
    if (found := interop.locate(path)) is None:
        return None
    folder, step = found
    return (folder.parent, step) if (folder.parent / run_folder.CONFIG).is_file() else None


def eval_section(config: ConfigDict) -> ConfigDict:
    """The data section of the first evaluation; that of training if there is none."""
    return next(iter(config.evals.values()), config.data)


def native_size(imported: ImportedModel, model: Any) -> interop.Size | None:
    """Height and width of the images that a checkpoint was made for; None if nothing tells.

    A ResNet takes images of any size. The tokens of a ViT without a position embedding do not
    tell their number, and at a wrong one memory may run out.
    """
    return imported.image_size or (None if hasattr(model, 'stride') else RESNET_SIZE)


def crop(size: interop.Size) -> str:
    """The transforms that make images of any size ones of this height and width."""
    height, width = size
    return f'resize_small({max(size)})|central_crop(({height}, {width}))'


def load_foreign(
    path: str | pathlib.Path,
    image_size: interop.Size | None = None,
    imported: ImportedModel | None = None,
    allowed: Sequence[str] = (),
) -> Run:
    """The model that a checkpoint holds, as if it were a run without data.

    Where the checkpoint does not say how its inputs are made, images are resized and cropped to
    the size that it was made for. The names of its classes are those that it tells.

    Args:
      path: as for `interop.load.load`.
      image_size: height and width to use it with instead.
      imported: what is in it, if it was read before.
      allowed: as for `interop.load.load`.

    Raises:
      UserError: as `interop.load.load`, or if nothing tells the size of the images.
    """
    imported = imported or interop.read(path, image_size=image_size, allowed=allowed)
    model, variables = interop.instantiate(imported, image_size)
    size = image_size or native_size(imported, model)
    if size is None:
        raise UserError(f'{path} does not tell the size of its images: give --image-size')
    transforms = imported.transforms if imported.transforms and not image_size else crop(size)
    config = ConfigDict(
        {
            'batch_size': 64,
            'model': imported.model,
            'task': imported.task,
            'data': {'source': '', 'split': '', 'transforms': transforms},
            'evals': {},
        }
    )
    image = {'channels': interop.channels(model, variables['params']), 'size': None}
    _, task = objects.model_and_task(config)
    names = imported.class_names
    return Run(pathlib.Path(path), config, model, task, variables, None, names, image, size)
