"""Small ViTs of timm of every form that is read, with timm's own outputs.

timm needs torchvision, so what it computes is stored. As a command this module asks it again:

    python tests/helpers/timm_forms.py > tests/golden/timm.json
"""

from __future__ import annotations

import json
import re
import sys
import tempfile
import zlib
from pathlib import Path
from typing import Any

import numpy as np

GOLDEN = Path(__file__).parents[1] / 'golden' / 'timm.json'
_SIDE, _PATCH, _HEAD, _CLASSES = 12, 4, 4, 3
# An architecture of each form: the family, the name, and arguments beside those that make it small.
FORMS: tuple[tuple[str, str, dict[str, Any]], ...] = (
    ('ViT', 'vit_tiny_patch16_224', {}),
    ('ViT', 'vit_base_patch16_gap_224', {}),
    ('ViT', 'eva_large_patch14_196', {}),
    ('hybrids of R26 and R50', 'vit_tiny_r_s16_p8_224', {'patch_size': 8, 'img_size': 64}),
    ('hybrids of R26 and R50', 'vit_small_r26_s32_224', {'patch_size': 1, 'img_size': 64}),
    ('DeiT', 'deit_tiny_patch16_224', {}),
    ('DeiT, distilled', 'deit_tiny_distilled_patch16_224', {}),
    ('BEiT', 'beit_base_patch16_224', {}),
    ('residual post-norm', 'vit_base_patch16_rpn_224', {}),
    ('DeiT III', 'deit3_small_patch16_224', {}),
    ('FlexiViT', 'flexivit_small', {}),
    ('SigLIP', 'vit_base_patch16_siglip_224', {}),
    ('SigLIP', 'vit_base_patch32_siglip_256', {}),
    ('CLIP', 'vit_xsmall_patch16_clip_224', {}),
    ('CLIP', 'vit_base_patch16_clip_quickgelu_224', {}),
    ('DINOv2', 'vit_small_patch14_dinov2', {}),
    ('DINOv2 with registers', 'vit_small_patch14_reg4_dinov2', {}),
    ('DINOv2 with registers', 'vit_giant_patch14_reg4_dinov2', {}),
    ('DINOv3', 'vit_small_patch16_dinov3', {}),
    ('DINOv3', 'vit_small_plus_patch16_dinov3_qkvb', {}),
    ('EVA', 'eva_giant_patch14_clip_224', {}),
    ('EVA-02', 'eva02_tiny_patch14_224', {}),
    ('EVA-02', 'eva02_base_patch14_224', {}),
    ('EVA-02 of CLIP', 'eva02_base_patch16_clip_224', {}),
    ('BEiT-3', 'beit3_base_patch16_224', {}),
    ('rotary', 'vit_small_patch16_rope_ape_224', {}),
    ('rotary', 'vit_betwixt_patch16_rope_reg4_gap_256', {}),
    ('PE, spatial and language', 'vit_pe_lang_large_patch14_448', {}),
    ('PE, spatial and language', 'vit_pe_spatial_base_patch16_512', {}),
    ('PE core', 'vit_pe_core_base_patch16_224', {}),
    ('RADIO', 'vit_base_patch16_radio_v3', {}),
    ('InternViT', 'vit_intern300m_patch14_448', {}),
    ('RMSNorm', 'test_vit4', {}),
    ('registers', 'vit_wee_patch16_reg1_gap_256', {}),
    ('registers', 'vit_so150m_patch16_reg4_map_256', {}),
    ('NaFlexViT', 'naflexvit_base_patch16_gap', {'pos_embed_grid_size': [3, 3]}),
    ('NaFlexViT', 'naflexvit_base_patch16_siglip', {'pos_embed_grid_size': [3, 3]}),
    ('NaFlexViT', 'naflexvit_base_patch16_par_gap', {'pos_embed_grid_size': [3, 3]}),
    ('NaFlexViT', 'naflexvit_base_patch16_radio_v3', {'pos_embed_grid_size': [3, 3]}),
    (
        'NaFlexViT, factorized positions',
        'naflexvit_base_patch16_parfac_gap',
        {'pos_embed_grid_size': [3, 3]},
    ),
)
# Families that are also written for timm.
WRITTEN = (
    *('ViT', 'hybrids of R26 and R50', 'DeiT', 'DeiT, distilled', 'DeiT III', 'FlexiViT', 'SigLIP'),
    *('CLIP', 'DINOv2', 'DINOv2 with registers', 'EVA', 'RADIO', 'InternViT', 'RMSNorm'),
    *('registers', 'NaFlexViT'),
)


def parameters(sizes: dict[str, list[int]]) -> dict[str, np.ndarray]:
    """Random numbers for arrays of these shapes, none of which is zero, one or like another."""
    found = {}
    for name, shape in sizes.items():
        rng = np.random.default_rng(zlib.crc32(name.encode()))
        is_scale = len(shape) == 1 and bool(re.search(r'(norm\w*|bn\d|norm\.\d)\.weight$', name))
        positive = name.endswith('running_var')
        values = rng.normal(size=shape) * 0.2 + is_scale
        found[name] = np.asarray(1 + np.abs(values) if positive else values, np.float32)
    return found


def images(side: int) -> np.ndarray:
    """The input in [-1, 1], [1 side side 3]."""
    return np.random.default_rng(0).uniform(-1, 1, (1, side, side, 3)).astype(np.float32)


