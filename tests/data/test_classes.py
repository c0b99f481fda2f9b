"""Only some classes of a source, under new labels."""

import pickle

import numpy as np
import pytest
from helpers import loading

from vit_jax.config.run import Data
from vit_jax.data import sources
from vit_jax.data.dataset import open_dataset
from vit_jax.data.transforms import parse_transforms
from vit_jax.errors import UserError


@pytest.fixture(scope='module')
def digits():
    return sources.open_source('digits', 'test')


def records(source):
    return [source[i] for i in range(len(source))]


def test_classes_are_renumbered_in_the_order_given(digits):
    few = digits.only_classes((7, 2, 9))
    assert few.info == sources.SourceInfo(3, ('7', '2', '9'))
    kept = [(i, r) for i, r in enumerate(records(digits)) if r['label'] in (7, 2, 9)]
    assert len(few) == len(kept) > 100
    for j, (i, before) in enumerate(kept):
        after = few[j]
        assert after['label'] == {7: 0, 2: 1, 9: 2}[before['label']]
        np.testing.assert_array_equal(after['image'], before['image'])
        assert few.record_name(j) == digits.record_name(i)
    np.testing.assert_array_equal(few.labels(), [r['label'] for r in records(few)])


def test_all_classes_in_order_change_nothing(digits):
    same = digits.only_classes(tuple(range(10)))
    assert same.info == digits.info
    np.testing.assert_array_equal(same.labels(), digits.labels())


def test_classes_are_taken_of_what_the_split_selects():
    few = sources.open_source('digits', 'train[:5 per class]+test[:100]').only_classes((3, 4))
    train = [i for i in range(len(few)) if ' train ' in few.record_name(i)]
    assert len(train) == 10
    assert sorted(few[i]['label'] for i in train) == [0] * 5 + [1] * 5


def test_a_section_of_the_config_names_its_classes():
    data = open_dataset(Data(source='digits', split='test', classes=(8, 9)), 16)
    labels = np.concatenate([b['label'][b['mask'] > 0] for b in data.eval_batches()])
    np.testing.assert_array_equal(labels, data.source.labels())
    assert set(labels.tolist()) == {0, 1}


def test_training_sees_every_example_of_the_classes_once_an_epoch(digits):
    few = digits.only_classes((0, 5))
    batches = loading.train_batches(few, parse_transforms(''), batch_size=len(few), seed=1)
    for _ in range(2):
        np.testing.assert_array_equal(
            np.bincount(next(batches)['label']), np.bincount(few.labels())
        )


def test_reading_processes_can_take_it_along(digits):
    few = digits.only_classes((1, 6))
    copy = pickle.loads(pickle.dumps(few))
    assert [r['label'] for r in records(copy)] == few.labels().tolist()


@pytest.mark.parametrize('classes', [(), (3, 3), (10,), (-1,), ('3',)])
def test_classes_that_cannot_be(digits, classes):
    with pytest.raises(UserError, match=r'digits test: classes=.*one .* 0\.\.9,'):
        digits.only_classes(classes)


def test_a_split_without_these_classes():
    digit = sources.open_source('digits', 'test[:1]')
    others = [c for c in range(10) if c != digit[0]['label']]
    with pytest.raises(UserError, match=r'digits test.* classes'):
        digit.only_classes(others)
