"""Images of which a window can be made without the rest."""

from __future__ import annotations

import abc
from typing import Any

import numpy as np


class OnDemand(abc.ABC):
    """An image that is made when it is read, whole or a window of it.

    Attributes:
      shape: of the image, (H, W, channels).
    """

    ndim = 3
    dtype = np.dtype(np.uint8)
    shape: tuple[int, int, int]

    @abc.abstractmethod
    def window(self, y: int, x: int, height: int, width: int) -> np.ndarray:
        """Make the window of this size with its upper left corner at (y, x)."""

    @abc.abstractmethod
    def whole(self) -> np.ndarray:
        """Make the whole image."""

    def __getitem__(self, key: Any) -> np.ndarray:
        """A window, if `key` is two slices without steps; else an element of the whole image."""
        if not _is_window(key):
            return self.whole()[key]
        height, width, _ = self.shape
        (y, bottom, _), (x, right, _) = key[0].indices(height), key[1].indices(width)
        return self.window(y, x, bottom - y, right - x)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.asarray(self.whole(), dtype)


def _is_window(key: Any) -> bool:
    return (
        isinstance(key, tuple)
        and len(key) == 2
        and all(isinstance(k, slice) and k.step is None for k in key)
    )
