"""Captions of scenes: they say what the image shows."""

import numpy as np
import pytest

from vit_jax.data.sources import open_source
from vit_jax.data.sources.scenes_captions import CLASSES, COLORS, NAMES, SIDE
from vit_jax.data.transforms import parse_transforms
from vit_jax.errors import UserError

SCENES = open_source('scenes_captions:120', 'train')
RECORDS = [SCENES[i] for i in range(len(SCENES))]


def place(image, color):
    """The mean (y, x) of the pixels of a color, and their number."""
    tint = np.array(COLORS[color])
    shares = image / np.maximum(image.max(-1, keepdims=True), 1)
    near = np.abs(shares - tint / tint.max()).max(-1) < 0.15
    near &= image.max(-1) > 150
    return np.argwhere(near).mean(0), near.sum()


def test_a_record_is_a_function_of_split_and_index():
    again = open_source('scenes_captions', 'train')
    for i in (0, 77):
        np.testing.assert_array_equal(again[i]['image'], RECORDS[i]['image'])
        assert again[i]['caption'] == RECORDS[i]['caption']
    test = open_source('scenes_captions:7', 'test')
    assert not np.array_equal(test[0]['image'], RECORDS[0]['image'])
    assert (len(SCENES), len(again), len(test)) == (120, 20_000, 500)


def test_captions_say_where_the_colors_are():
    seen = set()
    for record in RECORDS:
        words = record['caption'].split()
        first, last = words[1], words[-2]
        assert record['image'].shape == (SIDE, SIDE, 3) and words[2] in NAMES
        (y, x), number = place(record['image'], first)
        assert number > 10
        if len(words) > 3 and first != last:
            (v, u), number = place(record['image'], last)
            assert number > 10
            relation = ' '.join(words[3:-3])
            ahead = {'left of': u - x, 'right of': x - u, 'above': v - y, 'below': y - v}
            assert ahead[relation] > 5
            seen.add(relation)
    assert seen == {'left of', 'right of', 'above', 'below'}


@pytest.mark.parametrize('kind', CLASSES)
def test_one_digit_has_a_class(kind):
    source = open_source(f'scenes_captions:{kind}', 'test')
    assert source.info.class_names == CLASSES[kind]
    for record in (source[i] for i in range(20)):
        words = record['caption'].split()
        assert words[{'color': 1, 'digit': 2}[kind]] == CLASSES[kind][record['label']]
        assert len(words) == 3
    assert set(source.labels()) == set(range(len(CLASSES[kind])))


def test_names_that_there_are_not():
    with pytest.raises(UserError, match=r"write 'scenes_captions', 'scenes_captions:digit'"):
        open_source('scenes_captions:shape', 'train')
    with pytest.raises(UserError, match="unknown split 'val'"):
        open_source('scenes_captions', 'val')
    with pytest.raises(UserError, match='captions'):
        SCENES.labels()


def test_captions_of_several_lengths():
    transforms = parse_transforms("first_words('caption', 3, 'short')|sample_text('long', 'short')")
    record = {'caption': 'a red three above a blue six', 'long': 'a long text'}
    drawn = [transforms(record, np.random.default_rng(seed)) for seed in range(20)]
    assert {x['short'] for x in drawn} == {'a red three'}
    assert {x['long'] for x in drawn} == {'a red three', 'a long text'}
    assert {x['caption'] for x in drawn} == {record['caption']}
    with pytest.raises(UserError, match=r"sample_text\('a'\)"):
        parse_transforms("sample_text('a')")
    with pytest.raises(UserError, match='short'):
        parse_transforms("sample_text('caption', 'short')")(record, np.random.default_rng(1))
