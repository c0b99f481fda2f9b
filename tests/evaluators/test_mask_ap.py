"""AP of masks: pycocotools' own numbers, crowds, masks of one pixel, shared queries, stuff."""

import contextlib
import io
from types import SimpleNamespace

import numpy as np
import pytest

from vit_jax.data.records import SourceInfo
from vit_jax.data.sources import open_source
from vit_jax.errors import UserError
from vit_jax.evaluators.coco_ap import METRICS
from vit_jax.evaluators.mask_ap import Evaluator


class Source(list):
    title = 'a few'

    def annotations(self, index):
        return self[index]


def opened(records, num_classes=2, stuff=(), **options):
    evaluator = Evaluator(**options)
    info = SourceInfo(num_classes, tuple('abc'[:num_classes]), stuff=stuff)
    evaluator.open(SimpleNamespace(source=Source(records), info=info))
    return evaluator


def boxes(size, *corners):
    """Masks [N H W] of rectangles (x0, y0, x1, y1)."""
    masks = np.zeros((len(corners), *size), bool)
    for mask, (x0, y0, x1, y1) in zip(masks, corners, strict=True):
        mask[y0:y1, x0:x1] = True
    return masks


def truth(size, corners, labels, **more):
    return {'size': size, 'masks': boxes(size, *corners), 'labels': np.array(labels, int), **more}


def predicted(masks, labels, scores, logit=50, **more):
    """One image whose masks are sure, at the size of the file."""
    size = np.array(masks.shape[1:])
    logits = np.where(masks, logit, -50).astype(np.float32)
    arrays = {'masks': logits, 'labels': np.array(labels), 'scores': np.array(scores, np.float32)}
    return arrays | {'frame': size, 'size': size} | more


def measure(evaluator, *predictions):
    evaluator.start()
    for index, one in enumerate(predictions):
        evaluator.update({k: x[None] for k, x in one.items()}, {'index': np.array([index])})
    return evaluator.result()


def by_pycocotools(truths, predictions):
    """The twelve numbers of encoded masks."""
    from pycocotools import mask
    from pycocotools.coco import COCO
    from pycocotools.cocoeval import COCOeval

    def encode(one):
        return mask.encode(np.asfortranarray(one.astype(np.uint8)))

    rows, found = [], []
    for i, one in enumerate(truths):
        for m, label, crowd in zip(one['masks'], one['labels'], one['crowd'], strict=True):
            row = {'id': len(rows) + 1, 'image_id': i, 'category_id': int(label)}
            area = float(m.sum())
            rows.append({**row, 'segmentation': encode(m), 'area': area, 'iscrowd': int(crowd)})
    for i, (masks, labels, scores) in enumerate(predictions):
        for m, label, score in zip(masks, labels, scores, strict=True):
            row = {'image_id': i, 'category_id': int(label), 'score': float(score)}
            found.append({**row, 'segmentation': encode(m)})
    with contextlib.redirect_stdout(io.StringIO()):
        coco = COCO()
        images = [
            {'id': i, 'height': t['size'][0], 'width': t['size'][1]} for i, t in enumerate(truths)
        ]
        categories = [{'id': c} for c in range(2)]
        coco.dataset = {'images': images, 'annotations': rows, 'categories': categories, 'info': {}}
        coco.createIndex()
        measured = COCOeval(coco, coco.loadRes(found), 'segm')
        measured.evaluate()
        measured.accumulate()
        measured.summarize()
    pairs = zip(METRICS, measured.stats.tolist(), strict=True)
    return {name: value for name, value in pairs if value >= 0}


