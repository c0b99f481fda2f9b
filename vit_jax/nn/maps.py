"""What models show of themselves, in one form for all: attention, hidden states, parameters."""

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import flax.linen as nn
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import Array

from vit_jax.array_types import Bool, Float
from vit_jax.errors import UserError
from vit_jax.nn.patches import patch_grid


class LazyWeights(Protocol):
    """Weights that numpy lays out on demand, since they would take too much memory."""

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray: ...


class AttentionMap(NamedTuple):
    """Weights of one attention layer.

    Image tokens are the cells of a grid, row by row; text tokens are a grid of one axis. If there
    are more queries or keys than cells in their grid, the first ones, such as class tokens, lie
    outside of it.

    Attributes:
      name: Path of the layer, such as `encoder/block_3`, or `decoder/block_0/cross` for attention
        to the output of another stack.
      weights: Weights of every query over the keys; they sum to one.
      query_grid, key_grid: (rows, columns) of patches, or (tokens,).
    """

    name: str
    weights: Float[Array, 'B H Q K'] | LazyWeights
    query_grid: tuple[int, ...]
    key_grid: tuple[int, ...]

    @property
    def to_itself(self) -> bool:
        """Whether it is self-attention, by its name."""
        return not self.name.endswith('/cross')


def keep(module: nn.Module, weights: Float[Array, '*B H Q K']) -> None:
    """Keep the weights of a module if `intermediates` is mutable; free otherwise."""
    if module.is_mutable_collection('intermediates'):
        module.sow('intermediates', 'attention', weights)


def collect(
    intermediates: Mapping[str, Any],
    stack: str,
    query_grid: tuple[int, ...],
    key_grid: tuple[int, ...],
    module: str = 'attention',
) -> list[AttentionMap]:
    """Collect the maps that the blocks of a stack have kept, from the first block to the last.

    Args:
      intermediates: Collection that `model.apply(..., mutable='intermediates')` returns.
      stack: Path of the stack's module, '/'-joined. Its blocks are `block_0`, `block_1`, ..., or
        scanned `blocks`.
      query_grid: See `AttentionMap`.
      key_grid: See `AttentionMap`.
      module: Name of the attention layer in a block. Any but `attention` becomes part of the
        maps' names.

    Raises:
      ValueError: if the blocks have kept nothing.
    """
    blocks = intermediates
    for name in stack.split('/'):
        blocks = blocks.get(name, {})
    if 'blocks' in blocks:
        layers = list(blocks['blocks'][module]['attention'][0])
    else:
        count = sum(name.startswith('block_') for name in blocks)
        layers = [blocks[f'block_{i}'][module]['attention'][0] for i in range(count)]
    if not layers:
        raise ValueError(f'no attention in {stack!r}: apply the model with mutable intermediates')
    suffix = '' if module == 'attention' else f'/{module}'
    return [
        AttentionMap(f'{stack}/block_{i}{suffix}', weights, query_grid, key_grid)
        for i, weights in enumerate(layers)
    ]


HIDDEN_STATES = 'hidden_states'  # the collection that `keep_hidden_states` fills
_EMBED = '_embed'  # the method of models that returns the tokens of layer 0
_BLOCK = re.compile(r'block_\d+|blocks')


@struct.dataclass
class HiddenState:
    """Tokens after one layer, which `jax.jit` may return.

    Attributes:
      name: Path of the layer, such as `encoder/block_3`; 'embedding' before the first.
      tokens: `prefix` tokens that are not patches, then the patches row by row.
      grid: (rows, columns) of patches, or (tokens,) of text; empty for images of several sizes.
      prefix: Number of tokens before the patches.
      class_tokens: Number of class and distillation tokens, which come first.
      real: True for patches of the image and false for padding; None without padding.
    """

    name: str = struct.field(pytree_node=False)
    tokens: Float[Array, 'B N D']
    grid: tuple[int, ...] = struct.field(pytree_node=False)
    prefix: int = struct.field(default=0, pytree_node=False)
    class_tokens: int = struct.field(default=0, pytree_node=False)
    real: Bool[Array, 'B n'] | None = None

    @property
    def class_token(self) -> Float[Array, 'B D']:
        """First token; UserError if it is not a class token."""
        if not self.class_tokens:
            raise UserError("this model has no class token: take 'mean', the mean of its patches")
        return self.tokens[:, 0]

    @property
    def patches(self) -> Float[Array, 'B n D']:
        """Tokens of the patches, row by row."""
        return self.tokens[:, self.prefix :]

    @property
    def mean(self) -> Float[Array, 'B D']:
        """Mean of the patches in float32, without padding."""
        patches = self.patches.astype(jnp.float32)
        if self.real is None:
            return patches.mean(axis=1)
        weights = self.real[..., None].astype(jnp.float32)
        return jnp.where(weights > 0, patches, 0).sum(axis=1) / weights.sum(axis=1)


def keep_hidden_states(
    method: Callable[..., Any], args: Any, kwargs: Any, context: nn.module.InterceptorContext
) -> Any:
    """Keep the outputs of embeddings and blocks: an interceptor for `nn.intercept_methods`.

    They are not among Flax's `intermediates`, where attention would also keep its weights, which
    kernels do not compute.
    """
    outputs = method(*args, **kwargs)
    module, name = context.module, context.method_name
    if name == _EMBED or (name == '__call__' and _BLOCK.fullmatch(module.name or '')):
        module.sow(HIDDEN_STATES, 'tokens', outputs)
    return outputs


