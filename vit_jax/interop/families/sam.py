"""Image encoders of Segment Anything: the authors', those of transformers, and timm's `samvit_*`.

The prompt encoder and the mask decoder of whole models are left out, with a note. The authors'
files are pickled: save their arrays as safetensors first. Written are transformers' files.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np

from vit_jax.errors import UserError, resolve
from vit_jax.interop import names, preprocessing, torch_layout
from vit_jax.interop.families import _timm
from vit_jax.interop.families._transformers import gelu
from vit_jax.interop.files import Flat
from vit_jax.interop.trained import TrainedModel, Written, fields
from vit_jax.tree_paths import require_fit

# Interpolation of positions, timm's; the others take one size.
POSITIONS = 'antialiased'
_SOURCE = 'SAM'
_PARTS = (
    ('attn.rel_pos_h', 'attention/rows'),
    ('attn.rel_pos_w', 'attention/columns'),
    *((f'attn.{a}', f'attention/{b}') for a, b in (('q', 'query'), ('k', 'key'), ('v', 'value'))),
    ('attn.proj', 'attention/out'),
)


def _table(block: str, norm: str, fc: str, patches: str, neck: tuple[str, ...]) -> names.Table:
    """The rows of one naming."""
    ours = ('neck_conv_0', 'neck_norm_0', 'neck_conv_1', 'neck_norm_1')
    parts = (
        *_PARTS,
        *((f'{norm}{i}', f'norm{i}') for i in (1, 2)),
        *((f'mlp.{fc}{i}', f'mlp/fc{i}') for i in (1, 2)),
    )
    return (
        ('pos_embed', 'pos_embed'),
        (f'patch_embed.{patches}', 'patch_embed'),
        *((f'{block}.{{0}}.{a}', f'block_{{0}}/{b}') for a, b in parts),
        *((f'neck.{a}', b) for a, b in zip(neck, ours, strict=True)),
    )


_NUMBERED = ('0', '1', '2', '3')
AUTHORS = _table('blocks', 'norm', 'lin', 'proj', _NUMBERED)
TIMM = (*_table('blocks', 'norm', 'fc', 'proj', _NUMBERED), ('neck', 'norm'), ('head.fc', 'head'))
TRANSFORMERS = _table(
    *('layers', 'layer_norm', 'lin', 'projection'),
    ('conv1', 'layer_norm1', 'conv2', 'layer_norm2'),
)
# Of the encoder in a whole model, and its naming.
_PREFIXES = {'vision_encoder.': TRANSFORMERS, 'image_encoder.': AUTHORS, '': TIMM}
# Widths of the published encoders, whose shapes do not determine the heads.
_HEADS = {768: 12, 1024: 16, 1280: 16}
_TABLE = re.compile(r'block_(\d+)/attention/rows')


def matches(flat: Mapping[str, np.ndarray]) -> bool:
    """Whether these are the names of such a model."""
    return _prefix(flat) is not None


def _prefix(flat: Mapping[str, np.ndarray]) -> str | None:
    """What stands before the encoder's names; None if there is no encoder."""
    for prefix in _PREFIXES:
        if any(re.match(rf'{prefix}(blocks|layers)\.0\.attn\.rel_pos_h$', name) for name in flat):
            return prefix
    return None


