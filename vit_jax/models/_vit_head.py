"""The way of a ViT from its last tokens to class scores.

The functions add their layers to the model that they are given.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax.numpy as jnp
from jax import Array

from vit_jax.array_types import Float, Int
from vit_jax.models import _vit_parts
from vit_jax.nn.norms import BatchNorm
from vit_jax.nn.pooling import MapHead, segment_mean

POOLS = ('cls', 'gap', 'patches', 'cls_patches', 'map', 'none', 'distilled')
WITH_CLASS_TOKEN = ('cls', 'patches', 'cls_patches', 'distilled')
MEANS = ('gap', 'patches')
HEAD_NORMS = ('none', 'batch')


def outputs(
    model: Any, tokens: Float[Array, 'B N D'], segments: Int[Array, 'B N'] | None, train: bool
) -> dict[str, Float[Array, 'B *rest']]:
    """The outputs of a ViT from its last tokens; see `vit.Model.__call__` and `pool`."""
    x = pool(model, tokens, segments, train)
    if model.representation_size:
        dtype = jnp.dtype(model.dtype)
        x = nn.tanh(nn.Dense(model.representation_size, dtype=dtype, name='pre_logits')(x))
    found = {'tokens': tokens, 'pre_logits': x}
    return found | scores(model, x, tokens, train) if model.num_classes else found


def pool(
    model: Any, tokens: Float[Array, 'B N D'], segments: Int[Array, 'B N'] | None, train: bool
) -> Float[Array, 'B *rest']:
    """y = LN(z_L^0), equation 4 of arXiv:2010.11929, or another summary.

    The encoder has applied the norm, except with `fc_norm`. Segments are 1 for tokens of the image
    and 0 for padding; None without padding.
    """
    if model.pool == 'cls':
        return tokens[:, 0]
    if model.pool == 'distilled':
        return tokens[:, :2].mean(axis=1)
    if model.pool == 'none':
        return tokens
    cls = tokens[:, 0]
    if first := model.prefix_tokens:
        tokens, segments = tokens[:, first:], None if segments is None else segments[:, first:]
    if model.pool in (*MEANS, 'cls_patches'):
        mean = tokens.mean(axis=1) if segments is None else segment_mean(tokens, segments)[:, 0]
        if model.pool == 'cls_patches':
            return jnp.concatenate([cls, mean], axis=-1)
        norm = _vit_parts.norm(model)(model.norm_eps, dtype=jnp.dtype(model.dtype), name='fc_norm')
        return norm(mean) if model.fc_norm else mean
    head = MapHead(
        *(model.num_heads, model.mlp_dim, model.gelu, model.norm_eps),
        dtype=jnp.dtype(model.dtype),
        name='map_head',
    )
    return head(tokens, train) if segments is None else head(tokens, train, segments)[:, 0]


def scores(
    model: Any, x: Float[Array, '*_ F'], tokens: Float[Array, 'B N D'], train: bool
) -> dict[str, Float[Array, '*_ C']]:
    """Scores of `model.num_classes` classes in float32.

    Args:
      model: a ViT.
      x: the representation.
      tokens: after the encoder.
      train: whether a batch norm takes the statistics of this batch.
    """
    dense = functools.partial(
        nn.Dense,
        model.num_classes,
        use_bias='head' not in _vit_parts.without_bias(model.no_bias),
        dtype=jnp.float32,
        kernel_init=nn.initializers.zeros,
        bias_init=nn.initializers.constant(model.head_bias),
    )
    if model.pool == 'distilled':
        both = DistilledHead(dense, name='head')(tokens[:, :2])
        mean = (both[0] + both[1]) / 2
        return {'logits': mean, 'class_logits': both[0], 'distillation_logits': both[1]}
    if model.head_norm == 'batch':
        x = _batch_norm(train)(x)
    return {'logits': dense(name='head')(x)}


class DistilledHead(nn.Module):
    """A head for the class token, and one for the distillation token: DeiT, arXiv:2012.12877.

    Parameters `kernel` and `bias` of the first, `distillation/kernel` and `distillation/bias`.
    """

    dense: Callable[[], nn.Dense]

    def setup(self) -> None:
        self.first, self.distillation = self.dense(), self.dense()
        nn.share_scope(self, self.first)

    def __call__(
        self, tokens: Float[Array, 'B 2 D']
    ) -> tuple[Float[Array, 'B C'], Float[Array, 'B C']]:
        return self.first(tokens[:, 0]), self.distillation(tokens[:, 1])


def _batch_norm(train: bool) -> BatchNorm:
    return BatchNorm(
        use_running_average=not train,
        momentum=0.9,
        epsilon=1e-6,
        dtype=jnp.float32,
        use_bias=False,
        use_scale=False,
        name='head_norm',
    )
