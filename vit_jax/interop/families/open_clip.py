"""OpenCLIP: open_clip_model.safetensors and open_clip_config.json.

A CLIP with a ViT and a causal text tower is the same as transformers' under different names, and is
translated to these, as is a text tower. An image tower of timm is read as timm's.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from vit_jax.errors import UserError
from vit_jax.interop import names, normalization, preprocessing, texts, torch_layout
from vit_jax.interop.families import _text, _timm, timm_vit, transformers_clip
from vit_jax.interop.files import Flat
from vit_jax.interop.hub import OPEN_CLIP, OPEN_CLIP_WEIGHTS
from vit_jax.interop.trained import TrainedModel, Written, fields
from vit_jax.models import siglip, vit
from vit_jax.models.text_encoder import LARGEST
from vit_jax.storage.model_ref import TOWERS

WEIGHTS = OPEN_CLIP_WEIGHTS
POSITIONS = 'antialiased'
_SOURCE = 'OpenCLIP'
_VISUAL, _TEXT = 'visual.', 'text.'  # the second only with `custom_text`
# Names of parts in OpenCLIP and in transformers.
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
# Stored as [in out], the transpose of a dense layer's weight.
_TRANSPOSED = ('visual.proj', 'text_projection')
_UNUSED = ('attn_mask',)
_TRUNK, _SCALE, _BIAS = 'visual.trunk.', 'logit_scale', 'logit_bias'
# Keys of the towers' configs for unsupported parts, with the values that disable them.
_PARTS: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(('hf_model_name', 'ls_init_value', 'block_type'), (None,)),
    **dict.fromkeys(('attentional_pool', 'no_ln_pre', 'final_ln_after_pool'), (False,)),
    **dict.fromkeys(('embed_cls', 'qk_norm', 'scaled_cosine_attn', 'scale_heads'), (False,)),
    **dict.fromkeys(('scale_attn_inner', 'scale_attn', 'scale_fc'), (False,)),
    **{'pos_embed_type': ('learnable', 'learned'), 'text_arch': ('clip',)},
    'proj_type': ('linear',),
}
# Keys of a tower that is translated to transformers.
_PLAIN = _PARTS | {
    **dict.fromkeys(('no_causal_mask', 'proj_bias'), (False,)),
    **{'pool_type': ('tok', 'argmax'), 'act_kwargs': (None, {})},
}
# Keys of a text tower next to an image tower of timm.
_TEXT_PARTS = _PARTS | {'pool_type': ('argmax', 'last')}
_ACTIVATIONS = {'none': 'gelu', 'tanh': 'gelu_pytorch_tanh'}  # act_kwargs.approximate
_RESIZING = {'shortest': 'center', 'squash': 'squash'}  # resize_mode: timm's crop_mode


def matches(flat: Mapping[str, np.ndarray]) -> bool:
    """Return whether these are the names of an image tower and a text tower."""
    embeddings = (f'{text}token_embedding.weight' for text in ('', _TEXT))
    has_text = any(map(flat.__contains__, embeddings)) or _has(flat, 'text.transformer.')
    return has_text and ('visual.conv1.weight' in flat or _has(flat, _TRUNK))


def _has(flat: Mapping[str, np.ndarray], prefix: str) -> bool:
    return any(name.startswith(prefix) for name in flat)


def read(flat: Flat, extra: Mapping[str, Any]) -> TrainedModel:
    """Read a CLIP or CustomTextCLIP as the model `clip`, or `open_clip` for timm's image towers.

    Raises:
      UserError: if parameters are unknown, missing or have the wrong shape, or a part is not
        supported.
    """
    if _has(flat, _TRUNK):
        imported, config = _read_towers(flat, extra), _trunk_config(extra)
    else:
        arrays, config = to_transformers(flat, extra)
        try:
            imported = transformers_clip.read(arrays, config)
        except UserError as error:
            raise UserError(f'{_SOURCE}, translated to transformers: {error}') from None
    recipe = preprocessing.read_recipe(config, imported.image_size)
    text = recipe.text if recipe else ''
    notes = preprocessing.transform_notes(config, text)
    imported = imported.with_groups(data={**imported.config.data, 'transforms': text})
    return dataclasses.replace(imported.with_notes(*notes), source=_SOURCE)


def tower(flat: Flat, extra: Mapping[str, Any], part: str) -> tuple[Flat, dict[str, Any]]:
    """Return arrays and config of one tower, 'vision' or 'text', translated to transformers or
    timm.

    Raises:
      UserError: if the tower has an unsupported part.
    """
    if not _has(flat, _TRUNK):
        return texts.take_tower(*to_transformers(flat, extra, (part,)), part)
    if part == 'vision':
        return _trunk(flat, extra), _trunk_config(extra)
    kind, arrays, config = _text_tower(flat, _model(extra))
    usual = _text.CLIP if kind.model['causal'] else _text.SIGLIP
    if not usual.model.items() <= kind.model.items():
        raise UserError(f'{_SOURCE}: this text tower can only be read with its image tower')
    model_prefix = 'clip' if usual is _text.CLIP else 'siglip'
    return arrays, {**config, 'model_type': f'{model_prefix}_text_model'}


def _read_towers(flat: Flat, extra: Mapping[str, Any]) -> TrainedModel:
    """Read a CLIP with an image tower of timm.

    Raises:
      UserError: see `read`.
    """
    model = _model(extra)
    kind, arrays, config = _text_tower(flat, model)
    text_params, text_model = _text.read(kind, arrays, config, _SOURCE, _TEXT)
    image = timm_vit.read(_trunk(flat, extra), _trunk_config(extra))
    tower, params = image.model_config, dict(image.params)
    head = params.pop('head', None)
    embed_dim = tower['num_classes'] or tower['width']
    if text_model['num_classes'] != embed_dim:
        raise UserError(
            f'{_SOURCE}: texts have {text_model["num_classes"]} features, but images {embed_dim}'
        )
    absent = [
        *(['image'] if head is None or 'bias' not in head else []),
        *([] if text_model['head_bias'] else ['text']),
        *([] if _BIAS in flat else ['logits']),
    ]
    fields = _fields(tower, text_model)
    fields |= {'embed_dim': embed_dim, 'project': head is not None, 'no_bias': '|'.join(absent)}
    params = {
        'image': params,
        **({'image_head': head} if head is not None else {}),
        'text': text_params,
        'log_scale': flat[_SCALE].reshape(()),
        **({'bias': flat[_BIAS].reshape(())} if _BIAS in flat else {}),
    }
    loss = 'sigmoid' if _BIAS in flat else 'softmax'
    imported = TrainedModel.from_file(
        params,
        fields,
        image.image_size,
        _SOURCE,
        task={**image.task_config, 'name': 'siglip', 'loss_name': loss},
        notes=image.notes,
    )
    return _text.with_spec(imported)


def _fields(tower: Mapping[str, Any], text_model: Mapping[str, Any]) -> dict[str, Any]:
    """Return the model's fields that a single tower determines."""
    shape = ('width', 'depth', 'mlp_dim', 'num_heads')
    texts = ('vocab_size', 'length', 'causal', 'eos', 'gelu', 'norm_eps')
    return {
        'name': 'open_clip',
        **{key: tower[key] for key in ('patch_size', *shape, 'pool')},
        **{f'text_{key}': text_model[key] for key in shape},
        **{key: text_model[key] for key in texts},
        'image_options': _options(tower, text_model),
    }


