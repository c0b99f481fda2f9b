"""Decoding with an encoder-decoder, by any of the searches of `vit_jax.ops`.

The model has the methods `encode`, `init_cache` and `decode_step`, see `vit_jax.models.seq2seq`,
and is called as `apply(*inputs, method=NAME)`, its variables bound.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import Array

from vit_jax.array_types import Int, Key
from vit_jax.errors import UserError, check_choice
from vit_jax.ops import beam, decoding
from vit_jax.ops.decoding import PAD, Cache, Decoded

METHODS = ('beam', 'greedy', 'sample')


@dataclasses.dataclass(frozen=True)
class Search:
    """The search for the tokens of a target. Fields that the method does not use are ignored.

    Attributes:
      method: 'beam', 'greedy' or 'sample'.
      beams, alpha, stop: of `ops.beam.beam_search`.
      temperature, top_k, top_p: of `ops.decoding.sample`.
      extra_len: the most tokens by which a target may be longer than its source, both with eos;
        50 in Vaswani et al., 2017, section 6.1.
      max_len: the most tokens of a target, eos included, whatever the source; None for no limit.

    Raises:
      UserError: for another method, or a length that leaves no room for a token.
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
    """The hypotheses of every source, the best first. The caller compiles it.

    Args:
      apply: the model, see the head of this file.
      source: tokens, with eos at the end, then padding; rows of padding alone are skipped.
      search: the method and its options.
      keys: a random key for each example, which sampling needs.

    Returns:
      `search.beams` hypotheses an example by beam search, else one.

    Raises:
      UserError: if a number of `search` is out of its range.
    """

    def step(cache: Cache, tokens: Array, position: Array) -> tuple[Array, Cache]:
        return apply(cache, tokens, position, method='decode_step')

    room = source.shape[1] + search.extra_len
    room = room if search.max_len is None else min(room, search.max_len)
    lengths = (source != PAD).sum(axis=1)
    limits: dict[str, Any] = {
        'max_len': room,
        'max_lens': jnp.where(lengths > 0, lengths + search.extra_len, 0),
    }
    cache = apply(apply(source, method='encode'), room, method='init_cache')
    if search.method == 'greedy':
        return decoding.greedy(step, cache, **limits)
    if search.method == 'sample':
        assert keys is not None, 'sampling needs keys'
        filters: dict[str, Any] = {
            name: getattr(search, name) for name in ('temperature', 'top_k', 'top_p')
        }
        return decoding.sample(step, cache, keys, **limits, **filters)
    rule: dict[str, Any] = {name: getattr(search, name) for name in ('beams', 'alpha', 'stop')}
    return beam.beam_search(step, cache, **limits, **rule)
