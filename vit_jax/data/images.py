"""Decoding of image files to RGB bytes: JPEG by libjpeg-turbo, other formats by Pillow.

    with images.decoding(on_demand=True):
        image = images.decode_image(data, name=name)
    image.shape                 # read from the header
    image[10:234, 20:244]       # decodes this window if `native` can, else the whole image

Transforms that begin with a crop get such an image from any source. Transparent images are composed
over white, or, within `decoding(drop_alpha=True)`, lose their alpha as in most other code.
"""

from __future__ import annotations

import abc
import contextlib
import contextvars
import io
import itertools
import logging
import pathlib
import re
from collections.abc import Iterator
from typing import Any

import numpy as np
import simplejpeg
from PIL import ExifTags, Image, ImageOps, UnidentifiedImageError

from vit_jax.data.records import BrokenRecord, Record
from vit_jax.errors import UserError, one_line
from vit_jax.storage import paths

# Few formats on purpose: every decoder is code that runs on untrusted bytes.
FORMATS = ('JPEG', 'PNG', 'WEBP')
MAX_PIXELS = 2**26  # 192 MiB as RGB; a 50 KB PNG can announce more than a gigabyte
MAX_SCANS = 100  # scans of a JPEG; encoders write about ten, and each costs time for all pixels
SEGMENT, METADATA, IMAGE_FOLLOWS = 0xFF, 0xE1, 0xDA  # JPEG markers: prefix, APP1 and SOS
START_OF_IMAGE, END_OF_IMAGE = b'\xff\xd8', b'\xff\xd9'
_SCAN = bytes([SEGMENT, IMAGE_FOLLOWS])
# 0xFF followed by any byte except these is a marker with a length.
_MARKER = re.compile(rb'\xff[^\x00\x01\xd0-\xd7\xff]')
log = logging.getLogger(__name__)
_dark_images = itertools.count()  # 16-bit images; only the first causes a warning
_is_on_demand = contextvars.ContextVar('on_demand', default=False)
_is_dropping_alpha = contextvars.ContextVar('dropping_alpha', default=False)


class OnDemand(abc.ABC):
    """An image that is decoded or resized on access, whole or in a window.

    Attributes:
      shape: Image shape (H, W, channels).
    """

    ndim = 3
    dtype = np.dtype(np.uint8)
    shape: tuple[int, int, int]

    @abc.abstractmethod
    def window(self, y: int, x: int, height: int, width: int) -> np.ndarray:
        """Return the window of this size whose upper left corner is at (y, x)."""

    @abc.abstractmethod
    def whole(self) -> np.ndarray:
        """Return the whole image."""

    def __getitem__(self, key: Any) -> np.ndarray:
        """Return a window if `key` is two slices without steps; else index the whole image."""
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


@contextlib.contextmanager
def decoding(*, on_demand: bool = False, drop_alpha: bool = False) -> Iterator[None]:
    """Set options of `decode_image` within this context.

    Args:
      on_demand: Whether to return an `Encoded` JPEG, which is decoded later.
      drop_alpha: Whether to ignore transparency, like Pillow's `convert('RGB')` with which timm and
        transformers read files.
    """
    demand, alpha = _is_on_demand.set(on_demand), _is_dropping_alpha.set(drop_alpha)
    try:
        yield
    finally:
        _is_on_demand.reset(demand)
        _is_dropping_alpha.reset(alpha)


class Encoded(OnDemand):
    """A JPEG file whose windows can be decoded separately."""

    def __init__(self, data: bytes, name: str, shape: tuple[int, int, int]):
        self._data, self._name, self.shape = data, name, shape

    def window(self, y: int, x: int, height: int, width: int) -> np.ndarray:
        """Decode a window; BrokenRecord if the file is damaged above its lower edge."""
        from vit_jax.data import native  # only JPEG files need it

        window = np.s_[y : y + height, x : x + width]
        if not native.has_windows() or not height or not width:
            return self.whole()[window]
        try:
            return native.decode_window(self._data, self.shape[:2], window, self.shape[2])
        except ValueError:  # damage, reported by the next line, or a file that simplejpeg can read
            return self.whole()[window]

    def whole(self) -> np.ndarray:
        """Decode the image; BrokenRecord if the file is damaged."""
        with _report_as_broken(self._name, self._data):
            return _whole_jpeg(self._data, self.shape[2])


