"""Decoding, greedy and by sampling, over any model that scores one more token; see also `beam`.

A model is given as `step` and `cache`. `step(cache, tokens [N], position) -> (logits [N V], cache)`
reads the tokens at `position` of N sequences, the first of which is bos, and scores the next ones.
`cache` is a pytree of arrays with the N sequences on axis 0 and holds the model's memory: keys and
values, a recurrent state, the encoded source. The functions are pure, have static shapes and stop
as soon as every example is done; the caller compiles them.

The result for an example depends on its own rows only, never on the rest of the batch.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from vit_jax.array_types import Bool, Float, Int, Key
from vit_jax.errors import UserError

PAD, BOS, EOS = 0, 1, 2

Cache = Any
Step = Callable[[Cache, Array, Array], tuple[Array, Cache]]
Choose = Callable[[Array, Array], Array]


class Decoded(NamedTuple):
    """K hypotheses an example, the best first.

    Attributes:
      tokens: [B K T], without bos, padded with 0; eos, where there is one, is the last token.
      lengths: [B K], tokens of the hypothesis, its eos included; 0 where there is none.
      scores: [B K], float32; -inf where there is none.
    """

    tokens: Int[Array, 'B K T']
    lengths: Int[Array, 'B K']
    scores: Float[Array, 'B K']


def greedy(
    step: Step,
    cache: Cache,
    *,
    max_len: int,
    max_lens: Int[Array, 'B'] | None = None,
    bos: int = BOS,
    eos: int = EOS,
) -> Decoded:
    """The most probable token at every position; of equal ones, the lowest id.

    Args:
      step: scores the next tokens, see the head of this file.
      cache: the initial cache of `step`, one sequence an example.
      max_len: the most tokens of a hypothesis, eos included; static.
      max_lens: the same for each example, where that is less; 0 skips an example, as padding is.
      bos: the token to begin with.
      eos: the token that ends a sequence.

    Returns:
      One hypothesis an example, K = 1; its score is its log-probability.

    Raises:
      UserError: if `max_len` is not positive.
    """
    limits = example_limits(cache, max_len, max_lens)
    return _rollout(step, cache, lambda logits, _: logits.argmax(-1), max_len, limits, bos, eos)


def sample(
    step: Step,
    cache: Cache,
    keys: Key[Array, 'B'],
    *,
    max_len: int,
    max_lens: Int[Array, 'B'] | None = None,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    bos: int = BOS,
    eos: int = EOS,
) -> Decoded:
    """Tokens drawn from softmax(logits / temperature), filtered by `top_k` and then by `top_p`.

    Args:
      step, cache, max_len, max_lens, bos, eos: as in `greedy`.
      keys: a random key for each example, from which its tokens are drawn.
      temperature: above 0; toward 0 it becomes `greedy`.
      top_k: draw from the k most probable tokens only, see `keep_top_k`.
      top_p: draw from the nucleus of this probability only, see `keep_top_p`.

    Returns:
      One hypothesis an example, K = 1; its score is its log-probability under the model itself,
      at temperature 1 and without filters.

    Raises:
      UserError: if a number is out of its range.
    """
    require(temperature > 0 and math.isfinite(temperature), 'temperature', 'above 0', temperature)
    require(top_k is None or top_k >= 1, 'top_k', 'at least 1', top_k)
    require(top_p is None or 0 < top_p <= 1, 'top_p', 'above 0 and at most 1', top_p)

    def choose(logits: Array, position: Array) -> Array:
        logits = logits / temperature
        logits = logits if top_k is None else keep_top_k(logits, top_k)
        logits = logits if top_p is None else keep_top_p(logits, top_p)
        now = jax.vmap(jax.random.fold_in, in_axes=(0, None))(keys, position)
        return jax.vmap(jax.random.categorical)(now, logits)

    limits = example_limits(cache, max_len, max_lens)
    return _rollout(step, cache, choose, max_len, limits, bos, eos)


def keep_top_k(logits: Float[Array, '*B V'], k: int) -> Float[Array, '*B V']:
    """-inf for all but the k highest logits and their equals (Fan et al., 2018, section 5.4)."""
    lowest = jax.lax.top_k(logits, min(k, logits.shape[-1]))[0][..., -1:]
    return jnp.where(logits < lowest, -jnp.inf, logits)


def keep_top_p(logits: Float[Array, '*B V'], p: float) -> Float[Array, '*B V']:
    """-inf outside of the nucleus: the fewest tokens whose probabilities reach p, and equals.

    Holtzman et al., 2020, arXiv:1904.09751, equation 2. The most probable token always stays.
    """
    ordered = jnp.sort(logits, axis=-1)
    # Summed from the least probable token on: there float32 resolves a p close to 1.
    inside = jnp.cumsum(jax.nn.softmax(ordered, axis=-1), axis=-1) > 1.0 - p
    lowest = jnp.where(inside, ordered, ordered[..., -1:]).min(axis=-1, keepdims=True)
    return jnp.where(logits < lowest, -jnp.inf, logits)


class _Rollout(NamedTuple):
    position: Array
    done: Array
    decoded: Decoded
    cache: Cache


def _rollout(
    step: Step, cache: Cache, choose: Choose, max_len: int, limits: Array, bos: int, eos: int
) -> Decoded:
    """One sequence an example, each token by `choose(logits [B V], position)`."""

    def advance(state: _Rollout) -> _Rollout:
        old, position = state.decoded, state.position
        logits, cache = step(state.cache, tokens_before(old, position, bos)[:, 0], position)
        token = choose(logits.astype(jnp.float32), position)
        gained = jnp.take_along_axis(log_probs(logits), token[:, None], axis=-1)
        tokens = old.tokens.at[:, 0, position].set(token)
        new = Decoded(tokens, old.lengths + 1, old.scores + gained)
        done = state.done | (token == eos) | (position + 1 >= limits)
        return _Rollout(position + 1, done, update(old, new, ~state.done), cache)

    first = _Rollout(jnp.int32(0), limits <= 0, prefixes(limits, 1, max_len), cache)
    return jax.lax.while_loop(lambda state: ~state.done.all(), advance, first).decoded


def prefixes(limits: Int[Array, 'B'], count: int, max_len: int) -> Decoded:
    """`count` empty prefixes an example, the first with log-probability 0 if the limit allows it.

    The others have none, so that equal prefixes are not continued twice.
    """
    shape = (len(limits), count)
    real = (jnp.arange(count) == 0) & (limits[:, None] > 0)
    return Decoded(
        jnp.full((*shape, max_len), PAD, jnp.int32),
        jnp.zeros(shape, jnp.int32),
        jnp.where(real, 0.0, -jnp.inf),
    )


def tokens_before(decoded: Decoded, position: Int[Array, ''], bos: int) -> Int[Array, 'B K']:
    """The model's input at `position`: the hypothesis's token before it, or bos."""
    return jnp.where(position == 0, bos, decoded.tokens[..., jnp.maximum(position - 1, 0)])


def log_probs(logits: Float[Array, 'N V']) -> Float[Array, 'N V']:
    """log softmax in float32, whatever the dtype of the logits."""
    return jax.nn.log_softmax(logits.astype(jnp.float32), axis=-1)


def update(old: Decoded, new: Decoded, where: Bool[Array, 'B']) -> Decoded:
    """The new rows for examples in which `where` is true, else the old ones."""
    return jax.tree.map(
        lambda a, b: jnp.where(where.reshape(-1, *[1] * (a.ndim - 1)), b, a), old, new
    )


def example_limits(cache: Cache, max_len: int, max_lens: Int[Array, 'B'] | None) -> Int[Array, 'B']:
    """The most tokens of each example; raises UserError if `max_len` is not positive."""
    require(max_len >= 1, 'max_len', 'at least 1', max_len)
    limits = jnp.full(len(jax.tree.leaves(cache)[0]), max_len, jnp.int32)
    return limits if max_lens is None else jnp.minimum(limits, max_lens)


def require(valid: bool, what: str, span: str, value: object) -> None:
    """Raise UserError unless `valid`."""
    if not valid:
        raise UserError(f'{what} must be {span}, not {value}')
