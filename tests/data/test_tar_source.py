"""Shards of WebDataset: what an example is, splits, the index, and damaged shards."""

import io
import json
import os
import tarfile

import pytest
from helpers import loading
from helpers.messages import mentions
from PIL import Image

from vit_jax.data.sources import open_source
from vit_jax.errors import UserError


def png(value):
    file = io.BytesIO()
    Image.new('RGB', (8, 6), (value, value, value)).save(file, 'PNG')
    return file.getvalue()


def write(file, members):
    """Write a shard of {name: bytes}, or of such pairs; a target in place of bytes makes a link."""
    with tarfile.open(file, 'w') as tar:
        for name, content in members.items() if isinstance(members, dict) else members:
            member = tarfile.TarInfo(name)
            if isinstance(content, bytes):
                member.size = len(content)
                tar.addfile(member, io.BytesIO(content))
            else:
                member.type, member.linkname = content
                tar.addfile(member)


def labeled(values):
    members = {}
    for value in values:
        members |= {f'a/{value:04}.png': png(value), f'a/{value:04}.cls': b'%d\n' % (value % 3)}
    return members


@pytest.fixture(autouse=True)
def cache_folder(tmp_path, monkeypatch):
    monkeypatch.setenv('XDG_CACHE_HOME', str(tmp_path / 'cache'))
    return tmp_path / 'cache' / 'vit_jax' / 'tar'


@pytest.fixture
def shards(tmp_path):
    """Two shards of training and one of tests; the pixels' value is the number of the example."""
    folder = tmp_path / 'shards'
    folder.mkdir()
    write(folder / 'train-000.tar', labeled(range(5)))
    write(folder / 'train-001.tar', labeled(range(5, 9)))
    write(folder / 'test-000.tar', labeled([200, 202]))
    return folder


def values(source):
    return [int(source[i]['image'][0, 0, 0]) for i in range(len(source))]


def test_examples_in_the_order_of_the_shards(shards):
    source = open_source(f'tar:{shards}', 'train')
    assert values(source) == list(range(9))
    assert source.labels().tolist() == [0, 1, 2] * 3
    assert source.class_counts().tolist() == [3, 3, 3]
    assert source.info.class_names == ('0', '1', '2')
    assert source[4]['label'] == 1
    assert source.record_name(6) == f'{shards}/train-001.tar a/0006'
    assert values(open_source(f'tar:{shards}', 'test')) == [200, 202]


@pytest.mark.parametrize(
    ('pattern', 'split', 'expected'),
    [
        ('train-{000..001}.tar', 'train', range(9)),
        ('train-{001..001}.tar', 'train', range(5, 9)),
        ('{split}-*.tar', 'test', (200, 202)),
        ('t*n-00[1].tar', 'train', range(5, 9)),
    ],
)
def test_patterns(shards, pattern, split, expected):
    assert values(open_source(f'tar:{shards}/{pattern}', split)) == list(expected)


def test_names_of_classes_stand_beside_the_shards(shards):
    (shards / 'classnames.txt').write_text('daisy\nrose\ntulip\nviolet\n')
    info = open_source(f'tar:{shards}', 'train').info
    assert info.class_names == ('daisy', 'rose', 'tulip', 'violet')
    (shards / 'classnames.txt').write_text('daisy\nrose\n')
    with pytest.raises(UserError, match=r'classnames.txt names 2 .* 2'):
        open_source(f'tar:{shards}', 'train')


@pytest.mark.parametrize(
    ('content', 'names'),
    [
        ('\ufeffdaisy\r\nrose\r\ntulip\r\n\r\n\n', ('daisy', 'rose', 'tulip')),
        ('daisy\u2028\nrose\x0b\ntulip', ('daisy\u2028', 'rose\x0b', 'tulip')),
        ('daisy\n\ntulip\nviolet\n', 'line 2'),
        ('Gänse\nrose\ntulip\n'.encode('latin-1'), 'UTF-8'),
    ],
)
def test_marks_and_empty_lines_are_no_classes(shards, content, names):
    file = shards / 'classnames.txt'
    file.write_bytes(content if isinstance(content, bytes) else content.encode())
    if isinstance(names, tuple):
        assert open_source(f'tar:{shards}', 'train').info.class_names == names
        return
    with pytest.raises(UserError, match=rf'classnames\.txt.*{names}') as error:
        open_source(f'tar:{shards}', 'train')
    assert '\n' not in str(error.value)


HARD, SYMBOLIC = tarfile.LNKTYPE, tarfile.SYMTYPE


def test_links_stand_for_members_of_their_shard(tmp_path, caplog):
    members = {
        './a/1.png': (SYMBOLIC, '../b/5.png'),
        './a/1.cls': b'1',
        './a/2.png': (HARD, './a/1.png'),
        './a/2.cls': (HARD, './a/1.cls'),
        './a/3.png': (SYMBOLIC, '3.png'),
        './a/3.cls': b'1',
        './a/4.png': (SYMBOLIC, '/etc/passwd'),
        './b/5.png': png(5),
        './b/5.cls': b'0',
    }
    write(tmp_path / 'shard.tar', members)
    source = open_source(f'tar:{tmp_path}', 'train')
    assert values(source) == [5, 5, 5]
    assert source.labels().tolist() == [1, 1, 0]
    assert f'source tar:{tmp_path}: 2 links' in caplog.text


