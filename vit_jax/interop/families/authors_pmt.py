"""PMT with its authors' names (github.com/tue-mps/pmt).

Their files hold only the decoder. A config.json next to them names the checkpoint of the encoder,
as in `{"encoder": "hf://facebook/dinov3-vitl16-pretrain-lvd1689m"}`. Files written here also hold
the encoder, with the names that it has in their code.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from vit_jax.errors import UserError
from vit_jax.interop import families, names, normalization, torch_layout
from vit_jax.interop.families import _transformers, transformers_dinov3, transformers_eomt
from vit_jax.interop.files import Flat
from vit_jax.interop.trained import (
    GIVEN_SIZE,
    TrainedModel,
    Written,
    class_names_config,
)
from vit_jax.models.eomt import ENCODER
from vit_jax.models.pmt import Model
from vit_jax.tree_paths import require_fit

POSITIONS = 'bicubic'
_SOURCE = "PMT in its authors' names"
_NETWORK, _BACKBONE = 'network.', 'encoder.backbone.'
_PIXEL = {'mean': 'encoder.pixel_mean', 'std': 'encoder.pixel_std'}
_UNUSED = re.compile(r'.*num_batches_tracked|decoder\.attn_mask_probs|criterion\.|rope\.')
_DECODER: names.Table = (
    *((f'bn.{{0}}.running_{name}', f'lateral_{{0}}/norm/{name}') for name in ('mean', 'var')),
    ('bn.{0}', 'lateral_{0}/norm'),
    ('decoder.scalers.{0}', 'lateral_{0}/scale'),
    *((f'decoder.lateral_projections.{{0}}.{i}', f'lateral_{{0}}/fc{1 + i // 2}') for i in (0, 2)),
    ('decoder.q.weight', 'query_embed'),
    *(
        (theirs.replace('layer.', 'decoder.blocks.', 1), ours.replace('encoder', 'decoder'))
        for theirs, ours in transformers_dinov3.TABLE
        if theirs.startswith('layer.')
    ),
    ('decoder.decoder_norm', 'decoder/norm'),
    *((f'decoder.mask_head.{2 * i}', f'mask_head/fc{i + 1}') for i in range(3)),
    ('decoder.upscale.{0}.conv2', 'upscaler/step_{0}/depthwise'),
    ('decoder.upscale.{0}.norm', 'upscaler/step_{0}/norm'),
    ('decoder.upscale.{0}.conv1', 'upscaler/step_{0}'),
    ('decoder.class_head', 'class_head'),
)
_NO_BIAS = 'key'  # in the decoder's attention
# Names of DINOv3 in transformers, and in the authors' code.
_DINOV3 = (('embeddings.', 'patch_embed.'), ('layer.', 'blocks.'))
_TO_DINOV3 = tuple((b, a) for a, b in _DINOV3)
_MASK_TOKEN = 'embeddings.mask_token'
# The published models' kinds of segmentation by number of classes, and their sides in pixels.
_KINDS, _SIDES = {133: 'panoptic', 150: 'semantic'}, {150: 512}


def matches(flat: Mapping[str, np.ndarray]) -> bool:
    """Return whether these are the names of such a model."""
    return {f'{_NETWORK}decoder.q.weight', f'{_NETWORK}decoder.class_head.weight'} <= flat.keys()


def read(flat: Flat, extra: Mapping[str, Any]) -> TrainedModel:
    """Read a PMT, and its encoder from the same file or from `encoder` of config.json.

    Raises:
      UserError: if parameters are unknown, missing or have the wrong shape, or there is no encoder.
    """
    flat = {name.removeprefix(_NETWORK): x for name, x in flat.items()}
    own = {n: x for n, x in flat.items() if not (n.startswith('encoder.') or _UNUSED.match(n))}
    encoder = _read_encoder(flat, extra)
    encoder_fields = encoder.model_config
    decoder = read_decoder(own, encoder_fields['num_heads'])
    params = {name: x for name, x in encoder.params.items() if name in ENCODER}
    model = {
        **{key: value for key, value in encoder_fields.items() if key not in _LACKING},
        **_sizes(decoder, extra, encoder_fields),
        **{'name': 'pmt', 'pool': 'cls' if 'cls_token' in params else 'gap'},
    }
    statistics = {name: x for name, x in decoder.items() if _is_statistic(name)}
    params |= names.nest(
        {name: x for name, x in decoder.items() if name not in statistics}, _NO_BIAS
    )
    collections = {'batch_stats': names.nest(statistics)} if statistics else {}
    _require_decoder({'params': params, **collections}, model)
    side = _SIDES.get(model['num_classes'], 640)
    # A table of positions was made for the size of the encoder's file.
    made_for = encoder.image_size if 'pos_embed' in params else None
    size = tuple(made_for or extra.get(GIVEN_SIZE) or extra.get('image_size') or (side, side))
    task = _task(extra, model['num_classes']) | _normalization(flat, extra, encoder)
    imported = TrainedModel.from_file(params, model, size, _SOURCE, task=task, notes=encoder.notes)
    processor = {normalization.PREPROCESSOR: {'do_split_image': task['kind'] == 'semantic'}}
    data = {**imported.config.data, **transformers_eomt.prepare(processor, size)}
    return dataclasses.replace(imported.with_groups(data=data), collections=collections)


# Fields of a ViT that do not belong to the encoder.
_LACKING = (
    *('num_classes', 'pool', 'pool_heads', 'pool_mlp_dim', 'fc_norm', 'head_norm', 'head_bias'),
    *('representation_size', 'scan'),
)


def _read_encoder(flat: Flat, extra: Mapping[str, Any]) -> TrainedModel:
    """Read the ViT from the arrays below its prefix, or from the checkpoint that config.json names.

    Raises:
      UserError: if there is none, or it is not a ViT.
    """
    arrays = {
        name.removeprefix(_BACKBONE): x for name, x in flat.items() if name.startswith(_BACKBONE)
    }
    if arrays:
        if 'patch_embed.cls_token' in arrays:
            arrays = {_rename(name, _TO_DINOV3): x for name, x in arrays.items()}
        encoder = families.reader(arrays).read(arrays, extra.get('encoder_config') or {})
        return dataclasses.replace(encoder, notes=())  # the normalization is known
    if not isinstance(path := extra.get('encoder'), str):
        raise UserError(
            f'{_SOURCE}: the file holds only the decoder; name the checkpoint of the encoder in '
            'config.json next to it, such as {"encoder": "hf://facebook/dinov3-vitl16-pretrain-'
            'lvd1689m"}'
        )
    from vit_jax.interop import checkpoint  # which reads families

    encoder = checkpoint.read(path)
    if (name := encoder.model_config['name']) != 'vit':
        raise UserError(f'{_SOURCE}: the encoder {path} must be a vit, not a {name}')
    return encoder


def _rename(name: str, pairs: tuple[tuple[str, str], ...]) -> str:
    """Replace the prefix of a name, the first of each pair by the second."""
    return next((b + name.removeprefix(a) for a, b in pairs if name.startswith(a)), name)


def read_decoder(flat: Flat, num_heads: int) -> Flat:
    """Convert the decoder's parameters and running statistics to our names and layouts.

    Args:
      flat: Arrays by the authors' names, without `network.`.
      num_heads: Attention heads.

    Raises:
      UserError: if the decoder has no such part, or an array has an impossible shape.
    """
    arrays = torch_layout.read(flat, _DECODER, num_heads, _SOURCE)
    return {name: transformers_eomt.transpose_kernel(name, x) for name, x in arrays.items()}


def _is_statistic(name: str) -> bool:
    return name.endswith(('norm/mean', 'norm/var'))


def _sizes(arrays: Flat, extra: Mapping[str, Any], encoder: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields that a ViT lacks.

    Raises:
      UserError: if the number of layers that the decoder gets is not that of the file.
    """
    indices = extra.get('interaction_indices')
    maps = tuple(int(i) + 1 for i in indices) if indices else None
    count = names.count_blocks(arrays, r'lateral_(\d+)/scale')
    expected = len(maps) if maps else min(4, encoder['depth'])
    if count != expected:
        raise UserError(
            f'{_SOURCE}: the decoder gets {count} layers of the encoder, not {expected}: name them '
            'in config.json by "interaction_indices", the first block is 0'
        )
    return {
        'num_classes': names.require(arrays, 'class_head/bias').size - 1,
        'num_queries': len(names.require(arrays, 'query_embed')),
        'query_blocks': names.count_blocks(arrays, r'decoder/block_(\d+)/'),
        'decoder_mlp_dim': names.require(arrays, 'decoder/block_0/mlp/fc1/bias').size,
        'upscale': names.count_blocks(arrays, r'upscaler/step_(\d+)/'),
        'maps': maps,
        'map_norm': 'batch' if any(map(_is_statistic, arrays)) else 'none',
    }


