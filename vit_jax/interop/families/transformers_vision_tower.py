"""Vision towers of transformers: CLIP, SigLIP and SigLIP 2; safetensors and config.json.

`FILE:vision` reads the vision tower of a file with both towers. CLIP's projection into the space
shared with texts is the head, whose output is the embedding of the image.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from vit_jax.errors import UserError
from vit_jax.interop import names, torch_layout
from vit_jax.interop.families import _transformers, _vit
from vit_jax.interop.families._transformers import HEAD, Fields, Form, without_patch_bias
from vit_jax.interop.files import Flat
from vit_jax.interop.trained import TrainedModel

POSITIONS = 'bicubic'
_PREFIX = 'vision_model.'
BLOCKS = _transformers.blocks(
    'encoder.layers',
    ('layer_norm1', 'norm1'),
    ('self_attn.q_proj', 'attention/query'),
    ('self_attn.k_proj', 'attention/key'),
    ('self_attn.v_proj', 'attention/value'),
    ('self_attn.out_proj', 'attention/out'),
    ('layer_norm2', 'norm2'),
    ('mlp.fc1', 'mlp/fc1'),
    ('mlp.fc2', 'mlp/fc2'),
)
TABLE: names.Table = (
    ('embeddings.class_embedding', 'cls_token'),
    ('embeddings.patch_embedding', 'patch_embed'),
    ('embeddings.position_embedding.weight', 'pos_embed'),
    ('pre_layrnorm', 'norm_pre'),
    *BLOCKS,
    ('post_layernorm', 'encoder/norm'),
    ('head.probe', 'map_head/probe'),
    ('head.attention.q', 'map_head/attention/query'),
    ('head.attention.k', 'map_head/attention/key'),
    ('head.attention.v', 'map_head/attention/value'),
    ('head.attention.out_proj', 'map_head/attention/out'),
    ('head.layernorm', 'map_head/norm'),
    ('head.mlp.fc1', 'map_head/mlp/fc1'),
    ('head.mlp.fc2', 'map_head/mlp/fc2'),
    ('visual_projection', 'head'),
    ('classifier', 'head'),
)
_CLIP = _transformers.Kind(
    'transformers CLIP vision tower',
    (
        *('clip_vision_model', 'clip', 'chinese_clip_vision_model', 'metaclip_2_vision_model'),
        *('metaclip_2', 'altclip_vision_model', 'altclip', 'clipseg_vision_model'),
    ),
    TABLE,
    prefixes=(_PREFIX,),
    unused=('embeddings.position_ids',),
    defaults={
        'hidden_act': 'quick_gelu',
        'layer_norm_eps': 1e-5,
        'num_attention_heads': 12,
    },
)
# A classifier on CLIP averages the patches, without a norm.
_CLASSIFIER = {'pool': 'patches', 'final_norm': False}
_SIGLIP = _transformers.Kind(
    'transformers SigLIP vision tower',
    ('siglip_vision_model', 'siglip', 'siglip2_vision_model', 'siglip2'),
    TABLE,
    prefixes=(_PREFIX,),
    unused=('embeddings.position_ids',),
    defaults={
        'hidden_act': 'gelu_pytorch_tanh',
        'layer_norm_eps': 1e-6,
        'num_attention_heads': 12,
    },
)


def matches(flat: Mapping[str, np.ndarray]) -> bool:
    """Return whether these are the names of such a tower, without CLIP's or SigLIP's text tower.

    Other text towers are allowed.
    """
    names_in_tower = {name.removeprefix(_PREFIX) for name in flat}
    is_tower = 'encoder.layers.0.layer_norm1.weight' in names_in_tower
    has_clip_text = 'text_model.embeddings.token_embedding.weight' in flat
    return is_tower and 'embeddings.patch_embedding.weight' in names_in_tower and not has_clip_text


def read(flat: Flat, extra: Mapping[str, Any]) -> TrainedModel:
    """Read a CLIPVisionModel (its `pooler_output` is our `pre_logits`), with or without projection;
    a SiglipVisionModel or Siglip2VisionModel; or a CLIPForImageClassification or a
    SiglipForImageClassification.

    Raises:
      UserError: if there is also a text tower; if parameters are unknown, missing or have the wrong
        shape, or contradict the config.
    """
    if any(name.startswith('text_model.') for name in flat):
        raise UserError('the file has two towers: choose one, as in FILE:vision')
    if any(name.endswith('class_pos_emb') for name in flat):
        raise UserError("MLCD's rotation of the class token by learned angles is not supported")
    is_clip = any(name.endswith('embeddings.class_embedding') for name in flat)
    kind = _CLIP if is_clip else _SIGLIP
    config = {**extra, **(extra.get('vision_config') or {})}
    config.setdefault('model_type', kind.types[0])
    used = kind.used(flat)
    classifies = is_clip and 'classifier.weight' in used
    if 'classifier.weight' in used:  # the layers in `unused` have no effect
        unused = 'post_layernorm.' if is_clip else 'head.'
        used = {n: a for n, a in used.items() if not kind.plain(n).startswith(unused)}
    used = torch_layout.split_fused(used, kind.source)
    parts = {name: _reshape(kind.plain(name), array) for name, array in used.items()}
    fields: dict[str, Any] = dict(_CLASSIFIER) if classifies else {}
    if 'visual_projection.weight' in parts:
        fields['no_bias'] = 'head'
    return _transformers.read(kind, parts, config, rows=int(is_clip), fields=fields)


def _reshape(name: str, array: np.ndarray) -> np.ndarray:
    """Add the batch axis to tokens and tables; convert SigLIP 2's matrix to a convolution."""
    if name in ('embeddings.class_embedding', 'embeddings.position_embedding.weight'):
        return _transformers.add_batch_axis(array)
    if name == 'embeddings.patch_embedding.weight' and array.ndim == 2:
        side = _vit.square_side(array.shape[1] // 3)
        if side is None or 3 * side**2 != array.shape[1]:
            raise UserError(f'{name} cannot have shape {array.shape}: patches are not RGB squares')
        return array.reshape(len(array), side, side, 3).transpose(0, 3, 1, 2)
    return array


def fuse_projections(flat: Flat) -> Flat:
    """Join the projections of the pooling, as in torch.nn.MultiheadAttention."""
    head = 'head.attention.'
    result = {
        n: a for n, a in flat.items() if not n.startswith(tuple(head + x + '.' for x in 'qkv'))
    }
    for leaf in ('weight', 'bias'):
        parts = [flat[f'{head}{letter}.{leaf}'] for letter in 'qkv']
        result[f'{head}in_proj_{leaf}'] = np.concatenate(parts)
    return result


def _clip(flat: Flat, model: Fields) -> Flat:
    """Move the biases of patches into their positions, and drop the head's biases.

    Raises:
      UserError: if the head has nonzero biases.
    """
    arrays = without_patch_bias(flat, 1)
    arrays['pos_embed'], arrays['cls_token'] = arrays['pos_embed'][0], flat['cls_token'].reshape(-1)
    if np.any(arrays.pop('head/bias', 0)):
        raise UserError(
            'the projection of a CLIP has no biases, but this head has: write an .npz file'
        )
    return arrays


def _clip_classifier(flat: Flat, model: Fields) -> Flat:
    """Keep the biases of the head, and add a norm that it does not use."""
    ones, zeros = np.ones(model['width'], np.float32), np.zeros(model['width'], np.float32)
    norm = {'encoder/norm/scale': ones, 'encoder/norm/bias': zeros}
    head = {name: array for name, array in flat.items() if name.startswith('head/')}
    encoder = {name: array for name, array in flat.items() if name not in head}
    return {**head, **norm, **_clip(encoder, model)}


def _clip_classifier_config(model: Fields) -> dict[str, Any]:
    keys = ('hidden_size', 'num_hidden_layers', 'num_attention_heads', 'intermediate_size')
    more = ('hidden_act', 'layer_norm_eps', 'image_size', 'patch_size', 'num_channels')
    return {'vision_config': {key: model[key] for key in (*keys, *more)}}


def _siglip(flat: Flat, model: Fields) -> Flat:
    return flat | {'pos_embed': flat['pos_embed'][0]}


_PATCHED = {'norm_pre': 'True'}
_UNBIASED = (('patch_embed',),)
FORMS = (
    Form(_CLIP, 'CLIPVisionModel', _PREFIX, _PATCHED, arrays=_clip, no_bias=_UNBIASED),
    Form(
        _CLIP,
        'CLIPVisionModelWithProjection',
        _PREFIX,
        {**HEAD, **_PATCHED},
        config=lambda model: {'projection_dim': model['num_classes']},
        arrays=_clip,
        no_bias=(*_UNBIASED, ('head',)),
    ),
    Form(
        _CLIP,
        'CLIPForImageClassification',
        _PREFIX,
        {**HEAD, **_PATCHED, 'pool': 'patches', 'final_norm': 'False'},
        (('classifier', 'head'),),
        _clip_classifier_config,
        _clip_classifier,
        model_type='clip',
        no_bias=_UNBIASED,
    ),
    Form(
        _SIGLIP,
        'SiglipVisionModel',
        _PREFIX,
        {'pool': 'map'},
        arrays=_siglip,
        named=fuse_projections,
    ),
)