def test_names_with_dots_are_counted_and_named(tmp_path, caplog):
    members = {
        '1.png': png(1),
        '1.seg.png': png(9),
        '2020.05.01.png': png(2),
        '3.input.png': png(3),
    }
    write(tmp_path / 'shard.tar', members)
    assert values(open_source(f'tar:{tmp_path}', 'train')) == [1]
    assert '2 images' in caplog.text and '2020.05.01.png' in caplog.text
    (tmp_path / 'shard.tar').unlink()
    write(tmp_path / 'other.tar', {'3.input.png': png(3)})
    with pytest.raises(UserError, match=r'3\.input\.png'):
        open_source(f'tar:{tmp_path}', 'train')


def test_hidden_members_belong_to_no_example(tmp_path):
    """A tar of macOS has a member ._NAME before each member with attributes."""
    members = {}
    for name, content in labeled(range(3)).items():
        folder, _, base = name.rpartition('/')
        members |= {f'./{folder}/._{base}': b'\0\5\x16\7', f'./{name}': content}
    write(tmp_path / 'shard.tar', members)
    source = open_source(f'tar:{tmp_path}', 'train')
    assert values(source) == source.labels().tolist() == [0, 1, 2]


def test_of_several_images_the_first_form_is_taken(tmp_path, caplog):
    photo = io.BytesIO()
    Image.new('RGB', (8, 6), (200, 200, 200)).save(photo, 'JPEG')
    write(tmp_path / 'shard.tar', {'1.jpg': photo.getvalue(), '1.png': png(1), '2.png': png(2)})
    assert values(open_source(f'tar:{tmp_path}', 'train')) == [200, 2]
    assert mentions(caplog.text, '1 examples', 'several')


@pytest.mark.fault(85)
@pytest.mark.parametrize(
    ('members', 'named'),
    [
        ([('0.png', png(0)), ('1.png', png(1)), ('0.cls', b'0'), ('1.cls', b'1')], '2 .*0'),
        ([('0.png', png(0)), ('0.cls', b'0'), ('0.PNG', png(1)), ('0.cls', b'1')], r'2 .*0\.PNG'),
    ],
)
def test_members_that_mix_examples_are_refused(tmp_path, members, named):
    write(tmp_path / 'shard.tar', members)
    with pytest.raises(UserError, match=rf'shard\.tar: .*{named}'):
        open_source(f'tar:{tmp_path}', 'train')


@pytest.mark.fault(85)
def test_a_shard_that_is_replaced_while_it_is_read_is_refused(shards):
    source = open_source(f'tar:{shards}', 'train')
    write(shards / 'train-000.tar', labeled([0]) | {'a/0000.cls': b'2\n'})
    with pytest.raises(UserError, match=r'train-000\.tar a/0000: .* 2, but 0'):
        source[0]


def test_captions_and_objects(tmp_path):
    about = {'label': 1, 'title': 'Two cats', 'width': 8, 'image': 'x'}
    members = {
        '1.jpg.notes': b'not an image',
        '2.png': png(2),
        '2.txt': 'Zwei Kätzchen\n'.encode(),
        '2.json': json.dumps(about).encode(),
        '3.txt': b'without an image',
        '4.PNG': png(4),
        '4.json': b'[1]',
    }
    write(tmp_path / 'shard.tar', members)
    source = open_source(f'tar:{tmp_path}', 'train')
    assert len(source) == 2
    record = source[0]
    assert record.pop('image').shape == (6, 8, 3)
    assert record == {'title': 'Two cats', 'caption': 'Zwei Kätzchen'}
    assert source[1].keys() == {'image'}
    assert source.info.num_classes == 0, 'not every example has a class'
    with pytest.raises(UserError, match=r'image.*class'):
        source.labels()


def test_classes_of_objects(tmp_path):
    write(tmp_path / 'shard.tar', {'1.png': png(1), '1.json': b'{"label": 2}'})
    source = open_source(f'tar:{tmp_path}', 'train')
    assert (source[0]['label'], source.info.num_classes) == (2, 3)


def test_a_shard_is_indexed_once(shards, cache_folder, monkeypatch):
    open_source(f'tar:{shards}', 'train')
    assert len(list(cache_folder.glob('*.npz'))) == 2

    def scan(*_):
        raise AssertionError('scanned again')

    with monkeypatch.context() as patch:
        patch.setattr(tarfile, 'open', scan)
        assert values(open_source(f'tar:{shards}', 'train')) == list(range(9))
    write(shards / 'train-001.tar', labeled(range(20, 30)))
    assert values(open_source(f'tar:{shards}', 'train')) == [*range(5), *range(20, 30)]


