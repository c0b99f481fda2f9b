"""SigLIP of transformers, and SigLIP 2 with a fixed image size: safetensors and config.json.

Both are a `SiglipModel` in transformers. The towers become our ViT and our text encoder. Heads,
GELU and epsilons come from config.json, by default from transformers.SiglipConfig.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from vit_jax.errors import UserError
from vit_jax.interop import names, normalization, preprocessing, torch_layout
from vit_jax.interop.families import _text, _transformers, _vit
from vit_jax.interop.families import transformers_vision_tower as vision
from vit_jax.interop.files import Flat
from vit_jax.interop.trained import TrainedModel, Written, fields
from vit_jax.models import siglip

SOURCE = 'transformers SigLIP'
_VISION, _TEXT = 'vision_model.', 'text_model.'
_NUMBERS = {'logit_scale': 'log_scale', 'logit_bias': 'bias'}

# Without the parts that only CLIP has.
IMAGE_TABLE: names.Table = tuple(
    row for row in vision.TABLE if row[1] not in ('cls_token', 'norm_pre', 'head')
)


def matches(flat: Mapping[str, np.ndarray]) -> bool:
    """Return whether the file has both towers, with a convolution for image patches."""
    return has_towers(flat) and flat[_VISION + 'embeddings.patch_embedding.weight'].ndim == 4


def has_towers(flat: Mapping[str, np.ndarray]) -> bool:
    """Return whether the file has both towers, and the scale and bias of their logits."""
    towers = (_VISION + 'embeddings.patch_embedding.weight', _TEXT + 'head.weight')
    return {*towers, *_NUMBERS} <= flat.keys()


def read(flat: Flat, extra: Mapping[str, Any]) -> TrainedModel:
    """Read a SiglipModel.

    Raises:
      UserError: if parameters are unknown, missing or have the wrong shape, or contradict the
        config.
    """
    if (kind := extra.get('model_type', 'siglip')) != 'siglip':
        raise UserError(f'{SOURCE}: config.json describes a {kind!r}, not a siglip')
    prefixes = (_VISION, _TEXT, *_NUMBERS)
    if unknown := [name for name in flat if not name.startswith(prefixes)]:
        raise UserError(f'{SOURCE}: the model has no part called {names.format_names(unknown)}')
    image = normalization.with_normalization(
        _image_tower(_part(flat, _VISION), extra.get('vision_config')),
        extra,
        normalization.UNKNOWN_NORMALIZATION,
    )
    text, text_model = _text.read(
        _text.SIGLIP, _part(flat, _TEXT), extra.get('text_config'), SOURCE, _TEXT
    )
    shared = _text.keywords(image.model_config, text_model, image.model_config['width'], SOURCE)
    model = {'name': 'siglip', **shared}
    numbers = {name: flat[key].reshape(()) for key, name in _NUMBERS.items()}
    imported = TrainedModel.from_file(
        {'image': image.params, 'text': text, **numbers},
        model,
        image.image_size,
        SOURCE,
        task={**image.task_config, 'name': 'siglip'},
        notes=image.notes,
    )
    return _text.with_spec(imported)


def write(trained: TrainedModel) -> Written:
    """Write the files of a SiglipModel.

    Raises:
      UserError: if transformers has no such model, or the image size is unknown.
    """
    model = fields(trained.model)
    if model['pool'] != 'map' or model['project']:
        raise UserError(
            "transformers' SigLIP pools images by attention, without a projection: a model with "
            f'pool {model["pool"]!r} and project {model["project"]} cannot be written'
        )
    image, text = (names.flatten(trained.params[name]) for name in ('image', 'text'))
    channels = image['patch_embed/kernel'].shape[2]
    size = trained.image_size or _transformers.square(image, model['patch_size'], 0)
    written = vision.fuse_projections(_text.to_transformers(image, IMAGE_TABLE))
    arrays = {_VISION + name: array for name, array in written.items()}
    written = _text.to_transformers(text, _text.SIGLIP.table)
    arrays |= {_TEXT + name: array for name, array in written.items()}
    arrays |= {
        key: np.asarray(trained.params[name], np.float32).reshape(1)
        for key, name in _NUMBERS.items()
    }
    preprocessor = preprocessing.preprocessor(trained, channels, size)
    return Written(
        arrays,
        _config(trained.model, size, channels),
        preprocessor=preprocessor | {'image_processor_type': 'SiglipImageProcessor'},
    )


def _part(flat: Flat, prefix: str) -> Flat:
    """Return the arrays of a tower, without their prefix."""
    return {n.removeprefix(prefix): array for n, array in flat.items() if n.startswith(prefix)}


def _image_tower(flat: Flat, config: Mapping[str, Any] | None) -> TrainedModel:
    flat = torch_layout.split_fused(flat, SOURCE)
    size = (config or {}).get('image_size')
    if isinstance(size, list | tuple):
        size = tuple(size)
    return _vit.assemble(
        _text.arrays(_text.SIGLIP, flat, config, SOURCE, IMAGE_TABLE),
        SOURCE,
        _text.make_renamer(_VISION, IMAGE_TABLE),
        **_text.activation(_text.SIGLIP, config, SOURCE),
        image_size=(size, size) if isinstance(size, int) else size,
    )


def _config(model: siglip.Model, size: tuple[int, int], channels: int) -> dict[str, Any]:
    vision = _transformers.shape_config(fields(model), size)
    text_config = _text.config(fields(model.text_tower()))
    return {
        'model_type': 'siglip',
        'architectures': ['SiglipModel'],
        'text_config': text_config | {'model_type': 'siglip_text_model'},
        'vision_config': vision | {'model_type': 'siglip_vision_model', 'num_channels': channels},
    }


WRITERS = {('siglip', 'transformers'): write}
