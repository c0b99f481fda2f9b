"""Segmentation: loss, slope and predictions of transformers, exact however the batch is split."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import eomt as helper
from helpers.applies import Given
from helpers.xla import compiled_both_ways

from vit_jax.data.transforms import parse_transforms
from vit_jax.errors import UserError
from vit_jax.ops import masks as mask_ops
from vit_jax.ops import terms
from vit_jax.tasks import segment
from vit_jax.tasks.base import check_rows_are_separable

TASK, LAYERS, ROWS = helper.TASK, 3, 2
PARTS = {'class': 'loss_cross_entropy', 'mask': 'loss_mask', 'dice': 'loss_dice'}


def outputs_of(rng, rows=ROWS):
    def arrays(*shape):
        logits = rng.normal(size=(*shape, helper.QUERIES, helper.CLASSES + 1))
        return {'logits': logits, 'masks': 3 * rng.normal(size=(*shape, helper.QUERIES, 16, 16))}

    aux = {f'aux_{name}': x for name, x in arrays(rows, LAYERS - 1).items()}
    found = {k: jnp.asarray(v, jnp.float32) for k, v in {**arrays(rows), **aux}.items()}
    keys = jax.random.split(jax.random.key(3), rows)
    return found | {'keys': jax.random.key_data(keys)}


@pytest.fixture(scope='module')
def outputs():
    return outputs_of(np.random.default_rng(0))


@pytest.fixture(scope='module')
def batch():
    return helper.batch()


def loss_and_means(outputs, batch):
    found = TASK.loss(outputs, batch)
    means = terms.means(found)
    return terms.total(found, means), means


run = jax.jit(jax.value_and_grad(loss_and_means, has_aux=True, allow_int=True))


@pytest.mark.slow
@compiled_both_ways
def test_loss_and_its_slope_equal_those_of_transformers(outputs, batch, way):
    """Of all predictions, at the same points."""
    torch = pytest.importorskip('torch')
    pytest.importorskip('transformers')
    theirs = helper.reference()
    given = {
        name: torch.from_numpy(np.array(x)).requires_grad_()
        for name, x in outputs.items()
        if name != 'keys'
    }
    inputs, losses = helper.inputs(batch), []
    with helper.GivenPoints(theirs, outputs['keys'], LAYERS):
        for layer in range(LAYERS):
            last = layer == LAYERS - 1
            logits, masks = (
                given[name] if last else given[f'aux_{name}'][:, layer]
                for name in ('logits', 'masks')
            )
            wanted = inputs['mask_labels'], inputs['class_labels']
            losses.append(theirs.get_loss_dict(masks, logits, *wanted, None))
    total = sum(sum(each.values()) for each in losses)
    total.backward()
    with jax.default_matmul_precision('highest'):
        (ours, means), slopes = run(outputs, batch)
    for name, other in PARTS.items():
        weight = getattr(TASK, f'{name}_weight')
        last, aux = losses[-1][other].item(), sum(each[other].item() for each in losses[:-1])
        assert float(means[name]) * weight == pytest.approx(last, rel=1e-5)
        assert float(means[f'aux_{name}']) * weight == pytest.approx(aux, rel=1e-5)
    assert float(ours) == pytest.approx(total.item(), rel=1e-5)
    for name, x in given.items():
        np.testing.assert_allclose(slopes[name], x.grad, atol=1e-5, err_msg=name)
        assert np.abs(slopes[name]).max() > 1e-3


@pytest.mark.long
@pytest.mark.slow
def test_loss_of_parts_adds_up_to_that_of_the_whole(batch):
    outputs = outputs_of(np.random.default_rng(1), 4)
    both = jax.tree.map(lambda x: jnp.concatenate([x, x[::-1]]), batch)
    check_rows_are_separable(TASK, outputs, both)


@pytest.mark.long
@pytest.mark.slow
def test_evaluation_is_the_mean_of_images(outputs, batch):
    """Padded rows do not count, and each image has normalizers of its own."""
    last = {name: outputs[name] for name in ('logits', 'masks')}
    keys = jax.random.wrap_key_data(outputs['keys'])

    def model(*inputs, method=None, **options):
        return keys if method == 'example_keys' else last

    evaluate = jax.jit(lambda batch: TASK.evaluate(Given(model), batch))
    whole = evaluate(batch)
    assert float(whole['loss'][1]) == 2
    each = [evaluate({**batch, 'mask': jnp.array(mask)}) for mask in ([1.0, 0.0], [0.0, 1.0])]
    for name, (found, count) in whole.items():
        np.testing.assert_allclose(sum(float(x[name][0]) for x in each), found, rtol=1e-5)
        assert sum(float(x[name][1]) for x in each) == pytest.approx(float(count))
    first = segment_mean(outputs, batch)
    assert float(each[0]['loss'][0]) == pytest.approx(first, rel=1e-5)


def segment_mean(outputs, batch):
    """The loss of the first image's last prediction alone."""
    one = {name: outputs[name][:1] for name in ('logits', 'masks', 'keys')}
    part = jax.tree.map(lambda x: x[:1], batch)
    return float(jax.jit(loss_and_means)(one, part)[0])


