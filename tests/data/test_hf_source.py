"""Data sets of Hugging Face: where they are found, what is read of them, and damaged files."""

import io
import json
import os
import pickle

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from helpers import loading
from PIL import Image

from vit_jax.data.sources import hf, open_source
from vit_jax.errors import UserError

MESSAGE = b'\xff\xff\xff\xff'  # begins each message of a stream of Arrow
FEATURES = {
    'image': {'_type': 'Image'},
    'label': {'_type': 'ClassLabel', 'names': ['daisy', 'rose']},
    'caption': {'_type': 'Value', 'dtype': 'string'},
}


def png(value):
    file = io.BytesIO()
    Image.new('RGB', (8, 6), (value, value, value)).save(file, 'PNG')
    return file.getvalue()


def table(values, features=FEATURES):
    columns = {
        'image': [{'bytes': png(v), 'path': f'{v}.png'} for v in values],
        'label': [v % 2 for v in values],
        'caption': [f'gray {v}' for v in values],
    }
    made = pa.table(columns)
    about = json.dumps({'info': {'features': features}}) if features else '{}'
    return made.replace_schema_metadata({'huggingface': about})


def write_parquet(file, values, **options):
    file.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(table(values, **options), file, row_group_size=3)


def write_arrow(file, values):
    """Write a file as `datasets.Dataset.save_to_disk` does."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with pa.OSFile(str(file), 'wb') as opened:
        made = table(values)
        with pa.ipc.new_stream(opened, made.schema) as stream:
            stream.write_table(made, max_chunksize=4)


@pytest.fixture(autouse=True)
def cache_folder(tmp_path, monkeypatch):
    monkeypatch.setenv('XDG_CACHE_HOME', str(tmp_path / 'cache'))
    monkeypatch.setenv('HF_HOME', str(tmp_path / 'huggingface'))
    return tmp_path / 'cache'


@pytest.fixture
def flowers(tmp_path):
    """A repository of Parquet files: the pixels' value is the number of the row."""
    root = tmp_path / 'flowers'
    for part, values in enumerate((range(7), range(7, 12))):
        write_parquet(root / 'data' / f'train-{part:05}-of-00002-ab12.parquet', values)
    write_parquet(root / 'data' / 'test-00000-of-00001.parquet', [100, 101])
    return root


def values(source):
    return [int(source[i]['image'][0, 0, 0]) for i in range(len(source))]


def test_rows_of_parquet_files_in_their_order(flowers):
    source = open_source(f'hf:{flowers}', 'train')
    assert values(source) == list(range(12))
    assert source.info.class_names == ('daisy', 'rose')
    assert source.labels().tolist() == [0, 1] * 6
    assert source.class_counts().tolist() == [6, 6]
    record = source[8]
    assert record['image'].shape == (6, 8, 3)
    assert (record['label'], record['caption']) == (0, 'gray 8')
    assert source.record_name(8) == f'hf:{flowers} train row 8'
    assert values(open_source(f'hf:{flowers}', 'test')) == [100, 101]


def test_parquet_is_copied_once(flowers, cache_folder):
    open_source(f'hf:{flowers}', 'test')
    (copy,) = (cache_folder / 'vit_jax' / 'arrow').glob('*.arrow')
    before = copy.stat().st_ino  # a copy has an inode of its own; using it sets its time
    open_source(f'hf:{flowers}', 'test')
    assert copy.stat().st_ino == before
    write_parquet(flowers / 'data' / 'test-00000-of-00001.parquet', [50, 51, 52])
    assert values(open_source(f'hf:{flowers}', 'test')) == [50, 51, 52]


