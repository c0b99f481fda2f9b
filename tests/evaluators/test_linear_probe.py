"""The linear probe, and what it may see of either split."""

import numpy as np
import pytest
import sklearn.linear_model
from helpers.datasets import dataset

from vit_jax.errors import UserError
from vit_jax.evaluators import linear_probe


def data(size, seed, shift=0.0):
    """Five classes in ten dimensions, of scales that differ a thousandfold."""
    rng = np.random.default_rng(seed)
    label = rng.integers(0, 5, size).astype(np.int32)
    centers = np.random.default_rng(7).normal(size=(5, 10))
    features = (centers[label] + rng.normal(size=(size, 10)) + shift) * np.logspace(-2, 1, 10)
    return features.astype(np.float32), label


def probe(train, test, **keywords):
    evaluator = linear_probe.Evaluator(**keywords)
    evaluator.fit({'features': train[0]}, {'label': train[1]})
    evaluator.update({'features': test[0]}, {'label': test[1]})
    return evaluator.result()


class Spy(sklearn.linear_model.LogisticRegression):
    """Remembers what it learns from, and what it is tested on."""

    learned, tested = [], []

    def fit(self, x, y):
        Spy.learned.append(x)
        return super().fit(x, y)

    def score(self, x, y):
        Spy.tested.append(x)
        return super().score(x, y)


def test_the_test_split_is_used_once_at_the_end(monkeypatch):
    monkeypatch.setattr(sklearn.linear_model, 'LogisticRegression', Spy)
    train, test = data(200, 0), data(60, 1)
    c = (0.001, 0.1, 10.0)
    result = probe(train, test, c=c)
    mean, std = train[0].astype(float).mean(0), train[0].astype(float).std(0) + 1e-5
    known = {row.tobytes() for row in (train[0] - mean) / std}
    assert [len(x) for x in Spy.learned[:-1]] == [len(Spy.learned[0])] * len(c)
    assert len(Spy.learned[-1]) == 200
    assert all(row.tobytes() in known for x in (*Spy.learned, *Spy.tested[:-1]) for row in x)
    np.testing.assert_allclose(Spy.tested[-1], (test[0] - mean) / std)
    assert len(Spy.tested) == len(c) + 1
    for learned, tested in zip(Spy.learned[:-1], Spy.tested[:-1], strict=True):
        assert len(learned) + len(tested) == 200
        assert not {row.tobytes() for row in learned} & {row.tobytes() for row in tested}
    assert result['linear_probe_c'] in c


def test_the_penalty_does_not_depend_on_the_test_split():
    train, (x, y) = data(300, 0), data(100, 1)
    scrambled = np.random.default_rng(0).permutation(y)
    a, b = probe(train, (x, y)), probe(train, (x, scrambled))
    assert a['linear_probe_c'] == b['linear_probe_c']
    assert a['linear_probe_accuracy'] > b['linear_probe_accuracy'] + 0.3


def test_it_beats_chance_and_is_deterministic():
    result = probe(data(400, 0), data(200, 1))
    assert 0.6 < result['linear_probe_accuracy'] < 1
    assert result == probe(data(400, 0), data(200, 1))


def test_the_scale_of_features_does_not_matter():
    (features, label), (x, y) = data(300, 0), data(100, 1)
    expected = probe((features, label), (x, y))
    scaled = probe((1000 * features, label), (1000 * x, y))
    assert scaled['linear_probe_accuracy'] == pytest.approx(
        expected['linear_probe_accuracy'], abs=0.02
    )


def test_a_fifth_of_every_class_is_held_out():
    labels = np.repeat([0, 1, 2, 3], [50, 25, 4, 1])
    held_out = linear_probe.hold_out(labels, seed=0)
    assert len(set(held_out.tolist())) == len(held_out)
    assert np.bincount(labels[held_out], minlength=4).tolist() == [10, 5, 1, 0]
    assert set(held_out) != set(linear_probe.hold_out(labels, seed=1))


@pytest.mark.parametrize('keywords', [{'c': ()}, {'c': (0.0, 1.0)}, {'max_iter': 0}])
def test_keywords_that_cannot_be(keywords):
    with pytest.raises(UserError, match=next(iter(keywords))):
        linear_probe.Evaluator(**keywords)


@pytest.mark.parametrize(('size', 'classes'), [(100, 1), (49, 10)])
def test_too_little_to_learn_from(size, classes):
    with pytest.raises(UserError, match=f'{classes} classes and {size} examples'):
        linear_probe.Evaluator().open(dataset(size, classes), dataset(size, classes))
