"""RandAugment whose operations are the stronger the larger their magnitude."""

import numpy as np
import pytest

from vit_jax.data.records import example_rng
from vit_jax.data.transforms import parse_transforms
from vit_jax.data.transforms.randaugment import (
    GRAY,
    increasing_operations,
    make_operations,
    operate,
)
from vit_jax.errors import UserError

OPERATIONS = increasing_operations()


class Sign:
    """A generator whose coin always falls the same way."""

    def __init__(self, positive):
        self.positive = positive

    def random(self):
        return 0.0 if self.positive else 1.0


@pytest.fixture
def image():
    return np.random.default_rng(0).integers(0, 256, (20, 40, 3)).astype(np.uint8)


def run(name, image, level, rng=None, operations=OPERATIONS):
    return operate([operations[name]], {'image': image}, level, rng)['image']


def test_there_are_fifteen():
    assert OPERATIONS.keys() == make_operations(100, 40).keys() - {'cutout'}


@pytest.mark.parametrize(('level', 'bits'), [(0, 4), (0.2, 4), (0.3, 3), (0.5, 2), (0.9, 1)])
def test_posterize_leaves_fewer_bits(image, level, bits):
    mask = 256 - 2 ** (8 - bits)
    np.testing.assert_array_equal(run('posterize', image, level), image & mask)


@pytest.mark.parametrize(('level', 'threshold'), [(0, 256), (0.5, 128), (0.9, 26), (1, 0)])
def test_solarize_inverts_more_pixels(image, level, threshold):
    expected = np.where(image < threshold, image, 255 - image)
    np.testing.assert_array_equal(run('solarize', image, level), expected)


@pytest.mark.parametrize('positive', [True, False])
@pytest.mark.parametrize('level', [0.0, 0.5, 0.9])
def test_brightness_goes_either_way_from_one(image, level, positive):
    factor = 1 + (0.9 if positive else -0.9) * level
    expected = np.clip(image * factor, 0, 255)
    found = run('brightness', image, level, Sign(positive))
    assert np.abs(found - expected).max() <= 1


@pytest.mark.parametrize(
    ('name', 'axis', 'pixels'), [('translate_x', 1, 18), ('translate_y', 0, 9)]
)
def test_a_shift_is_a_share_of_the_side(image, name, axis, pixels):
    """45 % of 40 columns, or of 20 rows."""
    found = run(name, image, 1.0, Sign(True))
    expected = np.full_like(image, GRAY)
    kept = [slice(None)] * 2
    kept[axis] = slice(0, image.shape[axis] - pixels)
    expected[tuple(kept)] = np.roll(image, -pixels, axis)[tuple(kept)]
    np.testing.assert_array_equal(found, expected)


def test_each_operation_is_applied_with_its_probability(image):
    never = parse_transforms('randaugment_increasing(2, 9, 0.5, 0)')
    np.testing.assert_array_equal(never({'image': image}, example_rng(0, 0))['image'], image)
    half = parse_transforms('randaugment_increasing(1, 10, 0, 0.5)')
    changed = [
        not np.array_equal(half({'image': image}, example_rng(0, i))['image'], image)
        for i in range(200)
    ]
    assert 0.35 < np.mean(changed) < 0.6
    again = half({'image': image}, example_rng(0, 7))['image']
    np.testing.assert_array_equal(again, half({'image': image}, example_rng(0, 7))['image'])


def test_boxes_follow(image):
    record = {'image': image, 'boxes': np.array([[2, 2, 10, 10]], np.float32)}
    moved = [
        parse_transforms('randaugment_increasing(2)')(record, example_rng(0, i)) for i in range(40)
    ]
    assert any(not np.array_equal(m['boxes'], record['boxes']) for m in moved)


@pytest.mark.parametrize('arguments', ['0', 'True', '2, 11', '2, 9, -1', '2, 9, 0.5, 1.5'])
def test_wrong_arguments_are_named(arguments):
    with pytest.raises(UserError, match='randaugment_increasing'):
        parse_transforms(f'randaugment_increasing({arguments})')
