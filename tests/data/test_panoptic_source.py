"""Segments in the format of COCO's panoptic task."""

import json

import numpy as np
import pytest
from helpers.messages import mentions
from PIL import Image

from vit_jax.data.records import BrokenRecord
from vit_jax.data.sources import open_source, panoptic
from vit_jax.data.transforms import parse_transforms
from vit_jax.errors import UserError

CATEGORIES = [
    {'id': 200, 'name': 'sky', 'isthing': 0},
    {'id': 1, 'name': 'person', 'isthing': 1},
]
IMAGES = [{'id': 8, 'file_name': 'a.jpg', 'height': 3, 'width': 4}]
SEGMENTS = [
    {'id': 70_000, 'category_id': 1, 'iscrowd': 0},
    {'id': 5, 'category_id': 200},
    {'id': 9, 'category_id': 1, 'iscrowd': 1},  # has no pixel
]
NUMBERS = np.array([[0, 5, 5, 5], [5, 70_000, 70_000, 5], [5, 5, 70_000, 5]])


def write(folder, numbers=NUMBERS, segments=SEGMENTS, **changes):
    """One image of the split `val`; returns the source's name."""
    annotation = {'image_id': 8, 'file_name': 'a.png', 'segments_info': segments}
    content = {'images': IMAGES, 'annotations': [annotation], 'categories': CATEGORIES, **changes}
    pngs = folder / 'annotations' / 'panoptic_val'
    pngs.mkdir(parents=True, exist_ok=True)
    (folder / 'annotations' / 'panoptic_val.json').write_text(json.dumps(content))
    colors = np.stack([numbers % 256, numbers // 256 % 256, numbers // 256**2], axis=-1)
    Image.fromarray(colors.astype(np.uint8)).save(pngs / 'a.png')
    (folder / 'images').mkdir(exist_ok=True)
    Image.new('RGB', (4, 3)).save(folder / 'images' / 'a.jpg')
    return f'panoptic:{folder}'


def test_segments_are_objects(tmp_path):
    source = open_source(write(tmp_path), 'val')
    record = source[0]
    assert source.info.class_names == ('person', 'sky')
    np.testing.assert_array_equal(record['masks'], [NUMBERS == 70_000, NUMBERS == 5])
    assert record['boxes'].tolist() == [[1, 1, 3, 3], [0, 0, 4, 3]]
    assert (record['labels'].tolist(), record['ids'].tolist()) == ([0, 1], [70_000, 5])
    assert (record['areas'].tolist(), record['crowd'].tolist()) == ([3, 8], [False, False])
    found = source.annotations(0)
    assert found.pop('size') == (3, 4)
    assert all(np.array_equal(found[key][:2], record[key]) for key in record if key != 'image')
    # Evaluations see the segment without a pixel, too.
    assert (found['ids'].tolist(), found['areas'].tolist()) == ([70_000, 5, 9], [3, 8, 0])
    assert not found['masks'][2].any() and not found['boxes'][2].any()
    assert source.info.stuff == (1,)
    counts = np.bincount(found['labels'], minlength=2)
    assert source.class_counts().tolist() == counts.tolist()


def test_the_listing_has_the_annotations_and_the_sizes_of_segments(tmp_path):
    before = open_source(write(tmp_path), 'val').listing()
    numbers = np.array([[0, 5, 9, 5], [5, 70_000, 9, 5], [70_000, 5, 9, 5]])
    other = open_source(write(tmp_path, numbers), 'val').listing()
    assert other.examples == before.examples and other.contents != before.contents
    other = open_source(write(tmp_path, segments=SEGMENTS[:2]), 'val').listing()
    assert other.examples != before.examples


@pytest.mark.parametrize('changes', [{'annotations': []}, {'segments': []}])
def test_a_file_without_segments_is_of_images_alone(tmp_path, caplog, changes):
    source = open_source(write(tmp_path, **changes), 'val')
    assert mentions(caplog.text, 'panoptic_val.json', 'annotations')
    assert (source[0].keys(), source.annotations(0)) == ({'image'}, {'size': (3, 4)})


def test_pictures_that_are_not_as_listed_are_broken(tmp_path):
    source = panoptic.Source(write(tmp_path, NUMBERS + 2).partition(':')[2], 'val')
    with pytest.raises(BrokenRecord, match=r'a\.png.*2'):
        source[0]
    source = panoptic.Source(write(tmp_path, NUMBERS[:, :3]).partition(':')[2], 'val')
    with pytest.raises(BrokenRecord, match=r'a\.png: has 3 x 3 pixels, .*4 x 3'):
        source[0]


@pytest.mark.parametrize(
    ('changes', 'message'),
    [
        ({'images': [*IMAGES, {**IMAGES[0], 'id': 9}]}, 'image 9 has no annotation'),
        (
            {'segments': [{'id': 5, 'category_id': 3}]},
            r'segment 5 .* 8 .* category 3',
        ),
        ({'categories': [{'id': 1, 'name': 'person'}]}, "'isthing'"),
        ({'categories': [CATEGORIES[0] | {'isthing': 'no'}]}, "category 200: isthing is 'no'"),
        ({'segments': [{'id': 'x', 'category_id': 1}]}, "image 8: id 'x'"),
    ],
)
def test_broken_files_are_one_line(tmp_path, changes, message):
    with pytest.raises(UserError, match=message):
        open_source(write(tmp_path, **changes), 'val')


def test_texts_for_numbers_and_transparent_or_indexed_colors(tmp_path):
    """Transparent pixels keep their numbers: 0 is of no segment."""
    segments = [{k: str(v) for k, v in one.items()} for one in SEGMENTS]
    categories = [one | {'isthing': str(one['isthing'])} for one in CATEGORIES]
    images = [IMAGES[0] | {'id': '8'}]
    name = write(tmp_path, segments=segments, categories=categories, images=images)
    source = open_source(name, 'val')
    expected = source.annotations(0)
    assert source.info.stuff == (1,) and expected['crowd'].tolist() == [False, False, True]
    path = tmp_path / 'annotations' / 'panoptic_val' / 'a.png'
    opaque = Image.open(path)
    colors = np.asarray(opaque)
    alpha = np.where(NUMBERS > 0, 255, 0).astype(np.uint8)
    for other in (Image.fromarray(np.dstack([colors, alpha])), opaque.quantize(4)):
        other.save(path)
        found = source.annotations(0)
        assert all(np.array_equal(found[key], value) for key, value in expected.items())


def test_segments_without_pictures_are_told(tmp_path):
    name = write(tmp_path)
    (tmp_path / 'annotations' / 'panoptic_val').rename(tmp_path / 'elsewhere')
    with pytest.raises(UserError, match=r'panoptic_val'):
        open_source(name, 'val')


def test_two_images_of_coco(shared_data, tmp_path):
    """Areas and boxes are those that COCO lists; boxes of things may miss what is cut off."""
    sample = shared_data / 'coco_panoptic_sample'
    (tmp_path / 'images').symlink_to(sample / 'input_images')
    for name in ('panoptic_examples', 'panoptic_examples.json'):
        (tmp_path / name).symlink_to(sample / name)
    source = open_source(f'panoptic:{tmp_path}', 'examples')
    assert (len(source), source.info.num_classes) == (2, 133)
    listed = json.loads((sample / 'panoptic_examples.json').read_text())['annotations']
    listed = sorted(listed, key=lambda annotation: annotation['image_id'])
    for i, annotation in enumerate(listed):
        record, segments = source[i], {s['id']: s for s in annotation['segments_info']}
        assert (record['masks'].sum(0) <= 1).all()
        for number, area, box in zip(record['ids'], record['areas'], record['boxes'], strict=True):
            x, y, width, height = segments[int(number)]['bbox']
            assert area == segments[int(number)]['area']
            np.testing.assert_allclose(box, [x, y, x + width, y + height], atol=1)


def test_masks_follow_the_augmentation(tmp_path):
    fields = "keep('image', 'boxes', 'masks', 'labels')"
    change = parse_transforms(f'{fields}|flip|scale_and_crop((24, 30), 40, (20,), (12, 18))')
    record, rng = open_source('scenes', 'train')[4], np.random.default_rng(0)
    assert len(record['labels']) > 1
    for _ in range(6):
        moved = change(record, rng)
        assert moved['masks'].shape[1:] == moved['image'].shape[:2]
        for mask, (x0, y0, x1, y1) in zip(moved['masks'], moved['boxes'], strict=True):
            rows, columns = np.nonzero(mask)
            if len(rows):  # a sliver may be too thin for the nearest pixels
                assert x0 - 1 <= columns.min() and columns.max() <= x1
                assert y0 - 1 <= rows.min() and rows.max() <= y1