@pytest.mark.long
@pytest.mark.slow
def test_crowds_and_segments_without_pixels_are_not_to_be_found(outputs, batch):
    crowd = jnp.zeros_like(batch['object_mask']).at[1, 0].set(True)
    hidden = jnp.where(batch['segments'] == 2, 1, batch['segments'])
    targets = segment.make_targets(TASK, {**batch, 'crowd': crowd, 'segments': hidden})
    assert targets.real.tolist() == [[True, False, False], [False, False, True]]
    nothing = {**batch, 'object_mask': jnp.zeros_like(batch['object_mask'])}
    (loss, means), slopes = run(outputs, nothing)
    assert np.isfinite(loss) and means['mask'] == means['dice'] == 0
    assert not slopes['masks'].any() and slopes['logits'].any()


@pytest.mark.long
@pytest.mark.slow
def test_void_pixels_count_only_if_they_should(outputs, batch):
    """As outside of all masks in the authors' code; else they have no slope."""
    void = {**batch, 'segments': batch['segments'].at[:, :16].set(-1)}
    count = jnp.where(void['segments'] < 0, 0, void['segments'])
    (counted, _), _ = run(outputs, void)
    (zeros, _), _ = run(outputs, {**void, 'segments': count})
    assert float(counted) == float(zeros)
    task = dataclasses.replace(TASK, count_void=False)

    @jax.jit
    @jax.grad
    def slope(masks):
        found = task.loss({**outputs, 'masks': masks}, void)
        return terms.total(found, terms.means(found))

    # A point in the lower half may lie between the two.
    slopes = np.asarray(slope(outputs['masks']))
    assert not slopes[:, :, :7].any() and slopes[:, :, 8:].any()


def test_probability_of_masks_falls_block_by_block():
    task = segment.Task(anneal_start=(10, 20), anneal_end=(20, 40))
    probs = np.stack(
        [task.mask_probs(jnp.asarray(step)) for step in (0, 10, 15, 20, 30, 40, 2**30)]
    )
    np.testing.assert_allclose(probs[:, 0], [1, 1, 0.5**0.9, 0, 0, 0, 0], atol=1e-6)
    np.testing.assert_allclose(probs[:, 1], [1, 1, 1, 1, 0.5**0.9, 0, 0], atol=1e-6)
    assert float(segment.Task().mask_probs(jnp.asarray(0))) == 0
    with pytest.raises(UserError, match=r'anneal_end=\(5,\)'):
        segment.Task(anneal_start=(1, 2), anneal_end=(5,))


def predictions(kind, batch, **options):
    task = dataclasses.replace(TASK, kind=kind, **options)
    rng = np.random.default_rng(4)
    made = outputs_of(rng)
    made['logits'] = 3 * made['logits']
    smooth = jax.image.resize(made['masks'][..., ::4, ::4], made['masks'].shape, 'linear')
    last = {'logits': made['logits'], 'masks': 2 * smooth}
    return last, jax.device_get(jax.jit(lambda b: task.predict(Given(lambda *_: last), b))(batch))