@pytest.mark.parametrize(
    ('path', 'name', 'split'),
    [
        ('saved/train/data-00000-of-00001.arrow', '{}/saved', 'train'),
        ('single/data-00000-of-00001.arrow', '{}/single', 'train'),
        (
            'huggingface/datasets/ann___flowers/default/0.0.0/ab/flowers-test.arrow',
            'ann/flowers',
            'test',
        ),
    ],
)
def test_layouts_of_arrow_files(tmp_path, path, name, split, cache_folder):
    write_arrow(tmp_path / path, range(9))
    assert values(open_source(f'hf:{name.format(tmp_path)}', split)) == list(range(9))
    assert not cache_folder.exists(), 'Arrow is read where it is'


def test_a_repository_in_the_cache_of_the_hub(tmp_path):
    repository = tmp_path / 'huggingface' / 'hub' / 'datasets--ann--flowers'
    write_parquet(repository / 'snapshots' / 'abc' / 'big' / 'train-00000-of-00001.parquet', [1])
    write_parquet(repository / 'snapshots' / 'abc' / 'tiny' / 'train-00000-of-00001.parquet', [2])
    (repository / 'refs').mkdir()
    (repository / 'refs' / 'main').write_text('abc')
    assert values(open_source('hf:ann/flowers/tiny', 'train')) == [2]
    with pytest.raises(UserError, match=r'big, tiny.*hf:ann/flowers/'):
        open_source('hf:ann/flowers', 'train')


def test_columns_without_features_are_chosen_by_their_types(tmp_path):
    write_parquet(tmp_path / 'train.parquet', range(4), features=None)
    source = open_source(f'hf:{tmp_path}', 'train')
    assert source.info.class_names == ('0', '1')
    assert source[3].keys() == {'image', 'label', 'caption'}


def test_batches_do_not_depend_on_threads_and_workers(flowers):
    loading.assert_read_alike(f'hf:{flowers}', 4)


def test_a_copy_for_a_worker_maps_the_files_anew(flowers):
    source = hf.Source(str(flowers), 'train')
    copy = pickle.dumps(source)
    assert len(copy) < 2000
    assert values(pickle.loads(copy)) == values(source)


@pytest.mark.fault(86)
def test_a_row_without_bytes_is_broken(tmp_path, caplog):
    made = table(range(40)).to_pydict()
    made['image'][3] = {'bytes': None, 'path': '/elsewhere/3.png'}
    file = tmp_path / 'train.parquet'
    pq.write_table(pa.table(made), file)
    source = open_source(f'hf:{tmp_path}', 'train')
    with pytest.raises(Exception, match=r"3.*'image'"):
        source[3]
    assert list(source.broken) == [3]


def cut(file):
    file.write_bytes(file.read_bytes()[:-300])


def spoil(file):
    content = bytearray(file.read_bytes())
    content[4:400] = bytes(396)
    file.write_bytes(content)


def rename_column(file):
    """Give a column a name that is not UTF-8."""
    file.write_bytes(file.read_bytes().replace(b'caption', b'capt\xffon'))


def cut_between_messages(file):
    content = file.read_bytes()
    file.write_bytes(content[: content.rindex(MESSAGE, 0, len(content) - 8)])


def wipe_a_message(file):
    """Zeros end a stream of Arrow, so that its last rows would be left out."""
    content = file.read_bytes()
    start = content.rindex(MESSAGE, 0, len(content) - 8)
    file.write_bytes(content[:start] + bytes(len(content) - 8 - start) + content[-8:])


def move_offset(file, value=2**31 - 1):
    """Damage an offset of the texts, of six letters each, which would end the process."""
    content = bytearray(file.read_bytes())
    start = content.index(np.arange(0, 5 * 6, 6, np.int32).tobytes())
    content[start + 8 : start + 12] = np.int32(value).tobytes()
    file.write_bytes(content)


def move_offset_back(file):
    move_offset(file, -1000)


