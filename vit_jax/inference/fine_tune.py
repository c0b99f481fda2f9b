"""Completion of configs from the checkpoint of `config.init.from` and from the splits of the data.

`config.model.name=None` means the checkpoint's model, whose fields other keys of `config.model`
replace; with `config.init.into`, it means this model, built on the checkpoint's ViT.
In transforms, `{size}` and `{method}` are the checkpoint's image size and resampling,
`{transforms}` for its evaluation transforms, and `{alpha}` for `drop_alpha|` if these contain it.
If `config.data.split` and the splits of `config.evals` are None, evaluation uses a validation
split, or else a held-out fifth of each class (of all images if these have several classes). A run
stores the completed config.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ml_collections import ConfigDict

from vit_jax.config import objects
from vit_jax.config.load import override, section
from vit_jax.config.run import Init, Model
from vit_jax.config.schema import class_keys, find_section, to_plain
from vit_jax.data import sources
from vit_jax.data.records import UnknownSplit
from vit_jax.data.transforms import parse_transforms, without_annotations
from vit_jax.errors import UserError
from vit_jax.interop.trained import TrainedModel, pixel_scale

# Readers of checkpoints are imported only if a config follows a checkpoint, which few do.
VALIDATION = ('validation', 'valid', 'val', 'dev', 'test')  # in order of preference
HELD_OUT = ('train[:80% per class]', 'train[80%: per class]')
HELD_OUT_OF_ALL = ('train[:80%]', 'train[80%:]')  # where images have several classes or objects
# What fine-tuning for a task starts from.
STARTS = {
    'detect': 'a DETR, such as hf://facebook/detr-resnet-50',
    'detect_groups': 'an RF-DETR, or from a ViT with the recipe rfdetr/own:vit',
    'segment_groups': 'an RF-DETR for instance segmentation',
    'segment': 'an EoMT, or from any ViT with config.init.into=eomt',
}
FIELD = re.compile(r'\{(size|method|transforms|alpha)\}')


@dataclasses.dataclass(frozen=True)
class CompletedConfig:
    """A config without open keys.

    Attributes:
      config: Checked config.
      checkpoint: Checkpoint of `config.init.from`, if it was read.
      notes: One line for each choice.
    """

    config: ConfigDict
    checkpoint: TrainedModel | None = None
    notes: tuple[str, ...] = ()


def complete_config(
    config: ConfigDict, stored: ConfigDict | None = None, allowed: Sequence[str] = ()
) -> CompletedConfig:
    """Complete a config from its checkpoint and its data.

    Args:
      config: Config, which is not changed.
      stored: Completed config of the run to resume.
      allowed: The user's modules that the config of the checkpoint's run may name.

    Raises:
      UserError: if the checkpoint or the data are missing, the checkpoint is for a different task
        or lacks a requested part, or the completed config is invalid.
    """
    keys = list(_open_keys(config))
    if not keys:
        return CompletedConfig(config)
    completed = None if stored is None else _from_run(config, stored, keys)
    return completed or _from_files(config, allowed)


def _open_keys(config: ConfigDict) -> Iterator[str]:
    """Yield the open keys, such as 'data.split'."""
    if config.model.name is None:
        yield from ('model', 'init.select')
    for key_path in ('data', *(f'evals.{name}' for name in config.evals)):
        data = find_section(config, key_path)
        if data.get('split') is None:
            yield f'{key_path}.split'
        if FIELD.search(data.get('transforms', '')):
            yield f'{key_path}.transforms'


def _from_run(
    config: ConfigDict, stored: ConfigDict, keys: Sequence[str]
) -> CompletedConfig | None:
    """Take the values of open keys from a run's config; return None if it lacks some."""
    config = copy.deepcopy(config)
    with config.unlocked(), config.ignore_type():
        for key_path in keys:
            parent, _, key = key_path.rpartition('.')
            if key_path == 'model':
                overrides = {k: v for k, v in config.model.items() if v is not None}
                stored_model = stored.model.to_dict()
                config.model = objects.merge_fields(stored_model['name'], stored_model, overrides)
                _normalize_as(config, stored.task.to_dict())
            elif key not in (group := find_section(stored, parent)):
                if key_path != 'init.select':
                    return None
            else:
                _section(config, parent)[key] = group[key]
    return CompletedConfig(override(config, ()))


