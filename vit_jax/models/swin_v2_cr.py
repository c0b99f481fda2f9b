"""Swin v2 as in timm's `swinv2_cr_*`, which interpret the paper differently from `swin_v2`.

Liu et al., 2022, arXiv:2111.09883. Here keys have biases, position biases are not
bounded, coordinates are not scaled to a window, patches are merged as in Swin, and the residual
stream is normalized after some blocks, as in the paper's largest models.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import flax.linen as nn
import jax.numpy as jnp
import numpy as np
from jax import Array

from vit_jax.array_types import Float
from vit_jax.errors import UserError
from vit_jax.models import swin_v2
from vit_jax.models.swin_v2 import CosineWindowAttention, PostNormBlock
from vit_jax.models.swin_v2 import variant as variant
from vit_jax.nn.merging import PatchMerging
from vit_jax.nn.norms import LayerNorm, unit
from vit_jax.nn.windows import INIT, Windows, gather_biases

HIDDEN = 384  # width of the MLP of the biases


class LogWindowAttention(CosineWindowAttention):
    """Attention by scaled cosines, whose biases are an MLP of logarithms of distances in tokens.

    B is an MLP, `position_bias`, of sign(d) log(1 + |d|) for the rows and columns from a key to its
    query. It has the projections of `WindowAttention`.
    """

    def _projection(self, features: int, heads: tuple[int, int]) -> Callable[[Array], Array]:
        """Make unit queries and keys by one dense layer; see `CosineWindowAttention`."""
        project = self._dense((features,), (3, *heads), use_bias=self.qkv_bias, name='qkv')
        scale = self._scale(heads)

        def parts(x: Array) -> Array:
            qkv = project(x).reshape(*x.shape[:-1], 3, *heads).astype(jnp.float32)
            query, key, value = (qkv[..., i, :, :] for i in range(3))
            projected = (unit(query) * scale[:, None], unit(key), value)
            return jnp.stack(projected, axis=-3).reshape(*x.shape[:-1], -1).astype(self.dtype)

        return parts

    def _relative_bias(self, windows: Windows) -> Float[Array, 'H N N']:
        steps = np.arange(1 - windows.side, windows.side, dtype=np.float32)
        spaced = np.sign(steps) * np.log1p(np.abs(steps))
        coordinates = np.stack(np.meshgrid(spaced, spaced, indexing='ij'), axis=-1)
        return gather_biases(_Biases(self.num_heads, name='position_bias')(coordinates))


class _Biases(nn.Module):
    """MLP of the biases, from coordinates [... 2] to [... H]."""

    num_heads: int

    @nn.compact
    def __call__(self, coordinates: Float[np.ndarray, '*B C']) -> Float[Array, '*B H']:
        x = nn.relu(nn.Dense(HIDDEN, kernel_init=INIT, name='fc1')(coordinates))
        return nn.Dense(self.num_heads, kernel_init=INIT, name='fc2')(x)


class NormedBlock(PostNormBlock):
    """A `PostNormBlock` with `LogWindowAttention`.

    Attributes:
      extra_norm: Whether the residual stream after it is normalized, by `norm3`.
    """

    extra_norm: bool = False

    @nn.compact
    def __call__(
        self, x: Float[Array, 'B H W D'], train: bool = False, drop_path: float = 0.0
    ) -> Float[Array, 'B H W D']:
        x = super().__call__(x, train, drop_path)
        return LayerNorm(self.norm_eps, self.dtype, name='norm3')(x) if self.extra_norm else x

    def _attention(self, kind: Callable[..., nn.Module], **options: Any) -> nn.Module:
        del kind
        return super()._attention(LogWindowAttention, **options)


class Model(swin_v2.Model):
    """timm's Swin v2 CR, with one more field than `swin_v2`.

    Attributes:
      pretrained_windows: A field without effect.
      extra_norms: Pairs of a stage and a block after which the residual stream is normalized.

    Raises:
      UserError: for an invalid field.
    """

    extra_norms: tuple[tuple[int, int], ...] = ()

    merging: ClassVar[Callable[..., nn.Module]] = PatchMerging

    def __post_init__(self) -> None:
        super().__post_init__()
        for stage, block in self.extra_norms:
            if not (0 <= stage < len(self.depths) and 0 <= block < self.depths[stage]):
                raise UserError(f'extra_norms: there is no block {block} of a stage {stage}')

    def _block(self, i: int, dtype: Any) -> Callable[..., nn.Module]:
        fields, (side, shifts, fixed) = self._block_fields(i, dtype), self._side(i)

        def block(shifted: bool, name: str) -> nn.Module:
            number = int(name.rpartition('_')[2])
            return NormedBlock(
                **fields,
                window=side,
                shifted=shifted and shifts,
                fixed=fixed,
                extra_norm=(i, number) in self.extra_norms,
                name=name,
            )

        return block
