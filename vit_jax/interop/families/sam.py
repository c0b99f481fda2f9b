"""Image encoders of Segment Anything: the authors', transformers', and timm's `samvit_*`.

The prompt encoder and the mask decoder are ignored, with a note. Files for transformers can be
written.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np

from vit_jax.errors import UserError, resolve
from vit_jax.interop import names, normalization, preprocessing, torch_layout
from vit_jax.interop.families import _timm
from vit_jax.interop.families._transformers import gelu
from vit_jax.interop.files import Flat
from vit_jax.interop.trained import TrainedModel, Written, fields
from vit_jax.tree_paths import require_fit

# Interpolation of positions, timm's; the others only support one size.
POSITIONS = 'antialiased'
_SOURCE = 'SAM'
_PARTS = (
    ('attn.rel_pos_h', 'attention/rows'),
    ('attn.rel_pos_w', 'attention/columns'),
    *((f'attn.{a}', f'attention/{b}') for a, b in (('q', 'query'), ('k', 'key'), ('v', 'value'))),
    ('attn.proj', 'attention/out'),
)


def _table(block: str, norm: str, fc: str, patches: str, neck: tuple[str, ...]) -> names.Table:
    """Build the rows of one naming scheme."""
    our_names = ('neck_conv_0', 'neck_norm_0', 'neck_conv_1', 'neck_norm_1')
    parts = (
        *_PARTS,
        *((f'{norm}{i}', f'norm{i}') for i in (1, 2)),
        *((f'mlp.{fc}{i}', f'mlp/fc{i}') for i in (1, 2)),
    )
    return (
        ('pos_embed', 'pos_embed'),
        (f'patch_embed.{patches}', 'patch_embed'),
        *((f'{block}.{{0}}.{a}', f'block_{{0}}/{b}') for a, b in parts),
        *((f'neck.{a}', b) for a, b in zip(neck, our_names, strict=True)),
    )


_NUMBERED = ('0', '1', '2', '3')
AUTHORS = _table('blocks', 'norm', 'lin', 'proj', _NUMBERED)
TIMM = (*_table('blocks', 'norm', 'fc', 'proj', _NUMBERED), ('neck', 'norm'), ('head.fc', 'head'))
TRANSFORMERS = _table(
    *('layers', 'layer_norm', 'lin', 'projection'),
    ('conv1', 'layer_norm1', 'conv2', 'layer_norm2'),
)
# Prefix of the encoder in a whole model, and its table.
_PREFIXES = {'vision_encoder.': TRANSFORMERS, 'image_encoder.': AUTHORS, '': TIMM}
# Heads by the width of published encoders, since shapes do not determine them.
_HEADS = {768: 12, 1024: 16, 1280: 16}
_TABLE = re.compile(r'block_(\d+)/attention/rows')


def matches(flat: Mapping[str, np.ndarray]) -> bool:
    """Return whether these are the names of such a model."""
    return _prefix(flat) is not None


def _prefix(flat: Mapping[str, np.ndarray]) -> str | None:
    """Return the prefix of the encoder's names; None if there is no encoder."""
    for prefix in _PREFIXES:
        if any(re.match(rf'{prefix}(blocks|layers)\.0\.attn\.rel_pos_h$', name) for name in flat):
            return prefix
    return None


def read(flat: Flat, extra: Mapping[str, Any]) -> TrainedModel:
    """Read the image encoder of a SAM.

    Raises:
      UserError: if parameters are unknown, missing or have the wrong shape.
    """
    prefix = _prefix(flat) or ''
    table = _PREFIXES[prefix]
    used = {n.removeprefix(prefix): array for n, array in flat.items() if n.startswith(prefix)}
    other_parts = sorted({name.partition('.')[0] for name in flat if not name.startswith(prefix)})
    if table is TIMM and 'blocks.0.mlp.lin1.weight' in used:
        table = AUTHORS
    arguments = _timm.arguments(extra, _SOURCE) if table is TIMM else {}
    config = {**arguments, **extra, **(extra.get('vision_config') or {})}
    parts = torch_layout.split_fused(used, _SOURCE)
    in_file = names.file_names({name: torch_layout.to_ours(name, table) for name in parts}, _SOURCE)

    def label(name: str) -> str:
        return prefix + (in_file.get(name) or torch_layout.to_theirs(name, table))

    width = names.patch_shape(_kernel(parts, table), _SOURCE, label)[1]
    heads = config.get('num_attention_heads') or config.get('num_heads') or _HEADS.get(width)
    if not heads or width % heads:
        raise UserError(
            f'{_SOURCE}: unknown number of attention heads of a model of width {width}; put its '
            'config.json next to the file'
        )
    arrays = torch_layout.read(parts, table, heads, _SOURCE)
    size = _image_size(arrays, config, extra)
    arrays = {n: _flat_positions(a) if n == 'pos_embed' else a for n, a in arrays.items()}
    model = _keywords(arrays, config, heads, label)
    if table is TIMM:
        model['gelu'] = _timm.gelu(arguments, _SOURCE)
        norm = arguments.get('norm_layer') or 'LayerNorm(eps=1e-05)'
        model['norm_eps'] = _timm.norm({'norm_layer': norm}, _SOURCE)[1]
    else:
        model['gelu'] = gelu(config, _SOURCE)
        model['norm_eps'] = float(config.get('layer_norm_eps', 1e-6))
    keywords = {key: value for key, value in model.items() if key != 'name'}
    module = resolve('vit_jax.models', model['name'], 'Model')(**keywords)
    context = f'{_SOURCE}: incomplete encoder (shapes in our layout)'
    require_fit(arrays, _parameter_shapes(arrays, module, size), context, label=label)
    imported = TrainedModel.from_file(names.nest(arrays), model, size, _SOURCE)
    if other_parts:
        imported = imported.with_notes(
            f'the image encoder is read; ignored: {", ".join(other_parts)}'
        )
    return normalization.with_normalization(imported, extra, normalization.UNKNOWN_NORMALIZATION)