@pytest.mark.fault(87)
def test_a_shard_that_is_replaced_at_a_fixed_time_is_indexed_anew(shards):
    shard = shards / 'train-001.tar'
    for labels in ([0, 1, 2, 0], [2, 1, 0, 2]):
        members = {}
        for value, label in zip(range(5, 9), labels, strict=True):
            members |= {f'{value}.png': png(value), f'{value}.cls': b'%d' % label}
        write(shard, members)
        os.utime(shard, (0, 0))
        assert open_source(f'tar:{shards}', 'train[5:]').labels().tolist() == labels


@pytest.mark.fault(87)
def test_a_damaged_index_is_made_anew(shards, cache_folder):
    expected = values(open_source(f'tar:{shards}', 'train'))
    for index in cache_folder.glob('*.npz'):
        index.write_bytes(b'PK no index')
    for _ in range(2):
        assert values(open_source(f'tar:{shards}', 'train')) == expected


@pytest.mark.long
def test_batches_do_not_depend_on_threads_and_workers(shards):
    loading.assert_read_alike(f'tar:{shards}', 4)


@pytest.mark.fault(85)
def test_a_shard_that_is_cut_off_is_refused(shards):
    shard = shards / 'train-001.tar'
    shard.write_bytes(shard.read_bytes()[:4700])
    with pytest.raises(UserError, match=r'train-001.tar.*\d examples') as error:
        open_source(f'tar:{shards}', 'train')
    assert '\n' not in str(error.value)


@pytest.mark.parametrize(
    'content', [b'', b'no tar at all' * 100, b'\x1f\x8b compressed' * 60], ids=len
)
def test_what_is_no_shard_is_refused(tmp_path, content):
    (tmp_path / 'shard.tar').write_bytes(content)
    with pytest.raises(UserError, match=r'shard\.tar|shard.*member'):
        open_source(f'tar:{tmp_path}', 'train')


@pytest.mark.parametrize('content', [b'three', b'-1', b''])
def test_a_class_that_is_no_number_is_refused(tmp_path, content):
    write(tmp_path / 'shard.tar', {'1.png': png(1), '1.cls': content})
    with pytest.raises(UserError, match=r'shard\.tar 1:'):
        open_source(f'tar:{tmp_path}', 'train')


@pytest.mark.parametrize('content', [b'\xff', b'x' * 2**21])
def test_a_caption_that_cannot_be_read_is_broken(tmp_path, content):
    members = {f'{i}.png': png(i) for i in range(40)}
    write(tmp_path / 'shard.tar', {'0.png': png(0), '0.txt': content} | members)
    source = open_source(f'tar:{tmp_path}', 'train')
    with pytest.raises(Exception, match=r'shard\.tar 0: '):
        source[0]
    assert list(source.broken) == [0]


@pytest.mark.parametrize(
    ('path', 'split', 'message'),
    [
        ('', 'val', r"unknown split 'val' \(valid: test, train\)"),
        ('/train-{000..002}.tar', 'train', r'train-002\.tar'),
        ('/train-*.tar', 'test', r'has no split .*write \{split\}'),
        ('/none', 'train', 'does not exist'),
    ],
)
def test_what_there_is_not(shards, path, split, message):
    with pytest.raises(UserError, match=message):
        open_source(f'tar:{shards}{path}', split)


@pytest.mark.parametrize('about', [1.5, True, -1, [1], 10**20, 10**7])
def test_a_class_that_is_no_whole_number_is_refused_by_name(tmp_path, about):
    members = {f'{i}.png': png(i) for i in range(3)}
    members |= {f'{i}.json': json.dumps({'label': i}).encode() for i in range(3)}
    members['1.json'] = json.dumps({'label': about}).encode()
    write(tmp_path / 'shard.tar', dict(sorted(members.items())))
    with pytest.raises(UserError, match=r'shard.tar 1:'):
        open_source(f'tar:{tmp_path}', 'train')


def test_an_example_without_a_class_among_others_is_named(tmp_path, caplog):
    write(tmp_path / 'shard.tar', labeled(range(3)) | {'a/0009.png': png(9)})
    assert open_source(f'tar:{tmp_path}', 'train').info.num_classes == 0
    assert mentions(caplog.text, '1', '4 examples')
    assert 'a/0009' in caplog.text


def test_the_listing_has_names_labels_and_sizes(shards):
    before = open_source(f'tar:{shards}', 'train').listing()
    members = labeled(range(5, 9))
    write(shards / 'train-001.tar', members | {'a/0006.cls': b'1\n'})
    relabeled = open_source(f'tar:{shards}', 'train').listing()
    assert relabeled.examples != before.examples and relabeled.contents == before.contents
    write(shards / 'train-001.tar', members | {'a/0006.png': png(6) + b'more'})
    replaced = open_source(f'tar:{shards}', 'train').listing()
    assert replaced.examples == before.examples and replaced.contents != before.contents
    unseen = open_source(f'tar:{shards}', 'train[:5]').listing()
    write(shards / 'train-001.tar', members)
    assert open_source(f'tar:{shards}', 'train[:5]').listing() == unseen
