"""Reading and writing the encoders of transformers that are ViTs under other names."""

from __future__ import annotations

import dataclasses
import re
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from vit_jax.errors import UserError
from vit_jax.interop import equivalent, names, normalization, preprocessing, torch_layout
from vit_jax.interop.families import _vit
from vit_jax.interop.files import Flat
from vit_jax.interop.trained import GIVEN_SIZE, TrainedModel, Written, class_names_config, fields
from vit_jax.nn.positions import sincos2d

# `hidden_act`
GELUS = {
    'gelu': 'erf',
    'gelu_new': 'tanh',
    'gelu_pytorch_tanh': 'tanh',
    'gelu_fast': 'tanh',
    'quick_gelu': 'quick',
}


@dataclasses.dataclass(frozen=True)
class Kind:
    """A kind of encoder.

    Attributes:
      source: Name for messages.
      types: Values of `model_type` in config.json; the first is the default.
      table: Names without any prefix.
      prefixes: Prefixes of all names except the head's, in models with a head.
      unused: Names, or prefixes of names, that outputs do not depend on.
      defaults: Transformers' defaults of keys that config.json may omit.
    """

    source: str
    types: tuple[str, ...]
    table: names.Table
    prefixes: tuple[str, ...] = ()
    unused: tuple[str, ...] = ()
    defaults: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def plain(self, name: str) -> str:
        """Return a name without its prefix."""
        plain_names = (name.removeprefix(p) for p in self.prefixes if name.startswith(p))
        return next(plain_names, name)

    def used(self, flat: Flat) -> Flat:
        """Return the arrays that outputs depend on, by their names in the file."""
        return {n: array for n, array in flat.items() if not self.plain(n).startswith(self.unused)}


def read(
    kind: Kind,
    flat: Flat,
    extra: Mapping[str, Any],
    *,
    rows: int = 1,
    posemb: str = 'learn',
    fields: Mapping[str, Any] = types.MappingProxyType({}),
) -> TrainedModel:
    """Build the model from the arrays of a file.

    Args:
      kind: Kind of encoder, see `Kind`.
      flat: Arrays by their names in the file, without unused ones.
      extra: Parsed config.json.
      rows, posemb, fields: See `_vit.assemble`.

    Raises:
      UserError: if parameters are unknown, missing or have the wrong shape, or contradict the
        config.
    """
    source, config = kind.source, {**kind.defaults, **extra}
    if (model_type := config.get('model_type', kind.types[0])) not in kind.types:
        requested = ' or '.join(kind.types)
        raise UserError(f'{source}: config.json describes a {model_type!r}, not a {requested}')

    translated = {name: torch_layout.to_ours(kind.plain(name), kind.table) for name in flat}
    in_file = names.file_names(translated, source)
    heads = config.get('num_attention_heads') if extra.get('model_type') else None
    heads = heads or extra.get('num_attention_heads') or _published(flat, in_file, source)
    size = config.get('image_size')
    size = (size, size) if isinstance(size, int) else size
    stripped = {kind.plain(name): array for name, array in flat.items()}
    params = torch_layout.read(stripped, kind.table, heads, source)
    imported = _vit.assemble(
        params,
        source,
        lambda name: in_file.get(name) or torch_layout.to_theirs(name, kind.table),
        gelu=gelu(config, source),
        norm_eps=float(config.get('layer_norm_eps', 1e-6)),
        image_size=(int(size[0]), int(size[1])) if size else None,
        hints=[extra[GIVEN_SIZE]] if GIVEN_SIZE in extra else [],
        rows=rows,
        posemb=posemb,
        fields=fields,
    )
    _require_config(imported, config)
    return normalization.with_normalization(imported, extra, normalization.UNKNOWN_NORMALIZATION)