def _require_decoder(variables: Mapping[str, Any], model: Mapping[str, Any]) -> None:
    """Raise UserError if the decoder does not fit the ViT."""
    module = Model(**{key: value for key, value in model.items() if key != 'name'})
    side = module.patch_size
    params = variables['params']
    patches = params['pos_embed'].shape[1] if 'pos_embed' in params else 1
    patches -= module.positioned_tokens if 'pos_embed' in params else 0
    images = jax.ShapeDtypeStruct((1, side, side * patches, 3), np.float32)
    shapes = jax.eval_shape(module.init, jax.random.key(0), images)
    expected, actual = (
        {
            name: x
            for tree in collections.values()
            for name, x in flatten(
                {key: part for key, part in tree.items() if key not in ENCODER}, _NO_BIAS
            ).items()
        }
        for collections, flatten in ((shapes, names.empty_arrays), (variables, names.flatten))
    )
    require_fit(
        actual,
        expected,
        f'{_SOURCE}: incomplete model (shapes in our layout)',
        label=lambda name: torch_layout.to_theirs(name, _DECODER),
    )


def _normalization(flat: Flat, extra: Mapping[str, Any], encoder: TrainedModel) -> dict[str, Any]:
    """Return the mean and standard deviation of images: the user's, the file's, the encoder's if it
    is a separate file, or ImageNet's.
    """
    stored: Any = {
        key: [float(str(x)) for x in flat[name].flat]  # 0.485, not the nearest float32
        for key, name in _PIXEL.items()
        if name in flat
    }
    if not stored and encoder.path.name:
        stored = normalization.keys(encoder, encoder.channels)
    given = {normalization.GIVEN_NORMALIZATION: stored, **extra}
    scale = normalization.mean_and_std(normalization.with_imagenet_default(given))
    return normalization.per_channel(scale, encoder.channels) if scale is not None else {}


