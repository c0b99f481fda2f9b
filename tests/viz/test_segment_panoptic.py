"""Segments as rows and drawn: pixels of the file, as COCO writes them, in colors that differ."""

import argparse
import pathlib

import numpy as np
import pytest

from vit_jax.errors import UserError
from vit_jax.viz import segment_panoptic as viz
from vit_jax.viz.photo import Context, Photo

ROOT2 = ((0.5, 0, 0), (0, 0.5, 0))


def photo(affine=ROOT2):
    """A file of 24 x 32 pixels, seen at half the size and padded to 16 x 20."""
    mask = np.zeros((16, 20), bool)
    mask[:12, :16] = True
    fields = {'image': np.zeros((16, 20, 3), np.uint8), 'pixel_mask': mask}
    affine = None if affine is None else np.array(affine, np.float64)
    original = np.full((24, 32, 3), 100, np.uint8)
    return Photo(pathlib.Path('street.png'), original, fields, '', affine)


def context(threshold=0.85):
    return Context(('car', 'sky'), argparse.Namespace(threshold=threshold))


def prediction():
    """A car in the left quarter of the image, sky elsewhere; masks at a quarter of the size."""
    car = np.full((4, 5), -5, np.float32)
    car[:, 0] = 5
    return {
        'scores': np.array([0.9, 0.3, 0.95], np.float32),
        'labels': np.array([0, 0, 1]),
        'things': np.array([True, True, False]),
        'masks': np.stack([car, car, -car]),
        'frame': np.array([16, 20]),
        'size': np.array([12, 16]),
    }


def test_rows_are_in_pixels_of_the_file_the_largest_first():
    sky, car = viz.Viz().rows(prediction(), photo(), context())
    assert (sky['class'], sky['kind'], sky['isthing'], sky['id']) == ('sky', 'stuff', 0, 2)
    assert (car['class'], car['kind'], car['category_id']) == ('car', 'thing', 0)
    assert car['bbox'] == [0, 0, 8, 24]
    assert sky['bbox'] == [8, 0, 24, 24]
    assert (car['area'], sky['area']) == (8 * 24, 24 * 24)
    assert car['segmentation'] == {'size': [24, 32], 'counts': [0, 8 * 24, 24 * 24]}
    assert sky['segmentation'] == {'size': [24, 32], 'counts': [8 * 24, 24 * 24]}
    assert car['score'] == pytest.approx(0.9)
    assert [row['class'] for row in viz.Viz().rows(prediction(), photo(), context(0.92))] == ['sky']
    assert viz.Viz().rows(prediction(), photo(), context(0.99)) == []


def test_runs_are_those_of_coco():
    mask_utils = pytest.importorskip('pycocotools.mask')
    mask = np.random.default_rng(0).random((5, 7)) < 0.5
    for given in (mask, ~mask):
        runs = {'size': list(given.shape), 'counts': viz.run_lengths(given)}
        decoded = mask_utils.decode(mask_utils.frPyObjects(runs, *given.shape))
        np.testing.assert_array_equal(decoded, given)


def test_pixels_that_the_model_has_not_seen_are_of_no_segment():
    """Twice the size, from (10, 20) on: rows from 20 and columns from 10 of the file are seen."""
    place = viz.to_file_pixels(np.zeros((12, 16), int), photo([[2, 0, -20], [0, 2, -40]]))
    seen = place >= 0
    assert seen.sum() == 4 * 8
    assert seen[20:, 10:18].all()


def test_the_picture_has_a_color_and_a_name_for_each_segment():
    numbers = np.kron([[0, 1], [2, 3]], np.ones((30, 40), int))
    picture = viz.paint_segments(
        np.full((60, 80, 3), 100, np.uint8), numbers, [(1, 0, 0), (0, 0, 1), (0, 1, 0)]
    )
    inner = [picture[y, x] for y, x in ((10, 10), (10, 70), (50, 10), (50, 70))]
    assert (inner[0] == 100).all()  # of no segment
    apart = [np.abs(a.astype(int) - b).max() for a in inner for b in inner if a is not b]
    assert min(apart) > 30
    assert (picture[50, 39:41] == 255).any()
    figure = viz.Viz().draw([prediction()] * 2, [photo()] * 2, context())
    for axes in figure.axes:
        assert {text.get_text() for text in axes.texts} == {'car 0.90', 'sky 0.95'}


def test_examples_of_the_data_are_drawn_with_their_segments():
    segments = np.repeat([[0, 2], [1, 2]], 8, axis=0)
    labels, real = np.array([1, 0, 0]), np.array([True, True, False])
    example = {'segments': segments, 'labels': labels, 'object_mask': real}
    image = np.full((16, 2, 3), 100, np.uint8)
    figure = viz.Viz().draw_batch([image], [example], context())
    (axes,) = figure.axes
    assert axes.get_title() == '2 objects'
    assert {text.get_text() for text in axes.texts} == {'sky', 'car'}
    drawn = np.asarray(axes.images[0].get_array())
    assert (drawn[0, 0] == 100).all() and not (drawn[-1, 0] == 100).all()


def test_a_name_is_written_where_its_segment_is_thickest():
    mask = np.zeros((20, 30), bool)
    mask[:, :3] = mask[8:19, 12:25] = True
    x, y = viz.thickest_point(mask)
    assert 16 <= x <= 20 and 11 <= y <= 15


def test_the_label_of_a_small_segment_stands_beside_it():
    segments = np.zeros((60, 80), int)
    segments[:30], segments[40:44, 50:56] = 1, 2
    example = {'segments': segments, 'labels': np.array([1, 0]), 'object_mask': np.ones(2)}
    image = np.full((60, 80, 3), 100, np.uint8)
    (axes,) = viz.Viz().draw_batch([image], [example], context()).axes
    places = {text.get_text(): text.get_position() for text in axes.texts}
    assert places['sky'][1] < 30
    assert viz.bounding_box(segments == 2) == (50, 40, 6, 4)
    x, y = places['car']
    assert not (50 <= x <= 56 and 40 <= y <= 44)


def test_mistakes():
    with pytest.raises(UserError, match=r'track.*positions'):
        viz.Viz().rows(prediction(), photo(affine=None), context())
