"""ViTs and hybrids of google-research/vision_transformer and google-research/big_vision: .npz.

There are three sets of names: of Linen's predecessor, which numbers modules within their parent;
of Linen, which numbers them by class; and of big_vision, with positions at the top. GELU is the
tanh approximation, and layer norms add 1e-6.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from vit_jax.errors import UserError
from vit_jax.interop import equivalent, names, normalization
from vit_jax.interop.families import _vit
from vit_jax.interop.files import Flat
from vit_jax.interop.trained import GIVEN_SIZE, TrainedModel, Written
from vit_jax.tree_paths import unroll

_BLOCK = ('Transformer/encoderblock_{0}', 'encoder/block_{0}')
_UNIT = ('block{1}/unit{1}', 'resnet/stage_{0}/block_{0}')
_SCANNED = ('encoderblock', 'encoderblock_')
_MAX_BLOCKS = 1000  # ViTs have up to 64
_ATTENTION, _MLP = 'MultiHeadDotProductAttention_*', 'MlpBlock_*'


def _prefix_rows(parents: tuple[str, str], *rows: tuple[str, str]) -> names.Table:
    their_parent, our_parent = parents
    return tuple((f'{their_parent}/{a}', f'{our_parent}/{b}') for a, b in rows)


# If several rows have the same right side, the first is used for writing: names of Linen.
TABLE: names.Table = (
    ('cls', 'cls_token'),
    ('embedding', 'patch_embed'),
    ('Transformer/posembed_input/pos_embedding', 'pos_embed'),
    ('Transformer/pos_embedding', 'pos_embed'),
    ('pos_embedding', 'pos_embed'),
    *_prefix_rows(
        _BLOCK,
        ('LayerNorm_0', 'norm1'),
        (_ATTENTION, 'attention'),
        ('LayerNorm_1', 'norm2'),
        ('LayerNorm_2', 'norm2'),
        (f'{_MLP}/Dense_0', 'mlp/fc1'),
        (f'{_MLP}/Dense_1', 'mlp/fc2'),
    ),
    ('Transformer/encoder_norm', 'encoder/norm'),
    *_prefix_rows(
        ('MAPHead_*', 'map_head'),
        ('probe', 'probe'),
        (_ATTENTION, 'attention'),
        ('LayerNorm_*', 'norm'),
        (f'{_MLP}/Dense_0', 'mlp/fc1'),
        (f'{_MLP}/Dense_1', 'mlp/fc2'),
    ),
    # An early form of the same head, without a separate module.
    ('probe', 'map_head/probe'),
    (_ATTENTION, 'map_head/attention'),
    ('LayerNorm_*', 'map_head/norm'),
    (f'{_MLP}/Dense_0', 'map_head/mlp/fc1'),
    (f'{_MLP}/Dense_1', 'map_head/mlp/fc2'),
    ('pre_logits', 'pre_logits'),
    ('head', 'head'),
    ('conv_root', 'resnet/root/conv'),
    ('gn_root', 'resnet/root/norm'),
    *_prefix_rows(_UNIT, *((f'conv{i}', f'conv{i}') for i in (1, 2, 3))),
    *_prefix_rows(_UNIT, *((f'gn{i}', f'norm{i}') for i in (1, 2, 3))),
    *_prefix_rows(_UNIT, ('conv_proj', 'proj'), ('gn_proj', 'proj_norm')),
)


def matches(flat: Mapping[str, np.ndarray]) -> bool:
    """Return whether these are the names of such a model."""
    return 'embedding/kernel' in flat and any(n.startswith('Transformer/') for n in flat)


def read(flat: Flat, extra: Mapping[str, Any]) -> TrainedModel:
    """Read a ViT or hybrid from an .npz file; see `files.read_arrays`.

    Raises:
      UserError: if parameters are unknown, missing or have the wrong shape.
    """
    source = _source(flat)
    _require_plausible_depth(flat, source)
    unrolled = unroll(flat, *_SCANNED)
    in_file = names.file_names({name: names.to_ours(name, TABLE) for name in unrolled}, source)
    params = {name: _vector(name, unrolled[file_name]) for name, file_name in in_file.items()}
    hints = [extra[GIVEN_SIZE]] if GIVEN_SIZE in extra else []
    imported = _vit.assemble(
        params,
        source,
        lambda name: in_file.get(name) or _written(name),
        gelu='tanh',
        norm_eps=1e-6,
        hints=hints,
        rows=None if _has_class_row(flat, params, hints) else 0,
        posemb='none' if _is_pre_linen(flat) else 'sincos2d',
    )
    return normalization.with_normalization(
        imported.with_notes(*_describe_assumptions(imported.model_config)), extra
    )


def write(params: Mapping[str, Any], model: Mapping[str, Any]) -> Flat:
    """Convert to the arrays of an .npz file, with Linen's names, which both code bases read.

    Layer scale is folded into the preceding layers, and missing biases become zero.

    Args:
      params: Parameters of a ViT or hybrid, unrolled or scanned.
      model: Keywords of `config.model`, including its name.

    Raises:
      UserError: if the model has parts that the format cannot name.
    """
    if model['name'] not in ('vit', 'hybrid'):
        raise UserError(f'{model["name"]!r} is neither a vit nor a hybrid')
    supported: dict[str, tuple[Any, ...]]
    supported = {'pool': ('cls', 'gap', 'map', 'none'), 'head_norm': ('none',), 'fc_norm': (False,)}
    supported |= {'positions': ('none',), 'norm': ('layer',), 'norm_place': ('pre',)}
    supported |= {'posemb': ('learn', 'sincos2d'), 'final_norm': (True,), 'inner_norm': (False,)}
    supported |= {'pool_heads': (None,), 'pool_mlp_dim': (None,)}
    for field, values in supported.items():
        if model.get(field, values[0]) not in values:
            raise UserError(f'vision_transformer files do not support {field} {model[field]!r}')
    no_bias = model.get('no_bias', '')
    flat = equivalent.fold_layer_scale(names.flatten(params, no_bias))
    flat = equivalent.with_biases(flat, filter(None, no_bias.split('|')))
    arrays = {_written(name): array for name, array in flat.items()}
    if model.get('posemb_prefix') == 'none' and 'pos_embed' in flat:  # only in big_vision
        arrays['pos_embedding'] = arrays.pop(_written('pos_embed'))
    return arrays


def losses(model: Mapping[str, Any]) -> list[str]:
    """Note fields that such a file cannot represent and that its readers set differently."""
    reader_values = {'gelu': 'tanh', 'norm_eps': 1e-6, 'epsilons': 'authors'}
    return [
        f'readers of .npz files use {field} {value}, but this model has {model[field]}'
        for field, value in reader_values.items()
        if model.get(field, value) != value
    ]


def _describe_assumptions(model: Mapping[str, Any]) -> list[str]:
    """Note assumptions about the model, since several models have the same file."""
    notes = []
    if model['posemb'] == 'sincos2d':
        notes.append('the file has no position embedding: assumed to be sincos2d')
    if model['posemb'] == 'none':  # files older than big_vision, the origin of sincos2d
        notes.append('the file has no position embedding: assumed to be a model without positions')
    if model['pool'] == 'gap':
        notes.append(
            "the file has no class token: assumed to have pool_type 'gap'; big_vision's '0' and "
            "'none' have the same arrays"
        )
    return notes


def _written(our_name: str) -> str:
    name = names.to_theirs(our_name, TABLE)
    if name is None:
        raise UserError(f'vision_transformer files have no name for {our_name}')
    return name


def _require_plausible_depth(flat: Flat, source: str) -> None:
    """Raise UserError for tiny scanned blocks: a small file could have millions."""
    for name, array in flat.items():
        if re.search(rf'(^|/){_SCANNED[0]}/', name) and len(np.atleast_1d(array)) > _MAX_BLOCKS:
            raise UserError(f'{source}: {name} {array.shape} has more than {_MAX_BLOCKS} blocks')


def _source(flat: Flat) -> str:
    if _is_pre_linen(flat):
        return 'vision_transformer npz, pre-Linen names'
    if 'Transformer/posembed_input/pos_embedding' in flat:
        return 'vision_transformer npz'
    return 'big_vision npz'


def _is_pre_linen(flat: Flat) -> bool:
    return any(re.search(r'/MultiHeadDotProductAttention_[1-9]/', name) for name in flat)


def _vector(name: str, array: np.ndarray) -> np.ndarray:
    """Flatten group norms, which were once [1 1 1 C]."""
    is_norm = name.startswith('resnet/') and name.endswith(('/scale', '/bias'))
    return array.reshape(-1) if is_norm else array


def _has_class_row(flat: Flat, params: Flat, hints: Sequence[_vit.Size]) -> bool:
    """Return whether the first position belongs to the class token.

    It does if positions are inside the encoder. At the top, as in big_vision, they are added before
    the class token, which has none; but one more than a square includes the class token, unless
    images of the given size have as many patches as there are positions.
    """
    if 'pos_embedding' not in flat:
        return True
    if flat['pos_embedding'].ndim != 3 or _vit.class_row(params, hints) is False:
        return False
    return bool(_vit.square_side(flat['pos_embedding'].shape[1] - 1))


def _npz(imported: TrainedModel) -> Written:
    """Convert to arrays for images in [-1, 1], which readers of such files assume."""
    params, notes = equivalent.renormalize(imported, normalization.RANGE)
    model = imported.model_config
    return Written(write(params, model), notes=(*losses(model), *notes))


WRITERS = {('vit', 'npz'): _npz, ('hybrid', 'npz'): _npz}
