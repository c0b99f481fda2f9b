"""LSTM encoder and decoder with attention, a baseline for the Transformer.

Bahdanau et al., 2015, arXiv:1409.0473 (additive attention, by the decoder's previous state), and
Luong et al., 2015, arXiv:1508.04025 (dot products, by its current state). LSTMs replace the
former's gated recurrent units; the readout is the latter's equation 5, without input feeding.
"""

from collections.abc import Mapping
from typing import Any, ClassVar, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import Array

from vit_jax.array_types import Bool, Float, Int
from vit_jax.errors import check_choice
from vit_jax.models import base
from vit_jax.models.base import check_counts, check_fields
from vit_jax.nn import attention
from vit_jax.nn.dense import Dense
from vit_jax.nn.encoder_decoder import Embeddings
from vit_jax.nn.maps import AttentionMap, keep
from vit_jax.nn.stochastic import Dropout

ATTENTIONS = ('additive', 'dot_product', 'scaled_dot_product')


class State(NamedTuple):
    """State of a layer, carried from token to token."""

    hidden: Float[Array, 'B D']
    cell: Float[Array, 'B D']


class Memory(NamedTuple):
    """Initial state of the decoder and encoded source; with newer states, its cache.

    Axis 0 of every array is the sentence.

    Attributes:
      states: States of the decoder's layers; at first h = tanh(W_s h<-_1), with the backward state
        of the encoder's layer at the first token, and c = 0.
      tokens: Annotations h of the source: both directions of the last layer.
      keys: Annotations projected for the attention.
      mask: True where the source is not padding.
    """

    states: tuple[State, ...]
    tokens: Float[Array, 'B S H']
    keys: Float[Array, 'B S D']
    mask: Bool[Array, 'B 1 S']


class Model(base.EncoderDecoder):
    """Bidirectional LSTM encoder and LSTM decoder with attention.

    It has the methods of the Transformer, `vit_jax.models.seq2seq.Model`. When the collection
    `intermediates` is mutable it receives the weights [B 1 T S] of a call, named `attention`, in
    `decoder`.

    Attributes:
      vocab_size: V, number of ids of source and target together.
      width: D, width of a state; an annotation has both directions, 2D.
      embed_dim: E, token width.
      depth: Layers of the encoder, and of the decoder.
      attention: 'additive', 'dot_product' or 'scaled_dot_product'.
      dropout: Dropout rate of embeddings, between layers and before the scores.
      tied: Whether both embeddings and the scores share one matrix.
      dtype: Computation dtype. Parameters, softmax and logits stay float32.

    Raises:
      UserError: for an invalid field.
    """

    vocab_size: int
    width: int = 1000
    embed_dim: int = 620
    depth: int = 1
    attention: str = 'additive'
    dropout: float = 0.0
    tied: bool = False
    dtype: str = 'float32'

    effects: ClassVar = {'attention': ''}  # its scores have parameters

    def __post_init__(self) -> None:
        check_choice('attention', self.attention, ATTENTIONS)
        check_fields(self, 'dtype', 'dropout')
        check_counts(self, 'depth')
        super().__post_init__()

    def setup(self) -> None:
        dtype = jnp.dtype(self.dtype)
        self.embed = Embeddings(self.vocab_size, self.embed_dim, self.tied, dtype)
        self.encoder = [BiLSTM(self.width, dtype) for _ in range(self.depth)]
        self.decoder = Decoder(
            self.attention, self.width, self.embed_dim, self.depth, self.dropout, dtype
        )
        self.drop = Dropout(self.dropout)

    def encode(self, source: Int[Array, 'B S'], train: bool = False) -> Memory:
        """Encode the source for the decoder."""
        mask = attention.padding_mask(source)[:, 0]
        x, firsts = self.embed.source(source), []
        for layer in self.encoder:
            x, first = layer(self.drop(x, train), mask[:, 0])
            firsts.append(first)
        return self.decoder.start(x, firsts, mask)

    def decode(
        self, memory: Memory, target_in: Int[Array, 'B T'], train: bool = False
    ) -> Float[Array, 'B T V']:
        """Score every next token, given the true ones before it."""
        x = self.drop(self.embed.target(target_in), train)
        return self.embed.logits(self.decoder(x, memory, train))

    def init_cache(self, memory: Memory, max_len: int) -> Memory:
        """Return the decoder's state before its first step, which does not depend on `max_len`."""
        return memory

    def decode_step(
        self, cache: Memory, token: Int[Array, 'B'], position: int | Int[Array, '']
    ) -> tuple[Float[Array, 'B V'], Memory]:
        """Read the next token of the target shifted right; its position is ignored.

        Returns:
          The scores of the next token, equal to the ones of `decode`, and the next step's cache.
        """
        x, cache = self.decoder.step(self.embed.target(token), cache)
        return self.embed.logits(x), cache

    def attention_maps(
        self,
        intermediates: Mapping[str, Any],
        source: Int[Array, 'B S'],
        target_in: Int[Array, 'B T'],
    ) -> list[AttentionMap]:
        """Collect the alignment of target and source from the `intermediates` of a call."""
        (weights,) = intermediates['decoder']['attention']
        return [AttentionMap('decoder/cross', weights, target_in.shape[1:], source.shape[1:])]


