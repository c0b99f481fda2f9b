"""Depth of drawn scenes and of folders: layouts, scales, what is unknown and what is refused."""

import json

import numpy as np
import pytest
from PIL import Image

from vit_jax.commands import data as data_command
from vit_jax.config.run import Data
from vit_jax.data.dataset import open_dataset
from vit_jax.data.records import BrokenRecord, UnknownSplit
from vit_jax.data.sources import depth, open_source, scenes, scenes_depth
from vit_jax.errors import UserError

MILLIMETERS = np.array([[0, 1500, 2000], [65535, 250, 1]], np.uint16)
METERS = (MILLIMETERS / 1000).astype(np.float32)


def write(root, folder='depth', split='', names=('a', 'b'), values=MILLIMETERS):
    """Images and depth maps of 3 x 2 pixels; returns the source's name."""
    for kind in ('images', folder):
        (root / kind / split).mkdir(parents=True, exist_ok=True)
    for i, name in enumerate(names):
        Image.new('RGB', (3, 2), (10 * i,) * 3).save(root / 'images' / split / f'{name}.png')
        if values.dtype == np.uint16:
            Image.fromarray(values).save(root / folder / split / f'{name}.png')
        else:
            np.save(root / folder / split / f'{name}.npy', values)
    return f'depth:{root}'


def test_drawn_depth_follows_the_digits_sizes():
    source, images = open_source('scenes_depth:40', 'train'), scenes.Source('', 'train')
    kinds = set()
    for i in range(40):
        record, ground = images.with_ground(i)
        np.testing.assert_array_equal(source[i]['image'], record['image'])
        drawn = source[i]['depth']
        assert drawn.dtype == np.float32 and drawn.shape == record['image'].shape[:2]
        np.testing.assert_array_equal(source.annotations(i)['depth'], drawn)
        for mask, box in zip(record['masks'], record['boxes'], strict=True):
            (value,) = set(drawn[mask].tolist())  # hidden rows make no digit farther
            assert value <= scenes_depth.FOCAL / (box[3] - box[1]) + 1e-3
        back = drawn[~record['masks'].any(0)]
        ends = scenes_depth.GROUNDS[ground]
        assert (back == 0).all() if ends is None else back.min() >= min(ends) - 1e-3
        kinds.add(ground)
    assert kinds == set(scenes_depth.GROUNDS)
    assert len(open_source('scenes_depth', 'test')) == 500


@pytest.mark.parametrize('values', [MILLIMETERS, METERS, MILLIMETERS.astype(np.int32)])
def test_png_and_numpy_files(tmp_path, values):
    source = open_source(write(tmp_path, values=values), 'train')
    record = source[0]
    np.testing.assert_allclose(record['depth'], METERS, rtol=1e-6)
    assert record['depth'].dtype == np.float32 and record['image'].shape == (2, 3, 3)
    found = source.annotations(1)
    assert found.pop('size') == (2, 3) and found.keys() == {'depth'}
    (tmp_path / 'scale.txt').write_text('256\n')
    scaled = open_source(f'depth:{tmp_path}', 'train')
    np.testing.assert_allclose(scaled[0]['depth'], values / np.float32(256), rtol=1e-6)
    assert scaled.listing().examples != source.listing().examples


def test_what_is_no_distance_is_unknown(tmp_path):
    values = np.array([[np.nan, np.inf, -1], [1e300, 0, 2]])
    record = open_source(write(tmp_path, values=values), 'train')[0]
    np.testing.assert_array_equal(record['depth'], np.array([[0, 0, 0], [0, 0, 2]], np.float32))


def test_layouts(tmp_path):
    for split in ('train', 'test'):
        write(tmp_path / 'a', 'annotations', split, names=set(split))
        write(tmp_path / 'b' / split, 'depths')
    name = f'depth:{tmp_path / "a"}'
    assert [len(open_source(name, split)) for split in ('train', 'test', 'train+test')] == [5, 3, 8]
    assert len(open_source(f'depth:{tmp_path / "b"}', 'test')) == 2
    with pytest.raises(UnknownSplit, match='val'):
        open_source(name, 'val')


def test_nyu_lists(tmp_path):
    write(tmp_path / 'bath')
    lines = [f'/bath/images/{stem}.png /bath/depth/{stem}.png 518.8579\n' for stem in 'ab']
    (tmp_path / 'nyu_train.txt').write_text(''.join(lines))
    source = open_source(f'depth:{tmp_path}', 'train')
    np.testing.assert_allclose(source[1]['depth'], METERS, rtol=1e-6)
    with pytest.raises(UnknownSplit):
        open_source(f'depth:{tmp_path}', 'test')
    (tmp_path / 'nyu_train.txt').write_text('a.png ../b.png\n')
    with pytest.raises(UserError, match='line 1'):
        open_source(f'depth:{tmp_path}', 'train')


def test_files_that_are_not_depth(tmp_path):
    name = write(tmp_path, names=('a', 'b', 'c', 'd'))
    folder = tmp_path / 'depth'
    (folder / 'a.png').write_bytes(b'no image')
    Image.new('RGB', (3, 2)).save(folder / 'b.png')
    Image.fromarray(np.ones((4, 4), np.uint16)).save(folder / 'c.png')
    (folder / 'd.png').unlink()
    (folder / 'd.npy').write_bytes(b'\x93NUMPY\x01\x00')
    source = depth.Source(str(tmp_path), 'train')
    for i in range(4):
        with pytest.raises(BrokenRecord, match=r'depth.[abcd]\.'):
            source[i]
    (folder / 'd.npy').unlink()
    with pytest.raises(UserError, match=r'd\.png is missing'):
        open_source(name, 'train')
    (tmp_path / 'scale.txt').write_text('many')
    write(tmp_path, names='d')
    with pytest.raises(UserError, match=r'scale\.txt'):
        open_source(name, 'train')


@pytest.mark.parametrize(
    'loading', [{'threads': 3}, pytest.param({'workers': 2}, marks=pytest.mark.long)]
)
def test_batches_are_the_same_however_they_are_read(loading):
    spec = 'resize(40)|random_crop(32)|flip|randaugment(2, 10)'
    options = {'source': 'scenes_depth:20', 'split': 'train', 'transforms': spec}
    runs = []
    for more in ({'threads': 1}, loading):
        batches = open_dataset(Data(**options, **more), 8).train_batches()
        runs.append([next(batches) for _ in range(3)])
        batches.close()
    for first, second in zip(*runs, strict=True):
        assert first['depth'].shape == (8, 32, 32) and first['depth'].dtype == np.float32
        assert (first['depth'] > 0).any()
        for key, values in first.items():
            np.testing.assert_array_equal(values, second[key], err_msg=key)


def test_the_command_shows_depth_with_a_scale(tmp_path, capsys):
    name = write(tmp_path / 'rooms', values=np.tile(METERS, (16, 16)), names='abcdefgh')
    for file in (tmp_path / 'rooms' / 'images').iterdir():
        Image.new('RGB', (48, 32)).save(file)
    flags = ['experiments/dpt/scenes.py:smoke', f'--config.data.source={name}']
    out = tmp_path / 'batch.png'
    assert not data_command.main([*flags, '--batches=1', '--json', f'--out={out}'])
    assert json.loads(capsys.readouterr().out)['examples'] == 8
    assert Image.open(out).size[0] > 500
