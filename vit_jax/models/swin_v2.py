"""Swin v2: cosine attention, continuous position biases, and norms at the end of branches.

Liu et al., 2022, arXiv:2111.09883.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import flax.linen as nn
import jax.numpy as jnp
import numpy as np
from jax import Array

from vit_jax.array_types import Float
from vit_jax.errors import UserError
from vit_jax.models import swin
from vit_jax.models.base import Params, Resized, Size
from vit_jax.models.swin import VARIANTS as VARIANTS
from vit_jax.nn.maps import ParameterPictures
from vit_jax.nn.merging import Reduction
from vit_jax.nn.norms import LayerNorm, unit
from vit_jax.nn.stochastic import Dropout, DropPath
from vit_jax.nn.windows import (
    INIT,
    WindowAttention,
    WindowBlock,
    Windows,
    gather_biases,
    is_shifted,
    pad_to_multiple,
)

MAX_SCALE = 100.0  # 1 / the smallest temperature
FIRST_SCALE = 10.0
HIDDEN = 512  # width of the MLP of the biases
EXTENT = 8  # coordinates reach from -8 to 8 before their logarithm
LARGEST_BIAS = 16.0


class CosineWindowAttention(WindowAttention):
    """Attention whose scores are scaled cosines, equation 2: cos(Q, K) / tau + B.

    1 / tau = exp(`logit_scale`) [H] is at most 100. B is 16 sigmoid of an MLP, `position_bias`, of
    the log-spaced coordinates of a key relative to its query (section 3.3), so that the parameters
    fit windows of any size. Queries and values have biases [H K] with `qkv_bias`, keys have none.

    Attributes:
      pretrained: Side of the windows whose coordinates reach from -8 to 8; 0 for the actual side.
      fixed: Whether the windows also have the side M, and are shifted, where the map is smaller.
    """

    pretrained: int = 0
    fixed: bool = False

    def _windows(self, height: int, width: int) -> Windows:
        return windows_on(height, width, self.window, self.shifted, self.fixed)

    def _projection(self, features: int, heads: tuple[int, int]) -> Callable[[Array], Array]:
        """Make unit queries, times the factor of the scores, and unit keys.

        Attention divides products by sqrt(K), so that the factor contains it.
        """
        project = self._dense((features,), (3, *heads), use_bias=False, name='qkv')
        zeros = nn.initializers.zeros
        biases: list[Any] = [0.0, 0.0]
        if self.qkv_bias:
            biases = [self.param(f'{part}_bias', zeros, heads) for part in ('query', 'value')]
        scale = self._scale(heads)

        def parts(x: Array) -> Array:
            qkv = project(x).reshape(*x.shape[:-1], 3, *heads).astype(jnp.float32)
            query = unit(qkv[..., 0, :, :] + biases[0]) * scale[:, None]
            projected = (query, unit(qkv[..., 1, :, :]), qkv[..., 2, :, :] + biases[1])
            return jnp.stack(projected, axis=-3).reshape(*x.shape[:-1], -1).astype(self.dtype)

        return parts

    def _scale(self, heads: tuple[int, int]) -> Float[Array, ' H']:
        """Compute the factor of each head's queries: 1 / tau, times sqrt(K)."""
        first = nn.initializers.constant(math.log(FIRST_SCALE))
        logit_scale = self.param('logit_scale', first, heads[:1])
        return jnp.exp(jnp.minimum(logit_scale, math.log(MAX_SCALE))) * math.sqrt(heads[1])

    def _relative_bias(self, windows: Windows) -> Float[Array, 'H N N']:
        coordinates = log_coordinates(windows.side, self.pretrained or windows.side)
        table = _Biases(self.num_heads, name='position_bias')(jnp.asarray(coordinates))
        return gather_biases(table)


class _Biases(nn.Module):
    """MLP of the biases, from coordinates [... 2] to 16 sigmoid(...) [... H]."""

    num_heads: int

    @nn.compact
    def __call__(self, coordinates: Float[Array, '*B C']) -> Float[Array, '*B H']:
        x = nn.relu(nn.Dense(HIDDEN, kernel_init=INIT, name='fc1')(coordinates))
        x = nn.Dense(self.num_heads, use_bias=False, kernel_init=INIT, name='fc2')(x)
        return LARGEST_BIAS * nn.sigmoid(x)


class PostNormBlock(WindowBlock):
    """A block with norms at the end of its branches, section 3.2.

        z' = LN(W-MSA(z)) + z, or SW-MSA if windows are shifted
        z  = LN(MLP(z')) + z'

    The norms start at zero, and so do the branches. See `WindowBlock` for the fields, and
    `CosineWindowAttention` for `pretrained` and `fixed`.
    """

    pretrained: int = 0
    fixed: bool = False

    @nn.compact
    def __call__(
        self, x: Float[Array, 'B H W D'], train: bool = False, drop_path: float = 0.0
    ) -> Float[Array, 'B H W D']:
        def add(branch: Array, norm: str) -> Array:
            zeros = nn.initializers.zeros
            y = Dropout(self.dropout)(branch, train)
            y = LayerNorm(self.norm_eps, self.dtype, scale_init=zeros, name=norm)(y)
            return x + DropPath()(y, drop_path, train)

        options = {'pretrained': self.pretrained, 'fixed': self.fixed}
        x = add(self._attention(CosineWindowAttention, **options)(x, train), 'norm1')
        return add(self._mlp(x.shape[-1])(x, train), 'norm2')


