"""Parameter names and config.json keys of DETRs, and writing them for transformers."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from vit_jax.data.transforms import parse, pillow
from vit_jax.errors import UserError
from vit_jax.interop import names, preprocessing, torch_layout, trained
from vit_jax.interop.files import Flat
from vit_jax.interop.trained import TrainedModel, Written
from vit_jax.models.detr import Model

BN_EPS = 1e-5
_NORM_EPS = 1e-5
_MASK_STRIDE = 4
ANY_LENGTH = 1_000_000  # pixels; transformers requires a limit for the longer side
_PANOPTIC = 'detr_panoptic'
# Suffixes of biases of the ResNet's norms, in transformers and in torchvision.
_NORM_BIASES = ('normalization.bias', *(f'bn{i}.bias' for i in (1, 2, 3)), 'downsample.1.bias')
_DEFAULTS = {field.name: field.default for field in dataclasses.fields(Model)}


def transformers(imported: TrainedModel) -> Written:
    """Write the files of a DetrForObjectDetection; of a TableTransformerForObjectDetection if
    blocks are pre-norm, of a DetrForSegmentation if there are masks.

    Raises:
      UserError: if transformers has no such DETR.
    """
    model = {**_DEFAULTS, **imported.model_config}
    _require_theirs(model)
    panoptic = model['name'] == _PANOPTIC
    channels = imported.params['backbone']['root']['conv']['kernel'].shape[2]
    arrays = add_statistics(torch_layout.write(names.flatten(imported.params), TABLE))
    resize = resize_keys(imported.transforms)
    notes = []
    if panoptic:
        arrays = {
            name if name.startswith(('mask_head', 'bbox_attention')) else f'detr.{name}': array
            for name, array in arrays.items()
        }
        notes.append('the list of stuff classes is lost: the files cannot store it')
    return Written(
        arrays,
        _config(model, channels)
        | trained.class_names_config(imported.class_names, model['num_classes']),
        tuple(notes),
        preprocessor(imported, channels, resize),
    )


def _require_theirs(model: dict[str, Any]) -> None:
    panoptic = model['name'] == _PANOPTIC
    unknown = (
        (model['backbone_norm'] != 'frozen', f'{model["backbone_norm"]} norm in its ResNet'),
        (panoptic and model['norm'] != 'post', f'{model["norm"]}-norm blocks and masks'),
        (model['dilate'], "a dilated stage (DC5), except in timm's ResNets"),
        (model['norm_eps'] != _NORM_EPS, f'norm_eps {model["norm_eps"]:g}'),
        (not model['num_classes'], 'no classes'),
        (
            panoptic and len(model['layers']) != 4,
            f'masks on a ResNet of {len(model["layers"])} stages (only 4)',
        ),
        (
            model.get('mask_stride', _MASK_STRIDE) != _MASK_STRIDE,
            f'masks at a stride of {model.get("mask_stride")} pixels (only {_MASK_STRIDE})',
        ),
        (model.get('box_maps', False), 'masks that use the boxes'),
        (
            panoptic and (model['width'] + model['num_heads']) % 8,
            f'masks where width {model["width"]} plus {model["num_heads"]} heads is not a '
            'multiple of 8',
        ),
    )
    for is_unsupported, what in unknown:
        if is_unsupported:
            raise UserError(f'transformers has no DETR with {what}')


def _config(model: dict[str, Any], channels: int) -> dict[str, Any]:
    stages = len(model['layers'])
    sizes = [4 * model['backbone_width'] * 2**i for i in range(stages)]
    panoptic = model['name'] == _PANOPTIC
    model_type, kind = (
        ('table-transformer', 'TableTransformerForObjectDetection')
        if model['norm'] == 'pre'
        else ('detr', 'DetrForSegmentation' if panoptic else 'DetrForObjectDetection')
    )
    # The mask head uses all stages, the detector the last one.
    read = [f'stage{i + 1}' for i in range(0 if panoptic else stages - 1, stages)]
    return {
        'model_type': model_type,
        'architectures': [kind],
        'use_timm_backbone': False,
        'use_pretrained_backbone': False,
        'backbone': None,
        'backbone_config': {
            'model_type': 'resnet',
            'layer_type': 'bottleneck',
            'num_channels': channels,
            'embedding_size': model['backbone_width'],
            'hidden_sizes': sizes,
            'depths': list(model['layers']),
            'out_features': read,
        },
        'num_channels': channels,
        'num_queries': model['num_queries'],
        'd_model': model['width'],
        'activation_function': 'silu' if model['activation'] == 'swish' else model['activation'],
        'dilation': False,
        **{
            f'{stack}_{key}': value
            for stack, depth, heads, mlp_dim in (
                ('encoder', model['depth'], None, None),
                (
                    'decoder',
                    model['decoder_depth'],
                    model['decoder_heads'],
                    model['decoder_mlp_dim'],
                ),
            )
            for key, value in (
                ('layers', depth),
                ('attention_heads', heads or model['num_heads']),
                ('ffn_dim', mlp_dim or model['mlp_dim']),
            )
        },
        **{f'{place}dropout': model['dropout'] for place in ('', 'attention_', 'activation_')},
    }


def add_statistics(arrays: Flat) -> Flat:
    """Convert the ResNet's `FrozenNorm`s to batch norms with mean 0 and standard deviation 1."""
    result, variance = dict(arrays), np.float32(1) - np.float32(BN_EPS)
    for name, array in arrays.items():
        if name.endswith(_NORM_BIASES):
            norm, zeros = name.removesuffix('.bias'), np.zeros_like(array)
            result |= {f'{norm}.running_mean': zeros, f'{norm}.running_var': zeros + variance}
    return result


