"""ViTs written as classes of transformers: the fields that a class has, and how it names its parts.

Names of version 4 are written where they differ: version 5 writes and reads them too.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from vit_jax.errors import UserError
from vit_jax.interop import labels, names, normalization, torch_layout
from vit_jax.interop.families import _transformers, _vit
from vit_jax.interop.files import Flat
from vit_jax.interop.trained import TrainedModel, Written, fields
from vit_jax.nn.positions import sincos2d

Fields = Mapping[str, Any]
_GELUS = {'erf': 'gelu', 'tanh': 'gelu_pytorch_tanh', 'quick': 'quick_gelu'}

# The values, as patterns, that fields have to have unless a form has its own for them.
_PLAIN = {
    **{'pool': 'cls', 'posemb': 'learn|sincos2d', 'positions': 'none', 'registers': '0'},
    **{'norm': 'layer', 'norm_place': 'pre', 'norm_pre': 'False', 'final_norm': 'True'},
    **{'fc_norm': 'False', 'head_norm': 'none', 'qk_norm': 'none', 'mlp': 'mlp', 'no_bias': ''},
    **{'num_classes': 'None|0', 'representation_size': 'None|0'},
}
HEAD = {'num_classes': r'[1-9]\d*'}
POOLER = {'representation_size': '.*'}
REGISTERS = {'registers': r'[1-9]\d*'}
MLPS = {'mlp': 'mlp|swiglu'}


@dataclasses.dataclass(frozen=True)
class Form:
    """A class of transformers.

    Attributes:
      kind: of encoder. If its table has layer scale, a model without it gets factors of one.
      name: of the class.
      prefix: of the names of all parts but the head.
      fields: patterns of the values of fields, beside those that are plain.
      table: rows before those of the kind.
      config: entries of config.json for the fields of a model, beside those of all.
      arrays: our arrays as they are kept there, from those and the fields.
      named: the same of arrays that have their names already, without a prefix.
      model_type: of config.json; the first of the kind's if it is empty.
    """

    kind: _transformers.Kind
    name: str
    prefix: str = ''
    fields: Mapping[str, str] = dataclasses.field(default_factory=dict)
    table: names.Table = ()
    config: Callable[[Fields], dict[str, Any]] = lambda model: {}
    arrays: Callable[[Flat, Fields], Flat] = lambda flat, model: flat
    named: Callable[[Flat], Flat] = lambda arrays: arrays
    model_type: str = ''

    def misfits(self, model: Fields) -> list[str]:
        """The fields of a model, with their values, that the class does not have."""
        return misfits(model, {**_PLAIN, **self.fields})


def misfits(model: Fields, patterns: Mapping[str, str]) -> list[str]:
    """The fields of a model, with their values, that do not match their patterns."""
    return [
        f'{key} {model[key]!r}'
        for key, pattern in patterns.items()
        if not re.fullmatch(pattern, str(model[key]))
    ]


def write(trained: TrainedModel, forms: Sequence[Form]) -> Written:
    """Files of the first of the classes that computes what the model does, in front of the others
    those of the kind that it was read from.

    Raises:
      UserError: if there is none, or neither the model nor a `pos_embed` of a square has the size
        of the images.
    """
    model = fields(trained.model)
    ranked = sorted(forms, key=lambda form: form.kind.source != trained.source)
    form = min(ranked, key=lambda form: len(form.misfits(model)))
    if lacking := form.misfits(model):
        raise UserError(
            f'transformers has no such model: {form.name} comes closest, but has no '
            f'{", ".join(lacking)}; write an .npz file, or for timm'
        )
    flat = names.flattened(trained.params)
    first = trained.model.positioned_tokens
    size = trained.image_size or square(flat, model['patch_size'], first)
    if model['posemb'] == 'sincos2d':
        flat['pos_embed'] = fixed_positions(size, model['patch_size'], model['width'], first)
    channels = flat['patch_embed/kernel'].shape[2]
    config = {
        'model_type': form.model_type or form.kind.types[0],
        'architectures': [form.name],
        **shape_config(model, size),
        'num_channels': channels,
    }
    if model['num_classes']:
        config |= labels.write(trained.class_names, model['num_classes'])
    preprocessor = normalization.preprocessor(channels, size)
    return Written(
        _arrays(flat, model, form), {**config, **form.config(config | model)}, (), preprocessor
    )


def _arrays(flat: Flat, model: Fields, form: Form) -> Flat:
    """Arrays by the names of a class."""
    table = (*form.table, *form.kind.table)
    flat = form.arrays(_scaled(flat, model, table), model)
    if unknown := [name for name in flat if names.theirs(name, table) is None]:
        raise UserError(f'{form.name} of transformers has no part like {names.listed(unknown)}')
    head = {name: array for name, array in flat.items() if name.startswith('head/')}
    rest = {name: array for name, array in flat.items() if name not in head}
    encoder = form.named(torch_layout.write(rest, table))
    return torch_layout.write(head, table) | {form.prefix + n: a for n, a in encoder.items()}


def _scaled(flat: Flat, model: Fields, table: names.Table) -> Flat:
    """Add layer scale, of ones where there is none, if the table has it; else fold it."""
    scales = [f'encoder/block_{i}/layer_scale{j}' for i in range(model['depth']) for j in (1, 2)]
    if names.theirs(scales[0], table) is None:
        return _vit.unscaled(flat, 'the model', lambda name: name)
    ones = np.ones(model['width'], np.float32)
    return dict.fromkeys(scales, ones) | flat


def square(flat: Flat, patch_size: int, first: int = 1) -> tuple[int, int]:
    """The size of square images with as many patches as there are positions after the first ones.

    Raises:
      UserError: if they form no square.
    """
    side = _vit.square_side(flat['pos_embed'].shape[1] - first) if 'pos_embed' in flat else None
    if side is None:
        raise UserError('the image size does not follow from pos_embed; give it')
    return side * patch_size, side * patch_size


def fixed_positions(size: tuple[int, int], stride: int, width: int, first: int) -> np.ndarray:
    """The table of `sincos2d` positions as a parameter, [1 F+N D]; zero for the first tokens."""
    rows, columns = (side // stride for side in size)
    return np.pad(sincos2d(rows, columns, width), ((first, 0), (0, 0)))[None]


def shape_config(model: Fields, size: tuple[int, int]) -> dict[str, Any]:
    """The fields of config.json for the blocks and the images' height and width."""
    image_size = size[0] if size[0] == size[1] else list(size)
    return block_config(model) | {'image_size': image_size, 'patch_size': model['patch_size']}


