"""What lies in an image moves with it: found again in the pixels, under every transform."""

import logging

import numpy as np
import pytest
from helpers.messages import says

from vit_jax.data.records import OBJECTS, example_rng
from vit_jax.data.transforms import geometry, parse_transforms
from vit_jax.data.transforms.randaugment import make_operations, operate
from vit_jax.errors import UserError

SEEDS = range(40)
MOVING = [
    'resize((31, 44))',
    'resize(19)',
    'resize_small(30)',
    'resize_small(40, max=45)',
    'random_resize((20, 30, 40), 50)',
    'central_crop(16)',
    'random_crop((14, 17))',
    'inception_crop(32)',
    "inception_crop((40, 24), 10, 60, 'nearest')",
    'pad_and_crop(9)',
    'flip',
    'flip|resize((50, 30))|random_crop(24)|flip',
]


def scene(seed):
    """Three rectangles, each in a channel of its own, as pixels, boxes, masks and points."""
    rng = np.random.default_rng(seed)
    height, width = rng.integers(24, 48, 2)
    masks, boxes = np.zeros((3, height, width), bool), np.zeros((3, 4), np.float32)
    for mask, box in zip(masks, boxes, strict=True):
        h, w = rng.integers(3, 12, 2)
        y, x = rng.integers(height - h + 1), rng.integers(width - w + 1)
        mask[y : y + h, x : x + w] = True
        box[:] = x, y, x + w, y + h
    return {
        'image': np.ascontiguousarray(masks.transpose(1, 2, 0)).astype(np.uint8) * 255,
        'boxes': boxes,
        'masks': masks,
        'depth': np.where(masks[0], np.float32(2.5), 0),
        'points': (boxes[:, :2] + boxes[:, 2:]) / 2,
        'labels': np.arange(3),
        'crowd': np.zeros(3, bool),
        'ids': np.arange(3) + 100,
        'label': 3,
        'name': 'scene',
        'size': np.array([height, width]),
    }


def around(mask):
    """The box around the pixels of a mask."""
    ys, xs = np.nonzero(mask)
    return np.array([xs.min(), ys.min(), xs.max() + 1, ys.max() + 1], np.float32)


def run(spec, record, example=0):
    before = {name: np.copy(value) for name, value in record.items()}
    out = parse_transforms(spec)(record, example_rng(0, example))
    for name, value in record.items():
        np.testing.assert_array_equal(value, before[name], err_msg=f'{name} changed in place')
    return out


def assert_rows(moved, record):
    """Every field of an object has the rows of the same objects."""
    kept = moved['labels']
    assert moved['boxes'].dtype == np.float32
    assert moved['masks'].dtype == bool
    assert moved['masks'].shape == (len(kept), *moved['image'].shape[:2])
    np.testing.assert_array_equal(moved['ids'], record['ids'][kept])
    assert len(moved['boxes']) == len(moved['crowd']) == len(kept)
    first = moved['masks'][kept == 0].any(0)
    np.testing.assert_array_equal(moved['depth'], np.where(first, np.float32(2.5), 0), strict=True)
    if 'normals' in moved:
        lengths = np.linalg.norm(moved['normals'], axis=-1)
        np.testing.assert_allclose(lengths, first, atol=1e-6)
    assert (moved['label'], moved['name']) == (3, 'scene')
    np.testing.assert_array_equal(moved['size'], record['size'])


@pytest.mark.parametrize('spec', MOVING)
def test_boxes_and_masks_are_where_the_pixels_are(spec):
    for seed in SEEDS:
        record = scene(seed)
        is_first = record['masks'][0][..., None]
        record['normals'] = np.where(is_first, np.float32([0.6, 0, -0.8]), 0)
        moved = run(spec, record, seed)
        assert_rows(moved, record)
        for channel in range(3):
            pixels = moved['image'][..., channel] > 127
            (row,) = np.nonzero(moved['labels'] == channel)
            if not len(row):  # dropped: an interpolated line may be left of it
                assert pixels.any(0).sum() <= 2 or pixels.any(1).sum() <= 2
                continue
            box, mask = moved['boxes'][row[0]], moved['masks'][row[0]]
            if (box[2:] - box[:2]).min() > 2:  # thinner ones need not show in pixels
                np.testing.assert_allclose(box, around(pixels), atol=1)
                np.testing.assert_allclose(box, around(mask), atol=1)