def _section(config: ConfigDict, key_path: str) -> ConfigDict:
    return functools.reduce(ConfigDict.__getitem__, key_path.split('.'), config)


def _from_files(config: ConfigDict, allowed: Sequence[str]) -> CompletedConfig:
    from vit_jax.inference import load

    config = copy.deepcopy(config)
    checkpoint: TrainedModel | None = None
    notes: list[str] = []
    with config.unlocked(), config.ignore_type():
        if any(not key_path.endswith('.split') for key_path in _open_keys(config)):
            if not (path := init_path(section(config, Init))):
                raise UserError(
                    'config.init.from is empty, but config.model depends on it: name a checkpoint'
                )
            try:
                checkpoint = load.read(path, allowed=allowed)
            except UserError as error:
                raise UserError(f'config.init.from: {error}') from error
            try:
                notes += _follow(config, checkpoint)
            except UserError as error:
                raise UserError(f'config.init.from={path}: {error}') from None
        notes += _choose_splits(config)
    return CompletedConfig(override(config, ()), checkpoint, tuple(notes))


def init_path(init: Init) -> str:
    """Return the checkpoint that a run starts from; empty for none.

    Raises:
      UserError: if the config requires one and names none.
    """
    if init.checkpoint is None:
        raise UserError(
            'config.init.from: name the checkpoint to fine-tune by --config.init.from=FILE; '
            '--config.init.from= trains from scratch'
        )
    return init.checkpoint


def _follow(config: ConfigDict, checkpoint: TrainedModel) -> Iterator[str]:
    """Give a config the model and the transforms of a checkpoint."""
    from vit_jax.interop import preprocessing

    if config.model.name is None:
        yield _follow_model(config, checkpoint)
    keys = [key_path for key_path in _open_keys(config) if key_path.endswith('.transforms')]
    if keys:
        text = evaluation_transforms(checkpoint)
        fields = {
            'size': _size_text(_image_size(checkpoint)),
            'method': repr(preprocessing.resampling(text)),
            'transforms': text,
            'alpha': 'drop_alpha|' if parse_transforms(text).drops_alpha else '',
        }
        for key_path in keys:
            data = _section(config, key_path.rpartition('.')[0])
            data.transforms = FIELD.sub(lambda m: fields[m[1]], data.transforms)
            yield f'config.{key_path}: {data.transforms}'


def _follow_model(config: ConfigDict, checkpoint: TrainedModel) -> str:
    from vit_jax.inference import load

    part = load.backbone(checkpoint)
    if into := section(config, Init).into:
        return _follow_into(config, checkpoint, part, into)
    task, requested = part.config.task.name, config.task.name
    if task != requested:
        start = STARTS.get(requested, 'a model for it')
        raise UserError(
            f'a {part.config.model.name} for the task {task!r}, but config.task is {requested!r}: '
            f'start from {start}, or name the model, and the parts to load by config.init.select'
        )
    # The new head is a single layer (Dosovitskiy et al. 2021, section 3.2).
    new_head = dict.fromkeys({'num_classes', 'representation_size'} & part.model_config.keys())
    overrides = {key: value for key, value in to_plain(config.model).items() if key != 'name'}
    name = part.config.model.name
    config.model = objects.merge_fields(name, part.model_config, new_head, overrides)
    _normalize_as(config, part.task_config)
    if part is not checkpoint and not section(config, Init).select:
        config.init.select = ','.join(part.params)
    return f'config.model: the {part.config.model.name} of the checkpoint'


