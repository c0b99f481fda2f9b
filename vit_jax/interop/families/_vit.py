"""ViTs, inferred from the shapes of their parameters, and checked.

Parameters have our names, blocks unrolled and attention projections split (`names.split`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import jax
import numpy as np

from vit_jax.errors import UserError, resolve
from vit_jax.interop import equivalent, names
from vit_jax.interop.files import Flat
from vit_jax.interop.trained import TrainedModel
from vit_jax.models.vit import BIASES, VARIANTS
from vit_jax.models.vit_factorized import TABLES
from vit_jax.tree_paths import require_fit

Label = Callable[[str], str]
Size = tuple[int, int]  # height and width in pixels
LAYER_SCALE = 1e-5  # initial value in a new model


def assemble(
    flat: Flat,
    source: str,
    label: Label,
    gelu: str,
    norm_eps: float,
    image_size: tuple[int, int] | None = None,
    hints: Iterable[Size] = (),
    rows: int | None = None,
    posemb: str = 'learn',
    fields: Mapping[str, Any] = MappingProxyType({}),
) -> TrainedModel:
    """Build the model, and check that its parameters are complete.

    Args:
      flat: Parameters with our names, projections split.
      source: Name of the file for messages.
      label: Function from our name to the parameter's name in the file.
      gelu, norm_eps: Fields of the model that shapes do not determine.
      image_size: Height and width, if the file has them; by default the first of `hints` whose
        number of patches fits `pos_embed`, or else a square.
      hints: Possible heights and widths.
      rows: Number of positions before the patches: none, one per class token, or one per class
        token and register; None for one per class token.
      posemb: Field of the model if the file has no `pos_embed`; 'learn' if it is required.
      fields: Further fields of the model that shapes do not determine.

    Raises:
      UserError: if parameters are missing, unused or have the wrong shape; it names them.
    """
    if 'pos_embed' not in flat and posemb == 'learn':
        raise UserError(f'{source}: {label("pos_embed")} is not in the file')
    hints = tuple(hints)
    flat = {name: array for name, array in flat.items() if array.size}
    if any(name.endswith(_TABLE) for name in flat):
        flat = _with_tables(flat, image_size or next(iter(hints), None))
    model = _keywords(flat, source, label, rows) | {'gelu': gelu, 'norm_eps': norm_eps}
    model |= {'posemb': 'learn' if 'pos_embed' in flat else posemb, **fields}
    model |= _no_bias(flat, model)
    # Scanned, so that a deep model is traced as quickly as a shallow one.
    keywords = {key: value for key, value in model.items() if key != 'name'}
    module = resolve('vit_jax.models', model['name'], 'Model')(**keywords, scan=True)
    context = f'{source}: incomplete model (shapes in our layout)'
    require_fit(flat, _parameter_shapes(flat, module), context, label=label)
    if image_size is None and model['posemb'] == 'none':  # these may fit images of any size
        image_size = next(iter(hints), None)
    if image_size is None and 'pos_embed' in flat:
        patches = flat['pos_embed'].shape[1] - module.positioned_tokens
        fitting = [size for size in hints if _patches(size, module.stride) == patches]
        if side := square_side(patches):
            fitting.append((side * module.stride, side * module.stride))
        image_size = next(iter(fitting), None)
    params = names.nest(flat, '|'.join(module.no_bias))
    return TrainedModel.from_file(params, model, image_size, source)


def published_heads(shapes: Mapping[str, tuple[int, ...]], source: str) -> int:
    """Return the number of heads of the published ViT of this size; shapes do not determine it.

    Args:
      shapes: Shapes of PyTorch's arrays, by our names.
      source: Name of the file for messages.

    Raises:
      UserError: if no published ViT has this size.
    """
    depth = names.count_blocks(shapes, r'encoder/block_(\d+)/')
    mlp_dim, width = (*shapes.get('encoder/block_0/mlp/fc1/kernel', ()), 0, 0)[:2]
    heads = {v[3] for v in VARIANTS.values() if v[:3] == (width, depth, mlp_dim)}
    if len(heads) != 1:
        raise UserError(
            f'{source}: unknown number of attention heads of a model of width {width}, '
            f'depth {depth} and mlp_dim {mlp_dim}; put its config.json next to the file'
        )
    return heads.pop()


def square_side(tokens: int) -> int | None:
    """Return the side of a square grid of `tokens`, or None."""
    side = round(max(tokens, 0) ** 0.5)
    return side if side and side**2 == tokens else None


def class_row(flat: Flat, hints: Iterable[Size]) -> bool | None:
    """Return whether the first position belongs to the class token, given possible image sizes.

    None if no size has as many patches as there are positions, or one fewer.
    """
    rows = first_rows(flat, hints, (0, 1))
    return None if rows is None else bool(rows)


def first_rows(flat: Flat, hints: Iterable[Size], counts: Sequence[int]) -> int | None:
    """Return the number of positions before the patches, one of `counts`, given possible image
    sizes; None if no size fits.
    """
    table, kernel = flat['pos_embed'], flat.get('patch_embed/kernel')
    if kernel is None or kernel.ndim != 4 or table.ndim != 3:
        return None
    extra_rows = [table.shape[1] - _patches(size, kernel.shape[0]) for size in hints]
    return next((rows for rows in extra_rows if rows in counts), None)


def _no_bias(flat: Flat, model: Mapping[str, Any]) -> dict[str, str]:
    """Return the field `no_bias`: layers without biases anywhere in the file.

    A head needs biases, and so do patches, except before a norm, which makes them redundant.
    """
    needed = {'head', 'patch_embed'} - set(model.get('no_bias', '').split('|'))
    needed -= {'patch_embed'} if model.get('norm_pre') else set()
    needed |= {'norm'} if model.get('norm', 'layer') != 'layer' else set()
    absent = []
    for layer in BIASES:
        biases = equivalent.bias_shapes(flat, layer)
        if biases and layer not in needed and biases.keys().isdisjoint(flat):
            absent.append(layer)
    return {'no_bias': '|'.join(absent)} if absent else {}


# The biases of relative positions, of patches and of the tokens before them.
_TABLE, _PREFIX = 'position_bias/table', 'position_bias/prefix'


def _with_tables(flat: Flat, size: Size | None) -> Flat:
    """Reshape tables of relative positions to grids [2h-1 2w-1 H]; the last three rows, for the
    class token, become a separate parameter.

    Raises:
      UserError: if the shape of a grid is unknown.
    """
    result = dict(flat)
    for name, table in flat.items():
        if not name.endswith(_TABLE) or table.ndim != 2:
            continue
        rows = len(table) - 3
        stride = flat['patch_embed/kernel'].shape[0]
        sides = tuple(2 * (side // stride) - 1 for side in size or (0, 0))
        if size is None or sides[0] * sides[1] != rows:
            side = square_side(rows) or 0
            sides = (side, side)
        if sides[0] * sides[1] != rows:
            raise UserError(
                f'{rows} relative positions do not form a square; config.json must have the image '
                'size'
            )
        result[name] = table[:rows].reshape(*sides, -1)
        result[name.removesuffix(_TABLE) + _PREFIX] = table[rows:]
    return result


def without_tables(flat: Flat) -> Flat:
    """Invert `_with_tables`."""
    joined = {name: array for name, array in flat.items() if not name.endswith(_PREFIX)}
    for name, prefix in flat.items():
        if name.endswith(_PREFIX):
            table = name.removesuffix(_PREFIX) + _TABLE
            joined[table] = np.concatenate([flat[table].reshape(-1, prefix.shape[-1]), prefix])
    return joined


def _patches(size: Size, stride: int) -> int:
    return (size[0] // max(stride, 1)) * (size[1] // max(stride, 1))


def _keywords(flat: Flat, source: str, label: Label, rows: int | None) -> dict[str, Any]:
    """Keywords of `config.model` that follow from shapes and from `rows`, see `assemble`."""
    shape = functools.partial(names.shape_of, flat, source, label)
    patch_size, width = names.patch_shape(flat, source, label)
    heads = shape('encoder/block_0/attention/query/kernel', 3)[1]
    pool = 'patches' if 'fc_norm/scale' in flat else 'cls'
    pool = pool if 'cls_token' in flat else 'gap'
    pool = 'distilled' if 'dist_token' in flat else pool
    if any(name.startswith('map_head/') for name in flat):
        pool = 'cls_map' if 'cls_token' in flat else 'map'
    model: dict[str, Any] = {
        'name': 'vit',
        'num_classes': shape('head/kernel', 2)[1] if 'head/kernel' in flat else None,
        'patch_size': patch_size,
        'width': width,
        'depth': names.count_blocks(flat, r'encoder/block_(\d+)/'),
        'mlp_dim': shape('encoder/block_0/mlp/fc1/kernel', 2)[1],
        'num_heads': heads,
        'pool': pool,
        'fc_norm': 'fc_norm/scale' in flat,
        'representation_size': None,
    }
    first = sum(name in flat for name in ('cls_token', 'dist_token'))
    if 'pos_embed' in flat and rows is not None and rows < first:
        model['posemb_prefix'] = 'none'
    if 'pos_embed' in flat and 'register_tokens' in flat and (rows or 0) > first:
        model['posemb_prefix'] = 'all'
    if 'register_tokens' in flat:
        model['registers'] = shape('register_tokens', 3)[1]
    if 'norm_pre/scale' in flat:
        model['norm_pre'] = True
    if any(name.endswith('/layer_scale1') for name in flat):
        model['layer_scale'] = LAYER_SCALE
    if 'encoder/block_0/attention/q_norm/scale' in flat:
        model['qk_norm'] = 'layer'
    if 'encoder/block_0/attention/out/norm/scale' in flat:
        model['inner_norm'] = True
    if pool in ('map', 'cls_map'):
        model |= _pooling_fields(flat, model)
    if f'encoder/block_0/attention/{_TABLE}' in flat:
        model['positions'] = 'relative'
    if _TABLE in flat:
        model['positions'] = 'relative(shared=True)'
    gated, normed = (f'encoder/block_0/mlp/{x}' in flat for x in ('gate/kernel', 'norm/scale'))
    if gated or normed:
        model['mlp'] = ('swiglu' if gated else 'mlp') + ('(norm=True)' if normed else '')
    if 'pre_logits/kernel' in flat:
        model['representation_size'] = shape('pre_logits/kernel', 2)[1]
    if 'pos_embed' in flat:
        shape('pos_embed', 3)
    if 'resnet/root/conv/kernel' in flat:
        shape('resnet/root/conv/kernel', 4)
        model |= {'name': 'hybrid', 'layers': names.stage_depths(flat, 'resnet/')}
    if width % heads:
        raise UserError(f'{source}: width {width} is not a multiple of its {heads} heads')
    return model


def _pooling_fields(flat: Flat, model: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of attention pooling that differ from the blocks."""
    query, fc1 = (flat.get(f'map_head/{x}/kernel') for x in ('attention/query', 'mlp/fc1'))
    fields: dict[str, Any] = {}
    if query is not None and query.ndim == 3 and query.shape[1] != model['num_heads']:
        fields['pool_heads'] = query.shape[1]
    if fc1 is not None and fc1.ndim == 2 and fc1.shape[1] != model['mlp_dim']:
        fields['pool_mlp_dim'] = fc1.shape[1]
    return fields


def _parameter_shapes(flat: Flat, module: Any) -> Flat:
    """Return the module's parameter shapes for the number of patches in `flat`."""
    tokens = flat['pos_embed'].shape[1] if 'pos_embed' in flat else 2
    grid = (1, max(tokens - module.positioned_tokens, 1))
    if set(TABLES) <= flat.keys():
        grid = (flat[TABLES[0]].shape[1], flat[TABLES[1]].shape[1])
    for name, array in flat.items():
        if name.endswith(_TABLE):
            grid = ((array.shape[0] + 1) // 2, (array.shape[1] + 1) // 2)
    first = flat.get('resnet/root/conv/kernel', flat['patch_embed/kernel'])
    size = (1, *(module.stride * side for side in grid), first.shape[2])
    return names.empty_arrays(_shapes(module, size), '|'.join(module.no_bias))


@functools.lru_cache(maxsize=4)
def _shapes(module: Any, size: tuple[int, ...]) -> Any:
    """Return the shapes of the module's parameters for images of this size."""
    images = jax.ShapeDtypeStruct(size, np.float32)
    return jax.eval_shape(module.init, jax.random.key(0), images)['params']
