"""The loss of masks of groups: that of transformers at the same points, exact in any split."""

import unittest.mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.applies import Given
from helpers.groups import CLASSES, GROUPS, LAYERS, QUERIES, ROWS, batch_of, outputs_of
from helpers.xla import compiled_both_ways

from vit_jax.errors import UserError
from vit_jax.ops import terms
from vit_jax.ops.masks import from_features
from vit_jax.tasks._mask_points import prediction_keys
from vit_jax.tasks.base import check_rows_are_separable
from vit_jax.tasks.detect import make_targets
from vit_jax.tasks.segment_groups import Task

TASK = Task(cells_per_point=4)
STAGES, SIZE, POINTS = LAYERS + 1, (10, 12), 30
# Of our stages, the first of which is the encoder's; transformers begins with the last block.
THEIRS = {'': LAYERS, '_0': 1, '_1': 2, '_enc': 0}


def with_masks(outputs, groups=GROUPS):
    """Outputs with features of masks."""
    rng = np.random.default_rng(2)
    rows = len(outputs['logits'])
    features = {
        'mask_queries': rng.normal(size=(rows, STAGES, groups * QUERIES, 5)),
        'mask_maps': rng.normal(size=(rows, STAGES, *SIZE, 5)),
    }
    keys = jax.random.key_data(jax.random.split(jax.random.key(3), rows))
    features = {name: jnp.asarray(x, jnp.float32) for name, x in features.items()}
    return {**outputs, **features, 'keys': keys}


def with_segments(batch):
    """A batch with an area of each object."""
    segments = np.zeros(batch['image'].shape[:3], np.int32)
    for i, count in enumerate(np.asarray(batch['object_mask']).sum(1)):
        for number in range(count):
            segments[i, 4 * number : 4 * number + 9, 3 * number : 3 * number + 11] = number + 1
    return {**batch, 'segments': jnp.asarray(segments)}


def loss_and_means(features, keys, batch):
    found = TASK.loss({**features, 'keys': keys}, batch)
    means = terms.means(found)
    return terms.total(found, means), means


def uniform(key, count):
    return np.asarray(jax.random.uniform(key, (count, 2)))


