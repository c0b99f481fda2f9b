"""Folders of images: layouts, odd files, broken files."""

import itertools
import logging

import numpy as np
import pytest
from helpers import loading
from helpers.messages import mentions
from PIL import Image

from vit_jax.data.sources import open_source
from vit_jax.data.transforms import parse_transforms
from vit_jax.errors import UserError


def write(folder, name, value=0, size=(8, 8)):
    folder.mkdir(parents=True, exist_ok=True)
    Image.new('RGB', size, (value, value, value)).save(folder / name)


@pytest.fixture
def flowers(tmp_path):
    """20 images each of two classes; the pixels' value is 10 x class + number."""
    for label, name in enumerate(('daisy', 'rose')):
        for i in range(20):
            write(tmp_path / name, f'{i:02}.png', 100 * label + i)
    return tmp_path


def values(source):
    return [int(source[i]['image'][0, 0, 0]) for i in range(len(source))]


def test_classes_without_splits(flowers):
    source = open_source(f'folder:{flowers}', 'train')
    assert source.info.class_names == ('daisy', 'rose')
    assert sorted(values(source)) == [*range(20), *range(100, 120)]
    for i in range(len(source)):
        record = source[i]
        assert record['label'] == record['image'][0, 0, 0] // 100
        assert record['image'].shape == (8, 8, 3)
        assert source.labels()[i] == record['label']


def test_slices_mix_the_classes_and_stay_the_same(flowers):
    first, rest = (open_source(f'folder:{flowers}', s) for s in ('train[:50%]', 'train[50%:]'))
    assert not set(values(first)) & set(values(rest))
    assert 4 <= np.bincount(first.labels())[0] <= 16
    np.testing.assert_array_equal(first.class_counts(), np.bincount(first.labels()))
    assert values(first) == values(open_source(f'folder:{flowers}', 'train[:50%]'))


def test_order_does_not_depend_on_the_place(flowers, tmp_path_factory):
    elsewhere = tmp_path_factory.mktemp('elsewhere') / 'copy'
    flowers.rename(elsewhere)
    moved = values(open_source(f'folder:{elsewhere}', 'train'))
    elsewhere.rename(flowers)
    assert values(open_source(f'folder:{flowers}', 'train')) == moved


def test_splits_share_their_classes(tmp_path):
    write(tmp_path / 'train' / 'cat', 'a.png')
    write(tmp_path / 'train' / 'dog' / 'further' / 'down', 'b.PNG')
    write(tmp_path / 'val' / 'dog', 'c.jpeg')
    write(tmp_path / 'val' / 'emu', 'd.webp')
    train, val = (open_source(f'folder:{tmp_path}', s) for s in ('train', 'val'))
    assert train.info.class_names == val.info.class_names == ('cat', 'dog', 'emu')
    assert sorted(train.labels()) == [0, 1]
    assert sorted(val.labels()) == [1, 2]
    with pytest.raises(UserError, match=r"unknown split 'vall'; .* 'val'"):
        open_source(f'folder:{tmp_path}', 'vall')


def test_stray_images_make_no_classes_of_splits(flowers, tmp_path_factory, caplog):
    root = tmp_path_factory.mktemp('splits')
    for split in ('train', 'val'):
        (root / split).mkdir()
        for name in ('daisy', 'rose'):
            (root / split / name).symlink_to(flowers / name)
    write(root / 'train', 'stray.png')
    source = open_source(f'folder:{root}', 'train')
    assert source.info.class_names == ('daisy', 'rose') and len(source) == 40
    assert f'{root}/train: ignoring 1 images' in caplog.text


def test_other_files_are_counted_and_hidden_ones_ignored(flowers, caplog):
    (flowers / 'daisy' / 'notes.txt').write_text('x')
    (flowers / 'rose' / 'old.gif').write_bytes(b'x')
    (flowers / 'rose' / '.DS_Store').write_bytes(b'x')
    (flowers / '.cache').mkdir()
    source = open_source(f'folder:{flowers}', 'train')
    assert len(source) == 40
    assert source.info.num_classes == 2
    open_source(f'folder:{flowers}', 'train')
    assert caplog.text.count('ignoring 2 files') == 1  # a run opens its data several times


@pytest.mark.parametrize(
    ('make', 'message'),
    [
        (lambda path: None, 'does not exist'),
        (lambda path: path.mkdir(), 'folders'),
        (
            lambda path: (path.mkdir(), (path / 'a.jpg').touch()),
            r'CLASS/\*\.jpg',
        ),
        (lambda path: (path / 'cat').mkdir(parents=True), 'no image'),
        (lambda path: (path / 'train' / 'cat').mkdir(parents=True), 'no image'),
    ],
)
def test_mistakes(tmp_path, make, message):
    make(tmp_path / 'data')
    with pytest.raises(UserError, match=message) as error:
        open_source(f'folder:{tmp_path / "data"}', 'train')
    assert '\n' not in str(error.value)