def read(flat: Flat, extra: Mapping[str, Any]) -> TrainedModel:
    """The image encoder of a SAM.

    Raises:
      UserError: if parameters are unknown, absent or of the wrong shape.
    """
    prefix = _prefix(flat) or ''
    table = _PREFIXES[prefix]
    used = {n.removeprefix(prefix): array for n, array in flat.items() if n.startswith(prefix)}
    others = sorted({name.partition('.')[0] for name in flat if not name.startswith(prefix)})
    if table is TIMM and 'blocks.0.mlp.lin1.weight' in used:
        table = AUTHORS
    arguments = _timm.arguments(extra, _SOURCE) if table is TIMM else {}
    config = {**arguments, **extra, **(extra.get('vision_config') or {})}
    parts = torch_layout.parted(used, _SOURCE)
    in_file = names.renamed({name: torch_layout.ours(name, table) for name in parts}, _SOURCE)

    def label(name: str) -> str:
        return prefix + (in_file.get(name) or torch_layout.theirs(name, table))

    width = names.patches(_kernel(parts, table), _SOURCE, label)[1]
    heads = config.get('num_attention_heads') or config.get('num_heads') or _HEADS.get(width)
    if not heads or width % heads:
        raise UserError(
            f'{_SOURCE}: unknown number of attention heads of a model of width {width}; put its '
            'config.json beside the file'
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
    context = f'{_SOURCE}: not a whole encoder (shapes in our layout)'
    require_fit(arrays, _expected(arrays, module, size), context, label=label)
    imported = TrainedModel.from_file(names.nested(arrays), model, size, _SOURCE)
    if others:
        imported = imported.with_notes(f'the image encoder is read; left out: {", ".join(others)}')
    return preprocessing.with_normalization(imported, extra, preprocessing.UNKNOWN_NORMALIZATION)


def _kernel(parts: Flat, table: names.Table) -> Flat:
    """The kernel of the patches, by our name and in our layout."""
    theirs = torch_layout.theirs('patch_embed/kernel', table)
    kernel = parts.get(theirs)
    if kernel is None or kernel.ndim != 4:
        raise UserError(f'{_SOURCE}: {theirs} is not in the file, or is no convolution')
    return {'patch_embed/kernel': kernel.transpose(2, 3, 1, 0)}


def _flat_positions(table: np.ndarray) -> np.ndarray:
    """[1 h w D] as [1 hw D]."""
    return table.reshape(1, -1, table.shape[-1])


def _image_size(
    arrays: Flat, config: Mapping[str, Any], extra: Mapping[str, Any]
) -> tuple[int, int]:
    """Height and width of the images: of the positions, or those of config.json."""
    patch = arrays['patch_embed/kernel'].shape[0]
    table = arrays.get('pos_embed')
    if table is not None and table.ndim == 4:
        return table.shape[1] * patch, table.shape[2] * patch
    found = config.get('img_size') or (extra.get('pretrained_cfg') or {}).get('input_size')
    if not found:
        raise UserError(f'{_SOURCE}: unknown size of images; put config.json beside the file')
    return (found, found) if isinstance(found, int) else (int(found[-2]), int(found[-1]))


def _keywords(
    arrays: Flat, config: Mapping[str, Any], heads: int, label: Callable[[str], str]
) -> dict[str, Any]:
    """Keywords of `config.model`."""
    shape = functools.partial(names.shape_of, arrays, _SOURCE, label)
    patch_size, width = names.patches(arrays, _SOURCE, label)
    lengths = {int(m[1]): len(a) for n, a in arrays.items() if (m := _TABLE.fullmatch(n))}
    window = config.get('window_size') or (min(lengths.values()) + 1) // 2
    wide = [i for i, length in lengths.items() if length != 2 * window - 1]
    told = config.get('global_attn_indexes')  # some may lie beyond a model made smaller
    return {
        'name': 'sam_encoder',
        'num_classes': shape('head/kernel', 2)[1] if 'head/kernel' in arrays else None,
        'patch_size': patch_size,
        'width': width,
        'depth': names.count(arrays, r'block_(\d+)/'),
        'mlp_dim': shape('block_0/mlp/fc1/kernel', 2)[1],
        'num_heads': heads,
        'window': window,
        'global_blocks': tuple(sorted(wide if told is None else lengths.keys() & set(told))),
        'posemb': 'learn' if 'pos_embed' in arrays else 'none',
        'neck': None if 'norm/scale' in arrays else shape('neck_conv_0/kernel', 4)[3],
    }


def _expected(arrays: Flat, module: Any, size: tuple[int, int]) -> Flat:
    """The shapes of the module's parameters, with split projections."""
    channels = arrays['patch_embed/kernel'].shape[2]
    images = jax.ShapeDtypeStruct((1, *size, channels), np.float32)
    return names.empty_arrays(jax.eval_shape(module.init, jax.random.key(0), images)['params'])


_ACTIVATIONS = {'erf': 'gelu', 'tanh': 'gelu_pytorch_tanh', 'quick': 'quick_gelu'}


def write(trained: TrainedModel) -> Written:
    """Make the files of a SamVisionModel.

    Raises:
      UserError: if it has a head, no neck or no positions, or images that are not squares.
    """
    model = fields(trained.model)
    size = trained.image_size or (0, 0)
    lacking = {
        'a head': model['num_classes'],
        'no neck': model['neck'] is None,
        'no positions': model['posemb'] == 'none',
        f'images of {size[1]} x {size[0]} pixels': size[0] != size[1] or not size[0],
    }
    if reasons := [reason for reason, is_so in lacking.items() if is_so]:
        raise UserError(f'transformers has no SAM encoder with {", ".join(reasons)}')
    flat = names.flattened(trained.params)
    side = size[0] // model['patch_size']
    flat['pos_embed'] = flat['pos_embed'].reshape(1, side, side, -1)
    parts = torch_layout.fused(torch_layout.write(flat, TRANSFORMERS), {'attn': 'qkv'})
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