@pytest.mark.parametrize('spec', MOVING)
def test_points_are_where_the_pixels_are(spec):
    for seed in SEEDS:
        moved = run(spec, scene(seed), seed)
        height, width = moved['image'].shape[:2]
        assert moved['points'].shape == (3, 2)
        assert moved['points'].dtype == np.float32
        for channel, (x, y) in enumerate(moved['points']):
            if 1 <= x < width - 1 and 1 <= y < height - 1:
                near = moved['image'][int(y) - 1 : int(y) + 2, int(x) - 1 : int(x) + 2, channel]
                assert near.max() > 127


@pytest.mark.parametrize('name', ['rotate', 'shear_x', 'shear_y', 'translate_x', 'translate_y'])
def test_randaugment_takes_objects_along(name):
    operation = make_operations(translate=15, cutout=4)[name]
    seen = 0
    for seed in SEEDS:
        record = scene(seed)
        moved = operate([operation], record, 0.8, example_rng(0, seed))
        assert_rows(moved, record)
        for row, channel in enumerate(moved['labels']):
            pixels = moved['image'][..., channel] == 255
            np.testing.assert_array_equal(moved['masks'][row], pixels)
            box, size = moved['boxes'][row], moved['image'].shape[1::-1]
            if pixels.any():
                assert (box[:2] < around(pixels)[:2] + 1).all()
                assert (box[2:] > around(pixels)[2:] - 1).all()
            if (box[:2] > 0).all() and (
                box[2:] < size
            ).all():  # a cut box is wider than what is left
                np.testing.assert_allclose(box, around(pixels), atol=1.1)
                x, y = moved['points'][channel]
                assert pixels[int(y), int(x)]
                seen += 1
    assert seen > 20


@pytest.mark.parametrize('spec', ['randaugment(3, 10, 10, 5)', 'random_erasing(1)'])
def test_augmentations_keep_rows_together(spec):
    for seed in SEEDS:
        record = scene(seed)
        assert_rows(run(spec, record, seed), record)


def test_erasing_leaves_objects_where_they_are():
    record = scene(0)
    moved = run('random_erasing(1)', record)
    assert not np.array_equal(moved['image'], record['image'])
    np.testing.assert_array_equal(moved['boxes'], record['boxes'])
    np.testing.assert_array_equal(moved['masks'], record['masks'])


def test_crop_clips_and_drops():
    record = {
        'image': np.zeros((10, 20, 3), np.uint8),
        'boxes': np.array([[0, 0, 4, 4], [2, 2, 12, 8], [9, 1, 10, 2]], np.float32),
        'labels': np.array([5, 6, 7]),
        'points': np.array([[1.0, 1.0], [6.0, 6.0]], np.float32),
    }
    out = geometry.crop(record, y=1, x=5, height=6, width=5)
    np.testing.assert_array_equal(out['boxes'], [[0, 1, 5, 6], [4, 0, 5, 1]])
    np.testing.assert_array_equal(out['labels'], [6, 7])
    np.testing.assert_array_equal(out['points'], [[-4, 0], [1, 5]])  # none is dropped


def test_crop_without_boxes_goes_by_masks():
    masks = np.zeros((2, 8, 8), np.uint8)
    masks[0, :2], masks[1, 6:] = 255, 255
    record = {'image': np.zeros((8, 8, 3), np.uint8), 'masks': masks, 'labels': np.array([1, 2])}
    out = geometry.crop(record, 4, 0, 4, 8)
    np.testing.assert_array_equal(out['masks'], masks[1:, 4:])
    np.testing.assert_array_equal(out['labels'], [2])