def _kernel(parts: Flat, table: names.Table) -> Flat:
    """Return the patch kernel in our layout."""
    torch_name = torch_layout.to_theirs('patch_embed/kernel', table)
    kernel = parts.get(torch_name)
    if kernel is None or kernel.ndim != 4:
        raise UserError(f'{_SOURCE}: {torch_name} is not in the file, or is not a convolution')
    return {'patch_embed/kernel': kernel.transpose(2, 3, 1, 0)}


def _flat_positions(table: np.ndarray) -> np.ndarray:
    """Reshape [1 h w D] to [1 hw D]."""
    return table.reshape(1, -1, table.shape[-1])


def _image_size(
    arrays: Flat, config: Mapping[str, Any], extra: Mapping[str, Any]
) -> tuple[int, int]:
    """Return height and width of the images from the positions or config.json."""
    patch = arrays['patch_embed/kernel'].shape[0]
    table = arrays.get('pos_embed')
    if table is not None and table.ndim == 4:
        return table.shape[1] * patch, table.shape[2] * patch
    size = config.get('img_size') or (extra.get('pretrained_cfg') or {}).get('input_size')
    if not size:
        raise UserError(f'{_SOURCE}: unknown image size; put config.json next to the file')
    return (size, size) if isinstance(size, int) else (int(size[-2]), int(size[-1]))


def _keywords(
    arrays: Flat, config: Mapping[str, Any], heads: int, label: Callable[[str], str]
) -> dict[str, Any]:
    """Return the keywords of `config.model`."""
    shape = functools.partial(names.shape_of, arrays, _SOURCE, label)
    patch_size, width = names.patch_shape(arrays, _SOURCE, label)
    lengths = {int(m[1]): len(a) for n, a in arrays.items() if (m := _TABLE.fullmatch(n))}
    window = config.get('window_size') or (min(lengths.values()) + 1) // 2
    wide = [i for i, length in lengths.items() if length != 2 * window - 1]
    global_blocks = config.get('global_attn_indexes')  # may exceed the depth of a reduced model
    return {
        'name': 'sam_encoder',
        'num_classes': shape('head/kernel', 2)[1] if 'head/kernel' in arrays else None,
        'patch_size': patch_size,
        'width': width,
        'depth': names.count_blocks(arrays, r'block_(\d+)/'),
        'mlp_dim': shape('block_0/mlp/fc1/kernel', 2)[1],
        'num_heads': heads,
        'window': window,
        'global_blocks': tuple(
            sorted(wide if global_blocks is None else lengths.keys() & set(global_blocks))
        ),
        'posemb': 'learn' if 'pos_embed' in arrays else 'none',
        'neck': None if 'norm/scale' in arrays else shape('neck_conv_0/kernel', 4)[3],
    }


def _parameter_shapes(arrays: Flat, module: Any, size: tuple[int, int]) -> Flat:
    """Return the shapes of the module's parameters, projections split."""
    channels = arrays['patch_embed/kernel'].shape[2]
    images = jax.ShapeDtypeStruct((1, *size, channels), np.float32)
    return names.empty_arrays(jax.eval_shape(module.init, jax.random.key(0), images)['params'])


_ACTIVATIONS = {'erf': 'gelu', 'tanh': 'gelu_pytorch_tanh', 'quick': 'quick_gelu'}


def write(trained: TrainedModel) -> Written:
    """Write the files of a SamVisionModel.

    Raises:
      UserError: if the model has a head, no neck or no positions, or images are not square.
    """
    model = fields(trained.model)
    size = trained.image_size or (0, 0)
    lacking = {
        'a head': model['num_classes'],
        'no neck': model['neck'] is None,
        'no positions': model['posemb'] == 'none',
        f'images of {size[1]} x {size[0]} pixels': size[0] != size[1] or not size[0],
    }
    if reasons := [reason for reason, is_lacking in lacking.items() if is_lacking]:
        raise UserError(f'transformers has no SAM encoder with {", ".join(reasons)}')
    flat = names.flatten(trained.params)
    side = size[0] // model['patch_size']
    flat['pos_embed'] = flat['pos_embed'].reshape(1, side, side, -1)
    parts = torch_layout.join_fused(torch_layout.write(flat, TRANSFORMERS), {'attn': 'qkv'})
    arrays = {f'vision_encoder.{n}': array for n, array in parts.items()}
    config = {
        'model_type': 'sam_vision_model',
        'architectures': ['SamVisionModel'],
        'hidden_size': model['width'],
        'num_hidden_layers': model['depth'],
        'num_attention_heads': model['num_heads'],
        'mlp_dim': model['mlp_dim'],
        'output_channels': model['neck'],
        'image_size': size[0],
        'patch_size': model['patch_size'],
        'num_channels': trained.channels,
        'window_size': model['window'],
        'global_attn_indexes': list(model['global_blocks']),
        'hidden_act': _ACTIVATIONS[model['gelu']],
        'layer_norm_eps': model['norm_eps'],
    }
    preprocessor = preprocessing.preprocessor(trained, trained.channels, size)
    return Written(arrays, config, (), preprocessor)


WRITERS = {('sam_encoder', 'transformers'): write}
