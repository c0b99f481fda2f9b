"""Files in the format of COCO: what is read, repaired and refused."""

import json
import logging

import numpy as np
import pytest
from helpers.messages import mentions
from PIL import Image

from vit_jax.data.records import BrokenRecord
from vit_jax.data.sources import coco, open_source
from vit_jax.data.transforms import parse_transforms
from vit_jax.errors import UserError

CATEGORIES = [{'id': 7, 'name': 'dog'}, {'id': 3, 'name': 'cat'}]
IMAGES = [
    {'id': 20, 'file_name': 'b.jpg', 'height': 30, 'width': 40},
    {'id': 10, 'file_name': 'a.jpg', 'height': 20, 'width': 10},
    {'id': 30, 'file_name': 'c.jpg', 'height': 8, 'width': 8},
]


def annotation(number, image, category, bbox, **more):
    return {'id': number, 'image_id': image, 'category_id': category, 'bbox': bbox, **more}


ANNOTATIONS = [
    annotation(1, 20, 7, [1, 2, 10, 5], area=33.5, iscrowd=0),
    annotation(2, 10, 3, [0, 0, 10, 20], iscrowd=1),
    annotation(3, 20, 3, [30.2, 20.0, 9.9, 10.0]),
]


def write(folder, annotations=ANNOTATIONS, where='annotations', images=IMAGES, **changes):
    """A split `val` whose images lie in the folder of that name; returns the source's name."""
    content = {'images': images, 'annotations': annotations, 'categories': CATEGORIES, **changes}
    (folder / where).mkdir(exist_ok=True)
    (folder / where / 'instances_val.json').write_text(json.dumps(content))
    (folder / 'val').mkdir(exist_ok=True)
    for image in IMAGES:
        pixels = np.full((image['height'], image['width'], 3), image['id'], np.uint8)
        Image.fromarray(pixels).save(folder / 'val' / image['file_name'], quality=100)
    return f'coco:{folder}'


def test_objects_classes_and_images_without_any(tmp_path):
    source = open_source(write(tmp_path), 'val')
    assert (len(source), source.info.class_names) == (3, ('cat', 'dog'))
    first, second, third = (source[i] for i in range(3))
    assert first['image'].shape == (20, 10, 3)
    np.testing.assert_array_equal(first['boxes'], [[0, 0, 10, 20]])
    assert (first['labels'].tolist(), first['crowd'].tolist()) == ([0], [True])
    assert first['areas'].tolist() == [200]
    np.testing.assert_allclose(second['boxes'], [[1, 2, 11, 7], [30.2, 20, 40, 30]])
    assert (second['labels'].tolist(), second['ids'].tolist()) == ([1, 0], [1, 3])
    assert second['areas'].tolist() == pytest.approx([33.5, 99])
    assert third['boxes'].shape == (0, 4)
    assert {k: v.dtype for k, v in third.items()} == {k: v.dtype for k, v in second.items()}


def test_annotations_need_no_image(tmp_path):
    name = write(tmp_path)
    source = open_source(name, 'val')
    expected = source[1]
    (tmp_path / 'val' / 'b.jpg').unlink()
    found = source.annotations(1)
    assert found.pop('size') == (30, 40)
    assert found.keys() == expected.keys() - {'image'}
    assert found['ids'].tolist() == expected['ids'].tolist()
    # One is a tenth of a pixel beyond the edge.
    np.testing.assert_allclose(found['boxes'], [[1, 2, 11, 7], [30.2, 20, 40.1, 30]])


def test_a_file_without_annotations_is_of_images_alone(tmp_path, caplog):
    with caplog.at_level(logging.WARNING):
        source = open_source(write(tmp_path, []), 'val')
    (line,) = [record.message for record in caplog.records]
    assert 'has no annotations' in line
    assert (source[0].keys(), source.annotations(1)) == ({'image'}, {'size': (30, 40)})