def block_config(model: Fields) -> dict[str, Any]:
    """The fields of config.json for the blocks."""
    return {
        'hidden_size': model['width'],
        'num_hidden_layers': model['depth'],
        'num_attention_heads': model['num_heads'],
        'intermediate_size': model['mlp_dim'],
        'hidden_act': _GELUS[model['gelu']],
        'layer_norm_eps': model['norm_eps'],
    }


def with_rows(flat: Flat, at: int, count: int) -> Flat:
    """Insert positions of zero for `count` tokens, whose rows begin `at` this one."""
    table = flat['pos_embed']
    zeros = np.zeros((1, count, table.shape[2]), np.float32)
    return flat | {'pos_embed': np.concatenate([table[:, :at], zeros, table[:, at:]], axis=1)}


def pooler(model: Fields) -> dict[str, Any]:
    """The entries of config.json for a `representation_size`."""
    width = model['representation_size']
    return {'pooler_output_size': width, 'pooler_act': 'tanh'} if width else {}


def without_patch_bias(flat: Flat) -> Flat:
    """Add the biases of the patches to their positions."""
    kept = dict(flat)
    bias, table = kept.pop('patch_embed/bias'), flat['pos_embed'].copy()
    table[:, int('cls_token' in flat) :] += bias
    return kept | {'pos_embed': table}
