"""Decoding of image files to RGB bytes: JPEG by libjpeg-turbo, all else by Pillow.

    with images.decoding(on_demand=True):
        image = images.decode_image(data, name=name)
    image.shape                 # of the header
    image[10:234, 20:244]       # decodes this window if `native` can, else the whole image

Transforms that begin with a crop get such an image from any source. Transparency is laid over
white, or, within `decoding(drop_alpha=True)`, left out as in most other code.
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

# Named one by one: each further decoder is code that runs on untrusted bytes.
FORMATS = ('JPEG', 'PNG', 'WEBP')
MAX_PIXELS = 2**26  # 192 MiB as RGB; a 50 KB PNG can announce more than a gigabyte
MAX_SCANS = 100  # of a JPEG; encoders write about ten, and each takes time for all pixels
SEGMENT, METADATA, IMAGE_FOLLOWS = 0xFF, 0xE1, 0xDA  # of a JPEG file: markers APP1 and SOS
START_OF_IMAGE, END_OF_IMAGE = b'\xff\xd8', b'\xff\xd9'
_SCAN = bytes([SEGMENT, IMAGE_FOLLOWS])
# 255 with another byte than these is a marker with a length.
_MARKER = re.compile(rb'\xff[^\x00\x01\xd0-\xd7\xff]')
log = logging.getLogger(__name__)
_dark_images = itertools.count()  # of 16 bits; only the first causes a warning
_is_on_demand = contextvars.ContextVar('on_demand', default=False)
_is_dropping_alpha = contextvars.ContextVar('dropping_alpha', default=False)


class OnDemand(abc.ABC):
    """An image that is decoded or resized when it is read, whole or a window of it.

    Attributes:
      shape: shape of the image, (H, W, channels).
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


@contextlib.contextmanager
def decoding(*, on_demand: bool = False, drop_alpha: bool = False) -> Iterator[None]:
    """Set how `decode_image` decodes within this context.

    Args:
      on_demand: return an `Encoded` JPEG, which is decoded later.
      drop_alpha: take colors as they are under any transparency. That is Pillow's `convert('RGB')`,
        with which timm and transformers read files.
    """
    demand, alpha = _is_on_demand.set(on_demand), _is_dropping_alpha.set(drop_alpha)
    try:
        yield
    finally:
        _is_on_demand.reset(demand)
        _is_dropping_alpha.reset(alpha)


class Encoded(OnDemand):
    """A JPEG file as an image whose windows can be decoded."""

    def __init__(self, data: bytes, name: str, shape: tuple[int, int, int]):
        self._data, self._name, self.shape = data, name, shape

    def window(self, y: int, x: int, height: int, width: int) -> np.ndarray:
        """Decode a window; BrokenRecord if the file is damaged above its lower edge."""
        from vit_jax.data import native  # only JPEG files need it

        where = np.s_[y : y + height, x : x + width]
        if not native.has_windows() or not height or not width:
            return self.whole()[where]
        try:
            return native.decode_window(self._data, self.shape[:2], where, self.shape[2])
        except ValueError:  # damage, which the next line names, or a file that simplejpeg can read
            return self.whole()[where]

    def whole(self) -> np.ndarray:
        """Decode the image; BrokenRecord if the file is damaged."""
        with _named(self._name, self._data):
            return _whole_jpeg(self._data, self.shape[2])


def read_file(path: pathlib.Path) -> bytes:
    """The bytes of an image's file; BrokenRecord if it cannot be read."""
    try:
        return paths.read_bytes(path, paths.IMAGE)
    except OSError as error:
        raise BrokenRecord(f'{path}: {error.strerror}') from error


def decode_image(data: bytes, *, name: str, channels: int = 3) -> np.ndarray:
    """Decode a JPEG, PNG or WebP file.

    Gray, palette, CMYK and 16-bit images become 8-bit RGB; transparency is laid over
    white, unless `drop_alpha` is set; the EXIF orientation is applied.

    Args:
      data: the encoded bytes.
      name: name of the image, for messages.
      channels: 3 for RGB, 1 for gray.

    Returns:
      uint8 [H, W, channels].

    Raises:
      BrokenRecord: if the bytes are not an image of these formats, are damaged or
        truncated, or have more than `MAX_PIXELS` pixels or `MAX_SCANS` scans. A JPEG file is
        damaged if libjpeg has a warning about it, such as of bytes that belong to no block.
    """
    with _named(name, data):
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
    if native.has('count_pairs'):  # without Python's lock
        count = native.call('count_pairs', data, len(data), SEGMENT, IMAGE_FOLLOWS)
    else:
        count = data.count(_SCAN)
    if count > MAX_SCANS and _has_many_scans(data):
        raise ValueError(f'more than {MAX_SCANS} scans are refused')


def _has_many_scans(jpeg: bytes) -> bool:
    """Whether the first image of a JPEG has more than MAX_SCANS scans, found marker by marker."""
    scans, place = 0, 2
    while scans <= MAX_SCANS and (marker := _MARKER.search(jpeg, place)):
        place = marker.end()
        if marker[0] == END_OF_IMAGE:
            return False
        scans += marker[0] == _SCAN
        place += int.from_bytes(jpeg[place : place + 2])
    return scans > MAX_SCANS


