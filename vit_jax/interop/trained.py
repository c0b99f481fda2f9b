"""The record of a trained model, from a run or from another code base's files."""

from __future__ import annotations

import copy
import dataclasses
import functools
import pathlib
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from ml_collections import ConfigDict

from vit_jax.config import objects
from vit_jax.data import tokenizer_files, vocabulary
from vit_jax.data.batches import Spec
from vit_jax.data.records import SourceInfo
from vit_jax.tree_paths import param_paths

Size = tuple[int, int]  # height and width in pixels

# Key in the `extra` of a family: height and width of the images to come, if the user gives them.
GIVEN_SIZE = 'image size given by the user'
BATCH_SIZE = 64  # of evaluations without a config


@dataclasses.dataclass(frozen=True)
class TrainedModel:
    """A model with its weights, and known facts about its training data.

    Attributes:
      params: nested float32 numpy arrays; averaged if the run kept an average.
      config: the run's config; for other files the groups `model` and `task` and the transforms,
        if they are known.
      image_size: height and width in pixels that the parameters were made for; None if unknown, or
        if they fit images of any size.
      source: its origin, a phrase for people.
      class_names: one for each output of the head; empty if unknown.
      positions: interpolation by which its code base resizes position embeddings, see
        `ops.resize.grid`.
      class_ids: those of the training data's own files; empty if these have none, and for runs
        that did not keep them.
      notes: assumptions of the reader, a line each.
      collections: other Flax collections by name, such as `batch_stats`.
      path: the run folder, or the file.
      step: the run's step; None for other files.
      num_classes: of the training data; None if unknown.
      raw_images: `channels` and `size` of the images before the transforms, see
        `data.dataset.raw_images`; empty without images.
      spec: of one training example; empty if unknown.
    """

    params: dict[str, Any]
    config: ConfigDict
    image_size: Size | None
    source: str
    class_names: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    collections: dict[str, Any] = dataclasses.field(default_factory=dict)
    path: pathlib.Path = pathlib.Path()
    step: int | None = None
    num_classes: int | None = None
    raw_images: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    spec: Spec = dataclasses.field(default_factory=dict)
    class_ids: tuple[int, ...] = ()
    positions: str = 'bilinear'

    @classmethod
    def of_file(
        cls,
        params: dict[str, Any],
        model: Mapping[str, Any],
        image_size: Size | None,
        source: str,
        *,
        task: Mapping[str, Any] | None = None,
        transforms: str = '',
        notes: tuple[str, ...] = (),
    ) -> TrainedModel:
        """Make the record of a file of another code base.

        Args:
          params: blocks unrolled, under this package's names.
          model: keywords of `config.model`, with its name.
          image_size, source, notes: see `TrainedModel`.
          task: keywords of `config.task`, with its name; by default classification.
          transforms: from an image file to the model's input; by default a crop of `image_size`.
        """
        groups = {
            'batch_size': BATCH_SIZE,
            'model': dict(model),
            'task': dict(task or {'name': 'classify'}),
            'data': {'source': '', 'split': '', 'transforms': transforms},
            'evals': {},
        }
        return cls(params, ConfigDict(groups), image_size, source, notes=notes)

    @property
    def variables(self) -> dict[str, Any]:
        """Parameters and other collections, for `model.apply`."""
        return {'params': self.params, **self.collections}

    @property
    def model_config(self) -> dict[str, Any]:
        """The keywords of `config.model`, with its name."""
        return self.config.model.to_dict()

    @property
    def task_config(self) -> dict[str, Any]:
        """The keywords of `config.task`, with its name."""
        return self.config.task.to_dict()

    @property
    def data_config(self) -> ConfigDict:
        """The data section of the first evaluation; that of training if there is none."""
        return next(iter(self.config.evals.values()), self.config.data)

    @property
    def transforms(self) -> str:
        """From an image to the model's input, as in `data_config`."""
        return self.data_config.get('transforms', '')

    @property
    def takes_images(self) -> bool:
        """Whether its examples have images, as far as it is known."""
        return not self.spec or 'image' in self.spec

    @functools.cached_property
    def vocab(self) -> vocabulary.Tokenizer | None:
        """The vocabulary that makes ids of text; None where there is none.

        Raises:
          UserError: if it cannot be read.
        """
        path = self.data_config.get('vocab') or self.config.data.get('vocab')
        return tokenizer_files.load(path) if path else None

    @functools.cached_property
    def model(self) -> Any:
        """The Linen module of `config.model`."""
        return objects.make_model(self.config)

    @functools.cached_property
    def task(self) -> Any:
        """The task of `config.task`."""
        return objects.make_task(self.config)

    @property
    def classes(self) -> SourceInfo | None:
        """The classes of the training data; None if unknown."""
        if self.num_classes is None:
            return None
        return SourceInfo(self.num_classes, self.class_names, class_ids=self.class_ids)

    @property
    def channels(self) -> int:
        """Channels of the images: of the data, else of the first layer's kernel [P P C D].

        3 if there is no such kernel, or the model does not name its first layer.
        """
        if 'channels' in self.raw_images:
            return self.raw_images['channels']
        first = self.model.layer_order()[:1]
        kernels = (
            leaf
            for path, leaf in param_paths(self.params).items()
            if leaf.ndim == 4 and any(re.search(pattern, path) for pattern in first)
        )
        return next((kernel.shape[2] for kernel in kernels), 3)

    def value_range(self) -> np.ndarray | None:
        """The model's input for a black and a white pixel, float32 [2, channels].

        In between, byte b of a channel becomes low + (high - low) * b / 255. None if the input is
        not the image itself, but tokens or the gray image of a colorizer.
        """
        if not self.takes_images:
            return None
        size = (*(self.image_size or (32, 32)), self.channels)
        images = jnp.stack([jnp.full(size, byte, jnp.uint8) for byte in (0, 255)])
        first = np.asarray(self.task.inputs({'image': images})[0])
        return first[:, 0, 0] if first.shape == images.shape else None

    def with_notes(self, *notes: str) -> TrainedModel:
        """A copy with more notes."""
        return dataclasses.replace(self, notes=(*self.notes, *notes))

    def adapted(self, *, model: Any = None, task: Any = None) -> TrainedModel:
        """A copy with another module of its model's class, or another task of its task's class."""
        changed = {'model': model, 'task': task}
        return self.with_groups(
            **{
                name: {'name': self.config[name].name, **fields(instance)}
                for name, instance in changed.items()
                if instance is not None
            }
        )

    def with_groups(self, **groups: Mapping[str, Any]) -> TrainedModel:
        """A copy with other groups in its config, such as `model={'name': 'vit', ...}`."""
        config = copy.deepcopy(self.config)
        with config.unlocked():
            for name, group in groups.items():
                config[name] = ConfigDict(dict(group))
        return dataclasses.replace(self, config=config)


class Written(NamedTuple):
    """The contents of another code base's files.

    Attributes:
      arrays: by that code base's names.
      config: of config.json; None if the form has none.
      notes: a line for each property of the model that the files cannot represent.
      preprocessor: of preprocessor_config.json; None if the form has none.
    """

    arrays: dict[str, np.ndarray]
    config: dict[str, Any] | None = None
    notes: tuple[str, ...] = ()
    preprocessor: dict[str, Any] | None = None


def fields(instance: Any) -> dict[str, Any]:
    """The keywords of a Linen module or a task."""
    names = (field.name for field in dataclasses.fields(instance))
    return {name: getattr(instance, name) for name in names if name not in ('parent', 'name')}