@pytest.mark.parametrize('spec', [*MOVING, 'randaugment(4, 10)'])
def test_records_without_objects(spec):
    record = {
        'image': np.zeros((30, 40, 3), np.uint8),
        'boxes': np.zeros((0, 4), np.float32),
        'masks': np.zeros((0, 30, 40), bool),
        'labels': np.zeros(0, np.int32),
    }
    out = run(spec, record)
    assert out['boxes'].shape == (0, 4)
    assert out['masks'].shape == (0, *out['image'].shape[:2])


def test_areas_follow_the_scale():
    areas = np.array([10, 20, 30], np.float32)
    record = scene(0) | {'image': np.zeros((30, 40, 3), np.uint8), 'areas': areas}
    record |= {'masks': np.zeros((3, 30, 40), bool), 'depth': np.ones((30, 40))}
    np.testing.assert_allclose(run('resize((60, 20))', record)['areas'], areas)
    np.testing.assert_allclose(run('resize((60, 80))', record)['areas'], areas * 4)
    np.testing.assert_array_equal(run('flip', record)['areas'], areas)


# -- what is refused -----------------------------------------------------------------------------


@pytest.mark.parametrize('spec', [*MOVING[:-1], 'randaugment(1, 0)'])
@pytest.mark.parametrize('value', [np.zeros((30, 40)), [[1.0, 2.0, 3.0]], np.zeros((0, 7))])
def test_what_cannot_be_moved_is_refused_by_name(spec, value):
    """Whatever is drawn: a run must not fail after an hour."""
    record = {'image': np.zeros((30, 40, 3), np.uint8), 'flow': value, 'label': 1}
    for example in range(5):
        with pytest.raises(UserError) as error:
            run(spec, record, example)
        assert says(str(error.value), spec, "'flow'", "keep('image', 'label')")
    run(f"keep('image', 'label')|{spec}", record)


CUTS = ['central_crop(16)', 'random_crop(16)', 'inception_crop(16)', 'pad_and_crop(2)']


@pytest.mark.parametrize('spec', [*CUTS, 'randaugment(1, 10)'])
def test_areas_of_what_is_cut_are_refused(spec):
    for example in range(5):
        with pytest.raises(UserError, match=r"'areas'.*objects"):
            run(spec, scene(0) | {'areas': np.ones(3)}, example)


@pytest.mark.parametrize(
    ('field', 'message'),
    [
        ({'boxes': np.zeros((3, 5))}, r"'boxes'.*\(3, 5\).*\[N, 4\]"),
        ({'points': np.zeros((3, 3))}, r"'points'.*\(3, 3\).*\[N, 2\]"),
        (
            {'masks': np.zeros((3, 9, 9))},
            r"'masks'.*\(3, 9, 9\).*\[N, 30, 40\]",
        ),
        ({'labels': np.zeros(2)}, '1 boxes, 2 labels'),
        ({'image': np.zeros((30, 40))}, r".*'image'.* \[H, W, C\]"),
    ],
)
def test_malformed_records_are_refused(field, message):
    record = {'image': np.zeros((30, 40, 3), np.uint8), 'boxes': np.zeros((1, 4))}
    with pytest.raises(UserError, match=rf'^flip: {message}'):
        run('flip', record | field)


# -- one size for a batch ------------------------------------------------------------------------


def test_fit_pads_right_and_below():
    for seed in SEEDS:
        record = scene(seed)
        height, width = record['image'].shape[:2]
        out = geometry.shrink_and_pad(record, (60, 50))
        assert out['image'].shape == (60, 50, 3)
        assert out['masks'].shape == (3, 60, 50)
        assert out['pixel_mask'].dtype == bool
        np.testing.assert_array_equal(around(out['pixel_mask']), [0, 0, width, height])
        assert out['pixel_mask'].sum() == height * width
        np.testing.assert_array_equal(out['image'][:height, :width], record['image'])
        assert not out['image'][~out['pixel_mask']].any()
        np.testing.assert_array_equal(out['boxes'], record['boxes'])
        np.testing.assert_array_equal(out['points'], record['points'])
        assert_rows(out, record)


