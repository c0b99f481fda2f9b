"""The search for the largest number that fits, where each trial compiles a program."""

from __future__ import annotations

from collections.abc import Callable


def largest(fits: Callable[[int], bool], first: int, most: int | None = None) -> int:
    """The largest number that fits, to an eighth; 0 if 1 does not.

    Args:
      fits: whether a number does; called once for each.
      first: the number to begin with, at least 1.
      most: the largest that may be returned, at least `first`.
    """
    low, high, tried = 0, None, first
    while tried and (high is None or high - low > max(low // 8, 1)):
        if fits(tried):
            low = tried
        else:
            high = tried
        if high is not None:
            tried = (low + high) // 2
        elif low == most:
            break
        else:
            tried = 2 * low if most is None else min(2 * low, most)
    return low
