"""Rewrite parameters for a model without some kinds of them, with equal outputs.

Layer scale is folded into the layers before it, absent biases become zero, positions are added to
their tokens, and another normalization of images is folded into the patch embedding.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from flax import traverse_util

from vit_jax.interop import names
from vit_jax.interop.trained import TrainedModel, fields, pixel_scale

PyTree = Any

# Fields of a ViT for parameters that can be folded into others, with values for no such parameters.
_REPLACED: dict[str, Any] = {'layer_scale': None, 'no_bias': '', 'posemb_prefix': 'class'}
# Field of a Swin or an MAE: whether its attention has biases.
_QKV_BIAS = 'qkv_bias'
# Arrays next to the biases of the layers of `models.vit.BIASES`.
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


def make_equivalent(trained: TrainedModel, model: Any) -> tuple[dict[str, PyTree], list[str]]:
    """Rewrite a checkpoint's parameters for a model that lacks some kinds of them.

    Layer scale that the model lacks is folded into the layers before it, biases that the checkpoint
    lacks become zero, and positions that the model lacks are added to their tokens. Outputs stay
    the same, but training differs, as the notes say.

    Returns:
      The parameters, and notes for the user.
    """
    have, want = (
        {key: config.get(key, plain) for key, plain in _REPLACED.items()}
        for config in (trained.model_config, fields(model))
    )
    biases = [part for part in have['no_bias'].split('|') if part not in want['no_bias'].split('|')]
    folds = have['layer_scale'] is not None and want['layer_scale'] is None
    moves = have['posemb_prefix'] != want['posemb_prefix']
    if not trained.model_config.get(_QKV_BIAS, True) and fields(model).get(_QKV_BIAS):
        note = 'biases of queries, keys and values are zero; the checkpoint has no biases'
        return with_qkv_biases(trained.params), [note]
    if not (biases or folds or moves):
        return trained.params, []
    flat, notes = names.flatten(trained.params, have['no_bias']), []
    if folds:
        flat = fold_layer_scale(flat)
        notes.append('layer_scale: folded into the scaled layers; config.model has no layer scale')
    if biases:
        flat = with_biases(flat, biases)
        notes.append(f'biases of {", ".join(biases)} are zero; the checkpoint has no biases')
    if moves:
        flat = move_positions(flat, have['posemb_prefix'], want['posemb_prefix'])
        notes.append(
            'pos_embed: positions that config.model lacks are added to tokens; new ones are zero'
        )
    absent = '|'.join(part for part in have['no_bias'].split('|') if part not in biases)
    return names.nest(flat, absent), notes


def with_qkv_biases(params: Mapping[str, PyTree]) -> dict[str, PyTree]:
    """Add attention biases of zero; in Swin v2, which has a `logit_scale`, keys have no biases."""
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


def renormalize(
    trained: TrainedModel, scale: tuple[np.ndarray, np.ndarray]
) -> tuple[dict[str, PyTree], list[str]]:
    """Rewrite parameters so that outputs stay the same for images with a different normalization.

    The difference is folded into the patch embedding. A model without one keeps its parameters, and
    the notes say so.

    Args:
      trained: Checkpoint.
      scale: Mean and standard deviation [C or 1] of the new normalization of images in [0, 1].

    Returns:
      The parameters, and notes for the user.
    """
    old_scale, params = pixel_scale(trained.task), trained.params
    if old_scale is None or all(
        np.allclose(a, b, rtol=1e-6) for a, b in zip(old_scale, scale, strict=True)
    ):
        return params, []
    scales = (
        ', '.join(f'{float(x):.4g}' for x in old_scale[0]),
        ', '.join(f'{float(x):.4g}' for x in old_scale[1]),
    )
    note = (
        f'the checkpoint normalizes by mean {scales[0]}, std {scales[1]}, but the task differently'
    )
    embed = params.get('patch_embed', {})
    is_first = any(re.search(p, 'patch_embed/kernel') for p in trained.model.layer_order()[:1])
    if 'kernel' not in embed or not is_first:
        return params, [f'{note}: not accounted for']
    (mean, std), (new_mean, new_std) = old_scale, scale
    kernel = embed['kernel']
    shift = np.sum(kernel * ((new_mean - mean) / std)[:, None], axis=(0, 1, 2))
    patch_embed = {
        'kernel': (kernel * (new_std / std)[:, None]).astype(np.float32),
        'bias': (embed.get('bias', 0) + shift).astype(np.float32),
    }
    return params | {'patch_embed': patch_embed}, [f'{note}: folded into patch_embed']


def fold_layer_scale(flat: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Fold layer scale into the preceding layers: gamma * (W x + b) = (gamma W) x + gamma b."""
    result = dict(flat)
    for name, gamma in flat.items():
        block, _, scale = name.rpartition('/')
        if scale in _SCALED:
            del result[name]
            for leaf in ('kernel', 'bias'):
                if (path := f'{block}/{_SCALED[scale]}/{leaf}') in flat:
                    result[path] = flat[path] * gamma
    return result


def with_biases(flat: Mapping[str, np.ndarray], layers: Iterable[str]) -> dict[str, np.ndarray]:
    """Add biases of zero to layers without a bias."""
    shapes = {name: shape for layer in layers for name, shape in bias_shapes(flat, layer).items()}
    return {name: np.zeros(shape, np.float32) for name, shape in shapes.items()} | dict(flat)


def bias_shapes(flat: Mapping[str, np.ndarray], layer: str) -> dict[str, tuple[int, ...]]:
    """Return the names and shapes of the biases of a layer of `models.vit.BIASES`, present or not.

    `flat` has split attention projections, see `names.split`.
    """
    in_heads = layer in ('query', 'key', 'value')
    return {
        f'{name.rpartition("/")[0]}/bias': array.shape[1:] if in_heads else array.shape[-1:]
        for name, array in flat.items()
        if re.fullmatch(_BIASED[layer], name)
    }


def move_positions(flat: Mapping[str, np.ndarray], old: str, new: str) -> dict[str, np.ndarray]:
    """Change which tokens before the patches have positions, from `posemb_prefix` `old` to `new`.

    Tokens that gain a position get zeros; tokens that lose their position have it added.
    """
    if 'pos_embed' not in flat:
        return dict(flat)
    tokens = [name for name in ('cls_token', 'dist_token', 'register_tokens') if name in flat]
    counts = {name: flat[name].shape[1] for name in tokens}
    leading = sum(count for name, count in counts.items() if name != 'register_tokens')
    rows = {'none': 0, 'class': leading, 'all': sum(counts.values())}
    before, patches = np.split(flat['pos_embed'], [rows[old]], axis=1)
    before = np.pad(before, ((0, 0), (0, rows['all'] - rows[old]), (0, 0)))
    positioned, removed = np.split(before, [rows[new]], axis=1)
    result = {**flat, 'pos_embed': np.concatenate([positioned, patches], axis=1)}
    bounds = np.cumsum([0, *counts.values()])
    for name, start, end in zip(tokens, bounds[:-1], bounds[1:], strict=True):
        if start >= rows[new]:
            result[name] = flat[name] + removed[:, start - rows[new] : end - rows[new]]
    return result
