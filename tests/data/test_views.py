"""Several views of an image, clips, and images beside one another in a record."""

import numpy as np
import pytest

from vit_jax.config.origin import dotted_names
from vit_jax.data.records import example_rng
from vit_jax.data.transforms import parse_transforms
from vit_jax.errors import UserError

CROPS = "views('local_image', 8, 'inception_crop(6, 5, 40)|flip')|views('image', 2, '{}')"
GLOBAL = 'inception_crop(10, 40)|flip'
MOVING = (
    'resize((7, 9))',
    'random_crop(5)',
    'inception_crop(6)',
    'pad_and_crop(2)',
    'flip',
    'inception_crop_tf(6)',
)
FRAMES = (*MOVING, 'randaugment(3, 9)', 'random_erasing(1)', 'value_range(0, 1)')


def picture(*shape):
    return np.random.default_rng(0).integers(0, 256, shape, np.uint8)


def run(spec, record, example=0):
    return parse_transforms(spec)(record, example_rng(3, example))


def test_global_and_local_views_have_names_and_sizes_of_their_own():
    record = {'image': picture(24, 30, 3), 'label': 4}
    made = run(CROPS.format(GLOBAL), record)
    assert {name: np.shape(value) for name, value in made.items()} == {
        'image': (2, 10, 10, 3),
        'local_image': (8, 6, 6, 3),
        'label': (),
    }
    every = [view.tobytes() for name in ('image', 'local_image') for view in made[name]]
    assert len(set(every)) == 10


def test_views_belong_to_the_example():
    record = {'image': picture(24, 30, 3)}
    one, again, other = (run(CROPS.format(GLOBAL), record, i) for i in (1, 1, 2))
    for name in one:
        np.testing.assert_array_equal(one[name], again[name])
        assert (one[name] != other[name]).any()


def test_a_view_is_what_its_transforms_make_of_the_image():
    record = {'image': picture(9, 8, 3)}
    made = run("views('small_image', 3, 'resize(4)')", record)
    expected = run('resize(4)', record)['image']
    np.testing.assert_array_equal(made['small_image'], [expected] * 3)
    np.testing.assert_array_equal(made['image'], record['image'])


def test_views_of_views_are_the_same_crops_in_another_size():
    record = {'image': picture(24, 30, 3)}
    large = "views('large_image', 2, 'inception_crop(12, 40)|flip')"
    made = run(f"{large}|views('image', 2, 'resize(6)', of='large_image')", record)
    np.testing.assert_array_equal(made['large_image'], run(large, record)['large_image'])
    for view, crop in zip(made['image'], made['large_image'], strict=True):
        np.testing.assert_array_equal(view, run('resize(6)', {'image': crop})['image'])


@pytest.mark.parametrize(
    ('spec', 'record', 'message'),
    [
        ("views('image', 2, 'flip', of='large_image')", {}, "of='large_image': make 2 views"),
        ("views('image', 2, 'flip', of='large')", {}, r"of='large' .* 'image',"),
        ("views('image', 2, 'flip')", {'boxes': np.zeros((2, 4))}, "image.*'boxes'"),
        (f'{CROPS.format(GLOBAL)}|flip', {}, "'local_image'.*shape.*transform"),
        ("views('other_image', 2, 'flip')|randaugment", {}, "cannot move 'other_image'"),
        ("views('i', 2, 'flip')", {}, r"name='i' .* 'image', .* '_image'"),
        ("views('image', 0, 'flip')", {}, 'count=0'),
        ("views('image', 2, 3)", {}, 'transforms=3'),
        ("views('image', 2, 'flop')", {}, "unknown transform 'flop'"),
    ],
)
def test_mistakes(spec, record, message):
    with pytest.raises(UserError, match=message):
        run(spec, {'image': picture(24, 24, 3), **record})


def test_names_within_the_transforms_of_views_are_seen_before_anything_is_imported():
    inner = (
        """views('a_image', 2, "flip|my_lab.inner(3)|views('b_image', 1, 'my_lab.most.inner')")"""
    )
    config = {'data': {'transforms': f'flip|{inner}'}}
    assert [name for _, name in dotted_names(config)] == ['my_lab.inner', 'my_lab.most.inner']


@pytest.mark.parametrize('spec', FRAMES)
def test_the_frames_of_a_clip_are_changed_alike(spec):
    frame = picture(10, 12, 3)
    clip = np.stack([frame, 255 - frame, frame])
    for example in range(4):
        made = run(spec, {'image': clip}, example)['image']
        alone = run(spec, {'image': frame}, example)['image']
        assert made.shape == (3, *alone.shape)
        np.testing.assert_array_equal(made[0], alone)
        np.testing.assert_array_equal(made[2], alone)
        np.testing.assert_array_equal(made[1], run(spec, {'image': 255 - frame}, example)['image'])


@pytest.mark.parametrize('spec', MOVING)
def test_images_of_one_size_move_together(spec):
    record = {'image': picture(10, 12, 3), 'inverse_image': 255 - picture(10, 12, 3)}
    for example in range(4):
        made = run(spec, record, example)
        difference = made['image'].astype(int) + made['inverse_image'] - 255
        if spec == 'pad_and_crop(2)':  # what is uncovered is black in both
            difference = difference[(made['image'] > 0) | (made['inverse_image'] > 0)]
        assert np.abs(difference).max() <= 2


def test_what_lies_in_a_clip_moves_with_its_frames():
    clip = np.zeros((2, 6, 8, 1), np.uint8)
    clip[:, 1:3, 2:5] = 255
    record = {'image': clip, 'boxes': np.array([[2, 1, 5, 3]], np.float32)}
    made = run('resize((12, 16), "nearest")', record)
    assert made['boxes'].tolist() == [[4, 2, 10, 6]]
    assert (made['image'][:, 2:6, 4:10] == 255).all()