class BiLSTM(nn.Module):
    """An LSTM in each direction. Parameters `forward` and `backward`."""

    width: int
    dtype: Any = jnp.float32

    def setup(self) -> None:
        self.forward = LSTM(self.width, self.dtype)
        self.backward = LSTM(self.width, self.dtype)

    def __call__(
        self, x: Float[Array, 'B S E'], mask: Bool[Array, 'B S']
    ) -> tuple[Float[Array, 'B S H'], Float[Array, 'B D']]:
        """Compute hidden states [forward; backward], 2D wide, and the backward one of token 0."""
        backward = self.backward(x, mask, reverse=True)
        return jnp.concatenate([self.forward(x, mask), backward], axis=-1), backward[:, 0]


class LSTM(nn.Module):
    """One layer. Parameters `input` (kernel [E 4D], bias [4D]) and `recurrent` [D 4D]."""

    width: int
    dtype: Any = jnp.float32

    def setup(self) -> None:
        self.input = Dense(4 * self.width, dtype=self.dtype)
        shape = (self.width, 4 * self.width)
        self.recurrent = self.param('recurrent', nn.initializers.orthogonal(), shape)

    def __call__(
        self, x: Float[Array, 'B N E'], mask: Bool[Array, 'B N'], reverse: bool = False
    ) -> Float[Array, 'B N D']:
        """Compute the hidden states in the order of the tokens, from an initial state of zeros.

        Args:
          x: Inputs.
          mask: True where a token is not padding; padding does not change the state, so that the
            reverse direction has a zero state at the last token.
          reverse: Whether to run from the last token to the first.
        """
        recurrent = self.recurrent.astype(self.dtype)

        def step(state: State, inputs: tuple[Array, Array]) -> tuple[State, Array]:
            gates, real = inputs
            new = next_state(gates, state, recurrent)
            state = State(
                *(jnp.where(real[:, None], *pair) for pair in zip(new, state, strict=True))
            )
            return state, state.hidden

        # The inputs' contribution to the gates is one matmul for all tokens.
        inputs = self.input(x).swapaxes(0, 1), mask.T
        _, hidden = jax.lax.scan(step, self.zero_state(x.shape[0]), inputs, reverse=reverse)
        return hidden.swapaxes(0, 1)

    def step(self, x: Float[Array, 'B E'], state: State) -> State:
        """Compute the state after one more token."""
        return next_state(self.input(x), state, self.recurrent.astype(self.dtype))

    def zero_state(self, batch: int) -> State:
        """Make the state before the first token."""
        zeros = jnp.zeros((batch, self.width), self.dtype)
        return State(zeros, zeros)


def next_state(gates: Float[Array, 'B G'], state: State, recurrent: Float[Array, 'D G']) -> State:
    """Compute the next state from gates (input, forget, candidate, output) before nonlinearities.

        c' = sigmoid(f) c + sigmoid(i) tanh(g)
        h' = sigmoid(o) tanh(c')

    `gates` is the contribution of the input; the function adds the hidden state's, h R.
    """
    i, f, g, o = jnp.split(gates + state.hidden @ recurrent, 4, axis=-1)
    cell = jax.nn.sigmoid(f) * state.cell + jax.nn.sigmoid(i) * jnp.tanh(g)
    return State(jax.nn.sigmoid(o) * jnp.tanh(cell), cell)


