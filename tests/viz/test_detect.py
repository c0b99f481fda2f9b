"""Boxes as rows and drawn: where they are in the file, and labels that do not hide each other."""

import argparse
import dataclasses
import pathlib

import numpy as np
import pytest
from helpers.messages import says

from vit_jax.errors import UserError
from vit_jax.viz import detect, detect_groups, figures
from vit_jax.viz.photo import Context, Photo


def photo(affine=((0.5, 0, 0), (0, 0.5, 0))):
    """A file of 60 x 80 pixels, seen at half the size and padded to 40 x 50."""
    mask = np.zeros((40, 50), bool)
    mask[:30, :40] = True
    fields = {'image': np.zeros((40, 50, 3), np.uint8), 'pixel_mask': mask}
    original = np.full((60, 80, 3), 90, np.uint8)
    affine = None if affine is None else np.array(affine, np.float64)
    return Photo(pathlib.Path('street.png'), original, fields, '', affine)


def context(threshold=0.5):
    return Context(('car', 'dog'), argparse.Namespace(threshold=threshold))


PREDICTION = {
    'scores': np.array([0.6, 0.2, 0.9], np.float32),
    'labels': np.array([1, 0, 0]),
    'boxes': np.array([[0.5, 0.5, 1, 1.1], [0, 0, 1, 1], [0.25, 0, 0.5, 0.5]], np.float32),
}


def test_rows_are_in_pixels_of_the_file_the_surest_first():
    assert detect.Viz().rows(PREDICTION, photo(), context()) == [
        {'class': 'car', 'category_id': 0, 'score': pytest.approx(0.9), 'bbox': [20, 0, 20, 30]},
        {'class': 'dog', 'category_id': 1, 'score': pytest.approx(0.6), 'bbox': [40, 30, 40, 30]},
    ]
    assert len(detect.Viz().rows(PREDICTION, photo(), context(0.0))) == 3
    assert detect.Viz().rows(PREDICTION, photo(), context(0.95)) == []


def test_a_model_that_sees_a_cut_of_the_file():
    """Twice the size, from (10, 20) on: the whole image is the rows from 20, columns from 10."""
    boxes = detect.to_file_boxes(
        np.array([[0.0, 0.0, 1.0, 1.0]]), photo([[2, 0, -20], [0, 2, -40]])
    )
    np.testing.assert_allclose(boxes, [[10, 20, 20, 15]])


def test_mistakes():
    for text in ('1.5', '-1', 'nan', 'half'):
        with pytest.raises(UserError, match=f'--threshold {text}'):
            detect.parse_threshold(text)
    with pytest.raises(UserError, match=r'track.*positions'):
        detect.Viz().rows(PREDICTION, photo(affine=None), context())


def test_an_image_without_objects_says_so():
    note = detect.Viz().note(PREDICTION, context(0.95))
    assert says(note, 'no object', '0.95', '0.90', 'car')
    assert 'no object' in detect.Viz().note({'scores': np.zeros(0)}, context())
    figure = detect.Viz().draw([PREDICTION] * 2, [photo(), photo()], context(0.95))
    assert [axes.get_title() for axes in figure.axes] == ['street.png: no object at 0.95'] * 2


def test_queries_that_have_found_something():
    logits = np.array([[[9.0, 0, 0], [0, 0, 9.0], [0, 1.0, 0], [0, 9.0, 0]], np.zeros((4, 3))])
    assert detect.Viz().queries({'logits': logits}, Context(('car',))) == {0: 'car', 3: 'class 1'}
    assert detect.Viz().queries({'logits': logits[1:]}, Context(('car',))) is None
    many = np.zeros((1, 200, 3))
    many[0, [7, 150], 0] = 0.5
    found = detect.Viz().queries({'logits': many}, Context(('car',)))
    assert list(found) == [*range(39), 150]
    assert set(found.values()) == {''}


def test_a_frame_and_a_label_for_every_object():
    figure = detect.Viz().draw([PREDICTION, PREDICTION], [photo(), photo()], context())
    assert len(figure.axes) == 2
    for axes in figure.axes:
        assert {text.get_text() for text in axes.texts} == {'car 0.90', 'dog 0.60'}
        frames = {(*p.get_xy(), p.get_width(), p.get_height()) for p in axes.patches}
        assert frames == {(20, 0, 20, 30), (40, 30, 40, 30)}
        colors = {p.get_edgecolor() for p in axes.patches}
        assert len(colors) == 3  # two, and the white around both


def test_a_box_has_one_label_and_files_have_all_classes():
    """Where each class of a query has a score, the picture shows the best."""
    prediction = {**PREDICTION, 'queries': np.array([4, 7, 4])}
    viz, low = detect_groups.Viz(), context(0.0)
    texts = [text.get_text() for text in viz.draw([prediction], [photo()], low).axes[0].texts]
    assert sorted(text for text in texts if text) == ['car 0.20', 'car 0.90']
    assert len(viz.rows(prediction, photo(), low)) == 3