def _options(tower: Mapping[str, Any], text_model: Mapping[str, Any]) -> str:
    """Return the field `image_options`: differences from a plain ViT without a separate field."""
    siglip_fields = siglip.Model.__dataclass_fields__
    plain = fields(vit.Model())
    plain |= {key: text_model[key] for key in ('gelu', 'norm_eps')}
    excluded = {'name', 'num_classes', *siglip_fields} - {'gelu', 'norm_eps'}
    options = {k: v for k, v in tower.items() if k not in excluded and v != plain[k]}
    return f'vit({", ".join(f"{key}={value!r}" for key, value in options.items())})'


def _model(extra: Mapping[str, Any]) -> dict[str, Any]:
    """Return `model_cfg` of the config.

    Raises:
      UserError: if there is no config, or the model has an unsupported part.
    """
    open_clip_config = extra.get(OPEN_CLIP)
    if open_clip_config is None:
        raise UserError(
            f'{_SOURCE}: heads and GELU are unknown without {OPEN_CLIP}: put it next to the file'
        )
    model: dict[str, Any] = open_clip_config['model_cfg']
    if 'multimodal_cfg' in model:
        raise UserError(f'{_SOURCE}: the caption decoder of multimodal_cfg is not supported')
    return model


def _trunk(flat: Flat, extra: Mapping[str, Any]) -> Flat:
    """Return the arrays of an image tower of timm.

    Raises:
      UserError: if it is not a ViT, or has layers after timm's.
    """
    vision = _model(extra)['vision_cfg']
    name = str(vision.get('timm_model_name'))
    if _timm.architectures().get(name, {}).get('class') not in ('VisionTransformer', 'Eva'):
        raise UserError(
            f'{_SOURCE}: vision_cfg.timm_model_name {name!r} is not supported: of timm '
            'only a VisionTransformer or an Eva is read'
        )
    if (proj := vision.get('timm_proj', 'linear')) not in (None, '', 'none'):
        raise UserError(f'{_SOURCE}: vision_cfg.timm_proj {proj!r} is not supported')
    return {n.removeprefix(_TRUNK): a for n, a in flat.items() if n.startswith(_TRUNK)}


