"""Fitting a checkpoint's parameters to a model: head, image size, scanned blocks, or only a part.

The model itself declares which layers form its head (`head_layers`) and which parameters change
with the image size (`resize_params`). Any other difference is an error that names the parameters.
"""

from __future__ import annotations

import dataclasses
import difflib
import fnmatch
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from flax import traverse_util

from vit_jax.data.records import SourceInfo
from vit_jax.errors import UserError
from vit_jax.interop.trained import (
    ClassOrder,
    Size,
    TrainedModel,
    class_order,
    fields,
    pixel_scale,
    reorder_head,
)
from vit_jax.nn import options
from vit_jax.tree_paths import require_fit, unroll, unrolled

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
    """Fit the parameters of a checkpoint to a model that may differ in its head and image size.

    Args:
      trained: the checkpoint.
      model: the Linen module.
      target: shapes of its parameters for images of `image_size`.
      image_size: height and width in pixels; None if the model takes no images.
      posemb: interpolation of position embeddings, see `ops.resize.grid`; by default that of the
        checkpoint's code base.
      select: the parts of the checkpoint to take, if the models differ otherwise; see
        `select_params`. If empty, everything has to fit.
      classes: those of the training data, whose order the head takes; None keeps its own.
      task: the new task, which may normalize images differently; None for the checkpoint's own.

    Returns:
      Parameters without those that start anew, and notes for people; see `adapt`.

    Raises:
      UserError: if the architectures differ, or those of the selected parts.
    """
    notes = [*trained.notes, *_compare_fields(trained.model_config, model)]
    params, replaced = equivalent(trained, model)
    notes += replaced
    if task is not None and (scale := pixel_scale(task)) is not None:
        params, folded = for_images(dataclasses.replace(trained, params=params), scale)
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

    A head for other classes, or another number of them, is left out, and so is one that was trained
    on the outputs of a layer, such as `pre_logits`, that the model lacks. Parameters that depend on
    the image size are resized. Blocks may be scanned or unrolled on either side.

    Args:
      params: nested numpy arrays.
      target: nested shapes of the model's parameters, or arrays.
      model: the Linen module, for its `head_layers` and `resize_params`.
      old_size: height and width of the images that `params` were made for; None if unknown.
      new_size: height and width of the images to come; None if the model takes none.
      posemb: interpolation of position embeddings, see `ops.resize.grid`.
      select: the parts to take; see `select_params`. If empty, everything has to fit.
      order: new order of the classes of a head that is kept; None to keep theirs.

    Returns:
      Parameters nested like `target`, without those that keep the model's initial values; and the
      changes, as notes for people.

    Raises:
      UserError: if a parameter is missing, unknown or of another shape; it names both shapes.
    """
    have, want = _flat(params), jax.eval_shape(_flat, target)
    notes: list[str] = []
    if select:
        have, want, notes = select_params(have, want, select)
    notes += _fit_head(have, want, model.head_layers, order)
    tree = traverse_util.unflatten_dict(have, sep='/')
    tree, resized = resize(tree, model, old_size, new_size, posemb)
    have = traverse_util.flatten_dict(tree, sep='/')
    require_fit(have, want, 'does not fit the model')
    arrays = {name: np.asarray(have[name], want[name].dtype) for name in want}
    return _nest(arrays, target), notes + resized


def resize(
    params: dict[str, PyTree],
    model: Any,
    old_size: Size | None,
    new_size: Size | None,
    method: str = 'bilinear',
) -> tuple[dict[str, PyTree], list[str]]:
    """Fit parameters to images of another size; see `vit.Model.resize_params`.

    A model for images of any size has an `own_size`, which replaces `new_size`. Without either,
    nothing changes.

    Returns:
      The parameters, and the changes as notes for people.

    Raises:
      UserError: if they cannot be resized.
    """
    new_size = model.own_size or new_size
    if new_size is None:
        return params, []
    return model.resize_params(params, old_size, new_size, method)


def overlay(initial: Mapping[str, PyTree], given: Mapping[str, PyTree]) -> dict[str, PyTree]:
    """A copy of `initial` with the leaves of `given` in place of its own."""
    merged = dict(initial)
    for key, value in given.items():
        merged[key] = overlay(initial[key], value) if isinstance(value, Mapping) else value
    return merged


def _flat(params: Mapping[str, PyTree]) -> dict[str, Any]:
    """Arrays by '/'-joined names of unrolled blocks."""
    return unroll(traverse_util.flatten_dict(dict(params), sep='/'))


def _nest(flat: Mapping[str, np.ndarray], target: Mapping[str, PyTree]) -> dict[str, PyTree]:
    """The inverse of `_flat` for those names of `target` that are in `flat`."""
    nested = {}
    for name, leaf in traverse_util.flatten_dict(dict(target), sep='/').items():
        names = unrolled(name, leaf)
        arrays = [flat[unrolled_name] for unrolled_name in names if unrolled_name in flat]
        if 0 < len(arrays) < len(names):
            raise UserError(f'{name} holds all blocks in one array: select all, or none of them')
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
      have, want: changed in place.
      layers: those after the representation, in order; the last has an output for each class.
      order: of the classes, if the head is kept.
    """
    *before, head = layers
    kernel = f'{head}/kernel'
    lost = [layer for layer in before if f'{layer}/kernel' in have.keys() - want.keys()]
    notes = [f'{layer}: left out, the model has none' for layer in lost]
    old, new = (tree[kernel].shape[-1] if kernel in tree else None for tree in (have, want))
    note = _head_note(head, old, new, lost)
    if order is not None and not note and new is not None:
        if order.chosen is None:
            note = f'{head}: its {new} outputs start anew: {order.why}'
        else:
            have |= reorder_head(have, head, order.chosen)
            notes.append(f'{head}: {order.why}')
    if note:
        notes.append(note)
        lost = [*lost, head]
    for name in [name for name in have if name.startswith(tuple(f'{layer}/' for layer in lost))]:
        del have[name]
    for name in [name for name in want if note and name.startswith(f'{head}/')]:
        del want[name]
    return notes


