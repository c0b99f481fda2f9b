"""Sketches that never repeat: functions of seed, split and index, graded by a power law."""

import numpy as np
import pytest

from vit_jax.data.sources import endless, open_source
from vit_jax.errors import UserError


def images(name='endless:classes=3', split='train[:600]'):
    source = open_source(name, split)
    return [source[i]['image'].tobytes() for i in range(len(source))]


def test_every_index_is_a_new_image():
    train = images()
    assert len(set(train)) == len(train)
    assert train == images(), 'a function of seed, split and index'
    others = images(split='val[:600]') + images('endless:classes=3,seed=1')
    assert not set(train) & set(others)
    source = open_source('endless:classes=3,examples=2000000000', 'train[-2:]')
    assert [source[i]['label'] for i in range(2)] == [1_999_999_998 % 3, 1_999_999_999 % 3]


def test_records_and_classes():
    source = open_source('endless:classes=3', 'test')
    record = source[7]
    assert record['image'].shape == (endless.SIDE, endless.SIDE, 1)
    assert record['image'].dtype == np.uint8
    np.testing.assert_array_equal([source[i]['label'] for i in range(30)], source.labels()[:30])
    assert source.class_counts().tolist() == [3334, 3333, 3333]
    few = open_source('endless:classes=3', 'test[:5 per class]')
    np.testing.assert_array_equal(np.bincount(few.labels()), [5] * 3)


def test_frequencies_of_kinds_follow_the_power_law():
    source = open_source('endless:classes=2,difficulty=1', 'test')
    sketches = endless.draw_sketches(2, 0)[:, :, 1:-1, 1:-1].reshape(2, endless.KINDS, -1)
    scaled = sketches / np.linalg.norm(sketches.astype(float), axis=-1, keepdims=True)
    first = np.array([scaled[i % 2, 0] @ source[i]['image'].ravel() for i in range(0, 2000, 2)])
    other = np.array([scaled[0, 1] @ source[i]['image'].ravel() for i in range(0, 2000, 2)])
    shares = endless.shares(1.0)
    assert shares[0] / shares[3] == pytest.approx(16)
    assert (first > other).mean() == pytest.approx(shares[0] + (1 - shares[:2].sum()) / 2, abs=0.1)
    assert endless.shares(0.0)[0] == 1
    assert endless.shares(4.0)[0] < shares[0]


@pytest.mark.parametrize(
    ('name', 'words'),
    [
        ('endless:clases=3', "did you mean 'classes'"),
        ('endless:64', 'classes'),
        ('endless:classes=many', "'endless:classes=16'"),
        ('endless:classes=1', 'classes'),
        ('endless:difficulty=nan', 'difficulty'),
        ('endless:difficulty=-1', 'difficulty'),
        ('endless:examples=0', 'examples'),
    ],
)
def test_mistakes(name, words):
    with pytest.raises(UserError, match=words):
        open_source(name, 'train')
    with pytest.raises(UserError, match="unknown split 'tset'"):
        open_source('endless', 'tset')
