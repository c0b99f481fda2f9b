"""TIPSv2 with a DPT of transformers, for depth, normals or classes: safetensors and config.json.

Of several heads the one of `architectures` in config.json is read, or else the first.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np

from vit_jax.errors import UserError
from vit_jax.interop import names, torch_layout
from vit_jax.interop.families import transformers_tips
from vit_jax.interop.families._dpt import (
    HEADLESS,
    IS_HEAD,
    read_maps,
    require_heads,
    transpose_kernel,
)
from vit_jax.interop.families._transformers import GELU_NAMES, GELUS, square
from vit_jax.interop.files import Flat
from vit_jax.interop.trained import TrainedModel, Written, class_names_config, fields
from vit_jax.models.dpt import CLASSES, DEPTH, FUSION, NORMALS

SOURCE = "transformers TIPSv2's DPT"
POSITIONS = transformers_tips.POSITIONS
# Of each output, the prefix of names, and the name of the class.
_HEADS = {
    DEPTH: ('depth', 'DepthEstimation'),
    NORMALS: ('normals', 'NormalEstimation'),
    CLASSES: ('segmentation', 'SemanticSegmentation'),
}
_TASKS = {DEPTH: 'depth', NORMALS: 'normals', CLASSES: 'segment_pixels'}
_TABLE: names.Table = (
    ('reassemble.readout_projects.{0}', 'reassemble_{0}/readout'),
    ('reassemble.out_projections.{0}', 'reassemble_{0}/projection'),
    ('reassemble.resize_layers.{0}', 'reassemble_{0}/resize'),
    ('convs.{0}', 'neck_{0}'),
    ('fusion_blocks.{0}.residual_unit.conv{1}', 'fusion_{0}/unit1/conv{1}'),
    ('fusion_blocks.{0}.main_unit.conv{1}', 'fusion_{0}/unit2/conv{1}'),
    ('fusion_blocks.{0}.out_conv', 'fusion_{0}/projection'),
    ('project', 'decoder/conv1'),
    ('values', 'decoder/values'),
)


def matches(flat: Mapping[str, np.ndarray]) -> bool:
    """Return whether these are the names of TIPSv2's image tower with such a head."""
    is_tower = transformers_tips.VISION + 'register_tokens' in flat
    return is_tower and any(f'{name}_head.convs.0.weight' in flat for name, _ in _HEADS.values())


def read(flat: Flat, extra: Mapping[str, Any]) -> TrainedModel:
    """Read a Tipsv2DptForDepthEstimation, Tipsv2DptForNormalEstimation,
    Tipsv2DptForSemanticSegmentation, or one head of a Tipsv2DptForDensePrediction.

    Raises:
      UserError: if config.json is missing or contradicts the parameters, or these are unknown,
        missing or have the wrong shape.
    """
    backbone = extra.get('backbone_config')
    if backbone is None or not {'fusion_hidden_size', 'neck_hidden_sizes'} <= extra.keys():
        raise UserError(f'{SOURCE}: put its config.json next to the file')
    output, others = _choose(flat, extra)
    prefix = transformers_tips.VISION
    image = transformers_tips.read_vision(
        {n.removeprefix(prefix): x for n, x in flat.items() if n.startswith(prefix)},
        {**{k: x for k, x in extra.items() if k not in _OF_WHOLE}, **backbone},
    )
    heads = _read_head(flat, output, [float(x) for x in extra['reassemble_factors']])
    model = _fields(image, extra, backbone, output, heads)
    params = {**image.params, **names.nest(heads)}
    if not model['final_norm']:
        params['encoder'] = {n: x for n, x in params['encoder'].items() if n != 'norm'}
    require_heads(params, model, _table(output), SOURCE)
    task = {key: x for key, x in image.task_config.items() if key in ('mean', 'std')}
    task['name'] = _TASKS[output]
    if output == DEPTH:
        task['deepest'] = float(extra.get('max_depth', 10.0))
    notes = image.notes
    if others:
        notes += (f'left out: its heads for {" and ".join(others)}',)
    imported = TrainedModel.from_file(
        params, model, image.image_size, SOURCE, task=task, notes=notes
    )
    return dataclasses.replace(imported, positions=POSITIONS)


_OF_WHOLE = ('model_type', 'architectures', 'backbone_config', 'hidden_size', 'image_size')


def _choose(flat: Flat, extra: Mapping[str, Any]) -> tuple[str, list[str]]:
    """Return the output to read, and the names of other heads in the file."""
    named = ' '.join(map(str, extra.get('architectures') or ()))
    heads = [key for key, (name, _) in _HEADS.items() if f'{name}_head.convs.0.weight' in flat]
    wanted = [key for key in heads if _HEADS[key][1] in named]
    output = (wanted or heads)[0]
    return output, [_HEADS[key][0] for key in heads if key != output]


def _read_head(flat: Flat, output: str, factors: list[float]) -> Flat:
    """Convert a head to our layouts."""
    prefix = f'{_HEADS[output][0]}_head.'
    theirs = {n.removeprefix(prefix): x for n, x in flat.items() if n.startswith(prefix)}
    used = {n.replace(prefix, 'values.', 1): x for n, x in theirs.items()}
    used = {n: x for n, x in used.items() if not n.startswith('fusion_blocks.0.residual_unit.')}
    if 'values.weight' in used:
        used['values.weight'] = used['values.weight'][..., None, None]
    heads = torch_layout.read(used, _TABLE, 1, SOURCE)
    return {name: transpose_kernel(name, x, factors) for name, x in heads.items()}