class PostNormMerging(nn.Module):
    """Merging of patches like `PatchMerging`, but with the norm after the linear layer."""

    norm_eps: float = 1e-5
    dtype: Any = jnp.float32

    @nn.compact
    def __call__(self, x: Float[Array, 'B H W D']) -> Float[Array, 'B h w _']:
        x = Reduction(self.dtype, name='reduction')(pad_to_multiple(x, 2))
        return LayerNorm(self.norm_eps, dtype=self.dtype, name='norm')(x)


def windows_on(height: int, width: int, window: int, shifted: bool, fixed: bool) -> Windows:
    """Lay out the windows on a map; see `CosineWindowAttention.fixed`."""
    if fixed:
        return Windows(height, width, window, window // 2 if shifted else 0)
    return Windows.over(height, width, window, shifted)


def log_coordinates(side: int, pretrained: int) -> Float[np.ndarray, 'R R 2']:
    """Compute log-spaced coordinates of the relative positions in a window, equation 4.

    Args:
      side: M, side of the window in tokens; R = 2M-1.
      pretrained: Side of the windows whose coordinates reach from -8 to 8 before the logarithm.
    """
    steps = np.arange(1 - side, side, dtype=np.float32) / np.float32(max(pretrained - 1, 1))
    scaled = EXTENT * steps
    log_spaced = np.sign(scaled) * np.log2(np.abs(scaled) + 1) / np.log2(np.float32(EXTENT))
    return np.stack(np.meshgrid(log_spaced, log_spaced, indexing='ij'), axis=-1).astype(np.float32)


WINDOW = 8


def variant(name: str) -> dict[str, Any]:
    """Look up keywords of `Model` for a shape of `swin.VARIANTS`, and a window other than 8.

    Names are, for example, 'T' and 'B/w16'.

    Raises:
      UserError: if there is no such shape, or the window is not a positive number.
    """
    return swin.variant(name if '/' in name else f'{name}/w{WINDOW}')


class Model(swin.Model):
    """Swin v2, with further fields beyond `swin`.

    Attributes:
      window: M, side of a window in tokens.
      pretrained_windows: Side of each stage's windows in an earlier training, by which relative
        positions are measured; () or 0 for the stage's actual side.
      image_size: Height in pixels of the images whose maps limit the windows, as in released
        models: a stage whose map is not larger than a window has one window of the map's size, for
        any input. None for the maps of the input.

    Raises:
      UserError: for an invalid field.
    """

    window: int = WINDOW
    pretrained_windows: tuple[int, ...] = ()
    image_size: int | None = None

    merging: ClassVar[Callable[..., nn.Module]] = PostNormMerging
    effects: ClassVar = {'pretrained_windows': 'outputs', 'image_size': 'outputs'}

    def __post_init__(self) -> None:
        sides = self.pretrained_windows
        if sides and (len(sides) != len(self.depths) or min(sides) < 0):
            raise UserError(
                f'pretrained_windows {tuple(sides)}: give one side, or 0, for each of '
                f'{len(self.depths)} stages'
            )
        super().__post_init__()
        if self.image_size is not None and self.image_size < self.stride:
            raise UserError(f'image_size={self.image_size}: must be at least {self.stride}')

    def parameter_pictures(
        self, params: Mapping[str, Any], image_size: Size | None
    ) -> list[ParameterPictures]:
        """Return no pictures: the biases are outputs of an MLP."""
        del params, image_size
        return []

    def resize_params(
        self, params: Params, old_size: Size | None, new_size: Size, method: str = 'bilinear'
    ) -> Resized:
        """Return the parameters unchanged: they fit windows and images of any size."""
        del old_size, new_size, method
        return params, []

    def _windows(self, i: int, j: int, height: int, width: int) -> Windows:
        side, shifts, fixed = self._side(i)
        return windows_on(height, width, side, is_shifted(j) and shifts, fixed)

    def _block(self, i: int, dtype: Any) -> Callable[..., nn.Module]:
        side, shifts, fixed = self._side(i)
        fields = self._block_fields(i, dtype)
        pretrained = self.pretrained_windows[i] if self.pretrained_windows else 0

        def block(shifted: bool, name: str) -> nn.Module:
            return PostNormBlock(
                **fields,
                window=side,
                shifted=shifted and shifts,
                pretrained=pretrained,
                fixed=fixed,
                name=name,
            )

        return block

    def _side(self, i: int) -> tuple[int, bool, bool]:
        """Determine the side of a stage's windows, whether every second block shifts them, and
        whether both apply to maps of any size.
        """
        if self.image_size is None:
            return self.window, True, False
        rows = self.image_size // self.patch_size // 2**i
        return min(self.window, rows), rows > self.window, True