@pytest.fixture
def two_splits(tmp_path):
    """`two_splits(categories)`: the splits `val` and `more`, which lists other categories."""

    def make(categories):
        name = write(tmp_path)
        file = tmp_path / 'annotations' / 'instances_val.json'
        other = json.loads(file.read_text()) | {'categories': categories}
        other['annotations'] = [annotation(1, 10, categories[0]['id'], [0, 0, 5, 5])]
        (tmp_path / 'annotations' / 'instances_more.json').write_text(json.dumps(other))
        (tmp_path / 'more').symlink_to(tmp_path / 'val')
        return name

    return make


@pytest.mark.parametrize('split', ['val+more', 'more+val'])
def test_splits_read_as_one_have_the_categories_of_both(two_splits, split):
    source = open_source(two_splits([{'id': 5, 'name': 'emu'}, {'id': 7, 'name': 'dog'}]), split)
    assert source.info.class_names == ('cat', 'emu', 'dog')
    assert source.info.class_ids == (3, 5, 7)
    labels = [source[i]['labels'].tolist() for i in range(len(source))]
    assert labels == [source.annotations(i)['labels'].tolist() for i in range(len(source))]
    parts = {'val': [[0], [2, 0], []], 'more': [[1], [], []]}
    assert labels == [row for part in split.split('+') for row in parts[part]]


def test_splits_read_as_one_agree_on_names(two_splits):
    name = two_splits([{'id': 3, 'name': 'emu'}, {'id': 7, 'name': 'dog'}])
    with pytest.raises(UserError, match=r"category 3 is 'emu', .*'cat'"):
        open_source(name, 'val+more')


def test_repairs_are_counted(tmp_path, caplog):
    wrong = [
        annotation(4, 20, 7, [5, 5, 0, 3]),
        annotation(5, 20, 7, [5, 5, 3, 0]),
        annotation(6, 20, 7, [-3, 25, 10, 10]),
        annotation(7, 20, 7, [100, 5, 3, 3]),
        annotation(8, 20, 7, [float('nan'), 5, 3, 3]),
    ]
    with caplog.at_level(logging.WARNING):
        source = open_source(write(tmp_path, [*ANNOTATIONS, *wrong]), 'val')
    (line,) = [record.message for record in caplog.records]
    assert mentions(line, '2 boxes', 'dropped')
    for defect in (('clipped', 'edge'), ('outside', 'image'), 'not finite'):
        assert mentions(line, defect)
    np.testing.assert_allclose(source[1]['boxes'][2:], [[0, 25, 7, 30]])
    assert source[1]['ids'].tolist() == [1, 3, 6]
    # Evaluations see all that is finite as it is.
    assert source.annotations(1)['ids'].tolist() == [1, 3, 4, 5, 6, 7]
    as_they_are = [[5, 5, 5, 8], [5, 5, 8, 5], [-3, 25, 7, 35], [100, 5, 103, 8]]
    np.testing.assert_array_equal(source.annotations(1)['boxes'][2:], as_they_are)


def test_a_file_of_unusable_boxes_alone_is_of_images_but_still_measured(tmp_path):
    source = open_source(write(tmp_path, [annotation(1, 20, 7, [5, 5, 0, 3])]), 'val')
    assert source[1].keys() == {'image'}
    assert source.annotations(1)['boxes'].tolist() == [[5, 5, 5, 8]]


def test_images_that_are_absent_or_of_another_size_are_broken(tmp_path):
    source = coco.Source(write(tmp_path).removeprefix('coco:'), 'val')
    (tmp_path / 'val' / 'a.jpg').unlink()
    Image.new('RGB', (40, 31)).save(tmp_path / 'val' / 'b.jpg')
    with pytest.raises(BrokenRecord, match=r'a\.jpg.*No such file'):
        source[0]
    with pytest.raises(BrokenRecord, match=r'has 40 x 31 pixels, .*40 x 30'):
        source[1]


