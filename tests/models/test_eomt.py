"""EoMT: outputs of transformers, what masked attention changes, what queries see."""

import dataclasses
import tempfile

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import eomt as helper
from helpers.pictures import drawn, images_like

from vit_jax import interop
from vit_jax.errors import UserError
from vit_jax.models import eomt
from vit_jax.models.eomt import Model, query_mask

MODEL = Model(
    num_classes=3,
    **{'patch_size': 4, 'width': 16, 'depth': 3, 'mlp_dim': 24, 'num_heads': 2, 'registers': 1},
    **{'num_queries': 4, 'query_blocks': 2, 'upscale': 1, 'posemb': 'sincos2d'},
)
FORMS = {
    'DINOv2': {},
    'SwiGLU': {'use_swiglu_ffn': True, 'mlp_ratio': 3},
    'DINOv3': {'dinov3': True},
}


@pytest.mark.slow
@pytest.mark.parity
@pytest.mark.parametrize(
    'form', [n if n == 'DINOv2' else pytest.param(n, marks=pytest.mark.long) for n in FORMS]
)
def test_outputs_equal_those_of_transformers(form):
    """With and without masked attention."""
    torch = pytest.importorskip('torch')
    pytest.importorskip('transformers')
    theirs = helper.reference(**FORMS[form])
    with tempfile.TemporaryDirectory() as folder:
        theirs.save_pretrained(folder)
        trained = interop.read(folder)
    (images,) = helper.TASK.inputs(helper.batch())

    @jax.jit
    def run(params):
        def apply(**options):
            rngs = {'mask': jax.random.key(0)}
            return trained.model.apply({'params': params}, images, rngs=rngs, **options)

        return apply(), apply(mask_probs=jnp.ones(2))

    with jax.default_matmul_precision('highest'):
        plain, masked = run(trained.params)
    pixels = helper.inputs(helper.batch())['pixel_values']
    found = {}
    for prob, ours in ((0, plain), (1, masked)):
        theirs.attn_mask_probs.fill_(prob)
        with torch.no_grad():
            found[prob] = expected = theirs(pixels)
        np.testing.assert_allclose(ours['logits'], expected.class_queries_logits, atol=1e-5)
        masks = expected.masks_queries_logits.numpy()
        np.testing.assert_allclose(ours['masks'], masks, atol=2e-6 * np.abs(masks).max())
    assert np.abs(found[0].masks_queries_logits - found[1].masks_queries_logits).max() > 0.1


@pytest.fixture(scope='module')
def params():
    return drawn(MODEL, images_like(2, 12, 16, 3))


def outputs_of(model, params, images, probs=None, seed=0, **options):
    options = {'rngs': {'mask': jax.random.key(seed)}, **options}
    probs = None if probs is None else jnp.asarray(probs, jnp.float32)
    return model.apply({'params': params}, images, mask_probs=probs, **options)


@pytest.mark.slow
def test_shapes_and_intermediate_predictions(params):
    images = images_like(2, 12, 16, 3)
    found = jax.eval_shape(lambda p: outputs_of(MODEL, p, images, (1.0, 0.5)), params)
    shapes = {name: x.shape for name, x in found.items()}
    assert shapes == {
        'logits': (2, 4, 4),
        'masks': (2, 4, 6, 8),
        'aux_logits': (2, 2, 4, 4),
        'aux_masks': (2, 2, 4, 6, 8),
    }
    assert {x.dtype for x in found.values()} == {jnp.dtype('float32')}
    plain = jax.eval_shape(lambda p: outputs_of(MODEL, p, images), params)
    assert plain.keys() == {'logits', 'masks'}