@pytest.mark.parametrize(
    ('shape', 'size', 'real'),
    [
        ((100, 50), (50, 50), (50, 25)),
        ((100, 50), (100, 20), (40, 20)),
        ((7, 4000), (32, 32), (1, 32)),
        ((333, 500), (256, 256), (170, 256)),
        ((32, 32), (32, 32), (32, 32)),
    ],
)
def test_fit_scales_down_alone(shape, size, real):
    boxes = np.array([[0, 0, shape[1], shape[0]]], np.float32)
    out = geometry.shrink_and_pad({'image': np.ones((*shape, 3), np.uint8), 'boxes': boxes}, size)
    assert out['image'].shape == (*size, 3)
    np.testing.assert_array_equal(out['image'][..., 0], out['pixel_mask'])
    np.testing.assert_array_equal(around(out['pixel_mask']), [0, 0, real[1], real[0]])
    np.testing.assert_allclose(out['boxes'], [[0, 0, real[1], real[0]]], rtol=1e-6)


def test_fit_finds_rectangles_again():
    for seed in SEEDS:
        record = scene(seed)
        out = geometry.shrink_and_pad(record, (24, 23))
        for channel, box in enumerate(out['boxes']):
            np.testing.assert_allclose(box, around(out['image'][..., channel] > 127), atol=1)


def test_fit_refuses_by_name():
    record = {'image': np.zeros((4, 4, 3), np.uint8), 'flow': np.zeros((4, 4))}
    with pytest.raises(UserError, match=r"8 x 8.*'flow'"):
        geometry.shrink_and_pad(record, (8, 8))


# -- sizes of detection --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ('shape', 'expected'),
    [
        ((480, 640), (800, 1067)),
        ((640, 480), (1067, 800)),
        ((300, 900), (444, 1333)),
        ((5, 999), (7, 1333)),
    ],
)
def test_resize_small_with_a_longest_side(shape, expected):
    out = run('resize_small(800, max=1333)', {'image': np.zeros((*shape, 1), np.uint8)})
    assert out['image'].shape == (*expected, 1)


def test_random_resize_draws_each_size():
    record = {'image': np.zeros((20, 30, 1), np.uint8)}
    sizes = [run('random_resize((8, 10, 12), 16)', record, i)['image'].shape for i in range(60)]
    assert set(sizes) == {(8, 12, 1), (10, 15, 1), (11, 16, 1)}
    assert min(map(sizes.count, set(sizes))) > 10


def test_pad_objects():
    record = scene(0)
    out = run('pad_objects(5)', record)
    np.testing.assert_array_equal(out['object_mask'], [True, True, True, False, False])
    for name in set(OBJECTS) & set(record):
        assert out[name].dtype == record[name].dtype
        np.testing.assert_array_equal(out[name][:3], record[name])
        assert out[name].shape == (5, *record[name].shape[1:])
        assert not out[name][3:].any()
    np.testing.assert_array_equal(out['points'], record['points'])
    fitted = geometry.shrink_and_pad(out, (64, 64))
    np.testing.assert_array_equal(fitted['boxes'], out['boxes'])


@pytest.mark.parametrize('spec', ['flip', 'resize((33, 27))', 'resize_small(20)'])
def test_numbered_masks_move_as_the_masks_do(spec):
    record = scene(0)
    moved = run(f'number_masks|{spec}|pad_objects(5)', record)
    assert moved['segments'].dtype == np.int16 and 'masks' not in moved
    expected = run(f'{spec}|number_masks', record)['segments']
    np.testing.assert_array_equal(moved['segments'], expected)
    fitted = geometry.shrink_and_pad(moved, (64, 64))['segments']
    height, width = expected.shape
    np.testing.assert_array_equal(fitted[:height, :width], expected)
    assert not fitted[height:].any() and not fitted[:, width:].any()


