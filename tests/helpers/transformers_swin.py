"""A small Swin of transformers to compare with."""

from __future__ import annotations

import re
from typing import Any

import numpy as np

from helpers.transformers_models import perturbed

SHAPE = {
    'image_size': 24,
    'patch_size': 2,
    'embed_dim': 8,
    'depths': [2, 2],
    'num_heads': [2, 4],
    'window_size': 3,
    'num_labels': 5,
}
# As version 5 renames when it reads files of version 4.
NAMES_4 = [
    (
        r'attention\.(q|k|v)_proj',
        lambda m: 'attention.self.' + {'q': 'query', 'k': 'key', 'v': 'value'}[m[1]],
    ),
    (r'attention\.relative_position_bias', 'attention.self'),
    (r'attention\.o_proj', 'attention.output.dense'),
    (r'mlp\.fc1', 'intermediate.dense'),
    (r'mlp\.fc2', 'output.dense'),
]


def reference(cls: str = 'SwinForImageClassification', **fields: Any) -> Any:
    """The model of transformers, with parameters none of which is zero, one or like another."""
    import transformers

    return perturbed(getattr(transformers, cls)(transformers.SwinConfig(**{**SHAPE, **fields})))


def state(model: Any, version: int) -> dict[str, np.ndarray]:
    """Arrays under the names of a version of transformers, with the buffers that version 4 has."""

    def name(key):
        for new, old in NAMES_4 if version == 4 else ():
            key = re.sub(new, old, key)
        return key

    arrays = {name(key): tensor.numpy() for key, tensor in model.state_dict().items()}
    if version == 4:
        index = 'swin.encoder.layers.0.blocks.0.attention.self.relative_position_index'
        arrays[index] = np.zeros((9, 9), np.float32)
    assert any('q_proj' in n for n in arrays) == (version == 5)
    return arrays
