"""A decoder without a network: the logits hang on the example, the position and the whole prefix.

What it remembers of the prefix is one number, which the next token changes; a table of the example
has a row of logits for every such number. `log_prob` says the same in NumPy and float64.
"""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np

BOS, EOS, STATES = 1, 2, 97


def table(batch, vocab=5, scale=2.0, seed=0):
    """The initial state of a search: tables of logits, and an empty memory."""
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
    gains = [
        next_log_probs(cache, example, tokens[:i], warp)[token] for i, token in enumerate(tokens)
    ]
    return float(np.sum(gains))


def next_log_probs(cache, example, prefix, warp=lambda logits: logits):
    """log P(token | prefix) of every token [V]."""
    fast, slow = 0, 0
    for position, token in enumerate([BOS, *prefix]):
        fast, slow = remember(fast, token, position), slow + token
    logits = np.asarray(cache['table'])[example, (fast + slow) % STATES].astype(np.float64)
    logits = warp(logits)
    return logits - np.logaddexp.reduce(logits)
