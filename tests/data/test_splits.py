"""Split expressions over a source of known size."""

import numpy as np
import pytest

from vit_jax.data import sources
from vit_jax.data.records import SourceInfo
from vit_jax.data.splits import select
from vit_jax.errors import UserError

SIZES = {'train': 101, 'test': 30}


class Numbers:
    """Record i is the number i, of class i % 3."""

    def __init__(self, base):
        if base not in SIZES:
            raise UserError(f'unknown split {base!r}')
        self.base = base
        self.info = SourceInfo(3, ('a', 'b', 'c'))

    def __len__(self):
        return SIZES[self.base]

    def __getitem__(self, index):
        return {'image': np.full((1, 1, 1), index, np.uint8), 'label': index % 3}

    def labels(self):
        return np.arange(len(self)) % 3

    def record_name(self, index):
        return f'{self.base} {index}'


def chosen(split):
    subset = select('numbers', split, Numbers)
    return [subset.record_name(i) for i in range(len(subset))]


def names(base, indices):
    return [f'{base} {i}' for i in indices]


@pytest.mark.parametrize(
    ('split', 'expected'),
    [
        ('train', range(101)),
        ('train[:]', range(101)),
        ('train[:90%]', range(91)),
        ('train[90%:]', range(91, 101)),
        ('train[-10%:]', range(91, 101)),
        ('train[:0.5%]', range(1)),  # 0.505
        ('train[:2.5%]', range(3)),  # 2.525
        ('train[25:75]', range(25, 75)),
        ('train[-3:]', range(98, 101)),
        ('train[:-98]', range(3)),
        ('train[50%:52%]', range(50, 53)),
        ('train[:2 per class]', range(6)),
        ('train[1:2 per class]', range(3, 6)),
        ('train[-1: per class]', range(98, 101)),
        ('train[:10% per class]', [*range(9)]),
    ],
)
def test_slices(split, expected):
    assert chosen(split) == names('train', expected)


def test_parts_cover_the_split_once():
    parts = ['train[:33%]', 'train[33%:66%]', 'train[66%:]']
    assert [name for part in parts for name in chosen(part)] == chosen('train')


def test_union_keeps_the_order_and_may_name_one_split_twice():
    expected = names('test', range(2)) + names('train', [100]) + names('test', [29])
    assert chosen('test[:2]+train[-1:] + test[29:]') == expected


def test_labels_and_records_follow_the_slice():
    subset = select('numbers', 'train[10:13]+test[1:2]', Numbers)
    np.testing.assert_array_equal(subset.labels(), [1, 2, 0, 1])
    assert [int(subset[i]['image'].item()) for i in range(len(subset))] == [10, 11, 12, 1]


@pytest.mark.parametrize('size', [1, 7, 99, 1000, 50_000])
@pytest.mark.parametrize('split', ['train[:33%]', 'train[17%:67%]', 'train[-15%:]', 'train[3%:]'])
def test_percentages_round_as_in_tfds(monkeypatch, size, split):
    tfds = pytest.importorskip('tensorflow_datasets')
    monkeypatch.setitem(SIZES, 'train', size)
    instruction = tfds.core.ReadInstruction.from_spec(split)
    (theirs,) = instruction.to_absolute(
        {'train': tfds.core.SplitInfo(name='train', shard_lengths=[size], num_bytes=0)}
    )
    low, high = theirs.from_ or 0, size if theirs.to is None else theirs.to
    if low < high:
        assert chosen(split) == names('train', range(low, high))
    else:
        with pytest.raises(UserError, match='selects no example'):
            chosen(split)


@pytest.mark.parametrize(
    ('split', 'message'),
    [
        ('trian', "unknown split 'trian'"),
        ('train[', r"cannot read 'train\['"),
        ('train[:5 each class]', 'cannot read'),
        ('train[a:b]', 'cannot read'),
        ('train[:1.5]', 'cannot read'),
        ('', "cannot read ''"),
        ('train+', "cannot read ''"),
        ('train[:102]', '102 is beyond the 101 examples'),
        ('train[:101%]', '101% is beyond'),
        ('train[:40 per class]', 'class a: 40 is beyond the 34'),
        ('train[60:40]', r"101 in 'train'."),
    ],
)
def test_mistakes_are_one_line(split, message):
    with pytest.raises(UserError, match=message) as error:
        chosen(split)
    assert '\n' not in str(error.value)


@pytest.fixture
def labeled(monkeypatch):
    """Examples of three classes that all have one label."""

    def make(label):
        record = {'image': np.zeros((1, 1, 1)), 'label': label}
        monkeypatch.setattr(Numbers, '__getitem__', lambda self, index: record)
        return select('numbers', 'test[5:]', Numbers)

    return make


@pytest.mark.parametrize(
    'label', [-1, 3, np.int64(7), 3.0, -1.0, 1.5, np.array(3), np.float32(np.nan), 'b']
)
def test_label_out_of_range_names_the_record(labeled, label):
    subset = labeled(label)
    with pytest.raises(UserError, match=rf'test 5: label {label} is outside of 0\.\.2'):
        subset[0]
    with pytest.raises(UserError, match=r'test 5: label .* is outside of 0\.\.2'):
        subset.only_classes((0, 1, 2))[0]


@pytest.mark.parametrize('label', [2, 2.0, np.uint8(2), np.array(2), np.array(2.0), np.float16(2)])
def test_a_label_is_a_whole_number_however_it_is_written(labeled, label):
    subset = labeled(label)
    assert isinstance(subset[0]['label'], (int, np.integer))
    assert subset[0]['label'] == 2
    assert subset.only_classes((2, 1, 0))[0]['label'] == 0


def test_several_labels_are_for_the_task(labeled):
    np.testing.assert_array_equal(labeled(np.array([0.0, 7.5]))[0]['label'], [0.0, 7.5])


@pytest.mark.parametrize(
    ('name', 'written'),
    [('photos', 'folder:photos'), ('photos/a.csv', 'table:photos/a.csv'), ('/a/b.tar', 'tar:/a/b')],
)
def test_a_path_without_a_source_is_told_what_to_write(name, written, tmp_path, monkeypatch):
    (tmp_path / 'photos').mkdir()
    (tmp_path / 'digits').mkdir()  # no reason to refuse the source of this name
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=written):
        sources.open_source(name, 'train')
    assert len(sources.open_source('digits', 'test'))
