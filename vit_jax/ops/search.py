"""Decoding with an encoder-decoder: greedy, sampling or beam search.

`decode` calls a model with the methods `encode`, `init_cache` and `decode_step` (see
`vit_jax.models.seq2seq`) as `apply(*inputs, method=NAME)`, its variables bound.

The searches accept any model as `step` and `cache`. `step(cache, tokens [N], position) -> (logits
[N V], cache)` reads the tokens at `position` of N sequences, starting with bos, and scores the next
tokens. `cache` is a pytree of arrays with the N sequences on axis 0: keys and values, a recurrent
state, the encoded source. The searches are pure, have static shapes and stop as soon as every
example is done; the caller compiles them. The result for an example never depends on the rest of
the batch. Beam search normalizes lengths as in GNMT (Wu et al., 2016, arXiv:1609.08144).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from vit_jax.array_types import Bool, Float, Int, Key
from vit_jax.errors import UserError, check_choice, nearest

PAD, BOS, EOS = 0, 1, 2
Cache = Any
Step = Callable[[Cache, Array, Array], tuple[Array, Cache]]
Choose = Callable[[Array, Array], Array]


class Decoded(NamedTuple):
    """K hypotheses per example, the best first.

    Attributes:
      tokens: [B K T], without bos, padded with 0; eos, if any, is the last token.
      lengths: [B K], number of tokens of the hypothesis, including eos; 0 for none.
      scores: [B K], float32; -inf for none.
    """

    tokens: Int[Array, 'B K T']
    lengths: Int[Array, 'B K']
    scores: Float[Array, 'B K']


METHODS = ('beam', 'greedy', 'sample')


@dataclasses.dataclass(frozen=True)
class Search:
    """Search method for the tokens of a target. Fields that the method does not use are ignored.

    Attributes:
      method: 'beam', 'greedy' or 'sample'.
      beams, alpha, stop: Parameters of `beam_search`.
      temperature, top_k, top_p: Parameters of `sample`.
      extra_len: Maximum number of tokens by which a target may exceed its source, both with eos; 50
        in Vaswani et al., 2017, section 6.1.
      max_len: Maximum number of tokens of any target, including eos; None for no limit.

    Raises:
      UserError: if the method is unknown, or a length leaves no room for a token.
    """

    method: str = 'beam'
    beams: int = 4
    alpha: float = 0.6
    stop: str = 'best'
    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None
    extra_len: int = 50
    max_len: int | None = None

    def __post_init__(self) -> None:
        check_choice('method to decode', self.method, METHODS)
        if self.extra_len < 0:
            raise UserError(f'extra_len must not be negative, not {self.extra_len}')
        if self.max_len is not None and self.max_len < 1:
            raise UserError(f'max_len must be at least 1, not {self.max_len}')


def decode(
    apply: Callable[..., Any],
    source: Int[Array, 'B S'],
    search: Search,
    keys: Key[Array, 'B'] | None = None,
) -> Decoded:
    """Decode every source; the caller compiles the function.

    Args:
      apply: Model, see the module's docstring.
      source: Tokens, with eos at the end, then padding; rows with only padding are skipped.
      search: Search method and its options.
      keys: Random key for each example, for sampling.

    Returns:
      `search.beams` hypotheses per example for beam search, else one, the best first.

    Raises:
      UserError: if a number of `search` is out of range.
    """
    room = source.shape[1] + search.extra_len
    room = room if search.max_len is None else min(room, search.max_len)
    lengths = (source != PAD).sum(axis=1)
    limits = jnp.where(lengths > 0, lengths + search.extra_len, 0)
    return generate(apply, apply(source, method='encode'), search, room, limits, keys)


def generate(
    apply: Callable[..., Any],
    memory: Any,
    search: Search,
    max_len: int,
    max_lens: Int[Array, 'B'] | None = None,
    keys: Key[Array, 'B'] | None = None,
) -> Decoded:
    """Decode the output of the model's `encode`, for any source, such as images.

    Args:
      apply, search, keys: See `decode`; the lengths of `search` have no effect.
      memory: Encoded source.
      max_len, max_lens: See `greedy`.
    """

    def step(cache: Cache, tokens: Array, position: Array) -> tuple[Array, Cache]:
        return apply(cache, tokens, position, method='decode_step')

    limits: dict[str, Any] = {'max_len': max_len, 'max_lens': max_lens}
    cache = apply(memory, max_len, method='init_cache')
    if search.method == 'greedy':
        return greedy(step, cache, **limits)
    if search.method == 'sample':
        assert keys is not None, 'sampling needs keys'
        filters: dict[str, Any] = {
            name: getattr(search, name) for name in ('temperature', 'top_k', 'top_p')
        }
        return sample(step, cache, keys, **limits, **filters)
    rule: dict[str, Any] = {name: getattr(search, name) for name in ('beams', 'alpha', 'stop')}
    return beam_search(step, cache, **limits, **rule)


def greedy(
    step: Step,
    cache: Cache,
    *,
    max_len: int,
    max_lens: Int[Array, 'B'] | None = None,
    bos: int = BOS,
    eos: int = EOS,
) -> Decoded:
    """Pick the most probable token at each position, the lowest id in case of ties.

    Args:
      step: Function that scores the next tokens, see the module's docstring.
      cache: Initial cache of `step`, one sequence per example.
      max_len: Maximum number of tokens of a hypothesis, including eos; static.
      max_lens: Maximum number of tokens per example, if smaller; 0 skips an example, such as
        padding.
      bos: First token.
      eos: Token that ends a sequence.

    Returns:
      One hypothesis per example, K = 1; its score is its log-probability.

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
    """Draw tokens from softmax(logits / temperature), filtered by `top_k` and then by `top_p`.

    Args:
      step, cache, max_len, max_lens, bos, eos: See `greedy`.
      keys: Random key for each example.
      temperature: Temperature above 0; near 0 equal to `greedy`.
      top_k: Number of most probable tokens to draw from, see `keep_top_k`.
      top_p: Probability of the nucleus to draw from, see `keep_top_p`.

    Returns:
      One hypothesis per example, K = 1; its score is its log-probability under the model, at
      temperature 1 and without filters.

    Raises:
      UserError: if a number is out of range.
    """
    require(temperature > 0 and math.isfinite(temperature), 'temperature', 'above 0', temperature)
    require(top_k is None or top_k >= 1, 'top_k', 'at least 1', top_k)
    require(top_p is None or 0 < top_p <= 1, 'top_p', 'above 0 and at most 1', top_p)

    def choose(logits: Array, position: Array) -> Array:
        logits = logits / temperature
        logits = logits if top_k is None else keep_top_k(logits, top_k)
        logits = logits if top_p is None else keep_top_p(logits, top_p)
        step_keys = jax.vmap(jax.random.fold_in, in_axes=(0, None))(keys, position)
        return jax.vmap(jax.random.categorical)(step_keys, logits)

    limits = example_limits(cache, max_len, max_lens)
    return _rollout(step, cache, choose, max_len, limits, bos, eos)


