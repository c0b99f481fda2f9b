"""Masks in the format of COCO: polygons and run lengths, by pycocotools itself."""

import json

import numpy as np
import pytest
from PIL import Image

from vit_jax.data.records import BrokenRecord
from vit_jax.data.sources import coco_masks, open_source
from vit_jax.errors import UserError

mask_utils = pytest.importorskip('pycocotools.mask')
SIZE = (20, 30)
SQUARE, DISK = np.zeros(SIZE, bool), np.hypot(*np.mgrid[-9:11, -20:10]) < 7
SQUARE[4:12, 5:15] = True
TRIANGLE = [[1.0, 1.0, 10.5, 1.0, 1.0, 8.0], [20, 12, 28, 12, 28, 18, 20, 18]]


def run_lengths(mask):
    flat = mask.ravel(order='F').astype(int)
    edges = np.flatnonzero(np.diff(flat, prepend=0)).tolist()
    counts = np.diff([0, *edges, flat.size]).tolist()
    return {'size': list(mask.shape), 'counts': counts}


def compressed(mask):
    found = mask_utils.encode(np.asfortranarray(mask.astype(np.uint8)))
    return {'size': found['size'], 'counts': found['counts'].decode()}


SHAPES = [TRIANGLE, run_lengths(SQUARE), compressed(DISK), [[1, 1, 2, 2]]]


def write(folder, shapes=SHAPES):
    images = [
        {'id': 7, 'file_name': 'a.png', 'height': SIZE[0], 'width': SIZE[1]},
        {'id': 9, 'file_name': 'b.png', 'height': SIZE[0], 'width': SIZE[1]},
    ]
    rows = [
        {'id': 10 + i, 'image_id': 7, 'category_id': 3 + i % 2, 'bbox': [0, 0, 30, 20]}
        | {'segmentation': shape, 'iscrowd': int(i == 1), 'area': 50 + i}
        for i, shape in enumerate(shapes)
    ]
    categories = [{'id': 3, 'name': 'cat'}, {'id': 4, 'name': 'dog'}]
    content = {'images': images, 'annotations': rows, 'categories': categories}
    (folder / 'instances_val.json').write_text(json.dumps(content))
    for image in images:
        Image.new('RGB', SIZE[::-1]).save(folder / image['file_name'])
    return f'coco_masks:{folder}'


def test_polygons_and_run_lengths(tmp_path):
    source = open_source(write(tmp_path), 'val')
    found = source.annotations(0)
    polygons = mask_utils.decode(mask_utils.merge(mask_utils.frPyObjects(TRIANGLE, *SIZE)))
    np.testing.assert_array_equal(found['masks'][:3], [polygons, SQUARE, DISK])
    assert not found['masks'][3].any() and found['ids'].tolist() == [10, 11, 12, 13]
    assert found['areas'].tolist() == [50, 51, 52, 53] and found['size'] == SIZE
    record = source[0]  # without the polygon of two points
    np.testing.assert_array_equal(record['masks'], found['masks'][:3])
    assert (record['labels'].tolist(), record['crowd'].tolist()) == (
        [0, 1, 0],
        [False, True, False],
    )
    assert source[1]['masks'].shape == (0, *SIZE) and source[1]['labels'].shape == (0,)
    assert source.class_counts().tolist() == [2, 2]
    assert source.info.class_names == ('cat', 'dog')


