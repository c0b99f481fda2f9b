"""Nearest neighbors, beside scikit-learn's."""

import numpy as np
import pytest
from helpers.datasets import dataset
from sklearn.neighbors import KNeighborsClassifier

from vit_jax.errors import UserError
from vit_jax.evaluators import knn


def blobs(size, seed):
    rng = np.random.default_rng(seed)
    label = rng.integers(0, 5, size).astype(np.int32)
    centers = np.random.default_rng(7).normal(size=(5, 8))
    return (centers[label] + rng.normal(size=(size, 8))).astype(np.float32), label


def classified(features, labels, x, k, temperature):
    """The class with most votes."""
    return knn.votes(features, labels, x, k, temperature, labels.max() + 1).argmax(1)


@pytest.mark.parametrize(('k', 'temperature'), [(1, 0.07), (5, 0.07), (20, 0.07), (20, 1.0)])
def test_classes_are_those_of_scikit_learn(k, temperature):
    (features, labels), (x, _) = blobs(300, 0), blobs(200, 1)
    reference = KNeighborsClassifier(
        k, metric='cosine', weights=lambda distance: np.exp((1 - distance) / temperature)
    ).fit(features, labels)
    ours = classified(features.astype(float), labels, x.astype(float), k, temperature)
    np.testing.assert_array_equal(ours, reference.predict(x))
    assert len(set(ours.tolist())) == 5


def test_accuracy_of_batches(monkeypatch):
    (features, labels), (x, y) = blobs(300, 0), blobs(200, 1)
    evaluator = knn.Evaluator(k=10)
    for take, (a, b) in ((evaluator.fit, (features, labels)), (evaluator.update, (x, y))):
        for i in range(0, len(b), 64):
            take({'features': a[i : i + 64]}, {'label': b[i : i + 64]})
    expected = (classified(features, labels, x, 10, 0.07) == y).mean()
    monkeypatch.setattr(knn, 'ROWS', 30)
    assert evaluator.result() == {'knn_accuracy': pytest.approx(expected, abs=1e-12)}
    assert 0.3 < expected < 1


def test_near_neighbors_outvote_more_that_are_far():
    features = np.array([[1.0, 0.0], [0.0, 1.0], [0.1, 1.0]])
    labels = np.array([4, 2, 2])
    x = np.array([[1.0, 0.1]])
    assert classified(features, labels, x, 3, 0.07).tolist() == [4]
    assert classified(features, labels, x, 3, 100.0).tolist() == [2]


def test_a_low_temperature_does_not_overflow():
    with np.errstate(over='raise', invalid='raise'):
        found = classified(np.eye(3), np.arange(3), 5 * np.eye(3)[::-1], 2, 1e-4)
    assert found.tolist() == [2, 1, 0]


@pytest.mark.parametrize('keywords', [{'k': 0}, {'temperature': 0.0}])
def test_keywords_that_cannot_be(keywords):
    with pytest.raises(UserError, match=next(iter(keywords))):
        knn.Evaluator(**keywords)


def test_more_neighbors_than_examples():
    knn.Evaluator(k=20).open(dataset(20, 10), dataset(20, 10))
    with pytest.raises(UserError, match=r'k=20 .* 19 examples'):
        knn.Evaluator(k=20).open(dataset(19, 10), dataset(19, 10))