def test_numbers_are_those_of_pycocotools():
    """Masks are predicted at a quarter of a padded frame, and measured at the file's size."""
    torch = pytest.importorskip('torch')
    rng = np.random.default_rng(0)
    truths, predictions, expected, plain = [], [], [], []
    for height, width in ((60, 80), (97, 40), (50, 50)):
        corners = rng.integers(0, 30, (6, 2))
        corners = np.concatenate([corners, corners + rng.integers(1, 40, (6, 2))], 1)
        corners[0, 2:] = corners[0, :2] + 1  # a single pixel
        crowd = np.arange(6) == 5
        truths.append(truth((height, width), corners, rng.integers(0, 2, 6), crowd=crowd))
        scale = 128 / max(height, width)
        real = np.round(np.array([height, width]) * scale).astype(int)
        masks = np.zeros((6, 128, 128), np.float32)
        for m, c in zip(masks, corners, strict=True):
            x0, y0, x1, y1 = np.round((c + rng.normal(0, 2, 4)) * scale).astype(int).clip(0)
            m[y0:y1, x0:x1] = 1
        masks = torch.nn.functional.avg_pool2d(torch.from_numpy(masks), 4) * 4 - 2
        labels, scores = truths[-1]['labels'], rng.uniform(0.1, 1, 6).astype(np.float32)
        arrays = {'masks': masks.numpy(), 'labels': labels, 'scores': scores, 'size': real}
        predictions.append(arrays | {'frame': np.array([128, 128])})

        def resize(x, size):
            return torch.nn.functional.interpolate(x[None], size, mode='bilinear')[0]

        logits = resize(resize(masks, (128, 128))[:, : real[0], : real[1]], (height, width))
        inside = logits > 0
        weights = (logits.sigmoid() * inside).sum((1, 2)) / inside.sum((1, 2)).clamp(min=1)
        kept = inside.any(2).any(1).numpy()
        rows = inside.numpy(), labels, scores * weights.numpy()
        expected.append(tuple(x[kept] for x in rows))
        plain.append((*expected[-1][:2], scores[kept]))
    evaluator = opened(truths)
    found = measure(evaluator, *predictions)
    assert found == pytest.approx(by_pycocotools(truths, expected), abs=1e-6)
    assert 0.05 < found['AP'] < 0.9 and found['AP'] < found['AP50']
    assert set(evaluator.names()) == found.keys()
    unweighted = measure(opened(truths, weighted=False), *predictions)
    assert unweighted == pytest.approx(by_pycocotools(truths, plain), abs=1e-6)
    assert unweighted != found


def test_the_truth_itself_and_images_without_objects():
    size = (40, 50)
    records = [truth(size, [(0, 0, 20, 20), (30, 30, 31, 31)], [0, 1]), truth(size, [], [])]
    right = predicted(records[0]['masks'], [0, 1], [0.9, 0.8])
    nothing = predicted(boxes(size, (0, 0, 9, 9), (5, 5, 9, 9)), [0, 0], [0, 0])
    found = measure(opened(records), right, nothing)
    assert found == pytest.approx(dict.fromkeys(found, 1)) and 'AP_small' in found
    empty = predicted(boxes(size, (0, 0, 0, 0), (5, 5, 5, 5)), [0, 1], [0.9, 0.9])
    assert measure(opened(records), empty, empty)['AP'] == 0
    wrong = predicted(boxes(size, (0, 0, 20, 20)), [0], [0.95])
    assert measure(opened(records), right, wrong)['AP'] == pytest.approx(0.75, abs=1e-6)


def test_crowds_are_neither_found_nor_missed():
    size = (40, 50)
    crowd = np.array([False, True])
    records = [truth(size, [(0, 0, 20, 20), (20, 0, 50, 40)], [0, 0], crowd=crowd)]
    masks = boxes(size, (0, 0, 20, 20), (21, 0, 30, 9), (31, 9, 45, 30))
    found = measure(opened(records, 1), predicted(masks, [0, 0, 0], [0.5, 0.9, 0.8]))
    assert found['AP'] == pytest.approx(1)


def test_several_predictions_may_share_a_mask():
    size = (40, 50)
    records = [truth(size, [(0, 0, 20, 20)], [1])]
    masks = boxes(size, (30, 30, 40, 40), (0, 0, 20, 20))
    queries = np.array([0, 1, 1])
    one = predicted(masks, [0, 0, 1], [0.9, 0.8, 0.7], queries=queries)
    assert measure(opened(records), one)['AP'] == pytest.approx(1)
    assert measure(opened(records), {**one, 'queries': queries[::-1]})['AP'] == 0


def test_things_of_panoptic_data_alone_are_measured():
    size = (40, 50)
    numbers = np.zeros(size, np.int16)
    numbers[:20, :20], numbers[20:], numbers[:, 40:] = 1, 2, -1
    records = [{'size': size, 'segments': numbers, 'labels': np.array([0, 1])}]
    thing = predicted(boxes(size, (0, 0, 20, 20), (0, 0, 9, 9)), [0, 1], [0.5, 0.9])
    found = measure(opened(records, stuff=(1,)), thing)
    assert found['AP'] == pytest.approx(1)
    with pytest.raises(UserError, match=r"a few: .*'mean_iou'"):
        opened(records, stuff=(0, 1))


def test_mistakes():
    digits = open_source('digits', 'test')
    with pytest.raises(UserError, match="'labels'"):
        Evaluator().open(SimpleNamespace(source=digits, info=digits.info))
    evaluator = opened([truth((4, 4), [(0, 0, 2, 2)], [0])])
    with pytest.raises(UserError, match=r"masks .*'frame'"):
        evaluator.update(
            {k: np.zeros((1, 2)) for k in ('masks', 'scores', 'labels')}, {'index': np.array([0])}
        )