def _follow_into(
    config: ConfigDict, checkpoint: TrainedModel, part: TrainedModel, into: str
) -> str:
    """Give a config the model `into`, made of a checkpoint's backbone, or the checkpoint's own."""
    from vit_jax.interop import normalization

    overrides = {key: value for key, value in to_plain(config.model).items() if value is not None}
    new_head = {'num_classes': None, 'name': into}
    if checkpoint.config.model.name == into:
        config.model = objects.merge_fields(into, checkpoint.model_config, overrides, new_head)
        _normalize_as(config, checkpoint.task_config)
        return f'config.model: the {into} of the checkpoint'
    name, old = part.config.model.name, type(part.model)
    config.model = {**overrides, **new_head}
    cls = objects.model_class(into)
    if not issubclass(cls, old):
        raise UserError(f'config.init.into={into}: cannot be built from a {name}')
    inherited = objects.merge_fields(name, part.model_config)
    inherited = {key: value for key, value in inherited.items() if key in class_keys(cls)}
    config.model = objects.merge_fields(into, inherited, overrides, new_head)
    model = section(config, Model)
    sized = Model(name=into, options={**model.options, 'num_classes': 1})  # any number
    parts = (objects.make_model(sized).transferable() or (None, ()))[1]
    if not section(config, Init).select:
        config.init.select = ','.join(part_name for part_name in parts if part_name in part.params)
    if (scale := pixel_scale(part.task)) is not None:
        _normalize_as(config, normalization.per_channel(scale, part.channels))
    return f'config.model: {into}, made of the {name} of the checkpoint'


def _normalize_as(config: ConfigDict, task: Mapping[str, Any]) -> None:
    """Normalize images like the checkpoint's task, unless the config does so differently."""
    if {'mean', 'std', 'value_range'}.isdisjoint(config.task.keys()):
        config.task.update({key: task[key] for key in ('mean', 'std') if task.get(key)})


def evaluation_transforms(checkpoint: TrainedModel) -> str:
    """Return the transforms from an image of any size to the input of a checkpoint's model.

    Raises:
      UserError: if its image size is unknown.
    """
    from vit_jax.inference.images import makes_one_shape, takes_any_size
    from vit_jax.interop import preprocessing

    text, size = without_annotations(checkpoint.transforms), checkpoint.raw_images.get('size')
    transforms, channels = parse_transforms(text), checkpoint.channels
    if text and (
        takes_any_size(transforms, (*size, channels))
        if size
        else makes_one_shape(transforms, channels)
    ):
        return text
    crop = preprocessing.crop(_image_size(checkpoint))
    return f'drop_alpha|{crop}' if transforms.drops_alpha else crop


def _image_size(checkpoint: TrainedModel) -> tuple[int, int]:
    from vit_jax.inference import images

    try:
        return images.input_size(checkpoint)
    except UserError:
        raise UserError(
            'its image size is unknown: give the transforms of config.data and config.evals'
        ) from None


def _size_text(size: tuple[int, int]) -> str:
    """Return a size as an argument of transforms: one number for a square."""
    return str(size[0] if size[0] == size[1] else size)


def _choose_splits(config: ConfigDict) -> Iterator[str]:
    """Choose the splits of the training data and the evaluations if none of them is named."""
    keys = [key_path.removesuffix('.split') for key_path in _open_keys(config)]
    if not keys:
        return
    source = config.data.source
    entries = [entry for entry in config.evals.values() if entry.get('split') is None]
    if 'data' not in keys or len(entries) < len(config.evals):
        raise UserError(f'config.{keys[0]}.split: name it too, as another split is named')
    if keys_with_split := [entry.source for entry in entries if entry.source != source]:
        raise UserError(
            f'config.evals: name the split of {keys_with_split[0]}, and config.data.split'
        )
    try:
        train, held_out = source_splits(source)
    except UserError as error:
        raise UserError(f'config.data.source: {error}') from error
    config.data.split = train
    for entry in entries:
        entry.split = held_out
    reason = '' if train == 'train' else 'no validation split: '
    yield f'{source}: {reason}trains on {train}, evaluates on {held_out}'


def source_splits(source: str) -> tuple[str, str]:
    """Return the splits of a source for training and for evaluation.

    Raises:
      UserError: if it has no split `train`, or its validation split cannot be opened.
    """
    train = sources.open_source(source, 'train')
    for name in VALIDATION:
        try:
            sources.open_source(source, name)
        except UnknownSplit:
            continue
        return 'train', name
    several = train.info.multilabel or train.has_annotations
    return HELD_OUT_OF_ALL if several else HELD_OUT