@pytest.mark.parametrize(
    ('changes', 'message'),
    [
        ({'categories': None}, 'not in COCO format'),
        ({'images': [{'id': 1}]}, "'(height|width|file_name)'"),
        ({'images': []}, 'lists no images|unknown image'),
        ({'images': [*IMAGES, IMAGES[0]]}, 'same id'),
        (
            {'annotations': [annotation(1, 20, 9, [0, 0, 1, 1])]},
            r'annotation 1 .* category 9',
        ),
        (
            {'annotations': [annotation(1, 21, 7, [0, 0, 1, 1])]},
            r'annotation 1 .* image 21',
        ),
        (
            {'annotations': [annotation(1, 20, 7, [0, 0, 1])]},
            r'COCO .* 1: bbox \[0, 0, 1\]',
        ),
        ({'annotations': [annotation(1, 20, 7, 'box')]}, "annotation 1: bbox 'box' is not"),
        (
            {'annotations': [{'id': 1, 'image_id': 20, 'category_id': 7}]},
            '1.*None',
        ),
        ({'annotations': [{'id': 1}]}, "'image_id'"),
    ],
)
def test_broken_files_are_one_line(tmp_path, changes, message):
    with pytest.raises(UserError, match=message) as caught:
        open_source(write(tmp_path, **changes), 'val')
    assert '\n' not in str(caught.value)


def test_texts_and_nulls_are_read_as_the_numbers_that_they_mean(tmp_path):
    images = [{**one, 'id': str(one['id']), 'height': f'{one["height"]}'} for one in IMAGES]
    categories = [{'id': str(i), 'name': f'c{i}'} for i in (10, 9, 7, 3)]  # 3, 7, 9, 10 in order
    rows = [
        annotation('1', 20.0, '10', ['1', '2', '10', '5'], area=None, iscrowd='0'),
        annotation(2, '10', 3, [0, 0, 10, 20], area='33.5', iscrowd='1'),
    ]
    source = open_source(write(tmp_path, rows, images=images, categories=categories), 'val')
    assert source.info.class_names == ('c3', 'c7', 'c9', 'c10')
    assert source.info.class_ids == (3, 7, 9, 10)
    crowd, box, _ = (source.annotations(i) for i in range(3))
    assert (crowd['crowd'].tolist(), crowd['areas'].tolist()) == ([True], [33.5])
    assert (box['crowd'].tolist(), box['areas'].tolist()) == ([False], [50])
    assert (box['labels'].tolist(), box['size']) == ([3], (30, 40))
    assert source[1]['image'].shape == (30, 40, 3)


def test_images_may_have_texts_for_ids(tmp_path):
    images = [{**one, 'id': f'photo-{one["id"]}'} for one in IMAGES]
    rows = [{**one, 'image_id': f'photo-{one["image_id"]}'} for one in ANNOTATIONS]
    source = open_source(write(tmp_path, rows, images=images), 'val')
    assert [len(source[i]['ids']) for i in range(3)] == [1, 2, 0]


@pytest.mark.parametrize(
    ('change', 'named'),
    [
        ({'area': 'large'}, "area 'large'"),
        ({'area': float('nan')}, 'area nan'),
        ({'iscrowd': 'no'}, "iscrowd is 'no'"),
        ({'id': 'a1'}, "id 'a1'"),
        ({'id': None}, "'id'"),
        ({'category_id': True}, 'category_id True'),
    ],
)
def test_other_values_are_refused_by_annotation_and_key(tmp_path, change, named):
    rows = [ANNOTATIONS[0], {**ANNOTATIONS[1], **change}]
    with pytest.raises(UserError) as caught:
        open_source(write(tmp_path, rows), 'val')
    message = str(caught.value)
    assert named in message and 'instances_val.json' in message and '\n' not in message
    assert 'annotation 2' in message or 'id' in change


def test_images_without_pixels_are_refused(tmp_path):
    images = [*IMAGES[:2], {**IMAGES[2], 'height': 0}]
    with pytest.raises(UserError, match='image 30'):
        open_source(write(tmp_path, images=images), 'val')