@pytest.mark.fault(56)
@pytest.mark.parametrize(
    ('shape', 'message'),
    [
        ({'size': [20, 31], 'counts': [620]}, '31 x 20.*30 x 20'),
        ({'size': [20, 30], 'counts': [100, 501]}, 'run lengths.*600'),
        ({'size': [20, 30], 'counts': [700, -100]}, 'run lengths.*600'),
        ({'size': [20, 30], 'counts': [0.5]}, 'run lengths.*integers'),
        ({'size': [20, 30], 'counts': ''}, 'compressed'),
        ({'size': [20, 30], 'counts': 'ÿ'}, 'compressed'),
        ({'size': [20, 30], 'counts': 'o' * 40 + '0'}, 'compressed'),
        ([[1, 2, 3, 4, 5, 6, 7]], 'polygon.*x, y'),
        ([['x', 2, 3, 4, 5, 6]], 'float'),
        ([[{'x': 1, 'y': 2}] * 4], 'polygon.*x, y'),
        ([[0, 0, 5e8, 0, 5e8, 5e8, 0, 5e8]], 'polygon'),  # crashed the process
        ([[1e300, 0, 1e300, 1, 1e300, 2]], 'polygon'),
        ([[0, 0, 1e5, 0] * 20], 'polygon'),  # gigabytes
    ],
)
def test_malformed_masks_are_broken_records(tmp_path, shape, message):
    source = coco_masks.Source(write(tmp_path, [shape]).partition(':')[2], 'val')
    with pytest.raises(BrokenRecord, match=f'instances_val.json: annotation 10: .*{message}'):
        source[0]


@pytest.mark.fault(56)
@pytest.mark.parametrize('mask', [SQUARE, DISK, ~DISK, np.ones(SIZE, bool)])
def test_cut_run_lengths_are_broken_records(tmp_path, mask):
    """pycocotools leaves the pixels that no run covers as they are in memory."""
    shape = compressed(mask)
    source = open_source(write(tmp_path, [shape] * 2), 'val')
    np.testing.assert_array_equal(source[0]['masks'], [mask] * 2)
    for length in range(1, len(shape['counts'])):
        cut = {**shape, 'counts': shape['counts'][:length]}
        with pytest.raises(BrokenRecord, match='annotation 10: '):
            coco_masks.Source(write(tmp_path, [cut]).partition(':')[2], 'val')[0]


@pytest.mark.parametrize('shape', [{}, {'size': [20, 30]}, 'x', [None], [{'counts': [600]}]])
def test_annotations_without_masks_are_refused(tmp_path, shape):
    with pytest.raises(UserError, match=r'annotation 10 has no|no mask'):
        open_source(write(tmp_path, [shape]), 'val')


def test_other_writings_of_masks(tmp_path, caplog):
    """Lists of run lengths, a polygon without its list, runs as floats, and objects without any."""
    floats = {'size': [20.0, 30.0], 'counts': [float(x) for x in run_lengths(SQUARE)['counts']]}
    shapes = [[compressed(DISK), run_lengths(SQUARE)], TRIANGLE[0], floats, [], None, [[]]]
    found = open_source(write(tmp_path, shapes), 'val').annotations(0)
    polygon = mask_utils.decode(mask_utils.frPyObjects(TRIANGLE[:1], *SIZE))[..., 0]
    empty = np.zeros(SIZE, bool)
    expected = [DISK | SQUARE, polygon, SQUARE, empty, empty, empty]
    np.testing.assert_array_equal(found['masks'], expected)
    assert '3 of 6' in caplog.text
    with pytest.raises(UserError, match='coco:PATH'):
        open_source(write(tmp_path, [[], None]), 'val')


def test_evaluations_measure_the_file(tmp_path):
    """The truth against itself, by the evaluator of masks."""
    from types import SimpleNamespace

    from vit_jax.evaluators.mask_ap import Evaluator

    source, evaluator = open_source(write(tmp_path, SHAPES[:3]), 'val'), Evaluator()
    evaluator.open(SimpleNamespace(source=source, info=source.info))
    truth = source.annotations(0)
    logits = np.where(truth['masks'], 40, -40).astype(np.float32)[None]
    arrays = {'masks': logits, 'labels': truth['labels'][None], 'scores': np.ones((1, 3))}
    arrays |= {name: np.array([SIZE]) for name in ('frame', 'size')}
    evaluator.update(arrays, {'index': np.array([0])})
    found = evaluator.result()
    assert found['AP'] == pytest.approx(1) and found['AP_small'] == pytest.approx(1)
