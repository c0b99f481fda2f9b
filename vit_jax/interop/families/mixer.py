"""MLP-Mixers of google-research/vision_transformer and big_vision (.npz), and of timm.

The authors' files have names of Linen or, in the first release, of its predecessor. Their GELU is
the tanh approximation, timm's is exact; layer norms add 1e-6 in both.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from vit_jax.errors import UserError, resolve
from vit_jax.interop import equivalent, names, normalization, torch_layout
from vit_jax.interop.families import _timm, _vit
from vit_jax.interop.files import Flat
from vit_jax.interop.trained import GIVEN_SIZE, TrainedModel, Written, fields
from vit_jax.models.mixer import VARIANTS
from vit_jax.tree_paths import require_fit

_OURS = 'encoder/block_{0}'
_MIXING = ('token_mixing', 'channel_mixing')
_EARLY = 'Mixer/encoderblock_{0}'
# Of rows with the same right side, the first is used for writing.
_NPZ: names.Table = (
    ('stem', 'patch_embed'),
    *((f'MixerBlock_{{0}}/LayerNorm_{i}', f'{_OURS}/norm{i + 1}') for i in (0, 1)),
    *(
        (f'MixerBlock_{{0}}/{mixing}/Dense_{i}', f'{_OURS}/{mixing}/fc{i + 1}')
        for mixing in _MIXING
        for i in (0, 1)
    ),
    ('pre_head_layer_norm', 'encoder/norm'),
    ('head', 'head'),
    # Predecessor of Linen.
    ('embedding', 'patch_embed'),
    *((f'{_EARLY}/LayerNorm_{i}', f'{_OURS}/norm{n}') for i, n in ((0, 1), (1, 2), (2, 2))),
    *(
        (f'{_EARLY}/{mixing}_phase_0/{leaf}{i}', f'{_OURS}/{mixing}/fc{i}/{leaf}')
        for mixing in _MIXING
        for leaf in ('kernel', 'bias')
        for i in (1, 2)
    ),
    ('Mixer/encoder_norm', 'encoder/norm'),
)
_TIMM: names.Table = (
    ('stem.proj', 'patch_embed'),
    *((f'blocks.{{0}}.norm{i}', f'{_OURS}/norm{i}') for i in (1, 2)),
    *(
        (f'blocks.{{0}}.{theirs}.fc{i}', f'{_OURS}/{ours}/fc{i}')
        for theirs, ours in zip(('mlp_tokens', 'mlp_channels'), _MIXING, strict=True)
        for i in (1, 2)
    ),
    ('norm', 'encoder/norm'),
    ('head', 'head'),
)
# First array of each kind of file: its table, display name and GELU.
_FORMS = {
    'MixerBlock_0/token_mixing/Dense_0/kernel': (_NPZ, 'Mixer npz', 'tanh'),
    'Mixer/encoderblock_0/token_mixing_phase_0/kernel1': (_NPZ, 'Mixer npz, pre-Linen', 'tanh'),
    'blocks.0.mlp_tokens.fc1.weight': (_TIMM, 'timm Mixer', 'erf'),
}
_EPS = 1e-6
# Arguments of timm's MlpMixer that do not change the model, or that its arrays determine.
_HARMLESS = (
    *('num_classes', 'img_size', 'in_chans', 'patch_size', 'num_blocks', 'embed_dim', 'mlp_ratio'),
    *('drop_rate', 'proj_drop_rate', 'drop_path_rate', 'nlhb', 'global_pool'),
)
_PATCHES = (16, 32)


def matches(flat: Mapping[str, Any]) -> bool:
    """Return whether these are the names of a Mixer."""
    return not _FORMS.keys().isdisjoint(flat)


def read(flat: Flat, extra: Mapping[str, Any]) -> TrainedModel:
    """Read a Mixer, with or without its head.

    Raises:
      UserError: if a parameter is missing, unknown or has the wrong shape, or config.json describes
        a different model of timm.
    """
    table, source, gelu = next(form for name, form in _FORMS.items() if name in flat)
    is_timm = table is _TIMM
    if is_timm:
        _require_mixer(extra, source)
        params = torch_layout.read(flat, table, 1, source)
    else:
        renamed = names.rename(flat, table, source)
        params = {name: _without_ones(name, array) for name, array in renamed.items()}
    params = {name: array for name, array in params.items() if array.size}
    model = _keywords(params, source) | {'gelu': gelu, 'norm_eps': _EPS}
    size = _size(params, model, extra)
    _require_fit(params, model, size, source)
    imported = TrainedModel.from_file(names.nest(params), model, size, source)
    unknown = normalization.UNKNOWN_NORMALIZATION if is_timm else ''
    return normalization.with_normalization(imported, extra, unknown)


def _require_mixer(extra: Mapping[str, Any], source: str) -> None:
    """Raise UserError for timm's relatives of a Mixer, which have the same names."""
    name = _timm.architecture(extra)
    if name and not name.startswith('mixer_'):
        raise UserError(
            f'{source}: config.json names {name!r}; of its MLPs only mixer_* are supported'
        )
    model_args = extra.get('model_args') or {}
    if changed := sorted(model_args.keys() - {*_HARMLESS}):
        keys = ', '.join(changed)
        raise UserError(f'{source}: model_args {keys} in config.json: not the model of the paper')
    if (pool := model_args.get('global_pool', extra.get('global_pool', 'avg'))) != 'avg':
        raise UserError(f'{source}: global_pool {pool!r} is not supported (only avg)')


