"""Accuracies of classes, and the matrix behind them."""

import numpy as np
import pytest
from helpers.datasets import dataset
from sklearn import metrics

from vit_jax.errors import UserError
from vit_jax.evaluators import confusion

LABELS = np.array([0, 0, 0, 1, 1, 2])
PREDICTED = np.array([0, 0, 1, 1, 0, 0])


@pytest.fixture
def evaluator():
    made = confusion.Evaluator()
    made.open(dataset(6, 4))
    made.start()
    made.update({'probs': np.eye(4)[PREDICTED]}, {'label': LABELS})
    return made


def test_every_class_that_occurs_counts_the_same(evaluator):
    expected = metrics.balanced_accuracy_score(LABELS, PREDICTED)
    assert evaluator.result() == {'mean_class_accuracy': pytest.approx(expected)}
    assert np.array_equal(evaluator.matrix[:3, :3], metrics.confusion_matrix(LABELS, PREDICTED))


def test_a_pass_knows_nothing_of_the_pass_before(evaluator):
    before = evaluator.result()
    evaluator.start()
    evaluator.update({'probs': np.eye(4)[PREDICTED]}, {'label': LABELS})
    assert evaluator.result() == before


def test_rows_tell_what_a_class_is_taken_for(evaluator):
    rows = confusion.rows(evaluator.matrix, ('a', 'b', 'c', 'd'))
    assert rows[1] == {'class': 'b', 'examples': 2, 'accuracy': 0.5, 'most_confused_with': 'a'}
    assert rows[3] == {'class': 'd', 'examples': 0, 'accuracy': None, 'most_confused_with': None}


def test_an_output_that_is_no_class_of_the_data_may_be_predicted(evaluator):
    evaluator.start()
    evaluator.update({'probs': np.eye(6)[[5, 5, 0]]}, {'label': LABELS[:3]})
    assert evaluator.matrix[0].tolist() == [1, 0, 0, 0, 0, 2]
    assert evaluator.result() == {'mean_class_accuracy': pytest.approx(1 / 3)}


def test_what_has_no_classes_is_refused(evaluator):
    with pytest.raises(UserError, match="'probs'"):
        evaluator.update({}, {'label': LABELS})