def _trunk_config(extra: Mapping[str, Any]) -> dict[str, Any]:
    """Build timm's config.json of the image tower."""
    open_clip_config, other_keys = (
        extra[OPEN_CLIP],
        {k: v for k, v in extra.items() if not k.endswith('_config')},
    )
    vision = open_clip_config['model_cfg']['vision_cfg']
    pool = vision.get('timm_pool', 'avg')
    return {
        **{key: value for key, value in other_keys.items() if key not in ('model_type', OPEN_CLIP)},
        'architecture': vision['timm_model_name'],
        **({'global_pool': pool} if pool else {}),
        'pretrained_cfg': _images(
            open_clip_config.get('preprocess_cfg') or {}, vision.get('image_size', 224)
        ),
    }


def _text_tower(flat: Flat, model: Mapping[str, Any]) -> tuple[_text.Kind, Flat, dict[str, Any]]:
    """Return the kind of a text tower, its arrays and its config, translated to transformers.

    Raises:
      UserError: if it has an unsupported part.
    """
    text = model['text_cfg']
    _require_supported('text_cfg', text, _TEXT_PARTS)
    causal, last = not text.get('no_causal_mask', False), text.get('pool_type') == 'last'
    if causal and last:
        raise UserError(f"{_SOURCE}: text_cfg.pool_type 'last' of causal texts is not supported")
    usual = _text.CLIP if causal else _text.SIGLIP
    text_fields = {'causal': causal, 'eos': None if last else LARGEST}
    text_fields['head_bias'] = bool(text.get('proj_bias', False))
    table = (
        *((f'text_projection.{leaf}', f'{usual.head}.{leaf}') for leaf in ('weight', 'bias')),
        ('text_projection', f'{usual.head}.weight'),
        *((a, b.removeprefix('text_model.')) for a, b in _TABLE if b.startswith('text_model.')),
    )
    other_prefixes = ('visual.', _SCALE, _BIAS)
    parts = {n.removeprefix(_TEXT): a for n, a in flat.items() if not n.startswith(other_prefixes)}
    arrays = _rename(parts, table)
    act = (text.get('act_kwargs') or {}).get('approximate', 'none')
    config = _text_config(model, _ACTIVATIONS[act])
    return dataclasses.replace(usual, model=text_fields), arrays, config