def _table(output: str) -> names.Table:
    """Return the table with the names in the file."""
    prefix = f'{_HEADS[output][0]}_head.'
    return tuple((prefix + (prefix[:-1] if a == 'values' else a), b) for a, b in _TABLE)


def _fields(
    image: TrainedModel,
    extra: Mapping[str, Any],
    backbone: Mapping[str, Any],
    output: str,
    heads: Flat,
) -> dict[str, Any]:
    """Return the model's fields."""
    of_vit = {key: x for key, x in image.model_config.items() if key not in HEADLESS}
    gelu = extra.get('readout_activation', 'gelu_pytorch_tanh')
    if gelu not in GELUS:
        raise UserError(f'{SOURCE}: readout_activation {gelu!r} is not supported')
    if output == DEPTH and extra.get('depth_decoder_activation', 'relu') != 'relu':
        raise UserError(
            f'{SOURCE}: depth_decoder_activation {extra["depth_decoder_activation"]!r} is not '
            "supported (only 'relu')"
        )
    count = heads['decoder/values/bias'].shape[0] if 'decoder/values/bias' in heads else 0
    least, largest = extra.get('min_depth', 1e-3), extra.get('max_depth', 10.0)
    return {
        **of_vit,
        'name': 'dpt',
        'class_token': 'cls_token' in image.params,
        'maps': read_maps(extra, backbone, SOURCE),
        'readout': 'project',
        'readout_gelu': GELUS[gelu],
        'fusion_width': int(extra['fusion_hidden_size']),
        'output': output,
        'num_classes': count if output == CLASSES else None,
        'head_width': 0,
        'fits_image': False,
        'bins': (count, float(least), float(largest)) if output == DEPTH else (),
        'final_norm': bool(backbone.get('apply_layernorm', True)),
        'no_bias': '|'.join(filter(None, (of_vit.get('no_bias', ''), FUSION))),
    }


def write(trained: TrainedModel) -> Written:
    """Write the files of the class of transformers with this output.

    Raises:
      UserError: if transformers has no such model, or the image size is unknown.
    """
    module, model = trained.model, fields(trained.model)
    lacking = {
        'fits_image': module.fits_image,
        'readout': module.readout != 'project',
        'class_token': not module.class_token,
        'block.mlp': module.block.mlp != 'mlp',
        'registers': not module.registers,
        'bins': module.output == DEPTH and not module.bins,
        'no_bias': FUSION not in module.no_bias,
    }
    if wrong := next((key for key, is_lacking in lacking.items() if is_lacking), ''):
        raise UserError(
            f'transformers has no such model: without head_width, as in TIPSv2, it has no {wrong} '
            f'{model.get(wrong, "")!r}'
        )
    parts = names.flatten(trained.params)
    heads = {name: x for name, x in parts.items() if IS_HEAD.match(name)}
    vision = {name: x for name, x in parts.items() if name not in heads}
    if not module.block.final_norm:  # files have one, which nothing reads
        norm = np.ones(module.width, np.float32)
        vision |= {'encoder/norm/scale': norm, 'encoder/norm/bias': 0 * norm}
    tower = module.backbone_module()
    size = trained.image_size or square(vision, module.patch_size, module.positioned_tokens)
    heads = {name: transpose_kernel(name, x, module.factors) for name, x in heads.items()}
    arrays = torch_layout.write(heads, _table(module.output))
    values = f'{_HEADS[module.output][0]}_head.' * 2 + 'weight'
    arrays[values] = arrays[values][..., 0, 0]
    return Written(
        arrays | transformers_tips.write_vision(vision, tower, transformers_tips.VISION),
        _config(trained, size),
        preprocessor=transformers_tips.processor(trained, 3, size)
        | {'image_processor_type': 'Tipsv2DptImageProcessor'},
    )


def _config(trained: TrainedModel, size: tuple[int, int]) -> dict[str, Any]:
    """Build config.json."""
    module = trained.model
    layers = list(module.hidden_layers)
    config: dict[str, Any] = {
        'model_type': 'tipsv2_dpt',
        'architectures': [f'Tipsv2DptFor{_HEADS[module.output][1]}'],
        'reassemble_factors': list(module.factors),
        'neck_hidden_sizes': [channels for _, _, channels in module.maps],
        'fusion_hidden_size': module.fusion_width,
        'readout_activation': GELU_NAMES[module.readout_gelu or module.block.gelu],
        'backbone_config': {
            **transformers_tips.vision_config(module.backbone_module(), size),
            'out_indices': layers,
            'out_features': [f'stage{i}' for i in layers],
            'apply_layernorm': module.block.final_norm,
            'reshape_hidden_states': False,
        },
    }
    if module.output == DEPTH:
        count, least, largest = module.bins
        config |= {'num_depth_bins': int(count), 'min_depth': least, 'max_depth': largest}
    if module.output == CLASSES:
        config |= class_names_config(trained.class_names, module.num_classes)
    return config
