"""Captions in the format of COCO: a record a caption, and the files that are refused."""

import json

import numpy as np
import pytest
from PIL import Image

from vit_jax.data.sources import open_source
from vit_jax.errors import UserError

IMAGES = [{'id': 20, 'file_name': 'b.png'}, {'id': 10, 'file_name': 'a.png'}]


def caption(number, image, text):
    return {'id': number, 'image_id': image, 'caption': text}


CAPTIONS = [
    caption('3', '20', 'a gray field'),
    caption(2, 10, ' a dark field\n'),
    caption(1, 20, 'fog'),
    caption(4, 20, ' '),
]


def write(folder, **changes):
    """A split `val`; returns the source's name."""
    content = {'images': IMAGES, 'annotations': CAPTIONS, **changes}
    (folder / 'captions_val.json').write_text(json.dumps(content))
    (folder / 'val').mkdir()
    for image in IMAGES:
        pixels = np.full((4, 6, 3), image['id'], np.uint8)
        Image.fromarray(pixels).save(folder / 'val' / image['file_name'])
    return f'coco_captions:{folder}'


def test_a_record_for_each_caption(tmp_path, caplog):
    source = open_source(write(tmp_path), 'val')
    found = [source[i] for i in range(len(source))]
    assert [(r['image_id'], r['caption'], r['image'][0, 0, 0]) for r in found] == [
        (0, 'a dark field', 10),
        (1, 'fog', 20),
        (1, 'a gray field', 20),
    ]
    assert '1 empty captions' in caplog.text
    assert source.info.num_classes == 0
    with pytest.raises(UserError, match='captions'):
        source.labels()


def test_a_missing_image_is_a_broken_record(tmp_path):
    name = write(tmp_path)
    (tmp_path / 'val' / 'b.png').unlink()
    source = open_source(name, 'val')
    with pytest.raises(UserError, match=r'1 of 3 records broken.*b\.png:'):
        source[2]


@pytest.mark.parametrize(
    ('changes', 'message'),
    [
        ({'annotations': []}, 'captions'),
        ({'annotations': [caption(1, 30, 'a')]}, 'caption 1 .* image 30'),
        ({'annotations': [caption(1, 10, 7)]}, 'caption 1 '),
        ({'annotations': [{'id': 1, 'image_id': 10}]}, "'caption'"),
        ({'images': [*IMAGES, IMAGES[0]]}, 'images.*id'),
        ({'images': [{'id': 10, 'file_name': '../a.png'}]}, 'image 20'),
    ],
)
def test_mistakes(changes, message, tmp_path):
    name = write(tmp_path, **changes)
    with pytest.raises(UserError, match=message) as error:
        open_source(name, 'val')
    assert '\n' not in str(error.value)
    with pytest.raises(UserError, match="unknown split 'vall'"):
        open_source(name, 'vall')