def read_file(path: pathlib.Path) -> bytes:
    """Read the bytes of an image file; BrokenRecord if it cannot be read."""
    try:
        return paths.read_bytes(path, paths.IMAGE)
    except OSError as error:
        raise BrokenRecord(f'{path}: {error.strerror}') from error


def decode_image(data: bytes, *, name: str, channels: int = 3) -> np.ndarray:
    """Decode a JPEG, PNG or WebP file.

    Gray, palette, CMYK and 16-bit images become 8-bit RGB; transparent images are composed
    over white, unless `drop_alpha` is set; the EXIF orientation is applied.

    Args:
      data: Encoded bytes.
      name: Name of the image, for messages.
      channels: 3 for RGB, 1 for gray.

    Returns:
      uint8 [H, W, channels].

    Raises:
      BrokenRecord: if the bytes are not an image in these formats, are damaged or
        truncated, or have more than `MAX_PIXELS` pixels or `MAX_SCANS` scans. Any warning of
        libjpeg counts as damage, such as bytes that belong to no block.
    """
    with _report_as_broken(name, data):
        _check_scans(data)
        size = _size_of_plain_jpeg(data, channels)
        if size is None:
            with Image.open(io.BytesIO(data), formats=FORMATS) as image:
                _check_size(image.height, image.width)
                is_deep = image.mode.startswith('I')
                scale = _scale_of_bits(image, data, name) if is_deep else 1.0
                return _by_pillow(image, channels, scale)
        _check_size(*size)
    encoded = Encoded(data, name, (*size, channels))
    return encoded if _is_on_demand.get() else encoded.whole()  # type: ignore[return-value]


def _check_size(height: int, width: int) -> None:
    if width * height > MAX_PIXELS:
        raise ValueError(f'{width} x {height} pixels, more than {MAX_PIXELS:,} are refused')


def _check_scans(data: bytes) -> None:
    """Raise ValueError if a JPEG has more than MAX_SCANS scans."""
    from vit_jax.data import native  # only JPEG files need it

    if data[:2] != START_OF_IMAGE:
        return
    # What metadata holds, or follows the image, such as a video, may look like scans.
    if native.has_loop('count_pairs'):  # without Python's lock
        count = native.call_loop('count_pairs', data, len(data), SEGMENT, IMAGE_FOLLOWS)
    else:
        count = data.count(_SCAN)
    if count > MAX_SCANS and _has_many_scans(data):
        raise ValueError(f'more than {MAX_SCANS} scans are refused')


def _has_many_scans(jpeg: bytes) -> bool:
    """Return whether a JPEG's first image has more than MAX_SCANS scans, by its markers."""
    scans, position = 0, 2
    while scans <= MAX_SCANS and (marker := _MARKER.search(jpeg, position)):
        position = marker.end()
        if marker[0] == END_OF_IMAGE:
            return False
        scans += marker[0] == _SCAN
        position += int.from_bytes(jpeg[position : position + 2])
    return scans > MAX_SCANS


