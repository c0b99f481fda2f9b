"""Fit a checkpoint's parameters to a model: head, image size, scanned blocks, or only a part.

The model itself declares which layers form its head (`head_layers`) and which parameters change
with the image size (`resize_params`). Any other difference is an error that names the parameters.
"""

from __future__ import annotations

import dataclasses
import difflib
import fnmatch
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from flax import traverse_util

from vit_jax.data.records import SourceInfo
from vit_jax.errors import UserError
from vit_jax.interop.equivalent import make_equivalent, renormalize
from vit_jax.interop.trained import (
    ClassOrder,
    Size,
    TrainedModel,
    class_order,
    pixel_scale,
    reorder_head,
)
from vit_jax.nn import options
from vit_jax.tree_paths import block_paths, require_fit, unroll

PyTree = Any


def adapt_checkpoint(
    trained: TrainedModel,
    model: Any,
    target: PyTree,
    image_size: Size | None,
    posemb: str = '',
    select: str = '',
    classes: SourceInfo | None = None,
    task: Any = None,
) -> tuple[PyTree, list[str]]:
    """Fit a checkpoint's parameters to a model that may differ in head and image size.

    Args:
      trained: Checkpoint.
      model: Linen module.
      target: Shapes of the module's parameters for images of `image_size`.
      image_size: Height and width in pixels; None if the model takes no images.
      posemb: Interpolation of position embeddings, see `ops.resize.grid`; by default the method of
        the checkpoint's code base.
      select: Parts of the checkpoint to take if the models differ otherwise; see `select_params`.
        If empty, everything must fit.
      classes: Classes of the training data, which determine the order of the head's outputs; None
        to keep the head's order.
      task: New task, which may normalize images differently; None for the checkpoint's task.

    Returns:
      Parameters without those that keep their initial values, and notes for the user; see `adapt`.

    Raises:
      UserError: if the architectures, or the selected parts, differ.
    """
    notes, params = list(trained.notes), trained.params
    if model is not trained.model:
        notes += _compare_fields(trained.model_config, model)
        params, replaced = make_equivalent(trained, model)
        notes += replaced
    if task is not None and (scale := pixel_scale(task)) is not None:
        params, folded = renormalize(dataclasses.replace(trained, params=params), scale)
        notes += folded
    try:
        params, changes = adapt(
            params,
            target,
            model,
            old_size=trained.image_size,
            new_size=image_size,
            posemb=posemb or trained.positions,
            select=select,
            order=None if classes is None else class_order(trained, classes),
        )
    except UserError as error:
        raise UserError(f'{error}{_differences(trained.model_config, model)}') from None
    return params, notes + changes


def adapt(
    params: Mapping[str, PyTree],
    target: Mapping[str, PyTree],
    model: Any,
    *,
    old_size: Size | None = None,
    new_size: Size | None = None,
    posemb: str = 'bilinear',
    select: str = '',
    order: ClassOrder | None = None,
) -> tuple[dict[str, PyTree], list[str]]:
    """Make parameters fit a model.

    A head for different classes, or a different number of them, is dropped, and so is a head that
    was trained on the outputs of a layer, such as `pre_logits`, that the model lacks. Parameters
    that depend on the image size are resized. Blocks may be scanned or unrolled on either side.

    Args:
      params: Nested numpy arrays.
      target: Nested shapes of the model's parameters, or arrays.
      model: Linen module, for its `head_layers` and `resize_params`.
      old_size: Height and width of the images that `params` were made for; None if unknown.
      new_size: Height and width of the new images; None if the model takes no images.
      posemb: Interpolation of position embeddings, see `ops.resize.grid`.
      select: Parts to take; see `select_params`. If empty, everything must fit.
      order: New order of the classes of a matching head; None to keep the order.

    Returns:
      Parameters nested like `target`, without those that keep the model's initial values; and the
      changes, as notes for the user.

    Raises:
      UserError: if a parameter is missing, unknown or has a different shape; the message has both.
    """
    arrays_by_name, shapes = _flat(params), jax.eval_shape(_flat, target)
    notes: list[str] = []
    if select:
        arrays_by_name, shapes, notes = select_params(arrays_by_name, shapes, select)
    notes += _fit_head(arrays_by_name, shapes, model.head_layers, order)
    tree = traverse_util.unflatten_dict(arrays_by_name, sep='/')
    tree, resized = resize(tree, model, old_size, new_size, posemb)
    arrays_by_name = traverse_util.flatten_dict(tree, sep='/')
    require_fit(arrays_by_name, shapes, 'does not fit the model')
    arrays = {name: np.asarray(arrays_by_name[name], shapes[name].dtype) for name in shapes}
    return _nest(arrays, target), notes + resized


