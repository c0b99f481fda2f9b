"""Folders of images and masks: layouts, ids and colors, what is ignored and what is refused."""

import struct
import zlib

import numpy as np
import pytest
from helpers.messages import mentions
from PIL import Image

from vit_jax.data.records import BrokenRecord, UnknownSplit
from vit_jax.data.sources import masks, open_source
from vit_jax.errors import UserError
from vit_jax.inference import fine_tune

IDS = np.array([[0, 2, 2, 1], [0, 2, 255, 255], [0, 0, 0, 0]])


def save(path, values, **kwargs):
    path.parent.mkdir(parents=True, exist_ok=True)
    dtype = np.uint16 if np.max(values) > 255 else np.uint8
    image = Image.fromarray(np.asarray(values, dtype))
    if 'palette' in kwargs:
        image = Image.fromarray(np.asarray(values, np.uint8), 'P')
        image.putpalette(kwargs['palette'])
    image.save(path)


def write(root, ids=IDS, names=('a.jpg', 'b.jpg'), classes='soil\nleaf\nflower\n', split=''):
    """Images and masks in two folders; returns the source's name."""
    for i, name in enumerate(names):
        save(root / 'images' / split / name, np.full((3, 4, 3), 10 * i))
        save(root / 'masks' / split / f'{name[:-4]}.png', ids)
    if classes:
        (root / 'classes.txt').write_text(classes)
    return f'masks:{root}'


def test_a_segment_for_each_class_that_is_present(tmp_path):
    source = open_source(write(tmp_path), 'train')
    assert source.info.class_names == ('soil', 'leaf', 'flower') and len(source) == 2
    assert source.info.stuff == (0, 1, 2)
    record = source[0]
    assert record['image'].shape == (3, 4, 3) and record['segments'].dtype == np.int16
    np.testing.assert_array_equal(record['segments'], [[1, 3, 3, 2], [1, 3, -1, -1], [1, 1, 1, 1]])
    assert record['labels'].tolist() == [0, 1, 2]
    assert fine_tune.source_splits(f'masks:{tmp_path}') == ('train[:80%]', 'train[80%:]')
    found = source.annotations(0)
    assert found.pop('size') == (3, 4) and found.keys() == record.keys() - {'image'}


@pytest.mark.parametrize(
    ('ids', 'segments', 'labels'),
    [
        (np.full((3, 4), 255), np.full((3, 4), -1), []),  # all ignored
        (np.where(np.arange(12).reshape(3, 4) == 5, 2, 255), None, [2]),  # one pixel
        (np.full((3, 4), 1), np.full((3, 4), 1), [1]),
    ],
)
def test_masks_of_few_classes(tmp_path, ids, segments, labels):
    record = open_source(write(tmp_path, ids), 'train')[1]
    expected = np.where(ids == 2, 1, -1) if segments is None else segments
    np.testing.assert_array_equal(record['segments'], expected)
    assert record['labels'].tolist() == labels and record['labels'].dtype == np.int32


def test_splits_are_folders_on_either_side(tmp_path):
    write(tmp_path / 'a', split='train')
    name = write(tmp_path / 'a', split='val', names=('c.jpg',))
    assert [len(open_source(name, split)) for split in ('train', 'val', 'train+val')] == [2, 1, 3]
    with pytest.raises(UnknownSplit, match="unknown split 'test'"):
        open_source(name, 'test')
    (tmp_path / 'b').mkdir()
    for split in ('train', 'val'):
        write(tmp_path / 'b' / split, classes='')
    (tmp_path / 'b' / 'classes.txt').write_text('x\ny\nz')
    assert len(open_source(f'masks:{tmp_path / "b"}', 'val')) == 2
    assert len(open_source(f'masks:{tmp_path / "b"}', 'train[:50%]')) == 1
    assert fine_tune.source_splits(f'masks:{tmp_path / "b"}') == ('train', 'val')
    with pytest.raises(UserError, match="without 'per class'"):
        open_source(f'masks:{tmp_path / "b"}', 'train[:50% per class]')


def test_ids_of_a_table(tmp_path):
    name = write(tmp_path, np.where(IDS == 1, 1000, IDS), classes='')
    (tmp_path / 'classes.csv').write_text('name,id\nback,0\nfront,255\nfront,1000\n,2\n')
    source = open_source(name, 'train')
    assert source.info.class_names == ('back', 'front')
    np.testing.assert_array_equal(
        source[0]['segments'], [[1, -1, -1, 2], [1, -1, 2, 2], [1, 1, 1, 1]]
    )


