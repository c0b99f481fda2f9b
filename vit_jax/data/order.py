"""The order of the examples: a shuffle of each epoch that needs no memory."""

from __future__ import annotations

import functools

import numpy as np

ROUNDS = 6  # Luby and Rackoff (1988) need four; tiny data sets a little more,
MIN_HALF_BITS = 3  # and a domain of at least 64, to have all orders equally often


def shuffled(positions: np.ndarray, *, size: int, seed: int, epoch: int) -> np.ndarray:
    """The examples at `positions` of a shuffled epoch of `size` examples.

    A permutation of 0..size-1 for every (seed, epoch): a Feistel network over the next
    power of four, walked along its cycle until the value is inside (Black and Rogaway,
    2002, "Ciphers with arbitrary finite domains"). Each position is computed by itself, so
    that resuming is immediate, and no release of a library can change the order.

    Args:
      positions: integers in 0..size-1, any shape.
      size: number of examples.
      seed: any integer.
      epoch: any integer.

    Returns:
      int64 indices of the shape of `positions`.
    """
    half = max(MIN_HALF_BITS, ((size - 1).bit_length() + 1) // 2)
    keys = _round_keys(seed, epoch)
    index = _feistel(np.asarray(positions, np.uint64).reshape(-1), half, keys)
    while (outside := index >= size).any():
        index[outside] = _feistel(index[outside], half, keys)
    return index.astype(np.int64).reshape(np.shape(positions))


def stream(places: np.ndarray, *, size: int, seed: int) -> np.ndarray:
    """The examples at `places` of training, a sequence of shuffled epochs.

    Args:
      places: integers from 0 up, [n].
      size: number of examples.
      seed: any integer.

    Returns:
      int64 [n].
    """
    epochs, positions = np.divmod(places, size)
    examples = np.empty_like(places)
    for epoch in np.unique(epochs):
        now = epochs == epoch
        examples[now] = shuffled(positions[now], size=size, seed=seed, epoch=int(epoch))
    return examples


@functools.lru_cache
def _round_keys(seed: int, epoch: int) -> tuple[np.ndarray, ...]:
    return tuple(_word(seed, epoch, r) for r in range(ROUNDS))


def _feistel(x: np.ndarray, half: int, keys: tuple[np.ndarray, ...]) -> np.ndarray:
    mask = np.uint64((1 << half) - 1)
    left, right = x >> np.uint64(half), x & mask
    for key in keys:
        left, right = right, left ^ (_mix(right ^ key) & mask)
    return (left << np.uint64(half)) | right


def _mix(x: np.ndarray) -> np.ndarray:
    """The finalizer of SplitMix64 (Steele et al. 2014)."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def _word(*parts: int) -> np.ndarray:
    """Hash integers to one 64-bit word, as an array since numpy wraps these silently."""
    word = np.zeros(1, np.uint64)
    for part in parts:
        word = _mix(word + np.uint64((part + 0x9E3779B97F4A7C15) % 2**64))
    return word