def _head_note(head: str, old: int | None, new: int | None, lost: Sequence[str]) -> str:
    """The reason for a new head, given the number of classes on both sides; empty if kept."""
    if new is None:
        return f'{head}: left out, the model has none' if old is not None else ''
    if old is None:
        return f'{head}: none to read, {new} classes start anew'
    if old != new:
        return f'{head}: {old} classes replaced by {new} that start anew'
    return f'{head}: its {new} classes start anew without {", ".join(lost)}' if lost else ''


def _differences(theirs: Mapping[str, Any], model: Any) -> str:
    """The fields that determine parameters and differ between two models, for people."""
    differ = {
        key: pair
        for key, pair in _differing(theirs, model).items()
        if key != 'num_classes' and model.effect_of(key) not in ('none', 'outputs')
    }
    there, here = (', '.join(f'{key}={differ[key][i]!r}' for key in differ) for i in (0, 1))
    return f' (the checkpoint has {there}; config.model has {here})' if differ else ''


def _compare_fields(theirs: Mapping[str, Any], model: Any) -> list[str]:
    """Notes on fields that change outputs but no parameter, and differ between two models.

    Raises:
      UserError: if one of them is binding.
    """
    notes = []
    for key, (there, here) in _differing(theirs, model).items():
        effect = model.effect_of(key)
        if effect == 'binding':
            raise UserError(
                f'the checkpoint was trained with {key} {there!r}, config.model has {here!r}: '
                f'set config.model.{key}={there!r}'
            )
        if effect == 'noted':
            notes.append(f'{key}: {here}, but {there} in the checkpoint')
    return notes


def _differing(theirs: Mapping[str, Any], model: Any) -> dict[str, tuple[Any, Any]]:
    """The values, theirs and ours, of fields that both models have and that differ."""
    ours = options.complete(type(model), options.nested_fields(model))
    given = options.leaves(options.regroup(type(model), theirs))
    pairs = {key: (value, ours[key]) for key, value in given if key in ours}
    return {key: (there, here) for key, (there, here) in pairs.items() if there != here}