def _text_config(model: Mapping[str, Any], gelu: str = 'gelu') -> dict[str, Any]:
    """Build transformers' config of the text tower of a `model_cfg`."""
    text = model['text_cfg']
    return {
        **_activation_and_epsilon(model, text, gelu),
        # As in old files of CLIP: the largest id of a text is its end.
        **{'num_attention_heads': text.get('heads', 8), 'eos_token_id': 2},
    }


def _activation_and_epsilon(
    model: Mapping[str, Any], tower: Mapping[str, Any], gelu: str = 'gelu'
) -> dict[str, Any]:
    return {
        'hidden_act': 'quick_gelu' if model.get('quick_gelu') else gelu,
        'layer_norm_eps': (tower.get('norm_kwargs') or {}).get('eps', 1e-5),
    }


def to_transformers(
    flat: Flat, extra: Mapping[str, Any], towers: Sequence[str] = TOWERS
) -> tuple[Flat, dict[str, Any]]:
    """Translate arrays and config of this CLIP, or some of its towers, to transformers.

    Raises:
      UserError: if a part or a key of the config belongs to a different model.
    """
    config = _config(extra, towers)
    parts = {name.removeprefix(_TEXT): array for name, array in flat.items()}
    if 'text' not in towers:
        parts = {name: array for name, array in parts.items() if name.startswith(_VISUAL)}
    other_keys = {key: value for key, value in extra.items() if not key.endswith('_config')}
    return _rename(parts, _TABLE), {**other_keys, **config}


def _rename(parts: Flat, table: names.Table) -> Flat:
    """Rename arrays by a table, and convert them to transformers' layouts."""
    parts = {name: array for name, array in parts.items() if name not in _UNUSED}
    parts = torch_layout.split_fused(parts, _SOURCE)
    names_in_file = names.file_names({name: names.to_ours(name, table) for name in parts}, _SOURCE)
    return {
        our_name: parts[their_name].T if their_name in _TRANSPOSED else parts[their_name]
        for our_name, their_name in names_in_file.items()
    }


def _config(extra: Mapping[str, Any], towers: Sequence[str]) -> dict[str, Any]:
    """Build transformers' config of this CLIP, and timm's image settings.

    Raises:
      UserError: if there is no config, or a tower has a part that such a CLIP lacks.
    """
    model, open_clip_config = _model(extra), extra[OPEN_CLIP]
    vision = model['vision_cfg']
    for part in towers:
        _require_supported(f'{part}_cfg', model[f'{part}_cfg'], _PLAIN)
    heads = vision['width'] // vision.get('head_width', 64)
    size = vision.get('image_size', 224)
    return {
        'model_type': 'clip',
        'vision_config': {
            **_activation_and_epsilon(model, vision),
            **{'num_attention_heads': heads, 'image_size': size},
            'patch_size': vision.get('patch_size', 16),
        },
        'text_config': _text_config(model),
        'pretrained_cfg': _images(open_clip_config.get('preprocess_cfg') or {}, size),
    }


def _require_supported(
    name: str, tower: Mapping[str, Any], plain: Mapping[str, tuple[Any, ...]]
) -> None:
    """Raise UserError if a tower has an unsupported part."""
    for key, values in plain.items():
        if key in tower and tower[key] not in values:
            hint = '; FILE:vision reads its image tower' if key == 'hf_model_name' else ''
            raise UserError(f'{_SOURCE}: {name}.{key} {tower[key]!r} is not supported{hint}')
    if not isinstance(tower.get('layers', 12), int):
        raise UserError(f'{_SOURCE}: the ResNet of {name}.layers is not supported')


