"""The loss of groups of queries: that of transformers, exact however the batch is split."""

import functools
import types

import jax
import numpy as np
import pytest
from helpers.applies import Given
from helpers.groups import CLASSES, GROUPS, LAYERS, QUERIES, ROWS, batch_of, outputs_of
from helpers.xla import compiled_both_ways

from vit_jax.errors import UserError
from vit_jax.ops import terms
from vit_jax.tasks.base import check_rows_are_separable
from vit_jax.tasks.detect import make_targets
from vit_jax.tasks.detect_groups import Task

TASK = Task()


@jax.jit
def loss_and_gradient(outputs, batch):
    def loss(outputs):
        found = TASK.loss(outputs, batch)
        means = terms.means(found)
        return terms.total(found, means), means

    return jax.value_and_grad(loss, has_aux=True)(outputs)


def torch_loss(outputs, batch):
    """Loss, its parts and gradients by transformers."""
    torch = pytest.importorskip('torch')
    pytest.importorskip('transformers')
    from transformers.loss.loss_lw_detr import LwDetrForObjectDetectionLoss

    targets = jax.tree.map(np.array, make_targets(batch))
    labels = [
        {
            'class_labels': torch.from_numpy(targets.labels[i][real]).long(),
            'boxes': torch.from_numpy(targets.boxes[i][real]),
        }
        for i, real in enumerate(targets.real)
    ]
    config = types.SimpleNamespace(
        **{'class_cost': 2, 'bbox_cost': 5, 'giou_cost': 2, 'focal_alpha': 0.25},
        **{'class_loss_coefficient': 1, 'bbox_loss_coefficient': 5, 'giou_loss_coefficient': 2},
        **{'num_labels': CLASSES, 'group_detr': GROUPS, 'auxiliary_loss': True},
        decoder_layers=LAYERS,
    )
    x = {k: torch.from_numpy(np.array(v)).requires_grad_() for k, v in outputs.items()}
    every = {
        name: torch.cat([x[f'aux_{name}'].transpose(0, 1), x[name][None]])
        for name in ('logits', 'boxes')
    }
    first = {name: x[f'first_{name}'].flatten(1, 2) for name in ('logits', 'boxes')}
    loss, parts, _ = LwDetrForObjectDetectionLoss(
        *(every['logits'][-1], labels, 'cpu', every['boxes'][-1], config),
        *(every['logits'], every['boxes'], first['logits'], first['boxes']),
    )
    loss.backward()
    return loss.item(), parts, {k: v.grad.numpy() for k, v in x.items()}


@compiled_both_ways
@pytest.mark.parametrize('counts', [(2, 0, 4, 5), (0, 0, 0, 0)])
def test_loss_and_gradient_equal_those_of_transformers(counts, way):
    """Also of a batch without objects, whose classes are divided by one."""
    outputs, batch = outputs_of(), batch_of(counts)
    (loss, means), gradient = loss_and_gradient(outputs, batch)
    expected, parts, theirs = torch_loss(outputs, batch)
    assert float(loss) == pytest.approx(expected, rel=1e-5)
    for ours, others in {'class': 'loss_ce', 'box': 'loss_bbox', 'giou': 'loss_giou'}.items():
        for prefix, names in {'': [''], 'aux_': ['_0', '_1'], 'first_': ['_enc']}.items():
            total = sum(parts[others + name].item() for name in names)
            assert float(means[prefix + ours]) == pytest.approx(total, rel=1e-5, abs=1e-7)
    for name, x in gradient.items():
        np.testing.assert_allclose(x, theirs[name], rtol=1e-4, atol=1e-6, err_msg=name)


def test_rows_are_separable_and_counts_depend_on_the_batch_alone():
    """So that accumulation, devices and their layouts give the same loss."""
    batch, outputs = batch_of(), outputs_of()
    check_rows_are_separable(TASK, outputs, batch)
    counts = jax.jit(lambda *given: terms.counts(TASK.loss(*given)))
    other = jax.tree.map(lambda x: np.asarray(x)[::-1], outputs)
    one, two = (jax.tree.map(float, counts(each, batch)) for each in (outputs, other))
    assert one == two
    assert one['box'] == GROUPS * 11


def test_evaluation_has_one_group_and_the_loss_of_each_image():
    """Each normalized by its own objects, so that it does not depend on the batch."""
    outputs, batch = outputs_of(groups=1), batch_of((2, 1, 3, 4))
    evaluate = jax.jit(lambda outputs, batch: TASK.evaluate(Given(lambda *_: outputs), batch))
    means = {k: float(s) / float(n) for k, (s, n) in evaluate(outputs, batch).items()}

    @jax.jit
    def loss(outputs, batch):
        found = TASK.loss(outputs, batch)
        return terms.total(found, terms.means(found))

    given = jax.tree.map(np.asarray, (outputs, batch))
    rows = [jax.tree.map(lambda x, i=i: x[i : i + 1], given) for i in range(ROWS)]
    losses = [float(loss(*row)) for row in rows]
    assert means['loss'] == pytest.approx(np.mean(losses), rel=1e-5)
    assert means['unmatched'] == 0


def predicted(task, outputs):
    return jax.jit(lambda *given: task.predict(Given(lambda *_: given[0]), given[1]))(
        outputs, batch_of()
    )


def test_predictions_are_the_best_pairs_of_queries_and_classes():
    outputs = outputs_of(groups=1)
    probs = 1 / (1 + np.exp(-np.asarray(outputs['logits'], np.float64)))
    found = predicted(Task(objects=5), outputs)
    for row in range(ROWS):
        order = np.argsort(-probs[row].ravel())[:5]
        np.testing.assert_allclose(found['scores'][row], probs[row].ravel()[order], rtol=1e-5)
        np.testing.assert_array_equal(found['labels'][row], order % CLASSES)
        x, y, w, h = np.asarray(outputs['boxes'])[row, order // CLASSES].T
        corners = np.stack([x - w / 2, y - h / 2, x + w / 2, y + h / 2], -1)
        np.testing.assert_allclose(found['boxes'][row], corners, atol=1e-6)
    every = jax.eval_shape(functools.partial(predicted, TASK), outputs)
    assert every['scores'].shape == (ROWS, QUERIES * CLASSES)


@pytest.mark.parametrize(
    ('field', 'value'), [('alpha', 1.5), ('objects', 0), ('giou_cost', -1.0), ('std', (0.0,))]
)
def test_mistakes_name_the_key(field, value):
    with pytest.raises(UserError, match=f'config.task.{field}'):
        Task(**{field: value})
