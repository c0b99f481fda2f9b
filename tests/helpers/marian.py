"""Our Transformer's parameters as Marian and Pegasus of transformers have them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

Params = Mapping[str, Any]
State = dict[str, Any]


def state(params: Params) -> State:
    """Tensors of a MarianMTModel (post-norm) or PegasusForConditionalGeneration (pre-norm) by name.

    All but the fixed positions and the bias of the logits, which our model has not.
    """
    import torch

    shared = params['embed']['shared']
    tables = ('model.shared', 'model.encoder.embed_tokens', 'model.decoder.embed_tokens', 'lm_head')
    arrays = {f'{name}.weight': shared for name in tables}
    for side in ('encoder', 'decoder'):
        for name, block in params[side].items():
            arrays |= _block(f'model.{side}.layers.{name[6:]}', block) if name != 'norm' else {}
        if 'norm' in params[side]:
            arrays |= _norm(f'model.{side}.layer_norm', params[side]['norm'])
    return {name: torch.from_numpy(np.array(x)) for name, x in arrays.items()}


def _block(name: str, block: Params) -> State:
    arrays = {
        **_attention(f'{name}.self_attn', block['attention']),
        **_norm(f'{name}.self_attn_layer_norm', block['attention_norm']),
        **_dense(f'{name}.fc1', **block['mlp']['fc1']),
        **_dense(f'{name}.fc2', **block['mlp']['fc2']),
        **_norm(f'{name}.final_layer_norm', block['mlp_norm']),
    }
    if 'cross' in block:
        arrays |= _attention(f'{name}.encoder_attn', block['cross'])
        arrays |= _norm(f'{name}.encoder_attn_layer_norm', block['cross_norm'])
    return arrays


def _attention(name: str, attention: Params) -> State:
    arrays = {}
    kernel, bias = projections(attention)
    for i, projection in enumerate('qkv'):
        arrays |= _dense(f'{name}.{projection}_proj', kernel[:, i], bias[i])
    out = attention['out']
    width = out['bias'].size
    return arrays | _dense(f'{name}.out_proj', out['kernel'].reshape(width, width), out['bias'])


def projections(attention: Params) -> tuple[np.ndarray, np.ndarray]:
    """Kernels [D 3 D] and biases [3 D] of queries, keys and values."""
    names = ('qkv',) if 'qkv' in attention else ('q', 'kv')
    kernel = np.concatenate([attention[name]['kernel'] for name in names], axis=1)
    bias = np.concatenate([attention[name]['bias'] for name in names])
    return kernel.reshape(len(kernel), 3, -1), bias.reshape(3, -1)


def _dense(name: str, kernel: np.ndarray, bias: np.ndarray) -> State:
    return {f'{name}.weight': np.asarray(kernel).T, f'{name}.bias': bias}


def _norm(name: str, norm: Params) -> State:
    return {f'{name}.weight': norm['scale'], f'{name}.bias': norm['bias']}