def test_labels_lie_in_the_image_and_not_on_each_other():
    rng = np.random.default_rng(0)
    taken = []
    for _ in range(6):
        x, y = rng.uniform(0, 30, 2)
        place = figures.find_label_box((x, y, 50.0, 40.0), (18.0, 5.0), (80, 100), taken)
        assert 0 <= place[0] <= 100 - 18
        assert 0 <= place[1] <= 80 - 5
        assert all(figures.overlap(place, other) == 0 for other in taken)
        taken.append(place)


def test_many_labels_at_a_border_do_not_cover_each_other():
    boxes = [(90.0, float(y), 10.0, 10.0) for y in range(0, 40, 5)]
    taken = []
    for box in boxes:
        taken.append(figures.find_label_box(box, (40.0, 6.0), (80, 100), taken, boxes))
    assert all(figures.overlap(a, b) == 0 for i, a in enumerate(taken) for b in taken[:i])


def test_labels_are_as_wide_as_their_room():
    names = ('Wimbledon', 'ill', '猫と犬')
    boxes = np.array([[0.5, 0.1, 0.5, 0.3], [0.5, 0.5, 0.5, 0.7], [0.9, 0.8, 1, 1]], np.float32)
    found = {'scores': np.full(3, 0.9), 'labels': np.arange(3), 'boxes': boxes}
    one = dataclasses.replace(photo(), affine=np.array([[0.5, 0, 0], [0, 0.5, 0]]))
    figure = detect.Viz().draw([found], [one], dataclasses.replace(context(), class_names=names))
    figures.pixels(figure)
    (axes,) = figure.axes
    for text in axes.texts:
        drawn = text.get_bbox_patch().get_window_extent()
        assert axes.bbox.x0 - 1 <= drawn.x0 and drawn.x1 <= axes.bbox.x1 + 1


@pytest.mark.parametrize('corner', [(0, 0), (95, 0), (0, 75), (95, 75), (50, 40)])
def test_a_label_hides_no_small_object(corner):
    small, neighbor = (*corner, 5.0, 5.0), (abs(corner[0] - 8), corner[1], 5.0, 5.0)
    place = figures.find_label_box(small, (30.0, 8.0), (80, 100), [], [small, neighbor])
    assert figures.overlap(place, small) == figures.overlap(place, neighbor) == 0


def test_an_object_narrower_than_its_label_has_smaller_letters():
    figure = detect.Viz().draw([PREDICTION], [photo()], context())
    assert {text.get_fontsize() for text in figure.axes[0].texts} == {figures.LABEL_SIZE}
    thin = {**PREDICTION, 'boxes': PREDICTION['boxes'] * [1, 1, 0.6, 1] + [0, 0, 0.2, 0]}
    thin['boxes'][2, 2] = 0.3
    figure = detect.Viz().draw([thin], [photo()], context())
    assert figures.SMALL_LABEL_SIZE in {text.get_fontsize() for text in figure.axes[0].texts}


def test_a_class_has_one_color_in_data_and_predictions():
    (shown,) = detect.Viz().draw([PREDICTION], [photo()], context()).axes
    example = {
        'image': np.zeros((40, 50, 3), np.uint8),
        'boxes': np.array([[0, 0, 9, 9], [20, 5, 30, 30], [0, 20, 9, 39], [0, 0, 0, 0]]),
        'labels': np.array([1, 0, 1, 0]),
        'object_mask': np.array([1, 1, 1, 0]),
    }
    (marked,) = detect.Viz().draw_batch([example['image']], [example], context()).axes
    for axes, names in ((shown, ['car 0.90', 'dog 0.60']), (marked, ['car', 'dog', 'dog'])):
        grounds = {(t.get_text(), t.get_bbox_patch().get_facecolor()[:3]) for t in axes.texts}
        assert sorted(t.get_text() for t in axes.texts) == names
        first = {(name, figures.class_color(name[0] == 'd')) for name in names}
        assert grounds >= first and len(grounds) == len(names)  # objects of a class differ


def test_colors_differ_and_carry_white_letters():
    colors = np.array([figures.class_color(i) for i in range(12)])
    apart = np.linalg.norm(colors[:, None] - colors[None], axis=-1)
    assert apart[~np.eye(12, dtype=bool)].min() > 0.1
    linear = np.where(colors <= 0.04045, colors / 12.92, ((colors + 0.055) / 1.055) ** 2.4)
    assert (1.05 / (linear @ [0.2126, 0.7152, 0.0722] + 0.05)).min() > 4.4