def resize_keys(transforms: str) -> dict[str, Any] | None:
    """Return transformers' keys for resizing images; None if images are not resized."""
    resize_args = parse.arguments_of(transforms, 'resize_small')
    if resize_args is None:
        return None
    longest = resize_args['max'] or ANY_LENGTH
    return {
        'size': {'shortest_edge': resize_args['size'], 'longest_edge': longest},
        'resample': pillow.METHODS[resize_args['method']].value,
    }


def preprocessor(
    imported: TrainedModel, channels: int, resize: dict[str, Any] | None
) -> dict[str, Any]:
    """Build the keys of preprocessor_config.json; `resize` comes from `resize_keys`."""
    panoptic = imported.config.task.name == 'segment_panoptic'
    return {
        **preprocessing.preprocessor(imported, channels, (0, 0)),
        'image_processor_type': 'DetrImageProcessor',
        'format': 'coco_panoptic' if panoptic else 'coco_detection',
        'do_resize': resize is not None,
        'size': {'shortest_edge': 800, 'longest_edge': 1333},
        **(resize or {}),
        'do_pad': True,
    }


_PARTS = ('query', 'key', 'value')


def _prefix_rows(
    their_prefix: str, our_prefix: str, rows: Iterable[tuple[str, str]]
) -> names.Table:
    return tuple((f'{their_prefix}.{a}', f'{our_prefix}/{b}') for a, b in rows)


def _resnet(prefix: str) -> names.Table:
    """Return torchvision's names."""
    block = f'{prefix}layer{{1}}.{{0}}'
    return (
        (f'{prefix}conv1', 'backbone/root/conv'),
        (f'{prefix}bn1', 'backbone/root/norm'),
        *_prefix_rows(
            block,
            'backbone/stage_{0}/block_{0}',
            (
                ('conv{1}', 'conv{1}'),
                ('bn{1}', 'norm{1}'),
                ('downsample.0', 'proj'),
                ('downsample.1', 'proj_norm'),
            ),
        ),
    )


def _transformers_resnet(prefix: str) -> names.Table:
    """Return the names of transformers' own ResNet."""
    return (
        (f'{prefix}embedder.embedder.convolution', 'backbone/root/conv'),
        (f'{prefix}embedder.embedder.normalization', 'backbone/root/norm'),
        *_prefix_rows(
            f'{prefix}encoder.stages.{{0}}.layers.{{0}}',
            'backbone/stage_{0}/block_{0}',
            (
                ('layer.{0}.convolution', 'conv{1}'),
                ('layer.{0}.normalization', 'norm{1}'),
                ('shortcut.convolution', 'proj'),
                ('shortcut.normalization', 'proj_norm'),
            ),
        ),
    )


def _attention(their_prefix: str, our_prefix: str) -> tuple[tuple[str, str], ...]:
    """Return transformers' names of attention."""
    return (
        *((f'{their_prefix}.{part[0]}_proj', f'{our_prefix}/{part}') for part in _PARTS),
        (f'{their_prefix}.out_proj', f'{our_prefix}/out'),
        (f'{their_prefix}.o_proj', f'{our_prefix}/out'),
    )


def _torch_attention(their_prefix: str, our_prefix: str) -> tuple[tuple[str, str], ...]:
    """Return PyTorch's names of attention, fused projections split."""
    parts = ((f'{their_prefix}.{part[0]}', f'{our_prefix}/{part}') for part in _PARTS)
    return (*parts, (f'{their_prefix}.out_proj', f'{our_prefix}/out'))


