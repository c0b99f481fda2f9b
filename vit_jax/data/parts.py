"""Examples numbered through several parts, such as shards, one after the other."""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Iterable


class Parts:
    """The place of an example among parts of known sizes."""

    def __init__(self, sizes: Iterable[int]):
        self._ends = list(itertools.accumulate(sizes))

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def locate(self, index: int) -> tuple[int, int]:
        """The part of an example, and its number there."""
        part = bisect.bisect_right(self._ends, index)
        return part, index - (self._ends[part - 1] if part else 0)