def gelu(config: Mapping[str, Any], source: str, keys: Sequence[str] = ('hidden_act',)) -> str:
    """Return our name of the activation.

    Raises:
      UserError: if the activation is not supported, or a pooler's activation is not tanh.
    """
    activations = {config.get(key, 'gelu') for key in keys}
    if unknown := activations - GELUS.keys():
        names_ = ', '.join(GELUS)
        raise UserError(f'{source}: hidden_act {unknown.pop()!r} is not supported (only {names_})')
    if config.get('pooler_act', 'tanh') != 'tanh':
        raise UserError(
            f'{source}: pooler_act {config["pooler_act"]!r} is not supported (only tanh)'
        )
    return GELUS[activations.pop()]


def blocks(theirs: str, *rows: tuple[str, str]) -> names.Table:
    """Return the rows of a table for the parts of a block."""
    return tuple((f'{theirs}.{{0}}.{a}', f'encoder/block_{{0}}/{b}') for a, b in rows)


# Of a ViT, without the prefix that a model with a head has on all names but the classifier's.
VIT_TABLE: names.Table = (
    ('embeddings.cls_token', 'cls_token'),
    ('embeddings.position_embeddings', 'pos_embed'),
    ('embeddings.patch_embeddings.projection', 'patch_embed'),
    *blocks(
        'encoder.layer',
        ('layernorm_before', 'norm1'),
        ('attention.attention.query', 'attention/query'),
        ('attention.attention.key', 'attention/key'),
        ('attention.attention.value', 'attention/value'),
        ('attention.output.dense', 'attention/out'),
        ('layernorm_after', 'norm2'),
        ('intermediate.dense', 'mlp/fc1'),
        ('output.dense', 'mlp/fc2'),
    ),
    *blocks(
        'layers',
        ('layernorm_before', 'norm1'),
        ('attention.q_proj', 'attention/query'),
        ('attention.k_proj', 'attention/key'),
        ('attention.v_proj', 'attention/value'),
        ('attention.o_proj', 'attention/out'),
        ('layernorm_after', 'norm2'),
        ('mlp.fc1', 'mlp/fc1'),
        ('mlp.fc2', 'mlp/fc2'),
    ),
    ('layernorm', 'encoder/norm'),
    ('pooler.dense', 'pre_logits'),
    ('classifier', 'head'),
)


def _published(flat: Flat, in_file: Mapping[str, str], source: str) -> int:
    shapes = {name: flat[torch_name].shape for name, torch_name in in_file.items()}
    return _vit.published_heads(shapes, source)