# Fields of a ViT for parameters that can be folded into others, and their values without these.
_REPLACED: dict[str, Any] = {'layer_scale': None, 'no_bias': '', 'posemb_prefix': 'class'}
# Whether the attention of a Swin or an MAE has biases.
_QKV_BIAS = 'qkv_bias'
# The arrays next to which the layers of `models.vit.BIASES` have their biases.
_BIASED = {
    **{part: rf'(.*/)?block_\d+/attention/{part}/kernel' for part in ('query', 'key', 'value')},
    'out': r'(.*/)?block_\d+/attention/out/kernel',
    'patch_embed': '(.*/)?patch_embed/kernel',
    'mlp': r'(.*/)?block_\d+/mlp/(gate|fc1|fc2)/kernel',
    'norm': r'(.*/)?\w*norm\w*/scale',
    'head': '(.*/)?head(/distillation)?/kernel',
}
# Layer scales and the layers before them.
_SCALED = {'layer_scale1': 'attention/out', 'layer_scale2': 'mlp/fc2'}


def equivalent(trained: TrainedModel, model: Any) -> tuple[dict[str, PyTree], list[str]]:
    """Rewrite a checkpoint's parameters for a model that lacks some kinds of them.

    Layer scale that the model lacks is folded into the layers before it, biases that the checkpoint
    lacks become zero, and positions that the model lacks are added to their tokens. Outputs stay
    the same, but training differs, as the notes say.

    Returns:
      The parameters, and notes for people.
    """
    have, want = (
        {key: found.get(key, plain) for key, plain in _REPLACED.items()}
        for found in (trained.model_config, fields(model))
    )
    biases = [part for part in have['no_bias'].split('|') if part not in want['no_bias'].split('|')]
    folds = have['layer_scale'] is not None and want['layer_scale'] is None
    moves = have['posemb_prefix'] != want['posemb_prefix']
    if not trained.model_config.get(_QKV_BIAS, True) and fields(model).get(_QKV_BIAS):
        note = 'biases of queries, keys and values: zero; the checkpoint has none'
        return with_qkv_biases(trained.params), [note]
    if not (biases or folds or moves):
        return trained.params, []
    from vit_jax.interop import names

    flat, notes = names.flattened(trained.params, have['no_bias']), []
    if folds:
        flat = fold_layer_scale(flat)
        notes.append('layer_scale: folded into the layers that it scales; config.model has none')
    if biases:
        flat = with_biases(flat, biases)
        notes.append(f'biases of {", ".join(biases)}: zero; the checkpoint has none')
    if moves:
        flat = move_positions(flat, have['posemb_prefix'], want['posemb_prefix'])
        notes.append(
            'pos_embed: positions that config.model lacks are added to tokens, new ones are zero'
        )
    absent = '|'.join(part for part in have['no_bias'].split('|') if part not in biases)
    return names.nested(flat, absent), notes


def with_qkv_biases(params: Mapping[str, PyTree]) -> dict[str, PyTree]:
    """Give attention biases of zero; in Swin v2, which has a `logit_scale`, keys have none."""
    flat = traverse_util.flatten_dict(dict(params), sep='/')
    for name, kernel in list(flat.items()):
        attention, is_fused = name.removesuffix('/qkv/kernel'), name.endswith('/qkv/kernel')
        shape = (*kernel.shape[:-4], *kernel.shape[-3:])  # of a kernel [... D 3 H K]
        if is_fused and f'{attention}/logit_scale' in flat:
            parts = [f'{attention}/{part}_bias' for part in ('query', 'value')]
            flat |= dict.fromkeys(parts, np.zeros(shape[-2:], np.float32))
        elif is_fused:
            flat[f'{attention}/qkv/bias'] = np.zeros(shape, np.float32)
    nested: dict[str, PyTree] = traverse_util.unflatten_dict(flat, sep='/')
    return nested


