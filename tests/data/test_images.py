"""Files of every kind come out as RGB bytes; damaged ones are named."""

import io
import itertools
import struct
import zlib

import numpy as np
import pytest
from PIL import ExifTags, Image

from vit_jax.data import images
from vit_jax.data.records import BrokenRecord

RGB = np.array(
    [[[255, 0, 0], [0, 255, 0], [0, 0, 255]], [[10, 20, 30], [200, 100, 50], [90, 90, 90]]],
    np.uint8,
)


def encode(image, kind='PNG', **options):
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def decode(data, **options):
    array = images.decode_image(data, name='x', **options)
    assert array.dtype == np.uint8
    return array


@pytest.mark.parametrize(('kind', 'options'), [('PNG', {}), ('WEBP', {'lossless': True})])
def test_lossless_rgb_is_exact(kind, options):
    np.testing.assert_array_equal(decode(encode(Image.fromarray(RGB), kind, **options)), RGB)


def test_jpeg_is_near():
    smooth = np.add.outer(np.arange(32) * 3, np.arange(48) * 2)[..., None] + np.array([0, 20, 40])
    smooth = smooth.astype(np.uint8)
    decoded = decode(encode(Image.fromarray(smooth), 'JPEG', quality=95))
    assert np.abs(decoded.astype(int) - smooth).max() <= 6


def photo(height=45, width=70):
    """Colors that change over few pixels, so that rounding and the upsampling of colors show."""
    waves = np.sin(np.arange(height)[:, None] / 4 + np.arange(width) / 7)
    noise = np.random.default_rng(0).integers(0, 90, (height, width, 3))
    return Image.fromarray((waves[..., None] * (80, 60, 40) + 80 + noise).astype(np.uint8))


@pytest.mark.parametrize('mode', ['RGB', 'L'])
@pytest.mark.parametrize(
    'options', [{}, {'subsampling': 0}, {'subsampling': 1}, {'progressive': True}, {'quality': 20}]
)
def test_the_bytes_of_a_jpeg_are_those_of_pillow(mode, options):
    data = encode(photo().convert(mode), 'JPEG', **options)
    expected = np.asarray(Image.open(io.BytesIO(data)).convert('RGB'))
    np.testing.assert_array_equal(decode(data), expected)
    gray = np.asarray(Image.open(io.BytesIO(data)).convert('L'))
    np.testing.assert_array_equal(decode(data, channels=1)[..., 0], gray)


@pytest.mark.slow
def test_the_bytes_of_photographs_are_those_of_pillow(shared_data):
    for path in sorted((shared_data / 'imagenet_sample').iterdir()):
        expected = np.asarray(Image.open(path).convert('RGB'))
        np.testing.assert_array_equal(decode(path.read_bytes()), expected, err_msg=path.name)


@pytest.mark.parametrize('kind', ['PNG', 'JPEG'])
def test_gray_becomes_three_equal_channels(kind):
    gray = np.full((16, 16), 77, np.uint8)
    np.testing.assert_array_equal(decode(encode(Image.fromarray(gray), kind)), 77)
    assert decode(encode(Image.fromarray(gray), kind)).shape == (16, 16, 3)


def test_gray_on_demand():
    gray = np.arange(6, dtype=np.uint8).reshape(2, 3)
    np.testing.assert_array_equal(decode(encode(Image.fromarray(gray)), channels=1)[..., 0], gray)


