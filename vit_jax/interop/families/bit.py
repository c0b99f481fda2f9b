"""BiT (Kolesnikov et al., 2020, arXiv:1912.11370): .npz, big_vision and Hugging Face.

timm's names are also read here, for `timm_bit`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from flax import traverse_util

from vit_jax.errors import UserError, resolve
from vit_jax.interop import equivalent, names, normalization, preprocessing
from vit_jax.interop.files import Flat
from vit_jax.interop.trained import TrainedModel, Written, class_names_config
from vit_jax.tree_paths import param_paths, require_fit

_UNIT, _BLOCK = 'block{1}/unit{1}', 'stage_{0}/block_{0}'
_LETTERS = {'a': 1, 'b': 2, 'c': 3}

# Some files number their convolutions: standardized_conv2d_17.
_RELEASED: names.Table = (
    *(
        row
        for conv in ('standardized_conv2d', 'standardized_conv2d_*')
        for row in (
            (f'resnet/root_block/{conv}', 'root/conv'),
            (f'resnet/{_UNIT}/a/proj/{conv}', f'{_BLOCK}/proj'),
            *((f'resnet/{_UNIT}/{x}/{conv}', f'{_BLOCK}/conv{i}') for x, i in _LETTERS.items()),
        )
    ),
    *(
        row
        for leaf, ours in (('gamma', 'scale'), ('beta', 'bias'))
        for row in (
            (f'resnet/group_norm/{leaf}', f'norm/{ours}'),
            *(
                (f'resnet/{_UNIT}/{x}/group_norm/{leaf}', f'{_BLOCK}/norm{i}/{ours}')
                for x, i in _LETTERS.items()
            ),
        )
    ),
    ('resnet/head/conv2d', 'head'),
)
_BIG_VISION: names.Table = (
    ('root_block/conv_root', 'root/conv'),
    (f'{_UNIT}/conv_proj', f'{_BLOCK}/proj'),
    *((f'{_UNIT}/conv{i}', f'{_BLOCK}/conv{i}') for i in (1, 2, 3)),
    *((f'{_UNIT}/gn{i}', f'{_BLOCK}/norm{i}') for i in (1, 2, 3)),
    ('norm-pre-head', 'norm'),
    ('head', 'head'),
)


def _torch(root: str, layer: str, norm: str, head: str) -> names.Table:
    return (
        (f'{root}.weight', 'root/conv/kernel'),
        (f'{layer}.downsample.conv.weight', f'{_BLOCK}/proj/kernel'),
        *((f'{layer}.conv{i}.weight', f'{_BLOCK}/conv{i}/kernel') for i in (1, 2, 3)),
        *((f'{layer}.norm{i}.weight', f'{_BLOCK}/norm{i}/scale') for i in (1, 2, 3)),
        *((f'{layer}.norm{i}.bias', f'{_BLOCK}/norm{i}/bias') for i in (1, 2, 3)),
        (f'{norm}.weight', 'norm/scale'),
        (f'{norm}.bias', 'norm/bias'),
        (f'{head}.weight', 'head/kernel'),
        (f'{head}.bias', 'head/bias'),
    )


_HUGGING_FACE = _torch(
    *('bit.embedder.convolution', 'bit.encoder.stages.{0}.layers.{0}', 'bit.norm', 'classifier.1')
)
TIMM = _torch('stem.conv', 'stages.{0}.blocks.{0}', 'norm', 'head.fc')
TIMM_NORM = 'stages.0.blocks.0.norm3.weight'
SIZE = (224, 224)  # written to files if the model accepts any size
_RELEASED_SOURCE, _HF_SOURCE = 'BiT npz', 'Hugging Face BiT'
_BIG_VISION_SOURCE, _TIMM_SOURCE = 'big_vision BiT npz', 'timm BiT'
_NO_CONFIG = (
    'no config.json: its convolutions are assumed to be padded as in the paper, not with '
    "global_padding 'SAME'"
)
_POOL_BORDER = (
    'the file cannot represent that the first pooling of this model ignores the padding: its '
    'readers pad with zeros'
)
# Forms by display name: the table, and a norm whose name identifies the form.
_FORMS: dict[str, tuple[names.Table, str]] = {
    _RELEASED_SOURCE: (_RELEASED, 'resnet/group_norm/gamma'),
    _BIG_VISION_SOURCE: (_BIG_VISION, 'norm-pre-head/scale'),
    _HF_SOURCE: (_HUGGING_FACE, 'bit.norm.weight'),
    _TIMM_SOURCE: (TIMM, TIMM_NORM),
}
_ARCHITECTURE = re.compile(r'resnetv2_\d+x\d_bit')
_KNOWN = {'num_classes', 'in_chans', 'global_pool'}  # supported keys of timm's model_args
# Required values in Hugging Face's config.json: the paper's model.
_REQUIRED = {
    'layer_type': 'preactivation',
    'hidden_act': 'relu',
    'num_groups': 32,
    'output_stride': 32,
    'global_padding': None,
    'embedding_dynamic_padding': False,
}


def matches(flat: Mapping[str, Any]) -> bool:
    """Return whether these are the names of a BiT, but not timm's."""
    return _form(_add_prefix(flat)) not in (None, _TIMM_SOURCE)