@pytest.mark.parametrize('palette', [False, True])
def test_colors(tmp_path, palette):
    name = write(tmp_path, classes='')
    colors = np.array([[0, 0, 0], [255, 128, 0], [0, 0, 255]], np.uint8)
    ids = IDS % 253  # 255 becomes 2
    for stem in 'ab':
        if palette:
            save(tmp_path / f'masks/{stem}.png', ids, palette=colors.ravel().tolist())
        else:
            save(tmp_path / f'masks/{stem}.png', colors[ids])
    (tmp_path / 'classes.csv').write_text('color, name\n#FF8000, leaf\n#000000,\n#0000ff, sky\n')
    source = open_source(name, 'train')
    assert source.info.class_names == ('leaf', 'sky')
    np.testing.assert_array_equal(
        source[0]['segments'], [[-1, 2, 2, 1], [-1, 2, 2, 2], [-1, -1, -1, -1]]
    )
    save(tmp_path / 'masks/a.png', np.where(ids[..., None] == 1, [1, 2, 3], colors[ids]))
    save(tmp_path / 'masks/b.png', np.where(ids[..., None] == 1, [1, 2, 3], colors[ids]))
    with pytest.raises(UserError, match=r'masks/.\.png: the color #010203 '):
        source[0]


def test_a_palette_without_colors_of_classes_is_of_ids(tmp_path):
    name = write(tmp_path)
    for stem in 'ab':
        save(tmp_path / f'masks/{stem}.png', IDS, palette=list(range(255, -1, -1)) * 3)
    assert open_source(name, 'train')[0]['labels'].tolist() == [0, 1, 2]


def test_the_layout_of_ade20k(tmp_path):
    ids = np.array([[0, 1, 1], [3, 3, 0]])
    for split in ('training', 'validation'):
        save(tmp_path / f'images/{split}/ADE_{split}_1.jpg', np.zeros((2, 3, 3)))
        save(tmp_path / f'annotations/{split}/ADE_{split}_1.png', ids)
    rows = ['Idx\tRatio\tTrain\tVal\tStuff\tName']
    rows += [
        f'{i}\t0.1\t5\t5\t1\t{name}, other' for i, name in enumerate(('wall', 'sky', 'bed'), 1)
    ]
    (tmp_path / 'objectInfo150.txt').write_text('\n'.join(rows))
    source = open_source(f'masks:{tmp_path}', 'validation')
    assert source.info.class_names == ('wall', 'sky', 'bed')
    np.testing.assert_array_equal(source[0]['segments'], [[-1, 1, 1], [2, 2, -1]])
    assert source[0]['labels'].tolist() == [0, 2]
    save(tmp_path / 'annotations/validation/ADE_validation_1.png', ids + 1)
    with pytest.raises(UserError, match=r'the id 4 .* 3'):
        source[0]


def test_the_layout_of_cityscapes(tmp_path):
    ids = np.array([[7, 8, 4], [33, 255, 0]])
    stem = 'val/ulm/ulm_000000_000019'
    save(tmp_path / f'leftImg8bit/{stem}_leftImg8bit.png', np.zeros((2, 3, 3)))
    save(tmp_path / f'gtFine/{stem}_gtFine_labelIds.png', ids)
    save(tmp_path / f'gtFine/{stem}_gtFine_color.png', np.zeros((2, 3, 3)))
    source = open_source(f'masks:{tmp_path}', 'val')
    assert len(source.info.class_names) == 19
    assert source.info.class_names[0::18] == ('road', 'bicycle')
    np.testing.assert_array_equal(source[0]['segments'], [[1, 2, -1], [3, -1, -1]])
    assert source[0]['labels'].tolist() == [0, 1, 18]
    with pytest.raises(UnknownSplit):
        open_source(f'masks:{tmp_path}', 'train')


# -- what is refused -------------------------------------------------------------------------------


def test_a_mask_of_another_size_or_damaged_is_a_broken_record(tmp_path):
    write(tmp_path)
    source = masks.Source(str(tmp_path), 'train')
    for stem in 'ab':
        save(tmp_path / f'masks/{stem}.png', IDS[:2])
    with pytest.raises(BrokenRecord, match=r'masks/.\.png: has 4 x 2 .*4 x 3'):
        source[0]
    for stem in 'ab':
        (tmp_path / f'masks/{stem}.png').write_bytes(b'x')
    with pytest.raises(BrokenRecord, match=r'masks/.\.png.*identify'):
        source.annotations(0)


def refusal(root, **changes):
    with pytest.raises(UserError) as error:
        open_source(write(root, **changes), 'train')[0]
    assert '\n' not in str(error.value)
    return str(error.value)


def test_ids_and_classes_that_do_not_fit(tmp_path):
    message = refusal(tmp_path, classes='soil\nleaf')
    assert '.png: the id 2 ' in message
    (tmp_path / 'classes.txt').unlink()
    assert 'classes.txt' in refusal(tmp_path, classes='')
    assert 'has no class' in refusal(tmp_path, classes='\n \n')
    (tmp_path / 'classes.csv').write_text('id,name\n0,a\n0,b\n')
    assert 'both exist' in refusal(tmp_path)
    (tmp_path / 'classes.txt').unlink()
    for text, words in {
        'id,name\n0,a\n0,b\n': 'lists 0 twice',
        'id,label\n0,a': ("'id,name'", "'name,color'"),
        'id,name\nx,a': ('2', "'x'"),
        'color,name\nred,a': ('2', "'red'", '#ff8000'),
        'id,name\n1': 'row 2: has 1 cells of 2',
    }.items():
        (tmp_path / 'classes.csv').write_text(text)
        assert mentions(refusal(tmp_path, classes=''), words)


