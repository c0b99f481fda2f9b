"""The loss of boxes and masks: that of transformers, exact however the batch is split."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import detr as helper
from helpers.applies import Given

from vit_jax.errors import UserError
from vit_jax.ops import masks as mask_ops
from vit_jax.ops import terms
from vit_jax.tasks import detect
from vit_jax.tasks.segment_panoptic import Task

ROWS, OBJECTS, QUERIES, CLASSES, LAYERS = 8, 3, 5, 4, 3
FRAME, SIZE = (24, 32), (20, 26)  # of odd rows the rest is padding
TASK = Task(stuff=(2, 3))
PARTS = {
    **{'class': 'loss_ce', 'box': 'loss_bbox', 'giou': 'loss_giou'},
    **{'mask': 'loss_mask', 'dice': 'loss_dice'},
}


def outputs_of(rng, rows=ROWS):
    def arrays(*shape):
        logits = rng.normal(size=(*shape, QUERIES, CLASSES + 1))
        return {'logits': logits, 'boxes': rng.uniform(0.1, 0.9, (*shape, QUERIES, 4))}

    aux = {f'aux_{name}': x for name, x in arrays(rows, LAYERS - 1).items()}
    masks = 3 * rng.normal(size=(rows, QUERIES, 6, 8))
    found = {**arrays(rows), **aux, 'masks': masks}
    return {k: jnp.asarray(v, jnp.float32) for k, v in found.items()}


def batch_of(rng, rows=ROWS, padded=True):
    """Images with 0, 1, 2, ... objects and numbered segments, every second one padded."""
    real = np.arange(OBJECTS) < (np.arange(rows) % (OBJECTS + 1))[:, None]
    corners = np.sort(rng.uniform(0, 20, (rows, OBJECTS, 2, 2)), axis=2).reshape(rows, -1, 4)
    mask = np.ones((rows, *FRAME), bool)
    if padded:
        mask[1::2, SIZE[0] :], mask[1::2, :, SIZE[1] :] = False, False
    segments = rng.integers(0, 1 + real.sum(1)[:, None, None], (rows, *FRAME)) * mask
    return {
        'image': jnp.zeros((rows, *FRAME, 3), jnp.uint8),
        'pixel_mask': jnp.asarray(mask),
        'boxes': jnp.asarray(corners * real[..., None], jnp.float32),
        'labels': jnp.asarray(rng.integers(CLASSES, size=(rows, OBJECTS)), jnp.int32),
        'object_mask': jnp.asarray(real),
        'segments': jnp.asarray(segments, jnp.int16),
        'mask': jnp.ones(rows),
    }


@pytest.fixture
def outputs():
    return outputs_of(np.random.default_rng(0))


@pytest.fixture
def batch():
    return batch_of(np.random.default_rng(1))


def loss_and_means(outputs, batch):
    found = TASK.loss(outputs, batch)
    means = terms.means(found)
    return terms.total(found, means), means


run = jax.jit(jax.value_and_grad(loss_and_means, has_aux=True))


@jax.jit
def counted(outputs, batch):
    found = TASK.loss(outputs, batch)
    return found, terms.counts(found)


def total(outputs, batch):
    """The loss and the means of its terms, as numbers."""
    return jax.tree.map(float, run(outputs, batch)[0])


def labels_of(batch):
    """The objects as transformers takes them."""
    import torch

    targets = jax.tree.map(np.array, detect.make_targets(batch))
    masks = np.array(mask_ops.from_segments(batch['segments'], targets.real.shape[1]))
    return [
        {
            'class_labels': torch.from_numpy(targets.labels[i][real]).long(),
            'boxes': torch.from_numpy(targets.boxes[i][real]),
            'masks': torch.from_numpy(masks[i][real]),
        }
        for i, real in enumerate(targets.real)
    ]


@pytest.mark.slow
def test_loss_and_its_slope_equal_those_of_transformers(outputs):
    """With all blocks of the decoder, on images without padding, which transformers counts."""
    torch = pytest.importorskip('torch')
    transformers = pytest.importorskip('transformers')
    from transformers.loss.loss_for_object_detection import ForSegmentationLoss

    batch = batch_of(np.random.default_rng(1), padded=False)
    given = {k: torch.from_numpy(np.array(x)).requires_grad_() for k, x in outputs.items()}
    logits, boxes = (
        torch.cat([given[f'aux_{name}'], given[name][:, None]], 1).swapaxes(0, 1)
        for name in ('logits', 'boxes')
    )
    config = transformers.DetrConfig(auxiliary_loss=True, num_labels=CLASSES, decoder_layers=LAYERS)
    expected, parts, _ = ForSegmentationLoss(
        logits[-1], labels_of(batch), 'cpu', boxes[-1], given['masks'], config, logits, boxes
    )
    expected.backward()
    (ours, means), slopes = run(outputs, batch)
    for name, other in PARTS.items():
        assert float(means[name]) == pytest.approx(parts[other].item(), rel=1e-4)
    assert float(ours) == pytest.approx(expected.item(), rel=1e-4)
    for name, slope in slopes.items():
        np.testing.assert_allclose(slope, given[name].grad, atol=1e-5, err_msg=name)


@pytest.mark.long
@pytest.mark.slow
def test_gradient_of_the_model_equals_that_of_transformers_on_padded_images():
    """The losses of masks are those of transformers, given the pixels of the real images alone."""
    torch = pytest.importorskip('torch')
    pytest.importorskip('transformers')
    from transformers.loss import loss_for_object_detection as losses

    theirs, batch = helper.panoptic_reference(), helper.batch()
    rng = np.random.default_rng(0)
    numbers = rng.integers(0, 3, batch['pixel_mask'].shape)
    batch['segments'] = jnp.asarray(numbers * np.asarray(batch['pixel_mask']), jnp.int16)
    labels = labels_of(batch)
    masks = theirs(**helper.tensors(batch)).pred_masks
    _, logits, boxes = helper.forward(theirs.detr, batch)
    theirs.config.auxiliary_loss = True  # of the loss alone, see `helper.forward`
    loss, _, _ = losses.ForObjectDetectionLoss(
        logits[-1], labels, 'cpu', boxes[-1], theirs.config, logits, boxes
    )
    matcher = losses.HungarianMatcher(1, 5, 2)
    pairs = matcher({'logits': logits[-1], 'pred_boxes': boxes[-1]}, labels)
    large = torch.nn.functional.interpolate(masks, helper.PADDED, mode='bilinear')
    count = sum(len(label['class_labels']) for label in labels)
    for i, (queries, objects) in enumerate(pairs):
        height, width = helper.SIZES[i]
        found = large[i, queries, :height, :width].flatten(1)
        wanted = labels[i]['masks'][objects, :height, :width].flatten(1).float()
        for function in (losses.sigmoid_focal_loss, losses.dice_loss):
            loss = loss + function(found, wanted, count)
    loss.backward()
    grads = [p.grad for n, p in theirs.named_parameters() if 'backbone' not in n]
    norm = torch.stack([g.norm() for g in grads]).norm()

    def ours(params, backbone):
        variables = {'params': params | {'backbone': backbone}}
        outputs = helper.PANOPTIC.apply(variables, batch['image'], batch['pixel_mask'], train=True)
        return loss_and_means(outputs, batch)[0]

    params = helper.panoptic_params(theirs)
    with jax.default_matmul_precision('highest'):
        # Without the backbone, which transformers freezes here.
        found, slopes = jax.jit(jax.value_and_grad(ours))(params, params.pop('backbone'))
    assert float(found) == pytest.approx(loss.item(), rel=1e-4)
    squares = [float((np.asarray(g) ** 2).sum()) for g in jax.tree.leaves(slopes)]
    assert np.sqrt(sum(squares)) == pytest.approx(norm.item(), rel=1e-4)


@pytest.mark.slow
@pytest.mark.long
def test_loss_of_parts_adds_up_to_that_of_the_whole(outputs, batch):
    loss, means = total(outputs, batch)
    parts = [jax.tree.map(lambda x, i=i: x[i::2], (outputs, batch)) for i in (0, 1)]
    found, each = zip(*(counted(*part) for part in parts), strict=True)
    counts = jax.tree.map(jnp.add, *each)
    shares = [terms.means(part, counts) for part in found]
    for name in ('mask', 'dice'):
        whole = float(sum(share[name] for share in shares))
        assert whole == pytest.approx(means[name], rel=1e-5)
    assert float(sum(map(terms.total, found, shares))) == pytest.approx(loss, rel=1e-5)


@pytest.mark.slow
def test_what_lies_in_padding_changes_nothing(outputs, batch):
    noise = np.random.default_rng(5).integers(0, 4, batch['segments'].shape)
    other = {**batch, 'segments': jnp.where(batch['pixel_mask'], batch['segments'], noise)}
    assert total(outputs, other)[0] == total(outputs, batch)[0]


@pytest.mark.slow
def test_predictions(batch):
    """Each query in the place of an object."""
    targets = detect.make_targets(batch)
    classes = jnp.where(targets.real, targets.labels, CLASSES)
    masks = jnp.zeros((ROWS, OBJECTS, 6, 8))
    perfect = {'logits': 9 * jax.nn.one_hot(classes, CLASSES + 1), 'boxes': targets.boxes}
    found = TASK.predict(Given(lambda *inputs: {**perfect, 'masks': masks}), batch)
    real = np.asarray(targets.real)
    np.testing.assert_array_equal(found['scores'] > 0.5, real)
    assert not found['scores'][~real].any()
    np.testing.assert_array_equal(found['things'][real], np.asarray(targets.labels)[real] < 2)
    np.testing.assert_array_equal(found['size'][:2], [FRAME, SIZE])
    np.testing.assert_array_equal(found['frame'], [FRAME] * ROWS)


@pytest.mark.slow
@pytest.mark.long
def test_evaluation_counts_every_image_once_whatever_the_batches(outputs, batch):
    @jax.jit
    def evaluate(outputs, batch):
        return TASK.evaluate(Given(lambda *inputs: outputs), batch)

    def sums(rows):
        """Of these images; the first of them once more as padding."""
        mask = jnp.arange(ROWS) < len(rows)
        rows = jnp.pad(jnp.array(rows), (0, ROWS - len(rows)), constant_values=rows[0])
        part = {**jax.tree.map(lambda x: x[rows], batch), 'mask': mask.astype(jnp.float32)}
        found = evaluate(jax.tree.map(lambda x: x[rows], outputs), part)
        return jax.tree.map(float, found)

    whole, halves = sums(range(ROWS)), [sums(range(i, ROWS, 2)) for i in (0, 1)]
    assert {'loss', 'mask', 'dice', 'box', 'giou', 'class'} <= whole.keys()
    for name, pair in whole.items():
        assert np.sum([half[name] for half in halves], 0) == pytest.approx(pair, rel=1e-5), name


def test_mistakes(outputs, batch):
    with pytest.raises(UserError, match='dice_weight=-1'):
        Task(dice_weight=-1)
    with pytest.raises(UserError, match=r'number_masks\|pad_objects'):
        TASK.loss(outputs, {k: x for k, x in batch.items() if k != 'segments'})