def _without_ones(name: str, array: np.ndarray) -> np.ndarray:
    """Drop axes of length one around dense layers and vectors, as in the first files."""
    if name == 'patch_embed/kernel':
        return array
    axes = 2 if name.endswith('kernel') else 1
    return array.reshape(array.shape[array.ndim - axes :]) if array.ndim > axes else array


def _keywords(params: Flat, source: str) -> dict[str, Any]:
    """Infer the model's keywords from names and shapes."""

    def shape(name: str, ndim: int) -> tuple[int, ...]:
        return names.shape_of(params, source, str, name, ndim)

    patch_size, width = names.patch_shape(params, source, str)
    return {
        'name': 'mixer',
        'num_classes': shape('head/kernel', 2)[1] if 'head/kernel' in params else None,
        'patch_size': patch_size,
        'width': width,
        'depth': names.count_blocks(params, r'encoder/block_(\d+)/'),
        'tokens_mlp_dim': shape('encoder/block_0/token_mixing/fc1/kernel', 2)[1],
        'channels_mlp_dim': shape('encoder/block_0/channel_mixing/fc1/kernel', 2)[1],
    }


def _size(params: Flat, model: Mapping[str, Any], extra: Mapping[str, Any]) -> _vit.Size | None:
    """Return height and width of the images: the file's or the user's if they match the number of
    weights for patches, or else a square.
    """
    side, patches = model['patch_size'], params['encoder/block_0/token_mixing/fc1/kernel'].shape[0]
    model_size = (extra.get('model_args') or {}).get('img_size')
    pretrained_size = (extra.get('pretrained_cfg') or {}).get('input_size', ())[1:]
    for size in (
        (model_size, model_size) if isinstance(model_size, int) else model_size,
        pretrained_size,
        extra.get(GIVEN_SIZE),
    ):
        if isinstance(size, list | tuple) and len(size) == 2:
            height, width = size
            if (height // side) * (width // side) == patches:
                return height, width
    root = math.isqrt(patches)
    return (root * side, root * side) if root * root == patches else None


def _require_fit(params: Flat, model: Mapping[str, Any], size: Any, source: str) -> None:
    """Raise UserError unless these are all the parameters of the model."""
    keywords = {key: value for key, value in model.items() if key != 'name'}
    module = resolve('vit_jax.models', 'mixer', 'Model')(**keywords, scan=True)
    side, patches = model['patch_size'], params['encoder/block_0/token_mixing/fc1/kernel'].shape[0]
    height, width = size or (side, side * patches)
    images = (1, height, width, params['patch_embed/kernel'].shape[2])
    shapes = jax.eval_shape(
        module.init, jax.random.key(0), jax.ShapeDtypeStruct(images, np.float32)
    )
    expected = names.empty_arrays(shapes['params'])
    require_fit(params, expected, f'{source}: incomplete Mixer (shapes in our layout)')


def _npz(trained: TrainedModel) -> Written:
    """Convert to arrays for images in [-1, 1], which readers of such files assume."""
    params, notes = equivalent.renormalize(trained, normalization.RANGE)
    flat = names.flatten(params)
    arrays = {names.to_theirs(name, _NPZ) or name: array for name, array in flat.items()}
    return Written(arrays, notes=(*_notes(trained, 'tanh', '.npz files'), *notes))


def _timm_files(trained: TrainedModel) -> Written:
    """Write the files of timm's MlpMixer.

    Raises:
      UserError: if timm has no Mixer of this size, or the image size is unknown.
    """
    model, size = fields(trained.model), trained.image_size
    if size is None:
        raise UserError('the image size is unknown: set it to write a file for timm')
    letters = {shape[:2]: name.lower() for name, shape in VARIANTS.items() if name in 'SBL'}
    letter, patch = letters.get((model['width'], model['depth'])), model['patch_size']
    if letter is None or patch not in _PATCHES:
        raise UserError(
            f'timm has no Mixer of width {model["width"]}, depth {model["depth"]} and patches of '
            f'{patch} pixels, only S, B and L with patches of 16 and 32: write an .npz file instead'
        )
    classes, channels = model['num_classes'] or 0, trained.channels
    ratios = [model[key] / model['width'] for key in ('tokens_mlp_dim', 'channels_mlp_dim')]
    image_settings, notes = _timm.image_keys(trained.transforms, size)
    config: dict[str, Any] = {
        'architecture': f'mixer_{letter}{patch}_224',
        'num_classes': classes,
        'num_features': model['width'],
        'global_pool': 'avg',
        'model_args': {'img_size': list(size), 'in_chans': channels, 'mlp_ratio': ratios},
        'pretrained_cfg': {
            **{'num_classes': classes, 'input_size': [channels, *size], 'fixed_input_size': True},
            **normalization.keys(trained, channels),
            **image_settings,
        },
    }
    if trained.class_names:
        config['label_names'] = list(trained.class_names)
    arrays = torch_layout.write(names.flatten(trained.params), _TIMM)
    return Written(arrays, config, (*_notes(trained, 'erf', 'timm'), *notes))


def _notes(trained: TrainedModel, gelu: str, readers: str) -> tuple[str, ...]:
    """Note fields that the files cannot represent and that readers set differently."""
    reader_values, model_fields = {'gelu': gelu, 'norm_eps': _EPS}, fields(trained.model)
    return tuple(
        f'readers of {readers} use {key} {value}, but this model has {model_fields[key]}'
        for key, value in reader_values.items()
        if model_fields[key] != value
    )


WRITERS = {('mixer', 'npz'): _npz, ('mixer', 'timm'): _timm_files}