@pytest.mark.parametrize(('bits', 'color_type'), [(1, 0), (2, 0), (4, 0), (8, 0), (2, 3), (4, 3)])
def test_ids_of_few_bits_are_as_they_are_in_the_file(tmp_path, bits, color_type):
    """Pillow scales gray values of 2 and 4 bits to bytes."""
    ids = IDS % 2 if bits == 1 else np.minimum(IDS, 2)
    source = open_source(write(tmp_path, np.minimum(IDS, 2)), 'train')
    path = tmp_path / 'masks' / 'a.png'
    path.write_bytes(png(ids, bits, color_type))
    index = next(i for i in range(2) if source.record_name(i).endswith('a.jpg'))
    record = source[index]
    np.testing.assert_array_equal(record['labels'][record['segments'] - 1], ids)


def png(values, bits, color_type):
    """A PNG file of gray values (color type 0), or of indices of a palette (3)."""

    def chunk(kind, data):
        return (
            struct.pack('>I', len(data)) + kind + data + struct.pack('>I', zlib.crc32(kind + data))
        )

    height, width = values.shape
    shifts = np.arange(bits - 1, -1, -1)
    rows = np.packbits((values[..., None] >> shifts & 1).reshape(height, -1), axis=1)
    lines = b''.join(b'\0' + row.tobytes() for row in rows)
    header = struct.pack('>IIBBBBB', width, height, bits, color_type, 0, 0, 0)
    palette = chunk(b'PLTE', bytes(range(12))) if color_type == 3 else b''
    parts = chunk(b'IHDR', header) + palette + chunk(b'IDAT', zlib.compress(lines))
    return b'\x89PNG\r\n\x1a\n' + parts + chunk(b'IEND', b'')


def test_endings_in_capitals(tmp_path):
    name = write(tmp_path)
    (tmp_path / 'masks' / 'a.png').rename(tmp_path / 'masks' / 'a.PNG')
    source = open_source(name, 'train')
    assert [source[i]['labels'].tolist() for i in range(2)] == [[0, 1, 2]] * 2


def test_pictures_and_binary_masks_say_what_to_list(tmp_path):
    assert 'classes.csv' in refusal(tmp_path / 'a', ids=np.stack([IDS] * 3, -1))
    message = refusal(tmp_path / 'b', ids=np.where(IDS > 0, 255, 0))
    assert 'only 0 and 255' in message and "'255,leaf'" in message


def test_missing_files_and_folders(tmp_path):
    name = write(tmp_path / 'a')
    (tmp_path / 'a/masks/b.png').rename(tmp_path / 'a/masks/b.jpg')
    with pytest.raises(UserError, match=r'b\.jpg: .*masks/b\.png .*b\.jpg'):
        open_source(name, 'train')
    (tmp_path / 'a/masks/a.png').unlink()
    with pytest.raises(UserError, match=r'\(2 of 2 '):
        open_source(name, 'train')
    with pytest.raises(UserError, match='does not exist'):
        open_source(f'masks:{tmp_path / "x"}', 'train')
    (tmp_path / 'b').mkdir()
    with pytest.raises(UserError, match=r'folder.*images'):
        open_source(f'masks:{tmp_path / "b"}', 'train')
    (tmp_path / 'b' / 'images').mkdir()
    with pytest.raises(UserError, match=r'no folder .*masks'):
        open_source(f'masks:{tmp_path / "b"}', 'train')
    (tmp_path / 'b' / 'labels').mkdir()
    (tmp_path / 'b' / 'classes.txt').write_text('a')
    with pytest.raises(UserError, match='no image below'):
        open_source(f'masks:{tmp_path / "b"}', 'train')


def test_the_listing_has_names_classes_and_sizes(tmp_path):
    name = write(tmp_path)
    before = open_source(name, 'train').listing()
    (tmp_path / 'classes.txt').write_text('soil\nleaf\npetal\n')
    assert open_source(name, 'train').listing().examples != before.examples
    write(tmp_path, np.tile(IDS, (9, 9)))
    after = open_source(name, 'train').listing()
    assert after.examples == before.examples and after.contents != before.contents


def test_splits_whose_classes_are_not_the_same_leave_pixels_void(tmp_path):
    name = write(tmp_path / 'a')
    others = open_source(write(tmp_path / 'b', classes='flower\nsoil\nleaf\n'), 'train').info
    found = open_source(name, 'train').numbered_as(others)[0]
    assert found['labels'].tolist() == [1, 2, 0]
    few = open_source(
        write(tmp_path / 'c', np.zeros((3, 4)), classes='soil\nflower\n'), 'train'
    ).info
    found = open_source(name, 'train').numbered_as(few)[0]
    assert found['labels'].tolist() == [0, 1]
    np.testing.assert_array_equal(found['segments'], [[1, 2, 2, -1], [1, 2, -1, -1], [1, 1, 1, 1]])
