"""Windows of JPEG files by libjpeg-turbo 3, if it is installed: to the bytes of the whole image.

A decoder has to read all that precedes a window, but it transforms only the blocks in it, and ends
below it. Conda, Homebrew and some distributions have version 3 of the library (`libturbojpeg`); no
wheel has a release of it.
"""

from __future__ import annotations

import ctypes
import functools
import sys
import threading
import weakref

import numpy as np

NAMES = ('libturbojpeg.so.0', 'libturbojpeg.0.dylib', 'libturbojpeg.dylib', 'turbojpeg.dll')
PIXEL_FORMATS = {3: 0, 1: 6}  # RGB and gray, by channels
# Columns of a block (MCU), by the subsampling of colors: 444, 422, 420, gray, 440, 411, 441.
BLOCKS = (8, 16, 16, 8, 8, 32, 8)
ROWS = 2  # above and below a window, which the colors of its edge are blended with
_DECOMPRESS, _SUBSAMPLING, _WIDTH, _HEIGHT = 1, 4, 5, 6  # constants of turbojpeg.h

_local = threading.local()


class _Region(ctypes.Structure):
    _fields_ = [(name, ctypes.c_int) for name in 'xywh']


_FUNCTIONS = {
    'tj3Init': [ctypes.c_int],
    'tj3Destroy': [ctypes.c_void_p],
    'tj3DecompressHeader': [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_size_t],
    'tj3Get': [ctypes.c_void_p, ctypes.c_int],
    'tj3SetCroppingRegion': [ctypes.c_void_p, _Region],
    'tj3Decompress8': [
        *(ctypes.c_void_p, ctypes.c_char_p, ctypes.c_size_t),
        *(ctypes.c_void_p, ctypes.c_int, ctypes.c_int),
    ],
    'tj3GetErrorStr': [ctypes.c_void_p],
}


def decoder() -> Decoder | None:
    """This thread's decoder; None if the library is not installed, or is older than version 3."""
    if not hasattr(_local, 'decoder'):
        turbo = _library()
        _local.decoder = None if turbo is None else Decoder(turbo)
    return _local.decoder


class Decoder:
    """A decoder of the library, for one thread."""

    def __init__(self, turbo: ctypes.CDLL):
        self._turbo, self._handle = turbo, turbo.tj3Init(_DECOMPRESS)
        weakref.finalize(self, turbo.tj3Destroy, self._handle)

    def window(
        self, data: bytes, y: int, x: int, height: int, width: int, channels: int
    ) -> np.ndarray:
        """Decode a window of a JPEG file, uint8 [height, width, channels].

        Args:
          data: the whole file.
          y, x: the upper left corner.
          height, width: of the window, inside of the image.
          channels: 3 for RGB, 1 for the luminance.

        Raises:
          ValueError: if the library refuses the file, or warns of damage down to the window's end.
        """
        turbo, handle = self._turbo, self._handle
        self._check(turbo.tj3DecompressHeader(handle, data, len(data)))
        rows, columns = turbo.tj3Get(handle, _HEIGHT), turbo.tj3Get(handle, _WIDTH)
        if not 0 <= (colors := turbo.tj3Get(handle, _SUBSAMPLING)) < len(BLOCKS):
            raise ValueError('unusual subsampling of colors')
        block = BLOCKS[colors]
        top, bottom = max(0, y - ROWS), min(rows, y + height + ROWS)
        left, right = max(0, x // block - 1) * block, min(columns, x + width + block)
        region = _Region(left, top, right - left, bottom - top)
        self._check(turbo.tj3SetCroppingRegion(handle, region))
        found = np.empty((region.h, region.w, channels), np.uint8)
        memory, kind = found.ctypes.data, PIXEL_FORMATS[channels]
        self._check(turbo.tj3Decompress8(handle, data, len(data), memory, 0, kind))
        return found[y - top :, x - left :][:height, :width]

    def _check(self, result: int) -> None:
        if result:
            raise ValueError(self._turbo.tj3GetErrorStr(self._handle).decode(errors='replace'))


@functools.cache
def _library() -> ctypes.CDLL | None:
    for name in (*(f'{sys.prefix}/lib/{name}' for name in NAMES), *NAMES):
        try:
            return open_library(name)
        except (OSError, AttributeError):
            continue
    return None


def open_library(name: str) -> ctypes.CDLL:
    """The library of a file, for `Decoder`.

    Raises:
      OSError: if it cannot be opened.
      AttributeError: if it is older than version 3.
    """
    turbo = ctypes.CDLL(name)
    for name, arguments in _FUNCTIONS.items():
        getattr(turbo, name).argtypes = arguments
    turbo.tj3Init.restype, turbo.tj3Destroy.restype = ctypes.c_void_p, None
    turbo.tj3GetErrorStr.restype = ctypes.c_char_p
    return turbo
