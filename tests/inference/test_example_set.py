"""Images are shown as the model gets them."""

import jax
import numpy as np
import pytest

from vit_jax.inference import example_set
from vit_jax.tasks import classify, detect

RNG = np.random.default_rng(0)
IMAGES = RNG.integers(0, 256, (4, 6, 5, 3), np.uint8)
LABELS = np.arange(4, dtype=np.int32)


@pytest.mark.parametrize(
    'task', [classify.Task(), classify.Task(value_range=(0.0, 1.0)), detect.Task()]
)
def test_normalization_is_taken_back(task):
    assert np.array_equal(example_set.model_images(task, {'image': IMAGES}), IMAGES)


@pytest.mark.slow
def test_mixed_images_are_shown_mixed():
    task = classify.Task(mixup=1.0)
    batch = example_set.augment(task, {'image': IMAGES, 'label': LABELS})
    weight = batch['label_weight'][0]
    mixed = weight * IMAGES.astype(float) + (1 - weight) * IMAGES[[1, 0, 3, 2]]
    assert np.abs(example_set.model_images(task, batch) - mixed).max() <= 1
    assert isinstance(jax.tree.leaves(batch)[0], np.ndarray)


def test_padding_is_black_and_no_image_is_none():
    mask = np.ones((4, 6, 5), bool)
    mask[:, 3:] = False
    shown = example_set.model_images(detect.Task(), {'image': IMAGES, 'pixel_mask': mask})
    assert not shown[:, 3:].any() and np.array_equal(shown[:, :3], IMAGES[:, :3])
    assert example_set.model_images(detect.Task(), {'source': LABELS}) is None
