"""Variables that a run reads and never trains, such as a teacher's or the base of adapters.

A task names their checkpoints (`Task.frozen`), which are read as by `vit_jax.load`. Their
variables are part of a run's state but are not saved: a checkpoint stores only their digest, and a
run resumes only with the same variables.
"""

from __future__ import annotations

import dataclasses
import io
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from vit_jax.errors import UserError
from vit_jax.inference.adapted import BASE, base_digest, overlay, require_same
from vit_jax.interop import files
from vit_jax.storage import paths, run_folder
from vit_jax.tasks.base import FrozenModel, Task
from vit_jax.tree_paths import weights_digest

PyTree = Any


@dataclasses.dataclass(frozen=True)
class Frozen:
    """Frozen models of a task, and parameters of the run that are never trained.

    Attributes:
      task: Task that calls them.
      variables: Numpy arrays of each model by its name.
      digests: Digests of the variables.
      class_names: Classes of each model's outputs; empty if unknown.
      base: The parameters that the adapters of `config.lora` leave unchanged; empty without.
    """

    task: Task
    variables: dict[str, PyTree] = dataclasses.field(default_factory=dict)
    digests: Mapping[str, str] = dataclasses.field(default_factory=dict)
    class_names: Mapping[str, tuple[str, ...]] = dataclasses.field(default_factory=dict)
    base: PyTree = dataclasses.field(default_factory=dict)

    @property
    def zeros(self) -> PyTree:
        """Variables of the same shapes, to be traced."""
        return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), self.variables)

    def join(self, state: Any, layout: Any) -> Any:
        """Return a run's state with these variables, placed on the devices of a layout."""
        arrays = layout.create(lambda x: x, {'frozen': self.variables, 'params': self.base})
        params = overlay(arrays['params'], state.params) if self.base else state.params
        return dataclasses.replace(state, params=params, frozen=arrays['frozen'] or None)

    def with_base(self, base: PyTree) -> Frozen:
        """Add the parameters that the run's adapters leave unchanged."""
        return dataclasses.replace(
            self, base=base, digests={**self.digests, BASE: base_digest(base)}
        )

    def require_same(self, saved: Mapping[str, str] | None) -> None:
        """Raise UserError if the models differ from a saved run's, by their digests."""
        if saved is None:
            return
        for name, digest in self.digests.items():
            key = f'config.task.{name}={self.task.frozen[name]}' if name != BASE else ''
            require_same(key or 'config.init.from', digest, saved.get(name))

    def save(self, folder: pathlib.Path) -> None:
        """Save the arrays of files, such as statistics of teachers, in a run folder."""
        for name in self.task.frozen_files:
            if name in self.variables:
                content = io.BytesIO()
                np.savez(content, **self.variables[name]['params'])
                paths.write_atomic(folder / run_folder.kept_file(name), content.getvalue())

    def require_classes(self, data_classes: Sequence[str]) -> None:
        """Raise UserError if the class names of a classifier and the data differ."""
        for name, classes in self.class_names.items():
            mismatches = [
                pair for pair in zip(classes, data_classes, strict=False) if pair[0] != pair[1]
            ]
            if classes and data_classes and mismatches:
                model_class, data_class = mismatches[0]
                raise UserError(
                    f'config.task.{name}={self.task.frozen[name]}: class '
                    f'{classes.index(model_class)} is {model_class!r} but {data_class!r} in data'
                )


def attach(task: Task, allowed: Sequence[str] = ()) -> Frozen:
    """Read the models that a task names, and give them to it.

    Args:
      task: Task of the config.
      allowed: Modules of the user that the configs of their runs may name.

    Raises:
      UserError: as `vit_jax.load`, or if a model takes no images.
    """
    if not (named := task.frozen):
        return Frozen(task)
    from vit_jax.inference import load  # imported here, since few tasks need it

    models, variables, names = {}, {}, {}
    for name, path in named.items():
        if not path:
            raise UserError(f'config.task.{name}: name a checkpoint, as --config.task.{name}=RUN')
        try:
            if (make_model := task.frozen_files.get(name)) is not None:
                arrays, _ = files.read_arrays(path)
                models[name], variables[name] = make_model(arrays), {'params': arrays}
                continue
            stored = load.backbone(load.read(path, allowed=allowed))
            size_of_task = task.frozen_sizes.get(name)
            trained = load.adapt_model(stored, size_of_task)
            span = getattr(trained.task, 'value_range', None)
            if not trained.takes_images or (span is None and trained.task.normalization is None):
                raise UserError(
                    f'a {trained.settings.model.name} of this task does not take plain images'
                )
        except UserError as error:
            raise UserError(f'config.task.{name}={path}: {error}') from error
        size = size_of_task or trained.prepared_size or trained.image_size
        models[name] = FrozenModel(trained.model, size, span, trained.task.normalization)
        variables[name] = jax.tree.map(np.asarray, dict(trained.variables))
        names[name] = trained.class_names
    digests = {name: weights_digest(arrays)[:32] for name, arrays in variables.items()}
    return Frozen(task.with_frozen(models), variables, digests, names)
