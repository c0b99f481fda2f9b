"""EoMT of transformers, on DINOv2 or DINOv3: safetensors and config.json (tue-mps's)."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from flax.traverse_util import flatten_dict

from vit_jax.data.transforms import parse
from vit_jax.errors import UserError
from vit_jax.interop import names, normalization, preprocessing, torch_layout
from vit_jax.interop.families import _transformers, transformers_dinov2, transformers_dinov3
from vit_jax.interop.files import Flat
from vit_jax.interop.trained import TrainedModel, Written, class_names_config, fields
from vit_jax.models.eomt import ENCODER, Model
from vit_jax.tree_paths import require_fit

POSITIONS = 'bicubic'
_SOURCE = 'transformers EoMT'
_TYPES = ('eomt', 'eomt_dinov3')
_BLOCK = (
    *((norm, norm) for norm in ('norm1', 'norm2')),
    *((f'attention.{name[0]}_proj', f'attention/{name}') for name in ('query', 'key', 'value')),
    *((f'layer_scale{i}.lambda1', f'layer_scale{i}') for i in (1, 2)),
)
_MLP = (('mlp.fc1', 'mlp/fc1'), ('mlp.fc2', 'mlp/fc2'))
_GATED = (('gate_proj', 'gate'), ('up_proj', 'fc1'), ('down_proj', 'fc2'))
_HEADS: names.Table = (
    ('query.weight', 'query_embed'),
    ('class_predictor', 'class_head'),
    ('mask_head.fc{1}', 'mask_head/fc{1}'),
    ('upscale_block.block.{0}.conv2', 'upscaler/step_{0}/depthwise'),
    ('upscale_block.block.{0}.layernorm2d', 'upscaler/step_{0}/norm'),
    ('upscale_block.block.{0}.conv1', 'upscaler/step_{0}'),
)
_UNUSED = ('attn_mask_probs', 'criterion.empty_weight')
_POSITIONS = 'embeddings.position_embeddings.weight'
_DEFAULTS = {'layer_norm_eps': 1e-6, 'num_attention_heads': 16, 'rope_theta': 100.0}
# Task fields by keys of config.json.
_TASK = {
    'none_weight': 'no_object_weight',
    **{f'{name}_weight': f'{name}_weight' for name in ('class', 'mask', 'dice')},
    **{'points': 'train_num_points', 'oversample': 'oversample_ratio'},
    'importance': 'importance_sample_ratio',
}
# Stuff classes by number of classes: COCO's and ADE20K's, in the authors' order.
_ADE20K = (
    *(0, 1, 2, 3, 4, 5, 6, 9, 11, 13, 16, 17, 21, 25, 26, 28, 29, 34, 40, 46, 48, 51, 52, 54, 59),
    *(60, 61, 63, 68, 77, 79, 84, 91, 94, 96, 99, 100, 101, 105, 106, 109, 113, 114, 117, 122, 128),
    *(131, 140, 141, 145),
)
STUFF = {133: tuple(range(80, 133)), 150: _ADE20K}


def matches(flat: Mapping[str, np.ndarray]) -> bool:
    """Return whether these are the names of such a model."""
    return {'query.weight', 'class_predictor.weight', 'mask_head.fc3.weight'} <= flat.keys()


def read(flat: Flat, extra: Mapping[str, Any]) -> TrainedModel:
    """Read an EomtForUniversalSegmentation, or an EomtDinov3ForUniversalSegmentation.

    Raises:
      UserError: if parameters are unknown, missing or have the wrong shape, or contradict the
        config.
    """
    config = {**_DEFAULTS, **extra}
    heads = {name: x for name, x in flat.items() if names.to_ours(name, _HEADS) is not None}
    encoder = {n: x for n, x in flat.items() if n not in heads and n not in _UNUSED}
    trained = _read_encoder(encoder, extra, config)
    params = trained.params | names.nest(_read_heads(heads))
    model = {**trained.model_config, 'name': 'eomt', **_head_fields(params, flat, config)}
    _require_heads(params, model)
    notes: tuple[str, ...] = ()
    if np.any(flat.get('attn_mask_probs', 0)):
        notes += ('transformers also masks attention after training; this model does not',)
    task, data = _task(extra, model['num_classes']), prepare(extra, trained.image_size)
    imported = TrainedModel.from_file(
        params, model, trained.image_size, _SOURCE, task=task, notes=notes
    )
    return imported.with_groups(data={**imported.config.data, **data})


def _read_encoder(flat: Flat, extra: Mapping[str, Any], config: Mapping[str, Any]) -> TrainedModel:
    """Read the ViT."""
    rotary, gated = _POSITIONS not in flat, any('.mlp.gate_proj.' in name for name in flat)
    fields, posemb = {}, 'learn'
    if rotary:
        theta = float((config.get('rope_parameters') or config)['rope_theta'])
        rescale = float(config.get('pos_embed_rescale') or 1.0)
        fields, posemb = {'positions': f'rope_dinov3({theta=}, {rescale=})'}, 'none'
        if gated:  # the heads would have the same activation
            raise UserError(f'{_SOURCE}: gated MLPs with rotary positions are not supported')
    else:
        flat = {**flat, _POSITIONS: flat[_POSITIONS][None]}
    kind = _kind(rotary, gated)
    return _transformers.read(kind, flat, extra, rows=0, posemb=posemb, fields=fields)


def _kind(rotary: bool, gated: bool) -> _transformers.Kind:
    """Return the form of the ViT: rotary positions (DINOv3) or learned ones (DINOv2)."""
    patches = 'embeddings.patch_embeddings' if rotary else 'embeddings.patch_embeddings.projection'
    out = 'attention.o_proj' if rotary else 'attention.out_proj'
    named = rotary or gated
    mlp = tuple((f'mlp.{a}', f'mlp/{b}') for a, b in _GATED) if named else _MLP
    table = (
        ('embeddings.cls_token', 'cls_token'),
        ('embeddings.register_tokens', 'register_tokens'),
        (_POSITIONS, 'pos_embed'),
        (patches, 'patch_embed'),
        *_transformers.blocks('layers', *_BLOCK, (out, 'attention/out'), *mlp),
        ('layernorm', 'encoder/norm'),
    )
    return _transformers.Kind(_SOURCE, _TYPES[rotary:] + _TYPES[:rotary], table, defaults=_DEFAULTS)


def _read_heads(flat: Flat) -> Flat:
    """Convert queries, class and mask heads, and the upscaling, to our layouts."""
    heads = torch_layout.read(flat, _HEADS, 1, _SOURCE)
    return {name: transpose_kernel(name, array) for name, array in heads.items()}


def transpose_kernel(name: str, array: np.ndarray) -> np.ndarray:
    """Transpose the kernel of a transposed convolution, whose inputs come first in PyTorch."""
    doubles = re.fullmatch(r'upscaler/step_\d+/kernel', name)
    return array.swapaxes(-1, -2) if doubles else array


def _head_fields(
    params: Mapping[str, Any], flat: Flat, config: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the model's fields that a ViT lacks.

    Raises:
      UserError: if the number of blocks with queries is unknown.
    """
    blocks = config.get('num_blocks', len(flat.get('attn_mask_probs', ())))
    if not blocks:
        raise UserError(f'{_SOURCE}: num_blocks is unknown; put its config.json next to the file')
    return {
        'num_classes': params['class_head']['bias'].size - 1,
        'num_queries': len(params['query_embed']),
        'query_blocks': int(blocks),
        'upscale': len(params['upscaler']),
    }


