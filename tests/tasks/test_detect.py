"""The loss of sets: that of transformers, exact however the batch is split, and what it ignores."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import detr as helper
from helpers.applies import Given
from helpers.xla import compiled_both_ways

from vit_jax.errors import UserError
from vit_jax.ops import terms
from vit_jax.tasks.detect import Task, make_targets

ROWS, OBJECTS, QUERIES, CLASSES, LAYERS = 8, 4, 6, 3, 3
TASK = Task()


def outputs_of(rng, rows=ROWS, queries=QUERIES):
    def arrays(*shape):
        return {
            'logits': rng.normal(size=(*shape, queries, CLASSES + 1)),
            'boxes': rng.uniform(0.1, 0.9, (*shape, queries, 4)),
        }

    aux = {f'aux_{name}': x for name, x in arrays(rows, LAYERS - 1).items()}
    return {k: jnp.asarray(v, jnp.float32) for k, v in {**arrays(rows), **aux}.items()}


def batch_of(rng, rows=ROWS, objects=OBJECTS):
    """Images of 40 x 50 and of 30 x 20 pixels, with 0, 1, 2, ... objects."""
    corners = np.sort(rng.uniform(0, 20, (rows, objects, 2, 2)), axis=2).reshape(rows, -1, 4)
    real = np.arange(objects) < (np.arange(rows) % (objects + 1))[:, None]
    mask = np.ones((rows, 40, 50), bool)
    mask[1::2, 30:], mask[1::2, :, 20:] = False, False
    return {
        'image': jnp.zeros((rows, 40, 50, 3), jnp.uint8),
        'pixel_mask': jnp.asarray(mask),
        'boxes': jnp.asarray(corners * real[..., None], jnp.float32),
        'labels': jnp.asarray(rng.integers(CLASSES, size=(rows, objects)), jnp.int32),
        'object_mask': jnp.asarray(real),
    }


@pytest.fixture
def outputs():
    return outputs_of(np.random.default_rng(0))


@pytest.fixture
def batch():
    return batch_of(np.random.default_rng(1))


@jax.jit
def traced(outputs, batch):
    found = TASK.loss(outputs, batch)
    means = terms.means(found)
    return terms.total(found, means), means


@jax.jit
def with_gradient(outputs, batch):
    return jax.value_and_grad(lambda outputs: traced(outputs, batch)[0])(outputs)


@jax.jit
def counted(outputs, batch):
    found = TASK.loss(outputs, batch)
    return found, terms.counts(found)


def total(outputs, batch):
    """The loss and the means of its terms, as numbers."""
    return jax.tree.map(float, traced(outputs, batch))


@compiled_both_ways
@pytest.mark.slow
def test_loss_and_gradient_equal_those_of_transformers(way):
    """Of all layers; without the backbone, which transformers freezes here."""
    torch = pytest.importorskip('torch')
    pytest.importorskip('transformers')
    theirs, batch = helper.reference(), helper.batch()
    targets = jax.tree.map(np.array, make_targets(batch))
    labels = [
        {
            'class_labels': torch.from_numpy(targets.labels[i][real]).long(),
            'boxes': torch.from_numpy(targets.boxes[i][real]),
        }
        for i, real in enumerate(targets.real)
    ]
    from transformers.loss.loss_for_object_detection import ForObjectDetectionLoss

    _, logits, boxes = helper.forward(theirs, batch)
    theirs.config.auxiliary_loss = True  # of the loss alone, see `helper.forward`
    expected, parts, _ = ForObjectDetectionLoss(
        logits[-1], labels, 'cpu', boxes[-1], theirs.config, logits, boxes
    )
    expected.backward()
    grads = [p.grad for n, p in theirs.named_parameters() if 'backbone' not in n]
    norm = torch.stack([g.norm() for g in grads]).norm()

    def loss(params, backbone):
        variables = {'params': params | {'backbone': backbone}}
        outputs = helper.MODEL.apply(variables, batch['image'], batch['pixel_mask'], train=True)
        return traced(outputs, batch)

    params = helper.our_params(theirs)
    with jax.default_matmul_precision('highest'):
        run = jax.jit(jax.value_and_grad(loss, has_aux=True))
        (ours, means), mine = run(params, params.pop('backbone'))
    names = {'class': 'loss_ce', 'box': 'loss_bbox', 'giou': 'loss_giou'}
    for name, other in names.items():
        assert float(means[name]) == pytest.approx(parts[other].item(), rel=1e-4)
    assert float(ours) == pytest.approx(expected.item(), rel=1e-4)
    squares = [float((np.asarray(g) ** 2).sum()) for g in jax.tree.leaves(mine)]
    assert np.sqrt(sum(squares)) == pytest.approx(norm.item(), rel=1e-4)


@pytest.mark.slow
def test_loss_of_parts_adds_up_to_that_of_the_whole(outputs, batch):
    """Each part is divided by the counts of the whole, as microbatches and devices are."""
    loss, means = total(outputs, batch)
    given = jax.tree.map(np.asarray, (outputs, batch))
    parts = [jax.tree.map(lambda x, i=i: x[i::2], given) for i in (0, 1)]
    found, each = zip(*(counted(*part) for part in parts), strict=True)
    counts = jax.tree.map(jnp.add, *each)
    shares = [terms.means(part, counts) for part in found]
    for name, mean in means.items():
        whole = float(sum(share[name] for share in shares))
        assert whole == pytest.approx(mean, rel=1e-5, abs=1e-6)
    assert float(sum(map(terms.total, found, shares))) == pytest.approx(loss, rel=1e-5)


@pytest.mark.slow
def test_counts_are_a_function_of_the_batch_alone(outputs, batch):
    other = outputs_of(np.random.default_rng(7))
    counts = [jax.tree.map(float, counted(each, batch)[1]) for each in (outputs, other)]
    assert counts[0] == counts[1]


@pytest.mark.slow
def test_eight_devices_give_the_loss_of_one(outputs, batch):
    mesh = jax.sharding.Mesh(np.array(jax.devices()), ('data',))
    split = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec('data'))
    spread = jax.device_put((outputs, batch), split)
    assert total(*spread)[0] == pytest.approx(total(outputs, batch)[0], rel=1e-6)


def test_order_of_objects_and_predictions_does_not_matter(outputs, batch):
    rng = np.random.default_rng(2)
    queries, objects = rng.permutation(QUERIES), rng.permutation(OBJECTS)
    axis = {'logits': -2, 'boxes': -2, 'aux_logits': -2, 'aux_boxes': -2}
    moved = {k: jnp.take(x, queries, axis[k]) for k, x in outputs.items()}
    fields = ('boxes', 'labels', 'object_mask')
    shuffled = {**batch, **{k: batch[k][:, objects] for k in fields}}
    assert total(moved, shuffled)[0] == pytest.approx(total(outputs, batch)[0], rel=1e-5)


@pytest.mark.slow
def test_padding_and_crowds_change_nothing(outputs, batch):
    wider = {k: jnp.pad(batch[k], [(0, 0), (0, 3)]) for k in ('labels', 'object_mask')}
    wider['boxes'] = jnp.pad(batch['boxes'], [(0, 0), (0, 3), (0, 0)], constant_values=7.0)
    crowd = jnp.zeros_like(wider['object_mask']).at[:, OBJECTS].set(True)
    wider['object_mask'] = wider['object_mask'].at[:, OBJECTS].set(True)
    found = total(outputs, {**batch, **wider, 'crowd': crowd})[0]
    assert found == pytest.approx(total(outputs, batch)[0], rel=1e-6)


def perfect(batch):
    """Outputs that are the objects themselves, in another order, and none for the rest."""
    targets = make_targets(batch)
    classes = jnp.where(targets.real, targets.labels, CLASSES)
    classes = jnp.pad(classes, [(0, 0), (QUERIES - OBJECTS, 0)], constant_values=CLASSES)
    boxes = jnp.pad(targets.boxes, [(0, 0), (QUERIES - OBJECTS, 0), (0, 0)], constant_values=0.5)
    logits = 30 * jax.nn.one_hot(classes, CLASSES + 1)
    outputs = {'logits': logits[:, ::-1], 'boxes': boxes[:, ::-1]}
    aux = {f'aux_{k}': jnp.stack([x] * (LAYERS - 1), 1) for k, x in outputs.items()}
    return {**outputs, **aux}


def test_perfect_predictions_have_no_loss(batch):
    loss, means = total(perfect(batch), batch)
    assert loss == pytest.approx(0, abs=1e-4)
    assert means['accuracy'] == 1


@pytest.mark.slow
def test_images_without_objects_teach_classes_alone(outputs, batch):
    empty = {**batch, 'object_mask': jnp.zeros_like(batch['object_mask'])}
    loss, means = total(outputs, empty)
    assert means['box'] == means['giou'] == 0
    assert loss == pytest.approx(means['class'] + means['aux_class'])
    _, grads = with_gradient(outputs, empty)
    assert not np.asarray(grads['boxes']).any()
    assert np.isfinite(np.asarray(grads['logits'])).all()


@pytest.mark.slow
def test_degenerate_boxes_never_give_nan(outputs, batch):
    points = {**batch, 'boxes': batch['boxes'].at[..., 2:].set(batch['boxes'][..., :2])}
    flat = {**outputs, 'boxes': outputs['boxes'].at[..., 2:].set(0.0)}
    for o in (outputs, flat):
        loss, grads = with_gradient(o, points)
        assert np.isfinite(loss)
        assert all(np.isfinite(np.asarray(g)).all() for g in jax.tree.leaves(grads))


@pytest.mark.slow
@pytest.mark.fault(111)
def test_classes_that_are_not_finite_have_no_accuracy(outputs, batch):
    broken = outputs | {'logits': outputs['logits'].at[3].set(np.nan)}
    assert np.isnan(traced(broken, batch)[1]['accuracy'])
    assert np.isfinite(traced(outputs, batch)[1]['accuracy'])


@pytest.mark.slow
def test_objects_beyond_the_queries_are_counted(batch):
    few = outputs_of(np.random.default_rng(0), queries=2)
    loss, means = total(few, batch)
    real = np.asarray(batch['object_mask']).sum(1)
    assert means['unmatched'] == pytest.approx((real - real.clip(max=2)).sum() / real.sum())
    assert np.isfinite(loss)


@jax.jit
def evaluated(outputs, batch):
    return TASK.evaluate(Given(lambda *inputs: outputs), batch)


@pytest.mark.slow
def test_evaluation_counts_every_image_once_whatever_the_batches(outputs, batch):
    results, given = jax.tree.map(np.asarray, (outputs, batch))

    def sums(rows):
        filled = np.append(rows, rows[0])
        taken, part = jax.tree.map(lambda x: x[filled], (results, given))
        part['mask'] = np.append(np.ones(len(rows), np.float32), np.float32(0))
        return jax.tree.map(float, evaluated(taken, part))

    whole = sums(np.arange(ROWS))
    halves = [sums(np.arange(ROWS)[i::2]) for i in (0, 1)]
    assert whole.keys() == {'loss', 'class', 'box', 'giou', 'accuracy', 'unmatched'}
    assert set(TASK.headline) < whole.keys()
    for name, pair in whole.items():
        assert np.sum([half[name] for half in halves], 0) == pytest.approx(pair, rel=1e-5)
    assert whole['loss'][1] == ROWS


@pytest.mark.slow
def test_predictions(batch):
    found = TASK.predict(Given(lambda *inputs: perfect(batch)), batch)
    sides = np.array([[50, 40] * 2, [20, 30] * 2] * (ROWS // 2), np.float32)
    boxes = np.asarray(found['boxes'])[:, ::-1][:, QUERIES - OBJECTS :] * sides[:, None]
    labels = np.asarray(found['labels'])[:, ::-1][:, QUERIES - OBJECTS :]
    scores = np.asarray(found['scores'])[:, ::-1][:, QUERIES - OBJECTS :]
    real = np.asarray(batch['object_mask'])
    np.testing.assert_allclose(boxes[real], np.asarray(batch['boxes'])[real], atol=1e-4)
    np.testing.assert_array_equal(labels[real], np.asarray(batch['labels'])[real])
    np.testing.assert_allclose(scores, real, atol=1e-6)


def test_inputs_are_normalized_and_padding_is_zero(batch):
    images, mask = TASK.inputs({**batch, 'image': jnp.full((ROWS, 40, 50, 3), 255, jnp.uint8)})
    np.testing.assert_allclose(images[0, 0, 0], (1 - np.array(TASK.mean)) / TASK.std, rtol=1e-5)
    assert not images[1, 30:].any() and not images[1, :, 20:].any()
    whole = {k: v for k, v in batch.items() if k != 'pixel_mask'}
    assert TASK.inputs(whole)[1].all()
    np.testing.assert_array_equal(mask, batch['pixel_mask'])


def test_mistakes(batch):
    with pytest.raises(UserError, match='box_cost=-1'):
        Task(box_cost=-1)
    with pytest.raises(UserError, match='std'):
        Task(std=(0.0, 1.0, 1.0))
    with pytest.raises(UserError, match=r'pad_objects\(100\)'):
        make_targets({'image': batch['image'], 'label': batch['labels']})