def test_fewer_significant_bits_than_sixteen_are_enlarged(caplog, monkeypatch):
    """By the chunk sBIT, unless the writer has enlarged them; without it, nearly black is said."""
    monkeypatch.setattr(images, '_dark_images', itertools.count())
    twelve = np.array([[0, 1, 2048, 4095]], np.uint16)
    plain, whole = (encode(Image.fromarray(x)) for x in (twelve, twelve << 4 | twelve >> 8))
    data = b'sBIT' + bytes([12])
    chunk = struct.pack('>I', 1) + data + struct.pack('>I', zlib.crc32(data))
    expected = np.round(twelve / 4095 * 255).astype(np.uint8)
    for png in (plain, whole):
        with_bits = png[:33] + chunk + png[33:]  # behind the header
        np.testing.assert_array_equal(decode(with_bits)[..., 0], expected)
    dark = np.array([[16, 1024]], np.uint16)  # enlarged, and dark
    png = encode(Image.fromarray(dark))
    assert decode(png[:33] + chunk + png[33:])[..., 0].tolist() == [[0, 4]]
    assert not caplog.text
    assert decode(plain).max() == 16 and decode(plain).max() == 16
    assert len(caplog.messages) == 1 and '4095' in caplog.text


def test_sixteen_bits_are_scaled_not_clipped():
    values = np.array([[0, 257, 128 * 257, 65535, 300, 40_000]], np.uint16)
    decoded = decode(encode(Image.fromarray(values)))
    np.testing.assert_array_equal(decoded[0, :, 0], [0, 1, 128, 255, 1, 156])


def test_black_and_white():
    bits = np.array([[True, False], [False, True]])
    np.testing.assert_array_equal(decode(encode(Image.fromarray(bits)))[..., 0], bits * 255)


def test_transparency_is_laid_over_white():
    rgba = np.zeros((1, 3, 4), np.uint8)
    rgba[0, :, 3] = 0, 255, 128
    np.testing.assert_array_equal(decode(encode(Image.fromarray(rgba)))[0, :, 0], [255, 0, 127])


def translucent(mode):
    """A file of random colors under random transparency."""
    rng = np.random.default_rng(0)
    rgba = Image.fromarray(rng.integers(0, 256, (9, 7, 4), np.uint8))
    if mode == 'P':
        return encode(rgba.convert('RGB').quantize(16), transparency=3)
    if mode == 'RGB':
        return encode(rgba.convert('RGB'), transparency=rgba.getpixel((2, 2))[:3])
    return encode(rgba.convert(mode))


@pytest.mark.parametrize('mode', ['RGBA', 'LA', 'P', 'RGB'])
def test_transparency_is_dropped_as_pillow_does(mode):
    data = translucent(mode)
    over_white = decode(data)
    for channels, target in ((3, 'RGB'), (1, 'L')):
        expected = np.asarray(Image.open(io.BytesIO(data)).convert(target))
        with images.decoding(drop_alpha=True):
            found = decode(data, channels=channels)
        np.testing.assert_array_equal(found.squeeze(), expected)
    with images.decoding(drop_alpha=False):
        np.testing.assert_array_equal(decode(data), over_white)
    with images.decoding(drop_alpha=True):
        assert (decode(data) != over_white).any()


def test_opaque_alpha_changes_nothing():
    rgba = np.concatenate([RGB, np.full((2, 3, 1), 255, np.uint8)], -1)
    np.testing.assert_array_equal(decode(encode(Image.fromarray(rgba))), RGB)


def test_gray_with_alpha():
    la = np.array([[[100, 255], [100, 0]]], np.uint8)
    np.testing.assert_array_equal(decode(encode(Image.fromarray(la)))[0, :, 1], [100, 255])


@pytest.mark.parametrize('transparent', [False, True])
def test_palette(transparent):
    image = Image.fromarray(RGB).quantize(8)
    options = {'transparency': int(np.asarray(image)[0, 0])} if transparent else {}
    expected = RGB.copy()
    if transparent:
        expected[0, 0] = 255
    np.testing.assert_array_equal(decode(encode(image, **options)), expected)


def test_cmyk_jpeg_has_the_colors_of_the_rgb_one():
    solid = Image.new('RGB', (16, 16), (200, 40, 90))
    decoded = decode(encode(solid.convert('CMYK'), 'JPEG', quality=100))
    assert np.abs(decoded.astype(int) - (200, 40, 90)).max() <= 3


