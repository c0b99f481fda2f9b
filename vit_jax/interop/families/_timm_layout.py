"""Arrays of timm's ViTs with one name for each layer, whatever form timm keeps it in."""

from __future__ import annotations

import re

import numpy as np

from vit_jax.interop import torch_layout
from vit_jax.interop.files import Flat

# Other names of the same parts.
_SAME = (
    (r'(.*\.attn\.[qkv])_(bias)', r'\1.\2'),
    (r'(.*\.attn\.[qkv])_proj\.(weight|bias)', r'\1.\2'),
    (r'(.*\.mlp)\.fc1_g\.(weight|bias)', r'\1.gate.\2'),
    (r'(.*\.mlp)\.fc1_x\.(weight|bias)', r'\1.fc1.\2'),
)


def plain(flat: Flat, source: str) -> Flat:
    """The arrays with split projections and gates.

    Raises:
      UserError: if an array cannot be split.
    """
    used = {n: array for n, array in flat.items() if not n.endswith('relative_position_index')}
    parts = torch_layout.parted(used, source)
    return _ungated({_named(name): array for name, array in parts.items()})


def _named(name: str) -> str:
    for pattern, same in _SAME:
        name = re.sub(f'^{pattern}$', same, name)
    return name


def _ungated(flat: Flat) -> Flat:
    """Split a layer that is twice as wide as the next one takes: the gate comes first."""
    parts = dict(flat)
    for name, second in flat.items():
        if not name.endswith('.mlp.fc2.weight') or second.ndim != 2:
            continue
        mlp = name.removesuffix('.fc2.weight')
        for leaf in ('weight', 'bias'):
            both = flat.get(f'{mlp}.fc1.{leaf}')
            if both is not None and len(both) == 2 * second.shape[1]:
                parts[f'{mlp}.gate.{leaf}'], parts[f'{mlp}.fc1.{leaf}'] = np.split(both, 2)
    return parts