def golden() -> dict[str, dict[str, Any]]:
    """By architecture: config.json, the shapes of the parameters, the logits, and the logits of
    images of twice the side.
    """
    rows = {name: asked(name, arguments) for _, name, arguments in FORMS}
    resized = {name: resized_logits(name, arguments) for _, name, arguments in FORMS}
    return {name: row | {'resized': resized[name]} for name, row in rows.items()}


def resized_logits(name: str, arguments: dict[str, Any]) -> list[float]:
    """The logits of images of twice the side, for which timm interpolates positions."""
    import timm

    from vit_jax.interop import files

    model, small = made(name, arguments)
    colors = {key: list(model.pretrained_cfg[key]) for key in ('mean', 'std')}
    side = 2 * small.pop('img_size')
    config = {
        'architecture': name,
        'num_classes': _CLASSES,
        'model_args': small,
        'pretrained_cfg': colors | {'num_classes': _CLASSES},
    }
    with tempfile.TemporaryDirectory() as folder:
        files.write_safetensors(folder, parameters(shapes(model)), config)
        loaded = timm.create_model(f'local-dir:{folder}', pretrained=True, img_size=side)
    return _logits(loaded.eval(), side)


def asked(name: str, arguments: dict[str, Any]) -> dict[str, Any]:
    """The row of an architecture in `golden`, with arguments beside those that make it small."""
    model, small = made(name, arguments)
    side, config = _side(model, small), model.pretrained_cfg
    return {
        'config': {
            'architecture': name,
            'global_pool': getattr(model, 'global_pool', 'avg'),
            'model_args': {key: small[key] for key in ('embed_dim', *arguments) if key in small},
            'pretrained_cfg': {
                **{key: list(config[key]) for key in ('mean', 'std')},
                'input_size': [3, side, side],
            },
        },
        'shapes': shapes(model),
        'logits': _logits(model, side),
        'block': _last_patch(model, side, norm=False),
        'normed': _last_patch(model, side, norm=True),
    }


def exact_logits(name: str, arguments: dict[str, Any]) -> list[float]:
    """The logits of `asked`, computed in float64."""
    model, small = made(name, arguments)
    return _logits(model.double(), _side(model, small))


def made(name: str, arguments: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """A small model with random parameters, and the arguments that it was made with."""
    import timm

    from vit_jax.interop.families import _timm

    row = _timm.architectures().get(name)
    small = (_small(row['num_heads']) if row else {}) | arguments
    return drawn(timm.create_model(name, **small)), small


def drawn(model: Any) -> Any:
    """The model with random parameters, in evaluation."""
    import torch

    arrays = parameters(shapes(model))
    model.load_state_dict({key: torch.from_numpy(value) for key, value in arrays.items()})
    return model.eval()


def shapes(model: Any) -> dict[str, list[int]]:
    """The shapes of a model's parameters and statistics, by name."""
    return {key: list(value.shape) for key, value in model.state_dict().items()}


def plain_config(name: str, arguments: dict[str, Any]) -> dict[str, Any]:
    """A config.json for images with values in [-1, 1], whose `img_size` is among the arguments."""
    side = arguments['img_size']
    return {
        'architecture': name,
        'num_classes': arguments['num_classes'],
        'model_args': arguments,
        'pretrained_cfg': {'input_size': [3, side, side], 'mean': [0.5] * 3, 'std': [0.5] * 3},
    }


def _side(model: Any, small: dict[str, Any]) -> int:
    side: int = small.get('img_size') or model.pretrained_cfg['input_size'][1]
    return side


def _logits(model: Any, side: int) -> list[float]:
    import torch

    mean, std = (np.array(model.pretrained_cfg[key]) for key in ('mean', 'std'))
    batch = ((images(side) + 1) / 2 - mean) / std
    tensor = torch.from_numpy(batch.transpose(0, 3, 1, 2))
    with torch.no_grad():
        found: list[float] = model(tensor.to(next(model.parameters()).dtype))[0].tolist()
    return found


def _last_patch(model: Any, side: int, norm: bool) -> list[float]:
    """The last patch after the last block, by `forward_intermediates`."""
    import torch

    mean, std = (np.array(model.pretrained_cfg[key]) for key in ('mean', 'std'))
    batch = ((images(side) + 1) / 2 - mean) / std
    tensor = torch.from_numpy(batch.transpose(0, 3, 1, 2)).float()
    with torch.no_grad():
        maps = model.forward_intermediates(tensor, norm=norm, intermediates_only=True)
    found: list[float] = maps[-1][0, :, -1, -1].tolist()
    return found


def _small(heads: int) -> dict[str, Any]:
    """Arguments that make a ViT small."""
    return {
        'embed_dim': _HEAD * heads,
        'patch_size': _PATCH,
        'img_size': _SIDE,
        'depth': 1,
        'num_classes': _CLASSES,
    }


def loaded_logits(folder: Path, batch: np.ndarray) -> list[float]:
    """The logits of a folder that timm reads, for one image."""
    import timm
    import torch

    model = timm.create_model(f'local-dir:{folder}', pretrained=True).eval()
    with torch.no_grad():
        found: list[float] = model(torch.from_numpy(batch.transpose(0, 3, 1, 2).copy()))[0].tolist()
    return found


def text() -> str:
    """The stored form: an architecture a line."""
    lines = (f'  {json.dumps(name)}: {json.dumps(row)}' for name, row in golden().items())
    return '{\n' + ',\n'.join(lines) + '\n}\n'


if __name__ == '__main__':
    sys.stdout.write(text())