def convert_image(image: Image.Image | np.ndarray, channels: int = 3) -> np.ndarray:
    """Convert an image in memory to uint8 [H, W, channels], as `decode_image` does a file's.

    Args:
      image: Pillow image, or an array uint8 [H, W] or [H, W, 1, 3 or 4].
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
    return _by_pillow(image.copy(), channels)  # it is turned in place


@contextlib.contextmanager
def _named(name: str, data: bytes) -> Iterator[None]:
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
        decoded = _by_pillow(image, channels)
    if _has_pixels(data, channels):
        raise warning  # Pillow does not pass it on
    return decoded


def _by_pillow(image: Image.Image, channels: int, scale: float = 1.0) -> np.ndarray:
    image.load()
    _turn_upright(image)
    return _to_array(image, channels, scale)


def _size_of_plain_jpeg(data: bytes, channels: int) -> tuple[int, int] | None:
    """(height, width) of a JPEG that libjpeg-turbo decodes to the same image as Pillow, else None.

    Opening the file by Pillow, as is done if there may be an orientation, takes ten times as long.
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
    """Whether a JPEG has a segment of Exif or XMP, which may turn the image."""
    start = 2
    while len(segment := data[start : start + 4]) == 4 and segment[0] == SEGMENT:
        if segment[1] == IMAGE_FOLLOWS:
            return False
        if segment[1] in (METADATA, SEGMENT):
            break
        start += 2 + int.from_bytes(segment[2:])
    return True  # or this is not understood, and left to Pillow


def _orientation(image: Image.Image) -> int:
    with contextlib.suppress(Exception):
        return image.getexif().get(ExifTags.Base.Orientation, 1)
    return 1


def _turbo_jpeg(data: bytes, channels: int, strict: bool = True) -> np.ndarray:
    """Decode a file; ValueError if that fails, or if `strict` and libjpeg has a warning."""
    return simplejpeg.decode_jpeg(data, 'RGB' if channels == 3 else 'GRAY', strict=strict)


def _has_pixels(data: bytes, channels: int) -> bool:
    """Whether libjpeg-turbo decodes a file to its end, with warnings or without."""
    try:
        _turbo_jpeg(data, channels, strict=False)
    except ValueError:
        return False
    return True


def _turn_upright(image: Image.Image) -> None:
    # In place, pixels are rotated before tags are written, so that damaged tags do no harm.
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
    """The factor that enlarges the gray values of a PNG of 16 bits, of which fewer are significant.

    By the standard a writer enlarges them itself, so that they are multiples or repeat their bits.
    """
    values = np.asarray(image)
    largest = int(values.max(initial=0))
    place = png.find(b'sBIT', 8, max(png.find(b'IDAT'), 8))
    bits = png[place + 4] if place > 0 else 16
    if 0 < bits < 16 and largest < 2**bits and (values % 2 ** (16 - bits)).any():
        return 65535 / (2**bits - 1)
    if 0 < largest < 2**12 and bits == 16 and not next(_dark_images):
        log.warning(
            '%s: its pixels of 16 bits are at most %d, nearly black; if they have only 12 bits, '
            'multiply them by 16',
            *(name, largest),
        )
    return 1.0


def _to_bytes(sixteen_bits: np.ndarray) -> np.ndarray:
    return np.round(sixteen_bits / 257).astype(np.uint8)


def read_values(path: pathlib.Path, *, colors: bool) -> np.ndarray:
    """The values of the pixels of a PNG file as they are, such as the numbers of classes.

    Args:
      path: path of the file.
      colors: read the colors of any file, under any transparency; else gray values and indices of
        palettes, which are not scaled to bytes.

    Returns:
      int64 [H W 3] of colors, else [H W], or [H W C] of a file that has colors.

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
    """The factor by which Pillow scales gray values of 2 and 4 bits to bytes; 1 for others."""
    depth = png[24]  # of the header, which comes first
    return 255 // (2**depth - 1) if depth in (2, 4) else 1


def decoded(record: Record, name: str) -> Record:
    """A record with its image as pixels.

    Args:
      record: its `image`, if it has one, is the bytes of a file; `channels` is 1 for gray images.
      name: name of the record, for messages.

    Raises:
      BrokenRecord: see `decode_image`.
    """
    if not isinstance(data := record.get('image'), bytes):
        return record
    rest = dict(record)
    channels = rest.pop('channels', 3)
    return rest | {'image': decode_image(data, name=name, channels=channels)}


def as_png(record: Record) -> Record:
    """The inverse of `decoded`; an image with other channels or dtypes stays an array."""
    image = record.get('image')
    if image is None or image.ndim != 3 or image.shape[-1] not in (1, 3) or image.dtype != np.uint8:
        return record
    file = io.BytesIO()
    gray = image.shape[-1] == 1
    Image.fromarray(image[..., 0] if gray else image).save(file, 'PNG')
    return record | {'image': file.getvalue()} | ({'channels': 1} if gray else {})
