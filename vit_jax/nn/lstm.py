"""Long short-term memory over padded sequences.

Hochreiter and Schmidhuber, 1997; with forget gates, Gers et al., 2000. No peepholes.
"""

from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import Array

from vit_jax.array_types import Bool, Float
from vit_jax.nn.blocks import dense


class State(NamedTuple):
    """The state of a layer, carried from token to token."""

    hidden: Float[Array, 'B D']
    cell: Float[Array, 'B D']


def update(gates: Float[Array, 'B G'], state: State, recurrent: Float[Array, 'D G']) -> State:
    """The next state, given gates (input, forget, candidate, output) before their nonlinearities.

        c' = sigmoid(f) c + sigmoid(i) tanh(g)
        h' = sigmoid(o) tanh(c')

    `gates` is the contribution of the input; that of the hidden state, h R, is added here.
    """
    i, f, g, o = jnp.split(gates + state.hidden @ recurrent, 4, axis=-1)
    cell = jax.nn.sigmoid(f) * state.cell + jax.nn.sigmoid(i) * jnp.tanh(g)
    return State(jax.nn.sigmoid(o) * jnp.tanh(cell), cell)


class LSTM(nn.Module):
    """One layer. Parameters `input` (kernel [E 4D], bias [4D]) and `recurrent` [D 4D]."""

    width: int
    dtype: Any = jnp.float32

    def setup(self) -> None:
        self.input = dense(4 * self.width, dtype=self.dtype)
        shape = (self.width, 4 * self.width)
        self.recurrent = self.param('recurrent', nn.initializers.orthogonal(), shape)

    def __call__(
        self, x: Float[Array, 'B N E'], mask: Bool[Array, 'B N'], reverse: bool = False
    ) -> Float[Array, 'B N D']:
        """The hidden states in the order of the tokens, from an initial state of zeros.

        Args:
          x: inputs.
          mask: true where a token is not padding; padding does not change the state, so that the
            reverse direction has a zero state at the last token.
          reverse: run from the last token to the first.
        """
        recurrent = self.recurrent.astype(self.dtype)

        def step(state: State, inputs: tuple[Array, Array]) -> tuple[State, Array]:
            gates, real = inputs
            new = update(gates, state, recurrent)
            kept = State(
                *(jnp.where(real[:, None], *pair) for pair in zip(new, state, strict=True))
            )
            return kept, kept.hidden

        # The inputs' contribution to the gates is one product for all tokens.
        inputs = self.input(x).swapaxes(0, 1), mask.T
        _, hidden = jax.lax.scan(step, self.zero(x.shape[0]), inputs, reverse=reverse)
        return hidden.swapaxes(0, 1)

    def step(self, x: Float[Array, 'B E'], state: State) -> State:
        """The state after one more token."""
        return update(self.input(x), state, self.recurrent.astype(self.dtype))

    def zero(self, batch: int) -> State:
        """The state before anything was read."""
        zeros = jnp.zeros((batch, self.width), self.dtype)
        return State(zeros, zeros)