def for_images(
    trained: TrainedModel, scale: tuple[np.ndarray, np.ndarray]
) -> tuple[dict[str, PyTree], list[str]]:
    """Rewrite parameters so that they compute the same for images with another normalization.

    The difference is folded into the embedding of patches. A model without one keeps its
    parameters, and the notes say so.

    Args:
      trained: the checkpoint.
      scale: mean and standard deviation [C or 1] by which images in [0, 1] will be normalized.

    Returns:
      The parameters, and notes for people.
    """
    own, params = pixel_scale(trained.task), trained.params
    if own is None or all(np.allclose(a, b, rtol=1e-6) for a, b in zip(own, scale, strict=True)):
        return params, []
    shown = (
        ', '.join(f'{float(x):.4g}' for x in own[0]),
        ', '.join(f'{float(x):.4g}' for x in own[1]),
    )
    words = f'the checkpoint normalizes by mean {shown[0]}, std {shown[1]}, this task by others'
    embed = params.get('patch_embed', {})
    is_first = any(re.search(p, 'patch_embed/kernel') for p in trained.model.layer_order()[:1])
    if 'kernel' not in embed or not is_first:
        return params, [f'{words}: not accounted for']
    (mean, std), (new_mean, new_std) = own, scale
    kernel = embed['kernel']
    shift = np.sum(kernel * ((new_mean - mean) / std)[:, None], axis=(0, 1, 2))
    patch_embed = {
        'kernel': (kernel * (new_std / std)[:, None]).astype(np.float32),
        'bias': (embed.get('bias', 0) + shift).astype(np.float32),
    }
    return params | {'patch_embed': patch_embed}, [f'{words}: folded into patch_embed']


