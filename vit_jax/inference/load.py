"""Trained models from run folders and from checkpoints of other code bases.

model, variables = vit_jax.load('ViT-B_16.npz', image_size=384)
logits = model.apply(variables, images)['logits']
"""

from __future__ import annotations

import dataclasses
import logging
import os
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import traverse_util
from ml_collections import ConfigDict

from vit_jax.checkpoints import checkpointer
from vit_jax.checkpoints.averages import NO_AVERAGE, Average
from vit_jax.config import defaults
from vit_jax.config.load import from_dict, require_run, section
from vit_jax.config.origin import require_allowed
from vit_jax.config.run import POSEMBS, Data, Init, Lora, Model, Run
from vit_jax.data import batches, vocabulary
from vit_jax.data.transforms import only_text_transforms, without_annotations
from vit_jax.errors import UserError, check_choice
from vit_jax.inference.images import arbitrary_size, example_spec, input_size, own_normalization
from vit_jax.interop import adapt, checkpoint, preprocessing
from vit_jax.interop.trained import Size, TrainedModel, fields
from vit_jax.ops.sequences import Normalization, Sequences
from vit_jax.step import init_variables
from vit_jax.storage import paths, run_folder
from vit_jax.storage.model_ref import ModelRef, Step

_log = logging.getLogger(__name__)
PyTree = Any
Path = str | os.PathLike[str]


def load(
    path: Path,
    image_size: int | Size | None = None,
    num_classes: int | None = None,
    *,
    mean: float | Sequence[float] | None = None,
    std: float | Sequence[float] | None = None,
    positions: str = '',
    average: Average = 1,
    adaptor: str = '',
    allowed: Sequence[str] = (),
) -> tuple[Any, dict[str, PyTree]]:
    """Load a model and its weights; of a masked autoencoder and the like only the `backbone`.

    Classifiers, CLIPs and SigLIPs take RGB images in [-1, 1], which a model of another code base
    normalizes by its own mean and standard deviation first. A DETR takes images in [0, 1] minus its
    task's `mean`, divided by its `std`, which are logged, and a mask of the pixels that are not
    padding. Other models take what `read(path).task.inputs` makes of bytes.

    Args:
      path: A checkpoint of another code base (.npz, .safetensors, a folder with one, or a URL such
        as hf://google/vit-base-patch16-224; FAMILY:FILE for a family of your own, such as
        `my_lab.swin:FILE`), a run folder, or RUN@STEP or RUN@best for one of its checkpoints, also
        written RUN/checkpoints/STEP and RUN/checkpoints/best.
      image_size: Side, or height and width, of your images in pixels. Defaults to the size that
        the checkpoint's files prepare, or else the size that it was trained for.
      num_classes: Size of the head; a head that the checkpoint lacks starts at zero.
      mean, std: Normalization of images in [0, 1] by another code base's checkpoint, a number or
        one per channel. Defaults to the `preprocessor_config.json` next to the file. Not for a
        DETR: pass them to `read`.
      positions: Interpolation of position embeddings for another image size: 'bilinear',
        'bicubic' or 'antialiased' bicubic. Defaults to the interpolation of the checkpoint's code
        base: vision_transformer (and runs), transformers, or timm.
      average, adaptor: Of a run, see `read`.
      allowed: Modules of your own that the config of a run may name, such as `['my_lab']`.

    Returns:
      The Linen module, built with keywords that fit the checkpoint, and {'params': ...} with the
      run's other collections, as numpy arrays for `model.apply(variables, *inputs)`.

    Raises:
      UserError: if the file is missing or of unknown kind, its parameters do not form a complete
        model, the images cannot be cut into patches, or a run's config names code outside of this
        package that is not allowed.
    """
    size = (image_size, image_size) if isinstance(image_size, int) else image_size
    if positions:
        check_choice('positions', positions, POSEMBS)
    chosen: dict[str, Any] = {'average': average, 'adaptor': adaptor, 'allowed': allowed}
    stored = backbone(read(path, mean=mean, std=std, image_size=size, **chosen))
    stored = dataclasses.replace(stored, positions=positions or stored.positions)
    trained = adapt_model(stored, size, num_classes)
    model = trained.model
    if trained.task.normalization is not None and hasattr(trained.task, 'value_range'):
        model = for_range(model, trained.task.normalization)
    elif trained.task.normalization is not None:
        if mean is not None:
            raise UserError(
                f'{path}: a {stored.settings.model.name} does not apply mean and std: make its '
                'inputs by read(path, mean=..., std=...).task.inputs'
            )
        _log.warning('%s: %s', stored.source, own_normalization(stored))
    return model, trained.variables