def processor():
    """transformers' image processor, and our outputs as its model's."""
    torch = pytest.importorskip('torch')
    pytest.importorskip('transformers')
    from transformers.models.eomt.image_processing_pil_eomt import EomtImageProcessorPil
    from transformers.models.eomt.modeling_eomt import EomtForUniversalSegmentationOutput

    size = {'shortest_edge': helper.SIDE, 'longest_edge': helper.SIDE}

    def outputs(last):
        return EomtForUniversalSegmentationOutput(
            masks_queries_logits=torch.from_numpy(np.array(last['masks'])),
            class_queries_logits=torch.from_numpy(np.array(last['logits'])),
        )

    return EomtImageProcessorPil(size=size), outputs


@pytest.mark.slow
def test_semantic_predictions_are_those_of_transformers(batch):
    theirs, outputs = processor()
    last, ours = predictions('semantic', batch)
    sizes = [(helper.SIDE, helper.SIDE)] * 2
    expected = theirs.post_process_semantic_segmentation(outputs(last), sizes)
    np.testing.assert_array_equal(ours['segmentation'], np.stack(expected))
    assert len(np.unique(ours['segmentation'])) > 1
    np.testing.assert_array_equal(ours['size'], sizes)


@pytest.mark.slow
def test_predictions_in_windows_are_those_of_transformers():
    """Of a wide and a tall image in three windows each, at the sizes of the files."""
    theirs, outputs = processor()
    side, most = helper.SIDE, 4
    sizes = [(2 * side, 5 * side), (5 * side, 2 * side)]
    make = parse_transforms(f'sliding_windows({side}, most={most})')
    rows = [make({'image': np.zeros((*size, 3), np.uint8)}, None) for size in sizes]
    batch = {name: jnp.asarray(np.stack([row[name] for row in rows])) for name in rows[0]}
    last = {k: x for k, x in outputs_of(np.random.default_rng(1), 2 * most).items() if k[0] in 'lm'}
    used = np.flatnonzero(batch['starts'].ravel() >= 0)
    given = outputs({name: x[used] for name, x in last.items()})
    starts = np.asarray(batch['starts']).ravel()[used]
    given.patch_offsets = [(i // 3, start, start + side) for i, start in enumerate(starts.tolist())]
    size = {'shortest_edge': side, 'longest_edge': None}
    expected = theirs.post_process_semantic_segmentation(given, sizes, size=size)
    task = dataclasses.replace(TASK, kind='semantic', frame=(5 * side, 5 * side))
    ours = jax.jit(lambda batch: task.predict(Given(lambda *_: last), batch))(batch)
    np.testing.assert_array_equal(ours['size'], sizes)
    for found, (height, width), one in zip(ours['segmentation'], sizes, expected, strict=True):
        wrong = np.asarray(found)[:height, :width] != one.numpy()
        assert wrong.mean() < 1e-3  # classes that are equally likely, to rounding
    assert len(np.unique(ours['segmentation'])) > 2
    small = dataclasses.replace(task, frame=None).predict(Given(lambda *_: last), batch)
    np.testing.assert_array_equal(small['size'], batch['scaled_size'])


def test_pixels_without_finite_scores_have_no_class():
    last = {
        'logits': jnp.zeros((2, 3, 4)),
        'masks': jnp.zeros((2, 3, 8, 8)).at[0, 1, 7].set(jnp.nan),
    }
    task = dataclasses.replace(TASK, kind='semantic')
    found = task.predict(Given(lambda *_: last), {'image': jnp.zeros((2, 32, 32, 3), jnp.uint8)})
    assert (np.asarray(found['segmentation'])[0, -1] == -2).all()
    assert (np.asarray(found['segmentation'])[1] == 0).all()


@pytest.mark.slow
def test_instances_are_those_of_transformers(batch):
    """With one class for each query; their scores include the mean probability of the mask."""
    theirs, outputs = processor()
    last, ours = predictions('instance', batch, instances=0)
    sizes = [(helper.SIDE, helper.SIDE)] * 2
    expected = theirs.post_process_instance_segmentation(outputs(last), sizes, threshold=0.0)
    large = np.asarray(mask_ops.resize_bilinear(last['masks'], sizes[0]))
    for row, found in enumerate(expected):
        probs = 1 / (1 + np.exp(-large[row]))
        inside = large[row] > 0
        weights = (probs * inside).sum((1, 2)) / (inside.sum((1, 2)) + 1e-6)
        scores = (ours['scores'][row] * weights)[ours['queries'][row]]
        info = found['segments_info']
        np.testing.assert_allclose([each['score'] for each in info], scores, atol=1e-5)
        assert [each['label_id'] for each in info] == ours['labels'][row].tolist()


def test_the_best_pairs_of_query_and_class(batch):
    last, ours = predictions('instance', batch, instances=7)
    probs = np.asarray(jax.nn.softmax(last['logits']))[..., :-1].reshape(2, -1)
    best = np.argsort(-probs, axis=1)[:, :7]
    np.testing.assert_array_equal(ours['queries'], best // helper.CLASSES)
    np.testing.assert_array_equal(ours['labels'], best % helper.CLASSES)
    np.testing.assert_allclose(ours['scores'], np.take_along_axis(probs, best, 1), rtol=1e-6)


def test_panoptic_predictions(batch):
    last, ours = predictions('panoptic', batch, stuff=(1,))
    probs = np.asarray(jax.nn.softmax(last['logits']))
    none = probs.argmax(-1) == helper.CLASSES
    assert none.any() and not none.all()
    np.testing.assert_allclose(
        ours['scores'], np.where(none, 0, probs[..., :-1].max(-1)), rtol=1e-6
    )
    np.testing.assert_array_equal(ours['things'], ours['labels'] != 1)
    assert ours['frame'].tolist() == ours['size'].tolist() == [[helper.SIDE, helper.SIDE]] * 2


def test_data_without_segments():
    batch = {'image': jnp.zeros((1, 8, 8, 3), jnp.uint8)}
    with pytest.raises(UserError, match=r"'segments'.*image"):
        segment.make_targets(TASK, batch)


@pytest.mark.parity
def test_values_at_points_are_those_of_torch():
    torch = pytest.importorskip('torch')
    rng = np.random.default_rng(0)
    maps = rng.normal(size=(2, 3, 5, 7)).astype(np.float32)
    points = rng.uniform(size=(2, 50, 2)).astype(np.float32)
    expected = torch.nn.functional.grid_sample(
        torch.from_numpy(maps), torch.from_numpy(2 * points - 1)[:, :, None], align_corners=False
    )[..., 0]
    np.testing.assert_allclose(jax.jit(mask_ops.sample)(maps, points), expected, atol=1e-5)


@pytest.mark.slow
def test_both_ways_to_values_at_points_agree():
    rng = np.random.default_rng(0)
    maps = rng.normal(size=(2, 3, 5, 7)).astype(np.float32)
    points = jnp.asarray(rng.uniform(-0.1, 1.1, size=(2, 50, 2)), jnp.float32)

    def with_gradient(sample):
        return jax.jit(jax.value_and_grad(lambda maps: (sample(maps, points) ** 2).sum()))(maps)

    ways = map(with_gradient, (mask_ops.sample_by_gather, mask_ops.sample_by_product))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5), *ways)


@pytest.mark.slow
def test_points_are_where_a_mask_is_uncertain():
    mask = jnp.asarray(np.linspace(-8, 8, 16)[None].repeat(16, 0), jnp.float32)
    draw = jax.jit(lambda key: mask_ops.uncertain_points(key, mask, 400, 3.0, 0.75))
    x = np.asarray(draw(jax.random.key(0)))[:, 0]
    # The 300 of 1,200 closest to the middle; the others are anywhere.
    assert np.abs(x[:300] - 0.5).max() < 0.2 and np.abs(x[300:] - 0.5).max() > 0.4