class GivenPoints:
    """Stands in for `torch.rand`: the points that our loss draws for one image."""

    def __init__(self, keys):
        self.keys, self.stages = prediction_keys(keys, STAGES)[0], list(THEIRS.values())
        self.waiting = []

    def start(self, *_):
        self.own = self.keys[self.stages.pop(0)]
        self.waiting = [uniform(self.own[0], POINTS)[None]]

    def matched(self, module, inputs, pairs):
        """Their masks are in the order of the queries of all groups."""
        ((queries, rows),) = pairs
        groups = jax.random.split(self.own[1], GROUPS)
        each = [
            jax.random.split(jax.random.fold_in(groups[int(query) // QUERIES], int(row)))
            for query, row in zip(queries, rows, strict=True)
        ]
        certain = POINTS - int(0.75 * POINTS)
        for place, count in ((0, 3 * POINTS), (1, certain)):
            self.waiting.append(np.stack([uniform(pair[place], count) for pair in each]))

    def __call__(self, *shape, device=None):
        import torch

        return torch.from_numpy(np.array(self.waiting.pop(0)))


def torch_losses(outputs, batch):
    """Loss, its parts and gradients by transformers, of one image."""
    torch = pytest.importorskip('torch')
    pytest.importorskip('transformers')
    from transformers.loss import loss_rf_detr

    x = {
        k: torch.from_numpy(np.array(v)).requires_grad_() for k, v in outputs.items() if k != 'keys'
    }
    every = {
        name: torch.cat([x[f'first_{name}'].flatten(1, 2)[:, None], x[f'aux_{name}'], last], 1)
        for name in ('logits', 'boxes')
        for last in (x[name][:, None],)
    }
    every['masks'] = torch.einsum('bsqk,bshwk->bsqhw', x['mask_queries'], x['mask_maps'])
    stages = [
        {
            'logits': every['logits'][:, i],
            'pred_boxes': every['boxes'][:, i],
            'pred_masks': every['masks'][:, i],
        }
        for i in range(STAGES)
    ]
    first, *aux, last = stages
    targets = jax.tree.map(np.array, make_targets(batch))
    real = targets.real[0]
    masks = np.asarray(batch['segments'])[0] == np.arange(1, 1 + len(real))[:, None, None]
    label = {
        'class_labels': torch.from_numpy(targets.labels[0][real]).long(),
        'boxes': torch.from_numpy(targets.boxes[0][real]),
        'masks': torch.from_numpy(masks[real]),
    }
    matcher = loss_rf_detr.RfDetrHungarianMatcher(2, 5, 2, 4, 5, 5)
    losses = ['labels', 'boxes', 'masks']
    criterion = loss_rf_detr.RfDetrImageLoss(matcher, CLASSES, 0.25, losses, GROUPS, 4)
    given = GivenPoints(outputs['keys'])
    matcher.register_forward_pre_hook(given.start)
    matcher.register_forward_hook(given.matched)
    with unittest.mock.patch('torch.rand', given):
        parts = criterion({**last, 'auxiliary_outputs': aux, 'enc_outputs': first}, [label])
    weights = {'ce': 1, 'bbox': 5, 'giou': 2, 'mask_ce': 5, 'mask_dice': 5}
    total = sum(
        weight * parts[f'loss_{name}{stage}']
        for name, weight in weights.items()
        for stage in THEIRS
    )
    total.backward()
    return total.item(), parts, {k: v.grad.numpy() for k, v in x.items()}


@compiled_both_ways
@pytest.mark.parametrize('slopes', [False, pytest.param(True, marks=pytest.mark.long)])
def test_loss_and_its_slopes_equal_those_of_transformers(slopes, way):
    """Of all stages and groups, matched with the costs of masks."""
    outputs, batch = with_masks(outputs_of(rows=1)), with_segments(batch_of((4,)))
    expected, parts, theirs = torch_losses(outputs, batch)
    keys = outputs.pop('keys')
    compute = jax.value_and_grad(loss_and_means, has_aux=True) if slopes else loss_and_means
    found = jax.jit(compute)(outputs, keys, batch)
    (loss, means), gradient = found if slopes else (found, {})
    assert float(loss) == pytest.approx(expected, rel=1e-5)
    names = {'class': 'ce', 'box': 'bbox', 'giou': 'giou', 'mask': 'mask_ce', 'dice': 'mask_dice'}
    for ours, other in names.items():
        for prefix, stages in {'': [''], 'aux_': ['_0', '_1'], 'first_': ['_enc']}.items():
            total = sum(parts[f'loss_{other}{stage}'].item() for stage in stages)
            assert float(means[prefix + ours]) == pytest.approx(total, rel=1e-5, abs=1e-7)
    for name, x in gradient.items():
        np.testing.assert_allclose(x, theirs[name], rtol=1e-4, atol=1e-6, err_msg=name)


@pytest.mark.long
def test_rows_are_separable():
    check_rows_are_separable(TASK, with_masks(outputs_of()), with_segments(batch_of()))


@pytest.mark.long
def test_evaluation_has_one_group_and_the_loss_of_each_image():
    outputs, batch = (
        with_masks(outputs_of(groups=1), groups=1),
        with_segments(batch_of((2, 1, 3, 4))),
    )
    keys = jax.random.wrap_key_data(outputs['keys'])

    def model(*inputs, method=None):
        return keys if method else outputs

    means = {k: float(s / n) for k, (s, n) in TASK.evaluate(Given(model), batch).items()}
    losses = []
    for i in range(ROWS):
        found = TASK.loss(*jax.tree.map(lambda x, i=i: x[i : i + 1], (outputs, batch)))
        losses.append(float(terms.total(found, terms.means(found))))
    assert means['loss'] == pytest.approx(np.mean(losses), rel=1e-5)
    assert means['mask'] > 0 and means['dice'] > 0


def test_predictions_have_the_masks_of_all_queries():
    outputs = with_masks(outputs_of(groups=1), groups=1)
    outputs['masks'] = from_features(outputs['mask_queries'][:, -1], outputs['mask_maps'][:, -1])
    found = Task(objects=5).predict(Given(lambda *_: outputs), batch_of())
    assert found['masks'].shape == (ROWS, QUERIES, *SIZE) and found['queries'].shape == (ROWS, 5)
    assert found['size'].tolist() == [[40, 50], [30, 20]] * 2
    assert found['frame'].tolist() == [[40, 50]] * ROWS
    with pytest.raises(UserError, match=r'config\.model\.masks\.stride'):
        TASK.predict(Given(lambda *_: outputs_of(groups=1)), batch_of())


@pytest.mark.parametrize(
    ('field', 'value'), [('cells_per_point', 0), ('oversample', 0.5), ('mask_cost', -1.0)]
)
def test_mistakes_name_the_key(field, value):
    with pytest.raises(UserError, match=f'config.task.{field}'):
        Task(**{field: value})
