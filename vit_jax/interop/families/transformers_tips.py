"""TIPSv2 of transformers, which saves it with its authors' names: safetensors and config.json.

The whole model, or its image tower as a ViT. Images are in [0, 1] by default.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from vit_jax.errors import UserError
from vit_jax.interop import names, normalization, preprocessing, torch_layout
from vit_jax.interop.families import _text, _timm, _transformers, _vit, authors_dinov2
from vit_jax.interop.families.timm_vit import TABLE
from vit_jax.interop.files import Flat
from vit_jax.interop.normalization import GIVEN_NORMALIZATION
from vit_jax.interop.trained import GIVEN_SIZE, TrainedModel, Written, fields
from vit_jax.models import tips
from vit_jax.tree_paths import require_fit

SOURCE = 'transformers TIPSv2'
POSITIONS = 'linear_antialiased'
VISION, _TEXT = 'vision_encoder.', 'text_encoder.'
_TEMPERATURE = 'temperature'
_MLP = {'c_fc': 'fc1', 'c_proj': 'fc2'}
_UNSCALED = {'mean': [0.0] * 3, 'std': [1.0] * 3}
VISION_TABLE: names.Table = (
    ('register_tokens', 'register_tokens'),
    *((f'blocks.{{0}}.mlp.{a}', f'encoder/block_{{0}}/mlp/{b}') for a, b in _MLP.items()),
    *TABLE,
)
_TEXT_TABLE: names.Table = (
    ('token_embedding.weight', 'token_embed/embedding'),
    *_transformers.blocks(
        'transformer.resblocks',
        ('ln_1', 'norm1'),
        *((f'attn.{name[0]}', f'attention/{name}') for name in ('query', 'key', 'value')),
        ('attn.out_proj', 'attention/out'),
        ('ln_2', 'norm2'),
        *((f'mlp.{a}', f'mlp/{b}') for a, b in _MLP.items()),
    ),
    ('ln_final', 'encoder/norm'),
)
# `w12` holds gates and values.
_GATED = {'mlp.w12.': 'mlp.fc1.', 'mlp.w3.': 'mlp.fc2.'}
_FUSED = {'attn': 'qkv'}


def matches(flat: Mapping[str, np.ndarray]) -> bool:
    """Return whether these are the names of both towers, or only of the image tower."""
    if any('_head.' in name for name in flat):
        return False
    return VISION + 'register_tokens' in flat or authors_dinov2.is_tips(flat)


def read(flat: Flat, extra: Mapping[str, Any]) -> TrainedModel:
    """Read a Tipsv2Model, or a Tipsv2VisionModel, whose `pooler_output` is our `pre_logits`.

    Raises:
      UserError: if parameters are unknown, missing or have the wrong shape, or contradict the
        config.
    """
    has_texts = any(name.startswith(_TEXT) for name in flat)
    config = (extra.get('vision_config') or {}) if has_texts else extra
    image = read_vision(
        {n.removeprefix(VISION): x for n, x in flat.items() if not n.startswith(_OTHERS)},
        {**{k: x for k, x in extra.items() if k not in _OF_WHOLE}, **config},
    )
    return _with_texts(image, flat, extra) if has_texts else image


_OTHERS = (_TEXT, _TEMPERATURE)
_OF_WHOLE = ('model_type', 'text_config', 'vision_config', 'architectures')


def read_vision(flat: Flat, extra: Mapping[str, Any]) -> TrainedModel:
    """Read the image tower, without a prefix.

    Raises:
      UserError: as in `read`.
    """
    in_file = {_plain(name): name for name in flat if name != 'mask_token'}
    parts = {name: flat[original] for name, original in in_file.items()}
    if (kind := extra.get('model_type', _VISION_TYPE)) != _VISION_TYPE:
        raise UserError(f'{SOURCE}: config.json describes a {kind!r}, not a {_VISION_TYPE}')
    parts = _timm.split_fused_arrays(parts, SOURCE)
    heads = extra.get('num_attention_heads')
    if heads is None:
        ours = {n: torch_layout.to_ours(n, VISION_TABLE) for n in parts}
        shapes = {ours_: parts[n].shape for n, ours_ in ours.items() if ours_}
        heads = _vit.published_heads(shapes, SOURCE)
    size = extra.get('image_size')
    size = (size, size) if isinstance(size, int) else size
    imported = _vit.assemble(
        torch_layout.read(parts, VISION_TABLE, int(heads), SOURCE),
        SOURCE,
        lambda name: in_file.get(theirs := torch_layout.to_theirs(name, VISION_TABLE), theirs),
        gelu=_transformers.gelu(extra, SOURCE),
        norm_eps=float(extra.get('layer_norm_eps', 1e-6)),
        image_size=(int(size[0]), int(size[1])) if size else None,
        hints=[extra[GIVEN_SIZE]] if GIVEN_SIZE in extra else [],
        rows=1,
    )
    if normalization.mean_and_std(extra) is None:
        extra = {**extra, GIVEN_NORMALIZATION: _UNSCALED}
    return normalization.with_normalization(imported, extra)


_VISION_TYPE = 'tipsv2_vision_model'


def _plain(name: str) -> str:
    """Use timm's names of gated layers."""
    for theirs, timm_name in _GATED.items():
        name = name.replace(theirs, timm_name)
    return name


