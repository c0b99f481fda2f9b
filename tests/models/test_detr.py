"""DETR: exact sizes, outputs of transformers, what padding and dilation mean."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax.traverse_util import flatten_dict
from helpers import detr as helper
from helpers.pictures import drawn, images_like
from helpers.typechecker import unchecked

from vit_jax.errors import UserError
from vit_jax.models import detr
from vit_jax.models.detr import resize_nearest
from vit_jax.nn.maps import HIDDEN_STATES, keep_hidden_states
from vit_jax.nn.positions import masked_sine2d
from vit_jax.nn.resnet import Conv, ResNet, Stage

# All parameters but those of frozen norms, which the authors count as buffers (measured by
# their code), and of these the kernels that do not learn in their recipe.
TOTALS = {'R50': 41_524_768, 'DC5-R101': 60_464_672}
FROZEN = 222_400


@pytest.fixture(scope='module')
def theirs():
    pytest.importorskip('torch')
    pytest.importorskip('transformers')
    return helper.reference()


@pytest.fixture(scope='module')
def params(theirs):
    return helper.our_params(theirs)


@pytest.fixture(scope='module')
def ours(params):
    """Outputs, attention and states of our model with the parameters of transformers."""
    batch = helper.batch()

    @jax.jit
    def apply(params, image, pixel_mask):
        variables, kept = {'params': params}, ['intermediates', HIDDEN_STATES]
        with nn.intercept_methods(keep_hidden_states):  # as `hidden_states` does
            return helper.MODEL.apply(variables, image, pixel_mask, mutable=kept)

    with jax.default_matmul_precision('highest'):
        return apply(params, batch['image'], batch['pixel_mask'])


@pytest.mark.slow
@pytest.mark.parametrize(
    ('name', 'total'),
    [
        pytest.param(name, total, marks=[pytest.mark.long] * ('R101' in name))
        for name, total in TOTALS.items()
    ],
)
def test_exact_parameter_counts(name, total):
    sizes = {
        path: size
        for path, size in helper.sizes(detr.Model(num_classes=91, **detr.variant(name))).items()
        if not (path.startswith('backbone/') and 'norm' in path)
    }
    assert sum(sizes.values()) == total
    frozen = [
        n for path, n in sizes.items() if path.startswith(('backbone/root', 'backbone/stage_0'))
    ]
    assert sum(frozen) == FROZEN


@pytest.mark.parity
@pytest.mark.slow
def test_outputs_equal_those_of_transformers_on_padded_images(theirs, params, ours):
    batch = helper.batch()
    import torch

    with torch.no_grad():
        found, logits, boxes = helper.forward(theirs, batch)
    outputs, kept = ours
    np.testing.assert_allclose(outputs['logits'], found.logits, atol=1e-5)
    np.testing.assert_allclose(outputs['boxes'], found.pred_boxes, atol=1e-5)
    assert np.asarray(outputs['logits']).std(axis=1).min() > 0.02
    for i, (one, other) in enumerate(zip(logits[:-1], boxes[:-1], strict=True)):
        np.testing.assert_allclose(outputs['aux_logits'][:, i], one, atol=1e-5)
        np.testing.assert_allclose(outputs['aux_boxes'][:, i], other, atol=1e-5)
    maps = helper.MODEL.attention_maps(kept['intermediates'], batch['image'], batch['pixel_mask'])
    expected = (*found.encoder_attentions, *found.decoder_attentions, *found.cross_attentions)
    assert len(maps) == len(expected) == 1 + 2 + 2
    for mine, other in zip(maps, expected, strict=True):
        np.testing.assert_allclose(mine.weights, other, atol=1e-5)
    inputs = batch['image'], batch['pixel_mask']
    states = helper.MODEL.collect_hidden_states(kept[HIDDEN_STATES], *inputs)
    assert [state.name for state in states] == ['embedding', 'encoder/block_0']
    for mine, other in zip(states, found.encoder_hidden_states, strict=True):
        scale = other.abs().max()
        np.testing.assert_allclose(mine.tokens, other, atol=1e-5 * scale, rtol=0)
        assert mine.grid == (4, 5)
        assert mine.real.reshape(2, 4, 5).any(2).sum(1).tolist() == [4, 3]
    assert helper.MODEL.final_norm_of(params) is None


@pytest.mark.parity  # for the outputs are those that transformers' are compared with
@pytest.mark.slow
def test_attention_maps_say_where_cells_are_and_leave_padding_out(ours):
    batch = helper.batch()
    maps = helper.MODEL.attention_maps(ours[1]['intermediates'], batch['image'])
    assert [m.name for m in maps[:2]] == ['encoder/block_0', 'decoder/block_0']
    assert maps[-1].name == 'decoder/block_1/cross'
    assert (maps[0].query_grid, maps[0].key_grid) == ((4, 5), (4, 5))
    assert (maps[-1].query_grid, maps[-1].key_grid) == ((7,), (4, 5))
    # The second image has 75 of 100 rows of pixels: the last row of cells begins at 75.
    looked_at = maps[-1].weights.reshape(2, 4, 7, 4, 5)
    assert (looked_at[1, :, :, 3] == 0).all()
    assert (looked_at[0, :, :, 3, :4] > 0).all()


def test_positions_are_counted_within_the_real_image():
    mask = jnp.asarray(np.pad(np.ones((1, 3, 4), bool), [(0, 0), (0, 2), (0, 1)]))
    both = jax.jit(lambda x: [masked_sine2d(x, 16), masked_sine2d(x[:, :3, :4], 16)])
    padded, real = jax.device_get(both(mask))
    np.testing.assert_allclose(padded[:, :3, :4], real, atol=1e-6)
    # At the last row and column of the image the slowest pair has gone round once.
    last = padded[0, 2, 3].reshape(2, 4, 2)
    np.testing.assert_allclose(last[:, 0], [[0, 1], [0, 1]], atol=1e-5)
    with pytest.raises(UserError, match='multiple of 4'):
        masked_sine2d(mask, 6)


@pytest.mark.slow
def test_a_mask_gets_the_pixels_that_torch_takes():
    torch = pytest.importorskip('torch')
    mask = np.random.default_rng(0).random((2, 133, 80)) < 0.5
    resize = jax.jit(resize_nearest, static_argnums=1)
    for size in ((5, 3), (42, 25), (140, 171)):
        wanted = torch.nn.functional.interpolate(torch.from_numpy(mask)[None].float(), size)[0]
        np.testing.assert_array_equal(resize(mask, size), wanted.bool())
    with unchecked():
        constant = jax.jit(lambda: resize_nearest(mask, (140, 171)))()
    np.testing.assert_array_equal(constant, wanted.bool())


def test_the_grid_is_that_of_the_feature_map():
    for dilate in (False, True):
        for layers in ((1, 1, 1), (1, 1, 1, 1)):
            model = dataclasses.replace(helper.MODEL, layers=layers, dilate=dilate)
            for side in (64, 97):
                backbone = ResNet(layers, 4, dilate=dilate)
                images = jax.ShapeDtypeStruct((1, side, side, 3), jnp.float32)
                maps, _ = jax.eval_shape(backbone.init_with_output, jax.random.key(0), images)
                assert maps[-1].shape[1] == -(-side // model.stride)


def test_a_dilated_stage_convolves_as_densely_as_if_it_had_no_stride():
    """Every second cell of a dilated block is what the same block gives with its stride."""
    x = jnp.asarray(np.random.default_rng(0).normal(size=(1, 12, 12, 8)), jnp.float32)
    layer = Conv(4, 3, dilation=2)
    variables = {'params': drawn(layer, x)}
    torch = pytest.importorskip('torch')
    wanted = torch.nn.functional.conv2d(
        torch.from_numpy(np.array(x.transpose(0, 3, 1, 2))),
        torch.from_numpy(np.array(variables['params']['kernel'].transpose(3, 2, 0, 1))),
        padding=2,
        dilation=2,
    )
    np.testing.assert_allclose(layer.apply(variables, x).transpose(0, 3, 1, 2), wanted, atol=1e-5)

    calls = []
    Stage(lambda **fields: calls.append(fields) or (lambda x: x), 3, 2, dilate=True).apply({}, x)
    assert [(c['stride'], c['dilation']) for c in calls] == [(1, 1), (1, 2), (1, 2)]


@pytest.mark.slow
def test_gradients_stop_where_the_backbone_is_frozen():
    small = {'layers': (1, 1), 'depth': 1, 'decoder_depth': 2}
    model = dataclasses.replace(helper.MODEL, frozen_stages=2, **small)
    images = images_like(2, 32, 48, 3)
    mask = jnp.asarray(np.arange(48) < [[[40]], [[48]]]).repeat(32, axis=1)

    def loss(params):
        outputs = model.apply({'params': params}, images, mask)
        return sum((x**2).sum() for x in outputs.values())

    grads = flatten_dict(jax.jit(jax.grad(loss))(drawn(model, images, mask)), sep='/')
    still = {path for path, g in grads.items() if not np.abs(g).max()}
    frozen = ('backbone/root/', 'backbone/stage_0/')
    assert still == {
        path
        for path in grads
        if path.startswith(frozen) or (path.startswith('backbone/') and 'norm' in path)
    }
    assert all(np.isfinite(g).all() for g in grads.values())


def test_mistakes():
    with pytest.raises(UserError, match=r"'R5'.*'R50'"):
        detr.variant('R5')
    with pytest.raises(UserError, match=r'resnet\.norm'):
        detr.Model(backbone_norm='batch')
    with pytest.raises(UserError, match=r'num_queries.*1'):
        detr.Model(num_queries=0)
    with pytest.raises(UserError, match='layers'):
        helper.sizes(detr.Model(num_classes=3, layers=(1, 0)))
