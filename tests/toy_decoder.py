"""A decoder without a network: the logits hang on the example, the position and the whole prefix.

What it remembers of the prefix is one number, which the next token changes; a table of the example
has a row of logits for every such number. `log_prob` says the same in NumPy and float64.
"""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np

BOS, EOS, STATES = 1, 2, 97


def table(batch, vocab=5, scale=2.0, seed=0):
    """What a search starts from: tables of logits, and a memory of nothing."""
    logits = np.random.default_rng(seed).normal(size=(batch, STATES, vocab)) * scale
    memory = {'fast': jnp.zeros((batch, 1), jnp.int32), 'slow': jnp.zeros((batch,), jnp.int32)}
    return {'table': jnp.asarray(logits, jnp.float32), 'memory': memory}


def remember(memory, token, position):
    return (memory * 5 + token * 3 + position + 1) % STATES


def step(cache, tokens, position):
    fast = remember(cache['memory']['fast'], tokens[:, None], position)
    slow = cache['memory']['slow'] + tokens
    state = (fast[:, 0] + slow) % STATES
    logits = jnp.take_along_axis(cache['table'], state[:, None, None], axis=1)[:, 0]
    return logits, {'table': cache['table'], 'memory': {'fast': fast, 'slow': slow}}


def log_prob(cache, example, tokens, warp=lambda logits: logits):
    """log P(tokens) of the example, each step's logits passed through `warp`."""
    logits = np.asarray(cache['table'][example], np.float64)
    fast, slow, total = 0, 0, 0.0
    for position, (read, said) in enumerate(zip([BOS, *tokens], tokens, strict=False)):
        fast, slow = remember(fast, read, position), slow + read
        row = warp(logits[(fast + slow) % STATES])
        total += row[said] - np.logaddexp.reduce(row)
    return total
