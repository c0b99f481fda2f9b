"""SigLIP of transformers, and SigLIP 2 of fixed size: safetensors, and config.json.

Both are `SiglipModel` there. Its towers are read under the names of our ViT and of our text tower.
Heads, GELU and epsilons come from config.json, or are the defaults of transformers.SiglipConfig.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np

from vit_jax.data.batches import ArraySpec
from vit_jax.errors import UserError
from vit_jax.interop import names, normalization, shapes, torch_layout
from vit_jax.interop.families import _transformers, _transformers_write, _vit
from vit_jax.interop.families import transformers_vision_tower as vision
from vit_jax.interop.files import Flat
from vit_jax.interop.trained import TrainedModel, Written, fields
from vit_jax.models.siglip import TextTower
from vit_jax.tree_paths import require_fit

SOURCE = 'transformers SigLIP'
_VISION, _TEXT = 'vision_model.', 'text_model.'
_NUMBERS = {'logit_scale': 'log_scale', 'logit_bias': 'bias'}

# Without what CLIP alone has.
IMAGE_TABLE: names.Table = tuple(
    row for row in vision.TABLE if row[1] not in ('cls_token', 'norm_pre', 'head')
)
TEXT_TABLE: names.Table = (
    ('embeddings.token_embedding.weight', 'token_embed/embedding'),
    ('embeddings.position_embedding.weight', 'pos_embed'),
    *vision.BLOCKS,
    ('final_layer_norm', 'encoder/norm'),
    ('head', 'head'),
)


def matches(flat: Mapping[str, np.ndarray]) -> bool:
    """Whether the file has both towers, of which that of images takes whole images."""
    return has_towers(flat) and flat[_VISION + 'embeddings.patch_embedding.weight'].ndim == 4


def has_towers(flat: Mapping[str, np.ndarray]) -> bool:
    """Whether the file has both towers and the numbers that belong to their logits."""
    towers = (_VISION + 'embeddings.patch_embedding.weight', _TEXT + 'head.weight')
    return {*towers, *_NUMBERS} <= flat.keys()


def read(flat: Flat, extra: Mapping[str, Any]) -> TrainedModel:
    """A SiglipModel.

    Raises:
      UserError: if parameters are unknown, absent or of the wrong shape, or do not fit the config.
    """
    if (kind := extra.get('model_type', 'siglip')) != 'siglip':
        raise UserError(f'{SOURCE}: config.json is of a {kind!r}, not of a siglip')
    known = (_VISION, _TEXT, *_NUMBERS)
    if unknown := [name for name in flat if not name.startswith(known)]:
        raise UserError(f'{SOURCE}: the model has no part called {names.listed(unknown)}')
    image = _image_tower(_part(flat, _VISION), extra.get('vision_config'))
    text, words = _text_tower(_part(flat, _TEXT), extra.get('text_config'))
    own = image.model_config
    for key in ('gelu', 'norm_eps'):
        if own[key] != words.pop(key):
            raise UserError(f'{SOURCE}: the towers differ in {key}, which is one for both here')
    if own['width'] != words['embed_dim']:
        raise UserError(
            f'{SOURCE}: texts have {words["embed_dim"]} features, images {own["width"]}'
        )
    kept = ('patch_size', 'width', 'depth', 'mlp_dim', 'num_heads', 'pool', 'gelu', 'norm_eps')
    model = {'name': 'siglip', **{key: own[key] for key in kept}, **words}
    numbers = {ours: flat[theirs].reshape(()) for theirs, ours in _NUMBERS.items()}
    imported = TrainedModel.of_file(
        {'image': image.params, 'text': text, **numbers},
        model,
        image.image_size,
        SOURCE,
        task={'name': 'siglip'},
    )
    return normalization.folded(_with_spec(imported), extra, normalization.UNKNOWN)


def write(trained: TrainedModel) -> Written:
    """Files of a SiglipModel.

    Raises:
      UserError: if transformers has no such model, or the size of the images is unknown.
    """
    model = fields(trained.model)
    if model['pool'] != 'map' or model['project']:
        raise UserError(
            "transformers' SigLIP pools images by attention, without a projection: a model with "
            f'pool {model["pool"]!r} and project {model["project"]} cannot be written'
        )
    image, text = (names.flattened(trained.params[name]) for name in ('image', 'text'))
    channels = image['patch_embed/kernel'].shape[2]
    side = (_vit.square_side(image['pos_embed'].shape[1]) or 0) * model['patch_size']
    size = trained.image_size or (side, side)
    if not size[0]:
        raise UserError('the image size does not follow from pos_embed; give it')
    written = vision.fused(_written(image, IMAGE_TABLE))
    arrays = {_VISION + name: array for name, array in written.items()}
    arrays |= {_TEXT + name: array for name, array in _written(text, TEXT_TABLE).items()}
    arrays |= {
        theirs: np.asarray(trained.params[ours], np.float32).reshape(1)
        for theirs, ours in _NUMBERS.items()
    }
    preprocessor = normalization.preprocessor(channels, size)
    return Written(
        arrays,
        _config(model, size, channels, text),
        preprocessor=preprocessor | {'image_processor_type': 'SiglipImageProcessor'},
    )


def _part(flat: Flat, prefix: str) -> Flat:
    """The arrays of a tower, without their prefix."""
    return {n.removeprefix(prefix): array for n, array in flat.items() if n.startswith(prefix)}


def _image_tower(flat: Flat, config: Mapping[str, Any] | None) -> TrainedModel:
    flat = {name.replace('.in_proj_', '.in_proj.'): array for name, array in flat.items()}
    flat = torch_layout.parted(flat, SOURCE)
    size = (config or {}).get('image_size')
    if isinstance(size, list | tuple):
        size = tuple(size)
    return _vit.assemble(
        _ours(flat, IMAGE_TABLE, config),
        SOURCE,
        _label(_VISION, IMAGE_TABLE),
        **_common(config),
        image_size=(size, size) if isinstance(size, int) else size,
    )


def _text_tower(
    flat: Flat, config: Mapping[str, Any] | None
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The parameters, and keywords of `config.model`."""
    ours, label = _ours(flat, TEXT_TABLE, config), _label(_TEXT, TEXT_TABLE)
    shape = functools.partial(shapes.shape_of, ours, SOURCE, label)
    vocab_size, width = shape('token_embed/embedding', 2)
    blocks = {name.split('/')[1] for name in ours if name.startswith('encoder/block_')}
    shared = {
        'width': width,
        'depth': len(blocks),
        'mlp_dim': shape('encoder/block_0/mlp/fc1/kernel', 2)[1],
        'num_heads': shape('encoder/block_0/attention/query/kernel', 3)[1],
    }
    sizes = {
        'vocab_size': vocab_size,
        'length': shape('pos_embed', 3)[1],
        'embed_dim': shape('head/kernel', 2)[1],
    }
    require_fit(
        ours,
        _expected_text(**shared, **sizes),
        f'{SOURCE}: not a whole model (shapes in our layout)',
        label=label,
    )
    keywords = {f'text_{key}': value for key, value in shared.items()} | sizes
    return names.nested(ours), keywords | _common(config)