def read(flat: Mapping[str, np.ndarray], extra: Mapping[str, Any]) -> TrainedModel:
    """Read a BiT.

    Raises:
      UserError: if a parameter is missing, unknown or has the wrong shape, or if the config
        describes a different ResNet.
    """
    flat = _add_prefix(flat)
    source = _form(flat)
    assert source is not None
    if source == _HF_SOURCE:
        _require_paper(extra)
    if source == _TIMM_SOURCE:
        _require_architecture(extra)
    is_torch = source in (_HF_SOURCE, _TIMM_SOURCE)
    if is_torch:
        flat = {name: _permute(array, (2, 3, 1, 0)) for name, array in flat.items()}
    renamed = names.rename(flat, _FORMS[source][0], source)
    arrays = {name: _without_ones(name, array) for name, array in renamed.items()}
    model = _model(arrays, source)
    if source == _BIG_VISION_SOURCE:
        model['pool_padding'] = 'nothing'
    _require_fit(arrays, model, source)
    imported = TrainedModel.from_file(
        traverse_util.unflatten_dict(arrays, sep='/'), model, None, source
    )
    if source == _HF_SOURCE and not extra.get('model_type'):
        imported = imported.with_notes(_NO_CONFIG)
    return normalization.with_normalization(
        imported, extra, normalization.UNKNOWN_NORMALIZATION if is_torch else ''
    )


def write_npz(params: Mapping[str, Any]) -> Flat:
    """Convert nested parameters of `models.bit_resnet` to the arrays of a released .npz file.

    Raises:
      UserError: if a parameter is not part of a BiT.
    """
    flat = _rename(params, _RELEASED)
    head = 'resnet/head/conv2d/kernel'
    if head in flat:
        flat[head] = flat[head][None, None]
    return {re.sub(r'/unit(\d)/', r'/unit0\1/', name): array for name, array in flat.items()}


def write_transformers(trained: TrainedModel) -> Written:
    """Write the files that `BitForImageClassification.from_pretrained` reads.

    Raises:
      UserError: if a parameter is not part of a BiT.
    """
    flat, model = write_torch(trained.params, _HUGGING_FACE), trained.model_config
    width, layers = model.get('width_factor', 1), model['layers']
    channels = flat['bit.embedder.convolution.weight'].shape[1]
    config = {
        'model_type': 'bit',
        'architectures': ['BitForImageClassification'],
        **_REQUIRED,
        'num_channels': channels,
        # Hugging Face's width_factor does not affect the root and the last norm.
        'width_factor': 1,
        'embedding_size': 64 * width,
        'hidden_sizes': [256 * width * 2**i for i in range(len(layers))],
        'depths': list(layers),
        **class_names_config(trained.class_names, model.get('num_classes')),
    }
    preprocessor = preprocessing.preprocessor(trained, channels, trained.image_size or SIZE)
    return Written(flat, config, losses(trained), preprocessor)


def write_torch(params: Mapping[str, Any], table: names.Table) -> Flat:
    """Convert arrays to a table's PyTorch names and layouts.

    Raises:
      UserError: if a parameter is not part of a BiT.
    """
    return {name: _permute(array, (3, 2, 0, 1)) for name, array in _rename(params, table).items()}


def _form(flat: Mapping[str, Any]) -> str | None:
    return next((form for form, (_, norm) in _FORMS.items() if norm in flat), None)