_TRANSFORMERS_BLOCK = (
    *_attention('self_attn', 'attention'),
    *_attention('encoder_attn', 'cross'),
    ('self_attn_layer_norm', 'attention_norm'),
    ('encoder_attn_layer_norm', 'cross_norm'),
    ('final_layer_norm', 'mlp_norm'),
    *((f'{prefix}fc{i}', f'mlp/fc{i}') for prefix in ('', 'mlp.') for i in (1, 2)),
)
_AUTHORS_BLOCK = (*_torch_attention('self_attn', 'attention'), ('norm1', 'attention_norm'))
_AUTHORS_MLP = (('linear1', 'mlp/fc1'), ('linear2', 'mlp/fc2'))

# Names of the authors and on the hub, then of transformers 5.
_MASK_HEAD: names.Table = (
    *(
        (f'bbox_attention.{part[0]}_{end}', f'bbox_attention/{part}')
        for part in _PARTS[:2]
        for end in ('linear', 'proj')
    ),
    ('mask_head.lay{1}', 'mask_head/conv_{0}'),
    ('mask_head.gn{1}', 'mask_head/norm_{0}'),
    ('mask_head.adapter{1}', 'mask_head/adapter_{0}'),
    ('mask_head.out_lay', 'mask_head/out'),
    ('mask_head.conv{1}.conv', 'mask_head/conv_{0}'),
    ('mask_head.conv{1}.norm', 'mask_head/norm_{0}'),
    ('mask_head.fpn_stages.{0}.fpn_adapter', 'mask_head/adapter_{0}'),
    *(
        (f'mask_head.fpn_stages.{i}.refine.{kind}', f'mask_head/{kind}_{i + 2}')
        for i in range(3)
        for kind in ('conv', 'norm')
    ),
    ('mask_head.output_conv', 'mask_head/out'),
)

_AUTHORS_RESNET = _resnet('backbone.0.body.')
_AUTHORS: names.Table = (
    *_prefix_rows(
        'transformer.encoder.layers.{0}',
        'encoder/block_{0}',
        (*_AUTHORS_BLOCK, *_AUTHORS_MLP, ('norm2', 'mlp_norm')),
    ),
    *_prefix_rows(
        'transformer.decoder.layers.{0}',
        'decoder/block_{0}',
        (
            *_AUTHORS_BLOCK,
            *_torch_attention('multihead_attn', 'cross'),
            ('norm2', 'cross_norm'),
            *_AUTHORS_MLP,
            ('norm3', 'mlp_norm'),
        ),
    ),
    ('transformer.encoder.norm', 'encoder/norm'),
    ('transformer.decoder.norm', 'decoder/norm'),
    ('input_proj', 'input_proj'),
    ('query_embed.weight', 'query_embed'),
    ('class_embed', 'class_embed'),
    ('bbox_embed.layers.{0}', 'bbox_embed/layer_{0}'),
)

# If several rows have the same right side, the first is written: names of transformers 4.
TABLE: names.Table = (
    *_MASK_HEAD,
    *(
        row
        for prefix in ('model.backbone.conv_encoder.model.', 'model.backbone.model.')
        for row in (*_transformers_resnet(prefix), *_resnet(prefix))
    ),
    *_AUTHORS_RESNET,
    *_resnet(''),
    *(
        row
        for stack in ('encoder', 'decoder')
        for row in _prefix_rows(
            f'model.{stack}.layers.{{0}}', f'{stack}/block_{{0}}', _TRANSFORMERS_BLOCK
        )
    ),
    ('model.encoder.layernorm', 'encoder/norm'),  # Table Transformer
    ('model.decoder.layernorm', 'decoder/norm'),
    ('model.input_projection', 'input_proj'),
    ('model.query_position_embeddings.weight', 'query_embed'),
    ('class_labels_classifier', 'class_embed'),
    ('bbox_predictor.layers.{0}', 'bbox_embed/layer_{0}'),
    *_AUTHORS,
)
# Names only in the authors' files.
AUTHORS: names.Table = (*_MASK_HEAD, *_AUTHORS_RESNET, *_AUTHORS)