def _with_texts(image: TrainedModel, flat: Flat, extra: Mapping[str, Any]) -> TrainedModel:
    """Add the text tower and the temperature."""
    config = {'num_attention_heads': 12, **(extra.get('text_config') or {})}
    if (activation := config.get('hidden_act', 'relu')) != 'relu':
        raise UserError(f'{SOURCE}: hidden_act {activation!r} of texts is not supported')
    parts = {n.removeprefix(_TEXT): x for n, x in flat.items() if n.startswith(_TEXT)}
    parts = torch_layout.split_fused(parts, SOURCE)
    heads = int(config['num_attention_heads'])
    text = torch_layout.read(parts, _TEXT_TABLE, heads, SOURCE)
    temperature = float(
        flat.get(_TEMPERATURE, extra.get('temperature_init_value', tips.TEMPERATURE))
    )
    params = {
        'image': image.params,
        'text': names.nest(text),
        'log_scale': np.asarray(-math.log(temperature), np.float32),
    }
    model = {**_keywords(image, text, config, heads), 'name': 'tips'}
    _require_whole(text, model, image)
    imported = TrainedModel.from_file(
        params,
        model,
        image.image_size,
        SOURCE,
        task={**image.task_config, 'name': 'siglip', 'loss_name': 'softmax'},
        notes=image.notes,
    )
    return _text.with_spec(imported)


def _keywords(
    image: TrainedModel, text: Flat, config: Mapping[str, Any], heads: int
) -> dict[str, Any]:
    """Return the fields of the model `tips`."""
    vit = image.model
    if 'token_embed/embedding' not in text or 'encoder/block_0/mlp/fc1/kernel' not in text:
        raise UserError(f'{SOURCE}: the text tower is incomplete')
    vocab_size, width = text['token_embed/embedding'].shape
    shared = ('patch_size', 'width', 'depth', 'mlp_dim', 'num_heads', 'registers')
    return {
        **{key: getattr(vit, key) for key in shared},
        'block': {key: getattr(vit.block, key) for key in ('gelu', 'norm_eps', 'mlp')},
        'embed_dim': vit.width,
        'vocab_size': vocab_size,
        'length': int(config.get('max_position_embeddings', 64)),
        'texts': {
            'width': width,
            'depth': names.count_blocks(text, r'encoder/block_(\d+)/'),
            'mlp_dim': text['encoder/block_0/mlp/fc1/kernel'].shape[1],
            'num_heads': heads,
            'norm_eps': float(config.get('layer_norm_eps', 1e-5)),
            'scaled': bool(config.get('scale_sqrt_depth', True)),
        },
    }