def for_range(model: Any, normalization: Normalization) -> Any:
    """Return the model for images in [-1, 1] instead of normalized ones.

    Args:
      model: A Linen module.
      normalization: Mean and standard deviation of each channel of images in [0, 1].
    """
    mean, std = (np.asarray(values, np.float32) for values in normalization)
    kind = type(model)
    inner = getattr(kind, kind.image_method)

    def normalize(images: jax.Array) -> jax.Array:
        factor, shift = (np.resize(x, images.shape[-1]) for x in (0.5 / std, (0.5 - mean) / std))
        return images * factor + shift  # also of patches, in which channels run fastest

    def call(self: Any, images: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(images, Sequences):
            images = images._replace(values=normalize(images.values))
        else:
            images = normalize(images)
        return inner(self, images, *args, **kwargs)

    subclass = type(
        kind.__name__, (kind,), {kind.image_method: call, '__module__': kind.__module__}
    )
    return subclass(**fields(model))


def read(
    path: Path,
    *,
    step: Step = None,
    average: Average = 1,
    adaptor: str = '',
    mean: Any = None,
    std: Any = None,
    image_size: Size | None = None,
    allowed: Sequence[str] = (),
) -> TrainedModel:
    """Read the stored model of a run or of another code base.

    Args:
      path, mean, std, image_size, allowed: See `load`.
      step: Kept checkpoint of a run, or 'best', if `path` names none. Defaults to the newest.
      average: Number of a run's checkpoints to average, up to `step`; or the decay of one of its
        averages (`config.step.ema_decay`), by default the first; or 'none' for the parameters
        without average. The best step has the average that its evaluation measured.
      adaptor: Name of an adaptor of the task `agglomerate`: the model then has the features of
        a teacher, as the student predicts them.

    Raises:
      UserError: as `load`, or if there are no such checkpoints or adaptor.
    """
    ref = ModelRef.parse(path)
    if (run := ref.find_run(step)) is None:
        if step is not None or average != 1 or adaptor:
            raise UserError(f'{path} is not a run: step, average and adaptor apply to runs')
        if ref.part and ModelRef.parse(ref.file).find_run():
            raise UserError(
                f'{path}: only files have parts such as {ref.part!r}: name the run {ref.file}, and '
                'some of its parameters by config.init.select'
            )
        return checkpoint.read(ref, mean, std, image_size)
    if mean is not None or std is not None:
        raise UserError(f'{path}: mean and std apply to other code bases, not to a run')
    return _read_run(run.folder, run.step, average, adaptor, allowed)


def open_run(
    workdir: Path,
    image_size: Size | None = None,
    *,
    step: Step = None,
    average: Average = 1,
    adaptor: str = '',
    allowed: Sequence[str] = (),
) -> TrainedModel:
    """Open the model of a run (RUN, RUN@STEP); raise UserError for others, or as `open_model`."""
    run = ModelRef.parse(workdir).find_run(step)
    if run is None:
        read_config(workdir, allowed)
        folder = paths.absolute(workdir) / run_folder.CHECKPOINTS
    else:
        folder, step = run
    stored = _read_run(paths.absolute(folder), step, average, adaptor, allowed)
    return adapt_model(stored, image_size)


def open_model(
    path: Path,
    image_size: Size | None = None,
    *,
    step: Step = None,
    average: Average = 1,
    adaptor: str = '',
    allowed: Sequence[str] = (),
    stored: TrainedModel | None = None,
) -> TrainedModel:
    """Read any checkpoint, ready for images of `image_size`.

    A checkpoint without transforms gets a resize and crop to its own size. For another image size
    its transforms change by `preprocessing.change_size`.

    Args:
      path, allowed: See `load`.
      image_size: Height and width of your images in pixels. Defaults to the model's own.
      step, average, adaptor: See `read`.
      stored: Result of `read`, if it was called before.

    Raises:
      UserError: as `load`, or if the image size is unknown.
    """
    chosen: dict[str, Any] = {'step': step, 'average': average, 'adaptor': adaptor}
    stored = stored or read(path, image_size=image_size, allowed=allowed, **chosen)
    trained = adapt_model(stored, image_size)
    if trained.step is not None:
        return trained
    size = image_size or input_size(trained)
    unchanged = (
        '' if image_size or not without_annotations(stored.transforms) else stored.transforms
    )
    resized = preprocessing.change_size(stored.transforms, size)
    transforms = unchanged or '|'.join(
        filter(None, (resized, only_text_transforms(stored.transforms)))
    )
    return dataclasses.replace(
        trained.with_groups(data={**trained.config.data, 'transforms': transforms}),
        image_size=size,
        prepared_size=trained.prepared_size if unchanged else size,
        raw_images={'channels': trained.channels, 'size': None},
        spec=example_spec(trained, size),
    )


def read_config(workdir: Path, allowed: Sequence[str] = ()) -> ConfigDict:
    """Read the config of a run folder, and check that its names may be imported.

    Args:
      workdir: The run folder.
      allowed: The user's modules that the config may name.

    Raises:
      UserError: if the folder holds no run, or its config names code that is not allowed.
    """
    config = stored_config(workdir)
    require_allowed(config, allowed, str(paths.path(workdir) / run_folder.CONFIG))
    return config


def stored_config(workdir: Path) -> ConfigDict:
    """Read the config of a run folder without importing its names, which may be anyone's code.

    Its vocabulary is the one in the folder.

    Raises:
      UserError: if the folder holds no run, or another program's config.
    """
    folder = paths.path(workdir)
    if (stored := run_folder.read_config(folder)) is None:
        raise UserError(f'{str(workdir)!r} holds no run: it has no {run_folder.CONFIG}')
    require_run(stored, str(folder / run_folder.CONFIG))
    return _with_kept_vocab(from_dict(stored), folder)


def _with_kept_vocab(config: ConfigDict, folder: paths.Path) -> ConfigDict:
    """Point the config, in place, to the vocabulary in the run folder, if there is one."""
    vocab_file = folder / run_folder.VOCAB
    for group in (config.data, *config.evals.values()):
        if 'vocab' in group and vocab_file.is_file():
            group.vocab = str(vocab_file)
    return config


def backbone(trained: TrainedModel) -> TrainedModel:
    """Extract the part that other tasks start from (`Model.transferable`), by default all."""
    if (transferable := trained.model.transferable()) is None:
        return trained
    keywords, parts = transferable
    part = dataclasses.replace(
        trained,
        params={name: trained.params[name] for name in parts},
        collections={},
        spec={},  # only of images
    )
    task: dict[str, Any] = {'name': trained.model.part_task}
    if trained.task.normalization is not None:
        task |= dict(zip(('mean', 'std'), trained.task.normalization, strict=True))
    part = part.with_groups(model=keywords, task=task)
    if task['name'] != 'classify':  # a task of several, with the fields that they share
        shared = {key: x for key, x in trained.task_config.items() if key in vars(part.task)}
        spec = {k: s for k, s in trained.spec.items() if k in ('image', part.task.text)}
        part = dataclasses.replace(part.with_groups(task={**shared, **task}), spec=spec)
    return part.adapted(model=part.model)


def adapt_model(
    trained: TrainedModel, image_size: Size | None = None, num_classes: int | None = None
) -> TrainedModel:
    """Adapt a model to another image size or other classes, and log its notes.

    Raises:
      UserError: if its parameters do not form a complete model, or the image size does not fit it.
    """
    if trained.step is not None and image_size is None and num_classes is None:
        return trained
    for note in trained.notes:
        _log.warning('%s: %s', trained.source, note)
    if num_classes is not None:
        if 'num_classes' not in fields(trained.model):
            raise UserError(
                f'{trained.source}: its model, {trained.settings.model.name!r}, has no head for '
                'classes: leave num_classes out'
            )
        trained = trained.with_groups(model={**trained.model_config, 'num_classes': num_classes})
    requested = image_size or trained.prepared_size
    size = requested or trained.image_size or arbitrary_size(trained)
    spec = example_spec(trained, size)

    def init() -> PyTree:
        example = {name: jnp.zeros((1, *s.shape), s.dtype) for name, s in spec.items()}
        return init_variables(trained.model, trained.task, example, 0)['params']

    params, _ = adapt.adapt_checkpoint(trained, trained.model, jax.eval_shape(init), size)
    return dataclasses.replace(
        trained,
        params=_complete(params, init),
        image_size=requested or trained.image_size,
        spec=spec,
    )


def _read_run(
    folder: pathlib.Path, step: Step, average: Average, adaptor: str, allowed: Sequence[str]
) -> TrainedModel:
    """Read the run with checkpoints in `folder`; without a config file, use the checkpoint's."""
    has_config = (folder.parent / run_folder.CONFIG).is_file()
    config = read_config(folder.parent, allowed) if has_config else None
    loaded_step, variables, meta = checkpointer.load_mean(folder, step, average)
    if config is None:
        if 'config' not in meta:
            raise UserError(
                f'{folder.parent} has no {run_folder.CONFIG}, and the checkpoint '
                f'{folder / str(loaded_step)} has no config: restore the file from a copy'
            )
        require_allowed(meta['config'], allowed, f'the checkpoint {folder / str(loaded_step)}')
        config = _with_kept_vocab(from_dict(meta['config']), folder.parent)
    else:
        _require_unedited(config, folder, loaded_step, meta.get('config'))
    vocabulary.require_kept(folder.parent, meta.get('vocab'), section(config, Data).vocab)
    if not isinstance(average, int) or adaptor:
        _forget_averages(config)
    size, names = meta.get('input_size'), tuple(meta.get('class_names', ()))
    kinds = batches.kinds_from_checkpoint(meta)
    trained = TrainedModel(
        params=variables['params'],
        config=config,
        image_size=tuple(size) if size else None,
        source=f'run {folder.parent}, step {loaded_step}',
        class_names=names,
        class_ids=tuple(meta.get('class_ids', ())),
        collections={name: tree for name, tree in variables.items() if name != 'params'},
        path=paths.absolute(folder.parent),
        step=loaded_step,
        num_classes=len(names) or section(config, Model).options.get('num_classes') or 0,
        raw_images=meta.get('image', {}),
        spec=kinds[-1][1] if kinds else {},
    )
    trained = trained.adapted(model=trained.model)  # with defaults of missing keywords
    if adaptor:
        from vit_jax.inference import adaptors  # imported here, since few runs have them

        return adaptors.choose(trained, adaptor, meta)
    if not section(config, Lora).is_used:
        return trained
    from vit_jax.inference import adapted  # imported here, since few runs have adapters

    if average not in (1, NO_AVERAGE):
        raise UserError(
            f'{folder.parent}: adapters (config.lora) are not averaged over checkpoints'
        )
    imported = read(str(section(config, Init).checkpoint), allowed=allowed)
    return adapted.merge_into_base(trained, imported, meta)


def _forget_averages(config: ConfigDict) -> None:
    """Let every evaluation measure the parameters that were read."""
    for entry in config.evals.values():
        if 'ema_decay' in entry:
            del entry['ema_decay']


def _require_unedited(
    config: ConfigDict, folder: pathlib.Path, step: int, saved: Mapping[str, Any] | None
) -> None:
    """Compare a run folder's config with the checkpoint's, which older checkpoints lack.

    Evaluations may also match the newest checkpoint, as a resumed run may change them.

    Raises:
      UserError: if it changes the function of the weights or the preparation of inputs; names the
        key and both values.
    """
    if not isinstance(saved, Mapping):
        return
    file, steps = folder.parent / run_folder.CONFIG, run_folder.finished_steps(folder)
    before = _with_kept_vocab(from_dict(dict(saved)), folder.parent)
    changes = list(defaults.function_changes(before, config))
    if not changes and (changes := list(defaults.preparation_changes(before, config))):
        newest = run_folder.read_meta(folder / str(steps[-1])).get('config')
        newest = _with_kept_vocab(from_dict(newest or dict(saved)), folder.parent)
        changes = changes if list(defaults.preparation_changes(newest, config)) else []
    if (
        not changes
        and (seeds := (before.get('seed', Run.seed), config.get('seed', Run.seed)))[0] != seeds[1]
    ):
        changes = [('seed', *seeds)]
    for key, saved_value, value in changes:
        raise UserError(
            f'{file}: config.{key} is {value!r}, but {saved_value!r} in the checkpoint '
            f'{folder / str(step)}: undo the change, or delete {file.name} to use the config in '
            'the checkpoint'
        )


def _complete(params: PyTree, init: Callable[[], PyTree]) -> PyTree:
    """Add initial values for missing parameters; only these are computed."""
    flat = traverse_util.flatten_dict(params, sep='/')
    names = traverse_util.flatten_dict(jax.eval_shape(init), sep='/').keys() - flat.keys()
    if not names:
        return params

    def missing() -> dict[str, Any]:
        initial = traverse_util.flatten_dict(init(), sep='/')
        return {name: initial[name] for name in names}

    flat |= jax.tree.map(np.asarray, jax.jit(missing)())
    return traverse_util.unflatten_dict(flat, sep='/')
