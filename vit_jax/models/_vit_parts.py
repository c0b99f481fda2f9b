"""The parts that the fields of a ViT choose by name, as in `mlp='swiglu(norm=True)'`."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import flax.linen as nn
from jax import Array

from vit_jax import calls
from vit_jax.errors import UserError, check_choice, nearest
from vit_jax.nn.blocks import Parts
from vit_jax.nn.mlps import MLPS
from vit_jax.nn.norms import LayerNorm, RMSNorm
from vit_jax.nn.relative_positions import Relative, relative
from vit_jax.nn.rotary import Draw, Layout, Rotary, rope, rope_dinov3
from vit_jax.signatures import keyword_only

NORMS: Mapping[str, Callable[..., nn.Module]] = {'layer': LayerNorm, 'rms': RMSNorm}
QK_NORMS = ('none', *NORMS)
# Functions of the layout of the tokens, the width of a head and a source of random keys, and of the
# options after the `*`.
POSITIONS: Mapping[str, Callable[..., Rotary | Relative]] = {
    **{'rope': rope, 'rope_dinov3': rope_dinov3},
    'relative': relative,
}
NORM_PLACES = ('pre', 'post', 'res_post')
# The layers of a ViT that may have no bias; those of attention come first.
PROJECTIONS = ('query', 'key', 'value', 'out')
BIASES = (*PROJECTIONS, 'patch_embed', 'mlp', 'norm', 'head')


def chosen(field: str, text: str, choices: Mapping[str, Callable]) -> Callable:
    """The choice that a field names, with the options in its text.

    Args:
      field: its name, for messages.
      text: a choice, with options or without: 'swiglu(norm=True)'.
      choices: functions by name, whose keywords after the `*` are the options.

    Raises:
      UserError: if there is no such choice or option, or an option has another type.
    """
    name, options = calls.parse_keywords(text, f'{field}={text!r}')
    check_choice(field, name, choices)
    known = keyword_only(choices[name])
    for key, value in options.items():
        if key not in known:
            raise UserError(f'{field}={text!r}: {nearest("option", key, known)}')
        default = known[key].default
        if not _is_like(value, default):
            raise UserError(f'{field}={text!r}: {key} must be like {default!r}, not {value!r}')
    return functools.partial(choices[name], **options)


def _is_like(value: Any, default: Any) -> bool:
    """Whether a value has the type of a default; whole numbers are floats, too."""
    if isinstance(value, bool) or isinstance(default, bool):
        return isinstance(value, bool) and isinstance(default, bool)
    return isinstance(value, (int, float) if isinstance(default, float) else type(default))


def without_bias(text: str) -> frozenset[str]:
    """The layers of BIASES in a text such as 'query|key'.

    Raises:
      UserError: if there is no such layer.
    """
    layers = frozenset(filter(None, (layer.strip() for layer in text.split('|'))))
    for layer in sorted(layers):
        check_choice('layer of no_bias', layer, BIASES)
    return layers


def norm(model: Any) -> Callable[..., nn.Module]:
    """The norm of the fields `norm` and `no_bias`, called as `Parts.norm` is."""
    return _norm(model.norm, model.no_bias)


def _norm(name: str, no_bias: str) -> Callable[..., nn.Module]:
    kind = NORMS[name]
    plain = kind is LayerNorm and 'norm' in without_bias(no_bias)
    return functools.partial(kind, use_bias=False) if plain else kind


def positions(
    model: Any, grid: tuple[int, int], draw: Draw | None
) -> tuple[Rotary | Array | None, Callable[[], nn.Module] | None]:
    """The positions that attention knows, of the field `positions`.

    Args:
      model: a ViT, to which a layer `position_bias` is added if all blocks share one.
      grid: rows and columns of patches.
      draw: a source of random keys in training; else None.

    Returns:
      Positions for all blocks, and a function that makes a layer for each of them.
    """
    found = _placed(model, grid, draw)
    if not isinstance(found, Relative):
        return found, None
    if found.shared:
        return found.bias(model.num_heads, name='position_bias')(), None
    return None, functools.partial(found.bias, model.num_heads)


def _placed(model: Any, grid: tuple[int, int], draw: Draw | None) -> Rotary | Relative | None:
    if model.positions == 'none':
        return None
    layout = Layout(grid, model.positioned_tokens, model.registers)
    make = chosen('positions', model.positions, POSITIONS)
    return make(layout, model.width // model.num_heads, draw)


def block(model: Any, relative: Callable[[], nn.Module] | None = None) -> Parts:
    """The parts of the blocks that the fields of a ViT choose; see `positions` for `relative`."""
    absent = without_bias(model.no_bias)
    make_mlp = chosen('mlp', model.mlp, MLPS)
    return Parts(
        norm=norm(model),
        mlp=make_mlp(functools.partial(norm(model), model.norm_eps), 'mlp' not in absent),
        layer_scale=model.layer_scale,
        no_bias=tuple(name for name in PROJECTIONS if name in absent),
        qk_norm=None if model.qk_norm == 'none' else _qk_norm(model),
        relative=relative,
        norm_place=model.norm_place,
    )


def _qk_norm(model: Any) -> Callable[..., nn.Module]:
    return functools.partial(_norm(model.qk_norm, model.no_bias), model.norm_eps)


def check(model: Any) -> None:
    """Raise UserError if a field of a ViT names no part."""
    check_choice('norm', model.norm, NORMS)
    check_choice('qk_norm', model.qk_norm, QK_NORMS)
    check_choice('norm_place', model.norm_place, NORM_PLACES)
    if model.registers < 0:
        raise UserError(f'registers must be at least 0, not {model.registers}')
    block(model)
    _placed(model, (1, 1), None)
