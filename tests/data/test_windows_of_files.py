"""A crop that comes first decodes its window alone, to the bytes of a crop of the whole image."""

import contextlib
import io
import itertools
import pathlib

import numpy as np
import pytest
from PIL import Image, ImageOps

from vit_jax.config.run import Data
from vit_jax.data import dataset, images, native
from vit_jax.data.plans.base import Examples
from vit_jax.data.records import BrokenRecord, example_rng
from vit_jax.data.sources import open_source
from vit_jax.data.transforms import parse_transforms

KINDS = {
    '420': {},
    '422': {'subsampling': 1},
    '444': {'subsampling': 0},
    'progressive': {'progressive': True},
    'restarts': {'restart_marker_rows': 1},
    'coarse': {'quality': 10},
}


@pytest.fixture(params=['compiled', 'without'])
def loops(request, monkeypatch):
    """The compiled loops, and what takes their place without a C compiler."""
    if request.param == 'without':
        monkeypatch.setattr(native, '_load_native', lambda: None)
    elif not native.has_windows():
        pytest.skip('vit_jax/data/_native.c was not compiled, or Pillow has no libjpeg of its own')


def photo(height=93, width=131):
    waves = np.sin(np.arange(height)[:, None] / 4 + np.arange(width) / 7)
    noise = np.random.default_rng(0).integers(0, 90, (height, width, 3))
    return Image.fromarray((waves[..., None] * (80, 60, 40) + 80 + noise).astype(np.uint8))


def encode(image, kind='JPEG', **options):
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def on_demand(data, **options):
    with images.decoding(on_demand=True):
        return images.decode_image(data, name='photo.jpg', **options)


@pytest.mark.parametrize('mode', ['RGB', 'L'])
@pytest.mark.parametrize('kind', KINDS)
def test_a_window_has_the_bytes_of_the_whole_image(loops, kind, mode):
    data = encode(photo().convert(mode), **KINDS[kind])
    for channels in (3, 1):
        whole = images.decode_image(data, name='photo.jpg', channels=channels)
        image, rng = on_demand(data, channels=channels), np.random.default_rng(1)
        assert image.shape == whole.shape
        for _ in range(60):
            (y, bottom), (x, right) = (np.sort(rng.choice(n + 1, 2, False)) for n in (93, 131))
            found = image[y:bottom, x:right]
            np.testing.assert_array_equal(found, whole[y:bottom, x:right])
            if native.has_windows() and isinstance(image, images.Encoded):  # and not by the whole
                window = np.s_[y:bottom, x:right]
                alone = native.decode_window(data, whole.shape[:2], window, channels)
                np.testing.assert_array_equal(alone, found)
        np.testing.assert_array_equal(image[:, :], whole)
        np.testing.assert_array_equal(image[:, ::-1, 0], whole[:, ::-1, 0])
        np.testing.assert_array_equal(np.asarray(image), whole)


SPECS = (
    *('inception_crop_tf(24)|flip', 'inception_crop(24)', 'random_crop(40)', 'central_crop(40)'),
    *('resize_small_tf(60)|central_crop(44)', "resize_tf(50, 'bilinear')|random_crop(30)"),
    *('resize_small_tf(150)|inception_crop(24)', "drop_alpha|central_crop(40, rounding='even')"),
    *('central_crop((100, 141), fill=(1, 2, 3))', 'resize_tf(50)|central_crop((60, 30), fill=7)'),
)


@pytest.mark.parametrize('spec', SPECS)
def test_transforms_that_begin_with_a_crop_make_the_same_of_both(loops, spec):
    data, transforms = encode(photo()), parse_transforms(spec)
    assert transforms.crop_first
    for draw in range(5):
        found, expected = (
            transforms({'image': image, 'label': 0}, example_rng(0, draw))['image']
            for image in (on_demand(data), images.decode_image(data, name='photo.jpg'))
        )
        np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize(
    'spec',
    [
        '',
        'flip|random_crop(40)',
        "keep('image')",
        'resize_tf(30)',
        'resize_tf(30)|flip|central_crop(20)',
    ],
)
def test_other_transforms_get_the_pixels(spec):
    assert not parse_transforms(spec).crop_first


