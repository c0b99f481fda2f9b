"""Models of transformers with a tower for images and one for texts: what their readers share."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np

from vit_jax.data.batches import ArraySpec
from vit_jax.errors import UserError
from vit_jax.interop import texts
from vit_jax.interop.trained import TrainedModel

_SHAPE = ('width', 'depth', 'mlp_dim', 'num_heads')


def keywords(
    image: Mapping[str, Any], text: Mapping[str, Any], embed_dim: int, source: str
) -> dict[str, Any]:
    """Keywords of the model `siglip`.

    Args:
      image, text: keywords of the towers, a `vit` and a `text_encoder`.
      embed_dim: size of the images' embeddings.
      source: the name of the file for messages.

    Raises:
      UserError: if the towers do not belong together.
    """
    for key in ('gelu', 'norm_eps'):
        if image[key] != text[key]:
            raise UserError(f'{source}: the towers differ in {key}, which is one for both here')
    if text['num_classes'] != embed_dim:
        raise UserError(f'{source}: texts have {text["num_classes"]} features, images {embed_dim}')
    return {
        **{key: image[key] for key in ('patch_size', *_SHAPE, 'pool', 'gelu', 'norm_eps')},
        **{f'text_{key}': text[key] for key in _SHAPE},
        **{key: text[key] for key in ('vocab_size', 'length')},
        'embed_dim': embed_dim,
    }


def with_spec(imported: TrainedModel) -> TrainedModel:
    """Add the arrays of an example, which has a text too.

    Raises:
      UserError: if the size of the images is unknown.
    """
    length, size = imported.model_config['length'], imported.image_size
    if size is None:
        raise UserError(f'{imported.source}: the size of its images is unknown; config.json has it')
    channels = imported.params['image']['patch_embed']['kernel'].shape[2]
    spec = {
        'image': ArraySpec((*size, channels), np.dtype(np.uint8)),
        texts.FIELD: ArraySpec((length,), np.dtype(np.int32)),
    }
    return dataclasses.replace(imported, spec=spec)