@pytest.mark.fault(86)
@pytest.mark.parametrize(
    ('kind', 'damage'),
    [
        ('parquet', cut),
        ('parquet', spoil),
        ('parquet', rename_column),
        ('arrow', rename_column),
        *(('arrow', damage) for damage in (cut, spoil, cut_between_messages, wipe_a_message)),
        *(('arrow', damage) for damage in (move_offset, move_offset_back)),
    ],
)
def test_a_damaged_file_is_named_in_one_line(tmp_path, cache_folder, kind, damage):
    file = tmp_path / 'rows' / f'train.{kind}'
    (write_arrow if kind == 'arrow' else write_parquet)(file, range(12))
    damage(file)
    with pytest.raises(UserError, match=f'train.{kind} cannot be read') as error:
        open_source(f'hf:{tmp_path / "rows"}', 'train')
    assert '\n' not in str(error.value)
    assert not list(cache_folder.rglob('*.*')), 'nothing half-written'


@pytest.mark.fault(87)
def test_a_parquet_file_that_is_replaced_at_a_fixed_time_is_copied_anew(tmp_path):
    file = tmp_path / 'rows' / 'train.parquet'
    for labels in ([0, 0, 1, 1], [1, 1, 0, 0]):
        write_columns(file, {'image': pa.array(PNGS), 'label': pa.array(labels)})
        os.utime(file, (0, 0))
        assert open_source(f'hf:{tmp_path}/rows', 'train').labels().tolist() == labels


@pytest.mark.fault(87)
@pytest.mark.parametrize('damage', [cut, spoil, cut_between_messages, wipe_a_message])
def test_a_damaged_copy_is_made_anew(tmp_path, cache_folder, damage):
    write_parquet(tmp_path / 'rows' / 'train.parquet', range(12))
    assert values(open_source(f'hf:{tmp_path}/rows', 'train')) == list(range(12))
    (copy,) = cache_folder.rglob('*.arrow')
    damage(copy)
    assert values(open_source(f'hf:{tmp_path}/rows', 'train')) == list(range(12))


@pytest.mark.parametrize(
    ('name', 'split', 'message'),
    [
        ('{}', 'val', r"unknown split 'val' \(valid: test, train\)"),
        ('ann/none', 'train', 'hf download ann/none --repo-type dataset'),
        ('{}/data/..', 'validation', 'unknown split'),
    ],
)
def test_what_there_is_not(flowers, name, split, message):
    with pytest.raises(UserError, match=message):
        open_source(f'hf:{name.format(flowers)}', split)


def test_a_folder_without_rows_or_images(tmp_path):
    rows = tmp_path / 'rows'
    rows.mkdir()
    with pytest.raises(UserError, match=r'\.parquet or \.arrow'):
        open_source(f'hf:{rows}', 'train')
    pq.write_table(pa.table({'text': ['a']}), rows / 'train.parquet')
    with pytest.raises(UserError, match=r'image.*text'):
        open_source(f'hf:{rows}', 'train')
    pq.write_table(table([]), rows / 'train.parquet')
    with pytest.raises(UserError, match='has no rows'):
        open_source(f'hf:{rows}', 'train')


@pytest.mark.fault(87)
def test_a_cache_folder_that_cannot_be_written(flowers, tmp_path, monkeypatch):
    (tmp_path / 'file').write_text('')
    monkeypatch.setenv('XDG_CACHE_HOME', str(tmp_path / 'file'))
    with pytest.raises(UserError, match=r'folder.*XDG_CACHE_HOME'):
        open_source(f'hf:{flowers}', 'train')


def write_columns(file, columns, features=None):
    """Write a Parquet file of {name: Arrow array}, with features as `datasets` stores them."""
    file.parent.mkdir(parents=True, exist_ok=True)
    about = json.dumps({'info': {'features': features}}) if features else '{}'
    made = pa.table(columns).replace_schema_metadata({'huggingface': about})
    pq.write_table(made, file)


PNGS = [png(value) for value in range(4)]


