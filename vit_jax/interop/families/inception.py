"""Inception v3 of FID, with the names of PyTorch: pytorch-fid's and torch-fidelity's file.

Both distribute the network of 2015-12-05 that TensorFlow's FID used, as a .pth file. Batch norms
are folded into scales and biases.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from vit_jax.interop import names, torch_layout
from vit_jax.interop.files import Flat
from vit_jax.interop.trained import TrainedModel

_SOURCE = 'Inception v3'
_MARK = 'Mixed_7c.branch3x3dbl_3b.conv.weight'
_STEM = ('1a_3x3', '2a_3x3', '2b_3x3', '3b_1x1', '4a_3x3')
_BLOCKS = ('5b', '5c', '5d', '6a', '6b', '6c', '6d', '6e', '7a', '7b', '7c')
_EPS = 1e-3  # of all batch norms
# Bytes become (byte - 128) / 128.
_MEAN, _STD = 128 / 255, 128 / 255


def matches(flat: Mapping[str, Any]) -> bool:
    """Return whether these are the names of an Inception v3."""
    return _MARK in flat and 'AuxLogits.fc.weight' not in flat


def read(flat: Flat, extra: Mapping[str, Any]) -> TrainedModel:
    """Read the network; images of any size are resized by the model itself.

    Raises:
      UserError: if parameters are unknown, missing or have the wrong shape.
    """
    del extra
    folded = _fold(flat)
    arrays = torch_layout.read(folded, _table(folded), 1, _SOURCE)
    head = arrays.get('head/kernel')
    model = {'name': 'inception', 'num_classes': None if head is None else head.shape[1]}
    channels = arrays['conv_1a/conv/kernel'].shape[-1]
    if channels != 32:
        model['width_factor'] = channels / 32
    return TrainedModel.from_file(
        names.nest(arrays),
        model,
        None,
        _SOURCE,
        task={'name': 'classify', 'mean': (_MEAN,) * 3, 'std': (_STD,) * 3},
        transforms='drop_alpha',  # as torch-fidelity reads files; their size stays
    )


def _fold(flat: Flat) -> Flat:
    """Turn each batch norm into scale = gamma / sqrt(var + eps) and bias = beta - mean * scale."""
    folded: Flat = {}
    for name, array in flat.items():
        layer, _, leaf = name.rpartition('.')
        if not layer.endswith('.bn'):
            folded[name] = array
        elif leaf == 'weight':
            mean, var, beta = (
                names.require(flat, f'{layer}.{leaf}').astype(np.float64)
                for leaf in ('running_mean', 'running_var', 'bias')
            )
            scale = array / np.sqrt(var + _EPS)
            folded[f'{layer}.weight'] = scale.astype(np.float32)
            folded[f'{layer}.bias'] = (beta - mean * scale).astype(np.float32)
    return folded


def _table(flat: Flat) -> names.Table:
    """Build the rows (theirs, ours) of the layers in a file."""
    modules = {f'Conv2d_{place}': f'conv_{place.partition("_")[0]}' for place in _STEM}
    blocks = {f'Mixed_{block}': f'mixed_{block}' for block in _BLOCKS}
    for name in flat:
        block, _, remaining = name.partition('.')
        if block in blocks:
            branch = remaining.partition('.')[0]
            modules[f'{block}.{branch}'] = f'{blocks[block]}/{branch}'
    rows = [
        (f'{theirs}.{a}', f'{ours}/{b}')
        for theirs, ours in modules.items()
        for a, b in (('conv', 'conv'), ('bn', 'norm'))
    ]
    return (*rows, ('fc', 'head'))