def _require_heads(params: Mapping[str, Any], model: Mapping[str, Any]) -> None:
    """Raise UserError if the heads do not fit the ViT."""
    module = Model(**{key: value for key, value in model.items() if key != 'name'})
    side = module.patch_size
    patches = params['pos_embed'].shape[1] if 'pos_embed' in params else 1
    images = jax.ShapeDtypeStruct((1, side, side * patches, 3), np.float32)
    shapes = jax.eval_shape(module.init, jax.random.key(0), images)['params']
    expected, actual = (
        {name: x for name, x in flatten_dict(tree, sep='/').items() if not _is_in_encoder(name)}
        for tree in (shapes, params)
    )
    require_fit(
        actual,
        names.empty_arrays(expected),
        f'{_SOURCE}: incomplete model (shapes in our layout)',
        label=lambda name: torch_layout.to_theirs(name, _HEADS),
    )


def _is_in_encoder(name: str) -> bool:
    return name.partition('/')[0] in ENCODER


def _task(extra: Mapping[str, Any], classes: int) -> dict[str, Any]:
    """Return the keywords of `config.task`; its kind depends on windows and number of classes."""
    processor = extra.get(normalization.PREPROCESSOR) or {}
    kind = (
        'semantic'
        if processor.get('do_split_image')
        else 'panoptic'
        if classes in STUFF
        else 'instance'
    )
    task: dict[str, Any] = {'name': 'segment', 'kind': kind}
    if kind == 'panoptic':
        task['stuff'] = STUFF[classes]
    task |= {field: extra[key] for field, key in _TASK.items() if key in extra}
    if (scale := normalization.mean_and_std(extra)) is not None:
        task |= normalization.per_channel(scale, 3)
    return task


