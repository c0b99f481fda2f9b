"""DINOv3 ViTs with their authors' names (github.com/facebookresearch/dinov3).

Positions are rotary, with the periods of the file, which training rounded to bfloat16. Biases of
keys exist, but are masked. The files do not contain epsilons or the normalization of images.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import numpy as np

from vit_jax import signatures
from vit_jax.errors import UserError
from vit_jax.interop import equivalent, names, normalization, preprocessing, torch_layout
from vit_jax.interop.families import _vit
from vit_jax.interop.families._transformers import misfits
from vit_jax.interop.files import Flat
from vit_jax.interop.trained import GIVEN_SIZE, TrainedModel, Written, fields
from vit_jax.nn.rotary import PERIODS, rising_periods

_SOURCE = "DINOv3 in its authors' names"
_PERIODS, _MASK, _STORAGE = 'rope_embed.periods', '.attn.qkv.bias_mask', 'storage_tokens'
_BLOCK = ('blocks.{0}', 'encoder/block_{0}')
_PARTS = (
    ('norm1', 'norm1'),
    *((f'attn.{a}', f'attention/{b}') for a, b in (('q', 'query'), ('k', 'key'), ('v', 'value'))),
    ('attn.proj', 'attention/out'),
    ('ls1.gamma', 'layer_scale1'),
    ('norm2', 'norm2'),
    ('mlp.fc1', 'mlp/fc1'),
    ('mlp.fc2', 'mlp/fc2'),
    *(('mlp.w1', 'mlp/gate'), ('mlp.w2', 'mlp/fc1'), ('mlp.w3', 'mlp/fc2')),
    ('ls2.gamma', 'layer_scale2'),
)
TABLE: names.Table = (
    ('cls_token', 'cls_token'),
    (_STORAGE, 'register_tokens'),
    ('patch_embed.proj', 'patch_embed'),
    *((f'{_BLOCK[0]}.{a}', f'{_BLOCK[1]}/{b}') for a, b in _PARTS),
    ('norm', 'encoder/norm'),
)
# For writing: gated layers have different letters.
_GATED = tuple((a, b) for a, b in TABLE if not re.search(r'mlp\.fc', a))
# Only for pretraining: the mask token, and the norm for class tokens of local crops.
_UNUSED = ('mask_token', 'local_cls_norm.')
_EPS, _RESCALE, _SIZE = 1e-5, 2.0, (224, 224)  # in all released models
_COLORS = (
    'assumed to take images with the mean and standard deviation of ImageNet; models of satellite '
    'images (SAT-493M) differ: set mean and std'
)


def matches(flat: Mapping[str, np.ndarray]) -> bool:
    """Return whether these are the names of such a model."""
    return {_PERIODS, 'patch_embed.proj.weight', 'blocks.0.norm1.weight'} <= flat.keys()


def read(flat: Flat, extra: Mapping[str, Any]) -> TrainedModel:
    """Read a DinoVisionTransformer, whose `x_norm_clstoken` is our `pre_logits`.

    Raises:
      UserError: if parameters are unknown, missing or have the wrong shape, or the model has a part
        that ours lacks.
    """
    if name := next((name for name in flat if name.startswith('cls_norm.')), None):
        raise UserError(f'{_SOURCE}: a separate norm of the class token is not supported ({name})')
    masks = {name: array for name, array in flat.items() if name.endswith(_MASK)}
    used = {n: array for n, array in flat.items() if not n.startswith((*_UNUSED, _PERIODS))}
    parts = torch_layout.split_fused({n: a for n, a in used.items() if n not in masks}, _SOURCE)
    for name, mask in masks.items():
        _require_keys(name, mask)
        parts.pop(name.replace('.qkv.bias_mask', '.k.bias'), None)
    periods, width = flat[_PERIODS], parts['patch_embed.proj.weight'].shape[0]
    heads, remainder = divmod(width, 4 * max(periods.size, 1))
    if remainder or not heads:
        raise UserError(f'{_SOURCE}: {periods.size} periods do not fit heads of width {width}')
    in_file = names.file_names({name: torch_layout.to_ours(name, TABLE) for name in parts}, _SOURCE)
    imported = _vit.assemble(
        torch_layout.read(parts, TABLE, heads, _SOURCE),
        _SOURCE,
        lambda name: in_file.get(name) or torch_layout.to_theirs(name, TABLE),
        gelu='erf',
        norm_eps=_EPS,
        hints=[extra.get(GIVEN_SIZE, _SIZE)],
        posemb='none',
        fields={'positions': _positions(periods.astype(np.float64))},
    )
    if normalization.mean_and_std(extra) is None:
        imported = imported.with_notes(_COLORS)
    return normalization.with_normalization(imported, normalization.with_imagenet_default(extra))


def _require_keys(name: str, mask: np.ndarray) -> None:
    """Raise UserError unless a mask [3D] masks the biases of keys and nothing else."""
    expected = np.repeat([1.0, 0.0, 1.0], mask.size // 3)
    if not np.array_equal(mask, expected):
        raise UserError(f'{_SOURCE}: {name} does not mask the biases of keys and nothing else')


def _positions(periods: np.ndarray) -> str:
    """Derive the field `positions` from the periods in the file.

    Raises:
      UserError: if the periods are not powers of one number.
    """
    rough = periods[-1] ** (periods.size / max(periods.size - 1, 1))
    for dtype in PERIODS:
        for digits in (1, 2, 3, 6):  # the base has few digits
            theta = float(f'{rough:.{digits}g}')
            rising = rising_periods(4 * periods.size, theta, dtype)
            if np.allclose(rising, periods, rtol=1e-6, atol=0):
                rounded = '' if dtype == 'float32' else f', periods={dtype!r}'
                return f'rope_dinov3({theta=}, rescale={_RESCALE}{rounded})'
    raise UserError(
        f'{_SOURCE}: {_PERIODS} are not powers of one number, as with min_period and max_period: '
        'not supported'
    )


_FIELDS = {
    **{'pool': 'cls', 'posemb': 'none', 'norm': 'layer', 'norm_place': 'pre', 'mlp': 'mlp|swiglu'},
    **{'norm_pre': 'False', 'final_norm': 'True', 'inner_norm': 'False', 'qk_norm': 'none'},
    **{'num_classes': 'None|0', 'representation_size': 'None|0', 'no_bias': '|key'},
    **{'gelu': 'erf', 'norm_eps': re.escape(str(_EPS)), 'layer_scale': r'(?!None).*'},
    'positions': r'rope_dinov3(\((?!.*(normalize|shift|jitter)).*\))?',
}


def write(trained: TrainedModel) -> Written:
    """Write the arrays of a DinoVisionTransformer, which has no config, and the image normalization
    for `read`.

    Raises:
      UserError: if the authors have no such model.
    """
    model = fields(trained.model)
    if unsupported := misfits(model, _FIELDS):
        raise UserError(f'the authors of DINOv3 have no model with {", ".join(unsupported)}')
    masked = model['no_bias'] == 'key'
    flat = names.flatten(trained.params, model['no_bias'])
    flat = equivalent.with_biases(flat, {'key'} if masked else ())
    table = TABLE if model['mlp'] == 'mlp' else _GATED
    arrays = torch_layout.join_fused(torch_layout.write(flat, table), {'attn': 'qkv'})
    if masked:
        mask = np.repeat(np.array([1, 0, 1], np.float32), model['width'])
        biases = [name for name in arrays if name.endswith('.attn.qkv.bias')]
        arrays |= {f'{name}_mask': mask.copy() for name in biases}
    _, options = signatures.arguments(signatures.parse_call(model['positions'], 'positions'))
    rope = {'theta': options.get('theta', 100.0), 'dtype': options.get('periods', 'float32')}
    periods = rising_periods(model['width'] // model['num_heads'], **rope)
    arrays |= {_PERIODS: periods.astype(np.float32)}
    arrays |= {'mask_token': np.zeros((1, model['width']), np.float32)}
    channels = arrays['patch_embed.proj.weight'].shape[1]
    preprocessor = preprocessing.preprocessor(trained, channels, trained.image_size or _SIZE)
    return Written(arrays, preprocessor=preprocessor)


WRITERS = {('vit', 'authors'): write}