def collect_blocks(collection: Mapping[str, Any], stack: str) -> list[tuple[str, Array]]:
    """Collect the embedding and the output of each block of a model, by name.

    Args:
      collection: Arrays that `keep_hidden_states` has kept.
      stack: Name of the module whose blocks are `block_0`, `block_1`, ..., or scanned `blocks`.
    """
    blocks = collection[stack]
    if 'blocks' in blocks:
        layers = list(blocks['blocks']['tokens'][0])
    else:
        layers = [blocks[f'block_{i}']['tokens'][0] for i in range(len(blocks))]
    named = ((f'{stack}/block_{i}', tokens) for i, tokens in enumerate(layers))
    return [('embedding', collection['tokens'][0]), *named]


def collect_stages(collection: Mapping[str, Any], depths: Sequence[int]) -> list[HiddenState]:
    """Collect the embedding of a model of stages, and the map after each stage's last block.

    Args:
      collection: Arrays that `keep_hidden_states` has kept.
      depths: Number of blocks of each `stage_0`, `stage_1`, ...
    """
    maps = {'embedding': collection['tokens'][0]}
    for i, depth in enumerate(depths):
        stage, block = f'stage_{i}', f'block_{depth - 1}'
        # The block's output is the last, after the output of a base class that it calls.
        maps[f'{stage}/{block}'] = collection[stage][block]['tokens'][-1]
    return [
        HiddenState(name, x.reshape(len(x), -1, x.shape[-1]), x.shape[1:3])
        for name, x in maps.items()
    ]


def choose_layers(count: int, layers: Sequence[int]) -> list[int]:
    """Convert numbers of layers to 0 ... count - 1; negative ones count from the last.

    Raises:
      UserError: if there is no such layer.
    """
    for layer in layers:
        if not -count <= layer < count:
            raise UserError(
                f'layer {layer} does not exist: the model has 0, the embedding, to {count - 1}, '
                f'its last block; or -1, the last, to {-count}'
            )
    return [layer % count for layer in layers]


COMPONENTS = 28  # principal components of the filters, as in figure 7 of arXiv:2010.11929
Values = np.ndarray | Array


class ParameterPictures(NamedTuple):
    """Small pictures of one parameter.

    A model lists them by `parameter_pictures(params, image_size)`, where the size is height and
    width in pixels, or None if it is unknown; `attention --parameters` draws them.

    Attributes:
      name: Path of the parameter, such as `stage_0/block_1/attention/position_bias`.
      pictures: Numbers of either sign [N h w], or colors [N h w 3] of any range.
      each: A word for one picture: 'head', 'patch', 'filter'.
      caption: A short description of the pictures.
      columns: Number of columns if the pictures form a grid themselves, else 0.
    """

    name: str
    pictures: Float[np.ndarray, 'N h w'] | Float[np.ndarray, 'N h w 3']
    each: str
    caption: str = ''
    columns: int = 0


def require_grid(image_size: tuple[int, int] | None, patch_size: int) -> tuple[int, int]:
    """Compute rows and columns of patches; UserError if the size of the images is not known."""
    if image_size is None:
        raise UserError('the size of the images is unknown: give --image-size')
    return patch_grid(*image_size, patch_size)


def position_similarity(
    name: str, table: Float[Values, 'N D'], grid: tuple[int, int]
) -> ParameterPictures:
    """Draw cosine similarities between the position embeddings of each patch and all patches.

    Figure 7 (center) of Dosovitskiy et al., 2021, arXiv:2010.11929.

    Args:
      name: Path of the parameter.
      table: Rows of the patches, without class tokens.
      grid: Rows and columns of patches.
    """
    rows = np.asarray(table, np.float32)
    rows = rows / np.maximum(np.linalg.norm(rows, axis=-1, keepdims=True), 1e-12)
    pictures = (rows @ rows.T).reshape(-1, *grid)
    return ParameterPictures(name, pictures, 'patch', 'cosine with every other patch', grid[1])


def embedding_filters(params: Mapping[str, Any]) -> list[ParameterPictures]:
    """Draw the first principal components of the filters of `patch_embed`.

    Figure 7 (left) of Dosovitskiy et al., 2021, arXiv:2010.11929.

    Args:
      params: Parameters of a model with `patch_embed/kernel` [p q C D].

    Returns:
      One parameter; none if patches are single pixels, or do not have one or three colors.
    """
    kernel = np.asarray(params['patch_embed']['kernel'], np.float32)
    height, width, channels, filters = kernel.shape
    if height * width == 1 or channels not in (1, 3):
        return []
    flat = kernel.reshape(-1, filters)
    axes = np.linalg.svd(flat - flat.mean(axis=1, keepdims=True), full_matrices=False)[0]
    pictures = axes.T[:COMPONENTS].reshape(-1, height, width, channels)
    pictures = pictures[..., 0] if channels == 1 else pictures
    caption = 'principal components of the filters, the largest first'
    return [ParameterPictures('patch_embed/kernel', pictures, 'filter', caption)]
