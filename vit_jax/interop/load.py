"""Models from checkpoints, of others or of own runs, for images of any size.

model, variables = vit_jax.load('ViT-B_16.npz', image_size=384)
logits = model.apply(variables, images)['logits']
"""

from __future__ import annotations

import dataclasses
import logging
import os
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import traverse_util

from vit_jax import interop
from vit_jax.checkpoints import checkpointer as checkpoint_lib
from vit_jax.checkpoints.best import BEST, Step
from vit_jax.config import defaults
from vit_jax.config.allowed import require_allowed
from vit_jax.errors import UserError, resolve
from vit_jax.interop import adapt
from vit_jax.interop.imported import ImportedModel
from vit_jax.optim.param_groups import layer_order
from vit_jax.storage import paths as storage
from vit_jax.storage import run_folder, step_folder
from vit_jax.tree_paths import param_paths

_log = logging.getLogger(__name__)
PyTree = Any
Size = tuple[int, int]  # height and width in pixels

# Keywords of a model that its parameters do not depend on, or that `adapt` takes care of.
_FREE = {
    *('name', 'num_classes', 'dropout', 'attention_dropout', 'drop_path', 'head_bias'),
    *('scan', 'remat', 'dtype', 'gelu', 'norm_eps', 'posemb_std', 'head_norm'),
    *('attention', 'residual_dtype', 'pool_padding'),
}


def load(
    path: str | os.PathLike[str],
    image_size: int | Size | None = None,
    num_classes: int | None = None,
    *,
    mean: float | Sequence[float] | None = None,
    std: float | Sequence[float] | None = None,
    allowed: Sequence[str] = (),
) -> tuple[Any, dict[str, PyTree]]:
    """A model and its weights; of a model with a `backbone` this alone, as the encoder of a masked
    autoencoder.

    Args:
      path: a checkpoint of another code base (.npz, .safetensors, a folder with it, or the URL of
        one, with a family in front where it is one of your own: `my_lab.swin:FILE`), a run
        folder, or one of its `checkpoints/STEP`, or `checkpoints/best`.
      image_size: side, or height and width, in pixels of the images to come, [-1, 1] in RGB for
        all checkpoints of others; by default those that the checkpoint was made for.
      num_classes: a head for so many classes; one that the checkpoint lacks starts at zero.
      mean, std: that a checkpoint of others was trained with: of images in [0, 1], a number or one
        for each colour. By default what lies beside it tells them. They become part of the
        weights: images to come are in [-1, 1] all the same.
      allowed: modules of your own that the config of a run may name, as `['my_lab']`.

    Returns:
      The Linen module, built with the keywords that fit the checkpoint, and {'params': ...}, with
      other collections of a run beside them, in numpy for `model.apply(variables, images)`.

    Raises:
      UserError: if there is no such file, or it is none that is known; if its parameters make no
        whole model; if the images cannot be cut into patches; if a run's config names code from
        outside of this package that is not allowed.
    """
    size = _pair(image_size)
    return instantiate(backbone(read(path, mean, std, size, allowed)), size, num_classes)


def backbone(imported: ImportedModel) -> ImportedModel:
    """The part that a model names by its method `backbone`; all of a model without one."""
    model = build(imported.model)
    if not hasattr(model, 'backbone'):
        return imported
    keywords, parts = model.backbone()
    params = {part: imported.params[part] for part in parts}
    return dataclasses.replace(
        imported,
        params=params,
        model={'name': keywords['name'], **fields(build(keywords))},
        task={'name': 'classify'},
        collections={},
    )


def instantiate(
    imported: ImportedModel, image_size: int | Size | None = None, num_classes: int | None = None
) -> tuple[Any, dict[str, PyTree]]:
    """`load` for a checkpoint that is read already; logs its notes."""
    for note in imported.notes:
        _log.warning('%s: %s', imported.source, note)
    keywords = imported.model | ({} if num_classes is None else {'num_classes': num_classes})
    model = build(keywords)
    size = _pair(image_size) or imported.image_size or _any_size(imported, model)
    init = _init(model, size, channels(model, imported.params))
    params, _ = fit(imported, model, jax.eval_shape(init), size)
    return model, {'params': _complete(params, init), **imported.collections}


