"""Encoders of transformers that are a ViT but for their names: what their readers share."""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from vit_jax.errors import UserError
from vit_jax.interop import names, normalization, torch_layout
from vit_jax.interop.families import _vit
from vit_jax.interop.files import Flat
from vit_jax.interop.trained import GIVEN_SIZE, TrainedModel

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
      source: for messages.
      types: `model_type` of its config.json; the first is assumed without one.
      table: names without any prefix.
      prefixes: of the names of all parts but the head in a model with a head.
      unused: names, or their beginnings, that the outputs do not depend on.
      defaults: of its configuration in transformers, which files may leave out.
    """

    source: str
    types: tuple[str, ...]
    table: names.Table
    prefixes: tuple[str, ...] = ()
    unused: tuple[str, ...] = ()
    defaults: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def plain(self, name: str) -> str:
        """A name without its prefix."""
        found = (name.removeprefix(p) for p in self.prefixes if name.startswith(p))
        return next(found, name)

    def used(self, flat: Flat) -> Flat:
        """The arrays that matter, by their names in the file."""
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
    """The model of such arrays.

    Args:
      kind: see `Kind`.
      flat: arrays by the names in the file; those that are not used are left out already.
      extra: of config.json.
      rows: of the positions before those of the patches; see `_vit.with_prefix`.
      posemb, fields: see `_vit.assemble`.

    Raises:
      UserError: if parameters are unknown, absent or of the wrong shape, or do not fit the config.
    """
    source, config = kind.source, {**kind.defaults, **extra}
    if (found := config.get('model_type', kind.types[0])) not in kind.types:
        wanted = ' or '.join(kind.types)
        raise UserError(f'{source}: config.json is of a {found!r}, not of a {wanted}')

    def translate(name: str) -> str | None:
        return torch_layout.ours(kind.plain(name), kind.table)

    in_file = names.renamed(flat, translate, source)
    heads = config.get('num_attention_heads') if extra.get('model_type') else None
    heads = heads or extra.get('num_attention_heads') or _published(flat, in_file, source)
    stripped = {kind.plain(name): array for name, array in flat.items()}
    params = torch_layout.read(stripped, kind.table, heads, source)
    imported = _vit.assemble(
        _vit.with_prefix(params, rows),
        source,
        lambda name: in_file.get(name) or torch_layout.theirs(name, kind.table),
        gelu=gelu(config, source),
        norm_eps=float(config.get('layer_norm_eps', 1e-6)),
        image_size=_image_size(config),
        hints=[extra[GIVEN_SIZE]] if GIVEN_SIZE in extra else [],
        posemb=posemb,
        fields=fields,
    )
    _require_config(imported, config)
    return normalization.folded(imported, extra, normalization.UNKNOWN)


def gelu(config: Mapping[str, Any], source: str, keys: Sequence[str] = ('hidden_act',)) -> str:
    """Our name of the activation.

    Raises:
      UserError: if it is none of ours, or that of a pooler is not tanh.
    """
    found = {config.get(key, 'gelu') for key in keys}
    if unknown := found - GELUS.keys():
        names_ = ', '.join(GELUS)
        raise UserError(f'{source}: hidden_act {unknown.pop()!r} is not supported (only {names_})')
    if config.get('pooler_act', 'tanh') != 'tanh':
        raise UserError(
            f'{source}: pooler_act {config["pooler_act"]!r} is not supported (only tanh)'
        )
    return GELUS[found.pop()]


def blocks(theirs: str, *rows: tuple[str, str]) -> names.Table:
    """The rows of a table for the parts of a block."""
    return tuple((f'{theirs}.{{0}}.{a}', f'encoder/block_{{0}}/{b}') for a, b in rows)


# Of a ViT, without the prefix of all parts but the classifier in a model with a head.
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
    shapes = {name: flat[theirs].shape for name, theirs in in_file.items()}
    return _vit.published_heads(shapes, source)


def _image_size(config: Mapping[str, Any]) -> tuple[int, int] | None:
    size = config.get('image_size')
    if size is None:
        return None
    height, width = size if isinstance(size, list | tuple) else (size, size)
    return int(height), int(width)


def _require_config(imported: TrainedModel, config: Mapping[str, Any]) -> None:
    """Raise UserError if config.json belongs to another file."""
    model = imported.model_config
    for key, field in (('num_hidden_layers', 'depth'), ('patch_size', 'patch_size')):
        if config.get(key, model[field]) != model[field]:
            raise UserError(
                f'{imported.source}: {key} is {config[key]}, the file has {model[field]}; '
                'config.json is of another model'
            )
    if imported.image_size is not None and 'pos_embed' in imported.params:
        height, width = imported.image_size
        first = sum(name in imported.params for name in ('cls_token', 'dist_token'))
        rows = imported.params['pos_embed'].shape[1] - first
        if (height // model['patch_size']) * (width // model['patch_size']) != rows:
            raise UserError(
                f'{imported.source}: image_size is {height}x{width}, '
                f'but pos_embed has rows for {rows} patches'
            )


def batched(array: np.ndarray) -> np.ndarray:
    """A token [D] as [1 1 D], a table [N D] as [1 N D]."""
    return array.reshape((1,) * (3 - array.ndim) + array.shape)