def convert_image(image: Image.Image | np.ndarray, channels: int = 3) -> np.ndarray:
    """Convert an image in memory to uint8 [H, W, channels], as `decode_image` converts a file.

    Args:
      image: Pillow image, or uint8 array [H, W] or [H, W, 1, 3 or 4].
      channels: 3 for RGB, 1 for gray.

    Raises:
      UserError: for other arrays.
    """
    if isinstance(image, np.ndarray):
        is_image = image.ndim == 2 or (image.ndim == 3 and image.shape[2] in (1, 3, 4))
        if image.dtype != np.uint8 or not is_image or not image.size:
            raise UserError(
                f'an array {image.dtype} {list(image.shape)} is not an image: give uint8 [H, W], '
                '[H, W, 3] or [H, W, 4] with values from 0 to 255, and several images as a list'
            )
        gray = image.ndim == 3 and image.shape[2] == 1
        image = Image.fromarray(image[..., 0] if gray else image)
    return _by_pillow(image.copy(), channels)  # rotated in place


@contextlib.contextmanager
def _report_as_broken(name: str, data: bytes) -> Iterator[None]:
    """Turn any error into a BrokenRecord that names the image."""
    try:
        yield
    except UnidentifiedImageError as error:
        raise BrokenRecord(f'{name}: no {", ".join(FORMATS)} image ({len(data)} bytes)') from error
    except Exception as error:  # Pillow raises OSError, ValueError, SyntaxError, struct.error ...
        raise BrokenRecord(f'{name}: {error or type(error).__name__}') from error


def _whole_jpeg(data: bytes, channels: int) -> np.ndarray:
    try:
        return _turbo_jpeg(data, channels)
    except ValueError as error:
        warning = error
    with Image.open(io.BytesIO(data), formats=FORMATS) as image:
        decode_record = _by_pillow(image, channels)
    if _has_pixels(data, channels):
        raise warning  # Pillow does not pass it on
    return decode_record


def _by_pillow(image: Image.Image, channels: int, scale: float = 1.0) -> np.ndarray:
    image.load()
    _turn_upright(image)
    return _to_array(image, channels, scale)


def _size_of_plain_jpeg(data: bytes, channels: int) -> tuple[int, int] | None:
    """Return (height, width) of a JPEG that libjpeg-turbo and Pillow decode alike, else None.

    Opening the file by Pillow, to look for an orientation, takes ten times as long.
    """
    try:
        height, width, colors, _ = simplejpeg.decode_jpeg_header(data)
        if colors not in (('YCbCr', 'RGB', 'Gray') if channels == 3 else ('Gray',)):
            return None
        if _has_metadata(data):
            with Image.open(io.BytesIO(data), formats=('JPEG',)) as image:
                if image.format != 'JPEG' or _orientation(image) != 1:
                    return None
    except (ValueError, UnidentifiedImageError):
        return None
    return height, width


def _has_metadata(data: bytes) -> bool:
    """Return whether a JPEG has an Exif or XMP segment, which may rotate the image."""
    start = 2
    while len(segment := data[start : start + 4]) == 4 and segment[0] == SEGMENT:
        if segment[1] == IMAGE_FOLLOWS:
            return False
        if segment[1] in (METADATA, SEGMENT):
            break
        start += 2 + int.from_bytes(segment[2:])
    return True  # or the file is malformed, and left to Pillow


def _orientation(image: Image.Image) -> int:
    with contextlib.suppress(Exception):
        return image.getexif().get(ExifTags.Base.Orientation, 1)
    return 1


def _turbo_jpeg(data: bytes, channels: int, strict: bool = True) -> np.ndarray:
    """Decode a file; ValueError if this fails, or if `strict` and libjpeg warns."""
    return simplejpeg.decode_jpeg(data, 'RGB' if channels == 3 else 'GRAY', strict=strict)


def _has_pixels(data: bytes, channels: int) -> bool:
    """Return whether libjpeg-turbo decodes a file to its end, with or without warnings."""
    try:
        _turbo_jpeg(data, channels, strict=False)
    except ValueError:
        return False
    return True


def _turn_upright(image: Image.Image) -> None:
    # In place, pixels are rotated before tags are written, so damaged tags do no harm.
    with contextlib.suppress(Exception):
        ImageOps.exif_transpose(image, in_place=True)


