"""Parts of transformers' DPTs."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from flax.traverse_util import flatten_dict

from vit_jax.errors import UserError
from vit_jax.interop import names, torch_layout
from vit_jax.models.dpt import Model
from vit_jax.tree_paths import require_fit

IS_HEAD = re.compile('reassemble_|neck_|fusion_|decoder')
# Fields of a ViT that a DPT lacks.
HEADLESS = (
    *('name', 'num_classes', 'pool', 'pool_heads', 'pool_mlp_dim', 'fc_norm', 'head_norm'),
    *('representation_size', 'head_bias', 'scan'),
)


def read_maps(
    extra: Mapping[str, Any], backbone: Mapping[str, Any] | None, source: str
) -> tuple[tuple[int, float, int], ...]:
    """Return the layer, the factor and the channels of each map."""
    layers, factors = _layers(extra, backbone, source), extra['reassemble_factors']
    channels = extra['neck_hidden_sizes']
    if not len(layers) == len(factors) == len(channels):
        raise UserError(
            f'{source}: config.json has {len(layers)} layers for the neck, but '
            f'{len(factors)} reassemble_factors and {len(channels)} neck_hidden_sizes'
        )
    return tuple(zip(layers, factors, channels, strict=True))


def _layers(
    extra: Mapping[str, Any], backbone: Mapping[str, Any] | None, source: str
) -> tuple[int, ...]:
    """Return the numbers of layers that the neck reads, 1 for the first block."""
    if backbone is None:
        return tuple(sorted(1 + i for i in extra.get('backbone_out_indices') or (2, 5, 8, 11)))
    stages = [re.sub('^stage', '', str(name)) for name in backbone.get('out_features') or ()]
    layers = backbone.get('out_indices') or stages
    if not layers:
        raise UserError(f'{source}: out_indices of backbone_config are missing in config.json')
    return tuple(sorted(map(int, layers)))


def transpose_kernel(name: str, array: np.ndarray, factors: Any) -> np.ndarray:
    """Transpose the kernel of a transposed convolution, whose inputs come first in PyTorch."""
    match = re.fullmatch(r'reassemble_(\d+)/resize/kernel', name)
    if match and int(match[1]) < len(factors) and factors[int(match[1])] > 1:
        return array.swapaxes(-1, -2)
    return array


def require_heads(
    params: Mapping[str, Any], fields: Mapping[str, Any], table: names.Table, source: str
) -> None:
    """Raise UserError if the neck and the head do not fit the ViT."""
    module = Model(**{key: value for key, value in fields.items() if key != 'name'})
    patches = params['pos_embed'].shape[1] - module.positioned_tokens
    images = jax.ShapeDtypeStruct(
        (1, module.patch_size, module.patch_size * patches, 3), np.float32
    )
    shapes = jax.eval_shape(module.init, jax.random.key(0), images)['params']
    expected, actual = (
        {name: x for name, x in flatten_dict(tree, sep='/').items() if IS_HEAD.match(name)}
        for tree in (shapes, params)
    )
    require_fit(
        actual,
        names.empty_arrays(expected),
        f'{source}: incomplete model (shapes in our layout)',
        label=lambda name: torch_layout.to_theirs(name, table),
    )
