"""Trained models, from a run or from files of another code base."""

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
from vit_jax.config.schema import make_section
from vit_jax.data import numbering, vocabulary
from vit_jax.data.batches import Spec
from vit_jax.data.records import SourceInfo
from vit_jax.errors import UserError
from vit_jax.nn import options
from vit_jax.storage import paths
from vit_jax.tree_paths import param_paths

Size = tuple[int, int]  # height and width in pixels

# Key in the `extra` of a family: height and width of the images if the user sets them.
GIVEN_SIZE = 'image size given by the user'
BATCH_SIZE = 64  # of evaluations without a config


@dataclasses.dataclass(frozen=True)
class TrainedModel:
    """A model with its weights, and what is known about its training data.

    Attributes:
      params: Nested float32 numpy arrays; averaged if the run kept an average.
      config: Config of the run; for other files, the groups `model` and `task`, and transforms if
        known.
      image_size: Height and width in pixels that the parameters were made for; None if unknown, or
        if they fit images of any size.
      source: Origin of the model, for the user.
      class_names: One name per output of the head; empty if unknown.
      notes: Assumptions made in reading it, one line each.
      collections: Other Flax collections by name, such as `batch_stats`.
      path: Run folder or file.
      step: Step of the run; None for other files.
      num_classes: Number of classes in the training data; None if unknown.
      raw_images: `channels` and `size` of the images before the transforms, see
        `data.dataset.raw_images`; empty without images.
      spec: Spec of one training example; empty if unknown.
      class_ids: Class ids in the files of the training data; empty if there are none, or if the run
        did not keep them.
      positions: Interpolation that its code base resizes position embeddings with, see
        `ops.resize.grid`.
      prepared_size: Height and width of all images after the transforms of the files, which may
        differ from `image_size`, as in DINOv2; None if unknown.
      origin: Original path of the file of another code base, from which `interop.write` copies what
        the model does not hold; empty for runs and new models.
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
        """Create the model from a file of another code base.

        Args:
          params: Parameters with this package's names, blocks unrolled.
          model: Keywords of `config.model`, including its name.
          image_size, source, notes: See `TrainedModel`.
          task: Keywords of `config.task`, including its name; classification by default.
          transforms: Transforms from an image file to the model's input; by default a crop to
            `image_size`.
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
        """Keywords of `config.task`, including its name."""
        return self.config.task.to_dict()

    @functools.cached_property
    def settings(self) -> Inference:
        """Typed form of the config."""
        return to_inference(self.config)

    @property
    def data(self) -> Data:
        """Data section of the task's first evaluation, else of the first one, or of training."""
        if not (evals := self.config.evals):
            return make_section(Data, self.config.data, 'config.data')
        by_task = (name for name, section in evals.items() if not section.get('evaluator'))
        return self.settings.evals[next(by_task, next(iter(evals)))]

    @property
    def transforms(self) -> str:
        """Transforms of `data`, from an image file to the model's input."""
        return self.data.transforms

    @property
    def takes_images(self) -> bool:
        """Whether the examples have images; true if the examples are unknown."""
        return not self.spec or 'image' in self.spec

    @functools.cached_property
    def vocab(self) -> vocabulary.Tokenizer | None:
        """Vocabulary that encodes texts; None if there is none.

        Raises:
          UserError: if the vocabulary cannot be read.
        """
        path = self.data.vocab or self.settings.data.vocab
        return vocabulary.load_vocabulary(path) if path else None

    @functools.cached_property
    def model(self) -> Any:
        """Linen module of `config.model`."""
        return objects.make_model(make_section(Model, self.config.model, 'config.model'))

    @functools.cached_property
    def task(self) -> Any:
        """Task of `config.task`."""
        return objects.make_task(make_section(Task, self.config.task, 'config.task'))

    @property
    def classes(self) -> SourceInfo | None:
        """Classes of the training data; None if unknown."""
        if self.num_classes is None:
            return None
        return SourceInfo(self.num_classes, self.class_names, class_ids=self.class_ids)

    @property
    def channels(self) -> int:
        """Number of channels of the images, from the data or the first layer's kernel [P P C D].

        3 if there is no such kernel, or the model does not name its first layer.
        """
        if 'channels' in self.raw_images:
            return self.raw_images['channels']
        first_layers = (
            [self.model.first_layer] if self.model.first_layer else self.model.layer_order()[:1]
        )
        kernels = (
            leaf
            for path, leaf in param_paths(self.params).items()
            if leaf.ndim == 4 and any(re.search(pattern, path) for pattern in first_layers)
        )
        return next((kernel.shape[2] for kernel in kernels), 3)

    def value_range(self) -> np.ndarray | None:
        """Compute the model's input for a black and a white pixel, float32 [2, channels].

        In between, byte b of a channel becomes low + (high - low) * b / 255. None if the input is
        not the image, but tokens or the gray image of a colorizer.
        """
        if not self.takes_images:
            return None
        size = (*(self.image_size or (32, 32)), self.channels)
        images = jnp.stack([jnp.full(size, byte, jnp.uint8) for byte in (0, 255)])
        pixels = np.asarray(self.task.inputs({'image': images})[0])
        return pixels[:, 0, 0] if pixels.shape == images.shape else None

    def with_notes(self, *notes: str) -> TrainedModel:
        """Return a copy with additional notes."""
        return dataclasses.replace(self, notes=(*self.notes, *notes))

    def adapted(self, *, model: Any = None, task: Any = None) -> TrainedModel:
        """Return a copy with another module of the same model class, or a task of the same task
        class.
        """
        instances = {'model': model, 'task': task}
        return self.with_groups(
            **{
                name: {'name': self.config[name].name, **options.nested_fields(instance)}
                for name, instance in instances.items()
                if instance is not None
            }
        )

    def with_groups(self, **groups: Mapping[str, Any]) -> TrainedModel:
        """Return a copy with other config groups, such as `model={'name': 'vit', ...}`."""
        config = copy.deepcopy(self.config)
        with config.unlocked():
            for name, group in groups.items():
                config[name] = ConfigDict(dict(group))
        return dataclasses.replace(self, config=config)