@pytest.mark.parametrize('kind', ['PNG', 'JPEG'])
@pytest.mark.parametrize('orientation', range(1, 9))
def test_exif_orientation_is_applied(orientation, kind):
    upright = np.zeros((16, 32, 3), np.uint8)
    upright[:8, :8] = 255  # a white corner, top left
    undo = {
        1: lambda a: a,
        2: lambda a: a[:, ::-1],
        3: lambda a: a[::-1, ::-1],
        4: lambda a: a[::-1],
        5: lambda a: a.swapaxes(0, 1),
        6: lambda a: np.rot90(a, 1),
        7: lambda a: a[::-1, ::-1].swapaxes(0, 1),
        8: lambda a: np.rot90(a, -1),
    }
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = orientation
    stored = Image.fromarray(np.ascontiguousarray(undo[orientation](upright)))
    np.testing.assert_allclose(decode(encode(stored, kind, exif=exif)), upright, atol=1)


@pytest.mark.filterwarnings('ignore:Corrupt EXIF')
def test_damaged_exif_does_no_harm():
    data = encode(Image.fromarray(RGB), exif=b'Exif\0\0II*\0\xff\xff\xff\xff')
    np.testing.assert_array_equal(decode(data), RGB)


@pytest.mark.filterwarnings('ignore:Corrupt EXIF')
def test_damaged_tags_beside_the_orientation_do_no_harm(monkeypatch):
    """Pillow fails in writing the tags again; the image has been turned by then."""
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = 3
    data = encode(Image.fromarray(np.ascontiguousarray(RGB[::-1, ::-1])), exif=exif)
    monkeypatch.setattr(Image.Exif, 'tobytes', lambda self, offset=8: struct.pack('<H', -1))
    np.testing.assert_array_equal(decode(data), RGB)


def broken(data):
    with pytest.raises(BrokenRecord, match=r'^photo\.jpg: ') as error:
        images.decode_image(data, name='photo.jpg')
    return str(error.value)


@pytest.mark.parametrize('kind', images.FORMATS)
def test_truncated_files_are_broken(kind):
    noise = np.random.default_rng(0).integers(0, 256, (64, 64, 3), np.uint8)
    data = encode(Image.fromarray(noise), kind)
    broken(data[: len(data) // 2])


@pytest.mark.fault(33)
def test_a_jpeg_that_libjpeg_warns_of_is_broken():
    """Bytes that belong to no block are what a flipped bit leaves behind; Pillow takes them."""
    data = encode(photo(), 'JPEG')
    damaged = data[:-2] + b'more' + data[-2:]
    np.testing.assert_array_equal(np.asarray(Image.open(io.BytesIO(damaged))), decode(data))
    assert 'extraneous bytes' in broken(damaged)


@pytest.mark.parametrize('data', [b'', b'no image', b'\xff\xd8\xff\xe0 and then nothing'])
def test_other_bytes_are_broken(data):
    broken(data)


def test_other_formats_are_not_tried():
    broken(encode(Image.fromarray(RGB), 'BMP'))
    broken(encode(Image.fromarray(RGB), 'TIFF'))


@pytest.mark.parametrize('side', [8193, 20_000])
def test_bombs_are_refused_before_decoding(side):
    """A PNG of some kilobytes that declares `side`^2 pixels."""

    def chunk(kind, body):
        tail = struct.pack('>I', zlib.crc32(kind + body))
        return struct.pack('>I', len(body)) + kind + body + tail

    header = struct.pack('>IIBBBBB', side, side, 1, 0, 0, 0, 0)
    body = zlib.compress(bytes(1000), 9)
    bomb = (
        b'\x89PNG\r\n\x1a\n' + chunk(b'IHDR', header) + chunk(b'IDAT', body) + chunk(b'IEND', b'')
    )
    assert 'pixels' in broken(bomb)