def fold_layer_scale(flat: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Fold layer scale into the layers before it: gamma * (W x + b) = (gamma W) x + gamma b."""
    folded = dict(flat)
    for name, gamma in flat.items():
        block, _, scale = name.rpartition('/')
        if scale in _SCALED:
            del folded[name]
            for leaf in ('kernel', 'bias'):
                if (path := f'{block}/{_SCALED[scale]}/{leaf}') in flat:
                    folded[path] = flat[path] * gamma
    return folded


def with_biases(flat: Mapping[str, np.ndarray], layers: Iterable[str]) -> dict[str, np.ndarray]:
    """Give layers biases of zero, except those that have a bias."""
    found = {name: shape for layer in layers for name, shape in bias_shapes(flat, layer).items()}
    return {name: np.zeros(shape, np.float32) for name, shape in found.items()} | dict(flat)


def bias_shapes(flat: Mapping[str, np.ndarray], layer: str) -> dict[str, tuple[int, ...]]:
    """The names and shapes of the biases of a layer of `models.vit.BIASES`, present or not.

    `flat` has split projections of attention, as `names.split` makes them.
    """
    in_heads = layer in ('query', 'key', 'value')
    return {
        f'{name.rpartition("/")[0]}/bias': array.shape[1:] if in_heads else array.shape[-1:]
        for name, array in flat.items()
        if re.fullmatch(_BIASED[layer], name)
    }


def move_positions(flat: Mapping[str, np.ndarray], old: str, new: str) -> dict[str, np.ndarray]:
    """Change which tokens before the patches have positions, from `posemb_prefix` `old` to `new`.

    Tokens that gain a position get zeros; tokens that lose theirs have it added to them.
    """
    if 'pos_embed' not in flat:
        return dict(flat)
    tokens = [name for name in ('cls_token', 'dist_token', 'register_tokens') if name in flat]
    counts = {name: flat[name].shape[1] for name in tokens}
    first = sum(count for name, count in counts.items() if name != 'register_tokens')
    rows = {'none': 0, 'class': first, 'all': sum(counts.values())}
    before, patches = np.split(flat['pos_embed'], [rows[old]], axis=1)
    before = np.pad(before, ((0, 0), (0, rows['all'] - rows[old]), (0, 0)))
    kept, lost = np.split(before, [rows[new]], axis=1)
    moved = {**flat, 'pos_embed': np.concatenate([kept, patches], axis=1)}
    at = np.cumsum([0, *counts.values()])
    for name, start, end in zip(tokens, at[:-1], at[1:], strict=True):
        if start >= rows[new]:
            moved[name] = flat[name] + lost[:, start - rows[new] : end - rows[new]]
    return moved


Flat = dict[str, Any]  # '/'-joined path -> array or shape


def select_params(have: Flat, want: Flat, select: str) -> tuple[Flat, Flat, list[str]]:
    """Select parameters.

    Args:
      have: parameters of the checkpoint, blocks unrolled.
      want: parameters of the model, blocks unrolled.
      select: paths, separated by commas: PATH, or THEIRS->OURS if the model has another. A path
        stands for all parameters below it; it may be empty beside an arrow, or hold wildcards.

    Returns:
      The selected parameters of `have` under their new paths; those of `want` that they replace;
      and notes for people on what is read and what is not.

    Raises:
      UserError: if a path does not exist, or two parts are for the same parameter.
    """
    taken: Flat = {}
    wanted: Flat = {}
    notes = []
    for theirs, ours in _parse(select):
        part, place = _below(have, theirs, 'the checkpoint'), _below(want, ours, 'the model')
        moved = {_joined(_plain(ours), rest): leaf for rest, leaf in part.items()}
        if twice := sorted(moved.keys() & taken.keys()):
            raise UserError(f'select={select!r}: two parts are for {twice[0]}')
        taken |= moved
        wanted |= {_joined(_plain(ours), rest): leaf for rest, leaf in place.items()}
        origin = f' from {theirs or "the top"}' if theirs != ours else ''
        notes.append(f'{ours or "the model"}: {len(part)} parameters read{origin}')
    if anew := _subtrees(want.keys() - wanted.keys(), wanted):
        notes.append(f'{", ".join(anew)}: not selected, starts anew')
    return taken, wanted, notes


def _parse(select: str) -> list[tuple[str, str]]:
    """Pairs (path in the checkpoint, path in the model)."""
    pairs = []
    for text in select.split(','):
        theirs, arrow, ours = (part.strip().strip('/') for part in text.partition('->'))
        if not (theirs or arrow) or '->' in ours:
            raise UserError(f'select={select!r}: write PATH or THEIRS->OURS, separated by commas')
        pairs.append((theirs, ours if arrow else theirs))
    return pairs


def _below(flat: Mapping[str, Any], path: str, owner: str) -> Flat:
    """The parameters below a path, by the rest of their own; all of them if it is empty."""
    found = {
        name[len(_plain(path)) :].lstrip('/'): leaf
        for name, leaf in flat.items()
        if not path or any(fnmatch.fnmatchcase(prefix, path) for prefix in _prefixes(name))
    }
    if not found:
        known = {part for name in flat for part in _prefixes(name)}
        close = difflib.get_close_matches(path, sorted(known), n=1, cutoff=0.5)
        hint = f'; did you mean {close[0]!r}?' if close else ''
        top = ', '.join(sorted({name.partition('/')[0] for name in flat}))
        raise UserError(f'select: {owner} has no parameters below {path!r}{hint} (it has: {top})')
    return found


def _plain(path: str) -> str:
    """The part of a path before a pattern."""
    return path.partition('*')[0].rpartition('/')[0] if '*' in path else path


def _subtrees(names: Iterable[str], others: Iterable[str]) -> list[str]:
    """The shortest paths that contain all of `names` and none of `others`."""
    taken = {prefix for name in others for prefix in _prefixes(name)}
    return sorted({next(p for p in _prefixes(name) if p not in taken) for name in names})


def _prefixes(name: str) -> list[str]:
    """'a', 'a/b' and 'a/b/c' of 'a/b/c'."""
    parts = name.split('/')
    return ['/'.join(parts[: i + 1]) for i in range(len(parts))]


def _joined(path: str, rest: str) -> str:
    return '/'.join(part for part in (path, rest) if part)
