"""Parameters of one model fitted to another: its head, image size, patch size, scanned blocks.

Whatever differs beyond that is an error that names the parameters.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import numpy as np
from flax import traverse_util

from vit_jax.errors import UserError
from vit_jax.ops import resize

PyTree = Any
Grid = tuple[int, int]  # rows and columns of patches
_FAULTS_NAMED = 5


def adapt(
    params: Mapping[str, PyTree],
    target: Mapping[str, PyTree],
    *,
    old_grid: Grid | None = None,
    new_grid: Grid | None = None,
    posemb: str = 'bilinear',
) -> tuple[dict[str, PyTree], list[str]]:
    """Makes parameters fit a model.

    A head for another number of classes is left out, and so is one of a model with `pre_logits`
    where `target` has none, for it was trained on their outputs. `pos_embed` is resized when the
    grid of patches differs, even between grids of as many patches, and `patch_embed` when the
    patch size does (FlexiViT, arXiv:2212.08013, section 3.4). Blocks may be scanned or unrolled
    on either side.

    Args:
      params: nested numpy arrays.
      target: nested shapes of the model's parameters, or arrays.
      old_grid: of the patches that `pos_embed` has rows for; if None it is taken to be a square.
      new_grid: of the patches of the images to come; None if the model has no `pos_embed`.
      posemb: 'bilinear' or 'bicubic'; see `ops.resize.position_embedding`.

    Returns:
      Parameters nested like `target`, without those that keep the initial value of the model; and
      what was changed, as notes for people.

    Raises:
      UserError: if a parameter is missing, unknown or of another shape; it names both shapes.
    """
    have, want = _flat(params), jax.eval_shape(_flat, target)
    dropped, notes = _drop_pre_logits(have, want)
    notes += _fit_head(have, want, renew=dropped)
    notes += _resize_positions(have, want, old_grid, new_grid, posemb)
    notes += _resize_patches(have, want)
    _require_fit(have, want)
    arrays = {name: np.asarray(have[name], want[name].dtype) for name in want}
    return _nest(arrays, target), notes


def overlay(initial: Mapping[str, PyTree], given: Mapping[str, PyTree]) -> dict[str, PyTree]:
    """`initial` with the leaves that `given` has instead of its own."""
    merged = dict(initial)
    for key, value in given.items():
        merged[key] = overlay(initial[key], value) if isinstance(value, Mapping) else value
    return merged


def unroll(params: Mapping[str, PyTree]) -> dict[str, PyTree]:
    """Scanned `blocks`, stacked on axis 0, as `block_0`, `block_1`, ...; the rest as it is."""
    return traverse_util.unflatten_dict(_flat(params), sep='/')


def _flat(params: Mapping[str, PyTree]) -> dict[str, Any]:
    """Arrays by '/'-joined names of unrolled blocks."""
    return {
        unrolled: array if i is None else array[i]
        for name, array in traverse_util.flatten_dict(dict(params), sep='/').items()
        for i, unrolled in _unrolled(name, array)
    }


def _unrolled(name: str, array: Any) -> Iterator[tuple[int | None, str]]:
    """The names that a scanned parameter has in each block, or its own."""
    encoder, blocks, rest = name.partition('/blocks/')
    if not blocks:
        yield None, name
        return
    for i in range(array.shape[0]):
        yield i, f'{encoder}/block_{i}/{rest}'


def _nest(flat: Mapping[str, np.ndarray], target: Mapping[str, PyTree]) -> dict[str, PyTree]:
    """The inverse of `_flat` for those names of `target` that are in `flat`."""
    nested = {}
    for name, leaf in traverse_util.flatten_dict(dict(target), sep='/').items():
        arrays = [flat[unrolled] for _, unrolled in _unrolled(name, leaf) if unrolled in flat]
        if arrays:
            nested[name] = np.stack(arrays) if '/blocks/' in name else arrays[0]
    return traverse_util.unflatten_dict(nested, sep='/')


def _drop_pre_logits(have: dict[str, Any], want: Mapping[str, Any]) -> tuple[bool, list[str]]:
    names = ('pre_logits/kernel', 'pre_logits/bias')
    if names[0] not in have or names[0] in want:
        return False, []
    for name in names:
        have.pop(name, None)
    return True, ['pre_logits: left out, the model has none']


def _fit_head(have: dict[str, Any], want: dict[str, Any], renew: bool) -> list[str]:
    """Takes the head out of both where it does not fit, so that it keeps its initial value."""
    old, new = (tree.get('head/kernel') for tree in (have, want))
    if new is None:
        note = 'head: left out, the model has none'
    elif old is None:
        note = f'head: none to read, {new.shape[-1]} classes start anew'
    elif old.shape[-1] != new.shape[-1]:
        note = f'head: {old.shape[-1]} classes replaced by {new.shape[-1]} that start anew'
    elif renew:
        note = f'head: its {new.shape[-1]} classes start anew without pre_logits'
    else:
        return []
    for tree in (have, want):
        for name in ('head/kernel', 'head/bias'):
            tree.pop(name, None)
    return [note] if old is not None or new is not None else []


def _resize_positions(
    have: dict[str, Any],
    want: Mapping[str, Any],
    old_grid: Grid | None,
    new_grid: Grid | None,
    method: str,
) -> list[str]:
    old, new = (tree.get('pos_embed') for tree in (have, want))
    if old is None or new is None or new_grid is None or old.shape[-1] != new.shape[-1]:
        return []
    prefix = new.shape[1] - math.prod(new_grid)
    old_grid = old_grid or _square(old.shape[1] - prefix)
    if old_grid is None and old.shape != new.shape:
        raise UserError(
            f'pos_embed has rows for {old.shape[1] - prefix} patches, which form no square, and '
            f'cannot be resized to {new_grid[0]} x {new_grid[1]}'
        )
    if old_grid in (None, new_grid) or old.shape[1] - math.prod(old_grid) != prefix:
        return []
    have['pos_embed'] = resize.position_embedding(old, old_grid, new_grid, method, prefix)
    sizes = (f'{height} x {width}' for height, width in (old_grid, new_grid))
    return [f'pos_embed: {" patches resized to ".join(sizes)} ({method})']


def _square(patches: int) -> Grid | None:
    side = math.isqrt(max(patches, 0))
    return (side, side) if side * side == patches else None


def _resize_patches(have: dict[str, Any], want: Mapping[str, Any]) -> list[str]:
    old, new = (tree.get('patch_embed/kernel') for tree in (have, want))
    if old is None or new is None or old.shape == new.shape or old.shape[2:] != new.shape[2:]:
        return []
    have['patch_embed/kernel'] = resize.pinv_patch_kernel(old, new.shape[:2])
    sizes = (f'{height} x {width}' for height, width, *_ in (old.shape, new.shape))
    return [f'patch_embed: {" resized to ".join(sizes)}']


def _require_fit(have: Mapping[str, Any], want: Mapping[str, Any]) -> None:
    faults = [
        f'{name} has shape {have[name].shape} instead of {want[name].shape}'
        for name in want
        if name in have and have[name].shape != want[name].shape
    ]
    faults += [f'{name} {want[name].shape} is missing' for name in want if name not in have]
    faults += [f'{name} {have[name].shape} is unknown' for name in have if name not in want]
    if faults:
        more = f'; and {len(faults) - _FAULTS_NAMED} more' if len(faults) > _FAULTS_NAMED else ''
        raise UserError(f'does not fit the model: {"; ".join(faults[:_FAULTS_NAMED])}{more}')