def resize(
    params: dict[str, PyTree],
    model: Any,
    old_size: Size | None,
    new_size: Size | None,
    method: str = 'bilinear',
) -> tuple[dict[str, PyTree], list[str]]:
    """Resize parameters for images of a different size; see `vit.Model.resize_params`.

    A model for images of any size has an `own_size`, which replaces `new_size`. Without either,
    nothing changes.

    Returns:
      The parameters, and the changes as notes for the user.

    Raises:
      UserError: if the parameters cannot be resized.
    """
    new_size = model.own_size or new_size
    if new_size is None:
        return params, []
    return model.resize_params(params, old_size, new_size, method)


def _flat(params: Mapping[str, PyTree]) -> dict[str, Any]:
    """Return arrays by '/'-joined names, blocks unrolled."""
    return unroll(traverse_util.flatten_dict(dict(params), sep='/'))


def _nest(flat: Mapping[str, np.ndarray], target: Mapping[str, PyTree]) -> dict[str, PyTree]:
    """Invert `_flat` for the names of `target` that are in `flat`."""
    nested = {}
    for name, leaf in traverse_util.flatten_dict(dict(target), sep='/').items():
        names = block_paths(name, leaf)
        arrays = [flat[unrolled_name] for unrolled_name in names if unrolled_name in flat]
        if 0 < len(arrays) < len(names):
            raise UserError(f'{name} holds all blocks in one array: select all or none of them')
        if arrays:
            nested[name] = arrays[0] if names == [name] else np.stack(arrays)
    return traverse_util.unflatten_dict(nested, sep='/')


def _fit_head(
    have: dict[str, Any],
    want: dict[str, Any],
    layers: Sequence[str],
    order: ClassOrder | None,
) -> list[str]:
    """Remove the head from both if it does not fit, so that it keeps its initial value.

    Args:
      have, want: Parameters of the checkpoint and of the model; changed in place.
      layers: Layers after the representation, in order; the last one has an output per class.
      order: Order of the classes if the head is kept.
    """
    *before, head = layers
    kernel = f'{head}/kernel'
    dropped = [layer for layer in before if f'{layer}/kernel' in have.keys() - want.keys()]
    notes = [f'{layer}: dropped, the model has no such layer' for layer in dropped]
    old, new = (tree[kernel].shape[-1] if kernel in tree else None for tree in (have, want))
    note = _head_note(head, old, new, dropped)
    if order is not None and not note and new is not None:
        if order.chosen is None:
            note = f'{head}: its {new} outputs are initialized: {order.reason}'
        else:
            have |= reorder_head(have, head, order.chosen)
            notes.append(f'{head}: {order.reason}')
    if note:
        notes.append(note)
        dropped = [*dropped, head]
    for name in [name for name in have if name.startswith(tuple(f'{layer}/' for layer in dropped))]:
        del have[name]
    for name in [name for name in want if note and name.startswith(f'{head}/')]:
        del want[name]
    return notes


def _head_note(head: str, old: int | None, new: int | None, dropped: Sequence[str]) -> str:
    """Return the reason for a new head, given the old and new number of classes, or ''."""
    if new is None:
        return f'{head}: dropped, the model has no head' if old is not None else ''
    if old is None:
        return f'{head}: {new} classes are initialized, the checkpoint has no head'
    if old != new:
        return f'{head}: {old} classes are replaced by {new}, which are initialized'
    if dropped:
        return f'{head}: its {new} classes are initialized without {", ".join(dropped)}'
    return ''


def _differences(checkpoint_config: Mapping[str, Any], model: Any) -> str:
    """Describe the fields that determine parameters and differ between two models."""
    differ = {
        key: pair
        for key, pair in _compare_configs(checkpoint_config, model).items()
        if key != 'num_classes' and model.effect_of(key) not in ('none', 'outputs')
    }
    checkpoint_values, model_values = (
        ', '.join(f'{key}={differ[key][i]!r}' for key in differ) for i in (0, 1)
    )
    return (
        f' (the checkpoint has {checkpoint_values}; config.model has {model_values})'
        if differ
        else ''
    )


def _compare_fields(checkpoint_config: Mapping[str, Any], model: Any) -> list[str]:
    """Note fields that change outputs but no parameters, and differ between two models.

    Raises:
      UserError: if one of them is binding.
    """
    notes = []
    for key, (checkpoint_value, model_value) in _compare_configs(checkpoint_config, model).items():
        effect = model.effect_of(key)
        if effect == 'binding':
            raise UserError(
                f'the checkpoint was trained with {key} {checkpoint_value!r}, but config.model has '
                f'{model_value!r}: set config.model.{key}={checkpoint_value!r}'
            )
        if effect == 'noted':
            notes.append(f'{key}: {model_value}, but {checkpoint_value} in the checkpoint')
    return notes