def _require_config(imported: TrainedModel, config: Mapping[str, Any]) -> None:
    """Raise UserError if config.json belongs to another file."""
    model = imported.model_config
    for key, field in (('num_hidden_layers', 'depth'), ('patch_size', 'patch_size')):
        if config.get(key, model[field]) != model[field]:
            raise UserError(
                f'{imported.source}: {key} is {config[key]}, but the file has {model[field]}; '
                'config.json describes a different model'
            )
    if imported.image_size is not None and 'pos_embed' in imported.params:
        height, width = imported.image_size
        first = imported.model.positioned_tokens
        rows = imported.params['pos_embed'].shape[1] - first
        if (height // model['patch_size']) * (width // model['patch_size']) != rows:
            raise UserError(
                f'{imported.source}: image_size is {width} x {height}, '
                f'but pos_embed has rows for {rows} patches'
            )


def add_batch_axis(array: np.ndarray) -> np.ndarray:
    """Reshape a token [D] to [1 1 D], a table [N D] to [1 N D]."""
    return array.reshape((1,) * (3 - array.ndim) + array.shape)


Fields = Mapping[str, Any]
GELU_NAMES = {'erf': 'gelu', 'tanh': 'gelu_pytorch_tanh', 'quick': 'quick_gelu'}

# Supported values of fields, as regular expressions, unless a form overrides them.
_PLAIN = {
    **{'pool': 'cls', 'posemb': 'learn|sincos2d', 'positions': 'none', 'registers': '0'},
    **{'norm': 'layer', 'norm_place': 'pre', 'norm_pre': 'False', 'final_norm': 'True'},
    **{'fc_norm': 'False', 'head_norm': 'none', 'qk_norm': 'none', 'mlp': 'mlp'},
    **{'inner_norm': 'False', 'pool_heads': 'None', 'pool_mlp_dim': 'None'},
    **{'num_classes': 'None|0', 'representation_size': 'None|0'},
}
HEAD = {'num_classes': r'[1-9]\d*'}
POOLER = {'representation_size': '.*'}
REGISTERS = {'registers': r'[1-9]\d*'}
MLPS = {'mlp': 'mlp|swiglu'}
QKV = (('query', 'key', 'value'),)


@dataclasses.dataclass(frozen=True)
class Form:
    """A class of transformers.

    Attributes:
      kind: Kind of its encoder. If the table has layer scale, a model without it gets factors of 1.
      name: Name of the class.
      prefix: Prefix of all names except the head's.
      fields: Supported values of fields, as regular expressions, if they differ from a plain ViT's.
      table: Rows before the rows of the kind.
      config: Function from the fields of a model to further entries of config.json.
      arrays: Function from our arrays and the fields to the arrays of the class.
      named: Function that converts arrays with names of the class, without prefix.
      notes: Function from the fields to notes on properties that the class lacks.
      model_type: Value in config.json; by default the first of the kind.
      no_bias: Groups of layers that can lack biases together; others get biases of zero.
      posemb_prefix: Field of the ViT.
    """

    kind: Kind
    name: str
    prefix: str = ''
    fields: Mapping[str, str] = dataclasses.field(default_factory=dict)
    table: names.Table = ()
    config: Callable[[Fields], dict[str, Any]] = lambda model: {}
    arrays: Callable[[Flat, Fields], Flat] = lambda flat, model: flat
    named: Callable[[Flat], Flat] = lambda arrays: arrays
    notes: Callable[[Fields], tuple[str, ...]] = lambda model: ()
    model_type: str = ''
    no_bias: tuple[tuple[str, ...], ...] = QKV
    posemb_prefix: str = 'class'

    def misfits(self, model: Fields) -> list[str]:
        """Return unsupported fields of a model with their values."""
        return misfits(model, {**_PLAIN, **self.fields})


def misfits(model: Fields, patterns: Mapping[str, str]) -> list[str]:
    """Return the fields of a model, with their values, that do not match their patterns."""
    return [
        f'{key} {model[key]!r}'
        for key, pattern in patterns.items()
        if not re.fullmatch(pattern, str(model[key]))
    ]


def write(trained: TrainedModel, forms: Sequence[Form]) -> Written:
    """Write the files of the first class that computes the same as the model; classes of the
    original kind are tried first.

    Raises:
      UserError: if there is none, or the image size is unknown and does not follow from
        `pos_embed`.
    """
    model = fields(trained.model)
    ranked = sorted(forms, key=lambda form: form.kind.source != trained.source)
    form = min(ranked, key=lambda form: len(form.misfits(model)))
    if lacking := form.misfits(model):
        raise UserError(
            f'transformers has no such model: {form.name} comes closest, but has no '
            f'{", ".join(lacking)}; write an .npz file, or for timm'
        )
    flat = names.flatten(trained.params, model['no_bias'])
    first = trained.model.positioned_tokens
    size = trained.image_size or square(flat, model['patch_size'], first)
    if model['posemb'] == 'sincos2d':
        flat['pos_embed'] = fixed_positions(size, model['patch_size'], model['width'], first)
    flat = equivalent.move_positions(flat, model['posemb_prefix'], form.posemb_prefix)
    absent = set(filter(None, model['no_bias'].split('|')))
    retained = {layer for group in form.no_bias if absent.issuperset(group) for layer in group}
    flat = equivalent.with_biases(flat, absent - retained)
    model['no_bias'] = '|'.join(sorted(retained))
    channels = flat['patch_embed/kernel'].shape[2]
    config = {
        'model_type': form.model_type or form.kind.types[0],
        'architectures': [form.name],
        **shape_config(model, size),
        'num_channels': channels,
        **({'qkv_bias': False} if retained.issuperset(*QKV) else {}),
    }
    if model['num_classes']:
        config |= class_names_config(trained.class_names, model['num_classes'])
    preprocessor = preprocessing.preprocessor(trained, channels, size)
    return Written(
        _arrays(flat, model, form),
        {**config, **form.config(config | model)},
        form.notes(model),
        preprocessor,
    )


def _arrays(flat: Flat, model: Fields, form: Form) -> Flat:
    """Convert arrays to the names of a class."""
    table = (*form.table, *form.kind.table)
    flat = form.arrays(_add_layer_scale(flat, model, table), model)
    if unknown := [name for name in flat if names.to_theirs(name, table) is None]:
        raise UserError(
            f'{form.name} of transformers has no part like {names.format_names(unknown)}'
        )
    head = {name: array for name, array in flat.items() if name.startswith('head/')}
    encoder_arrays = {name: array for name, array in flat.items() if name not in head}
    encoder = form.named(torch_layout.write(encoder_arrays, table))
    return torch_layout.write(head, table) | {form.prefix + n: a for n, a in encoder.items()}


def _add_layer_scale(flat: Flat, model: Fields, table: names.Table) -> Flat:
    """Add layer scale of ones if the class has it and the model does not; fold it for others."""
    scales = [f'encoder/block_{i}/layer_scale{j}' for i in range(model['depth']) for j in (1, 2)]
    if names.to_theirs(scales[0], table) is None:
        return equivalent.fold_layer_scale(flat)
    ones = np.ones(model['width'], np.float32)
    return dict.fromkeys(scales, ones) | flat


def square(flat: Flat, patch_size: int, first: int = 1) -> tuple[int, int]:
    """Return the size of square images whose patches match the positions after the first ones.

    Raises:
      UserError: if their number is not a square.
    """
    side = _vit.square_side(flat['pos_embed'].shape[1] - first) if 'pos_embed' in flat else None
    if side is None:
        raise UserError(
            'the image size does not follow from pos_embed; read with image_size=(y, x)'
        )
    return side * patch_size, side * patch_size


def fixed_positions(size: tuple[int, int], stride: int, width: int, first: int) -> np.ndarray:
    """Return `sincos2d` positions as a parameter, [1 F+N D]; zero for the first tokens."""
    rows, columns = (side // stride for side in size)
    return np.pad(sincos2d(rows, columns, width), ((first, 0), (0, 0)))[None]


def shape_config(model: Fields, size: tuple[int, int]) -> dict[str, Any]:
    """Return the keys of config.json for blocks, image size (height and width) and patches."""
    image_size = size[0] if size[0] == size[1] else list(size)
    return block_config(model) | {'image_size': image_size, 'patch_size': model['patch_size']}


def block_config(model: Fields) -> dict[str, Any]:
    """Return the keys of config.json for the blocks."""
    return {
        'hidden_size': model['width'],
        'num_hidden_layers': model['depth'],
        'num_attention_heads': model['num_heads'],
        'intermediate_size': model['mlp_dim'],
        'hidden_act': GELU_NAMES[model['gelu']],
        'layer_norm_eps': model['norm_eps'],
    }


def pooler(model: Fields) -> dict[str, Any]:
    """Return the keys of config.json for a `representation_size`."""
    width = model['representation_size']
    return {'pooler_output_size': width, 'pooler_act': 'tanh'} if width else {}


def without_patch_bias(flat: Flat, first: int) -> Flat:
    """Add patch biases, if any, to the positions of patches, which follow `first` others."""
    if 'patch_embed/bias' not in flat:
        return flat
    result = dict(flat)
    bias, table = result.pop('patch_embed/bias'), flat['pos_embed'].copy()
    table[:, first:] += bias
    return result | {'pos_embed': table}
