"""Panoptic quality: by its definition, with the rules for VOID and crowds, on images of COCO."""

import json
from types import SimpleNamespace

import numpy as np
import pytest

from vit_jax.data.records import SourceInfo
from vit_jax.data.sources import open_source
from vit_jax.errors import UserError
from vit_jax.evaluators.panoptic_quality import Counts, Evaluator, compare, quality

CLASSES = 4


def row(*numbers):
    """An image of columns of ten pixels."""
    return np.repeat(np.array(numbers)[None], 10, axis=0)


def counted(found, labels, wanted, truths, crowd=None):
    crowd = np.zeros(len(truths), bool) if crowd is None else np.array(crowd)
    labels, truths = np.array(labels, int), np.array(truths, int)
    found = compare(found, labels, wanted, truths, crowd, CLASSES)
    return {name: x.tolist() for name, x in found._asdict().items()}


def test_the_truth_is_found():
    image = row(1, 1, 2, 3)
    assert counted(image, [0, 1, 1], image, [0, 1, 1]) == {
        'iou': [1, 2, 0, 0],
        'matched': [1, 2, 0, 0],
        'wrong': [0, 0, 0, 0],
        'missed': [0, 0, 0, 0],
    }


def test_a_match_has_more_than_half_and_the_same_class():
    # Both of 3 columns, 2 of them common: IoU 2 / 4.
    half = counted(row(1, 1, 1, 2), [0, 1], row(2, 1, 1, 1), [0, 1])
    assert (half['matched'], half['wrong'], half['missed']) == ([0] * 4, [1, 1, 0, 0], [1, 1, 0, 0])
    more = counted(row(1, 1, 1, 2), [0, 1], row(1, 1, 2, 2), [0, 1])
    assert more['iou'] == pytest.approx([2 / 3, 0, 0, 0])
    assert more['matched'] == [1, 0, 0, 0]
    other = counted(row(1, 1, 1, 2), [2, 1], row(1, 1, 2, 2), [0, 1])
    assert (other['wrong'], other['missed']) == ([0, 1, 1, 0], [1, 1, 0, 0])


def test_void_is_not_in_the_union():
    found = counted(row(1, 1, 1, 1), [0], row(1, 1, 1, 0), [0])
    assert found['iou'] == [1, 0, 0, 0]


@pytest.mark.parametrize(('truth', 'wrong'), [((1, 1, 0, 0), 1), ((1, 0, 0, 0), 0)])
def test_what_lies_on_void_for_more_than_half_is_not_wrong(truth, wrong):
    found = counted(row(1, 1, 1, 1), [1], row(*truth), [0])
    assert found['wrong'] == [0, wrong, 0, 0]
    assert found['missed'] == [1, 0, 0, 0]


@pytest.mark.parametrize(('label', 'wrong'), [(0, 0), (1, 1)])
def test_crowds_are_neither_found_nor_missed_and_excuse_their_class(label, wrong):
    found = counted(row(1, 1, 1, 2), [label, 2], row(1, 1, 1, 2), [0, 2], [True, False])
    assert sum(found['missed']) == 0
    assert found['matched'] == [0, 0, 1, 0]
    assert sum(found['wrong']) == wrong


def test_void_and_crowd_count_together():
    """A quarter on VOID, a quarter on a crowd: half of it is not more than half."""
    truths, crowd = [0, 0, 1], [True, False, False]
    assert counted(row(1, 1, 1, 1), [0], row(0, 1, 3, 3), truths, crowd)['wrong'] == [1, 0, 0, 0]
    assert counted(row(1, 1, 1, 1), [0], row(0, 1, 1, 3), truths, crowd)['wrong'] == [0, 0, 0, 0]


def test_classes_that_do_not_occur_have_no_part_in_the_mean():
    counts = Counts(*map(np.array, ([1.5, 0.0, 0.0], [2, 0, 0], [0, 1, 0], [2, 0, 0])))
    pq, sq, rq = quality(counts, np.arange(3)).values()
    assert (pq, sq, rq) == pytest.approx((0.75 * 2 / 3 / 2, 0.75 / 2, 2 / 3 / 2))
    assert quality(counts, np.array([2])) == {}


