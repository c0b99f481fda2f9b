"""Classes of pixels: the loss and the metrics are PyTorch's, and padding has no effect."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from vit_jax.errors import UserError
from vit_jax.ops.panoptic import VOID
from vit_jax.tasks import segment_pixels
from vit_jax.tasks.base import check_rows_are_separable

RNG = np.random.default_rng(0)
CLASSES = 3
SEGMENTS = RNG.integers(0, 3, (2, 8, 6)).astype(np.int32)
SEGMENTS[0, :2] = VOID
LABELS = np.array([[2, 0, 7], [1, 2, 7]], np.int32)  # the last row is padding
BATCH = {
    'image': jnp.asarray(RNG.integers(0, 256, (2, 8, 6, 3)), jnp.uint8),
    'segments': jnp.asarray(SEGMENTS),
    'labels': jnp.asarray(LABELS),
    'object_mask': jnp.asarray([[True, True, False]] * 2),
    'pixel_mask': jnp.ones((2, 8, 6), bool).at[1, 6:].set(False),
    'mask': jnp.ones(2),
}
LOGITS = RNG.normal(size=(2, 4, 3, CLASSES)).astype(np.float32)


def stub(*images):
    return {'logits': jnp.asarray(LOGITS)}


def truth():
    """Classes by hand, -1 for none."""
    classes = np.full(SEGMENTS.shape, -1)
    for row, labels in enumerate(LABELS):
        for number, label in enumerate(labels[:2], 1):
            classes[row][SEGMENTS[row] == number] = label
    classes[1, 6:] = -1
    return classes


def test_loss_and_accuracy_are_pytorchs():
    task, classes = segment_pixels.Task(), truth()
    np.testing.assert_array_equal(segment_pixels.pixel_classes(BATCH), classes)
    logits = torch.nn.functional.interpolate(
        torch.tensor(LOGITS).permute(0, 3, 1, 2), size=(8, 6), mode='bilinear'
    )
    expected = torch.nn.functional.cross_entropy(
        logits, torch.tensor(classes), ignore_index=-1
    ).item()
    sums = jax.jit(lambda batch: task.evaluate(stub, batch))(BATCH)
    assert sums['loss'][0] / sums['loss'][1] == pytest.approx(expected, rel=1e-5)
    right = logits.argmax(1).numpy()[classes >= 0] == classes[classes >= 0]
    assert sums['accuracy'][0] / sums['accuracy'][1] == pytest.approx(right.mean())
    check_rows_are_separable(task, {'logits': jnp.asarray(LOGITS)}, BATCH)
    found = task.predict(stub, BATCH)
    np.testing.assert_array_equal(found['segmentation'], logits.argmax(1))
    np.testing.assert_array_equal(found['size'], [[8, 6], [6, 6]])


def test_masked_examples_do_not_count():
    sums = segment_pixels.Task().evaluate(stub, BATCH | {'mask': jnp.array([1.0, 0.0])})
    assert sums['loss'][1] == (truth()[0] >= 0).sum()


def test_batches_without_segments_are_refused():
    with pytest.raises(UserError, match='segments'):
        segment_pixels.Task().loss({'logits': jnp.asarray(LOGITS)}, {'image': BATCH['image']})
