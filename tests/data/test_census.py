"""Data sets that are planned with and not read."""

import pytest

from vit_jax.data import census, sources
from vit_jax.data.records import example_rng
from vit_jax.data.transforms import parse_transforms
from vit_jax.errors import UserError


@pytest.fixture(autouse=True)
def nothing_prepared(monkeypatch, tmp_path):
    monkeypatch.setenv('TFDS_DATA_DIR', str(tmp_path))


@pytest.mark.parametrize(
    ('name', 'split', 'size', 'classes'),
    [
        ('tfds:cifar10', 'train[:45000]', 45_000, 10),
        ('tfds:cifar10:3.0.2', 'train[98%:]', 1_000, 10),
        ('tfds:oxford_flowers102', 'train+validation', 2_040, 102),
        ('tfds:imagenet2012', 'train[:5 per class]', 5_000, 1_000),
        ('folder:/nowhere/imagenet21k', 'train', 14_197_122, 21_843),
        ('coco:/nowhere/coco', 'train2017', 118_287, 80),
        ('coco_masks:/nowhere/coco', 'val2017', 5_000, 80),
        ('panoptic:/nowhere/coco', 'train2017', 118_287, 133),
        ('masks:/nowhere/ADEChallengeData2016', 'training', 20_210, 150),
        ('masks:/nowhere/cityscapes', 'val', 500, 19),
        ('digits', 'train', 1_437, 10),
    ],
)
def test_sizes(name, split, size, classes):
    source = census.open_source(name, split)
    assert (len(source), source.info.num_classes) == (size, classes)


def test_images_have_the_size_that_all_of_them_have():
    assert census.open_source('tfds:cifar100', 'test')[0]['image'].shape == (32, 32, 3)


def test_images_of_coco_have_objects():
    record = census.open_source('coco:/nowhere/coco', 'val2017')[3]
    assert record.keys() == {'image', 'boxes', 'labels', 'crowd'}
    with pytest.raises(UserError, match='does not exist'):
        census.open_source('coco:/nowhere/cifar10', 'train')


@pytest.mark.parametrize('name', ['panoptic:/nowhere/coco', 'coco_masks:/nowhere/coco'])
def test_images_with_masks(name):
    record = census.open_source(name, 'val2017')[3]
    assert record.keys() == {'image', 'boxes', 'masks', 'labels', 'crowd'}
    assert record['masks'].shape == (1, *record['image'].shape[:2])


def test_classes_of_pixels():
    source = census.open_source('masks:/nowhere/cityscapes', 'train')
    assert source.info.stuff == tuple(range(19)) and source[0]['image'].shape == (1024, 2048, 3)
    made = parse_transforms('flip|large_scale_jitter(64)|pad_objects(19)')(
        source[5], example_rng(0, 0)
    )
    assert made['segments'].shape == (64, 64) and made['labels'].shape == (19,)


def test_a_folder_that_is_there_is_read(tmp_path):
    (tmp_path / 'cifar10').mkdir()
    with pytest.raises(UserError, match='cifar10'):
        census.open_source(f'folder:{tmp_path}/cifar10', 'train')


def test_mistakes():
    with pytest.raises(UserError, match="did you mean 'validation'"):
        census.open_source('tfds:imagenet2012', 'validatio')
    for open_source in (census.open_source, sources.open_source):
        with pytest.raises(UserError, match=r'data.*prepared'):
            open_source('tfds:nowhere', 'train')