def keep_top_k(logits: Float[Array, '*B V'], k: int) -> Float[Array, '*B V']:
    """Set all but the k highest logits and ties to -inf (Fan et al., 2018, section 5.4)."""
    lowest = jax.lax.top_k(logits, min(k, logits.shape[-1]))[0][..., -1:]
    return jnp.where(logits < lowest, -jnp.inf, logits)


def keep_top_p(logits: Float[Array, '*B V'], p: float) -> Float[Array, '*B V']:
    """Set logits outside of the nucleus, the fewest tokens with total probability p, to -inf.

    Holtzman et al., 2020, arXiv:1904.09751, equation 2. Ties and the most probable token stay.
    """
    ordered = jnp.sort(logits, axis=-1)
    # Sum from the least probable token: there float32 resolves a p close to 1.
    is_beyond = jnp.cumsum(jax.nn.softmax(ordered, axis=-1), axis=-1) > 1.0 - p
    lowest = jnp.where(is_beyond, ordered, ordered[..., -1:]).min(axis=-1, keepdims=True)
    return jnp.where(logits < lowest, -jnp.inf, logits)


class _Rollout(NamedTuple):
    position: Array
    done: Array
    decoded: Decoded
    cache: Cache


def _rollout(
    step: Step, cache: Cache, choose: Choose, max_len: int, limits: Array, bos: int, eos: int
) -> Decoded:
    """Decode one sequence per example, choosing tokens by `choose(logits [B V], position)`."""

    def advance(state: _Rollout) -> _Rollout:
        old, position = state.decoded, state.position
        logits, cache = step(state.cache, tokens_before(old, position, bos)[:, 0], position)
        token = choose(logits.astype(jnp.float32), position)
        token_scores = jnp.take_along_axis(log_probs(logits), token[:, None], axis=-1)
        tokens = old.tokens.at[:, 0, position].set(token)
        new = Decoded(tokens, old.lengths + 1, old.scores + token_scores)
        done = state.done | (token == eos) | (position + 1 >= limits)
        return _Rollout(position + 1, done, update_where(old, new, ~state.done), cache)

    first = _Rollout(jnp.int32(0), limits <= 0, empty_prefixes(limits, 1, max_len), cache)
    return jax.lax.while_loop(lambda state: ~state.done.all(), advance, first).decoded