@pytest.mark.parametrize(
    'labels',
    [
        pa.array([0.0, 1.0, 1.5, 0.0]),
        pa.array(['0', '1', '1', '0']),
        pa.array(['0', '1', '1', '0'], pa.large_string()),
        pa.array([False, True, True, False]),
        pa.array(['a', 'b', 'b', 'a']).dictionary_encode(),
    ],
    ids=lambda labels: str(labels.type),
)
def test_a_column_of_classes_that_are_no_whole_numbers_is_refused(tmp_path, labels):
    write_columns(tmp_path / 'train.parquet', {'image': pa.array(PNGS), 'label': labels})
    with pytest.raises(UserError, match=r"'label'") as error:
        open_source(f'hf:{tmp_path}', 'train')
    assert str(labels.type) in str(error.value)


@pytest.mark.parametrize('label', [10**7, 10**10, 2**62, -5, None])
def test_a_number_that_is_no_class_is_named_with_its_row(tmp_path, label):
    labels = pa.array([0, 1, label, 1], pa.int64())
    write_columns(tmp_path / 'train.parquet', {'image': pa.array(PNGS), 'label': labels})
    with pytest.raises(UserError, match=r"row 2: .*'label'"):
        open_source(f'hf:{tmp_path}', 'train')


@pytest.mark.parametrize(
    ('image', 'label', 'text'),
    [
        (pa.large_binary(), pa.uint8(), pa.large_string()),
        (pa.binary_view(), pa.int32(), pa.string_view()),
        (pa.struct({'bytes': pa.large_binary(), 'path': pa.string()}), pa.uint64(), pa.string()),
    ],
)
@pytest.mark.parametrize('form', ['parquet', 'stream', 'file'])
def test_types_that_other_libraries_write(tmp_path, image, label, text, form):
    """Polars writes large and view types, and Arrow with a footer; pandas writes large texts."""
    pictures = [{'bytes': one, 'path': 'x.png'} for one in PNGS] if image.num_fields else PNGS
    rows = pa.table(
        {
            'meta': pa.array([{'width': 8}] * 4),
            'digest': pa.array([b'1'] * 4),
            'image': pa.array(pictures, image),
            'label': pa.array([0, 1, 2, 1], label),
            'caption': pa.array(['a', 'b', None, 'd'], text),
        }
    )
    if form == 'parquet':
        pq.write_table(rows, tmp_path / 'train.parquet')
    else:
        new = pa.ipc.new_stream if form == 'stream' else pa.ipc.new_file
        with new(str(tmp_path / 'train.arrow'), rows.schema) as writer:
            writer.write_table(rows)
    source = open_source(f'hf:{tmp_path}', 'train')
    assert values(source) == list(range(4))
    assert source.labels().tolist() == [source[i]['label'] for i in range(4)] == [0, 1, 2, 1]
    assert [source[i]['caption'] for i in range(4)] == ['a', 'b', '', 'd']


CLASSES = {'_type': 'ClassLabel', 'names': ['a', 'b']}
NUMBERS = pa.array([0, 1, 0, 1])


@pytest.mark.parametrize(
    ('columns', 'features', 'named'),
    [
        ({'left': pa.array(PNGS), 'right': pa.array(PNGS)}, None, ['left', 'right']),
        (
            {'img': pa.array(PNGS), 'kind': NUMBERS, 'breed': NUMBERS},
            {'kind': CLASSES, 'breed': CLASSES},
            ['kind', 'breed'],
        ),
        ({'image': pa.array([{'bytes': None, 'path': 'a.png'}] * 4)}, None, ['image', 'paths']),
    ],
)
def test_columns_that_leave_a_choice_are_refused_by_name(tmp_path, columns, features, named):
    write_columns(tmp_path / 'train.parquet', columns, features)
    with pytest.raises(UserError) as error:
        open_source(f'hf:{tmp_path}', 'train')
    assert all(repr(name) in str(error.value) or name == 'paths' for name in named)


def test_of_several_columns_of_classes_the_one_with_a_usual_name_is_read(tmp_path):
    columns = {'img': pa.array(PNGS), 'coarse_label': NUMBERS, 'fine_label': pa.array([1, 0, 1, 0])}
    features = {'img': {'_type': 'Image'}, 'coarse_label': CLASSES, 'fine_label': CLASSES}
    write_columns(tmp_path / 'train.parquet', columns, features)
    assert open_source(f'hf:{tmp_path}', 'train').labels().tolist() == [1, 0, 1, 0]


