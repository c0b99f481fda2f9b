"""The keywords of a DETR that config.json of transformers determines, checked against our model."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from vit_jax.errors import UserError

_SOURCE = 'DETR'
_HEADS = 8  # of all released models; shapes do not determine it
_TYPES = ('detr', 'table-transformer')
# Reasons for which detectors of similar names are other models.
_OTHERS = {
    'conditional_detr': "its decoder attends by queries conditioned on the content, which DETR's "
    'does not',
    'deformable_detr': 'it attends to sampled points of several feature maps',
    'dab-detr': 'its queries are boxes, which the decoder refines',
}
# Parameters of these, for files without config.json.
_OTHER_NAMES = {
    '.sa_qcontent_proj.': 'conditional_detr',
    '.q_content_proj.': 'conditional_detr',
    '.sampling_offsets.': 'deformable_detr',
}
# transformers.DetrConfig.activation_function
_ACTIVATIONS = {'relu': 'relu', 'gelu': 'gelu', 'silu': 'swish', 'swish': 'swish'}
# ResNets of timm that are those of torchvision; others have the same names and compute otherwise.
_TIMM = re.compile(r'((tv|gluon|ssl|swsl)_)?resnet(50|101|152)(_v1b)?(\.\w+)?')
# What transformers' own ResNet must be, by the keys of its config.
_RESNET = {
    'hidden_act': 'relu',
    'layer_type': 'bottleneck',
    'downsample_in_bottleneck': False,
    'downsample_in_first_stage': False,
}


def require_detr(config: Mapping[str, Any], names: Mapping[str, Any]) -> None:
    """Refuse the files of other detectors.

    Args:
      config: the parsed config.json; empty if there is none.
      names: of the arrays.

    Raises:
      UserError: names the kind, and the reason if it is a known one.
    """
    held = (kind for part, kind in _OTHER_NAMES.items() if any(part in name for name in names))
    kind = config.get('model_type') or next(held, _TYPES[0])
    if kind not in _TYPES:
        reason = f': {_OTHERS[kind]}' if kind in _OTHERS else ''
        raise UserError(f'{_SOURCE}: a {kind!r} is another model than a detr{reason}')
    if config.get('position_embedding_type', 'sine') != 'sine':
        raise UserError(
            f'{_SOURCE}: position_embedding_type {config["position_embedding_type"]!r} is not '
            "supported (only 'sine')"
        )


def heads(config: Mapping[str, Any]) -> tuple[int, int]:
    """The numbers of heads of the encoder and of the decoder.

    Raises:
      UserError: if they are no positive numbers.
    """
    encoder = config.get('encoder_attention_heads', _HEADS)
    decoder = config.get('decoder_attention_heads', encoder)
    for number in (encoder, decoder):
        if not isinstance(number, int) or number < 1:
            raise UserError(f'{_SOURCE}: config.json has {number!r} attention heads')
    return encoder, decoder


def keywords(config: Mapping[str, Any], own_resnet: bool) -> dict[str, Any]:
    """Keywords of `config.model` that shapes do not determine, but the heads.

    Args:
      config: the parsed config.json; empty if there is none.
      own_resnet: whether the ResNet has the names of transformers' own, and not those of timm.

    Raises:
      UserError: if our model has no such part.
    """
    name = config.get('activation_function', 'relu')
    if name not in _ACTIVATIONS:
        raise UserError(
            f'{_SOURCE}: activation_function {name!r} is not supported (only '
            f'{", ".join(_ACTIVATIONS)})'
        )
    dropout = {'dropout': float(config['dropout'])} if 'dropout' in config else {}
    if any(not 0 <= rate < 1 for rate in dropout.values()):
        raise UserError(f'{_SOURCE}: config.json has dropout {config["dropout"]}')
    return {
        'activation': _ACTIVATIONS[name],
        'dilate': _dilated(config, own_resnet),
        **dropout,
    }


def _dilated(config: Mapping[str, Any], own_resnet: bool) -> bool:
    """Whether the last stage is dilated: never in transformers' own ResNet, whatever is set."""
    backbone = config.get('backbone_config') or {}
    if own_resnet:
        _require_plain(backbone)
        return False
    name = backbone.get('backbone') or config.get('backbone') or 'resnet50'
    if not _TIMM.fullmatch(str(name)):
        raise UserError(f'{_SOURCE}: its backbone {name!r} is not known to be a plain ResNet')
    # Version 5 writes the whole config of the backbone, version 4 none.
    options = backbone or config.get('backbone_kwargs') or {}
    plain = 16 if config.get('dilation', False) and not backbone else 32
    stride = options.get('output_stride') or plain
    if stride not in (16, 32):
        raise UserError(f'{_SOURCE}: a ResNet of output_stride {stride} is not supported')
    return bool(stride == 16)


def _require_plain(backbone: Mapping[str, Any]) -> None:
    for key, value in _RESNET.items():
        if (found := backbone.get(key, value)) != value:
            raise UserError(
                f'{_SOURCE}: a ResNet with {key}={found!r} is not supported (only {value!r})'
            )