class Attention(nn.Module):
    """Attention of decoder states to annotations h; see `vit_jax.nn.attention` for the scores.

    Keys are U h, so that `dot_product` is Luong's `general`, which, unlike `dot`, lets the two
    widths differ. Additive attention also projects queries, and has a vector `v`.
    """

    kind: str
    width: int
    dtype: Any = jnp.float32

    def setup(self) -> None:
        self.key = Dense(self.width, use_bias=False, dtype=self.dtype)
        if self.kind == 'additive':
            self.query = Dense(self.width, dtype=self.dtype)
            self.v = self.param('v', nn.initializers.normal(self.width**-0.5), (self.width,))

    def project(self, tokens: Float[Array, 'B S H']) -> Float[Array, 'B S D']:
        """Project annotations to the keys of all steps."""
        return self.key(tokens)

    def __call__(
        self, state: Float[Array, 'B D'], memory: Memory
    ) -> tuple[Float[Array, 'B H'], Float[Array, 'B S']]:
        """Compute (context, weights) of a step."""
        annotations = memory.keys, memory.tokens
        query = state[:, None]
        if self.kind == 'additive':
            v = self.v.astype(self.dtype)
            outputs = attention.additive(self.query(query), *annotations, v, memory.mask)
        else:
            outputs = getattr(attention, self.kind)(query, *annotations, memory.mask)
        context, weights = (x[:, 0] for x in outputs)
        return context, weights


class Decoder(nn.Module):
    """LSTM layers with attention, and a readout tanh(W [h; context]).

    Attention by the previous state, which is additive, feeds its context to the first layer.
    """

    attention: str
    width: int
    embed_dim: int
    depth: int
    dropout: float = 0.0
    dtype: Any = jnp.float32

    def setup(self) -> None:
        layers = range(self.depth)
        self.bridge = [Dense(self.width, dtype=self.dtype) for _ in layers]
        self.layer = [LSTM(self.width, self.dtype) for _ in layers]
        self.cross = Attention(self.attention, self.width, self.dtype)
        self.readout = Dense(self.embed_dim, dtype=self.dtype)
        self.drop = Dropout(self.dropout)

    def start(
        self, tokens: Float[Array, 'B S H'], firsts: list[Array], mask: Bool[Array, 'B 1 S']
    ) -> Memory:
        """Make the state before the first token from the encoder's `firsts`, [B D] of a layer."""
        hidden = [jnp.tanh(bridge(h)) for bridge, h in zip(self.bridge, firsts, strict=True)]
        states = tuple(State(h, jnp.zeros_like(h)) for h in hidden)
        return Memory(states, tokens, self.cross.project(tokens), mask)

    def __call__(
        self, x: Float[Array, 'B T E'], memory: Memory, train: bool = False
    ) -> Float[Array, 'B T E']:
        """Read out every step, and keep the weights [B 1 T S]."""
        scanned = nn.scan(
            lambda decoder, states, x: decoder._advance(states, x, memory, train),
            variable_broadcast='params',
            split_rngs={'params': False, 'dropout': True},
            in_axes=1,
            out_axes=1,
        )
        _, (features, weights) = scanned(self, memory.states, x)
        keep(self, weights[:, None])
        return self._read_out(features, train)

    def step(self, x: Float[Array, 'B E'], memory: Memory) -> tuple[Float[Array, 'B E'], Memory]:
        """Read out one step, and return also the memory with the states after it."""
        states, (features, _) = self._advance(memory.states, x, memory, train=False)
        return self._read_out(features, train=False), memory._replace(states=states)

    def _advance(
        self, states: tuple[State, ...], x: Array, memory: Memory, train: bool
    ) -> tuple[tuple[State, ...], tuple[Array, Array]]:
        """Compute the next states, and ([hidden; context], weights)."""
        by_previous = self.attention == 'additive'
        if by_previous:
            context, weights = self.cross(states[-1].hidden, memory)
            x = jnp.concatenate([x, context], axis=-1)
        new: list[State] = []
        for layer, state in zip(self.layer, states, strict=True):
            x = self.drop(new[-1].hidden, train) if new else x
            new.append(layer.step(x, state))
        hidden = new[-1].hidden
        if not by_previous:
            context, weights = self.cross(hidden, memory)
        return tuple(new), (jnp.concatenate([hidden, context], axis=-1), weights)

    def _read_out(self, features: Array, train: bool) -> Array:
        return self.drop(jnp.tanh(self.readout(features)), train)
