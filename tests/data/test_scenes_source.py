"""Scenes of digits: what their boxes and masks must say of the pixels."""

import numpy as np
import pytest

from vit_jax.data.sources import open_source, scenes
from vit_jax.errors import UserError

SCENES = open_source('scenes:60', 'train')
RECORDS = [SCENES[i] for i in range(len(SCENES))]


def test_a_record_is_a_function_of_split_and_index():
    again = open_source('scenes', 'train')
    for i in (0, 59):
        assert all(np.array_equal(again[i][key], RECORDS[i][key]) for key in RECORDS[i])
    assert not np.array_equal(open_source('scenes', 'test')[0]['image'], RECORDS[0]['image'])
    assert (len(SCENES), len(again), len(open_source('scenes:7', 'test'))) == (60, 20_000, 500)


def test_boxes_are_tight_around_masks_that_share_no_pixel():
    for record in RECORDS:
        height, width = record['image'].shape[:2]
        assert record['masks'].shape == (len(record['labels']), height, width)
        assert record['masks'].sum(0).max(initial=0) <= 1
        np.testing.assert_array_equal(record['areas'], record['masks'].sum((1, 2)))
        for mask, (x0, y0, x1, y1) in zip(record['masks'], record['boxes'], strict=True):
            inside = mask[int(y0) : int(y1), int(x0) : int(x1)]
            assert inside.sum() == mask.sum()
            for edge in (inside[0], inside[-1], inside[:, 0], inside[:, -1]):
                assert edge.any()


def test_masks_are_where_the_digits_are():
    """Digits are lighter than any ground, or darker where the image is inverted."""
    for record in RECORDS:
        drawn = record['masks'].any(0)
        if drawn.any():
            gray = record['image'].mean(-1)
            ground = gray[~drawn]
            digits = gray[drawn]
            distance = max(digits.mean() - ground.mean(), ground.mean() - digits.mean())
            assert distance > 20


def test_variety():
    counts = [len(record['labels']) for record in RECORDS]
    assert min(counts) == 0
    assert 4 <= max(counts) <= scenes.MOST
    assert set(np.concatenate([record['labels'] for record in RECORDS])) == set(range(10))
    sizes = np.array([record['image'].shape[:2] for record in RECORDS])
    assert (sizes.min(), sizes.max()) == pytest.approx(scenes.SIDES, abs=3)


def test_annotations_are_the_record_without_its_image():
    found, record = SCENES.annotations(3), RECORDS[3]
    assert found.keys() == record.keys() - {'image'} | {'size'}
    assert found['size'] == record['image'].shape[:2]
    np.testing.assert_array_equal(found['boxes'], record['boxes'])


def test_mistakes():
    with pytest.raises(UserError, match=r"unknown split 'tset'; .* 'test'"):
        open_source('scenes', 'tset')
    for path in ('many', '0', '-3'):
        with pytest.raises(UserError, match=r'number.*training'):
            open_source(f'scenes:{path}', 'train')
    with pytest.raises(UserError, match='digits'):
        open_source('scenes', 'train[:5 per class]')


def test_grounds_are_stuff_behind_the_same_digits():
    panoptic = open_source('scenes_panoptic:60', 'train')
    grounds = set()
    for i, expected in enumerate(RECORDS):
        record = panoptic[i]
        ink = expected['masks'].any(0)
        np.testing.assert_array_equal(record['image'][ink], expected['image'][ink])
        assert not np.array_equal(record['image'], expected['image'])  # it has tints
        np.testing.assert_array_equal(record['labels'][:-1], expected['labels'])
        np.testing.assert_array_equal(record['boxes'][:-1], expected['boxes'])
        assert (record['masks'].sum(0) == 1).all()
        grounds.add(panoptic.info.class_names[record['labels'][-1]])
    assert grounds == set(scenes.GROUNDS)
    assert panoptic.info.stuff == (10, 11, 12, 13)
