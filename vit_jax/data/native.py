"""Compiled loops that decode windows of JPEG files and change images, if there was a C compiler.

    native.decode_window(data, (height, width), np.s_[10:234, 20:244], 3)
    native.resample(image, down, across, slack)
    native.call('to_gray', image, pixels, output)

Installing the package compiles `_native.c` if there is a C compiler, and goes on without it if not.
The images are the same either way, bit by bit; callers ask `has_windows`, `can_resample` and `has`,
and have a slower way. Python's lock is free while they run.

Windows are decoded by the libjpeg-turbo that Pillow's wheels for Linux and macOS bring. A decoder
has to read all that precedes a window, but it transforms only the blocks in it, and stops below it.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib.util
import math
import pathlib
from typing import Any

import numpy as np
import PIL

from vit_jax.array_types import Float, Int, UInt8

BLOCK = 32  # the most columns of a block (MCU), which are decoded together
MARGIN = 2  # pixels around a window, which the colors of its edge are blended with
LANES = 4  # the most channels of an image that is resampled
# In the order of `Library` in _native.c.
FUNCTIONS = (
    *('jpeg_std_error', 'jpeg_CreateDecompress', 'jpeg_mem_src', 'jpeg_read_header'),
    *('jpeg_start_decompress', 'jpeg_crop_scanline', 'jpeg_skip_scanlines', 'jpeg_read_scanlines'),
    'jpeg_destroy_decompress',
)
_POINTER, _INT, _SIZE = ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t


class Weights(ctypes.Structure):
    """Weights of an image's rows or columns, of which each new one is a sum.

    This is `Weights` of _native.c.

    Attributes:
      arrays: the old rows or columns of each new one, int32 [N, K], and their weights, float32
        [N, K].
    """

    _fields_ = (('from', _POINTER), ('weights', _POINTER), ('count', _INT), ('taps', _INT))

    def __init__(self, old: Int[np.ndarray, 'N K'], weights: Float[np.ndarray, 'N K']):
        self.arrays = (
            np.ascontiguousarray(old, np.int32),
            np.ascontiguousarray(weights, np.float32),
        )
        super().__init__(*(array.ctypes.data for array in self.arrays), *old.shape)


_SIGNATURES = {
    'decode_window': [_POINTER, ctypes.c_char_p, _SIZE, *[_INT] * 6, _POINTER],
    'resample': [
        *(_POINTER, ctypes.c_ssize_t, _INT, _INT),
        *(ctypes.POINTER(Weights), ctypes.POINTER(Weights), ctypes.c_float, _POINTER, _POINTER),
    ],
    'count_pairs': [ctypes.c_char_p, _SIZE, _INT, _INT],
    'mirror': [_POINTER, ctypes.c_ssize_t, _INT, _INT, _INT, _POINTER],
    'look_up': [_POINTER, _SIZE, _INT, _POINTER, _INT, _POINTER],
    'count_values': [_POINTER, _SIZE, _INT, _POINTER],
    'blend': [_POINTER, _POINTER, _SIZE, ctypes.c_float, _POINTER],
    'to_gray': [_POINTER, _SIZE, _POINTER],
    'smooth': [_POINTER, _INT, _INT, _INT, _POINTER],
    'move': [_POINTER, _INT, _INT, _INT, _POINTER, _INT, _POINTER],
}


def has_windows() -> bool:
    """Whether `decode_window` works here."""
    return _compiled() is not None and _libjpeg() is not None


def can_resample(image: np.ndarray) -> bool:
    """Whether `resample` works here, and takes this image [H W C]."""
    return _compiled() is not None and image.dtype == np.uint8 and image.shape[2] <= LANES


def has(name: str) -> bool:
    """Whether the loop of this name was compiled, see `_SIGNATURES`."""
    return hasattr(_compiled(), name)


def call(name: str, *arguments: Any) -> Any:
    """Call a compiled loop by name; contiguous arrays are passed by address."""
    values = [a.ctypes.data if type(a) is np.ndarray else a for a in arguments]
    return getattr(_compiled(), name)(*values)


def decode_window(
    data: bytes, size: tuple[int, int], window: tuple[slice, slice], channels: int
) -> UInt8[np.ndarray, 'H W C']:
    """Decode a window of a JPEG file, to the bytes that it has in the whole image.

    Args:
      data: the whole file.
      size: (height, width) of the image.
      window: its rows and columns, within the image and not empty.
      channels: 3 for RGB, 1 for the luminance.

    Raises:
      ValueError: if libjpeg refuses the file, or warns of damage down to the window's end.
    """
    rows, columns = window
    top, start = max(0, rows.start - MARGIN), max(0, columns.start - MARGIN)
    height, width = rows.stop - top, min(size[1], columns.stop + MARGIN) - start
    room = np.empty(height * (width + BLOCK) * channels, np.uint8)
    left = _compiled().decode_window(
        *(_libjpeg(), data, len(data), top, start, height, width, BLOCK, channels),
        room.ctypes.data,
    )
    if left < 0:
        raise ValueError('libjpeg refuses the file, or finds damage')
    shape = height, start + width - left, channels
    found = room[: math.prod(shape)].reshape(shape)
    return found[rows.start - top :, columns.start - left : columns.stop - left]


def resample(
    image: UInt8[np.ndarray, 'H W C'], down: Weights, across: Weights, slack: float
) -> UInt8[np.ndarray, 'H2 W2 C']:
    """Multiply rows, then columns, by weights; add `slack` and round down.

    Args:
      image: one that `can_resample`.
      down, across: weights of its H rows and W columns.
      slack: added before rounding down.
    """
    _, width, channels = image.shape
    if image.strides[1:] != (channels, 1):
        image = np.ascontiguousarray(image)
    made = np.empty((down.count, across.count, channels), np.uint8)
    sums = np.empty((width + across.count) * channels + 2 * LANES, np.float32)
    _compiled().resample(
        *(image.ctypes.data, image.strides[0], width, channels),
        *(down, across, slack, sums.ctypes.data, made.ctypes.data),
    )
    return made


@functools.cache
def _compiled() -> Any:
    """The compiled code; None if there is none."""
    found = importlib.util.find_spec('._native', __package__)
    if found is None or found.origin is None:
        return None
    try:
        code = ctypes.CDLL(found.origin)
    except OSError:  # of another system
        return None
    for name, arguments in _SIGNATURES.items():
        with contextlib.suppress(AttributeError):  # compiled before it was added
            getattr(code, name).argtypes = arguments
    return code


@functools.cache
def _libjpeg() -> ctypes.Array | None:
    """Addresses of `FUNCTIONS` in Pillow's libjpeg-turbo; None if it brings none."""
    here = pathlib.Path(PIL.__file__).parent
    for path in (*here.parent.glob('pillow.libs/libjpeg*'), *here.glob('.dylibs/libjpeg*')):
        with contextlib.suppress(OSError, AttributeError):
            library = ctypes.CDLL(str(path))
            found = [ctypes.cast(getattr(library, name), _POINTER) for name in FUNCTIONS]
            return (_POINTER * len(found))(*found)
    return None