def prepare(extra: Mapping[str, Any], size: tuple[int, int] | None) -> dict[str, Any]:
    """Return the transforms: padding on the right and at the bottom, or windows."""
    processor = extra.get(normalization.PREPROCESSOR) or {}
    sides = processor.get('size') or {}
    short = int(sides.get('shortest_edge') or (size or (640, 640))[0])
    long = int(sides.get('longest_edge') or short)
    method = preprocessing.config_resampling(processor)
    named = '' if method == 'bilinear' else f', {method!r}'
    if processor.get('do_split_image'):
        named = '' if method == 'bilinear' else f', method={method!r}'
        return {'transforms': f"drop_alpha|sliding_windows({short}{named}, rounding='down')"}
    resized = f"drop_alpha|resize_small({short}{named}, max={long}, rounding='down')"
    return {'transforms': resized, 'sizes': (size or (long, long),)}


def write(trained: TrainedModel) -> Written:
    """Write the files of an EomtForUniversalSegmentation, or of its DINOv3 form if positions are
    rotary.

    Raises:
      UserError: if transformers has no such model, or the image size is unknown.
    """
    model, task = fields(trained.model), fields(trained.task)
    encoder, heads = (
        {name: x for name, x in trained.params.items() if (name in ENCODER) == of_encoder}
        for of_encoder in (True, False)
    )
    encoder_model = dataclasses.replace(trained, params=encoder, class_names=())
    encoder_model = encoder_model.with_groups(model=trained.model.transferable()[0])
    written = _transformers.write(encoder_model, [_form(model)])
    arrays = {name: transpose_kernel(name, x) for name, x in names.flatten(heads).items()}
    weights = np.ones(model['num_classes'] + 1, np.float32)
    weights[-1] = task.get('none_weight', 0.1)
    unused = (np.zeros(model['query_blocks'], np.float32), weights)
    config = {
        **(written.config or {}),
        **{key: task[field] for field, key in _TASK.items() if field in task},
        'num_blocks': model['query_blocks'],
        'num_queries': model['num_queries'],
        'num_upscale_blocks': model['upscale'],
        'num_register_tokens': model['registers'],
        **class_names_config(trained.class_names, model['num_classes']),
    }
    notes = written.notes
    kind = task.get('kind', 'panoptic')
    if kind == 'panoptic' and tuple(task.get('stuff', ())) != STUFF.get(model['num_classes'], ()):
        notes += ('the list of stuff classes is lost: the files cannot store it',)
    return Written(
        written.arrays
        | torch_layout.write(arrays, _HEADS)
        | dict(zip(_UNUSED, unused, strict=True)),
        config,
        notes,
        _preprocessor(trained, written, kind),
    )


def _form(model: Mapping[str, Any]) -> _transformers.Form:
    """Return the class of transformers for a model with these fields."""
    rotary, gated = model['posemb'] == 'none', model['mlp'] == 'swiglu'
    (alike, *_) = transformers_dinov3.FORMS if rotary else transformers_dinov2.FORMS
    positions = {key: alike.fields[key] for key in ('posemb', 'positions')} if rotary else {}

    def config(model: _transformers.Fields) -> dict[str, Any]:
        entries = alike.config(model)
        if 'rope_theta' in entries:
            theta = entries.pop('rope_theta')
            entries['rope_parameters'] = {'rope_type': 'default', 'rope_theta': theta}
        return entries

    def named(arrays: Flat) -> Flat:
        tables = {_POSITIONS: arrays[_POSITIONS][0]} if _POSITIONS in arrays else {}
        return arrays | tables

    return _transformers.Form(
        _kind(rotary, gated),
        'EomtDinov3ForUniversalSegmentation' if rotary else 'EomtForUniversalSegmentation',
        '',
        {'registers': '.*', **(positions or _transformers.MLPS)},
        config=config,
        arrays=transformers_dinov3.FORMS[0].arrays,  # adds an empty array if there are no registers
        named=named,
        notes=alike.notes,
        no_bias=alike.no_bias if rotary else (),
        posemb_prefix='none',
    )


def _preprocessor(trained: TrainedModel, written: Written, kind: str) -> dict[str, Any]:
    """Build preprocessor_config.json with the sizes of the transforms, if they resize."""
    semantic = kind == 'semantic'
    resize_args = parse.arguments_of(
        trained.transforms, 'sliding_windows' if semantic else 'resize_small'
    )
    side = max(trained.image_size or (640, 640))
    short, long = (resize_args['size'], resize_args.get('max')) if resize_args else (side, side)
    return {
        **(written.preprocessor or {}),
        'image_processor_type': 'EomtImageProcessor',
        'size': {'shortest_edge': short, 'longest_edge': None if semantic else long},
        'do_split_image': semantic,
        'do_pad': not semantic,
    }


WRITERS = {('eomt', 'transformers'): write}
