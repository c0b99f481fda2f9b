"""Swin Transformer: a hierarchy of feature maps, with attention inside shifted windows.

Liu et al., 2021, arXiv:2103.14030.
"""

import dataclasses
import functools
import re
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from vit_jax.array_types import Float
from vit_jax.errors import UserError, check_choice
from vit_jax.models import base
from vit_jax.models.base import Params, Resized, Size, bind_norm, check_counts, check_fields
from vit_jax.nn.maps import AttentionMap, HiddenState, ParameterPictures, collect_stages
from vit_jax.nn.merging import PatchMerging
from vit_jax.nn.norms import LayerNorm
from vit_jax.nn.options import DropPathFields
from vit_jax.nn.patches import PatchEmbed
from vit_jax.nn.stochastic import Dropout
from vit_jax.nn.windows import (
    INIT,
    Stage,
    WindowBlock,
    WindowMap,
    Windows,
    is_shifted,
    pad_to_multiple,
)
from vit_jax.ops.resize import bicubic_half_pixel

# name: width of the first stage, blocks and heads of each stage (section 3.3)
VARIANTS = {
    'mu': (16, (2, 2), (2, 4)),
    'T': (96, (2, 2, 6, 2), (3, 6, 12, 24)),
    'S': (96, (2, 2, 18, 2), (3, 6, 12, 24)),
    'B': (128, (2, 2, 18, 2), (4, 8, 16, 32)),
    'L': (192, (2, 2, 18, 2), (6, 12, 24, 48)),
}
WINDOW = 7


def variant(name: str) -> dict[str, Any]:
    """Look up keywords of `Model` for a shape of VARIANTS, and a window other than 7: 'B/w12'.

    Raises:
      UserError: if there is no such shape, or the window is not a positive number.
    """
    shape, slash, window = name.partition('/')
    check_choice('Swin variant', shape, VARIANTS)
    if slash and not re.fullmatch('w[1-9][0-9]*', window):
        raise UserError(f'Swin variant {name!r}: write the window as in {shape}/w12')
    width, depths, num_heads = VARIANTS[shape]
    return {
        'width': width,
        'depths': depths,
        'num_heads': num_heads,
        'window': int(window[1:]) if slash else WINDOW,
    }


@dataclasses.dataclass(frozen=True)
class SwinBlockFields(DropPathFields):
    """Blocks of windows.

    Attributes:
      attention_dropout: Dropout rate of the attention weights.
      residual_dtype: Dtype of the first stage's residual stream; None for the computation dtype, to
        which merging casts it, as in the authors' mixed precision.
    """

    norm_eps: float = 1e-5
    gelu: str = 'erf'
    attention_dropout: float = 0.0
    residual_dtype: str | None = None