# -- the evaluator ---------------------------------------------------------------------------------


def prediction_of(masks, labels, stuff, queries, size):
    """What the task predicts: these masks by the last queries, nothing by the others."""
    height, width = size
    found = {
        'scores': np.zeros(queries, np.float32),
        'labels': np.zeros(queries, np.int32),
        'masks': np.full((queries, height, width), -5, np.float32),
        'frame': np.array(size, np.int32),
        'size': np.array(size, np.int32),
    }
    last = slice(queries - len(masks), None)
    found['scores'][last], found['labels'][last] = 0.9, labels
    found['masks'][last] = np.where(masks, 5, -5)
    return {**found, 'things': ~np.isin(found['labels'], stuff)}


def evaluated(source, predictions, threshold=0.85):
    evaluator = Evaluator(threshold)
    evaluator.open(Data(source))
    evaluator.start()
    for index, prediction in predictions.items():
        rows = {name: x[None] for name, x in prediction.items()}
        evaluator.update(rows, {'index': np.array([index])})
    return evaluator.result()


class Data:
    vocab = None

    def __init__(self, source):
        self.source, self.info = source, source.info


def test_segments_of_scenes_against_themselves():
    source = open_source('scenes:8', 'train')
    truth = [source.annotations(i) for i in range(8)]
    predictions = {
        i: prediction_of(t['masks'], t['labels'], (), 7, t['size']) for i, t in enumerate(truth)
    }
    assert evaluated(source, predictions) == {'PQ': 1, 'SQ': 1, 'RQ': 1}
    assert evaluated(source, predictions, threshold=0.95)['PQ'] == 0


@pytest.fixture(scope='module')
def coco(tmp_path_factory, shared_data):
    """The two images of COCO with segments, as a data set lies on a disk."""
    sample, root = shared_data / 'coco_panoptic_sample', tmp_path_factory.mktemp('coco')
    (root / 'annotations').mkdir()
    (root / 'images').symlink_to(sample / 'input_images')
    (root / 'annotations' / 'panoptic_val').symlink_to(sample / 'panoptic_examples')
    (root / 'annotations' / 'panoptic_val.json').symlink_to(sample / 'panoptic_examples.json')
    return open_source(f'panoptic:{root}', 'val')


@pytest.mark.slow
def test_true_segments_of_coco_against_themselves(coco):
    truth = [coco.annotations(i) for i in range(len(coco))]
    predictions = {
        i: prediction_of(t['masks'], t['labels'], coco.info.stuff, 40, t['size'])
        for i, t in enumerate(truth)
    }
    found = evaluated(coco, predictions)
    assert found.keys() == {f'{x}Q{kind}' for x in 'PSR' for kind in ('', '_things', '_stuff')}
    assert set(found.values()) == {1}
    assert names_of(coco) == found.keys() == set(Evaluator().names())


def test_a_listed_segment_without_a_pixel_is_missed():
    found = counted(row(1, 1, 1, 1), [0], row(1, 1, 1, 1), [0, 1])
    assert (found['matched'], found['missed']) == ([1, 0, 0, 0], [0, 1, 0, 0])


def test_segments_merged_by_overlap_and_void():
    """A map of segments as truth, whose void pixels and unlabeled ones are the same."""

    class Source(list):
        title = 'a few'
        annotations = list.__getitem__

    numbers = row(1, 1, 2, -1).astype(np.int16)
    source = Source([{'size': (10, 4), 'segments': numbers, 'labels': np.array([0, 1])}])
    data = SimpleNamespace(source=source, info=SourceInfo(2, ('a', 'b'), stuff=(0, 1)))
    masks = np.array([row(1, 1, 0, 0), row(1, 1, 0, 0), row(0, 0, 1, 1)])
    one = prediction_of(masks, [0, 0, 1], (0, 1), 3, (10, 4))
    one['scores'] = np.array([0.95, 0.9, 0.9], np.float32)
    for overlap, expected in ((0.8, 1), (None, 1)):
        evaluator = Evaluator(0.8, overlap)
        evaluator.open(data)
        evaluator.update({k: x[None] for k, x in one.items()}, {'index': np.array([0])})
        assert evaluator.result()['PQ'] == expected