def read(
    path: str | os.PathLike[str],
    mean: Any = None,
    std: Any = None,
    image_size: Size | None = None,
    allowed: Sequence[str] = (),
) -> ImportedModel:
    """A checkpoint of another code base, see `interop.read`, or of a run.

    Args:
      path, mean, std, image_size, allowed: as for `load`.

    Raises:
      UserError: as `load`.
    """
    if (found := locate(path)) is None:
        return interop.read(path, mean, std, image_size)
    if mean is not None or std is not None:
        raise UserError(f'{path}: mean and std are for checkpoints of others, not for a run')
    return _read_run(*found, allowed)


def locate(path: str | os.PathLike[str]) -> tuple[Path, Step] | None:
    """A run's folder of checkpoints, and the step if `path` names one; None if it is no run's.

    Raises:
      UserError: if object storage cannot be reached.
    """
    path = storage.path(path)
    with storage.reaching(path):
        if (path / run_folder.CHECKPOINTS).is_dir():
            return path / run_folder.CHECKPOINTS, None
        folder = path.parent
        if (path.name == BEST or path.name.isdecimal()) and (
            folder.name == run_folder.CHECKPOINTS or step_folder.finished(folder)
        ):
            return folder, BEST if path.name == BEST else int(path.name)
        return (path, None) if step_folder.finished(path) else None


def fit(
    imported: ImportedModel,
    model: Any,
    target: PyTree,
    image_size: Size | None,
    posemb: str = 'bilinear',
    select: str = '',
) -> tuple[PyTree, list[str]]:
    """The parameters of a checkpoint for a model that may differ in its head and image size.

    Args:
      imported: the checkpoint.
      model: the Linen module.
      target: shapes of its parameters for images of `image_size`.
      image_size: height and width in pixels; None if the model takes no images.
      posemb: how position embeddings are resized, 'bilinear' or 'bicubic'.
      select: the parts of the checkpoint to take, where the models are not the same otherwise;
        see `interop.select`. If empty, all has to fit.

    Returns:
      Parameters without those that start anew, and notes for people; see `adapt.adapt`.

    Raises:
      UserError: if the architectures differ, or those of the parts that are selected.
    """
    notes = [*imported.notes, *_compare_fields(imported.model, model)]
    try:
        params, changes = adapt.adapt(
            imported.params,
            target,
            model,
            old_size=imported.image_size,
            new_size=image_size,
            posemb=posemb,
            select=select,
        )
    except UserError as error:
        raise UserError(f'{error}{_differences(imported.model, model)}') from None
    return params, notes + changes


def resize(
    params: PyTree, model: Any, old_size: Size | None, new_size: Size, posemb: str = 'bilinear'
) -> PyTree:
    """Parameters for images of another size.

    Args:
      params: of `model`.
      model: the Linen module.
      old_size: height and width that the images had; None where nothing tells.
      new_size: height and width of the images to come.
      posemb: 'bilinear' or 'bicubic'.

    Raises:
      UserError: if the model cannot take such images.
    """
    return adapt.resize(params, model, old_size, new_size, posemb)[0]


def build(keywords: Mapping[str, Any]) -> Any:
    """The Linen module of `config.model`."""
    return resolve('vit_jax.models', keywords['name'], 'Model')(**defaults.keywords(keywords))


def fields(model: Any) -> dict[str, Any]:
    """All keywords of a Linen module."""
    names = (field.name for field in dataclasses.fields(model))
    return {name: getattr(model, name) for name in names if name not in ('parent', 'name')}


