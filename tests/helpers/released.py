"""Small checkpoints in the forms that other code bases release, one for each family."""

from __future__ import annotations

import pathlib
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from vit_jax import interop
from vit_jax.interop import files, names, torch_layout
from vit_jax.interop.families import _swin, timm_swin, timm_vit
from vit_jax.interop.trained import TrainedModel
from vit_jax.models import bit_resnet, detr, detr_panoptic, mae, swin, vit

SIZES: dict[str, dict[str, Any]] = {
    'vit': {'patch_size': 4, 'width': 16, 'depth': 1, 'mlp_dim': 24, 'num_heads': 2},
    'mae': {
        **{'patch_size': 4, 'width': 16, 'depth': 1, 'mlp_dim': 24, 'num_heads': 2},
        **{'decoder_width': 16, 'decoder_depth': 1, 'decoder_mlp_dim': 24, 'decoder_heads': 2},
    },
    'swin': {'patch_size': 2, 'width': 8, 'depths': (1, 1), 'num_heads': (1, 2), 'window': 2},
    'bit_resnet': {'layers': (1,)},
    'detr': {
        **{'layers': (1, 1, 1, 1), 'backbone_width': 4, 'num_queries': 3, 'width': 16},
        **{'depth': 1, 'decoder_depth': 1, 'mlp_dim': 8, 'num_heads': 8},
    },
}
SIZES['detr_panoptic'] = SIZES['detr']
MODELS = {
    'vit': vit.Model,
    'mae': mae.Model,
    'swin': swin.Model,
    'bit_resnet': bit_resnet.Model,
    'detr': detr.Model,
    'detr_panoptic': detr_panoptic.Model,
}
CLASSES = 5
SIDE = 16


def trained(name: str) -> TrainedModel:
    """A model of SIZES whose parameters are drawn from a fixed seed."""
    keywords = dict(SIZES[name]) | ({} if name == 'mae' else {'num_classes': CLASSES})
    images = jax.ShapeDtypeStruct((1, SIDE, SIDE, 3), np.float32)
    noise = [jax.ShapeDtypeStruct((1, (SIDE // 4) ** 2), np.float32)] if name == 'mae' else []
    init = jax.eval_shape(MODELS[name](**keywords).init, jax.random.key(0), images, *noise)
    rng = np.random.default_rng(0)
    params = jax.tree.map(lambda x: 0.1 * rng.normal(size=x.shape).astype(x.dtype), init['params'])
    tasks = {'mae': 'reconstruct', 'detr': 'detect', 'detr_panoptic': 'segment_panoptic'}
    task = {'name': tasks.get(name, 'classify')}
    model = {'name': name, **keywords}
    made = TrainedModel.from_file(params, model, (SIDE, SIDE), 'a test', task=task)
    return made.adapted(model=made.model)


def _timm(name: str, folder: pathlib.Path) -> None:
    """The arrays of a ViT or Swin under timm's names, and its config.json."""
    params = trained(name).params
    if name == 'vit':
        arrays = torch_layout.write(names.flatten(params), timm_vit.TABLE)
    else:
        arrays = _swin.to_pytorch(params, timm_swin.TIMM)
    _fuse(arrays)
    config = {
        'architecture': 'vit_tiny_patch4_16' if name == 'vit' else 'swin_test',
        'num_classes': CLASSES,
        'model_args': {'num_heads': 2, 'embed_dim': 16, 'img_size': SIDE},
        'pretrained_cfg': {
            **{'input_size': [3, SIDE, SIDE], 'mean': [0.485] * 3, 'std': [0.229] * 3},
            **{'interpolation': 'bicubic', 'crop_pct': 0.9},
        },
    }
    files.write_safetensors(folder, arrays, config)


def _fuse(arrays: dict[str, np.ndarray]) -> None:
    """Join queries, keys and values in place."""
    for part in [key for key in arrays if '.attn.q.' in key]:
        parts = [arrays.pop(part.replace('.q.', f'.{letter}.')) for letter in 'qkv']
        arrays[part.replace('.q.', '.qkv.')] = np.concatenate(parts)


def write_dinov2(params: dict[str, Any], folder: pathlib.Path) -> pathlib.Path:
    """Write a ViT's parameters under the names of DINOv2's authors."""
    arrays = dict(torch_layout.write(names.flatten(params), timm_vit.TABLE))
    _fuse(arrays)
    arrays['mask_token'] = np.zeros((1, params['cls_token'].shape[-1]), np.float32)
    files.write_safetensors(folder, arrays)
    return folder


def _written(name: str, place: str, family: str = '') -> Callable[[pathlib.Path], None]:
    return lambda folder: interop.write(trained(name), f'{family}{folder / place}') and None


def _big_vision(folder: pathlib.Path) -> None:
    """A ViT whose blocks are scanned."""
    interop.write(trained('vit'), folder / 'model.npz')
    flat, _ = files.read_arrays(folder / 'model.npz')
    scanned = {
        key.replace('encoderblock_0', 'encoderblock'): value[None]
        if 'encoderblock' in key
        else value
        for key, value in flat.items()
    }
    scanned['pos_embedding'] = scanned.pop('Transformer/posembed_input/pos_embedding')[:, 1:]
    files.write_npz(folder / 'model.npz', {f'params/{k}': v for k, v in scanned.items()})


FORMS: dict[str, Callable[[pathlib.Path], None]] = {
    **{f'{name} npz': _written(name, 'model.npz') for name in ('vit', 'bit_resnet')},
    'big_vision': _big_vision,
    **{f'{name} transformers': _written(name, '.') for name in SIZES},
    **{f'{name} authors': _written(name, '.', f'authors_{name}:') for name in ('mae', 'detr')},
    'detr_panoptic authors': _written('detr_panoptic', '.', 'authors_detr:'),
    'bit_resnet timm': _written('bit_resnet', '.', 'timm_bit:'),
    'vit timm': lambda folder: _timm('vit', folder),
    'swin timm': lambda folder: _timm('swin', folder),
}


def write(form: str, folder: pathlib.Path) -> pathlib.Path:
    """Write a checkpoint of FORMS to a new folder, and return the path to load."""
    folder.mkdir(parents=True)
    FORMS[form](folder)
    file = folder / 'model.npz'
    return file if file.exists() else folder
