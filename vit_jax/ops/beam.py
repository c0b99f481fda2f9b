"""Beam search with the length normalization of GNMT (Wu et al., 2016, arXiv:1609.08144)."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from vit_jax.array_types import Bool, Float, Int
from vit_jax.errors import UserError, nearest
from vit_jax.ops.decoding import (
    BOS,
    EOS,
    PAD,
    Cache,
    Decoded,
    Step,
    example_limits,
    log_probs,
    prefixes,
    require,
    tokens_before,
    update,
)

STOPS = ('best', 'all', 'full')


def length_penalty(length: Int[Array, '*B'], alpha: float) -> Float[Array, '*B']:
    """((5 + |Y|) / 6)^alpha, equation 14, where |Y| counts the tokens and eos."""
    return ((5.0 + length) / 6.0) ** alpha


def beam_search(
    step: Step,
    cache: Cache,
    *,
    beams: int,
    max_len: int,
    max_lens: Int[Array, 'B'] | None = None,
    alpha: float = 0.6,
    stop: str = 'best',
    bos: int = BOS,
    eos: int = EOS,
) -> Decoded:
    """The best hypotheses found by a beam of prefixes, by log P(Y | X) / length_penalty(Y).

    Every position continues the K = `beams` best prefixes. Continuations that end with eos and are
    among the K best join the finished hypotheses, which are kept apart; the K best others are the
    next prefixes. Prefixes that are cut, at the limit or because the search has stopped, are
    returned only if fewer than K hypotheses have finished, and rank behind them. Ties go to the
    earlier hypothesis, then to the better prefix, then to the lower token id.

    The score of a prefix is at most its log-probability over the penalty of the longest length.
    The search stops by this bound:
      'best': when no prefix can beat the best hypothesis; the others may then be cut short;
      'all': when none can beat the K-th, so that all K are those of a search to the limit;
      'full': when K hypotheses have finished, whatever the bound.
    A single beam stops at its first hypothesis under any rule, which makes it `greedy`.

    Args:
      step, cache: the model, see the head of `decoding.py`; one sequence an example. Arrays that
        `step` returns unchanged, such as the encoded source, are not moved between beams.
      beams: K, the number of prefixes and of the hypotheses returned.
      max_len: the most tokens of a hypothesis, eos included; static.
      max_lens: the same for each example, where that is less, such as the length of its source + 50
        (Vaswani et al., 2017, section 6.1); 0 skips an example, as padding is.
      alpha: exponent of the length penalty, at least 0; with 0 the score is the log-probability.
      stop: 'best', 'all' or 'full'.
      bos: the token to begin with.
      eos: the token that ends a sequence.

    Raises:
      UserError: if a number is out of its range, or `stop` is not one of the three.
    """
    require(beams >= 1, 'beams', 'at least 1', beams)
    require(alpha >= 0 and math.isfinite(alpha), 'alpha', 'at least 0', alpha)
    if stop not in STOPS:
        raise UserError('stop: ' + nearest('rule to stop a beam search', stop, STOPS))
    rule = 'full' if beams == 1 else stop
    limits = example_limits(cache, max_len, max_lens)

    def advance(search: _Search) -> _Search:
        position = search.position
        tokens = tokens_before(search.live, position, bos).reshape(-1)
        logits, cache = step(search.cache, tokens, position)
        grown, parents = _grow(search.live, log_probs(logits), position)
        ends = grown.tokens[..., position] == eos
        finished = update(
            search.finished, _finish(search.finished, grown, ends, alpha), ~search.done
        )
        survivors, parents = _survive(grown, parents, ends)
        live = update(search.live, survivors, ~search.done)
        done = search.done | (position + 1 >= limits) | _stops(rule, live, finished, limits, alpha)
        return _Search(position + 1, done, live, finished, _move(search.cache, cache, parents))

    first = _first(cache, beams, max_len, limits)
    return _result(jax.lax.while_loop(lambda search: ~search.done.all(), advance, first), alpha)


class _Search(NamedTuple):
    """Prefixes, scored by log-probability, and finished hypotheses, by normalized score."""

    position: Array
    done: Array
    live: Decoded
    finished: Decoded
    cache: Cache


def _first(cache: Cache, beams: int, max_len: int, limits: Array) -> _Search:
    live = prefixes(limits, beams, max_len)
    finished = live._replace(scores=jnp.full_like(live.scores, -jnp.inf))
    cache = jax.tree.map(lambda x: jnp.repeat(x, beams, axis=0), cache)
    return _Search(jnp.int32(0), limits <= 0, live, finished, cache)


def _grow(live: Decoded, gains: Array, position: Array) -> tuple[Decoded, Array]:
    """The 2 K best continuations, of which at most K end, and the prefixes that they continue."""
    batch, beams, _ = live.tokens.shape
    scores = (live.scores.reshape(-1, 1) + gains).reshape(batch, -1)
    scores, index = jax.lax.top_k(scores, 2 * beams)
    parents, chosen = jnp.divmod(index, gains.shape[-1])
    tokens, lengths, _ = _take(live, parents)
    return Decoded(tokens.at[..., position].set(chosen), lengths + 1, scores), parents


def _finish(finished: Decoded, grown: Decoded, ends: Bool[Array, 'B M'], alpha: float) -> Decoded:
    """The K best of the earlier hypotheses and those that end here."""
    beams = finished.scores.shape[1]
    accepted = ends & (jnp.arange(2 * beams) < beams)
    scores = jnp.where(accepted, grown.scores / length_penalty(grown.lengths, alpha), -jnp.inf)
    every = _concatenate(finished, grown._replace(scores=scores))
    return _take(every, jax.lax.top_k(every.scores, beams)[1])


def _survive(grown: Decoded, parents: Array, ends: Array) -> tuple[Decoded, Array]:
    """The K best continuations that go on, and the prefixes that they continue."""
    grown = grown._replace(scores=jnp.where(ends, -jnp.inf, grown.scores))
    return _take((grown, parents), jax.lax.top_k(grown.scores, ends.shape[1] // 2)[1])


def _stops(rule: str, live: Decoded, finished: Decoded, limits: Array, alpha: float) -> Array:
    """Whether each example [B] is done before its limit; one without a prefix always is."""
    bound = live.scores[:, 0] / length_penalty(limits, alpha)
    if rule == 'full':
        return (finished.scores[:, -1] > -jnp.inf) | (bound == -jnp.inf)
    return finished.scores[:, 0 if rule == 'best' else -1] >= bound


def _move(before: Cache, after: Cache, parents: Int[Array, 'B K']) -> Cache:
    """Give every prefix the cache of the one that it continues.

    An array that the step has left alone is the same for all beams of an example, and stays.
    """

    def move(old: Array, new: Array) -> Array:
        if new is old:
            return old
        return _take(new.reshape(*parents.shape, *new.shape[1:]), parents).reshape(new.shape)

    return jax.tree.map(move, before, after)


def _result(search: _Search, alpha: float) -> Decoded:
    """The finished hypotheses, then cut prefixes in the places left."""
    live = search.live
    cut = live._replace(scores=live.scores / length_penalty(live.lengths, alpha))
    number = (search.finished.scores > -jnp.inf).sum(axis=1, keepdims=True)
    place = jnp.arange(live.scores.shape[1])
    index = jnp.where(place < number, place, place + len(place) - number)
    tokens, lengths, scores = _take(_concatenate(search.finished, cut), index)
    real = scores > -jnp.inf
    return Decoded(jnp.where(real[..., None], tokens, PAD), jnp.where(real, lengths, 0), scores)


def _concatenate(a: Decoded, b: Decoded) -> Decoded:
    return jax.tree.map(lambda x, y: jnp.concatenate([x, y], axis=1), a, b)


def _take(tree: Any, index: Int[Array, 'B M']) -> Any:
    """Pick along axis 1, each example by its own indices."""
    return jax.tree.map(lambda x: jax.vmap(lambda row, i: row[i])(x, index), tree)
