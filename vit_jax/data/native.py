"""Compiled loops that decode windows of JPEG files and transform images, if a C compiler exists.

    native.decode_window(data, (height, width), np.s_[10:234, 20:244], 3)
    native.resample(image, down, across, slack)
    native.call_loop('to_gray', image, pixels, output)

Installing the package compiles `_native.c` if there is a C compiler, and continues otherwise. The
images are bit-identical either way; callers check `has_windows`, `can_resample` and `has`, and have
a slower path. The loops release Python's lock.

Windows are decoded by the libjpeg-turbo in Pillow's wheels for Linux and macOS. A decoder has to
read everything before a window, but transforms only the blocks inside, and stops below it.
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

BLOCK = 32  # most columns of a block (MCU), which is decoded as a unit
MARGIN = 2  # pixels around a window that are blended into the colors at its edge
LANES = 4  # most channels of an image that can be resampled
# Same order as `Library` in _native.c.
FUNCTIONS = (
    *('jpeg_std_error', 'jpeg_CreateDecompress', 'jpeg_mem_src', 'jpeg_read_header'),
    *('jpeg_start_decompress', 'jpeg_crop_scanline', 'jpeg_skip_scanlines', 'jpeg_read_scanlines'),
    'jpeg_destroy_decompress',
)
_POINTER, _INT, _SIZE = ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t


class Weights(ctypes.Structure):
    """Weights that sum an image's old rows or columns to new ones; `Weights` of _native.c.

    Attributes:
      arrays: Old rows or columns of each new one, int32 [N, K], and their weights, float32 [N, K].
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
    """Return whether `decode_window` works on this machine."""
    return _load_native() is not None and _load_libjpeg() is not None


def can_resample(image: np.ndarray) -> bool:
    """Return whether `resample` works on this machine and supports this image [H W C]."""
    return _load_native() is not None and image.dtype == np.uint8 and image.shape[2] <= LANES


def has_loop(name: str) -> bool:
    """Return whether the loop of this name was compiled, see `_SIGNATURES`."""
    return hasattr(_load_native(), name)


def call_loop(name: str, *arguments: Any) -> Any:
    """Call a compiled loop by name; contiguous arrays are passed by address."""
    values = [a.ctypes.data if type(a) is np.ndarray else a for a in arguments]
    return getattr(_load_native(), name)(*values)


def decode_window(
    data: bytes, size: tuple[int, int], window: tuple[slice, slice], channels: int
) -> UInt8[np.ndarray, 'H W C']:
    """Decode a window of a JPEG file to the same bytes as in the whole image.

    Args:
      data: Content of the file.
      size: (height, width) of the image.
      window: Nonempty rows and columns within the image.
      channels: 3 for RGB, 1 for luminance.

    Raises:
      ValueError: if libjpeg refuses the file, or warns of damage above the window's end.
    """
    rows, columns = window
    top, start = max(0, rows.start - MARGIN), max(0, columns.start - MARGIN)
    height, width = rows.stop - top, min(size[1], columns.stop + MARGIN) - start
    buffer = np.empty(height * (width + BLOCK) * channels, np.uint8)
    first_column = _load_native().decode_window(
        *(_load_libjpeg(), data, len(data), top, start, height, width, BLOCK, channels),
        buffer.ctypes.data,
    )
    if first_column < 0:
        raise ValueError('libjpeg refuses the file, or finds damage')
    shape = height, start + width - first_column, channels
    decoded = buffer[: math.prod(shape)].reshape(shape)
    return decoded[rows.start - top :, columns.start - first_column : columns.stop - first_column]


def resample(
    image: UInt8[np.ndarray, 'H W C'], down: Weights, across: Weights, slack: float
) -> UInt8[np.ndarray, 'H2 W2 C']:
    """Multiply rows, then columns, by weights; add `slack` and round down.

    Args:
      image: Image that `can_resample`.
      down, across: Weights of its H rows and W columns.
      slack: Number added before rounding down.
    """
    _, width, channels = image.shape
    if image.strides[1:] != (channels, 1):
        image = np.ascontiguousarray(image)
    output = np.empty((down.count, across.count, channels), np.uint8)
    sums = np.empty((width + across.count) * channels + 2 * LANES, np.float32)
    _load_native().resample(
        *(image.ctypes.data, image.strides[0], width, channels),
        *(down, across, slack, sums.ctypes.data, output.ctypes.data),
    )
    return output


@functools.cache
def _load_native() -> Any:
    """Load the compiled code; None if it is missing."""
    spec = importlib.util.find_spec('._native', __package__)
    if spec is None or spec.origin is None:
        return None
    try:
        library = ctypes.CDLL(spec.origin)
    except OSError:  # compiled for another system
        return None
    for name, arguments in _SIGNATURES.items():
        with contextlib.suppress(AttributeError):  # compiled by an older version
            getattr(library, name).argtypes = arguments
    return library


@functools.cache
def _load_libjpeg() -> ctypes.Array | None:
    """Return the addresses of `FUNCTIONS` in Pillow's libjpeg-turbo; None if it has none."""
    package = pathlib.Path(PIL.__file__).parent
    for path in (*package.parent.glob('pillow.libs/libjpeg*'), *package.glob('.dylibs/libjpeg*')):
        with contextlib.suppress(OSError, AttributeError):
            library = ctypes.CDLL(str(path))
            addresses = [ctypes.cast(getattr(library, name), _POINTER) for name in FUNCTIONS]
            return (_POINTER * len(addresses))(*addresses)
    return None