STOPS = ('best', 'all', 'full')


def length_penalty(length: Int[Array, '*B'], alpha: float) -> Float[Array, '*B']:
    """((5 + |Y|) / 6)^alpha, equation 14, where |Y| counts the tokens including eos."""
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
    """Find the best hypotheses with a beam of prefixes, by log P(Y | X) / length_penalty(Y).

    Each step expands the K = `beams` best prefixes. Continuations that end with eos and are among
    the K best join the finished hypotheses; the K best others become the next prefixes. Unfinished
    prefixes, at the limit or when the search stops, are only returned if fewer than K hypotheses
    have finished, and rank after them. Ties go to the earlier hypothesis, then to the better
    prefix, then to the lower token id.

    The score of a prefix is at most its log-probability over the penalty of the maximum length. The
    search stops by this bound:
      'best': when no prefix can beat the best hypothesis; the others may be unfinished;
      'all': when none can beat the K-th, so that all K equal the results of a search to the limit;
      'full': when K hypotheses have finished, regardless of the bound.
    A single beam stops at its first hypothesis under any rule, which equals `greedy`.

    Args:
      step, cache: Model, see the module's docstring; one sequence per example. Arrays that `step`
        returns unchanged, such as the encoded source, are not moved between beams.
      beams: Number K of prefixes and of returned hypotheses.
      max_len: Maximum number of tokens of a hypothesis, including eos; static.
      max_lens: Maximum number of tokens per example, if smaller, such as the length of its source +
        50 (Vaswani et al., 2017, section 6.1); 0 skips an example, such as padding.
      alpha: Exponent of the length penalty, at least 0; with 0 the score is the log-probability.
      stop: 'best', 'all' or 'full'.
      bos: First token.
      eos: Token that ends a sequence.

    Raises:
      UserError: if a number is out of range, or `stop` is unknown.
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
        grown, parents = _expand(search.live, log_probs(logits), position)
        ends = grown.tokens[..., position] == eos
        finished = update_where(
            search.finished, _best_finished(search.finished, grown, ends, alpha), ~search.done
        )
        survivors, parents = _best_unfinished(grown, parents, ends)
        live = update_where(search.live, survivors, ~search.done)
        done = (
            search.done | (position + 1 >= limits) | _may_stop(rule, live, finished, limits, alpha)
        )
        return _Search(
            position + 1, done, live, finished, _reorder_cache(search.cache, cache, parents)
        )

    first = _start(cache, beams, max_len, limits)
    return _result(jax.lax.while_loop(lambda search: ~search.done.all(), advance, first), alpha)


class _Search(NamedTuple):
    """Prefixes, scored by log-probability, and finished hypotheses, with normalized scores."""

    position: Array
    done: Array
    live: Decoded
    finished: Decoded
    cache: Cache


def _start(cache: Cache, beams: int, max_len: int, limits: Array) -> _Search:
    live = empty_prefixes(limits, beams, max_len)
    finished = live._replace(scores=jnp.full_like(live.scores, -jnp.inf))
    cache = jax.tree.map(lambda x: jnp.repeat(x, beams, axis=0), cache)
    return _Search(jnp.int32(0), limits <= 0, live, finished, cache)


def _expand(live: Decoded, gains: Array, position: Array) -> tuple[Decoded, Array]:
    """Return the 2 K best continuations, of which at most K end, and their prefixes."""
    batch, beams, _ = live.tokens.shape
    scores = (live.scores.reshape(-1, 1) + gains).reshape(batch, -1)
    scores, index = jax.lax.top_k(scores, 2 * beams)
    parents, chosen = jnp.divmod(index, gains.shape[-1])
    tokens, lengths, _ = _gather(live, parents)
    return Decoded(tokens.at[..., position].set(chosen), lengths + 1, scores), parents


def _best_finished(
    finished: Decoded, grown: Decoded, ends: Bool[Array, 'B M'], alpha: float
) -> Decoded:
    """Return the K best of the earlier hypotheses and those that end here."""
    beams = finished.scores.shape[1]
    accepted = ends & (jnp.arange(2 * beams) < beams)
    scores = jnp.where(accepted, grown.scores / length_penalty(grown.lengths, alpha), -jnp.inf)
    candidates = _concatenate(finished, grown._replace(scores=scores))
    return _gather(candidates, jax.lax.top_k(candidates.scores, beams)[1])


def _best_unfinished(grown: Decoded, parents: Array, ends: Array) -> tuple[Decoded, Array]:
    """Return the K best continuations without eos, and their prefixes."""
    grown = grown._replace(scores=jnp.where(ends, -jnp.inf, grown.scores))
    return _gather((grown, parents), jax.lax.top_k(grown.scores, ends.shape[1] // 2)[1])


def _may_stop(rule: str, live: Decoded, finished: Decoded, limits: Array, alpha: float) -> Array:
    """Return whether each example [B] is done before its limit; one without a prefix always is."""
    bound = live.scores[:, 0] / length_penalty(limits, alpha)
    if rule == 'full':
        return (finished.scores[:, -1] > -jnp.inf) | (bound == -jnp.inf)
    return finished.scores[:, 0 if rule == 'best' else -1] >= bound


def _reorder_cache(before: Cache, after: Cache, parents: Int[Array, 'B K']) -> Cache:
    """Give each prefix the cache of the prefix it continues.

    An array that `step` returned unchanged is the same for all beams of an example, and stays.
    """

    def move(old: Array, new: Array) -> Array:
        if new is old:
            return old
        return _gather(new.reshape(*parents.shape, *new.shape[1:]), parents).reshape(new.shape)

    return jax.tree.map(move, before, after)


def _result(search: _Search, alpha: float) -> Decoded:
    """Return the finished hypotheses, then unfinished prefixes in the remaining places."""
    live = search.live
    cut = live._replace(scores=live.scores / length_penalty(live.lengths, alpha))
    num_finished = (search.finished.scores > -jnp.inf).sum(axis=1, keepdims=True)
    place = jnp.arange(live.scores.shape[1])
    index = jnp.where(place < num_finished, place, place + len(place) - num_finished)
    tokens, lengths, scores = _gather(_concatenate(search.finished, cut), index)
    is_real = scores > -jnp.inf
    return Decoded(
        jnp.where(is_real[..., None], tokens, PAD), jnp.where(is_real, lengths, 0), scores
    )


def _concatenate(a: Decoded, b: Decoded) -> Decoded:
    return jax.tree.map(lambda x, y: jnp.concatenate([x, y], axis=1), a, b)


def _gather(tree: Any, index: Int[Array, 'B M']) -> Any:
    """Pick along axis 1, with separate indices for each example."""
    return jax.tree.map(lambda x: jax.vmap(lambda row, i: row[i])(x, index), tree)


def empty_prefixes(limits: Int[Array, 'B'], count: int, max_len: int) -> Decoded:
    """Create `count` empty prefixes per example, the first with log-probability 0 if allowed.

    The others have -inf, so that equal prefixes are not continued twice.
    """
    shape = (len(limits), count)
    real = (jnp.arange(count) == 0) & (limits[:, None] > 0)
    return Decoded(
        jnp.full((*shape, max_len), PAD, jnp.int32),
        jnp.zeros(shape, jnp.int32),
        jnp.where(real, 0.0, -jnp.inf),
    )


def tokens_before(decoded: Decoded, position: Int[Array, ''], bos: int) -> Int[Array, 'B K']:
    """Return the model's input at `position`: the hypothesis's previous token, or bos."""
    return jnp.where(position == 0, bos, decoded.tokens[..., jnp.maximum(position - 1, 0)])


def log_probs(logits: Float[Array, 'N V']) -> Float[Array, 'N V']:
    """Compute log softmax in float32 for logits of any dtype."""
    return jax.nn.log_softmax(logits.astype(jnp.float32), axis=-1)


def update_where(old: Decoded, new: Decoded, mask: Bool[Array, 'B']) -> Decoded:
    """Take the new rows for examples where `mask` is true, else the old ones."""
    return jax.tree.map(
        lambda a, b: jnp.where(mask.reshape(-1, *[1] * (a.ndim - 1)), b, a), old, new
    )


def example_limits(cache: Cache, max_len: int, max_lens: Int[Array, 'B'] | None) -> Int[Array, 'B']:
    """Return the maximum length per example; raise UserError if `max_len` is not positive."""
    require(max_len >= 1, 'max_len', 'at least 1', max_len)
    limits = jnp.full(len(jax.tree.leaves(cache)[0]), max_len, jnp.int32)
    return limits if max_lens is None else jnp.minimum(limits, max_lens)


def require(valid: bool, name: str, span: str, value: object) -> None:
    """Raise UserError unless `valid`."""
    if not valid:
        raise UserError(f'{name} must be {span}, not {value}')
