"""The arguments of timm's ViTs: those of an architecture, and those that config.json changes.

The table beside this file has the arguments of each architecture that shapes do not determine.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Mapping
from pathlib import Path
from textwrap import shorten
from typing import Any

from vit_jax.errors import UserError

Arguments = Mapping[str, Any]

TABLE = Path(__file__).with_name('timm_architectures.json')
# Defaults of the constructors that are read.
_DEFAULTS: dict[str, dict[str, Any]] = {
    'VisionTransformer': {'global_pool': 'token'},
    'VisionTransformerDistilled': {'global_pool': 'token'},
    'Beit': {'global_pool': 'avg'},
    'Eva': {'global_pool': 'avg'},
}
_REFUSED = {
    'NaFlexVit': 'it takes patches of images of any size (NaFlexViT)',
    'VisionTransformerRelPos': 'it has relative positions (RelPos)',
    'VisionTransformerSAM': 'it has windows and relative positions (SAM)',
}
_RES_POST = 'ResPostBlock'
# Arguments of parts that no model here has, and the values that mean that the part is not there.
_PLAIN = {
    'attn_layer': (None, '', 'Attention'),
    'block_fn': (None, '', 'Block', _RES_POST),
    'mlp_layer': (None, '', 'Mlp', 'mlp', 'SwiGLU', 'GluMlp(gate_last=False)'),
    'pos_embed': ('learn',),
    'pool_include_prefix': (False,),
    'num_kv_heads': (None,),
    'padding_same': (True,),
    'gated_attn': (False,),
    'rope_type': (None, '', 'cat', 'dinov3'),
}
_GELUS = {None: 'erf', 'gelu': 'erf', 'GELU': 'erf', 'gelu_tanh': 'tanh', 'quick_gelu': 'quick'}
_SILUS = ('silu', 'SiLU', 'swish')
_NORM = re.compile(r'(layer|rms)_?norm(?:\(eps=([-\de.]+)\))?', re.IGNORECASE)
_NORM_EPS = 1e-6
_THETA = 10_000.0


def arguments(extra: Mapping[str, Any], source: str) -> Arguments:
    """The arguments of the model that config.json describes; its own take precedence.

    Raises:
      UserError: if the architecture has a part that no model here has.
    """
    known = architectures().get(architecture(extra), {})
    kind = known.get('class', '')
    if kind in _REFUSED:
        raise UserError(
            f'{source}: no model here is like {extra["architecture"]!r}: {_REFUSED[kind]}'
        )
    said = {key: extra[key] for key in ('global_pool',) if key in extra}
    changed = extra.get('model_args') or {}
    found = {**_DEFAULTS.get(kind, {}), **known, **said, **changed}
    if 'num_heads' in changed:
        found['embed_dim'] = changed.get('embed_dim')
    for key, plain in _PLAIN.items():
        if key in found and found[key] not in plain:
            raise UserError(
                f'{source}: no model here is like {extra.get("architecture")!r}: its {key} is '
                + shorten(repr(found[key]), 60, placeholder=' ...')
            )
    return found


def architecture(extra: Mapping[str, Any]) -> str:
    """The name of the architecture without that of its weights; empty if there is none."""
    return str(extra.get('architecture') or '').partition('.')[0]


def num_heads(found: Arguments, width: int) -> int | None:
    """The number of heads; None if neither the architecture nor config.json tells it.

    Args:
      found: the arguments.
      width: of the model in the file. If it is not that of the architecture, the number of heads is
        not either, unless config.json says that the width alone was changed.
    """
    heads = found.get('num_heads')
    return heads if heads and (found.get('embed_dim') or width) == width else None


def gelu(found: Arguments, source: str, gated: bool = False) -> str:
    """Our name of the activation; any for MLPs with gates, which have SiLU.

    Raises:
      UserError: if it is none of ours, or another one is of the gates.
    """
    name = found.get('act_layer')
    if gated and (name in _SILUS or found.get('class') == 'Eva'):
        return 'erf'
    if name not in _GELUS or gated:
        raise UserError(f'{source}: act_layer {name!r} is not supported')
    return _GELUS[name]


def norm(found: Arguments, source: str) -> tuple[str, float]:
    """Our name of the norm, and the number that it adds to the variance.

    Raises:
      UserError: if it is none of ours.
    """
    name = found.get('norm_layer') or 'LayerNorm'
    if not (match := _NORM.fullmatch(str(name))):
        raise UserError(f'{source}: norm_layer {name!r} is not supported')
    return match[1].lower(), float(match[2] or _NORM_EPS)


def norm_place(found: Arguments) -> dict[str, str]:
    """The field of norms that come after the layers, if they do."""
    is_post = found.get('block_fn') == _RES_POST or found.get('use_post_norm')
    return {'norm_place': 'res_post'} if is_post else {}


def final_norm(found: Arguments) -> dict[str, bool]:
    """The field of models without a norm after the blocks, which also have none of the mean."""
    no_norm = False in (found.get('final_norm'), found.get('use_post_transformer_norm'))
    return {'final_norm': False} if no_norm else {}


def positions(found: Arguments, source: str) -> str:
    """Our `positions`: rotary ones of EVA-02, PE and DINOv3, or 'none'.

    Raises:
      UserError: if they are of a form that is not ours.
    """
    if not found.get('use_rot_pos_emb'):
        return 'none'
    is_dinov3, half = found.get('rope_type') == 'dinov3', bool(found.get('rope_rotate_half'))
    offset, order = found.get('rope_grid_offset', 0.0), found.get('rope_grid_indexing', 'ij')
    shape = found.get('ref_feat_shape') or 0
    sides = set(shape) if isinstance(shape, list | tuple) else {shape}
    if half != is_dinov3 or len(sides) != 1 or (is_dinov3 and (offset or order == 'xy')):
        raise UserError(f'{source}: rotary positions of this form are not supported')
    theta = float(found.get('rope_temperature', _THETA))
    if is_dinov3:
        rescale = float(found.get('rope_rescale_coords') or 1.0)
        return f'rope_dinov3({theta=}, {rescale=})'
    reference, order = sides.pop(), 'xy' if order == 'xy' else 'yx'
    return f'rope({theta=}, {reference=}, offset={float(offset)}, {order=})'


@functools.cache
def architectures() -> Mapping[str, Arguments]:
    """Arguments by the name of the architecture, `class` being the model's constructor."""
    table: dict[str, Arguments] = json.loads(TABLE.read_text())
    return table
