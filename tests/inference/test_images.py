"""A user's files as the model gets them."""

import re

import numpy as np
import pytest
from helpers.messages import numbers, says
from ml_collections import ConfigDict
from PIL import Image

from vit_jax.data.dataset import raw_images
from vit_jax.data.sources import open_source
from vit_jax.errors import UserError
from vit_jax.inference import images as image_files
from vit_jax.interop.trained import TrainedModel


@pytest.fixture
def rng():
    return np.random.default_rng(0)


def run_on(source, split='train', transforms='', task='classify'):
    data = {'source': source, 'split': split, 'transforms': transforms}
    sections = {'data': data | {'split': 'nowhere'}, 'evals': {'test': data}}
    named = {'model': {'name': 'vit'}, 'task': {'name': task}}
    config = ConfigDict({**sections, **named, 'batch_size': 8})
    image = raw_images(open_source(source, split))
    return TrainedModel({}, config, (8, 8), '', step=0, raw_images=image)


def test_files_of_folders_and_patterns(tmp_path, caplog):
    for name in ('b.PNG', 'a.jpg', 'notes.txt', '.hidden.png', 'sub/c.webp', '[1].png'):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    found = image_files.list_images(
        [str(tmp_path), f'{tmp_path}/**/*.webp', f'{tmp_path}/[1].png', 'missing.png']
    )
    names = [name.removeprefix(f'{tmp_path}/') for name in found]
    expected = ['[1].png', 'a.jpg', 'b.PNG', 'sub/c.webp', 'sub/c.webp', '[1].png', 'missing.png']
    assert names == expected
    (warning,) = caplog.messages
    assert str(tmp_path) in warning and '1 files' in warning and 'notes.txt' in warning
    (tmp_path / 'empty').mkdir()
    for word in (tmp_path / 'empty', tmp_path / '*.txt'):
        with pytest.raises(UserError, match=re.escape(str(word))):
            image_files.list_images([str(word)])


