"""COCO's twelve numbers: of the truth itself, of known mistakes, of crowds."""

import types

import numpy as np
import pytest

from vit_jax.data.records import SourceInfo
from vit_jax.errors import UserError
from vit_jax.evaluators.coco_ap import METRICS, Evaluator

RECORDS = [
    {
        'size': (100, 200),
        'boxes': np.array([[10, 10, 40, 40], [50, 10, 190, 90]], np.float32),
        'labels': np.array([0, 1]),
        'areas': np.array([900.0, 11200.0]),
        'crowd': np.array([False, False]),
    },
    {'size': (50, 50), 'boxes': np.zeros((0, 4), np.float32), 'labels': np.zeros(0, int)},
    {
        'size': (80, 60),
        'boxes': np.array([[0, 0, 30, 60], [30, 60, 60, 80]], np.float32),
        'labels': np.array([1, 0]),
        'areas': np.array([1800.0, 600.0]),
        'crowd': np.array([True, False]),
    },
]


class Source:
    title = 'a few'

    def __init__(self, records=RECORDS):
        self.records = records
        self.asked = 0

    def __len__(self):
        return len(self.records)

    def annotations(self, index):
        self.asked += 1
        return self.records[index]


def opened(records=RECORDS):
    evaluator, source = Evaluator(), Source(records)
    data = types.SimpleNamespace(source=source, info=SourceInfo(2, ('a', 'b')))
    evaluator.open(data)
    return evaluator, source


def predictions(rows):
    """Images {index: [(label, score, corners in pixels), ...]} as the task predicts them, filled
    with predictions of no worth.
    """
    most = 1 + max(map(len, rows.values()))
    found = {
        'boxes': np.zeros((len(rows), most, 4), np.float32),
        'scores': np.zeros((len(rows), most), np.float32),
        'labels': np.zeros((len(rows), most), np.int32),
    }
    for i, (index, objects) in enumerate(rows.items()):
        height, width = RECORDS[index]['size']
        for j, (label, score, corners) in enumerate(objects):
            found['boxes'][i, j] = np.divide(corners, [width, height] * 2)
            found['scores'][i, j], found['labels'][i, j] = score, label
    return found, {'index': np.array(list(rows))}


def measure(evaluator, rows):
    evaluator.start()
    for index, objects in rows.items():
        evaluator.update(*predictions({index: objects}))
    return evaluator.result()


def truth():
    return {
        i: [(label, 0.9, box) for label, box in zip(record['labels'], record['boxes'], strict=True)]
        for i, record in enumerate(RECORDS)
    }


def test_the_truth_itself_has_an_average_precision_of_one():
    evaluator, _ = opened()
    found = measure(evaluator, truth())
    # There is no object of medium size that is no crowd.
    measured = set(METRICS) - {'AP_medium', 'AR_medium'}
    assert found == pytest.approx(dict.fromkeys(measured, 1))
    assert set(evaluator.names()) == measured
    assert Evaluator().names() == METRICS, 'of data that it has not seen'


def test_an_object_that_is_missed_and_one_that_is_not_there():
    evaluator, _ = opened()
    rows = truth()
    rows[0] = rows[0][:1]  # the only one of class 1
    found = measure(evaluator, rows)
    assert found['AP'] == pytest.approx(0.5)
    # A bolder prediction of nothing: precision is 1/2 as far as the first object, then 2/3.
    rows = truth()
    rows[1] = [(0, 0.95, [0, 0, 50, 50])]
    assert measure(evaluator, rows)['AP'] == pytest.approx((2 / 3 + 1) / 2, abs=1e-6)


def test_thresholds_of_overlap():
    evaluator, _ = opened()
    rows = truth()
    x0, y0, x1, y1 = RECORDS[0]['boxes'][1]
    rows[0][1] = (1, 0.9, [x0, y0, x0 + 0.72 * (x1 - x0), y1])  # IoU 0.72: 5 of 10 thresholds
    found = measure(evaluator, rows)
    assert found['AP50'] == pytest.approx(1)
    assert found['AP75'] == pytest.approx(0.5)
    assert found['AP'] == pytest.approx((1 + 0.5) / 2)
    assert found['AP_large'] == pytest.approx(0.5)


def test_predictions_on_a_crowd_do_not_count():
    evaluator, _ = opened()
    rows = truth()
    rows[2] = [*rows[2], (1, 0.99, [0, 0, 15, 30]), (1, 0.98, [0, 30, 30, 60])]
    assert measure(evaluator, rows)['AP'] == pytest.approx(1)


def test_truth_is_indexed_once_and_passes_do_not_mix():
    evaluator, source = opened()
    first = measure(evaluator, truth())
    nothing = {i: [] for i in range(len(RECORDS))}
    assert measure(evaluator, nothing)['AP'] == pytest.approx(0, abs=1e-6)
    assert measure(evaluator, truth()) == first
    assert source.asked == len(RECORDS)
    evaluator.start()
    assert evaluator.result() == {}  # of no image


def test_broken_records_are_left_out():
    evaluator, _ = opened([RECORDS[0], {}, RECORDS[2]])
    rows = truth()
    del rows[1]
    assert measure(evaluator, rows)['AP'] == pytest.approx(1)


def test_mistakes():
    with pytest.raises(UserError, match="a few: the records have no 'boxes'"):
        opened([{'size': (3, 3), 'label': 4}])
    evaluator, _ = opened()
    with pytest.raises(UserError, match="no 'boxes'"):
        evaluator.update({'probs': np.zeros((1, 2))}, {'index': np.array([0])})
