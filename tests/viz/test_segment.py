"""Segments, instances and classes of pixels as rows: in pixels of the file."""

import argparse
import pathlib

import numpy as np
import pytest

from vit_jax.tasks import segment
from vit_jax.viz import segment as viz
from vit_jax.viz.photo import Context, Photo


def photo():
    """A file of 24 x 32 pixels, seen at half the size and padded to 16 x 20."""
    fields = {'image': np.zeros((16, 20, 3), np.uint8)}
    original = np.full((24, 32, 3), 100, np.uint8)
    affine = np.array([[0.5, 0, 0], [0, 0.5, 0]])
    return Photo(pathlib.Path('street.png'), original, fields, '', affine)


def rows(prediction, threshold=0.8):
    context = Context(('car', 'sky', 'road'), argparse.Namespace(threshold=threshold))
    found = viz.Viz().rows(prediction, photo(), context)
    return [(row['class'], row['area'], row['bbox']) for row in found]


def prediction(**more):
    """A car in the left quarter of the image, sky elsewhere; masks at a quarter of the size."""
    car = np.full((4, 5), -5, np.float32)
    car[:, 0] = 5
    return {
        'scores': np.array([0.9, 0.85, 0.95], np.float32),
        'labels': np.array([0, 0, 1]),
        'masks': np.stack([car, car, -car]),
        'frame': np.array([16, 20]),
        'size': np.array([12, 16]),
        **more,
    }


def test_a_segment_that_others_cover_is_dropped():
    found = rows(prediction(things=np.array([True, True, False])))
    assert found == [('sky', 24 * 24, [8, 0, 24, 24]), ('car', 8 * 24, [0, 0, 8, 24])]


def test_instances_are_whole_and_may_share_a_mask():
    """Each row of `queries` is a mask: AP compares it whole, not only what others leave of it."""
    made = prediction(labels=np.array([0, 1, 2]), queries=np.array([0, 0, 2]))
    found = rows(made, 0.5)
    left = [(name, 8 * 24, [0, 0, 8, 24]) for name in ('car', 'sky')]
    assert found == [('road', 24 * 24, [8, 0, 24, 24]), *left]
    assert rows(made, 0.99) == []
    boxes = np.array([[0, 0, 0.5, 0.5], [0.25, 0, 0.75, 1], [0, 0, 1, 1]], np.float32)
    assert [row[2] for row in rows({**made, 'boxes': boxes}, 0.5)] == [
        [0, 0, 32, 24],
        [0, 0, 20, 16],
        [10, 0, 20, 24],
    ]


def test_in_the_picture_the_best_instance_is_on_top():
    made = prediction(labels=np.array([0, 1, 2]), queries=np.array([0, 0, 2]))
    context = Context((), argparse.Namespace(threshold=0.5))
    (numbers, queries), _ = viz.Viz().find_segments(made, photo(), context)
    assert queries.tolist() == [0, 2] and numbers[0].tolist() == [1] * 8 + [2] * 24


def test_a_segment_for_each_class_of_pixels():
    classes = np.full((16, 20), 2)
    classes[:6, :16] = 1
    found = rows({'segmentation': classes, 'size': np.array([12, 16])})
    assert found == [('sky', 12 * 32, [0, 0, 32, 12]), ('road', 12 * 32, [0, 12, 32, 12])]


def test_the_picture_of_classes_names_them_without_a_score():
    pytest.importorskip('matplotlib')
    context = Context(('car', 'sky', 'road'), argparse.Namespace(threshold=0.8))
    classes = np.full((16, 20), 2)
    classes[:6, :16] = 1
    made = {'segmentation': classes, 'size': np.array([12, 16])}
    figure = viz.Viz().draw([made], [photo()], context)
    assert {text.get_text() for text in figure.axes[0].texts} == {'sky', 'road'}


def test_files_may_be_larger_than_the_images_of_the_data():
    task = viz.Viz().adapt_task(segment.Task(kind='semantic', frame=(8, 8)), Context())
    assert task == segment.Task(kind='semantic')


def test_the_picture_names_what_is_found():
    pytest.importorskip('matplotlib')
    context = Context(('car', 'sky', 'road'), argparse.Namespace(threshold=0.8))
    made = prediction(things=np.array([True, True, False]))
    figure = viz.Viz().draw([made], [photo()], context)
    texts = {text.get_text() for text in figure.axes[0].texts}
    assert {'car 0.90', 'sky 0.95'} <= texts