def _require_whole(text: Flat, model: Mapping[str, Any], image: TrainedModel) -> None:
    """Raise UserError if a parameter of the text tower is missing, or has another shape."""
    module = tips.Model(**{key: x for key, x in model.items() if key != 'name'})
    images = jax.ShapeDtypeStruct((1, *(image.image_size or (0, 0)), image.channels), np.float32)
    ids = jax.ShapeDtypeStruct((1, module.length), np.int32)
    shapes = jax.eval_shape(module.init, jax.random.key(0), images, ids)['params']
    require_fit(
        text,
        names.empty_arrays(shapes['text']),
        f'{SOURCE}: incomplete model (shapes in our layout)',
        label=lambda name: _TEXT + torch_layout.to_theirs(name, _TEXT_TABLE),
    )


def write(trained: TrainedModel) -> Written:
    """Write the files of a Tipsv2Model.

    Raises:
      UserError: if transformers has no such model, or the image size is unknown.
    """
    model = trained.model
    lacking = [] if model.block.mlp == 'mlp' else ['block.mlp']
    lacking += [] if model.texts.width == model.width else ['texts.width']
    if lacking:
        raise UserError(f'{SOURCE}: a model with this {lacking[0]} cannot be written')
    image, text = (names.flatten(trained.params[name]) for name in ('image', 'text'))
    size = trained.image_size or _transformers.square(image, model.patch_size, 1)
    arrays = write_vision(image, model.image_tower(), VISION)
    written = torch_layout.write(text, _TEXT_TABLE)
    written = torch_layout.join_fused(written, {'attn': 'in_proj'})
    arrays |= {_TEXT + name: x for name, x in written.items()}
    temperature = math.exp(-float(trained.params['log_scale']))
    arrays[_TEMPERATURE] = np.asarray(temperature, np.float32)
    config = {
        'model_type': 'tipsv2',
        'architectures': ['Tipsv2Model'],
        'temperature_init_value': temperature,
        'vision_config': vision_config(model.image_tower(), size),
        'text_config': _text_config(model),
    }
    channels = image['patch_embed/kernel'].shape[2]
    return Written(arrays, config, preprocessor=processor(trained, channels, size))


def processor(trained: TrainedModel, channels: int, size: tuple[int, int]) -> dict[str, Any]:
    """Return the contents of preprocessor_config.json."""
    keys = preprocessing.preprocessor(trained, channels, size)
    return keys | {'image_processor_type': 'Tipsv2ImageProcessor'}


def write_vision(flat: Flat, module: Any, prefix: str) -> Flat:
    """Convert the arrays of an image tower, with its token of masked patches, which is zero."""
    if module.block.layer_scale is None:
        scales = [f'encoder/block_{i}/layer_scale{j}' for i in range(module.depth) for j in (1, 2)]
        flat = {**flat, **dict.fromkeys(scales, np.ones(module.width, np.float32))}
    written = torch_layout.join_fused(torch_layout.write(flat, VISION_TABLE), _FUSED)
    written['mask_token'] = np.zeros((1, module.width), np.float32)
    return {prefix + name: x for name, x in written.items()}


def vision_config(module: Any, size: tuple[int, int]) -> dict[str, Any]:
    """Return the keys of config.json for an image tower."""
    config = _transformers.shape_config(fields(module), size)
    mlp_dim = config.pop('intermediate_size')
    return config | {
        'model_type': _VISION_TYPE,
        'mlp_ratio': mlp_dim / module.width,
        'num_register_tokens': module.registers,
        'num_channels': 3,
        'use_swiglu_ffn': False,
    }


def _text_config(model: tips.Model) -> dict[str, Any]:
    texts = model.texts
    return {
        'model_type': 'tipsv2_text_model',
        'vocab_size': model.vocab_size,
        'hidden_size': texts.width,
        'intermediate_size': texts.mlp_dim,
        'num_hidden_layers': texts.depth,
        'num_attention_heads': texts.num_heads,
        'max_position_embeddings': model.length,
        'hidden_act': 'relu',
        'layer_norm_eps': texts.norm_eps,
        'scale_sqrt_depth': texts.scaled,
        'pooling_epsilon': tips.EPS,
    }


WRITERS = {('tips', 'transformers'): write}