def channels(model: Any, params: Mapping[str, PyTree]) -> int:
    """Of the images that a model takes: those of the kernel [P P C D] in its first layer.

    3 where there is no such kernel, or the model does not tell which layer is the first.
    """
    first = layer_order(model)[:1]
    kernels = (
        leaf
        for path, leaf in param_paths(params).items()
        if leaf.ndim == 4 and any(re.search(pattern, path) for pattern in first)
    )
    return next((kernel.shape[2] for kernel in kernels), 3)


def _read_run(folder: Path, step: Step, allowed: Sequence[str]) -> ImportedModel:
    step, variables, meta = checkpoint_lib.load_variables(folder, step)
    require_allowed(meta['config'], allowed, f'the checkpoint {folder / str(step)}')
    config, size = meta['config'], meta.get('input_size')
    section = next(iter(config.get('evals', {}).values()), config['data'])
    return ImportedModel(
        params=adapt.unroll(variables['params']),
        model={'name': config['model']['name'], **fields(build(config['model']))},
        image_size=tuple(size) if size else None,
        source=f'run {folder.parent}, step {step}',
        class_names=tuple(meta.get('class_names', ())),
        task=dict(config['task']),
        transforms=section.get('transforms', ''),
        collections={name: tree for name, tree in variables.items() if name != 'params'},
    )


def _pair(image_size: int | Size | None) -> Size | None:
    return (image_size, image_size) if isinstance(image_size, int) else image_size


def _any_size(imported: ImportedModel, model: Any) -> Size:
    """A size for a model whose parameters do not depend on it."""
    size = (getattr(model, 'stride', 32),) * 2
    try:
        _, changes = adapt.resize(imported.params, model, None, size)
    except UserError as error:
        changes = [str(error)]
    if changes:
        raise UserError(
            'the parameters are for images of one size, and nothing tells which '
            f'({changes[0]}): give the image size'
        )
    return size


def _init(model: Any, image_size: Size, channels: int) -> Callable[[], PyTree]:
    """Make the initial parameters of a model for such images."""

    def init() -> PyTree:
        images = jnp.zeros((1, *image_size, channels), jnp.float32)
        return model.init(jax.random.key(0), images, train=False)['params']

    return init


def _complete(params: PyTree, init: Callable[[], PyTree]) -> PyTree:
    """Add initial values where there are no others; only these are computed."""
    flat = traverse_util.flatten_dict(params, sep='/')
    names = traverse_util.flatten_dict(jax.eval_shape(init), sep='/').keys() - flat.keys()
    if not names:
        return params

    def missing() -> dict[str, Any]:
        initial = traverse_util.flatten_dict(init(), sep='/')
        return {name: initial[name] for name in names}

    flat |= jax.tree.map(np.asarray, jax.jit(missing)())
    return traverse_util.unflatten_dict(flat, sep='/')


def _differences(theirs: Mapping[str, Any], model: Any) -> str:
    """Where two models differ in what makes their parameters, for people."""
    ours = fields(model)
    differ = [
        key for key in theirs if key not in _FREE and theirs[key] != ours.get(key, theirs[key])
    ]
    there, here = (', '.join(f'{key}={of[key]!r}' for key in differ) for of in (theirs, ours))
    return f' (the checkpoint has {there}; config.model has {here})' if differ else ''


def _compare_fields(theirs: Mapping[str, Any], model: Any) -> list[str]:
    """What changes the outputs although no parameter shows it: another GELU is another model."""
    ours = fields(model)
    keys = ('gelu', 'norm_eps', 'pool_padding')
    differ = [key for key in keys if key in ours and key in theirs]
    differ = [key for key in differ if theirs[key] != ours[key]]
    if 'gelu' in differ:
        raise UserError(
            f'the checkpoint was trained with gelu {theirs["gelu"]!r}, config.model has '
            f'{ours["gelu"]!r}: set config.model.gelu={theirs["gelu"]!r}'
        )
    return [f'{key}: {ours[key]}, but {theirs[key]} in the checkpoint' for key in differ]