def _expected_text(length: int, **sizes: Any) -> Flat:
    """The shapes of a text tower's parameters."""
    module = TextTower(length=length, **sizes)
    ids = jax.ShapeDtypeStruct((1, length), np.int32)
    return names.blank(jax.eval_shape(module.init, jax.random.key(0), ids)['params'])


def _ours(flat: Flat, table: names.Table, config: Mapping[str, Any] | None) -> Flat:
    """The arrays of a tower by our names; without a config with the heads of a published ViT."""
    if config is None:
        found = names.renamed(flat, lambda name: torch_layout.ours(name, table), SOURCE)
        heads = _vit.published_heads({n: flat[theirs].shape for n, theirs in found.items()}, SOURCE)
    else:
        heads = int(config.get('num_attention_heads', 12))
    read = torch_layout.read(flat, table, heads, SOURCE)
    if 'pos_embed' in read:
        read['pos_embed'] = read['pos_embed'][None]
    return read


def _common(config: Mapping[str, Any] | None) -> dict[str, Any]:
    """Fields of a tower that shapes do not determine."""
    known: dict[str, Any] = {'hidden_act': 'gelu_pytorch_tanh', 'layer_norm_eps': 1e-6}
    known |= dict(config or {})
    gelu = _transformers.gelu(known, SOURCE)
    return {'gelu': gelu, 'norm_eps': float(known['layer_norm_eps'])}


def _label(prefix: str, table: names.Table) -> Callable[[str], str]:
    return lambda name: prefix + torch_layout.theirs(name, table)


def _with_spec(imported: TrainedModel) -> TrainedModel:
    """Add the arrays of an example, which has a text too."""
    length, size = imported.model_config['length'], imported.image_size
    if size is None:
        raise UserError(f'{SOURCE}: the size of its images is unknown; config.json has it')
    channels = imported.params['image']['patch_embed']['kernel'].shape[2]
    spec = {
        'image': ArraySpec((*size, channels), np.dtype(np.uint8)),
        'caption': ArraySpec((length,), np.dtype(np.int32)),
    }
    return dataclasses.replace(imported, spec=spec)


def _written(flat: Flat, table: names.Table) -> Flat:
    """The arrays of a tower by their names and in their layouts."""
    return torch_layout.write(flat | {'pos_embed': flat['pos_embed'][0]}, table)


def _config(
    model: Mapping[str, Any], size: tuple[int, int], channels: int, text: Flat
) -> dict[str, Any]:
    vision = _transformers_write.shape_config(model, size)
    theirs = {key.removeprefix('text_'): model[key] for key in model if key.startswith('text_')}
    words = _transformers_write.shape_config({**model, **theirs}, size)
    for key in ('image_size', 'patch_size'):
        words.pop(key)
    words |= {
        'model_type': 'siglip_text_model',
        'vocab_size': len(text['token_embed/embedding']),
        'max_position_embeddings': model['length'],
        'projection_size': model['embed_dim'],
    }
    vision |= {'model_type': 'siglip_vision_model', 'num_channels': channels}
    return {
        'model_type': 'siglip',
        'architectures': ['SiglipModel'],
        'text_config': words,
        'vision_config': vision,
    }


WRITERS = {('siglip', 'transformers'): write}
