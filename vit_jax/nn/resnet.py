"""Common parts of residual networks: stages of blocks, their order, and a check of their depths."""

from collections.abc import Callable, Sequence

import flax.linen as nn
from jax import Array

from vit_jax.array_types import Float
from vit_jax.errors import UserError


class Stage(nn.Module):
    """`depth` residual blocks, `block_0`, `block_1`, ...

    Attributes:
      block: makes a block, given its stride and its name; and its dilation with `dilate`.
      depth: number of blocks.
      stride: of the first block; the others have stride 1.
      dilate: dilate the convolutions of the others by the stride instead of striding.
    """

    block: Callable[..., nn.Module]
    depth: int
    stride: int
    dilate: bool = False

    @nn.compact
    def __call__(self, x: Float[Array, 'B H W C']) -> Float[Array, 'B h w D']:
        first = {'stride': 1, 'dilation': 1} if self.dilate else {'stride': self.stride}
        others = {'stride': 1, 'dilation': self.stride} if self.dilate else {'stride': 1}
        for j in range(self.depth):
            x = self.block(**others if j else first, name=f'block_{j}')(x)
        return x


def block_order(parent: str, layers: Sequence[int]) -> tuple[str, ...]:
    """A pattern of each block's parameters below `parent`, which ends in '/' or is empty."""
    return tuple(
        f'^{parent}stage_{i}/block_{j}/' for i, depth in enumerate(layers) for j in range(depth)
    )


def check_layers(layers: Sequence[int]) -> None:
    """Raise UserError unless every stage has a block."""
    if any(depth < 1 for depth in layers):
        raise UserError(f'layers {tuple(layers)}: every stage needs at least one block')
