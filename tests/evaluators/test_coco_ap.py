"""COCO's twelve numbers: of the truth itself, of known mistakes, of crowds."""

import contextlib
import io
import json
import types

import numpy as np
import pytest
from PIL import Image

from vit_jax.data.records import SourceInfo
from vit_jax.data.sources import open_source
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
    table = evaluator.rows(('a', 'b'), evaluator.confusion(0.5))
    assert [row['objects'] for row in table] == [2, 1]
    assert [row['AP'] for row in table] == pytest.approx([1, 0])
    assert [row['precision'] for row in table] == [1, None], 'nothing is predicted as b'
    assert [row['recall'] for row in table] == [1, 0]
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


def test_confusion_counts_objects_by_hand():
    """Of 3 objects, one is found twice, one as the other class, one only with a low score."""
    evaluator, _ = opened()
    rows = truth()
    (first, second), third = RECORDS[0]['boxes'], RECORDS[2]['boxes'][1]
    rows[0] = [(0, 0.9, first), (0, 0.8, first), (0, 0.7, second), (1, 0.6, second)]
    rows[1] = [(1, 0.9, [0, 0, 9, 9])]  # nothing
    rows[2] = [(0, 0.4, third), (1, 0.9, [0, 0, 15, 30])]  # the latter on a crowd
    measure(evaluator, rows)
    assert evaluator.confusion(0.5).tolist() == [[1, 0, 1], [1, 0, 0], [1, 2, 0]]
    assert evaluator.confusion(0.4).tolist() == [[2, 0, 0], [1, 0, 0], [1, 2, 0]]
    assert evaluator.confusion(0.95).tolist() == [[0, 0, 2], [0, 0, 1], [0, 0, 0]]
    first_row, second_row = evaluator.rows(('a', 'b'), evaluator.confusion(0.5))
    assert (first_row['precision'], first_row['recall']) == (1 / 3, 1 / 2)
    assert (second_row['precision'], second_row['recall']) == (0, 0)
    # An IoU of 0.53 is enough, one of 0.47 is not.
    rows = truth()
    rows[0][0] = (0, 0.9, [10, 10, 26, 40])
    measure(evaluator, rows)
    assert evaluator.confusion(0.5).tolist() == [[2, 0, 0], [0, 1, 0], [0, 0, 0]]
    rows[0][0] = (0, 0.9, [10, 10, 24, 40])
    measure(evaluator, rows)
    assert evaluator.confusion(0.5).tolist() == [[1, 0, 1], [0, 1, 0], [1, 0, 0]]


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
    with pytest.raises(UserError, match=r"a few: .*'boxes'"):
        opened([{'size': (3, 3), 'label': 4}])
    evaluator, _ = opened()
    with pytest.raises(UserError, match="'boxes'"):
        evaluator.update({'probs': np.zeros((1, 2))}, {'index': np.array([0])})


def write_coco(folder):
    """Twelve images of COCO's format, with boxes beyond their edge, outside, without area, crowds.

    Returns the file, and its annotations.
    """
    rng = np.random.default_rng(0)
    images = [
        {'id': 5 * i + 3, 'file_name': f'{i}.png', 'height': 60 + i, 'width': 80} for i in range(12)
    ]
    rows = []
    for image in images:
        Image.new('RGB', (80, image['height'])).save(folder / image['file_name'])
        corners, sides = rng.uniform(-20, 60, (4, 2)), rng.uniform(5, 50, (4, 2))
        boxes = [*np.concatenate([corners, sides], 1).tolist(), [9, 9, 0, 12], [200, 9, 9, 12]]
        rows += [(image['id'], box) for box in boxes]
    objects = [
        {
            'id': n + 1,
            'image_id': image,
            'category_id': (4, 9)[n % 2],
            'bbox': box,
            'area': 0.7 * box[2] * box[3],
            'iscrowd': int(n % 7 == 0),
        }
        for n, (image, box) in enumerate(rows)
    ]
    categories = [{'id': 9, 'name': 'b'}, {'id': 4, 'name': 'a'}]
    file = folder / 'instances_val.json'
    content = {'images': images, 'annotations': objects, 'categories': categories}
    file.write_text(json.dumps(content))
    return file, images, objects


def by_pycocotools(file, results):
    """The twelve numbers of results for the file as it is."""
    from pycocotools.coco import COCO
    from pycocotools.cocoeval import COCOeval

    with contextlib.redirect_stdout(io.StringIO()):
        truth = COCO(file)
        measured = COCOeval(truth, truth.loadRes(results), 'bbox')
        measured.evaluate()
        measured.accumulate()
        measured.summarize()
    pairs = zip(METRICS, measured.stats.tolist(), strict=True)
    return {name: value for name, value in pairs if value >= 0}


def test_numbers_are_those_of_pycocotools_for_the_file_as_it_is(tmp_path):
    """Training clips boxes and leaves some out; evaluations do not."""
    file, images, objects = write_coco(tmp_path)
    source, evaluator = open_source(f'coco:{tmp_path}', 'val'), Evaluator()
    evaluator.open(types.SimpleNamespace(source=source, info=source.info))
    rng, results = np.random.default_rng(1), []
    for index, image in enumerate(images):
        mine = [one for one in objects if one['image_id'] == image['id']]
        labels = np.array([(4, 9).index(one['category_id']) for one in mine])
        corners = np.array([one['bbox'] for one in mine], float)
        corners[:, 2:] += corners[:, :2]
        size = np.array([80, image['height']] * 2)
        boxes = ((corners + rng.normal(0, 1.5, corners.shape)) / size).astype(np.float32)
        scores = rng.uniform(size=len(mine)).astype(np.float32)
        found = {'boxes': boxes[None], 'scores': scores[None], 'labels': labels[None]}
        evaluator.update(found, {'index': np.array([index])})
        for (x0, y0, x1, y1), score, label in zip(
            (boxes.astype(float) * size).tolist(), scores.tolist(), labels.tolist(), strict=True
        ):
            one = {'image_id': image['id'], 'category_id': (4, 9)[label], 'score': score}
            results.append({**one, 'bbox': [x0, y0, x1 - x0, y1 - y0]})
    expected = by_pycocotools(file, results)
    assert evaluator.result() == pytest.approx(expected, abs=1e-9)
    assert 0.2 < expected['AP'] < 0.5
    assert evaluator.curves().mean() == pytest.approx(expected['AP50'])
    assert len(source[0]['boxes']) < len(source.annotations(0)['boxes'])
