"""The record of a trained model, from a run or from another code base's files."""

from __future__ import annotations

import copy
import dataclasses
import functools
import pathlib
import re
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from flax import traverse_util
from ml_collections import ConfigDict

from vit_jax.config import objects
from vit_jax.config.load import to_inference
from vit_jax.config.run import Data, Inference, Model, Task
from vit_jax.config.schema import make
from vit_jax.data import splits, vocabulary
from vit_jax.data.batches import Spec
from vit_jax.data.records import SourceInfo
from vit_jax.errors import UserError
from vit_jax.nn import options
from vit_jax.storage import paths
from vit_jax.tree_paths import param_paths

Size = tuple[int, int]  # height and width in pixels

# Key in the `extra` of a family: height and width of the images to come, if the user gives them.
GIVEN_SIZE = 'image size given by the user'
BATCH_SIZE = 64  # of evaluations, if there is no config


@dataclasses.dataclass(frozen=True)
class TrainedModel:
    """A model with its weights, and known facts about its training data.

    Attributes:
      params: nested float32 numpy arrays; averaged if the run kept an average.
      config: the run's config; for other files, the groups `model` and `task`, and transforms if
        they are known.
      image_size: height and width in pixels that the parameters were made for; None if unknown, or
        if they fit images of any size.
      source: its origin, for people.
      class_names: one for each output of the head; empty if unknown.
      prepared_size: height and width of all images after the transforms of another code base's
        files, which may differ from `image_size`, as in DINOv2; None if unknown.
      positions: interpolation with which its code base resizes position embeddings, see
        `ops.resize.grid`.
      class_ids: ids of the classes in the files of the training data; empty if these have none, or
        if the run did not keep them.
      notes: assumptions made in reading it, a line each.
      collections: other Flax collections by name, such as `batch_stats`.
      path: the run folder, or the file.
      origin: the file of another code base as it was named, of which `interop.write` writes again
        what it does not hold otherwise; empty for runs and new models.
      step: the run's step; None for other files.
      num_classes: number of classes in the training data; None if unknown.
      raw_images: `channels` and `size` of the images before the transforms, see
        `data.dataset.raw_images`; empty without images.
      spec: spec of one training example; empty if unknown.
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
    prepared_size: Size | None = None
    origin: str = ''

    @classmethod
    def from_file(
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
        """Keywords of the model with its name; a ViT's options under their flat names.

        See `nn.options.flat_fields`.
        """
        return options.flat_fields(self.config.model.to_dict())

    @property
    def task_config(self) -> dict[str, Any]:
        """The keywords of `config.task`, with its name."""
        return self.config.task.to_dict()

    @functools.cached_property
    def settings(self) -> Inference:
        """The typed form of its config."""
        return to_inference(self.config)

    @property
    def data(self) -> Data:
        """The data section of the first evaluation; that of training if there is none."""
        if not self.config.evals:
            return make(Data, self.config.data, 'config.data')
        return next(iter(self.settings.evals.values()))

    @property
    def transforms(self) -> str:
        """The transforms of `data`, from an image to the model's input."""
        return self.data.transforms

    @property
    def takes_images(self) -> bool:
        """Whether its examples have images; true if its examples are unknown."""
        return not self.spec or 'image' in self.spec

    @functools.cached_property
    def vocab(self) -> vocabulary.Tokenizer | None:
        """The vocabulary that turns text into ids; None if there is none.

        Raises:
          UserError: if it cannot be read.
        """
        path = self.data.vocab or self.settings.data.vocab
        return vocabulary.load(path) if path else None

    @functools.cached_property
    def model(self) -> Any:
        """The Linen module of `config.model`."""
        return objects.make_model(make(Model, self.config.model, 'config.model'))

    @functools.cached_property
    def task(self) -> Any:
        """The task of `config.task`."""
        return objects.make_task(make(Task, self.config.task, 'config.task'))

    @property
    def classes(self) -> SourceInfo | None:
        """The classes of the training data; None if unknown."""
        if self.num_classes is None:
            return None
        return SourceInfo(self.num_classes, self.class_names, class_ids=self.class_ids)

    @property
    def channels(self) -> int:
        """Channels of the images, by the data or else by the first layer's kernel [P P C D].

        3 if there is no such kernel, or the model does not name its first layer.
        """
        if 'channels' in self.raw_images:
            return self.raw_images['channels']
        first = [self.model.first_layer] if self.model.first_layer else self.model.layer_order()[:1]
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
                name: {'name': self.config[name].name, **options.nested_fields(instance)}
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
      others: contents of further files, by their names.
      weights: name of the weights in a folder, if it is not `hub.WEIGHTS`.
    """

    arrays: dict[str, np.ndarray]
    config: dict[str, Any] | None = None
    notes: tuple[str, ...] = ()
    preprocessor: dict[str, Any] | None = None
    others: Mapping[str, bytes] = MappingProxyType({})
    weights: str = ''


def fields(instance: Any) -> dict[str, Any]:
    """Collect the keywords of a Linen module or a task, as `TrainedModel.model_config` does."""
    return options.flat_fields(options.nested_fields(instance))


def pixel_scale(task: Any) -> tuple[np.ndarray, np.ndarray] | None:
    """Mean and standard deviation [C or 1] by which a task normalizes pixels in [0, 1]; None for a
    task that does not.
    """
    if task.normalization is not None:
        mean, std = task.normalization
        return np.asarray(mean, np.float64), np.asarray(std, np.float64)
    if not (span := fields(task).get('value_range')):
        return None
    low, high = span
    return np.array([-low / (high - low)]), np.array([1 / (high - low)])


def read_class_names(config: Mapping[str, Any], num_classes: int | None) -> tuple[str, ...]:
    """The names of all outputs; empty without classes, or if they are only LABEL_0, LABEL_1, ...

    Raises:
      UserError: if a name has a number beyond those of the outputs.
    """
    listed = dict(enumerate(config.get('label_names') or ()))  # of timm
    names = {int(i): str(name) for i, name in (config.get('id2label') or listed).items()}
    if not names or not num_classes:
        return ()
    if not 0 <= min(names) <= max(names) < num_classes:
        raise UserError(
            f'id2label in config.json names class {max(names, key=abs)}, but the head has '
            f'{num_classes} outputs; get config.json of this model'
        )
    ordered = tuple(names.get(i, f'LABEL_{i}') for i in range(num_classes))
    return ordered if any(name != f'LABEL_{i}' for i, name in enumerate(ordered)) else ()


def class_names_config(
    class_names: Sequence[str], num_classes: int | None
) -> dict[str, dict[str, Any]]:
    """`id2label` and `label2id` for `num_classes` outputs; unnamed ones get placeholders."""
    count = num_classes or 0
    names = (*class_names[:count], *_placeholders(count)[len(class_names) :])
    return {
        'id2label': {str(i): name for i, name in enumerate(names)},
        'label2id': {name: i for i, name in enumerate(names)},
    }


def _placeholders(count: int) -> tuple[str, ...]:
    return tuple(f'LABEL_{i}' for i in range(count))


@dataclasses.dataclass(frozen=True)
class ClassOrder:
    """What happens to a head that has the right number of outputs.

    Attributes:
      chosen: numbers of the checkpoint's classes, in the order of the run's; None for a new head.
      why: the reason, for people.
    """

    chosen: np.ndarray | None
    why: str


def class_order(trained: TrainedModel, classes: SourceInfo) -> ClassOrder | None:
    """The order of a checkpoint's classes for data, by their names.

    Args:
      trained: the checkpoint.
      classes: those of the data. If the checkpoint has further classes, these come last.

    Returns:
      None to keep the order: it is the same, or one side does not name its classes.
    """
    known = trained.classes
    if known is None or not classes.num_classes:
        return None
    chosen = splits.class_numbers(classes, known, 'config.data')
    if chosen is None and not splits.have_comparable_names(classes, known):
        return None
    if chosen is None or splits.ABSENT in chosen:
        return ClassOrder(
            None,
            f'the checkpoint has other classes{splits.in_brackets(known, classes)} than the '
            f'data{splits.in_brackets(classes, known)}',
        )
    if np.array_equal(chosen, np.arange(len(chosen))):
        return None
    names = splits.first_names(known.class_names)
    return ClassOrder(chosen, f'its classes ({names}) are put into the order of the data, by name')


def reorder_head(
    flat: Mapping[str, np.ndarray], head: str, chosen: np.ndarray
) -> dict[str, np.ndarray]:
    """The arrays of a head, with the chosen outputs before the others."""
    arrays = {name: np.asarray(x) for name, x in flat.items() if name.startswith(f'{head}/')}
    count = next(iter(arrays.values())).shape[-1]
    order = np.append(chosen, np.setdiff1d(np.arange(count), chosen))
    return {name: array[..., order] for name, array in arrays.items()}


def read_classes(path: str) -> np.ndarray:
    """The numbers of a file of classes, int64 [classes of the run].

    Raises:
      UserError: if there is no such file, or a line is not a number.
    """
    where = f'config.init.classes={path}'
    try:
        lines = paths.read_lines(paths.absolute(path))
    except (OSError, UnicodeDecodeError) as e:
        raise UserError(f'{where}: cannot be read ({e})') from None
    for number, line in enumerate(lines, 1):
        if not line.strip().isdecimal():
            raise UserError(f'{where}, line {number}: {line!r} is not the number of a class')
    return np.array([int(line) for line in lines], np.int64)


def take_classes(imported: TrainedModel, model: Any, chosen: np.ndarray) -> TrainedModel:
    """A checkpoint whose head has only the chosen classes, with a note about it.

    Args:
      imported: the checkpoint.
      model: the new Linen module; the last of its `head_layers` has an output for each class.
      chosen: numbers of the checkpoint's classes, in the order of the model's.

    Raises:
      UserError: if the checkpoint has no such head or no such class, or the run has another number
        of classes.
    """
    head, wanted = model.head_layers[-1], model.num_classes
    flat = traverse_util.flatten_dict(dict(imported.params), sep='/')
    of_classes = {name: np.asarray(x) for name, x in flat.items() if name.startswith(f'{head}/')}
    if not of_classes:
        raise UserError(f'config.init.classes: the checkpoint has no {head} to take classes from')
    if len(chosen) != wanted:
        raise UserError(
            f'config.init.classes: {len(chosen)} lines, but the run has {wanted} classes'
        )
    outputs = next(iter(of_classes.values())).shape[-1]
    count = imported.model_config.get('num_classes') or outputs
    if chosen.max() >= count:
        raise UserError(
            f'config.init.classes: there is no class {chosen.max()} in a head of {count} '
            'classes, which are counted from 0'
        )
    taken = np.append(chosen, np.arange(count, outputs))  # a detector's last output is not a class
    flat |= {name: array[..., taken] for name, array in of_classes.items()}
    params: dict[str, Any] = traverse_util.unflatten_dict(flat, sep='/')
    note = f'{head}: {wanted} of its {count} classes are taken'
    return dataclasses.replace(imported, params=params).with_notes(note)
