"""OpenCLIP: open_clip_model.safetensors, and open_clip_config.json.

A CLIP of a ViT and a causal text tower is one of transformers under other names, and is read under
the names of transformers.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np

from vit_jax.errors import UserError
from vit_jax.interop import names, preprocessing, torch_layout
from vit_jax.interop.families import transformers_clip
from vit_jax.interop.files import Flat
from vit_jax.interop.hub import OPEN_CLIP
from vit_jax.interop.trained import TrainedModel

POSITIONS = 'antialiased'
_SOURCE = 'OpenCLIP'
_VISUAL, _TEXT = 'visual.', 'text.'  # the second only with `custom_text`
# Names of parts, and those of transformers.
_BLOCK = (
    ('ln_1', 'layer_norm1'),
    ('attn.q', 'self_attn.q_proj'),
    ('attn.k', 'self_attn.k_proj'),
    ('attn.v', 'self_attn.v_proj'),
    ('attn.out_proj', 'self_attn.out_proj'),
    ('ln_2', 'layer_norm2'),
    ('mlp.c_fc', 'mlp.fc1'),
    ('mlp.c_proj', 'mlp.fc2'),
)
_BLOCKS = tuple(
    (f'transformer.resblocks.{{0}}.{a}', f'encoder.layers.{{0}}.{b}') for a, b in _BLOCK
)
_TABLE: names.Table = (
    ('visual.class_embedding', 'vision_model.embeddings.class_embedding'),
    ('visual.conv1', 'vision_model.embeddings.patch_embedding'),
    ('visual.positional_embedding', 'vision_model.embeddings.position_embedding.weight'),
    ('visual.ln_pre', 'vision_model.pre_layrnorm'),
    ('visual.ln_post', 'vision_model.post_layernorm'),
    ('visual.proj', 'visual_projection.weight'),
    *((_VISUAL + a, f'vision_model.{b}') for a, b in _BLOCKS),
    ('token_embedding', 'text_model.embeddings.token_embedding'),
    ('positional_embedding', 'text_model.embeddings.position_embedding.weight'),
    ('ln_final', 'text_model.final_layer_norm'),
    ('text_projection.weight', 'text_projection.weight'),
    ('text_projection', 'text_projection.weight'),
    ('logit_scale', 'logit_scale'),
    *((a, f'text_model.{b}') for a, b in _BLOCKS),
)
# Stored as [in out], transposed from the weight of a dense layer.
_TRANSPOSED = ('visual.proj', 'text_projection')
_UNUSED = ('attn_mask',)
# Keys of the towers' configs for parts that no model here has, and the values that leave them out.
_PLAIN: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(('timm_model_name', 'hf_model_name', 'ls_init_value', 'block_type'), (None,)),
    **dict.fromkeys(('attentional_pool', 'no_ln_pre', 'final_ln_after_pool'), (False,)),
    **dict.fromkeys(('embed_cls', 'no_causal_mask', 'proj_bias', 'qk_norm'), (False,)),
    **dict.fromkeys(('scaled_cosine_attn', 'scale_heads', 'scale_attn_inner'), (False,)),
    **dict.fromkeys(('scale_attn', 'scale_fc'), (False,)),
    **{'pos_embed_type': ('learnable', 'learned'), 'pool_type': ('tok', 'argmax')},
    **{'text_arch': ('clip',), 'proj_type': ('linear',), 'act_kwargs': (None, {})},
}
_RESIZING = {'shortest': 'center', 'squash': 'squash'}  # resize_mode: timm's crop_mode


def matches(flat: Mapping[str, np.ndarray]) -> bool:
    """Whether these are the names of an image tower and a text tower."""
    has_text = any(f'{text}token_embedding.weight' in flat for text in ('', _TEXT))
    visual = ('visual.conv1.weight', 'visual.trunk.patch_embed.proj.weight')
    return has_text and not flat.keys().isdisjoint(visual)


def read(flat: Flat, extra: Mapping[str, Any]) -> TrainedModel:
    """A CLIP or CustomTextCLIP, as the model `clip`.

    Raises:
      UserError: if parameters are unknown, absent or of the wrong shape, or it has a part that
        none of transformers' CLIPs has.
    """
    arrays, config = translated(flat, extra)
    try:
        imported = transformers_clip.read(arrays, config)
    except UserError as error:
        raise UserError(f'{_SOURCE}, by the names of transformers: {error}') from None
    recipe = preprocessing.read_recipe(config, imported.image_size)
    text = recipe.text if recipe else ''
    notes = preprocessing.transform_notes(config, text)
    imported = imported.with_groups(data={**imported.config.data, 'transforms': text})
    return dataclasses.replace(imported.with_notes(*notes), source=_SOURCE)


def translated(flat: Flat, extra: Mapping[str, Any]) -> tuple[Flat, dict[str, Any]]:
    """The arrays and the config that transformers has for this CLIP.

    Raises:
      UserError: if a part or a key of the config is of another model.
    """
    config = _config(extra)
    parts = {name.removeprefix(_TEXT): array for name, array in flat.items()}
    parts = {name: array for name, array in parts.items() if name not in _UNUSED}
    parts = torch_layout.parted(parts, _SOURCE)
    found = names.renamed({name: names.ours(name, _TABLE) for name in parts}, _SOURCE)
    arrays = {
        ours: parts[theirs].T if theirs in _TRANSPOSED else parts[theirs]
        for ours, theirs in found.items()
    }
    rest = {key: value for key, value in extra.items() if not key.endswith('_config')}
    return arrays, {**rest, **config}


def _config(extra: Mapping[str, Any]) -> dict[str, Any]:
    """The config that transformers has for this CLIP, and timm's description of its images.

    Raises:
      UserError: if there is none, or the model has a part that such a CLIP does not have.
    """
    told = extra.get(OPEN_CLIP)
    if told is None:
        raise UserError(
            f'{_SOURCE}: heads and GELU are unknown without {OPEN_CLIP}: put it beside the file'
        )
    model = told['model_cfg']
    vision, text = model['vision_cfg'], model['text_cfg']
    for name, part in (('vision_cfg', vision), ('text_cfg', text)):
        _require_plain(name, part)
    heads = vision['width'] // vision.get('head_width', 64)
    shared = {'hidden_act': 'quick_gelu' if model.get('quick_gelu') else 'gelu'}
    size = vision.get('image_size', 224)
    return {
        'model_type': 'clip',
        'vision_config': {
            **_shared(shared, vision),
            **{'num_attention_heads': heads, 'image_size': size},
            'patch_size': vision.get('patch_size', 16),
        },
        'text_config': {
            **_shared(shared, text),
            # As in old files of CLIP: the largest id of a text is its end.
            **{'num_attention_heads': text.get('heads', 8), 'eos_token_id': 2},
        },
        'pretrained_cfg': _images(told.get('preprocess_cfg') or {}, size),
    }


def _shared(config: Mapping[str, Any], tower: Mapping[str, Any]) -> dict[str, Any]:
    """The config of a tower, with the epsilon of its norms."""
    return {**config, 'layer_norm_eps': (tower.get('norm_kwargs') or {}).get('eps', 1e-5)}


def _require_plain(name: str, tower: Mapping[str, Any]) -> None:
    """Raise UserError if a tower has a part that such a CLIP does not have."""
    for key, values in _PLAIN.items():
        if key in tower and tower[key] not in values:
            raise UserError(f'{_SOURCE}: no model here has {name}.{key} {tower[key]!r}')
    if not isinstance(tower.get('layers', 12), int):
        raise UserError(f'{_SOURCE}: no model here has the ResNet of {name}.layers')


def _images(config: Mapping[str, Any], size: Any) -> dict[str, Any]:
    """The preparation of images, in the keys of timm's files."""
    sides = [size, size] if isinstance(size, int) else list(size)
    found = {key: list(config[key]) for key in ('mean', 'std') if key in config}
    mode = config.get('resize_mode', 'shortest')
    found['crop_mode'] = _RESIZING.get(mode, mode)
    if mode not in _RESIZING:  # a note will say that they are cropped
        return found | {'interpolation': mode}
    method = config.get('interpolation', 'bicubic')
    return found | {'input_size': [3, *sides], 'interpolation': method, 'crop_pct': 1.0}
