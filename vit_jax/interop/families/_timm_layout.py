"""Arrays of timm's ViTs with one name for each layer, whatever form timm keeps it in."""

from __future__ import annotations

import re

import numpy as np

from vit_jax.errors import UserError
from vit_jax.interop import torch_layout
from vit_jax.interop.files import Flat

# Layer scales, and the layers before them.
_SCALED = {'ls1': 'attn.proj', 'ls2': 'mlp.fc2', 'gamma_1': 'attn.proj', 'gamma_2': 'mlp.fc2'}
# Other names of the same parts.
_SAME = (
    (r'(.*\.attn\.[qkv])_(bias)', r'\1.\2'),
    (r'(.*\.attn\.[qkv])_proj\.(weight|bias)', r'\1.\2'),
    (r'(.*\.mlp)\.fc1_g\.(weight|bias)', r'\1.gate.\2'),
    (r'(.*\.mlp)\.fc1_x\.(weight|bias)', r'\1.fc1.\2'),
)


def plain(flat: Flat, source: str) -> Flat:
    """The arrays with split projections and gates, and with layer scale folded.

    Raises:
      UserError: if a part is absent, or does not fit another one.
    """
    parts = torch_layout.parted(_unscaled(flat, source), source)
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


def _unscaled(flat: Flat, source: str) -> Flat:
    """Fold layer scale: gamma * (W x + b) = (gamma W) x + gamma b."""
    folded = dict(flat)
    for name, gamma in flat.items():
        match = re.fullmatch(r'(blocks\.\d+\.)(ls[12]|gamma_[12])(?:\.gamma)?', name)
        if not match:
            continue
        layer = match[1] + _SCALED[match[2]]
        weight, bias = f'{layer}.weight', f'{layer}.bias'
        if weight not in flat or len(flat[weight]) != len(gamma):
            raise UserError(f'{source}: {name} scales {weight}, which is absent or does not fit')
        for leaf in (weight, bias):
            if leaf in flat:
                folded[leaf] = (flat[leaf].T * gamma).T
        del folded[name]
    _require_all(flat, source)
    return folded


def _require_all(flat: Flat, source: str) -> None:
    """Raise UserError if some blocks have a layer scale and others do not."""
    found: dict[str, set[str]] = {}
    for name in flat:
        if match := re.match(r'blocks\.(\d+)\.(.*)', name):
            scale = match[2] if re.fullmatch(r'ls[12]\.gamma|gamma_[12]', match[2]) else ''
            found.setdefault(scale, set()).add(match[1])
            found.setdefault('', set()).add(match[1])
    for scale, blocks in found.items():
        if lost := found[''] - blocks:
            raise UserError(f'{source}: blocks.{min(lost)}.{scale} is not in the file')