class Model(base.Model):
    """Swin. Images of any size, square or not: maps are padded to windows, see `nn/windows.py`.

    Attributes:
      num_classes: Outputs of the head; None or 0 leaves the head out.
      patch_size: Side of a patch in pixels.
      width: C, token width of the first stage, which each later stage doubles.
      depths: Blocks of each stage; every second one shifts its windows.
      num_heads: Attention heads of each stage.
      window: M, side of a window in tokens.
      mlp_ratio: Hidden width of the blocks' MLPs divided by the token width.
      qkv_bias: Whether queries, keys and values have biases; in Swin v2 keys never do.
      dropout: Dropout rate after the embedding, the attention and each dense layer of an MLP.
      block: Options of the blocks, see `SwinBlockFields`.
      pad_value: Value of each channel in the padding of images that whole patches do not tile.
      remat: Recomputation in the backward pass; see the model `vit`.
      dtype: Computation dtype. Parameters, layer norm statistics and softmax stay float32.
      attention: Implementation: 'xla'; 'pallas', a TPU kernel without dropout of weights; or
        'auto', the kernel if the devices support it. See docs/attention.md.

    Raises:
      UserError: for an invalid field.
    """

    num_classes: int | None = None
    patch_size: int = 4
    width: int = 96
    depths: tuple[int, ...] = (2, 2, 6, 2)
    num_heads: tuple[int, ...] = (3, 6, 12, 24)
    window: int = WINDOW
    mlp_ratio: float = 4.0
    qkv_bias: bool = True
    dropout: float = 0.0
    block: SwinBlockFields = SwinBlockFields()
    pad_value: tuple[float, ...] = (0.0,)
    remat: bool | str = False
    dtype: str = 'float32'
    attention: str = 'auto'

    merging: ClassVar[Callable[..., nn.Module]] = PatchMerging
    effects: ClassVar[Mapping[str, str]] = {'pad_value': 'outputs'}

    def __post_init__(self) -> None:
        check_fields(self, 'dtype', 'attention', 'remat', 'dropout', 'block.gelu')
        check_fields(self, 'block.residual_dtype', 'block.attention_dropout', 'block.drop_path')
        check_counts(self, 'window')
        _check_stages(self.width, self.depths, self.num_heads)
        super().__post_init__()

    @property
    def stride(self) -> int:
        """Side in pixels of the square of one token of the last stage."""
        return self.patch_size * 2 ** (len(self.depths) - 1)

    @nn.compact
    def __call__(
        self, images: Float[Array, 'B H W C'], train: bool = False
    ) -> dict[str, Float[Array, 'B *rest']]:
        """Classify normalized images.

        Returns:
          features: [B h w D], the last stage's map after the final norm.
          pre_logits: [B D], their mean.
          logits: [B num_classes] in float32; absent without a head.
        """
        dtype = jnp.dtype(self.dtype)
        x = self._embed(images, train, dtype)
        for i in range(len(self.depths)):
            x = self._stage(i, dtype)(x, train)
        features = LayerNorm(self.block.norm_eps, dtype=dtype, name='norm')(x)
        outputs = {'features': features, 'pre_logits': features.mean(axis=(1, 2))}
        if self.num_classes:
            head = nn.Dense(self.num_classes, dtype=jnp.float32, kernel_init=INIT, name='head')
            outputs['logits'] = head(outputs['pre_logits'])
        return outputs

    def attention_maps(
        self, intermediates: Mapping[str, Any], images: Float[Array, 'B H W C']
    ) -> list[AttentionMap]:
        """Collect the blocks' attention maps within windows; a stage's maps have its grid."""
        height, width = (-(-side // self.patch_size) for side in images.shape[1:3])
        maps = []
        for i, depth in enumerate(self.depths):
            for j in range(depth):
                weights = intermediates[f'stage_{i}'][f'block_{j}']['attention']['attention'][0]
                windows = self._windows(i, j, height, width)
                name, grid = f'stage_{i}/block_{j}', (height, width)
                maps.append(AttentionMap(name, WindowMap(weights, windows), grid, grid))
            height, width = -(-height // 2), -(-width // 2)
        return maps

    def collect_hidden_states(
        self, collection: Mapping[str, Any], images: Float[Array, 'B H W C'], *others: Any
    ) -> list[HiddenState]:
        """Collect the embedding and the map of each stage before its merging, as in timm."""
        del images, others
        return collect_stages(collection, self.depths)

    def final_norm_of(self, params: Mapping[str, Any]) -> Callable[[Array], Array] | None:
        """Bind the norm after the last stage."""
        return bind_norm('layer', self.block.norm_eps, self.dtype, params['norm'])

    def parameter_pictures(
        self, params: Mapping[str, Any], image_size: Size | None
    ) -> list[ParameterPictures]:
        """Draw the bias of each head by the key's position around the query in the middle."""
        del image_size  # windows do not depend on it
        pictures = []
        for i, depth in enumerate(self.depths):
            for j in range(depth):
                table = np.asarray(params[f'stage_{i}'][f'block_{j}']['attention']['position_bias'])
                # The rows of the table go from a key below its query to one above it.
                heads = table.transpose(2, 0, 1)[:, ::-1, ::-1]
                name = f'stage_{i}/block_{j}/attention/position_bias'
                pictures.append(ParameterPictures(name, heads, 'head', 'keys around a query'))
        return pictures

    def resize_params(
        self, params: Params, old_size: Size | None, new_size: Size, method: str = 'bilinear'
    ) -> Resized:
        """Resize the parameters for windows of a different size; image sizes have no effect.

        The tables are resized bicubically by any `method`, as in the paper's models.
        """
        del old_size, new_size, method
        sides, old = (2 * self.window - 1,) * 2, set()

        def resize_leaf(path: Any, leaf: Any) -> Any:
            if path[-1].key != 'position_bias' or leaf.shape[:2] == sides:
                return leaf
            old.add((len(leaf) + 1) // 2)
            return bicubic_half_pixel(leaf, sides)

        params = jax.tree_util.tree_map_with_path(resize_leaf, params)
        windows = ', '.join(map(str, sorted(old)))
        note = f'position_bias: windows of {windows} resized to {self.window} (bicubic)'
        return params, [note] if old else []

    def layer_order(self) -> tuple[str, ...]:
        """List patterns of the layers' parameters in order: the embedding, then each block.

        The patch merging of a stage belongs to its last block.
        """
        order = ['^(patch_embed|embed_norm)/']
        for i, depth in enumerate(self.depths):
            order += [f'^stage_{i}/block_{j}/' for j in range(depth - 1)]
            order.append(f'^stage_{i}/(block_{depth - 1}|merge)/')
        return tuple(order)

    def _embed(self, images: Array, train: bool, dtype: Any) -> Array:
        """Embed each patch as a token, [B h w C]; images are padded to whole patches."""
        patch = self.patch_size
        x = pad_to_multiple(images, patch)
        if any(self.pad_value) and x.shape != images.shape:
            value = jnp.asarray(self.pad_value, images.dtype)
            x = pad_to_multiple(images - value, patch) + value
        batch, height, width, _ = x.shape
        x = PatchEmbed(patch, self.width, dtype, name='patch_embed')(x)
        x = x.reshape(batch, height // patch, width // patch, -1)
        residual = jnp.dtype(self.block.residual_dtype or dtype)
        x = LayerNorm(self.block.norm_eps, dtype=residual, name='embed_norm')(x)
        return Dropout(self.dropout)(x, train)

    def _windows(self, i: int, j: int, height: int, width: int) -> Windows:
        """Lay out the windows of a stage's block on its map."""
        del i
        return Windows.over(height, width, self.window, is_shifted(j))

    def _block(self, i: int, dtype: Any) -> Callable[..., nn.Module]:
        """Make a factory of a stage's blocks, see `Stage`."""
        return functools.partial(WindowBlock, window=self.window, **self._block_fields(i, dtype))

    def _block_fields(self, i: int, dtype: Any) -> dict[str, Any]:
        return {
            'num_heads': self.num_heads[i],
            'mlp_ratio': self.mlp_ratio,
            'qkv_bias': self.qkv_bias,
            'dropout': self.dropout,
            'attention_dropout': self.block.attention_dropout,
            'gelu': self.block.gelu,
            'norm_eps': self.block.norm_eps,
            'dtype': dtype,
            'attention_by': self.attention,
        }

    def _stage(self, i: int, dtype: Any) -> Stage:
        before, depth = sum(self.depths[:i]), self.depths[i]
        rates = np.linspace(0.0, self.block.drop_path, sum(self.depths))[before : before + depth]
        return Stage(
            self._block(i, dtype),
            tuple(rates.tolist()),
            self.merging if i + 1 < len(self.depths) else None,
            remat=self.remat,
            norm_eps=self.block.norm_eps,
            dtype=dtype,
            name=f'stage_{i}',
        )


def _check_stages(width: int, depths: tuple[int, ...], num_heads: tuple[int, ...]) -> None:
    if not depths or len(depths) != len(num_heads) or min(*depths, *num_heads) < 1:
        raise UserError(
            f'depths {tuple(depths)} and num_heads {tuple(num_heads)}: '
            'every stage needs at least one block, and its number of heads'
        )
    for i, heads in enumerate(num_heads):
        if width * 2**i % heads:
            raise UserError(
                f'width {width * 2**i} of stage {i} is not a multiple of its {heads} heads'
            )
