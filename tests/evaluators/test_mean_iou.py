"""Mean IoU over a split: by scikit-learn, of ignored pixels, absent classes, and other sizes."""

from types import SimpleNamespace

import numpy as np
import pytest
from sklearn import metrics

from vit_jax.data.records import SourceInfo
from vit_jax.data.sources import open_source
from vit_jax.errors import UserError
from vit_jax.evaluators.mean_iou import NAMES, Evaluator, count_pixels

CLASSES = 5


class Source(list):
    title = 'a few'

    def annotations(self, index):
        return self[index]


def truth_of(classes):
    """The annotations of a map of classes, -1 for ignored pixels."""
    labels = np.unique(classes[classes >= 0])
    segments = np.searchsorted(labels, classes) + 1
    segments = np.where(classes < 0, -1, segments).astype(np.int16)
    return {'size': classes.shape, 'segments': segments, 'labels': labels.astype(np.int32)}


def measured(truths, maps, sizes=None, **options):
    """Metrics, images one by one; maps are padded to the largest."""
    evaluator = Evaluator(**options)
    names = ('road', 'sky', 'traffic light/sign', 'd', 'e')
    source = Source(map(truth_of, truths))
    evaluator.open(SimpleNamespace(source=source, info=SourceInfo(CLASSES, names)))
    frame = np.max([one.shape for one in maps], axis=0)
    for index, one in enumerate(maps):
        padded = np.zeros((1, *frame), np.int32)
        padded[0, : one.shape[0], : one.shape[1]] = one
        size = np.array([one.shape if sizes is None else sizes[index]])
        evaluator.update({'segmentation': padded, 'size': size}, {'index': np.array([index])})
    return evaluator.result()


def images(seed=0, shapes=((6, 9), (12, 4), (1, 1), (8, 8))):
    rng = np.random.default_rng(seed)
    truths = [rng.integers(-1, 4, shape) for shape in shapes]
    maps = [
        np.where(rng.random(t.shape) < 0.5, t.clip(0), rng.integers(0, 4, t.shape)) for t in truths
    ]
    return truths, maps


def test_numbers_are_those_of_scikit_learn():
    truths, maps = images()
    found = measured(truths, maps, per_class=True)
    true = np.concatenate([t.ravel() for t in truths])
    flat = np.concatenate([m.ravel() for m in maps])[true >= 0]
    true = true[true >= 0]
    iou = metrics.jaccard_score(true, flat, average=None)
    assert found['mIoU'] == pytest.approx(iou.mean(), abs=1e-12)
    assert found['pixel_accuracy'] == pytest.approx(metrics.accuracy_score(true, flat))
    balanced = metrics.balanced_accuracy_score(true, flat)
    assert found['mean_class_accuracy'] == pytest.approx(balanced)
    names = ('IoU_road', 'IoU_sky', 'IoU_traffic_light_sign', 'IoU_d')  # e does not occur
    assert {k: found[k] for k in found if k not in NAMES} == pytest.approx(
        dict(zip(names, iou, strict=True))
    )


def test_pixels_are_counted_over_the_split_not_image_by_image():
    truths = [np.zeros((1, 8), int), np.array([[0, 1]])]
    maps = [np.zeros((1, 8), int), np.array([[1, 1]])]
    assert measured(truths, maps)['mIoU'] == pytest.approx((8 / 9 + 1 / 2) / 2)


def test_a_class_that_is_only_predicted_counts_as_0():
    found = measured([np.array([[0, 0]])], [np.array([[0, 4]])], per_class=True)
    assert found == {
        'mIoU': 0.25,
        'pixel_accuracy': 0.5,
        'mean_class_accuracy': 0.5,
        'IoU_road': 0.5,
        'IoU_e': 0.0,
    }


def test_ignored_pixels_and_images():
    nothing = np.full((3, 4), -1)
    assert measured([nothing], [np.zeros((3, 4), int)]) == {}
    truths, maps = [nothing, np.array([[1]])], [np.zeros((3, 4), int), np.array([[1]])]
    assert measured(truths, maps)['mIoU'] == 1  # of one pixel


def test_a_pixel_predicted_as_none_or_as_no_class_of_the_data_is_wrong():
    truth, found = np.array([[0, 0, 1, 1, -1]]), np.array([[0, -1, 1, 9, -1]])
    assert measured([truth], [found]) == {
        'mIoU': 0.5,
        'pixel_accuracy': 0.5,
        'mean_class_accuracy': 0.5,
    }
    assert count_pixels(truth, found, 2).tolist() == [[1, 0, 1], [0, 1, 1]]


def test_maps_of_other_sizes_take_the_nearest_pixels_of_their_real_part():
    truth = np.repeat(np.repeat([[0, 1], [2, 3]], 3, axis=0), 4, axis=1)
    small = np.array([[0, 1, 4], [2, 3, 4], [4, 4, 4]])  # the last row and column are padding
    assert measured([truth], [small], sizes=[(2, 2)])['mIoU'] == 1
    assert measured([truth], [small])['mIoU'] < 1


def test_passes_do_not_mix_and_what_is_not_finite_is_nan():
    source = Source([truth_of(np.array([[0, 1]]))])
    evaluator = Evaluator()
    evaluator.open(SimpleNamespace(source=source, info=SourceInfo(2, ('a', 'b'))))
    for found, expected in (([[0, 0]], 0.25), ([[0, 1]], 1), ([[0, -2]], np.nan), ([[0, 1]], 1)):
        evaluator.start()
        arrays = {'segmentation': np.array([found], np.int32), 'size': np.array([[1, 2]])}
        evaluator.update(arrays, {'index': np.array([0])})
        np.testing.assert_equal(evaluator.result()['mIoU'], expected)


def test_things_and_stuff_of_panoptic_data_are_classes_of_pixels():
    source = open_source('scenes_panoptic:4', 'train')
    evaluator = Evaluator()
    evaluator.open(SimpleNamespace(source=source, info=source.info))
    for index in range(4):
        truth = source.annotations(index)
        classes = (truth['masks'] * truth['labels'][:, None, None]).sum(0)
        arrays = {'segmentation': classes[None], 'size': np.array([truth['size']])}
        evaluator.update(arrays, {'index': np.array([index])})
    assert evaluator.result() == dict.fromkeys(NAMES, 1)


def test_mistakes():
    digits = open_source('digits', 'test')
    with pytest.raises(UserError, match=r"'labels'.*size, label"):
        Evaluator().open(SimpleNamespace(source=digits, info=digits.info))
    with pytest.raises(UserError, match=r'2 x 1 .* 3 x 1: .*config.task.frame'):
        measured([np.zeros((1, 3), int)], [np.zeros((1, 2), int)], sizes=[(1, 3)])
    with pytest.raises(UserError, match="'segmentation'"):
        Evaluator().update({'size': np.zeros((1, 2))}, {'index': np.array([0])})
