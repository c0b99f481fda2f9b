"""Text towers of CLIP and SigLIP in transformers, with or without an image tower."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np

from vit_jax.data.batches import ArraySpec
from vit_jax.errors import UserError
from vit_jax.interop import names, texts, torch_layout
from vit_jax.interop.families import _transformers, _vit
from vit_jax.interop.families import transformers_vision_tower as vision
from vit_jax.interop.files import Flat
from vit_jax.interop.trained import TrainedModel
from vit_jax.models import text_encoder
from vit_jax.tree_paths import require_fit

# The end token in files of CLIP from before 2023, and the size of CLIP's vocabulary, whose last id
# is the actual end token.
_OLD_EOS, _VOCAB_SIZE = 2, 49408


@dataclasses.dataclass(frozen=True)
class Kind:
    """A kind of tower.

    Attributes:
      head: Name of the head, which is optional for CLIP.
      model: Fields of the model `text_encoder` that are the same in all towers of the kind.
      others: Supported values of other fields, as regular expressions.
      defaults: Transformers' defaults of keys that config.json may omit.
    """

    head: str
    model: Mapping[str, Any]
    others: Mapping[str, str]
    defaults: Mapping[str, Any]

    def misfits(self, model: Mapping[str, Any]) -> list[str]:
        """Return unsupported fields of a `text_encoder` with their values."""
        fixed = {key: str(value) for key, value in self.model.items()}
        return _transformers.misfits(model, {**fixed, **self.others})

    @property
    def table(self) -> names.Table:
        """Names of the tower, without a prefix."""
        return (
            ('embeddings.token_embedding.weight', 'token_embed/embedding'),
            ('embeddings.position_embedding.weight', 'pos_embed'),
            *vision.BLOCKS,
            ('final_layer_norm', 'encoder/norm'),
            (self.head, 'head'),
        )


SIGLIP = Kind(
    'head',
    {'causal': False, 'head_bias': True, 'eos': None},
    _transformers.HEAD,
    {'hidden_act': 'gelu_pytorch_tanh', 'layer_norm_eps': 1e-6, 'num_attention_heads': 12},
)
CLIP = Kind(
    'text_projection',
    {'causal': True, 'head_bias': False},
    {'eos': rf'\d+|{text_encoder.LARGEST}'},
    {
        **{'hidden_act': 'quick_gelu', 'layer_norm_eps': 1e-5, 'num_attention_heads': 8},
        'eos_token_id': 49407,
    },
)


def read(
    kind: Kind, flat: Flat, config: Mapping[str, Any] | None, source: str, prefix: str = ''
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Read a tower.

    Args:
      kind: Kind of tower, see `Kind`.
      flat: Arrays by names without a prefix.
      config: Tower's part of config.json; None if there is none.
      source: Name of the file for messages.
      prefix: Prefix of the names in the file, for messages.

    Returns:
      The parameters, and the keywords of the model `text_encoder`.

    Raises:
      UserError: if parameters are unknown, missing or have the wrong shape, or contradict the
        config.
    """
    params = arrays(kind, flat, config, source, kind.table)
    label = make_renamer(prefix, kind.table)
    model = {**_sizes(params, source, label), **kind.model, **activation(kind, config, source)}
    if kind.model['causal']:
        model['eos'] = _end({**kind.defaults, **(config or {})}, model['vocab_size'])
    require_fit(
        params,
        _parameter_shapes(model),
        f'{source}: incomplete model (shapes in our layout)',
        label=label,
    )
    return names.nest(params), model


def arrays(
    kind: Kind, flat: Flat, config: Mapping[str, Any] | None, source: str, table: names.Table
) -> Flat:
    """Convert the arrays of a text tower, or of its image tower, to our names.

    Without a config, the number of heads is taken from the published ViT of the same size.

    Raises:
      UserError: if a name is in no row, a shape is impossible, or the number of heads is unknown.
    """
    if config is None:
        names_in_file = names.file_names(
            {name: torch_layout.to_ours(name, table) for name in flat}, source
        )
        heads = _vit.published_heads(
            {n: flat[torch_name].shape for n, torch_name in names_in_file.items()}, source
        )
    else:
        heads = int({**kind.defaults, **config}['num_attention_heads'])
    read = torch_layout.read(flat, table, heads, source)
    if 'pos_embed' in read:
        read['pos_embed'] = read['pos_embed'][None]
    return read


def activation(kind: Kind, config: Mapping[str, Any] | None, source: str) -> dict[str, Any]:
    """Read a tower's GELU and epsilon from the config, since shapes do not determine them."""
    values = {**kind.defaults, **(config or {})}
    gelu = _transformers.gelu(values, source)
    return {'gelu': gelu, 'norm_eps': float(values['layer_norm_eps'])}


def make_renamer(prefix: str, table: names.Table) -> Callable[[str], str]:
    """Return a function from our parameter names to those in the file."""
    return lambda name: full(prefix, torch_layout.to_theirs(name, table))


