"""DETR with masks: exact sizes, outputs of transformers, what of it learns."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.special
from helpers import detr as helper
from helpers.pictures import drawn, images_like

from vit_jax.errors import UserError
from vit_jax.models import detr, detr_panoptic
from vit_jax.models.detr import ObjectMaps
from vit_jax.nn.encoder_decoder import Memory

# Measured by the authors' code, for 250 classes.
TOTAL, MASK_HEAD, BBOX_ATTENTION = 42_899_288, 1_202_073, 131_584
SMALL = {'layers': (1, 1), 'depth': 1, 'decoder_depth': 1}


@pytest.fixture(scope='module')
def theirs():
    pytest.importorskip('torch')
    pytest.importorskip('transformers')
    return helper.panoptic_reference()


@pytest.fixture(scope='module')
def params(theirs):
    return helper.panoptic_params(theirs)


@pytest.mark.slow
def test_exact_parameter_counts():
    found = helper.sizes(detr_panoptic.Model(num_classes=250, **detr.variant('R50')))
    trained = {p: n for p, n in found.items() if not (p.startswith('backbone') and 'norm' in p)}
    assert sum(trained.values()) == TOTAL
    parts = {
        part: sum(n for path, n in found.items() if path.startswith(f'{part}/'))
        for part in ('mask_head', 'bbox_attention')
    }
    assert parts == {'mask_head': MASK_HEAD, 'bbox_attention': BBOX_ATTENTION}


@pytest.mark.slow
@pytest.mark.parametrize('dilate', [False, True])
def test_masks_have_a_quarter_of_the_sides(dilate):
    for layers in ((1,), (1, 1, 1), (1, 1, 1, 1)):
        shape = {'layers': layers, 'depth': 1, 'decoder_depth': 1}
        model = dataclasses.replace(helper.PANOPTIC, dilate=dilate, **shape)
        images = jax.ShapeDtypeStruct((2, 90, 67, 3), jnp.float32)
        outputs, _ = jax.eval_shape(model.init_with_output, jax.random.key(0), images)
        assert outputs['masks'].shape == (2, helper.QUERIES, 23, 17)
        assert outputs['masks'].dtype == jnp.float32


@pytest.mark.parity
@pytest.mark.slow
def test_outputs_equal_those_of_transformers_on_padded_images(theirs, params):
    batch = helper.batch()
    import torch

    with torch.no_grad():
        expected = theirs(**helper.tensors(batch))
    run = jax.jit(lambda p, *inputs: helper.PANOPTIC.apply({'params': p}, *inputs))
    with jax.default_matmul_precision('highest'):
        outputs = run(params, batch['image'], batch['pixel_mask'])
    np.testing.assert_allclose(outputs['logits'], expected.logits, atol=1e-5)
    np.testing.assert_allclose(outputs['boxes'], expected.pred_boxes, atol=1e-5)
    np.testing.assert_allclose(outputs['masks'], expected.pred_masks, atol=5e-5)
    # A mask is that of its query: they differ by far more than the tolerance.
    assert np.median(np.asarray(outputs['masks']).std(axis=1)) > 1e-3


def test_heads_share_one_softmax_and_nobody_looks_at_padding():
    rng = np.random.default_rng(0)
    queries, tokens = (jnp.asarray(rng.normal(size=(2, n, 8)), jnp.float32) for n in (3, 5))
    mask = jnp.asarray([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]], bool)[:, None, None]
    layer, memory = ObjectMaps(4), Memory(tokens, mask)
    maps, _ = jax.jit(layer.init_with_output)(jax.random.key(0), queries, memory)
    assert maps.shape == (2, 3, 5, 4)
    np.testing.assert_allclose(maps.sum((2, 3)), 1, rtol=1e-6)
    assert np.ptp(maps.sum(2)) > 0.01  # some heads look more than others
    assert not maps[1, :, 3:].any() and (maps[1, :, :3] > 0).all()


@pytest.mark.slow
@pytest.mark.parametrize(('stride', 'grid'), [(2, (17, 24)), (4, (9, 12))])
def test_masks_are_as_fine_as_their_stride_says(stride, grid):
    model = dataclasses.replace(helper.PANOPTIC, layers=(1, 1), mask_stride=stride)
    images = jax.ShapeDtypeStruct((1, 33, 47, 3), jnp.float32)
    outputs, variables = jax.eval_shape(model.init_with_output, jax.random.key(0), images)
    assert outputs['masks'].shape == (1, model.num_queries, *grid)
    adapters = {name for name in variables['params']['mask_head'] if 'adapter' in name}
    assert len(adapters) == (2 if stride == 2 else 1)
    with pytest.raises(UserError, match=r'mask_stride=3: .* \(2, 4\)'):
        dataclasses.replace(helper.PANOPTIC, mask_stride=3)


@pytest.mark.slow
def test_a_box_covers_cells_of_the_real_image():
    mask = np.zeros((1, 8, 8), bool)
    mask[:, :, :4] = True  # two of four cells beside each other are real
    boxes = jnp.asarray([[[0.5, 0.5, 1, 1], [0.25, 0.25, 0.5, 0.5], [0.5, 0.5, 0.25, 0.25]]])
    covered = jax.jit(detr_panoptic.box_coverage, static_argnums=1)
    whole, corner, middle = np.asarray(covered(boxes, (4, 4), mask))[0]
    np.testing.assert_allclose(whole, np.tile([1, 1, 0, 0], (4, 1)), atol=1e-6)
    np.testing.assert_allclose(corner, np.outer([1, 1, 0, 0], [1, 0, 0, 0]), atol=1e-6)
    np.testing.assert_allclose(middle, np.outer([0, 0.5, 0.5, 0], [0.25, 0.25, 0, 0]), atol=1e-6)
    without = covered(np.asarray(boxes)[:, :1], (3, 5))
    np.testing.assert_allclose(without, np.ones((1, 1, 3, 5)), atol=1e-6)


@pytest.mark.slow
def test_the_queries_that_most_probably_see_an_object_get_a_mask():
    model = dataclasses.replace(helper.PANOPTIC, box_maps=True, **SMALL)
    images = images_like(2, 32, 48, 3)
    models = model, dataclasses.replace(model, num_masks=2)
    run = jax.jit(lambda params: [each.apply({'params': params}, images) for each in models])
    every, some = jax.device_get(run(drawn(model, images)))
    sure = np.argsort(scipy.special.softmax(every['logits'], axis=-1)[..., -1], axis=-1)
    rows = np.arange(2)[:, None]
    np.testing.assert_allclose(
        some['masks'][rows, sure[:, :2]], every['masks'][rows, sure[:, :2]], atol=1e-5
    )
    assert (some['masks'][rows, sure[:, 2:]] == detr_panoptic.NO_MASK).all()
    assert len(set(map(tuple, sure[:, :2]))) == 2  # not the same two of both images
    with pytest.raises(UserError, match=r'num_masks=9.*num_queries='):
        dataclasses.replace(model, num_masks=9)


@pytest.mark.long
@pytest.mark.slow
def test_a_frozen_detector_gets_no_gradient():
    model = dataclasses.replace(helper.PANOPTIC, frozen_detector=True, **SMALL)
    images = images_like(1, 32, 48, 3)

    @jax.jit
    @jax.grad
    def slopes(params):
        return sum((x**2).sum() for x in model.apply({'params': params}, images).values())

    grads = slopes(drawn(model, images))
    learns = {part for part, tree in grads.items() if any(map(np.any, jax.tree.leaves(tree)))}
    assert learns == {'mask_head', 'bbox_attention'}
    assert set(grads) - learns == set(detr_panoptic.DETECTOR)