def _to_array(image: Image.Image, channels: int, scale: float = 1.0) -> np.ndarray:
    if image.mode.startswith('I'):
        image = Image.fromarray(_to_bytes(np.asarray(image) * scale))
    if image.has_transparency_data and not _is_dropping_alpha.get():
        image = image.convert('RGBA')
        image = Image.alpha_composite(Image.new('RGBA', image.size, 'white'), image)
    array = np.asarray(image.convert('RGB' if channels == 3 else 'L'))
    return array if channels == 3 else array[..., None]


def _scale_of_bits(image: Image.Image, png: bytes, name: str) -> float:
    """Return the factor that scales gray values of a 16-bit PNG with fewer significant bits.

    By the standard the writer scales them already, so that values are multiples or repeat bits.
    """
    values = np.asarray(image)
    largest = int(values.max(initial=0))
    position = png.find(b'sBIT', 8, max(png.find(b'IDAT'), 8))
    bits = png[position + 4] if position > 0 else 16
    if 0 < bits < 16 and largest < 2**bits and (values % 2 ** (16 - bits)).any():
        return 65535 / (2**bits - 1)
    if 0 < largest < 2**12 and bits == 16 and not next(_dark_images):
        log.warning(
            '%s: nearly black: its 16-bit pixels are at most %d; if they have only 12 bits, '
            'multiply them by 16',
            *(name, largest),
        )
    return 1.0


def _to_bytes(sixteen_bits: np.ndarray) -> np.ndarray:
    return np.round(sixteen_bits / 257).astype(np.uint8)


def read_values(path: pathlib.Path, *, colors: bool) -> np.ndarray:
    """Read the unconverted pixel values of a PNG file, such as class numbers.

    Args:
      path: Path of the file.
      colors: Whether to read RGB from any file, ignoring transparency, instead of unscaled gray
        values and palette indices.

    Returns:
      int64 [H W 3] for `colors`, else [H W], or [H W C] for a file with colors.

    Raises:
      BrokenRecord: if the file cannot be read, or has more than `MAX_PIXELS` pixels.
    """
    data = read_file(path)
    try:
        with Image.open(io.BytesIO(data), formats=('PNG',)) as image:
            _check_size(image.height, image.width)
            scale = 1 if colors or image.mode != 'L' else _gray_scale(data)
            values = np.asarray(image.convert('RGB') if colors else image)
    except Exception as error:  # Pillow raises OSError, ValueError, SyntaxError, struct.error ...
        raise BrokenRecord(f'{path}: {one_line(str(error))}') from error
    return values.astype(np.int64) // scale


def _gray_scale(png: bytes) -> int:
    """Return the factor by which Pillow scales 2-bit and 4-bit gray values to bytes; else 1."""
    depth = png[24]  # in the header, which comes first
    return 255 // (2**depth - 1) if depth in (2, 4) else 1


def decode_record(record: Record, name: str) -> Record:
    """Decode the image of a record.

    Args:
      record: Record whose `image` may be the bytes of a file; `channels` is 1 for gray images.
      name: Name of the record, for messages.

    Raises:
      BrokenRecord: see `decode_image`.
    """
    if not isinstance(data := record.get('image'), bytes):
        return record
    fields = dict(record)
    channels = fields.pop('channels', 3)
    return fields | {'image': decode_image(data, name=name, channels=channels)}


def as_png(record: Record) -> Record:
    """Encode the image of a record as PNG; arrays with other channels or dtypes stay."""
    image = record.get('image')
    if image is None or image.ndim != 3 or image.shape[-1] not in (1, 3) or image.dtype != np.uint8:
        return record
    file = io.BytesIO()
    gray = image.shape[-1] == 1
    Image.fromarray(image[..., 0] if gray else image).save(file, 'PNG')
    return record | {'image': file.getvalue()} | ({'channels': 1} if gray else {})