def test_files_that_pillow_decodes_are_decoded_at_once():
    upside_down = Image.Exif()
    upside_down[0x0112] = 3
    turned = b'<x:xmpmeta tiff:Orientation="6"></x:xmpmeta>'
    for data in (
        encode(photo(), 'PNG'),
        encode(photo().convert('CMYK')),
        encode(photo(), exif=upside_down),
        encode(photo(), xmp=turned),
    ):
        found = on_demand(data)
        assert isinstance(found, np.ndarray)
        with Image.open(io.BytesIO(data)) as image:
            expected = ImageOps.exif_transpose(image).convert('RGB')
        np.testing.assert_array_equal(found, np.asarray(expected))


def test_segments_before_the_image_leave_it_as_it_is():
    data = encode(photo(), comment=b'a comment', icc_profile=bytes(300), dpi=(72, 72))
    plain = images.decode_image(encode(photo()), name='photo.jpg')
    upright = Image.Exif()
    upright[0x010E] = 'a description'
    described = encode(photo(), exif=upright)
    filled = data[:2] + b'\xff' + data[2:]  # bytes of filling may precede any marker
    for file in (data, described, filled):
        assert isinstance(on_demand(file), images.Encoded)
        np.testing.assert_array_equal(images.decode_image(file, name='photo.jpg'), plain)


@pytest.fixture
def folder(tmp_path):
    """Twelve photographs, the last of which is cut off after its first rows."""
    (tmp_path / 'kind').mkdir()
    for number in range(12):
        (tmp_path / 'kind' / f'{number:02}.jpg').write_bytes(encode(photo(), quality=90))
    cut = tmp_path / 'kind' / '11.jpg'
    cut.write_bytes(cut.read_bytes()[:4000])
    return tmp_path


def test_a_damaged_file_is_counted_and_replaced(loops, folder):
    source = open_source(f'folder:{folder}', 'train')
    (index,) = (i for i in range(12) if pathlib.Path(source.record_name(i)).stem == '11')
    examples = Examples(source, parse_transforms('central_crop(90)'))
    with pytest.raises(BrokenRecord, match=r'11\.jpg'):
        examples.read(index)
    assert list(source.broken) == [index] and '11.jpg' in source.broken[index]
    assert examples.first_readable(index)[0] == (index + 1) % 12


def test_files_are_read_one_after_the_other_before_they_are_decoded(folder):
    (folder / 'kind' / '03.jpg').write_bytes(encode(photo(), 'PNG'))  # by its content
    (folder / 'kind' / '07.jpg').write_bytes(b'')
    source = open_source(f'folder:{folder}', 'train')
    number = {pathlib.Path(source.record_name(i)).stem: i for i in range(12)}
    examples = Examples(source, parse_transforms('inception_crop_tf(24)'))
    for names, found in (
        (['01', '02', '05'], ['01', '02', '05']),
        (['01', '03', '02'], ['01', '03']),  # a PNG is decoded at once
        (['02', '07', '01'], ['02']),
    ):
        opened = examples.read_files([number[name] for name in names])
        assert list(opened) == [number[name] for name in found]
    first = opened[number['02']]
    assert isinstance(first['image'], images.Encoded)
    for record in (None, first):  # from its file, or as it was read
        made = examples.first_readable(number['02'], 0, 5, record)[1]['image']
        np.testing.assert_array_equal(made, examples.read(number['02'], 0, 5)['image'])
    assert not Examples(source, parse_transforms('central_crop(9)'), cache=True).read_files(
        range(12)
    )


def test_batches_are_the_same_however_many_files_are_read_together(folder, monkeypatch):
    def batches(together):
        monkeypatch.setattr(dataset, 'TOGETHER', together)
        data = dataset.open_dataset(
            Data(source=f'folder:{folder}', split='train', transforms='inception_crop_tf(24)'), 10
        )
        with contextlib.closing(data.train_batches()) as made:
            return list(itertools.islice(made, 3))

    for one, other in zip(batches(1), batches(4), strict=True):
        for name, rows in one.items():
            np.testing.assert_array_equal(rows, other[name])
