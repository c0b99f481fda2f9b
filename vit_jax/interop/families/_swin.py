"""Swin and Swin v2, inferred from the shapes of PyTorch parameters."""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from vit_jax.errors import UserError, resolve
from vit_jax.interop import names, torch_layout
from vit_jax.interop.files import Flat
from vit_jax.interop.trained import GIVEN_SIZE, TrainedModel
from vit_jax.tree_paths import require_fit

Size = tuple[int, int]  # height and width in pixels

BLOCK = 'stage_{0}/block_{0}'
BIAS, SCALE = 'attention/position_bias', 'attention/logit_scale'
# Epsilon of all layer norms in all code bases.
NORM_EPS = 1e-5


def assemble(
    flat: Flat,
    table: names.Table,
    source: str,
    extra: Mapping[str, Any],
    gelu: str = 'erf',
    image_size: Size | None = None,
    windows: Mapping[str, Any] | None = None,
) -> TrainedModel:
    """Build the model, and check that its parameters are complete.

    Args:
      flat: PyTorch's arrays with the names of `table`, attention projections split.
      table: Rows (their name, our name).
      source: Name of the file for messages.
      extra: Parsed config.json; may have the user's image size (`GIVEN_SIZE`).
      gelu: Form of GELU, which shapes do not determine.
      image_size: Height and width that the model was made for; by default the user's, or else the
        size whose last feature map is one window.
      windows: Fields of a Swin v2 that shapes do not determine, with the name for a `swin_v2_cr`;
        None for a Swin.

    Raises:
      UserError: if parameters are unknown, missing, unused or have the wrong shape; it names them.
    """
    names_in_file = names.file_names(
        {name: torch_layout.to_ours(name, table) for name in flat}, source
    )

    def label(name: str) -> str:
        return names_in_file.get(name) or torch_layout.to_theirs(name, table)

    heads = _heads(
        {name: flat[torch_name].shape for name, torch_name in names_in_file.items()}, source, label
    )
    numbers = {f'stage_{i}': number for i, number in enumerate(heads)}
    arrays: Flat = {}
    for group in {_group(name) for name in names_in_file}:
        part = {
            torch_name: flat[torch_name]
            for name, torch_name in names_in_file.items()
            if _group(name) == group
        }
        arrays |= torch_layout.read(part, table, numbers.get(group, 1), source)
    model: dict[str, Any] = {'name': 'swin', 'gelu': gelu, 'norm_eps': NORM_EPS}
    if windows is None:
        arrays = {n: _square(a) if n.endswith(BIAS) else a for n, a in arrays.items()}
        model['window'] = _window(arrays, source)
    elif 'name' in windows:
        model |= windows
    else:
        arrays = _as_v2(arrays)
        pretrained = tuple(windows['pretrained_windows'])[: len(heads)]
        model |= {'name': 'swin_v2', **windows, 'pretrained_windows': pretrained}
    model |= _keywords(arrays, heads, source, label)
    if not any(re.search('/query(/|_)bias$', name) for name in arrays):
        model['qkv_bias'] = False
    fields = {key: value for key, value in model.items() if key != 'name'}
    module = resolve('vit_jax.models', model['name'], 'Model')(**fields)
    context = f'{source}: incomplete model (shapes in our layout)'
    require_fit(arrays, _parameter_shapes(arrays, module), context, label=label)
    side = module.stride * module.window
    size = image_size or extra.get(GIVEN_SIZE) or (side, side)
    return TrainedModel.from_file(names.nest(arrays), model, size, source)


def to_pytorch(params: Mapping[str, Any], table: names.Table) -> Flat:
    """Convert our parameters in the table to PyTorch's arrays, attention projections split."""
    flat: Flat = {}
    for name, array in names.flatten(params).items():
        if name.endswith(BIAS):
            array = array.reshape(-1, array.shape[-1])
        if name.endswith(SCALE):
            array = array.reshape(-1, 1, 1)
        flat[re.sub('/(query|value)_bias$', r'/\1/bias', name)] = array
    return torch_layout.write(flat, table)


def _heads(shapes: Mapping[str, tuple[int, ...]], source: str, label: Any) -> list[int]:
    """Return the number of heads of each stage: the columns of its relative position table, or the
    scales of a Swin v2.
    """
    heads: list[int] = []
    while any(name.startswith(f'stage_{len(heads)}/') for name in shapes):
        block = f'stage_{len(heads)}/block_0/'
        if scales := shapes.get(block + SCALE):
            heads.append(scales[0])
            continue
        name = block + BIAS
        if len(shapes.get(name, ())) != 2:
            raise UserError(f'{source}: {label(name)} is not in the file, or is not a table')
        heads.append(shapes[name][1])
    return heads


def _group(name: str) -> str:
    """Return the stage of a parameter; empty if it is not in a stage."""
    top = name.partition('/')[0]
    return top if top.startswith('stage_') else ''


def _square(table: np.ndarray) -> np.ndarray:
    """Reshape [(2M-1)^2 H] to [2M-1 2M-1 H]; unchanged if the number of rows is not a square."""
    side = math.isqrt(len(table))
    return table.reshape(side, side, -1) if side * side == len(table) else table


def _window(arrays: Flat, source: str) -> int:
    """Return the side of a Swin's windows from its tables."""
    windows = {(len(array) + 1) // 2 for name, array in arrays.items() if name.endswith(BIAS)}
    if len(windows) > 1:
        sizes = ' and '.join(map(str, sorted(windows)))
        raise UserError(f'{source}: windows of {sizes} tokens: only one size is supported')
    return windows.pop() if windows else 1


def _as_v2(arrays: Flat) -> Flat:
    """Reshape scales [H 1 1] to [H], and rename the biases of queries and values."""
    result: Flat = {}
    for name, array in arrays.items():
        name = re.sub('/(query|value)/bias$', r'/\1_bias', name)
        result[name] = array.reshape(-1) if name.endswith(SCALE) else array
    return result


def _keywords(arrays: Flat, heads: list[int], source: str, label: Any) -> dict[str, Any]:
    """Return the keywords of `config.model` that shapes determine."""
    shape = functools.partial(names.shape_of, arrays, source, label)
    patch_size, width = names.patch_shape(arrays, source, label)
    if not heads:
        raise UserError(f'{source}: the model has no blocks')
    return {
        'num_classes': shape('head/kernel', 2)[1] if 'head/kernel' in arrays else None,
        'patch_size': patch_size,
        'width': width,
        'depths': tuple(_blocks(arrays, stage) for stage in range(len(heads))),
        'num_heads': tuple(heads),
        'mlp_ratio': shape('stage_0/block_0/mlp/fc1/kernel', 2)[1] / width,
    }


def _blocks(arrays: Flat, stage: int) -> int:
    """Count the blocks of a stage."""
    indices = {m[1] for name in arrays if (m := re.match(rf'stage_{stage}/block_(\d+)/', name))}
    return len(indices)


def _parameter_shapes(arrays: Flat, module: Any) -> Flat:
    """Return the shapes of the module's parameters, projections split."""
    images = jax.ShapeDtypeStruct(
        (1, module.stride, module.stride, arrays['patch_embed/kernel'].shape[2]), np.float32
    )
    return names.empty_arrays(jax.eval_shape(module.init, jax.random.key(0), images)['params'])