def test_images_without_stuff_have_no_numbers_of_it():
    assert names_of(open_source('scenes:8', 'train')) == {'PQ', 'SQ', 'RQ'}


def names_of(source):
    evaluator = Evaluator()
    evaluator.open(Data(source))
    return set(evaluator.names())


def test_segments_of_a_file_in_the_format_of_detection(coco, shared_data):
    """Moved by some pixels, some of them left out; measured pair by pair, as it is defined."""
    mask_utils = pytest.importorskip('pycocotools.mask')
    sample = shared_data / 'coco_panoptic_sample'
    content = json.loads((sample / 'panoptic_coco_detection_format.json').read_text())
    ids = sorted(category['id'] for category in content['categories'])
    predictions, pairs = {}, []
    for index, image in enumerate(sorted(i['id'] for i in content['images'])):
        rows = [a for a in content['annotations'] if a['image_id'] == image]
        rows = [row for i, row in enumerate(rows) if i % 7 and not row['iscrowd']]
        masks = np.moveaxis(mask_utils.decode([row['segmentation'] for row in rows]), 2, 0) > 0
        masks = np.roll(masks, 4, axis=2)
        labels = np.array([ids.index(row['category_id']) for row in rows])
        size = masks.shape[1:]
        predictions[index] = prediction_of(masks, labels, coco.info.stuff, 40, size)
        pairs.append((masks, labels, coco.annotations(index)))
    expected = by_definition(pairs)
    found = evaluated(coco, predictions)
    stuff = set(coco.info.stuff)
    things = {label for label in expected if label not in stuff}
    kinds = {'': set(expected), '_things': things, '_stuff': stuff & set(expected)}
    for kind, classes in kinds.items():
        for i, name in enumerate(('PQ', 'SQ', 'RQ')):
            mean = np.mean([expected[label][i] for label in classes])
            assert found[f'{name}{kind}'] == pytest.approx(mean), f'{name}{kind}'
    assert 0.3 < found['PQ'] < 0.95


def by_definition(images):
    """PQ, SQ and RQ of each class, counted pair by pair: {class: (PQ, SQ, RQ)}."""
    ious, wrong, missed = {}, {}, {}
    for masks, labels, truth in images:
        owner = masks.argmax(0)  # where there is no mask, the first: every pixel is somebody's
        masks = np.array([owner == i for i in range(len(masks))])
        void = ~truth['masks'].any(0)
        taken = set()
        for t, label, crowd in zip(truth['masks'], truth['labels'], truth['crowd'], strict=True):
            if crowd:
                continue
            for i in np.flatnonzero(labels == label):
                iou = (masks[i] & t).sum() / ((masks[i] | t) & ~(void & masks[i] & ~t)).sum()
                if iou > 0.5:
                    ious.setdefault(label, []).append(iou)
                    taken.add(i)
                    break
            else:
                missed[label] = missed.get(label, 0) + 1
        for i, label in enumerate(labels):
            same = truth['masks'][truth['crowd'] & (truth['labels'] == label)]
            excused = void | same.any(0) if len(same) else void
            if i not in taken and (masks[i] & excused).sum() <= masks[i].sum() / 2:
                wrong[label] = wrong.get(label, 0) + 1
    found = {}
    for label in {*ious, *wrong, *missed}:
        match = ious.get(label, [])
        sq = np.mean(match) if match else 0
        rq = len(match) / (len(match) + wrong.get(label, 0) / 2 + missed.get(label, 0) / 2)
        found[label] = (sq * rq, sq, rq)
    return found


def test_mistakes():
    with pytest.raises(UserError, match=r'threshold=1: must be in \[0, 1\)'):
        Evaluator(1)
    with pytest.raises(UserError, match=r'overlap=1.5: must be in \[0, 1\)'):
        Evaluator(0.8, 1.5)
    with pytest.raises(UserError, match='panoptic_quality needs'):
        evaluated(open_source('scenes:8', 'train'), {0: {'scores': np.zeros(3)}})
    with pytest.raises(UserError, match=r"'labels'.*size, label"):
        Evaluator().open(Data(open_source('digits', 'test')))
