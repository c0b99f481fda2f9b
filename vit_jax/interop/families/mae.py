"""Masked autoencoders of transformers with their decoders: safetensors and config.json.

Names of ViTMAEForPreTraining in transformers 4 and 5 are read, with config.json; names of version 4
are written, which both versions read. `authors_mae` has the authors' names. An encoder without
decoder is a ViT: `transformers_vit` and `timm_vit` read it.

Images and targets are normalized by the same mean and standard deviation.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from flax.traverse_util import flatten_dict

from vit_jax.errors import UserError
from vit_jax.interop import names, normalization, preprocessing, torch_layout
from vit_jax.interop.families import _transformers, transformers_vit
from vit_jax.interop.files import Flat
from vit_jax.interop.trained import TrainedModel, Written, fields
from vit_jax.models.mae import ENCODER, Model
from vit_jax.tree_paths import require_fit

_DECODER = 'decoder/'
HEADS = {512: 16}  # heads of the authors' decoder, by width
# Defaults of task keywords that files lack.
_TASK: dict[str, Any] = {
    **{'target': 'normalized', 'value_range': (-1.0, 1.0)},
    **{'mean': (0.5,), 'std': (0.5,)},
}
_QKV = 'query|key|value'  # `no_bias` of an encoder
_BLOCK = 'decoder/transformer/block_{0}'


def blocks(table: names.Table, encoder_prefix: str, decoder_prefix: str) -> names.Table:
    """Translate an encoder's rows that start with `encoder_prefix` to a decoder's blocks."""
    return tuple(
        (a.replace(encoder_prefix, decoder_prefix), b.replace('encoder/block_{0}', _BLOCK))
        for a, b in table
        if a.startswith(encoder_prefix)
    )


PARTS = ('decoder_embed', 'embed'), ('decoder_norm', 'transformer/norm'), ('decoder_pred', 'head')
TRANSFORMERS: names.Table = (
    *((f'vit.{a}', b) for a, b in _transformers.VIT_TABLE),
    ('decoder.mask_token', 'decoder/mask_token'),
    ('decoder.decoder_pos_embed', 'decoder/pos_embed'),
    *((f'decoder.{a}', _DECODER + b) for a, b in PARTS),
    *blocks(_transformers.VIT_TABLE, 'encoder.layer.', 'decoder.decoder_layers.'),
    *blocks(_transformers.VIT_TABLE, 'layers.', 'decoder.decoder_layers.'),
    # Names that version 5 writes.
    *blocks(_transformers.VIT_TABLE, 'encoder.layer.', 'decoder.decoder_encoder.layer.'),
)


def matches(flat: Mapping[str, np.ndarray]) -> bool:
    """Return whether these are the names of an encoder with a decoder."""
    return 'decoder.decoder_pred.weight' in flat


def read(flat: Flat, extra: Mapping[str, Any]) -> TrainedModel:
    """Read a ViTMAEForPreTraining.

    Raises:
      UserError: if parameters are unknown, missing or have the wrong shape, or contradict the
        config.
    """
    encoder, decoder = split_halves(flat, 'decoder.')
    imported = join_halves(
        transformers_vit.read(encoder, extra),
        decoder,
        TRANSFORMERS,
        extra.get('decoder_num_attention_heads'),
        'transformers ViTMAE',
    )
    model = imported.model_config | {'mask_ratio': float(extra.get('mask_ratio', 0.75))}
    task = task_fields(extra, normalized=extra.get('norm_pix_loss', False))
    return imported.with_groups(model=model, task=task)


def split_halves(flat: Flat, prefixes: str | tuple[str, ...]) -> tuple[Flat, Flat]:
    """Split arrays into the encoder's and the decoder's, whose names begin with `prefixes`."""
    decoder = {name: array for name, array in flat.items() if name.startswith(prefixes)}
    return {name: array for name, array in flat.items() if name not in decoder}, decoder


def join_halves(
    encoder: TrainedModel, decoder: Flat, table: names.Table, heads: int | None, source: str
) -> TrainedModel:
    """Join an encoder with the arrays of a decoder, named as in the file.

    Raises:
      UserError: if arrays of the decoder are missing.
    """
    if 'cls_token' not in encoder.params:
        raise UserError(f'{source}: cls_token is not in the file')
    in_file = names.file_names(
        {name: torch_layout.to_ours(name, table) for name in decoder}, source
    )
    shapes = {name: decoder[torch_name].shape for name, torch_name in in_file.items()}
    keywords = _keywords(shapes, encoder.model_config, heads, source)
    flat = torch_layout.read(decoder, table, keywords['decoder_heads'], source)
    context = f'{source}: incomplete decoder (shapes in our layout)'
    patches = encoder.params['pos_embed'].shape[1] - 1
    require_fit(
        flat,
        _decoder_shapes(keywords, patches, encoder.params['patch_embed']['kernel'].shape[2]),
        context,
        label=lambda name: in_file.get(name) or torch_layout.to_theirs(name, table),
    )
    params = encoder.params | names.nest(flat)
    joined = dataclasses.replace(encoder, params=params, source=source)
    return joined.with_groups(model=keywords)


def _keywords(
    shapes: Mapping[str, tuple[int, ...]],
    encoder: Mapping[str, Any],
    heads: int | None,
    source: str,
) -> dict[str, Any]:
    """Keywords of `config.model`, from the shapes of the decoder and the encoder's keywords."""
    absent = encoder.get('no_bias', '')
    if absent not in ('', _QKV):
        raise UserError(f'{source}: {absent} without biases are not supported, only all three')
    blocks = {name.split('/')[2] for name in shapes if name.startswith('decoder/transformer/block')}
    width = shapes.get('decoder/mask_token', (0,))[-1]
    hidden = (shape[0] for name, shape in shapes.items() if name.endswith('/mlp/fc1/bias'))
    heads = heads or HEADS.get(width)
    if not heads or width % heads:
        raise UserError(
            f'{source}: unknown number of attention heads of a decoder of width {width}; '
            'put its config.json next to the file'
        )
    same = ('patch_size', 'width', 'depth', 'mlp_dim', 'num_heads', 'gelu', 'norm_eps')
    return {
        'name': 'mae',
        **{key: encoder[key] for key in same},
        'decoder_width': width,
        'decoder_depth': len(blocks),
        'decoder_mlp_dim': next(hidden, 0),
        'decoder_heads': heads,
        **({'qkv_bias': False} if absent else {}),
    }


