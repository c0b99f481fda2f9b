"""Models from checkpoints, of others or of own runs, for images of any size.

model, variables = vit_jax.load('ViT-B_16.npz', image_size=384)
logits = model.apply(variables, images)['logits']
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import traverse_util

from vit_jax import interop
from vit_jax.checkpoints import checkpointer as checkpoint_lib
from vit_jax.config import sections
from vit_jax.errors import UserError, resolve
from vit_jax.interop import adapt
from vit_jax.interop.files import Foreign
from vit_jax.nn.patches import patch_grid
from vit_jax.storage import paths as storage
from vit_jax.storage import run_folder, step_folder

PyTree = Any
Size = tuple[int, int]  # height and width in pixels

# Keywords of a model that its parameters do not depend on, or that `adapt` takes care of.
_FREE = {
    *('num_classes', 'dropout', 'attention_dropout', 'drop_path', 'head_bias'),
    *('scan', 'remat', 'dtype', 'gelu', 'norm_eps'),
}
# The kernel that sees the channels of the image.
_STEMS = ('resnet/root/conv/kernel', 'root/conv/kernel', 'patch_embed/kernel')


def load(
    path: str | os.PathLike[str],
    image_size: int | Size | None = None,
    num_classes: int | None = None,
) -> tuple[Any, dict[str, PyTree]]:
    """A model and its weights.

    Args:
      path: a checkpoint of another code base (.npz, .safetensors, a folder with it, or the URL of
        one), a run folder, or one of its `checkpoints/STEP`.
      image_size: side, or height and width, in pixels of the images to come, [-1, 1] in RGB for
        all checkpoints of others; by default those that the checkpoint was made for.
      num_classes: a head for so many classes; one that the checkpoint lacks starts at zero.

    Returns:
      The Linen module, built with the keywords that fit the checkpoint, and {'params': ...} in
      numpy for `model.apply(variables, images)`.

    Raises:
      UserError: if there is no such file, or it is none that is known; if its parameters make no
        whole model; if the images cannot be cut into patches.
    """
    return from_foreign(read(path), image_size, num_classes)


def from_foreign(
    foreign: Foreign, image_size: int | Size | None = None, num_classes: int | None = None
) -> tuple[Any, dict[str, PyTree]]:
    """`load` for a checkpoint that is read already."""
    keywords = foreign.model | ({} if num_classes is None else {'num_classes': num_classes})
    model = build(keywords)
    size = (image_size, image_size) if isinstance(image_size, int) else image_size
    size = size or foreign.image_size or _any_size(foreign, model)
    init = _init(model, size, channels(foreign.params))
    params, _ = fit(foreign, model, jax.eval_shape(init), size)
    return model, {'params': _complete(params, init)}


def read(path: str | os.PathLike[str]) -> Foreign:
    """A checkpoint of another code base, or of a run.

    Raises:
      UserError: as `load`.
    """
    if (found := locate(path)) is None:
        return interop.read(os.fspath(path))
    return _read_run(*found)


def locate(path: str | os.PathLike[str]) -> tuple[Path, int | None] | None:
    """A run's folder of checkpoints, and the step if `path` names one; None if it is no run's."""
    path = storage.path(path)
    if (path / run_folder.CHECKPOINTS).is_dir():
        return path / run_folder.CHECKPOINTS, None
    folder = path.parent
    if path.name.isdecimal() and (
        folder.name == run_folder.CHECKPOINTS or step_folder.finished(folder)
    ):
        return folder, int(path.name)
    return (path, None) if step_folder.finished(path) else None


def fit(
    foreign: Foreign,
    model: Any,
    target: PyTree,
    image_size: Size | None,
    posemb: str = 'bilinear',
) -> tuple[PyTree, list[str]]:
    """The parameters of a checkpoint for a model that may differ in its head and image size.

    Args:
      foreign: the checkpoint.
      model: the Linen module.
      target: shapes of its parameters for images of `image_size`.
      image_size: height and width in pixels; None if the model takes no images.
      posemb: how position embeddings are resized, 'bilinear' or 'bicubic'.

    Returns:
      Parameters without those that start anew, and notes for people; see `adapt.adapt`.

    Raises:
      UserError: if the architectures differ.
    """
    notes = _compare_fields(foreign.model, model)
    source = build(foreign.model)
    try:
        params, changes = adapt.adapt(
            foreign.params,
            target,
            old_grid=grid(source, foreign.image_size),
            new_grid=grid(model, image_size),
            posemb=posemb,
        )
    except UserError as error:
        raise UserError(f'{error}{_differences(source, model)}') from None
    return params, notes + changes


def resize(
    params: PyTree, model: Any, old_size: Size | None, new_size: Size, posemb: str = 'bilinear'
) -> PyTree:
    """Parameters with the position embedding for images of another size.

    Args:
      params: of `model`.
      model: the Linen module.
      old_size: height and width that the images had; if None, patches form a square.
      new_size: height and width of the images to come.
      posemb: 'bilinear' or 'bicubic'.

    Raises:
      UserError: if the images cannot be cut into whole patches.
    """
    if 'pos_embed' not in params:
        return params
    target = jax.eval_shape(_init(model, new_size, channels(params)))
    old_grid, new_grid = grid(model, old_size), grid(model, new_size)
    return adapt.adapt(params, target, old_grid=old_grid, new_grid=new_grid, posemb=posemb)[0]


def build(keywords: Mapping[str, Any]) -> Any:
    """The Linen module of `config.model`."""
    return resolve('vit_jax.models', keywords['name'], 'Model')(**sections.keywords(keywords))


def fields(model: Any) -> dict[str, Any]:
    """All keywords of a Linen module."""
    names = (field.name for field in dataclasses.fields(model))
    return {name: getattr(model, name) for name in names if name not in ('parent', 'name')}


def grid(model: Any, image_size: Size | None) -> adapt.Grid | None:
    """Rows and columns of patches of such images; None for a model without patches.

    Raises:
      UserError: if the images cannot be cut into whole patches.
    """
    stride = getattr(model, 'stride', None)
    if stride is None or image_size is None:
        return None
    return patch_grid(*image_size, stride)


def channels(params: Mapping[str, PyTree]) -> int:
    """Of the images that a model takes."""
    flat = traverse_util.flatten_dict(dict(params), sep='/')
    return next((flat[name].shape[2] for name in _STEMS if name in flat), 3)


def _read_run(folder: Path, step: int | None) -> Foreign:
    step, variables, meta = checkpoint_lib.load_variables(folder, step)
    name, size = meta['config']['model']['name'], meta.get('input_size')
    return Foreign(
        family=name,
        params=adapt.unroll(variables['params']),
        model={'name': name, **fields(build(meta['config']['model']))},
        image_size=tuple(size) if size else None,
        source=f'run {folder.parent}, step {step}',
        class_names=tuple(meta.get('class_names', ())),
    )


def _any_size(foreign: Foreign, model: Any) -> Size:
    """A size for a model whose parameters do not depend on it."""
    if 'pos_embed' in foreign.params:
        raise UserError(
            f'pos_embed has {foreign.params["pos_embed"].shape[1]} rows, which are no square of '
            'patches: give the image size'
        )
    return (getattr(model, 'stride', 32),) * 2


def _init(model: Any, image_size: Size, channels: int) -> Callable[[], PyTree]:
    """Makes the initial parameters of a model for such images."""

    def init() -> PyTree:
        images = jnp.zeros((1, *image_size, channels), jnp.float32)
        return model.init(jax.random.key(0), images, train=False)['params']

    return init


def _complete(params: PyTree, init: Callable[[], PyTree]) -> PyTree:
    """Adds initial values where there are no others; only these are computed."""
    flat = traverse_util.flatten_dict(params, sep='/')
    names = traverse_util.flatten_dict(jax.eval_shape(init), sep='/').keys() - flat.keys()
    if not names:
        return params

    def missing() -> dict[str, Any]:
        initial = traverse_util.flatten_dict(init(), sep='/')
        return {name: initial[name] for name in names}

    flat |= jax.tree.map(np.asarray, jax.jit(missing)())
    return traverse_util.unflatten_dict(flat, sep='/')


def _differences(theirs: Any, ours: Any) -> str:
    """Where two models differ in what makes their parameters, for people."""
    differ = [
        key
        for key, value in fields(theirs).items()
        if key not in _FREE and value != fields(ours).get(key, value)
    ]
    there, here = (
        ', '.join(f'{key}={fields(model)[key]!r}' for key in differ) for model in (theirs, ours)
    )
    return f' (the checkpoint has {there}; config.model has {here})' if differ else ''


def _compare_fields(theirs: Mapping[str, Any], model: Any) -> list[str]:
    """What changes the outputs although no parameter shows it: another GELU is another model."""
    gelu, eps = (theirs.get(key, getattr(model, key, None)) for key in ('gelu', 'norm_eps'))
    if gelu != getattr(model, 'gelu', None):
        raise UserError(
            f'the checkpoint was trained with gelu {gelu!r}, config.model has {model.gelu!r}: '
            f'set config.model.gelu={gelu!r}'
        )
    if eps == getattr(model, 'norm_eps', None):
        return []
    return [f'norm_eps: {model.norm_eps:g}, but {eps:g} in the checkpoint']
