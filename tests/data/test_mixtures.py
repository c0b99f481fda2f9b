"""Mixtures of sources: shares, order, classes, and what cannot be mixed."""

import collections
import contextlib
import itertools
import pickle

import numpy as np
import pytest
from helpers.messages import mentions
from PIL import Image

from vit_jax.config.run import Data
from vit_jax.data.batches import Mixture, Process
from vit_jax.data.dataset import open_dataset
from vit_jax.data.sources import open_source
from vit_jax.errors import UserError

MIXTURE = Mixture(('a', 'b', 'c'), (0.7, 0.25, 0.05), (40, 1000, 3))


def write(root, name, values):
    (root / name).mkdir(parents=True)
    for value in values:
        Image.new('RGB', (4, 4), (value,) * 3).save(root / name / f'{value}.png')


@pytest.fixture
def folders(tmp_path):
    """`a` has 30 cats and dogs, `b` 12 dogs and emus; a pixel is the image's number."""
    write(tmp_path, 'a/cat', range(15))
    write(tmp_path, 'a/dog', range(15, 30))
    write(tmp_path, 'b/dog', range(100, 106))
    write(tmp_path, 'b/emu', range(106, 112))
    return tmp_path


def name_of(folders, a=0.7, b=0.3):
    return f'folder:{folders}/a*{a}+folder:{folders}/b*{b}'


def test_every_block_has_the_shares_and_every_source_its_epochs():
    found = MIXTURE.examples(np.arange(4000), seed=3)
    members = np.searchsorted([40, 1040], found, side='right')
    for block in members.reshape(-1, 100):
        np.testing.assert_array_equal(np.bincount(block), [70, 25, 5])
    for member, size in enumerate(MIXTURE.sizes):
        mine = found[members == member]
        epochs = [mine[start : start + size] for start in range(0, len(mine) - size + 1, size)]
        assert all(len(set(epoch)) == size for epoch in epochs)
        assert member == 2 or len(epochs) < 2 or (epochs[0] != epochs[1]).any()
    assert (members[:100] != members[100:200]).any()
    assert (found != MIXTURE.examples(np.arange(4000), seed=4)).any()


def test_any_position_is_computed_by_itself():
    positions = np.array([5, 123, 3999, 10**7])
    whole = MIXTURE.examples(np.arange(4000), seed=0)
    np.testing.assert_array_equal(MIXTURE.examples(positions, seed=0)[:3], whole[positions[:3]])


def test_the_order_stays_the_same_in_all_versions():
    assert MIXTURE.examples(np.arange(8), seed=0).tolist() == [15, 19, 6, 17, 26, 0, 643, 34]


def test_what_was_seen_is_counted_exactly():
    members = np.searchsorted([40, 1040], MIXTURE.examples(np.arange(250), 1), side='right')
    for count in (0, 1, 99, 100, 250):
        shares = np.bincount(members[:count], minlength=3) / max(count, 1)
        np.testing.assert_allclose(list(MIXTURE.seen(count, 1).values()), shares)


@pytest.mark.parametrize('shares', [(0.7, 0.3), (1 / 3, 2 / 3), (0.005, 0.995), (0.0001, 0.9999)])
def test_shares_are_rounded_to_blocks(shares):
    counts = Mixture(('a', 'b'), shares, (5, 5)).counts
    np.testing.assert_allclose(counts / counts.sum(), shares, atol=5e-5)
    assert counts.sum() in (100, 1000, 10_000)


def test_classes_of_both_are_put_together(folders):
    source = open_source(name_of(folders), 'train')
    assert source.info.class_names == ('cat', 'dog', 'emu')
    assert len(source) == 42
    for i in range(len(source)):
        record = source[i]
        value = record['image'][0, 0, 0]
        assert record['label'] == np.searchsorted([15, 106], value, side='right')
    np.testing.assert_array_equal(source.class_counts(), [15, 21, 6])
    part = open_source(name_of(folders), 'train[:2 per class]')
    np.testing.assert_array_equal(part.class_counts(), [2, 4, 2])
    dogs = source.only_classes((1,))
    assert dogs.mixture.sizes == (15, 6)
    with pytest.raises(UserError, match=r'no example .*/b'):
        source.only_classes((0,)).mixture  # noqa: B018


