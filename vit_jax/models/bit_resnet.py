"""Big Transfer (BiT): a pre-activation ResNet with group norm and standardized kernels.

Kolesnikov et al., 2020, arXiv:1912.11370, on the blocks of He et al., 2016, arXiv:1603.05027.
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import flax.linen as nn
import jax.numpy as jnp
from jax import Array

from vit_jax.array_types import Float
from vit_jax.errors import check_choice
from vit_jax.models import base
from vit_jax.models.base import bind, check_counts, check_fields
from vit_jax.nn.dense import class_head
from vit_jax.nn.maps import HiddenState, collect_stages
from vit_jax.nn.norms import GroupNorm
from vit_jax.nn.resnet import Stage, StdConv, block_order, check_layers

# name: blocks of each stage (He et al., 2015, arXiv:1512.03385, table 1), width factor
VARIANTS = {
    'R50x1': ((3, 4, 6, 3), 1),
    'R50x3': ((3, 4, 6, 3), 3),
    'R101x1': ((3, 4, 23, 3), 1),
    'R101x3': ((3, 4, 23, 3), 3),
    'R152x2': ((3, 8, 36, 3), 2),
    'R152x4': ((3, 8, 36, 3), 4),
}

PADDINGS = {'zeros': 0.0, 'nothing': -jnp.inf}
Conv = functools.partial(StdConv, padding='symmetric', var_eps=1e-10)
Norm = functools.partial(GroupNorm, num_groups=32, epsilon=1e-5)


def variant(name: str) -> dict[str, Any]:
    """Keywords of `Model` for a name of VARIANTS, such as 'R50x1'.

    Raises:
      UserError: if there is no such variant.
    """
    check_choice('BiT variant', name, VARIANTS)
    layers, width_factor = VARIANTS[name]
    return {'layers': layers, 'width_factor': width_factor}


class Model(base.Model):
    """BiT-ResNet. Images of any size, square or not.

    Attributes:
      num_classes: Outputs of the head; None or 0 leaves the head out.
      layers: Blocks of each stage.
      head_bias: Initial value of the head's biases.
      width_factor: Times 64 channels in the root, 256, 512, ... after the stages.
      dtype: Computation dtype. Parameters, their standardization and the statistics of group norm
        stay float32.
      pool_padding: Padding of the first pooling: 'zeros', as in the authors' code, or 'nothing',
        which is -inf, as in big_vision.

    Raises:
      UserError: if a field has no such value.
    """

    num_classes: int | None = None
    layers: tuple[int, ...] = (3, 4, 6, 3)
    width_factor: int = 1
    head_bias: float = 0.0
    dtype: str = 'float32'
    pool_padding: str = 'zeros'

    effects: ClassVar = {'head_bias': 'outputs', 'pool_padding': 'noted'}

    def __post_init__(self) -> None:
        check_fields(self, 'dtype')
        check_counts(self, 'width_factor')
        check_choice('pool_padding', self.pool_padding, PADDINGS)
        check_layers(self.layers)
        super().__post_init__()

    @nn.compact
    def __call__(
        self, images: Float[Array, 'B H W C'], train: bool = False
    ) -> dict[str, Float[Array, 'B *rest']]:
        """Class scores of normalized images.

        Returns:
          features: [B h w D] after the final norm and ReLU; with four stages a cell of it covers
            32 x 32 pixels of the image.
          pre_logits: [B D], their mean.
          logits: [B num_classes] in float32; absent without a head.
        """
        dtype = jnp.dtype(self.dtype)
        width = 64 * self.width_factor
        x = self._embed(images, dtype)
        for i, depth in enumerate(self.layers):
            block = functools.partial(PreActivationBottleneck, width=width * 2**i, dtype=dtype)
            x = Stage(block, depth, stride=1 if i == 0 else 2, name=f'stage_{i}')(x)
        features = nn.relu(Norm(dtype=dtype, name='norm')(x))
        outputs = {'features': features, 'pre_logits': features.mean(axis=(1, 2))}
        if self.num_classes:
            head = class_head(self.num_classes, self.head_bias, name='head')
            outputs['logits'] = head(outputs['pre_logits'])
        return outputs

    def _embed(self, images: Array, dtype: Any) -> Array:
        """Return the map of the root, [B h w D]."""
        return Root(64 * self.width_factor, dtype, self.pool_padding, name='root')(images)

    def collect_hidden_states(
        self, collection: Mapping[str, Any], images: Float[Array, 'B H W C'], *others: Any
    ) -> list[HiddenState]:
        """Return the maps of the root and of each stage, as in transformers."""
        del images, others
        return collect_stages(collection, self.layers)

    def final_norm_of(self, params: Mapping[str, Any]) -> Callable[[Array], Array] | None:
        """Return the norm after the last stage, and its ReLU."""
        norm = bind(Norm(dtype=jnp.dtype(self.dtype), parent=None), params['norm'])
        return lambda tokens: nn.relu(norm(tokens))

    def layer_order(self) -> tuple[str, ...]:
        """Patterns of the layers' parameters from the image on: the root, then each block."""
        return '^root/', *block_order('', self.layers)


class Root(nn.Module):
    """First convolution and max pooling, both with stride 2; the norm is the first block's.

    Padding with zeros matters here, since values may be negative before the pooling.
    """

    width: int
    dtype: Any = jnp.float32
    pool_padding: str = 'zeros'

    @nn.compact
    def __call__(self, images: Float[Array, 'B H W C']) -> Float[Array, 'B h w D']:
        x = Conv(self.width, 7, stride=2, dtype=self.dtype, name='conv')(images)
        border = PADDINGS[self.pool_padding]
        x = jnp.pad(x, ((0, 0), (1, 1), (1, 1), (0, 0)), constant_values=border)
        return nn.max_pool(x, window_shape=(3, 3), strides=(2, 2))


class PreActivationBottleneck(nn.Module):
    """A pre-activation bottleneck to 4 x `width` channels; the 3 x 3 convolution has the stride.

    z' = ReLU(GN(z)),  z'' = proj(z') where the shape changes, else z
    z  = z'' + conv3(ReLU(GN(conv2(ReLU(GN(conv1(z')))))))
    """

    width: int
    stride: int = 1
    dtype: Any = jnp.float32

    @nn.compact
    def __call__(self, x: Float[Array, 'B H W C']) -> Float[Array, 'B h w D']:
        conv = functools.partial(Conv, dtype=self.dtype)
        norm = functools.partial(Norm, dtype=self.dtype)
        y = nn.relu(norm(name='norm1')(x))
        if self.stride != 1 or x.shape[-1] != 4 * self.width:
            x = conv(4 * self.width, stride=self.stride, name='proj')(y)
        y = conv(self.width, name='conv1')(y)
        y = conv(self.width, 3, self.stride, name='conv2')(nn.relu(norm(name='norm2')(y)))
        return x + conv(4 * self.width, name='conv3')(nn.relu(norm(name='norm3')(y)))