@pytest.mark.slow
def test_masks_act_with_their_probability_block_by_block(params):
    images = images_like(8, 12, 16, 3)

    @jax.jit
    def run(params):
        def both(probs, seed=0):
            return outputs_of(MODEL, params, images, probs, seed)

        plain = outputs_of(MODEL, params, images)
        return plain, both((0, 0)), both((1, 1)), both((0, 1)), both((0.5, 0)), both((0.5, 0), 1)

    plain, none, every, last, half, other = jax.device_get(run(params))
    np.testing.assert_allclose(none['masks'], plain['masks'], atol=1e-5)
    first = none['aux_masks'][:, 0]  # before any block that may be masked
    for found in (every, last, half):
        np.testing.assert_allclose(found['aux_masks'][:, 0], first, atol=1e-5)
    # A mask in the last block does not change the prediction before it.
    np.testing.assert_allclose(last['aux_masks'][:, 1], none['aux_masks'][:, 1], atol=1e-5)
    assert np.abs(last['masks'] - none['masks']).max() > 1e-2
    assert np.abs(every['masks'] - last['masks']).max() > 1e-2
    assert np.abs(half['masks'] - other['masks']).max() > 1e-3  # other keys, other queries


def test_only_queries_are_masked_and_only_among_patches():
    inside = np.zeros((1, 2, 3), bool)
    inside[0, 0, 1] = True
    mask = np.asarray(query_mask(jnp.asarray(inside), 2))[0, 0]
    assert mask.shape == (7, 7)
    assert (np.argwhere(~mask) == [[2, 4], [2, 6], [3, 4], [3, 5], [3, 6]]).all()


@pytest.mark.long
@pytest.mark.slow
def test_queries_leave_the_first_blocks_alone(params):
    """Patches see no queries before the last blocks, so a ViT's first blocks can be shared."""
    images = images_like(1, 12, 16, 3)
    other = {**params, 'query_embed': -params['query_embed']}

    @jax.jit
    def states(params):
        return MODEL.hidden_states({'params': params}, images)[1]

    before, after = states(params), states(other)
    assert [state.prefix for state in before] == [2, 2, 6, 6]
    for number, same in enumerate((True, True, False, False)):
        patches = [x[number].tokens[:, x[number].prefix :] for x in (before, after)]
        assert np.allclose(*patches, atol=1e-6) == same, number


@pytest.mark.long
@pytest.mark.slow
def test_attention_of_queries_with_and_without_masks(params):
    images = images_like(1, 12, 16, 3)
    (_, kept), found = jax.jit(
        lambda p: (outputs_of(MODEL, p, images, mutable=['intermediates']), ())
    )(params)
    del found
    maps = MODEL.attention_maps(kept['intermediates'], images)
    assert [m.name for m in maps] == [
        'encoder/block_0',
        *('joint/block_1', 'joint/block_2'),
        *('masked/block_1/cross', 'masked/block_2/cross'),
        *('queries/block_1/cross', 'queries/block_2/cross'),
    ]
    weights = {m.name: np.asarray(m.weights) for m in maps}
    for found in weights.values():
        np.testing.assert_allclose(found.sum(-1), 1, atol=1e-5)
    inside = np.asarray(kept['intermediates']['inside'][1])  # [1 Q N]
    masked = weights['masked/block_2/cross'][0, :, :, 6:]
    assert not masked[:, ~inside[0]].any() and masked[:, inside[0]].all()
    assert weights['queries/block_2/cross'].all()


@pytest.mark.slow
def test_part_of_it_is_a_vit(params):
    fields, names = MODEL.transferable()
    assert fields.pop('name') == 'vit'
    vit = eomt.vit.Model(**fields)
    images = images_like(1, 12, 16, 3)
    expected = jax.eval_shape(vit.init, jax.random.key(0), images)['params']
    own = {name: tree for name, tree in params.items() if name in names}
    assert jax.tree.map(jnp.shape, own) == jax.tree.map(jnp.shape, expected)


@pytest.mark.parametrize(
    ('change', 'message'),
    [
        ({'query_blocks': 4}, 'query_blocks=4.*depth=3'),
        ({'num_queries': 0}, r'num_queries\b.*\b0\b'),
        ({'scan': True}, 'scan'),
        ({'positions': 'relative'}, r'positions\.kind.*relative'),
    ],
)
def test_it_refuses_fields_without_effect(change, message):
    with pytest.raises(UserError, match=message):
        dataclasses.replace(MODEL, **change)