def halves(height, width):
    """Black on the left, white on the right."""
    image = np.zeros((height, width, 3), np.uint8)
    image[:, width // 2 :] = 255
    return image


def test_data_of_one_size_set_the_size_and_colors():
    reader = image_files.photo_reader(run_on('digits', 'test'))
    assert (reader.channels, reader.size) == (1, (8, 8))


def test_a_large_photo_becomes_like_the_data(tmp_path):
    Image.fromarray(halves(100, 300)).save(tmp_path / 'a.png')
    photo = image_files.photo_reader(run_on('digits', 'test')).read(tmp_path / 'a.png')
    assert numbers(photo.note) == [300, 100, 8, 8, 0, 100, 100, 200]
    assert says(photo.note, 'gray', 'cropped')
    assert photo.image.shape == (8, 8, 1)
    assert (photo.image[:, :3] < 20).all()
    assert (photo.image[:, 5:] > 235).all()


def test_a_photo_that_is_given_colors_is_seen_whole(tmp_path):
    """The columns at the sides, which the middle square leaves out, are there, and squeezed."""
    image = halves(100, 300)
    image[:, :40] = 128
    Image.fromarray(image).save(tmp_path / 'a.png')
    run = run_on('scenes', 'test', 'central_crop(2)', task='colorize')
    reader = image_files.photo_reader(run)
    for size, columns in ((None, 8), ((16, 24), 24)):
        photo = reader.read(tmp_path / 'a.png', size)
        assert photo.image.shape == (*(size or (8, 8)), 3)
        assert abs(int(photo.image[4, 0, 0]) - 128) < 20
        corner = photo.to_original(np.array([[columns, 0.0]]))
        np.testing.assert_allclose(corner, [[300, 0]], atol=1e-3)


def test_data_of_many_sizes_leave_it_to_the_transforms(tmp_path, rng):
    for i, size in enumerate([(20, 30), (40, 30), (30, 30)]):
        path = tmp_path / 'data' / f'class{i}' / 'a.png'
        path.parent.mkdir(parents=True)
        Image.fromarray(rng.integers(0, 256, (*size, 3), np.uint8)).save(path)
    run = run_on(f'folder:{tmp_path / "data"}', transforms='resize_small(16)|central_crop(12)')
    reader = image_files.photo_reader(run)
    assert (reader.channels, reader.size) == (3, None)
    Image.fromarray(halves(100, 300)).save(tmp_path / 'a.png')
    photo = reader.read(tmp_path / 'a.png')
    assert numbers(photo.note) == [300, 100, 12, 12, 12, 88, 112, 188]
    assert says(photo.note, 'RGB', 'cropped')
    assert photo.image[:, :5].max() == 0
    assert photo.image[:, 7:].min() == 255


def padded(run, sizes):
    """The run, whose evaluation pads images to these sizes."""
    return run.with_groups(evals={'test': {**run.config.evals.test, 'sizes': sizes}})


@pytest.mark.parametrize('transforms', ['', 'resize_small(12, max=24)'])
@pytest.mark.parametrize('shape', [(30, 300), (300, 30)])
def test_images_that_a_run_pads_are_seen_whole(tmp_path, transforms, shape):
    """Though all of its data have one size, of another aspect ratio."""
    Image.fromarray(halves(*shape)).save(tmp_path / 'a.png')
    run = run_on('digits', 'test', transforms, task='detect')
    run = padded(run, ((12, 24),))
    for size in (None, (6, 8)):
        photo = image_files.photo_reader(run).read(tmp_path / 'a.png', size)
        height, width = size or (12, 24)
        assert numbers(photo.note) == [shape[1], shape[0], width, height]
        seen = photo.to_original(np.array([photo.seen[::-1]], np.float32))
        np.testing.assert_allclose(seen, [shape[::-1]], rtol=1e-5)


def test_transforms_that_scale_any_image_need_no_crop(tmp_path):
    Image.fromarray(halves(100, 300)).save(tmp_path / 'a.png')
    photo = image_files.photo_reader(run_on('digits', 'test', 'resize(4)')).read(tmp_path / 'a.png')
    assert numbers(photo.note) == [300, 100, 4, 4]
    np.testing.assert_allclose(photo.to_original(np.full((1, 2), 4.0)), [[300, 100]])
    run = run_on('digits', 'test', 'resize_small(4)')  # alone, it leaves a photograph's shape
    photo = image_files.photo_reader(run).read(tmp_path / 'a.png')
    assert photo.image.shape == (4, 4, 1)


def test_a_size_of_ones_own_replaces_the_transforms(tmp_path):
    Image.fromarray(halves(100, 300)).save(tmp_path / 'a.png')
    reader = image_files.photo_reader(run_on('digits', 'test', 'central_crop(2)'))
    assert reader.read(tmp_path / 'a.png').image.shape == (2, 2, 1)
    assert reader.read(tmp_path / 'a.png', (24, 16)).image.shape == (24, 16, 1)


@pytest.mark.parametrize('mode', ['1', 'L', 'LA', 'P', 'RGB', 'RGBA', 'CMYK', 'I;16'])
def test_any_color_mode(tmp_path, mode):
    picture = Image.fromarray(halves(40, 40))
    if mode == 'I;16':
        picture = Image.fromarray(halves(40, 40)[..., 0].astype(np.uint16) * 257)
    else:
        picture = picture.convert(mode)
    suffix = 'jpg' if mode == 'CMYK' else 'png'
    picture.save(tmp_path / f'a.{suffix}')
    for channels in (1, 3):
        image = image_files.read_image(tmp_path / f'a.{suffix}', channels)
        assert image.shape == (40, 40, channels)
        assert image[:, :18].max() < 30
        assert image[:, 22:].min() > 225


def fitted(image, size):
    return image_files.crop_and_resize({'image': image}, size)['image']


def test_fit_keeps_the_middle_and_the_aspect_ratio():
    wide = np.zeros((30, 90, 1), np.uint8)
    wide[:, 30:60] = 200
    np.testing.assert_array_equal(fitted(wide, (10, 10)), np.full((10, 10, 1), 200))
    tall = wide.swapaxes(0, 1)
    np.testing.assert_array_equal(fitted(tall, (15, 15)), np.full((15, 15, 1), 200))
    assert fitted(wide, (10, 30)).mean() == pytest.approx(wide.mean(), abs=1)
    assert fitted(np.zeros((1, 1, 3), np.uint8), (8, 16)).shape == (8, 16, 3)


def test_files_that_are_no_images(tmp_path):
    with pytest.raises(UserError, match=r"no\.png'.*No such file"):
        image_files.read_image(tmp_path / 'no.png', 3)
    with pytest.raises(UserError, match='Is a directory'):
        image_files.read_image(tmp_path, 3)
    (tmp_path / 'text.png').write_text('not a picture')
    with pytest.raises(UserError, match=r'JPEG, PNG or WebP .*text\.png'):
        image_files.read_image(tmp_path / 'text.png', 3)
    Image.fromarray(halves(300, 300)).save(tmp_path / 'a.jpg')
    whole = (tmp_path / 'a.jpg').read_bytes()
    (tmp_path / 'cut.jpg').write_bytes(whole[: len(whole) // 2])
    with pytest.raises(UserError, match=r'cut\.jpg'):
        image_files.read_image(tmp_path / 'cut.jpg', 3)


def test_points_of_the_input_are_found_in_the_file(tmp_path):
    Image.fromarray(halves(100, 300)).save(tmp_path / 'a.png')
    transforms = "resize(30)|central_crop((20, 10))|keep('image', 'label')"
    run = run_on('digits', 'test', transforms)
    run.raw_images['size'] = None
    photo = image_files.photo_reader(run).read(tmp_path / 'a.png')
    assert photo.original.shape == (100, 300, 1)
    assert {name: x.shape for name, x in photo.fields.items()} == {'image': (20, 10, 1)}
    corners = np.array([[0.0, 0.0], [10.0, 20.0], [5.0, 10.0]])
    expected = [[100.0, 50 / 3], [200.0, 250 / 3], [150.0, 50.0]]
    np.testing.assert_allclose(photo.to_original(corners), expected, rtol=1e-5)
    small = image_files.photo_reader(run_on('digits', 'test')).read(tmp_path / 'a.png')
    middle = [[100.0, 0.0], [200.0, 100.0]]  # a square of the file fills the 8 x 8 pixels
    np.testing.assert_allclose(small.to_original(np.array([[0.0, 0.0], [8.0, 8.0]])), middle)


def test_transforms_that_do_not_tell_where_pixels_come_from(tmp_path, monkeypatch):
    (tmp_path / 'my_zoom.py').write_text(
        'from vit_jax.data.transforms import transform\n'
        '@transform\n'
        'def halve():\n'
        '    return lambda image: image[::2, ::2]\n'
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    Image.fromarray(halves(40, 40)).save(tmp_path / 'a.png')
    run = run_on('digits', 'test', 'my_zoom.halve')
    photo = image_files.photo_reader(run).read(tmp_path / 'a.png')
    assert photo.image.shape == (4, 4, 1)
    with pytest.raises(UserError, match=r'positions.*pixels'):
        photo.to_original(np.zeros((1, 2)))


def test_images_are_padded_as_in_evaluation(tmp_path):
    Image.fromarray(halves(30, 60)).save(tmp_path / 'a.png')
    run = run_on('digits', 'test', 'resize_small(8)')
    run.raw_images['size'] = None
    run = padded(run, ((8, 8), (12, 24)))
    photo = image_files.photo_reader(run).read(tmp_path / 'a.png')
    assert photo.image.shape == (12, 24, 1)
    assert photo.fields['pixel_mask'].sum() == photo.fields['pixel_mask'][:8, :16].sum() == 8 * 16
    np.testing.assert_allclose(photo.to_original(np.array([[16.0, 8.0]])), [[60, 30]])