def _task(extra: Mapping[str, Any], classes: int) -> dict[str, Any]:
    """Return the keywords of `config.task`, from config.json or the number of classes."""
    kind = extra.get('segmentation') or _KINDS.get(classes, 'instance')
    stuff = extra.get('stuff_classes', transformers_eomt.STUFF.get(classes, ()))
    return {
        'name': 'segment',
        'kind': kind,
        **({'stuff': tuple(stuff)} if kind == 'panoptic' else {}),
    }


def write(trained: TrainedModel) -> Written:
    """Write the state of the authors' module, with its encoder, and a config.json.

    Raises:
      UserError: if their code has no such encoder.
    """
    module, task = trained.model, trained.task
    encoder = dataclasses.replace(
        trained,
        params={name: x for name, x in trained.params.items() if name in ENCODER},
        collections={},
        class_names=(),
    ).with_groups(model=module.transferable()[0], task={'name': 'classify'})
    written = _write_encoder(encoder)
    own = {name: x for name, x in trained.params.items() if name not in ENCODER}
    flat = names.flatten(own, _NO_BIAS) | names.flatten(trained.collections.get('batch_stats', {}))
    arrays = torch_layout.write(
        {name: transformers_eomt.transpose_kernel(name, x) for name, x in flat.items()}, _DECODER
    )
    pixel = zip(_PIXEL.values(), (task.mean, task.std), strict=True)
    arrays |= {name: np.asarray(x, np.float32).reshape(1, -1, 1, 1) for name, x in pixel}
    arrays |= {'decoder.attn_mask_probs': np.zeros(module.query_blocks, np.float32)}
    arrays |= {f'{_BACKBONE}{name}': x for name, x in written.arrays.items()}
    config = {
        'model_type': 'pmt',
        'interaction_indices': [number - 1 for number in module.map_layers],
        'image_size': list(trained.image_size or (640, 640)),
        'segmentation': task.kind,
        'stuff_classes': list(task.stuff),
        'encoder_config': written.config,
        **class_names_config(trained.class_names, module.num_classes),
    }
    return Written({f'{_NETWORK}{name}': x for name, x in arrays.items()}, config, written.notes)


def _write_encoder(encoder: TrainedModel) -> Written:
    """Write the ViT, as in transformers if it is a DINOv3, else as in timm."""
    if encoder.model.positions.kind != 'rope_dinov3':
        return families.writer('vit', ['timm'], 'timm_vit')(encoder)
    written = _transformers.write(encoder, transformers_dinov3.FORMS)
    arrays = {n: x for n, x in written.arrays.items() if n != _MASK_TOKEN}
    return written._replace(arrays={_rename(name, _DINOV3): x for name, x in arrays.items()})


WRITERS = {('pmt', 'authors'): write}