def test_numbered_masks_are_those_of_the_rows():
    masks = np.array([[[1, 1, 0]], [[0, 1, 0]]], bool)
    record = {'image': np.zeros((1, 3, 3), np.uint8), 'masks': masks}
    np.testing.assert_array_equal(run('number_masks', record)['segments'], [[1, 2, 0]])
    with pytest.raises(UserError, match=r'number_masks.*record'):
        run('number_masks', {'image': record['image']})


def test_a_pixel_of_several_masks_is_of_the_smallest():
    masks = np.array([[[1, 0, 0]], [[1, 1, 1]], [[1, 1, 0]]], bool)
    record = {'image': np.zeros((1, 3, 3), np.uint8), 'masks': masks}
    numbered = run('number_masks', record)
    np.testing.assert_array_equal(numbered['segments'], [[1, 3, 2]])
    np.testing.assert_array_equal(run('number_masks', numbered)['segments'], [[1, 3, 2]])


@pytest.mark.parametrize(
    'spec', [*MOVING, 'large_scale_jitter((20, 30))', 'randaugment(3, 10, 9, 4)']
)
def test_segments_are_cut_as_masks_are(spec):
    """Numbered first or last, the same pixels belong to the same objects."""
    dropped = 0
    for seed in SEEDS:
        record = scene(seed)
        record = {k: record[k] for k in ('image', 'masks', 'ids')}
        record['masks'] &= record['masks'].cumsum(0) == 1  # disjoint, whatever their areas become
        kept = record['masks'].any((1, 2))
        record |= {k: record[k][kept] for k in ('masks', 'ids')}
        first, last = (
            run(f'number_masks|{spec}', record, seed),
            run(f'{spec}|number_masks', record, seed),
        )
        np.testing.assert_array_equal(first['ids'], last['ids'])
        assert first['segments'].dtype == np.int16
        np.testing.assert_array_equal(first['segments'].clip(0), last['segments'].clip(0))
        dropped += len(first['ids']) < len(record['ids'])
    assert (dropped > 0) == ('crop' in spec or 'jitter' in spec or 'randaugment' in spec)


def test_padding_of_segments_is_void():
    segments = np.array([[0, 1], [-1, 2]], np.int16)
    record = {'image': np.zeros((2, 2, 3), np.uint8), 'segments': segments, 'labels': np.arange(2)}
    padded = geometry.pad(record, 1, 0, 0, 1)['segments']
    np.testing.assert_array_equal(padded, [[-1, -1, -1], [0, 1, -1], [-1, 2, -1]])
    cut = geometry.crop(record, 1, 0, 1, 2)
    np.testing.assert_array_equal(cut['segments'], [[-1, 1]])
    np.testing.assert_array_equal(cut['labels'], [1])
    with pytest.raises(UserError, match=r"'segments' .* \(2, 2\); .* \[3, 2\]"):
        geometry.flip({**record, 'image': np.zeros((3, 2, 3), np.uint8)})


def test_pad_objects_says_what_it_cuts_off(caplog):
    caplog.set_level(logging.WARNING)
    pad, record = parse_transforms('pad_objects(2)'), scene(0)
    for _ in range(12):
        out = pad(record, example_rng(0, 0))
        assert out['object_mask'].all()
        np.testing.assert_array_equal(out['boxes'], record['boxes'][:2])
        np.testing.assert_array_equal(out['labels'], [0, 1])
    first, second = caplog.messages
    assert says(first, 'pad_objects(2)', '3 objects', 'is cut; 1 so far')
    assert says(second, 'pad_objects(2)', '3 objects', 'is cut; 10 so far')


@pytest.mark.parametrize('spec', [*CUTS, 'flip', 'randaugment(1, 10)'])
def test_pad_objects_comes_last(spec):
    with pytest.raises(UserError, match='put pad_objects last'):
        run(f'pad_objects(5)|{spec}', scene(0))


def test_pad_objects_needs_objects():
    with pytest.raises(UserError, match=r'pad_objects\(5\).*record'):
        run('pad_objects(5)', {'image': np.zeros((4, 4, 3), np.uint8), 'label': 1})