class Written(NamedTuple):
    """Contents of the files of another code base.

    Attributes:
      arrays: Arrays by that code base's names.
      config: Contents of config.json; None if there is none.
      notes: One line per property of the model that the files cannot represent.
      preprocessor: Contents of preprocessor_config.json; None if there is none.
      others: Contents of further files by name.
      weights: Name of the weights in a folder, if it is not `hub.WEIGHTS`.
    """

    arrays: dict[str, np.ndarray]
    config: dict[str, Any] | None = None
    notes: tuple[str, ...] = ()
    preprocessor: dict[str, Any] | None = None
    others: Mapping[str, bytes] = MappingProxyType({})
    weights: str = ''


def fields(instance: Any) -> dict[str, Any]:
    """Return the keywords of a Linen module or a task, as `TrainedModel.model_config` does."""
    cls: Any = type(instance)
    return options.flat_fields({name: getattr(instance, name) for name in options.defaults(cls)})


def pixel_scale(task: Any) -> tuple[np.ndarray, np.ndarray] | None:
    """Return mean and standard deviation [C or 1] that a task normalizes pixels in [0, 1] with;
    None if it does not.
    """
    if task.normalization is not None:
        mean, std = task.normalization
        return np.asarray(mean, np.float64), np.asarray(std, np.float64)
    if not (span := fields(task).get('value_range')):
        return None
    low, high = span
    return np.array([-low / (high - low)]), np.array([1 / (high - low)])


def read_class_names(config: Mapping[str, Any], num_classes: int | None) -> tuple[str, ...]:
    """Read the names of all outputs; empty without classes, or if they are LABEL_0, LABEL_1, ...

    Raises:
      UserError: if a class number exceeds the number of outputs.
    """
    timm_names = dict(enumerate(config.get('label_names') or ()))  # of timm
    names = {int(i): str(name) for i, name in (config.get('id2label') or timm_names).items()}
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
    """Build `id2label` and `label2id` for `num_classes` outputs; unnamed ones get placeholders."""
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
    """Order of the classes in a head with the right number of outputs.

    Attributes:
      chosen: Class numbers in the checkpoint, in the order of the run; None for a new head.
      reason: Explanation for the user.
    """

    chosen: np.ndarray | None
    reason: str