def _decoder_shapes(keywords: Mapping[str, Any], patches: int, channels: int) -> Flat:
    """Return the shapes of the decoder's parameters by our names, projections split."""
    model = Model(**{key: value for key, value in keywords.items() if key != 'name'})
    images = np.zeros((1, model.patch_size, model.patch_size * patches, channels), np.float32)
    noise = np.zeros((1, patches), np.float32)
    params = jax.eval_shape(model.init, jax.random.key(0), images, noise)['params']
    leaves = flatten_dict({'decoder': params['decoder']}, sep='/').items()
    return names.split({name: np.broadcast_to(np.float32(0), x.shape) for name, x in leaves})


def task_fields(extra: Mapping[str, Any], normalized: bool) -> dict[str, Any]:
    """Return the keywords of `config.task`."""
    target = 'normalized' if normalized else 'pixels'
    task: dict[str, Any] = {'name': 'reconstruct', 'target': target}
    if (scale := normalization.mean_and_std(extra)) is not None:
        mean, std = (tuple(map(float, values)) for values in scale)
        task |= {'value_range': None, 'mean': mean, 'std': std}
    return task


def is_normalized(imported: TrainedModel) -> bool:
    """Return whether the target is normalized patches."""
    target: str = {**_TASK, **imported.task_config}['target']
    return target == 'normalized'


def target_notes(imported: TrainedModel) -> tuple[str, ...]:
    """Note if target and images are normalized differently, which files cannot express."""
    task = {**_TASK, **imported.task_config}
    if task['value_range'] is None or {*task['mean'], *task['std']} == {0.5}:
        return ()
    return (
        'the files cannot store the mean and standard deviation of the target: reconstructions '
        'have different units than the images there',
    )


def flatten(imported: TrainedModel) -> Flat:
    """Flatten the parameters of encoder and decoder by our names, projections split."""
    flat = names.flatten(imported.params)
    parts = (*ENCODER, 'decoder')
    return {name: array for name, array in flat.items() if name.partition('/')[0] in parts}


def write_transformers(imported: TrainedModel) -> Written:
    """Make arrays, config.json and preprocessor_config.json of a ViTMAEForPreTraining.

    Raises:
      UserError: if the image size is unknown and the positions do not form a square.
    """
    model, flat = fields(imported.model), flatten(imported)
    size = imported.image_size or _transformers.square(flat, model['patch_size'])
    channels = flat['patch_embed/kernel'].shape[2]
    config = {
        'model_type': 'vit_mae',
        'architectures': ['ViTMAEForPreTraining'],
        **_transformers.shape_config(model, size),
        'num_channels': channels,
        'decoder_hidden_size': model['decoder_width'],
        'decoder_num_hidden_layers': model['decoder_depth'],
        'decoder_num_attention_heads': model['decoder_heads'],
        'decoder_intermediate_size': model['decoder_mlp_dim'],
        'mask_ratio': model['mask_ratio'],
        'norm_pix_loss': is_normalized(imported),
        'qkv_bias': model.get('qkv_bias', True),
    }
    return Written(
        torch_layout.write(flat, TRANSFORMERS),
        config,
        target_notes(imported),
        preprocessing.preprocessor(imported, channels, size),
    )


WRITERS = {('mae', 'transformers'): write_transformers}
