"""The digits of scikit-learn."""

import numpy as np
import pytest
from sklearn.datasets import load_digits

from vit_jax.data.sources import open_source
from vit_jax.errors import UserError


def test_sizes_shapes_and_classes():
    train, test = open_source('digits', 'train'), open_source('digits', 'test')
    assert (len(train), len(test)) == (1437, 360)
    assert train.info.num_classes == 10
    assert train.info.class_names == tuple('0123456789')
    record = train[3]
    assert record['image'].shape == (8, 8, 1)
    assert record['image'].dtype == np.uint8


def test_splits_are_disjoint_stratified_and_complete():
    def images(split):
        source = open_source('digits', split)
        return {source[i]['image'].tobytes() for i in range(len(source))}

    everything = {np.round(x * 255 / 16).astype(np.uint8).tobytes() for x in load_digits().images}
    assert images('train') | images('test') == everything
    assert not images('train') & images('test')
    counts = np.bincount(open_source('digits', 'test').labels())
    assert counts.min() >= 34
    assert counts.max() <= 37


def test_pixels_span_the_bytes_and_labels_match():
    digits = load_digits()
    original = {x.tobytes(): y for x, y in zip(digits.images, digits.target, strict=True)}
    source = open_source('digits', 'train+test')
    values = set()
    for i in range(len(source)):
        image, label = source[i]['image'], source[i]['label']
        values |= set(np.unique(image).tolist())
        assert original[np.round(image[..., 0] / 255 * 16).tobytes()] == label
    assert values == {round(v * 255 / 16) for v in range(17)}


def test_few_per_class():
    source = open_source('digits', 'train[:5 per class]')
    np.testing.assert_array_equal(np.bincount(source.labels()), [5] * 10)


def test_mistakes():
    with pytest.raises(UserError, match=r"unknown split 'tset'; .* 'test'"):
        open_source('digits', 'tset')
    with pytest.raises(UserError, match='8x8'):
        open_source('digits:8x8', 'train')
    with pytest.raises(UserError, match=r"unknown source name 'digit'; .* 'digits'"):
        open_source('digit', 'train')


def test_records_cannot_be_changed_in_place():
    with pytest.raises(ValueError, match='read-only'):
        open_source('digits', 'train')[0]['image'][0, 0, 0] = 1