FIRST, SECOND = (f'train-0000{part}-of-00002.parquet' for part in range(2))


@pytest.mark.parametrize(
    'change',
    [
        {'features': FEATURES | {'label': {'_type': 'ClassLabel', 'names': ['rose', 'daisy']}}},
        {'features': FEATURES | {'label': {'_type': 'ClassLabel', 'names': ['daisy', 'tulip']}}},
        {'features': None},
        {'drop': 'caption'},
        {'drop': 'label'},
    ],
)
def test_files_of_one_split_have_the_same_columns_and_classes(tmp_path, change):
    write_parquet(tmp_path / FIRST, range(4))
    rows = table(range(4, 8), change.get('features', FEATURES))
    pq.write_table(rows.drop_columns(change.get('drop', [])), tmp_path / SECOND)
    with pytest.raises(UserError, match=f'{FIRST} and {SECOND} differ'):
        open_source(f'hf:{tmp_path}', 'train')


@pytest.mark.fault(86)
@pytest.mark.parametrize(
    'names',
    [
        (FIRST,),
        (SECOND,),
        (FIRST, SECOND, 'train-00000-of-00001.parquet'),
        (FIRST, SECOND, 'train-00002-of-00003.parquet'),
        ('train-00000-of-00001-ab.parquet', 'train-00000-of-00001-cd.parquet'),
        (FIRST, SECOND, 'train.parquet'),
        ('train.parquet', 'data/train.parquet'),
        ('train/0000.parquet', 'train/0002.parquet'),
    ],
    ids=' '.join,
)
def test_files_that_are_missing_or_left_over_are_refused(tmp_path, names):
    for name in names:
        write_parquet(tmp_path / 'rows' / name, range(3))
    with pytest.raises(UserError, match=r'missing|remove') as error:
        open_source(f'hf:{tmp_path}/rows', 'train')
    assert any(name in str(error.value) for name in names)


@pytest.mark.fault(86)
def test_save_to_disk_lists_its_files(tmp_path):
    """It leaves the files of an earlier, longer writing where they are."""
    folder = tmp_path / 'rows' / 'train'
    for part in range(3):
        write_arrow(folder / f'data-0000{part}-of-00003.arrow', [part])
    listed = [f'data-0000{part}-of-00002.arrow' for part in range(2)]
    for part, name in enumerate(listed):
        write_arrow(folder / name, [10 + part])
    state = {'_data_files': [{'filename': name} for name in listed]}
    (folder / 'state.json').write_text(json.dumps(state))
    assert values(open_source(f'hf:{tmp_path}/rows', 'train')) == [10, 11]
    (folder / listed[1]).unlink()
    with pytest.raises(UserError, match=rf'missing.*{listed[1]}'):
        open_source(f'hf:{tmp_path}/rows', 'train')


def test_what_is_still_being_prepared_is_not_read(tmp_path):
    write_arrow(tmp_path / 'rows' / '0.0.0' / 'ab' / 'flowers-train.arrow', range(3))
    write_arrow(tmp_path / 'rows' / '0.0.0' / 'ab.incomplete' / 'flowers-train.arrow', range(9))
    assert values(open_source(f'hf:{tmp_path}/rows', 'train')) == [0, 1, 2]


def test_the_listing_has_labels_and_the_sizes_of_files(flowers):
    before = open_source(f'hf:{flowers}', 'train').listing()
    file = flowers / 'data' / 'train-00001-of-00002-ab12.parquet'
    write_parquet(file, [7, 8, 9, 10, 12])
    after = open_source(f'hf:{flowers}', 'train').listing()
    assert after.examples != before.examples
    write_parquet(file, [7, 8, 9, 10, 111])
    after = open_source(f'hf:{flowers}', 'train').listing()
    assert after.examples == before.examples and after.contents != before.contents