def _add_prefix(flat: Mapping[str, Any]) -> dict[str, Any]:
    """Add the prefix of a classifier, which a bare `BitModel` lacks."""
    prefix = 'bit.' if 'embedder.convolution.weight' in flat else ''
    return {prefix + name: array for name, array in flat.items()}


def _permute(array: np.ndarray, axes: tuple[int, ...]) -> np.ndarray:
    """Permute the axes of a convolution's kernel, or transpose a dense layer's."""
    if array.ndim == 4:
        return array.transpose(axes)
    return array.T if array.ndim == 2 else array


def _without_ones(name: str, array: np.ndarray) -> np.ndarray:
    """Convert a head stored as a convolution to a dense layer, and norms [1 1 1 C] to vectors."""
    if name == 'head/kernel' and array.ndim == 4:
        return array.reshape(array.shape[-2:])
    return array if name.endswith('/kernel') else array.reshape(-1)


def _model(arrays: Flat, source: str) -> dict[str, Any]:
    """Infer the model's keywords from names and shapes."""
    layers = names.stage_depths(arrays)
    root = arrays.get('root/conv/kernel')
    if root is None or root.ndim != 4 or root.shape[-1] % 64 or not layers:
        raise UserError(f'{source}: not the root convolution and blocks of a BiT')
    head = arrays.get('head/bias')
    return {
        'name': 'bit_resnet',
        'num_classes': None if head is None else head.size,
        'layers': layers,
        'width_factor': root.shape[-1] // 64,
    }


def _require_fit(arrays: Flat, model: Mapping[str, Any], source: str) -> None:
    """Raise UserError unless these are all the parameters of the model."""
    fields = {key: value for key, value in model.items() if key != 'name'}
    module = resolve('vit_jax.models', 'bit_resnet', 'Model')(**fields)
    images = jax.ShapeDtypeStruct((1, 64, 64, arrays['root/conv/kernel'].shape[2]), np.float32)
    params = jax.eval_shape(module.init, jax.random.key(0), images)['params']
    require_fit(arrays, param_paths(params), f'{source}: incomplete BiT')


def _require_paper(config: Mapping[str, Any]) -> None:
    for key, value in _REQUIRED.items():
        if (actual := config.get(key, value)) != value:
            raise UserError(
                f'{_HF_SOURCE}: config.json has {key}={actual!r}; only the model of the paper, '
                f'with {value!r}, is supported'
            )


def _require_architecture(config: Mapping[str, Any]) -> None:
    """Raise UserError for other ResNets of timm with the same names."""
    name = str(config.get('architecture') or '').partition('.')[0]
    if not _ARCHITECTURE.fullmatch(name):
        raise UserError(
            f'{_TIMM_SOURCE}: config.json names {name!r}; of its ResNets only BiTs, such as '
            "'resnetv2_50x1_bit', are read"
        )
    model_args = config.get('model_args') or {}
    changed, pool = model_args.keys() - _KNOWN, {**config, **model_args}.get('global_pool', 'avg')
    if changed or pool != 'avg':
        problem = f'model_args {", ".join(sorted(changed))}' if changed else f'global_pool {pool!r}'
        raise UserError(f'{_TIMM_SOURCE}: {problem} in config.json: not the model of the paper')


def _rename(params: Mapping[str, Any], table: names.Table) -> Flat:
    """Rename arrays by `table`."""
    renamed: Flat = {}
    for our_name, leaf in traverse_util.flatten_dict(dict(params), sep='/').items():
        name = names.to_theirs(our_name, table)
        if name is None:
            raise UserError(f'{our_name}: not a parameter of a BiT')
        renamed[name] = np.asarray(leaf, np.float32)
    return renamed


def _npz(imported: TrainedModel) -> Written:
    _, notes = equivalent.renormalize(imported, normalization.RANGE)
    return Written(write_npz(imported.params), notes=(*losses(imported), *notes))


def losses(imported: TrainedModel) -> tuple[str, ...]:
    """Note properties of the model that a file cannot represent."""
    return (_POOL_BORDER,) if imported.model_config.get('pool_padding') == 'nothing' else ()


WRITERS = {('bit_resnet', 'npz'): _npz, ('bit_resnet', 'transformers'): write_transformers}