def full(prefix: str, name: str) -> str:
    """Return the full name of a part of the tower; CLIP's projection has no prefix."""
    return name if name.startswith(CLIP.head) else prefix + name


def _sizes(params: Flat, source: str, label: Callable[[str], str]) -> dict[str, Any]:
    shape = functools.partial(names.shape_of, params, source, label)
    vocab_size, width = shape('token_embed/embedding', 2)
    blocks = {name.split('/')[1] for name in params if name.startswith('encoder/block_')}
    return {
        'num_classes': shape('head/kernel', 2)[1] if 'head/kernel' in params else None,
        'vocab_size': vocab_size,
        'length': shape('pos_embed', 3)[1],
        'width': width,
        'depth': len(blocks),
        'mlp_dim': shape('encoder/block_0/mlp/fc1/kernel', 2)[1],
        'num_heads': shape('encoder/block_0/attention/query/kernel', 3)[1],
    }


def _end(config: Mapping[str, Any], vocab_size: int) -> int | str:
    """Return the token that ends a text, see `text_encoder.Model.eos`.

    Files of CLIP from before 2023 have 2, which is not the id that their tokenizer uses;
    transformers then uses the largest id of a text. In CLIP's own vocabulary that is the end token,
    but not if words were added, as in textual inversion. In MetaCLIP 2 the end token really is 2.
    """
    end = config['eos_token_id']
    is_clip = not str(config.get('model_type', '')).startswith('metaclip_2')
    if not (is_clip and end == _OLD_EOS):
        return int(end)
    return vocab_size - 1 if vocab_size == _VOCAB_SIZE else text_encoder.LARGEST


def clip_names(eos: int | str | None) -> tuple[str, str]:
    """Return the prefixes of class names and of `model_type` for a CLIP with this end token.

    Only MetaCLIP 2 ends texts with the id that old files of CLIP misuse.
    """
    return ('MetaClip2', 'metaclip_2') if eos == _OLD_EOS else ('CLIP', 'clip')


def _parameter_shapes(model: Mapping[str, Any]) -> Flat:
    """Return the shapes of the parameters."""
    module = text_encoder.Model(**model)
    ids = jax.ShapeDtypeStruct((1, model['length']), np.int32)
    return names.empty_arrays(jax.eval_shape(module.init, jax.random.key(0), ids)['params'])


def to_transformers(flat: Flat, table: names.Table) -> Flat:
    """Convert the arrays of a text or image tower to transformers' names and layouts."""
    return torch_layout.write(flat | {'pos_embed': flat['pos_embed'][0]}, table)


def config(model: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys of config.json for a `text_encoder`."""
    entries = _transformers.block_config(model) | {
        'vocab_size': model['vocab_size'],
        'max_position_embeddings': model['length'],
    }
    if model['eos'] is not None:
        entries['eos_token_id'] = _OLD_EOS if model['eos'] == text_encoder.LARGEST else model['eos']
    key = 'projection_dim' if model['causal'] else 'projection_size'
    return entries | ({key: model['num_classes']} if model['num_classes'] else {})


_SHAPE = ('width', 'depth', 'mlp_dim', 'num_heads')


def keywords(
    image: Mapping[str, Any], text: Mapping[str, Any], embed_dim: int, source: str
) -> dict[str, Any]:
    """Combine the keywords of two towers into keywords of the model `siglip`.

    Args:
      image, text: Keywords of the towers, a `vit` and a `text_encoder`.
      embed_dim: Size of image embeddings.
      source: Name of the file for messages.

    Raises:
      UserError: if the towers do not match.
    """
    for key in ('gelu', 'norm_eps'):
        if image[key] != text[key]:
            raise UserError(f'{source}: the towers differ in {key}, but must have the same')
    if text['num_classes'] != embed_dim:
        raise UserError(
            f'{source}: texts have {text["num_classes"]} features, but images {embed_dim}'
        )
    return {
        **{key: image[key] for key in ('patch_size', *_SHAPE, 'pool', 'gelu', 'norm_eps')},
        **{f'text_{key}': text[key] for key in _SHAPE},
        **{key: text[key] for key in ('vocab_size', 'length')},
        'embed_dim': embed_dim,
    }


def with_spec(imported: TrainedModel) -> TrainedModel:
    """Add the spec of an example: an image and the token ids of a text.

    Raises:
      UserError: if the image size is unknown.
    """
    length, size = imported.model_config['length'], imported.image_size
    if size is None:
        raise UserError(
            f'{imported.source}: the image size is unknown; put its config.json next to it'
        )
    channels = imported.params['image']['patch_embed']['kernel'].shape[2]
    spec = {
        'image': ArraySpec((*size, channels), np.dtype(np.uint8)),
        texts.FIELD: ArraySpec((length,), np.dtype(np.int32)),
    }
    return dataclasses.replace(imported, spec=spec)