def _compare_configs(
    checkpoint_config: Mapping[str, Any], model: Any
) -> dict[str, tuple[Any, Any]]:
    """Return (checkpoint's value, model's value) of each shared field where they differ."""
    model_fields = options.flatten_fields(type(model), options.nested_fields(model))
    leaves = options.leaves(options.regroup(type(model), checkpoint_config))
    pairs = {key: (value, model_fields[key]) for key, value in leaves if key in model_fields}
    return {key: (old, new) for key, (old, new) in pairs.items() if old != new}


Flat = dict[str, Any]  # '/'-joined path -> array or shape


def select_params(have: Flat, want: Flat, select: str) -> tuple[Flat, Flat, list[str]]:
    """Select parameters.

    Args:
      have: Parameters of the checkpoint, blocks unrolled.
      want: Parameters of the model, blocks unrolled.
      select: Paths separated by commas: PATH, or SOURCE->TARGET if the model's path differs. A path
        selects all parameters below it; it may be empty next to an arrow, or contain wildcards.

    Returns:
      The selected parameters of `have` under their new paths; the parameters of `want` that they
      replace; and notes for the user on what is read and what is not.

    Raises:
      UserError: if a path does not exist, or two parts have the same target.
    """
    selected: Flat = {}
    replaced: Flat = {}
    notes = []
    for source, target in _parse(select):
        arrays, shapes = (
            _select_below(have, source, 'the checkpoint'),
            _select_below(want, target, 'the model'),
        )
        renamed = {
            _join_paths(_strip_pattern(target), suffix): leaf for suffix, leaf in arrays.items()
        }
        if duplicates := sorted(renamed.keys() & selected.keys()):
            raise UserError(f'select={select!r}: two parts are for {duplicates[0]}')
        selected |= renamed
        replaced |= {
            _join_paths(_strip_pattern(target), suffix): leaf for suffix, leaf in shapes.items()
        }
        origin = f' from {source or "the top"}' if source != target else ''
        notes.append(f'{target or "the model"}: {len(arrays)} parameters read{origin}')
    if unselected := _subtrees(want.keys() - replaced.keys(), replaced):
        notes.append(f'{", ".join(unselected)}: not selected, initialized')
    return selected, replaced, notes


def _parse(select: str) -> list[tuple[str, str]]:
    """Split a selection into pairs (path in the checkpoint, path in the model)."""
    pairs = []
    for text in select.split(','):
        source, arrow, target = (part.strip().strip('/') for part in text.partition('->'))
        if not (source or arrow) or '->' in target:
            raise UserError(f'select={select!r}: write PATH or SOURCE->TARGET, separated by commas')
        pairs.append((source, target if arrow else source))
    return pairs


def _select_below(flat: Mapping[str, Any], path: str, owner: str) -> Flat:
    """Return the parameters below a path, by the rest of their names; all if the path is empty."""
    selected = {
        name[len(_strip_pattern(path)) :].lstrip('/'): leaf
        for name, leaf in flat.items()
        if not path or any(fnmatch.fnmatchcase(prefix, path) for prefix in _prefixes(name))
    }
    if not selected:
        prefixes = {part for name in flat for part in _prefixes(name)}
        close = difflib.get_close_matches(path, sorted(prefixes), n=1, cutoff=0.5)
        hint = f'; did you mean {close[0]!r}?' if close else ''
        top = ', '.join(sorted({name.partition('/')[0] for name in flat}))
        raise UserError(f'select: {owner} has no parameters below {path!r}{hint} (it has: {top})')
    return selected


def _strip_pattern(path: str) -> str:
    """Return the part of a path before a pattern."""
    return path.partition('*')[0].rpartition('/')[0] if '*' in path else path


def _subtrees(names: Iterable[str], others: Iterable[str]) -> list[str]:
    """Return the shortest paths that contain all of `names` and none of `others`."""
    other_prefixes = {prefix for name in others for prefix in _prefixes(name)}
    return sorted({next(p for p in _prefixes(name) if p not in other_prefixes) for name in names})


def _prefixes(name: str) -> list[str]:
    """Return 'a', 'a/b' and 'a/b/c' for 'a/b/c'."""
    parts = name.split('/')
    return ['/'.join(parts[: i + 1]) for i in range(len(parts))]


def _join_paths(path: str, suffix: str) -> str:
    return '/'.join(part for part in (path, suffix) if part)