_SOURCE = 'DETR'
_HEADS = 8  # in all released models; not determined by shapes
_TYPES = ('detr', 'table-transformer')
# Why detectors with similar names are not DETRs.
_OTHERS = {
    'conditional_detr': 'the queries of its decoder are conditioned on the content',
    'deformable_detr': 'it attends to sampled points of several feature maps',
    'dab-detr': 'its queries are boxes, which the decoder refines',
}
# Parts of their parameter names, to recognize files without config.json.
_OTHER_NAMES = {
    '.sa_qcontent_proj.': 'conditional_detr',
    '.q_content_proj.': 'conditional_detr',
    '.sampling_offsets.': 'deformable_detr',
}
# transformers.DetrConfig.activation_function
_ACTIVATIONS = {'relu': 'relu', 'gelu': 'gelu', 'silu': 'swish', 'swish': 'swish'}
# timm's ResNets equal to torchvision's; others compute something else under the same names.
_TIMM = re.compile(r'((tv|gluon|ssl|swsl)_)?resnet(50|101|152)(_v1b)?(\.\w+)?')
# Required values in the config of transformers' own ResNet.
_RESNET = {
    'hidden_act': 'relu',
    'layer_type': 'bottleneck',
    'downsample_in_bottleneck': False,
    'downsample_in_first_stage': False,
}


def require_detr(config: Mapping[str, Any], names: Mapping[str, Any]) -> None:
    """Raise UserError for files of other detectors.

    Args:
      config: Parsed config.json; empty if there is none.
      names: Names of the arrays.

    Raises:
      UserError: if they belong to a different detector, or if positions are not sine embeddings.
    """
    other_kinds = (
        kind for part, kind in _OTHER_NAMES.items() if any(part in name for name in names)
    )
    kind = config.get('model_type') or next(other_kinds, _TYPES[0])
    if kind not in _TYPES:
        reason = f': {_OTHERS[kind]}' if kind in _OTHERS else ''
        raise UserError(f'{_SOURCE}: a {kind!r} is not a detr{reason}')
    if config.get('position_embedding_type', 'sine') != 'sine':
        raise UserError(
            f'{_SOURCE}: position_embedding_type {config["position_embedding_type"]!r} is not '
            "supported (only 'sine')"
        )


def heads(config: Mapping[str, Any]) -> tuple[int, int]:
    """Return the numbers of heads of encoder and decoder.

    Raises:
      UserError: if they are not positive integers.
    """
    encoder = config.get('encoder_attention_heads', _HEADS)
    decoder = config.get('decoder_attention_heads', encoder)
    for number in (encoder, decoder):
        if not isinstance(number, int) or number < 1:
            raise UserError(f'{_SOURCE}: config.json has {number!r} attention heads')
    return encoder, decoder


def keywords(config: Mapping[str, Any], own_resnet: bool) -> dict[str, Any]:
    """Return keywords of `config.model` that shapes do not determine, except numbers of heads.

    Args:
      config: Parsed config.json; empty if there is none.
      own_resnet: Whether the ResNet is transformers' own (by its names), not timm's.

    Raises:
      UserError: if the activation, the dropout or the ResNet is not supported.
    """
    name = config.get('activation_function', 'relu')
    if name not in _ACTIVATIONS:
        raise UserError(
            f'{_SOURCE}: activation_function {name!r} is not supported (only '
            f'{", ".join(_ACTIVATIONS)})'
        )
    dropout = {'dropout': float(config['dropout'])} if 'dropout' in config else {}
    if any(not 0 <= rate < 1 for rate in dropout.values()):
        raise UserError(f'{_SOURCE}: config.json has dropout {config["dropout"]}')
    return {
        'activation': _ACTIVATIONS[name],
        'dilate': _dilated(config, own_resnet),
        **dropout,
    }


def _dilated(config: Mapping[str, Any], own_resnet: bool) -> bool:
    """Return whether the last stage is dilated: never in transformers' own ResNet."""
    backbone = config.get('backbone_config') or {}
    if own_resnet:
        _require_plain(backbone)
        return False
    name = backbone.get('backbone') or config.get('backbone') or 'resnet50'
    if not _TIMM.fullmatch(str(name)):
        raise UserError(f'{_SOURCE}: its backbone {name!r} is not known to be a plain ResNet')
    # Version 5 writes the backbone's config, version 4 does not.
    options = backbone or config.get('backbone_kwargs') or {}
    plain = 16 if config.get('dilation', False) and not backbone else 32
    stride = options.get('output_stride') or plain
    if stride not in (16, 32):
        raise UserError(f'{_SOURCE}: a ResNet of output_stride {stride} is not supported')
    return bool(stride == 16)


def _require_plain(backbone: Mapping[str, Any]) -> None:
    for key, value in _RESNET.items():
        if (actual := backbone.get(key, value)) != value:
            raise UserError(
                f'{_SOURCE}: a ResNet with {key}={actual!r} is not supported (only {value!r})'
            )
