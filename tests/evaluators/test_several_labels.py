"""mAP and F1 of several labels, beside PyTorch's ranking by hand."""

from __future__ import annotations

import types

import numpy as np
import pytest

from vit_jax.errors import UserError
from vit_jax.evaluators import several_labels


def dataset(multilabel=True):
    info = types.SimpleNamespace(multilabel=multilabel, class_names=('a', 'b', 'c', 'd'))
    return types.SimpleNamespace(info=info, source=types.SimpleNamespace(title='source x'))


def evaluated(probs, labels, **options):
    evaluator = several_labels.Evaluator(**options)
    evaluator.open(dataset())
    for part in (slice(None, 3), slice(3, None)):
        batch = {'label': labels[part], 'index': np.arange(len(labels))[part]}
        evaluator.update({'probs': probs[part]}, batch)
    return evaluator.result()


@pytest.fixture
def arrays():
    rng = np.random.default_rng(0)
    labels = (rng.random((40, 4)) < 0.3).astype(np.int32)
    labels[:, 3] = 0  # a class without an image
    labels[:5] = 0  # images without a class
    return rng.random((40, 5)).astype(np.float32), labels


def precision_by_hand(probs, labels):
    """The mean over positives of the precision among images that score at least as high."""
    positives = [i for i, label in enumerate(labels) if label]
    return np.mean([labels[probs >= probs[i]].mean() for i in positives])


def test_average_precision_and_f1(arrays):
    probs, labels = arrays
    result = evaluated(probs, labels, per_class=True)
    by_class = [precision_by_hand(probs[:, c], labels[:, c]) for c in range(3)]
    assert result['mAP'] == pytest.approx(np.mean(by_class), abs=1e-12)
    assert [result[f'AP_{name}'] for name in 'abc'] == pytest.approx(by_class)
    assert 'AP_d' not in result
    hits = (probs[:, :3] >= 0.5) & (labels[:, :3] > 0)
    totals = (probs[:, :3] >= 0.5).astype(int) + labels[:, :3]
    assert result['f1_micro'] == pytest.approx(2 * hits.sum() / totals.sum())
    assert result['f1_macro'] == pytest.approx((2 * hits.sum(0) / totals.sum(0)).mean())


def test_perfect_and_broken_predictions(arrays):
    _, labels = arrays
    perfect = evaluated(labels.astype(np.float32), labels)
    assert perfect == dict.fromkeys(several_labels.NAMES, pytest.approx(1.0))
    assert all(np.isnan(list(evaluated(np.full((40, 4), np.nan), labels).values())))


def test_other_data_and_options_are_refused():
    with pytest.raises(UserError, match='source x'):
        several_labels.Evaluator().open(dataset(multilabel=False))
    with pytest.raises(UserError, match='threshold=1'):
        several_labels.Evaluator(threshold=1.0)
    with pytest.raises(UserError, match="'probs'"):
        several_labels.Evaluator().update({}, {'label': np.zeros((1, 2))})
