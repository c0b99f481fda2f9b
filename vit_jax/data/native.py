"""Windows of JPEG files and resized images by compiled loops, where a C compiler was at hand.

    native.decode_window(data, (height, width), np.s_[10:234, 20:244], 3)
    native.resample(image, down, across, slack)

Installing the package compiles `_native.c` if there is a C compiler, and goes on without it if not.
The images are the same either way, bit by bit; callers ask `has_windows` and `can_resample`, and
have a slower way.

Windows are decoded by the libjpeg-turbo that Pillow's wheels for Linux and macOS bring. A decoder
has to read all that precedes a window, but it transforms only the blocks in it, and stops below it.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib.util
import pathlib
from typing import Any

import numpy as np
import PIL
import simplejpeg

from vit_jax.array_types import UInt8

# Columns of a block (MCU), by the subsampling of colors; widest ones begin other blocks, too.
BLOCK_COLUMNS = {'444': 8, '422': 16, '420': 16, 'Gray': 8, '440': 8, '411': 32, '441': 8}
WIDEST_BLOCK = 32
MARGIN = 2  # pixels around a window, which the colors of its edge are blended with
LANES = 4  # the most channels of an image that is resampled
# In the order of `Library` in _native.c.
FUNCTIONS = (
    *('jpeg_std_error', 'jpeg_CreateDecompress', 'jpeg_mem_src', 'jpeg_read_header'),
    *('jpeg_start_decompress', 'jpeg_crop_scanline', 'jpeg_skip_scanlines', 'jpeg_read_scanlines'),
    'jpeg_destroy_decompress',
)
_POINTER, _INT = ctypes.c_void_p, ctypes.c_int
_SIGNATURES = {
    'decode_window': [_POINTER, ctypes.c_char_p, ctypes.c_size_t, *[_INT] * 5, _POINTER],
    'resample': [
        *(_POINTER, ctypes.c_ssize_t, _INT, _INT),
        *(_POINTER, _POINTER, ctypes.c_float, _POINTER, _POINTER),
    ],
}


class _Weights(ctypes.Structure):
    """`Weights` of _native.c."""

    _fields_ = (
        ('starts', _POINTER),
        ('columns', _POINTER),
        ('weights', _POINTER),
        ('rows', _INT),
    )

    @classmethod
    def of(cls, matrix: Any) -> _Weights:
        arrays = matrix.indptr, matrix.indices, matrix.data
        return cls(*(array.ctypes.data for array in arrays), matrix.shape[0])


def has_windows() -> bool:
    """Whether `decode_window` works here."""
    return _compiled() is not None and _libjpeg() is not None


def can_resample(image: np.ndarray) -> bool:
    """Whether `resample` works here, and takes this image [H W C]."""
    return _compiled() is not None and image.dtype == np.uint8 and image.shape[2] <= LANES


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
    block = BLOCK_COLUMNS.get(simplejpeg.decode_jpeg_header(data)[3], WIDEST_BLOCK)
    top, left = max(0, rows.start - MARGIN), max(0, columns.start - MARGIN) // block * block
    right = min(size[1], columns.stop + MARGIN)
    found = np.empty((rows.stop - top, right - left, channels), np.uint8)
    outcome = _compiled().decode_window(
        _libjpeg(), data, len(data), top, left, *found.shape, found.ctypes.data
    )
    if outcome:
        raise ValueError('libjpeg refuses the file, or finds damage')
    return found[rows.start - top :, columns.start - left : columns.stop - left]


def resample(
    image: UInt8[np.ndarray, 'H W C'], down: Any, across: Any, slack: float
) -> UInt8[np.ndarray, 'H2 W2 C']:
    """Multiply rows, then columns, by weights; add `slack` and round down.

    Args:
      image: one that `can_resample`.
      down, across: sparse matrices [H2, H] and [W2, W] in CSR format, float32 with int32 indices.
      slack: added before rounding down.
    """
    _, width, channels = image.shape
    if image.strides[1:] != (channels, 1):
        image = np.ascontiguousarray(image)
    made = np.empty((down.shape[0], across.shape[0], channels), np.uint8)
    sums = np.empty(width * channels + LANES, np.float32)
    weights = [ctypes.byref(_Weights.of(matrix)) for matrix in (down, across)]
    _compiled().resample(
        *(image.ctypes.data, image.strides[0], width, channels),
        *(*weights, slack, sums.ctypes.data, made.ctypes.data),
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
