"""CLIP and MetaCLIP 2 of transformers: safetensors and config.json."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np

from vit_jax.errors import UserError
from vit_jax.interop import names, texts
from vit_jax.interop.families import (
    _text,
    _transformers,
    transformers_text_tower,
    transformers_vision_tower,
)
from vit_jax.interop.files import Flat
from vit_jax.interop.trained import TrainedModel, Written, fields

SOURCE = 'transformers CLIP'
POSITIONS = transformers_vision_tower.POSITIONS
_TYPES = ('clip', 'metaclip_2')
_SCALE = 'logit_scale'
_PARTS = ('visual_projection.weight', 'text_projection.weight', _SCALE)


def matches(flat: Mapping[str, np.ndarray]) -> bool:
    """Return whether the file has both towers with projections, and no bias of the logits."""
    tokens = 'text_model.embeddings.token_embedding.weight'
    return {*_PARTS, tokens} <= flat.keys() and 'logit_bias' not in flat


def read(flat: Flat, extra: Mapping[str, Any]) -> TrainedModel:
    """Read a CLIPModel or MetaClip2Model.

    Raises:
      UserError: if parameters are unknown, missing or have the wrong shape, or contradict the
        config.
    """
    if (kind := extra.get('model_type', _TYPES[0])) not in _TYPES:
        raise UserError(f'{SOURCE}: config.json describes a {kind!r}, not a clip')
    prefixes = ('vision_model.', 'text_model.', *_PARTS)
    if unknown := [name for name in flat if not name.startswith(prefixes)]:
        raise UserError(f'{SOURCE}: the model has no part called {names.format_names(unknown)}')
    image = transformers_vision_tower.read(*texts.take_tower(flat, extra, 'vision'))
    text = transformers_text_tower.read(*texts.take_tower(flat, extra, 'text'))
    head = image.params['head']['kernel']
    shared = _text.keywords(image.model_config, text.model_config, head.shape[1], SOURCE)
    params = {
        'image': {name: tree for name, tree in image.params.items() if name != 'head'},
        'image_head': {'kernel': head},
        'text': text.params,
        'log_scale': flat[_SCALE].reshape(()),
    }
    imported = TrainedModel.from_file(
        params,
        {'name': 'clip', **shared, 'eos': text.model_config['eos'], **_no_bias(image)},
        image.image_size,
        SOURCE,
        task={**image.task_config, 'name': 'siglip', 'loss_name': 'softmax'},
        notes=image.notes,
    )
    return _text.with_spec(imported)


def _no_bias(image: TrainedModel) -> dict[str, str]:
    """Return the field `no_bias` of a CLIP, whose projection never has biases."""
    layers = image.model_config.get('no_bias', '').split('|')
    absent = '|'.join(layer for layer in layers if layer != 'head')
    return {'no_bias': absent} if absent else {}


def write(trained: TrainedModel) -> Written:
    """Write the files of a CLIPModel, or of a MetaClip2Model if texts end as in its tokenizer.

    Raises:
      UserError: if transformers has no such model, or the image size is unknown.
    """
    model = fields(trained.model)
    if not model['project']:
        raise UserError(
            "transformers' CLIP needs the projection of images, which project=False omits"
        )
    image = _transformers.write(_image_tower(trained), transformers_vision_tower.FORMS)
    text = transformers_text_tower.write(_text_tower(trained))
    scale = np.asarray(trained.params['log_scale'], np.float32).reshape(())
    name, kind = _text.clip_names(model['eos'])
    config: dict[str, Any] = {'model_type': kind, 'architectures': [f'{name}Model']}
    config |= {'vision_config': image.config, 'text_config': text.config}
    return Written(
        image.arrays | text.arrays | {_SCALE: scale},
        config | {'projection_dim': model['embed_dim']},
        preprocessor=image.preprocessor,
    )


def _image_tower(trained: TrainedModel) -> TrainedModel:
    """Return the image tower, with the projection as its head."""
    kernel = trained.params['image_head']['kernel']
    params = {**trained.params['image'], 'head': {'kernel': kernel}}
    tower = trained.model.image_tower()
    absent = (*tower.no_bias, 'head')
    tower = tower.clone(num_classes=kernel.shape[1], no_bias=absent)
    tower_model = trained.with_groups(model={'name': 'vit', **fields(tower)})
    return dataclasses.replace(tower_model, params=params)


def _text_tower(trained: TrainedModel) -> TrainedModel:
    tower = fields(trained.model.text_tower())
    tower_model = trained.with_groups(model={'name': 'text_encoder', **tower})
    return dataclasses.replace(tower_model, params=trained.params['text'])


WRITERS = {('clip', 'transformers'): write}