def batches_of(folders, process=None, start=0, count=5, **options):
    data = open_dataset(
        Data(source=name_of(folders), split='train', transforms='flip', **options),
        20,
        process=process or Process(),
    )
    with contextlib.closing(data.train_batches(start)) as made:
        return data, list(itertools.islice(made, count))


def test_batches_are_the_same_after_a_stop_in_parts_and_from_processes(folders):
    data, whole = batches_of(folders)
    _, later = batches_of(folders, start=3, count=2)
    halves = [batches_of(folders, Process((part,), 2), threads=2)[1] for part in (0, 1)]
    for batch, again in zip(whole[3:], later, strict=True):
        np.testing.assert_array_equal(batch['image'], again['image'])
    for batch, one, other in zip(whole, *halves, strict=True):
        both = np.concatenate([one['index'], other['index']])
        np.testing.assert_array_equal(batch['index'], both)
    seen = np.concatenate([batch['image'][:, 0, 0, 0] for batch in whole])
    assert collections.Counter(seen >= 100) == {False: 70, True: 30}
    names = [f'folder:{folders}/{name}' for name in 'ab']
    assert data.seen(5) == {'a': 0.7, 'b': 0.3}
    assert mentions(data.plan.notes[0], '70.0%', 'examples', names[0])
    copy = pickle.loads(pickle.dumps(data.plan))
    np.testing.assert_array_equal(copy.batch(7)[1], data.plan.batch(7)[1])


def test_evaluation_has_every_example_once(folders):
    data = open_dataset(Data(source=name_of(folders), split='train'), 16)
    with contextlib.closing(data.eval_batches()) as made:
        found = np.concatenate([batch['index'][batch['mask'] == 1] for batch in made])
    assert sorted(found) == list(range(42))


@pytest.mark.parametrize(
    ('first', 'second', 'names'),
    [
        ('k\u00e4se', 'ka\u0308se', ('dog', 'k\u00e4se')),
        ('ka\u0308se', 'k\u00e4se', ('dog', 'ka\u0308se')),
        ('Cat', 'cat', None),
    ],
)
def test_spellings_of_classes_that_look_the_same_are_one(tmp_path, first, second, names):
    for folder, name in (('a', first), ('b', second)):
        for kind in (name, 'dog'):
            (tmp_path / folder / kind).mkdir(parents=True)
            Image.new('RGB', (4, 4)).save(tmp_path / folder / kind / 'x.png')
    mixture = f'folder:{tmp_path}/a*0.5+folder:{tmp_path}/b*0.5'
    if names is None:
        with pytest.raises(UserError, match=r"'cat'.*'Cat'"):
            open_source(mixture, 'train')
        return
    source = open_source(mixture, 'train')
    assert source.info.class_names == names
    assert source.class_counts().tolist() == [2, 2]
    other = open_source(f'folder:{tmp_path}/b', 'train').numbered_as(source.info)
    assert sorted(other.labels()) == [0, 1] and other.info.class_names == names


def test_what_cannot_be_mixed_is_one_line(folders):
    def refused(name, message, **options):
        with pytest.raises(UserError, match=message) as error:
            open_dataset(Data(source=name, split='train', **options), 4)
        assert '\n' not in str(error.value)

    refused(name_of(folders, b=0), 'weight of .*b must be positive')
    refused(f'folder:{folders}/a*1+folder:{folders}/a*2', '/a .*twice')
    refused(f'folder:{folders}/a*1+digits*1', 'and digits')
    refused(f'folder:{folders}/a+folder:{folders}/b', r'a\*0\.7\+folder:b\*0\.3')
    refused(f'folder:{folders}/a*1+scenes_captions*1', 'scenes_captions')
    refused(name_of(folders), 'fixed sizes', buckets=(8,))
    with pytest.raises(UserError, match=r'below 1 in 10,000'):
        open_source(name_of(folders, a=1, b='0.00001'), 'train').mixture  # noqa: B018


def test_shares_of_classes_are_those_of_training(folders):
    source = open_source(name_of(folders), 'train')
    np.testing.assert_allclose(source.class_shares(), [0.35, 0.35 + 0.15, 0.15])
    alone = open_source(f'folder:{folders}/b', 'train')
    np.testing.assert_allclose(alone.class_shares(), [0.5, 0.5])