def class_order(trained: TrainedModel, classes: SourceInfo) -> ClassOrder | None:
    """Match the order of a checkpoint's classes to data by name.

    Args:
      trained: Checkpoint.
      classes: Classes of the data. Further classes of the checkpoint come last.

    Returns:
      None to keep the order: it is the same, or one side has no class names.
    """
    checkpoint_classes = trained.classes
    if checkpoint_classes is None or not classes.num_classes:
        return None
    numbers = numbering.class_numbers(classes, checkpoint_classes, 'config.data')
    if numbers is None and not numbering.have_comparable_names(classes, checkpoint_classes):
        return None
    if numbers is None or numbering.ABSENT in numbers:
        return ClassOrder(
            None,
            'the checkpoint has different classes'
            f'{numbering.in_brackets(checkpoint_classes, classes)}'
            f' than the data{numbering.in_brackets(classes, checkpoint_classes)}',
        )
    if np.array_equal(numbers, np.arange(len(numbers))):
        return None
    names = numbering.first_names(checkpoint_classes.class_names)
    return ClassOrder(numbers, f'its classes ({names}) are reordered by name as in the data')


def reorder_head(
    flat: Mapping[str, np.ndarray], head: str, indices: np.ndarray
) -> dict[str, np.ndarray]:
    """Return the arrays of a head, with the chosen outputs first."""
    arrays = {name: np.asarray(x) for name, x in flat.items() if name.startswith(f'{head}/')}
    count = next(iter(arrays.values())).shape[-1]
    order = np.append(indices, np.setdiff1d(np.arange(count), indices))
    return {name: array[..., order] for name, array in arrays.items()}


def read_classes(path: str) -> np.ndarray:
    """Read class numbers from a file, int64 [classes of the run].

    Raises:
      UserError: if there is no such file, or a line is not a number.
    """
    source = f'config.init.classes={path}'
    try:
        lines = paths.read_lines(paths.absolute(path))
    except (OSError, UnicodeDecodeError) as e:
        raise UserError(f'{source}: cannot be read: {e}') from None
    for number, line in enumerate(lines, 1):
        if not line.strip().isdecimal():
            raise UserError(f'{source}, line {number}: {line!r} is not a class number')
    return np.array([int(line) for line in lines], np.int64)


def take_classes(imported: TrainedModel, model: Any, indices: np.ndarray) -> TrainedModel:
    """Keep only the chosen classes of a checkpoint's head, and add a note about it.

    Args:
      imported: Checkpoint.
      model: New Linen module; the last of its `head_layers` has an output per class.
      indices: Class numbers in the checkpoint, in the order of the model.

    Raises:
      UserError: if the checkpoint has no such head or class, or the run has a different number of
        classes.
    """
    head, num_classes = model.head_layers[-1], model.num_classes
    flat = traverse_util.flatten_dict(dict(imported.params), sep='/')
    head_arrays = {name: np.asarray(x) for name, x in flat.items() if name.startswith(f'{head}/')}
    if not head_arrays:
        raise UserError(f'config.init.classes: the checkpoint has no {head} to take classes from')
    if len(indices) != num_classes:
        raise UserError(
            f'config.init.classes: {len(indices)} lines, but the run has {num_classes} classes'
        )
    outputs = next(iter(head_arrays.values())).shape[-1]
    count = imported.model_config.get('num_classes') or outputs
    if indices.max() >= count:
        raise UserError(
            f'config.init.classes: class {indices.max()} is not in a head with {count} classes, '
            'numbered from 0'
        )
    order = np.append(indices, np.arange(count, outputs))  # a detector has a further output
    flat |= {name: array[..., order] for name, array in head_arrays.items()}
    params: dict[str, Any] = traverse_util.unflatten_dict(flat, sep='/')
    note = f'{head}: {num_classes} of its {count} classes are taken'
    return dataclasses.replace(imported, params=params).with_notes(note)