def test_broken_files_are_named_counted_and_replaced_in_training(flowers, caplog):
    (flowers / 'daisy' / '03.png').write_bytes(b'')
    whole = (flowers / 'rose' / '07.png').read_bytes()
    (flowers / 'rose' / '07.png').write_bytes(whole[: len(whole) // 2])
    source = open_source(f'folder:{flowers}', 'train')
    batches = loading.train_batches(source, parse_transforms(''), batch_size=40, seed=0)
    epoch = next(batches)['image'][:, 0, 0, 0].tolist()
    assert len(epoch) == 40
    assert set(epoch) == {*range(20), *range(100, 120)} - {3, 107}
    assert sorted(source.broken.values())[0].startswith(f'{flowers}/daisy/03.png: ')
    warnings = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    assert len(warnings) == 2
    assert '2 of 40 records broken' in warnings[1]
    again = loading.train_batches(source, parse_transforms(''), batch_size=40, seed=0, cache=True)
    assert next(again)['image'][:, 0, 0, 0].tolist() == epoch


@pytest.mark.parametrize('cache', [False, True])
def test_broken_files_are_masked_in_evaluation(flowers, cache):
    (flowers / 'daisy' / '03.png').write_bytes(b'')
    source = open_source(f'folder:{flowers}', 'train')
    seen = []
    for batch in loading.eval_batches(source, parse_transforms(''), batch_size=16, cache=cache):
        real = batch['mask'] == 1
        seen += batch['image'][real, 0, 0, 0].tolist()
    assert sorted(seen) == sorted({*range(20), *range(100, 120)} - {3})


def test_too_many_broken_files_stop_the_run(flowers):
    for i in range(11):
        (flowers / 'daisy' / f'{i:02}.png').write_bytes(b'')
    source = open_source(f'folder:{flowers}', 'train')
    batches = loading.train_batches(source, parse_transforms(''), batch_size=8, seed=0)
    with pytest.raises(UserError, match=r'11.*40 records.*10') as error:
        list(itertools.islice(batches, 10))
    assert f'{flowers}/daisy/00.png' in str(error.value)


@pytest.mark.slow
@pytest.mark.fault(54)
def test_all_worker_processes_count_together(flowers):
    for i in (3, 6, 9):
        (flowers / 'daisy' / f'{i:02}.png').write_bytes(b'')
    source = open_source(f'folder:{flowers}', 'train')
    options = {'batch_size': 8, 'seed': 0, 'workers': 2, 'threads': 1}
    batches = loading.train_batches(source, parse_transforms(''), **options)
    list(itertools.islice(batches, 5))
    batches.close()
    assert sorted(text.split(': ')[0][-6:] for text in source.broken.values()) == [
        '03.png',
        '06.png',
        '09.png',
    ]
    source.record_broken(dict.fromkeys(range(100, 107), 'found by others'))  # ten are tolerated
    (flowers / 'rose' / '00.png').write_bytes(b'')
    options['workers'] = 1
    with pytest.raises(UserError, match='11 of 40 records broken'):
        list(itertools.islice(loading.train_batches(source, parse_transforms(''), **options), 9))


def test_vanished_file_is_broken(flowers):
    source = open_source(f'folder:{flowers}', 'train')
    (flowers / 'daisy' / '03.png').unlink()
    values_seen = []
    for batch in loading.eval_batches(source, parse_transforms(''), batch_size=20):
        values_seen.append(batch['mask'].sum())
    assert sum(values_seen) == 39
    assert 'No such file' in next(iter(source.broken.values()))


def test_different_sizes_ask_for_a_resize(flowers):
    write(flowers / 'daisy', '05.png', 5, size=(9, 8))
    source = open_source(f'folder:{flowers}', 'train')
    with pytest.raises(UserError, match=r'daisy/05\.png: image .*resize\(224\)'):
        list(loading.eval_batches(source, parse_transforms(''), batch_size=40))
    batches = loading.eval_batches(source, parse_transforms('resize(8)'), batch_size=40)
    assert next(batches)['image'].shape == (40, 8, 8, 3)


def test_classes_that_are_numbers_are_in_the_order_of_numbers(tmp_path):
    """As those of ImageNet-v2."""
    for number in range(12):
        write(tmp_path / str(number), 'a.png', number)
    source = open_source(f'folder:{tmp_path}', 'train')
    assert source.info.class_names == tuple(map(str, range(12)))
    assert not source.info.has_names
    np.testing.assert_array_equal(source.labels(), values(source))


@pytest.mark.parametrize('place', ['daisy/all', 'all', 'daisy/daisy'])
@pytest.mark.parametrize('target', ['.', '..'])
def test_a_link_to_a_folder_that_holds_it_adds_no_images(flowers, place, target):
    (flowers / place).symlink_to(target)
    source = open_source(f'folder:{flowers}', 'train')
    assert source.info.class_names == ('daisy', 'rose')
    assert sorted(values(source)) == [*range(20), *range(100, 120)]


def test_a_split_without_folders_of_classes_has_no_classes(tmp_path, caplog):
    """As Tiny ImageNet's `val/images`."""
    for k, name in enumerate(('n01', 'n02')):
        write(tmp_path / 'train' / name / 'images', f'{k}.png', k)
    for k in range(3):
        write(tmp_path / 'val' / 'images', f'{k}.png', k)
    assert open_source(f'folder:{tmp_path}', 'train').info.class_names == ('n01', 'n02')
    val = open_source(f'folder:{tmp_path}', 'val')
    assert val.info.num_classes == 0 and sorted(values(val)) == [0, 1, 2]
    assert val[0].keys() == {'image'} and val.class_counts().tolist() == []
    assert val.listing() != open_source(f'folder:{tmp_path}', 'val[:2]').listing()
    assert mentions(caplog.text, "'val'", 'without') and "'images'" in caplog.text
    with pytest.raises(UserError, match='no classes'):
        val.labels()


def test_classes_that_training_lacks_are_named(tmp_path, caplog):
    for split, name in (('train', 'cat'), ('train', 'dog'), ('val', 'dog'), ('val', 'emu')):
        write(tmp_path / split / name, 'a.png')
    open_source(f'folder:{tmp_path}', 'val')
    assert mentions(caplog.text, "'val'", "'train'", "'emu'")


@pytest.mark.parametrize(
    ('val', 'named'),
    [(('cat', 'Dog'), ["'Dog'", "'dog'"]), (('emu', 'cow'), ["'emu'", "'cow'"])],
)
def test_classes_of_evaluation_are_those_of_training(tmp_path, val, named):
    for split, name in [*(('train', name) for name in ('cat', 'dog')), *(('val', n) for n in val)]:
        write(tmp_path / split / name, 'a.png')
    with pytest.raises(UserError, match=str(tmp_path)) as error:
        open_source(f'folder:{tmp_path}', 'val')
    assert all(name in str(error.value) for name in named)


def test_spellings_of_splits_that_look_the_same_are_one_class(tmp_path):
    for split, name in (('train', 'k\u00e4se'), ('val', 'ka\u0308se')):
        write(tmp_path / split / name, 'a.png')
        write(tmp_path / split / 'dog', 'a.png')
    for split in ('train', 'val'):
        source = open_source(f'folder:{tmp_path}', split)
        assert source.info.class_names == ('dog', 'k\u00e4se') and sorted(source.labels()) == [0, 1]


def test_letters_of_both_cases_may_be_classes(tmp_path):
    for split, name in itertools.product(('train', 'val'), ('a', 'A')):
        write(tmp_path / split / name, 'x.png')
    assert open_source(f'folder:{tmp_path}', 'val').info.class_names == ('A', 'a')


def test_splits_of_no_training_share_all_classes(tmp_path):
    for split, name in (('birds', 'owl'), ('mammals', 'cat'), ('mammals', 'dog')):
        write(tmp_path / split / name, 'x.png')
    names = open_source(f'folder:{tmp_path}', 'birds').info.class_names
    assert names == ('cat', 'dog', 'owl')


def test_a_link_to_all_splits_is_no_split(tmp_path):
    for split in ('train', 'val'):
        for k, name in enumerate(('cat', 'dog')):
            write(tmp_path / split / name, 'a.png', k)
    (tmp_path / 'latest').symlink_to('.')
    assert open_source(f'folder:{tmp_path}', 'train').info.class_names == ('cat', 'dog')


@pytest.fixture
def pets(tmp_path):
    for k, name in enumerate(('big_cat_1', 'big_cat_2', 'dog_1', 'dog_2')):
        write(tmp_path / 'train', f'{name}.png', k)
    write(tmp_path / 'val', 'dog_3.png', 4)
    return tmp_path


def test_a_pattern_finds_classes_in_names(pets, caplog):
    source = open_source(f'folder:{pets}/train/{{label}}_*', 'train')
    assert source.info.class_names == ('big_cat', 'dog')
    assert dict(zip(values(source), source.labels(), strict=True)) == {0: 0, 1: 0, 2: 1, 3: 1}
    val = open_source(f'folder:{pets}/{{split}}/{{label}}_*.png', 'val')
    assert val.info.class_names == ('big_cat', 'dog') and values(val) == [4]
    write(pets / 'train', 'other.png')
    assert len(open_source(f'folder:{pets}/train/{{label}}_*', 'train')) == 4
    assert mentions(caplog.text, '1 images', "'other.png'")


@pytest.mark.parametrize(
    ('pattern', 'message'),
    [
        ('train/{label}-*', '4 images.*below'),
        ('train/{class}_*', "unknown field 'class'"),
        ('train/{split}_*', 'write {label} once'),
        ('train/{label}_{label}', 'write {label} once'),
        ('none/{label}_*', 'does not exist'),
        ('{split}/{label}_*', "unknown split 'test'"),
    ],
)
def test_mistakes_in_patterns(pets, pattern, message):
    split = 'test' if pattern.startswith('{split}') else 'train'
    with pytest.raises(UserError, match=message):
        open_source(f'folder:{pets}/{pattern}', split)
