"""Few-shot evaluation: the regression, the choice of examples, and the protocol as a whole."""

import numpy as np
import pytest
from helpers.datasets import dataset
from sklearn.linear_model import Ridge

from vit_jax.errors import UserError
from vit_jax.evaluators import fewshot


def clusters(size, classes=4, width=12, noise=1.0, seed=0):
    """Features around a center a class, and their labels; the centers are always the same."""
    rng = np.random.default_rng(seed)
    centers = 2 * np.random.default_rng(99).normal(size=(classes, width))
    label = rng.integers(0, classes, size).astype(np.int32)
    features = centers[label] + noise * rng.normal(size=(size, width))
    return features.astype(np.float32), label


def evaluate(evaluator, train, test):
    for take, (features, label) in ((evaluator.fit, train), (evaluator.update, test)):
        for part in np.array_split(np.arange(len(label)), 3):
            take({'features': features[part]}, {'label': label[part]})
    return evaluator.result()


@pytest.mark.parametrize('shape', [(40, 7), (7, 40), (12, 12)])
@pytest.mark.parametrize('l2', [0.1, 2.0**10])
def test_ridge_is_that_of_scikit_learn(shape, l2):
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=shape), rng.normal(size=(shape[0], 3))
    expected = Ridge(alpha=l2, fit_intercept=False, solver='svd').fit(x, y).coef_.T
    np.testing.assert_allclose(fewshot.ridge(x, y, l2), expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize('shots', [1, 2, 5])
def test_accuracy_is_that_of_the_protocol_written_out(shots):
    """Standardized by the chosen examples, a feature of 100, targets -1 and 1."""
    (features, label), test = clusters(200), clusters(100, noise=2.0, seed=1)
    got = evaluate(fewshot.Evaluator(shots=(shots,), seeds=2), (features, label), test)
    expected = []
    for seed in range(2):
        rng = np.random.default_rng(seed)
        order = [rng.permutation(np.nonzero(label == c)[0])[:shots] for c in range(4)]
        chosen = np.concatenate(order)
        x = features[chosen].astype(np.float64)
        mean, std = x.mean(0), x.std(0) + 1e-5

        def inputs(x, mean=mean, std=std):
            return np.concatenate([(x - mean) / std, np.full((len(x), 1), 100.0)], axis=1)

        targets = 2 * np.eye(4)[label[chosen]] - 1
        model = Ridge(alpha=2.0**10, fit_intercept=False, solver='svd').fit(inputs(x), targets)
        expected.append((model.predict(inputs(test[0])).argmax(-1) == test[1]).mean())
    assert got == {f'{shots}_shot': pytest.approx(np.mean(expected), abs=1e-12)}
    assert 0.25 < got[f'{shots}_shot'] < 1


@pytest.fixture
def learned_from(monkeypatch):
    """The labels that each classifier has learned from, in the order in which they learn."""
    seen = []
    transfer = fewshot.transfer
    monkeypatch.setattr(
        fewshot, 'transfer', lambda x, y, *more, **l2: seen.append(y) or transfer(x, y, *more, **l2)
    )
    return seen


def test_every_class_is_learned_from_as_many_examples(learned_from):
    evaluate(fewshot.Evaluator(shots=(1, 5, 10), seeds=2), clusters(150), clusters(50, seed=1))
    counts = [np.bincount(labels).tolist() for labels in learned_from]
    assert counts == [[1] * 4, [5] * 4, [10] * 4] * 2


def test_the_same_seeds_choose_the_same_examples_and_others_do_not():
    train, test = clusters(200, noise=4.0), clusters(100, noise=4.0, seed=1)

    def result(seeds):
        return evaluate(fewshot.Evaluator(shots=(1, 2), seeds=seeds), train, test)

    assert result(3) == result(3)
    assert len({result(seeds)['1_shot'] for seeds in (1, 2, 3, 4)}) > 1


def test_labels_need_not_be_consecutive():
    (features, label), (x, y) = clusters(200), clusters(100, seed=1)
    gaps = np.array([2, 3, 7, 40], np.int32)
    plain = evaluate(fewshot.Evaluator(), (features, label), (x, y))
    assert evaluate(fewshot.Evaluator(), (features, gaps[label]), (x, gaps[y])) == plain


def test_more_shots_are_better():
    result = evaluate(fewshot.Evaluator(), clusters(400, noise=3.0), clusters(400, 4, seed=1))
    assert list(result) == ['1_shot', '5_shot', '10_shot', '25_shot']
    assert result['25_shot'] > result['1_shot'] + 0.1


def test_a_class_with_too_few_examples_is_named():
    features, label = clusters(100)
    kept = np.concatenate([np.flatnonzero(label != 2), np.flatnonzero(label == 2)[:3]])
    with pytest.raises(UserError, match=r'shots=10, .* class 2 .* 3 examples'):
        evaluate(fewshot.Evaluator(shots=(1, 10)), (features[kept], label[kept]), clusters(9))
    with pytest.raises(UserError, match=r'shots=25 of 4 classes, .* 99 examples'):
        fewshot.Evaluator().open(dataset(99, 4), dataset(99, 4))
    fewshot.Evaluator().open(dataset(100, 4), dataset(100, 4))


@pytest.mark.parametrize('keywords', [{'shots': ()}, {'shots': (0,)}, {'seeds': 0}, {'l2': -1.0}])
def test_keywords_that_cannot_be(keywords):
    with pytest.raises(UserError, match=next(iter(keywords))):
        fewshot.Evaluator(**keywords)


def test_predictions_without_features():
    with pytest.raises(UserError, match="no 'features'"):
        fewshot.Evaluator().update({'probs': np.ones((2, 2))}, {'label': np.zeros(2)})