def _images(config: Mapping[str, Any], size: Any) -> dict[str, Any]:
    """Convert image settings to the keys of timm's files."""
    sides = [size, size] if isinstance(size, int) else list(size)
    keys = {key: list(config[key]) for key in ('mean', 'std') if key in config}
    mode = config.get('resize_mode', 'shortest')
    keys['crop_mode'] = _RESIZING.get(mode, mode)
    if mode not in _RESIZING:  # a note will report the crop
        return keys | {'interpolation': mode}
    method = config.get('interpolation', 'bicubic')
    return keys | {'input_size': [3, *sides], 'interpolation': method, 'crop_pct': 1.0}


# Names of a CLIP whose text tower is not `custom_text`.
_WRITTEN: names.Table = tuple(row for row in _TABLE if row[0] != 'text_projection.weight')
_QUICK = {'quick': True, 'erf': False}  # `quick_gelu`


def write(trained: TrainedModel) -> Written:
    """Write the files of a CLIP.

    Raises:
      UserError: if OpenCLIP has no such model, or the image size is unknown.
    """
    model = fields(trained.model)
    if model['gelu'] not in _QUICK:
        raise UserError(f'OpenCLIP has no CLIP with gelu {model["gelu"]!r}')
    if model['eos'] not in (LARGEST, model['vocab_size'] - 1):
        raise UserError(
            f"OpenCLIP's texts end with the largest id, not with {model['eos']}: not written"
        )
    written = transformers_clip.write(trained)
    arrays = {str(names.to_theirs(name, _WRITTEN)): array for name, array in written.arrays.items()}
    arrays = torch_layout.join_fused(
        {n: array.T if n in _TRANSPOSED else array for n, array in arrays.items()},
        {'attn': 'in_proj'},
    )
    assert written.config is not None
    preparation, notes = _preparation(trained)
    config = {
        'model_cfg': _model_config(model, written.config['vision_config']['image_size']),
        'preprocess_cfg': preparation,
    }
    text = json.dumps(config, indent=2, sort_keys=True) + '\n'
    return Written(arrays, None, notes, None, {OPEN_CLIP: text.encode()}, WEIGHTS)


def _model_config(model: Mapping[str, Any], size: Any) -> dict[str, Any]:
    """Build `model_cfg` of a CLIP with these fields, for images of this size."""
    norm = {'norm_kwargs': {'eps': model['norm_eps']}} if model['norm_eps'] != 1e-5 else {}
    return {
        'embed_dim': model['embed_dim'],
        'quick_gelu': _QUICK[model['gelu']],
        'vision_cfg': {
            **{'image_size': size, 'patch_size': model['patch_size'], **norm},
            **{'layers': model['depth'], 'width': model['width']},
            'head_width': model['width'] // model['num_heads'],
            'mlp_ratio': model['mlp_dim'] / model['width'],
        },
        'text_cfg': {
            **{'context_length': model['length'], 'vocab_size': model['vocab_size'], **norm},
            **{'layers': model['text_depth'], 'width': model['text_width']},
            'heads': model['text_num_heads'],
            'mlp_ratio': model['text_mlp_dim'] / model['text_width'],
        },
    }


def _preparation(trained: TrainedModel) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Build `preprocess_cfg`, and note transforms that it cannot express."""
    config = normalization.keys(trained, trained.channels)
    keys, notes = _timm.image_keys(trained.transforms, trained.image_size or (0, 0))
    modes = {their_mode: our_mode for our_mode, their_mode in _RESIZING.items()}
    if keys.get('crop_mode') in modes and keys.get('crop_pct') == 1.0:
        mode = modes[keys['crop_mode']]
        return {**config, 'interpolation': keys['interpolation'], 'resize_mode': mode}, (*notes,)
    if trained.transforms:
        notes = (*notes, f'OpenCLIP cannot express these transforms: {trained.transforms}')
    return {**config}, (*notes,)


WRITERS = {('clip', 'authors'): write}
