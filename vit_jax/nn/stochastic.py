"""Dropout and stochastic depth with masks that depend on the example, not on its device.

Every example draws from its own key, `fold_in(key, position in the global batch)`. One device,
eight devices and gradient accumulation therefore drop the same units of the same example.
"""

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from vit_jax.array_types import Bool, Float, Int, Key
from vit_jax.errors import UserError

_positions: ContextVar[Array | None] = ContextVar('example_positions', default=None)
# Which positions were entered, as a part of the keys of JAX's caches: a jitted function is traced
# again for other positions.
_entered = jax.make_user_context()


@contextlib.contextmanager
def example_positions(positions: Int[Array, 'B *n']) -> Iterator[None]:
    """Declare the positions in the global batch of the examples that the model is called on.

    `positions` is [B], or [B n] if a row holds several examples, of which the first then counts.
    It is needed if a program has only a slice of the batch: under `jax.pmap`, `jax.shard_map` and
    gradient accumulation. Enter it inside the jitted function: outside, positions are constants of
    whatever is jitted, which is compiled again for other ones. By default the positions are
    0, 1, ..., B - 1.
    """
    traced = isinstance(positions, jax.core.Tracer)
    key = object() if traced else (positions.shape, np.asarray(positions).tobytes())
    token = _positions.set(positions[:, 0] if positions.ndim > 1 else positions)
    try:
        with _entered(key):
            yield
    finally:
        _positions.reset(token)


def example_keys(key: Key[Array, ''], batch: int) -> Key[Array, 'B']:
    """Derive a key for each of `batch` rows, the same on any device that computes the example.

    If there are more rows than examples, as when B examples of V views are folded into B * V rows,
    row r is view r % V of example r // V, and each view has a separate key.

    Raises:
      ValueError: if the number of rows is not a multiple of the number of examples.
    """
    positions = _positions.get()
    if positions is None:
        positions = jnp.arange(batch)
    views, remainder = divmod(batch, len(positions))
    if not views or remainder:
        raise ValueError(f'example_positions has shape {positions.shape}, the batch ({batch},)')
    fold = jax.vmap(jax.random.fold_in, in_axes=(None, 0))
    keys = fold(key, positions)
    if views == 1:
        return keys
    return jax.vmap(lambda key: fold(key, jnp.arange(views)))(keys).reshape(batch)


class Dropout(nn.Module):
    """Set each unit to zero with probability `rate` and scale the others by 1 / (1 - rate).

    Srivastava et al., 2014. The random stream is named `dropout`; axis 0 is the example.

    Raises:
      UserError: if `rate` is outside [0, 1).
    """

    rate: float

    @nn.compact
    def __call__(self, x: Float[Array, 'B *rest'], train: bool = False) -> Float[Array, 'B *rest']:
        check_rate('dropout', self.rate)
        if not train or self.rate == 0.0:
            return x
        return jnp.where(self.draw(x.shape), x / (1.0 - self.rate), jnp.zeros_like(x))

    def draw(self, shape: tuple[int, ...]) -> Bool[Array, 'B ...']:
        """Draw a mask of the units to keep in an array of this shape; the caller applies it."""
        keys = example_keys(self.make_rng('dropout'), shape[0])
        return jax.vmap(lambda key: jax.random.bernoulli(key, 1.0 - self.rate, shape[1:]))(keys)


class DropPath(nn.Module):
    """Drop the whole residual branch of an example: stochastic depth.

    Huang et al., 2016, arXiv:1603.09382. The branch is kept with probability 1 - rate and then
    scaled by 1 / (1 - rate), so that its expectation is the branch itself. The rate is an argument
    of the call because a scan over layers passes every layer its own.
    """

    @nn.compact
    def __call__(
        self, x: Float[Array, 'B *rest'], rate: float | Float[Array, ''], train: bool = False
    ) -> Float[Array, 'B *rest']:
        if not train or (isinstance(rate, float) and rate == 0.0):
            return x
        keep = 1.0 - rate
        keys = example_keys(self.make_rng('dropout'), x.shape[0])
        mask = jax.vmap(lambda key: jax.random.bernoulli(key, keep))(keys)
        scale = (mask / keep).astype(x.dtype)
        return x * scale.reshape(-1, *[1] * (x.ndim - 1))


def add_branch(
    x: Float[Array, 'B *rest'],
    branch: Float[Array, 'B *rest'],
    dropout: float,
    drop_path: float | Float[Array, ''],
    train: bool,
) -> Float[Array, 'B *rest']:
    """Add the branch of a residual block, after dropout and stochastic depth; in its `__call__`."""
    return x + DropPath()(Dropout(dropout)(branch, train), drop_path, train)


def check_rate(label: str, rate: float) -> None:
    """Raise UserError unless 0 <= rate < 1."""
    if not 0.0 <= rate < 1.0:
        raise UserError(f'{label} must be at least 0 and below 1, not {rate}')