def test_what_is_not_there_is_told(tmp_path):
    name = write(tmp_path)
    with pytest.raises(UserError, match=r"unknown split 'vla'; .* 'val'"):
        open_source(name, 'vla')
    with pytest.raises(UserError, match='does not exist'):
        open_source(f'coco:{tmp_path}/nowhere', 'val')
    with pytest.raises(UserError, match=r'instances_SPLIT\.json'):
        open_source(f'coco:{tmp_path}/val', 'val')
    (tmp_path / 'annotations' / 'instances_val.json').write_text('{"images": [')
    with pytest.raises(UserError, match='cannot read'):
        open_source(name, 'val')
    (tmp_path / 'annotations' / 'instances_val.json').write_text('[]')
    with pytest.raises(UserError, match='not a JSON object'):
        open_source(name, 'val')
    write(tmp_path)
    for file in (tmp_path / 'val').iterdir():
        file.unlink()
    with pytest.raises(UserError, match='image'):
        open_source(name, 'val')


def test_blood_cells(shared_data, caplog):
    """One box of the training set and one of the validation set have no area, as published."""
    with caplog.at_level(logging.WARNING):
        splits = {s: open_source(f'coco:{shared_data}/bccd', s) for s in ('train', 'val', 'test')}
    assert [len(source) for source in splits.values()] == [205, 87, 72]
    assert sum(mentions(r.message, '1 boxes', 'dropped') for r in caplog.records) == 2
    train = splits['train']
    assert train.info.class_names == ('RBC', 'WBC', 'Platelets')
    record = train[0]
    assert record['image'].shape == (480, 640, 3)
    assert (record['boxes'][:, 2:] > record['boxes'][:, :2]).all()


def test_the_augmentation_of_the_paper_carries_boxes_along(shared_data):
    source = open_source(f'coco:{shared_data}/bccd', 'train')
    change = parse_transforms(
        "keep('image', 'boxes', 'labels', 'crowd')|flip|"
        'scale_and_crop((96, 112, 128), 160, (80, 100), (60, 90))'
    )
    rng = np.random.default_rng(0)
    record, kept, shapes = source[0], set(), set()
    for _ in range(12):
        moved = change(record, rng)
        height, width = moved['image'].shape[:2]
        assert min(height, width) in (96, 112, 128) or max(height, width) == 160
        assert max(height, width) <= 160
        x0, y0, x1, y1 = moved['boxes'].T
        assert (x0 >= 0).all() and (x0 < x1).all() and (x1 <= width).all()
        assert (y0 >= 0).all() and (y0 < y1).all() and (y1 <= height).all()
        assert len(moved['boxes']) == len(moved['labels']) == len(moved['crowd'])
        kept.add(len(moved['boxes']))
        shapes.add((height, width))
    assert len(shapes) > 3
    assert max(kept) == len(record['boxes']) > min(kept)


@pytest.mark.parametrize(
    'text',
    [
        'scale_and_crop((96,), crop=(90, 60))',
        'scale_and_crop((96,), crop=60)',
        'scale_and_crop((96,), p=2.0)',
        'scale_and_crop(96)',
    ],
)
def test_mistakes_in_the_augmentation(text):
    with pytest.raises(UserError, match='scale_and_crop'):
        parse_transforms(text)


def test_the_listing_has_the_annotations_and_the_sizes_of_images(tmp_path):
    before = open_source(write(tmp_path), 'val').listing()
    moved = annotation(1, 20, 7, [2, 2, 10, 5], area=33.5, iscrowd=0)
    other = open_source(write(tmp_path, [moved, *ANNOTATIONS[1:]]), 'val').listing()
    assert other.examples != before.examples and other.contents == before.contents
    name = write(tmp_path)
    Image.new('RGB', (40, 30)).save(tmp_path / 'val' / 'b.jpg', quality=1)
    other = open_source(name, 'val').listing()
    assert other.examples == before.examples and other.contents != before.contents
