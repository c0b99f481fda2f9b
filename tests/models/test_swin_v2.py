"""Swin v2: exact sizes, scaled cosines, coordinates of positions, and windows of a fixed layout."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.pictures import drawn, images_like

from vit_jax.errors import UserError
from vit_jax.models import swin_v2
from vit_jax.models.swin_v2 import CosineWindowAttention, Model, log_coordinates, variant

TINY = {'patch_size': 2, 'width': 8, 'depths': (2, 1), 'num_heads': (2, 4), 'window': 3}


def count(model, *size):
    images = jax.ShapeDtypeStruct((1, *size, 3), jnp.float32)
    variables = jax.eval_shape(model.init, jax.random.key(0), images)
    return sum(leaf.size for leaf in jax.tree.leaves(variables))


def closed_form(model):
    """Parameters: queries, values and merging as in section 3, an MLP of 512 for each block."""
    width = model.width
    total = (model.patch_size**2 * 3 + 1) * width + 2 * width
    for i, (depth, heads) in enumerate(zip(model.depths, model.num_heads, strict=True)):
        positions = 3 * 512 + 512 * heads + heads
        total += depth * (12 * width**2 + 12 * width + positions)
        if i + 1 < len(model.depths):
            total += 8 * width**2 + 4 * width
            width *= 2
    return total + 2 * width + (width + 1) * model.num_classes


@pytest.mark.parametrize(
    ('name', 'params'),
    [('T', 28_347_154), ('S', 49_728_418), ('B', 87_918_816), ('L/w12', 196_739_932)],
)
def test_parameters_are_those_of_the_authors(name, params):
    assert closed_form(Model(num_classes=1000, **variant(name))) == params


@pytest.mark.slow
@pytest.mark.parametrize('name', ['mu', pytest.param('T/w16', marks=pytest.mark.long)])
def test_models_have_the_parameters_of_the_closed_form(name):
    model = Model(num_classes=1000, **variant(name))
    assert count(model, 64, 64) == closed_form(model)


def test_the_window_is_8_unless_named():
    assert variant('B')['window'] == 8 and variant('B/w16')['window'] == 16


def test_coordinates_are_log_spaced():
    """Equation 4, with the ends of the windows of the earlier training at sign(8) log2(9) / 3."""
    table = log_coordinates(4, 4)
    assert table.shape == (7, 7, 2)
    np.testing.assert_allclose(table[6, 0], [np.log2(9) / 3, -np.log2(9) / 3], rtol=1e-6)
    np.testing.assert_array_equal(table[3, 3], [0, 0])
    np.testing.assert_allclose(table[4, 3, 0], np.log2(8 / 3 + 1) / 3, rtol=1e-6)
    np.testing.assert_allclose(log_coordinates(7, 4)[3:-3, 3:-3], table, rtol=1e-6)


@pytest.mark.slow
def test_scores_are_cosines_whose_scale_is_at_most_100():
    """Longer queries, or scales above the limit, change nothing."""
    layer, x = CosineWindowAttention(num_heads=2, window=3), images_like(1, 6, 6, 8)
    params = drawn(layer, x)
    params |= {name: jnp.zeros((2, 4)) for name in ('query_bias', 'value_bias')}
    apply = jax.jit(lambda params: layer.apply({'params': params}, x))

    def changed(scale, length=1.0):
        kernel = params['qkv']['kernel'].at[:, 0].multiply(length)
        new = {'qkv': {'kernel': kernel}, 'logit_scale': jnp.full(2, np.log(scale))}
        return apply(params | new)

    np.testing.assert_allclose(changed(20), changed(20, length=3.0), atol=1e-5)
    np.testing.assert_allclose(changed(100), changed(1000), atol=1e-6)
    assert np.abs(changed(20) - changed(100)).max() > 1e-3


@pytest.mark.slow
@pytest.mark.long
def test_blocks_start_as_the_identity_and_learn():
    """The norms at the end of the branches start at zero; their gradients do not."""
    model, images = Model(num_classes=3, **TINY), images_like(1, 13, 22, 3)

    @functools.partial(jax.jit, static_argnums=1)
    def gradient(params, remat):
        made = Model(num_classes=3, remat=remat, **TINY)
        return jax.grad(lambda p: (made.apply({'params': p}, images)['logits'] ** 2).sum())(params)

    params = jax.jit(model.init)(jax.random.key(0), images)['params']
    block = params['stage_0']['block_1']
    assert not block['norm1']['scale'].any() and not block['norm2']['scale'].any()
    grads = gradient(params, False)['stage_0']['block_1']
    assert all(np.abs(grads[norm]['scale']).max() > 0 for norm in ('norm1', 'norm2'))
    noisy = drawn(model, images)
    plain, again = gradient(noisy, False), gradient(noisy, 'names')
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-4), plain, again)
    assert all(np.abs(leaf).max() > 0 for leaf in jax.tree.leaves(plain))


@pytest.mark.slow
def test_windows_of_a_size_of_images_stay_for_others():
    """On a map of 8 x 8 tokens, where images of 8 pixels have 2 x 2, which is one window."""
    found = {}
    for image_size in (None, 8):
        model = Model(**{**TINY, 'depths': (1, 2)}, image_size=image_size)
        images = jnp.ones((1, 32, 32, 3))
        variables = {'params': drawn(model, images)}
        _, kept = jax.jit(functools.partial(model.apply, mutable='intermediates'))(
            variables, images
        )
        _, *maps = model.attention_maps(kept['intermediates'], images)
        plain, shifted = (np.asarray(each.weights)[0, 0] > 0 for each in maps)
        found[image_size] = plain[0].sum(), (plain != shifted).any()
    assert found == {None: (9, True), 8: (4, False)}


def test_parameters_fit_any_window():
    params, notes = Model(**TINY).resize_params({'a': np.ones(2)}, (8, 8), (16, 16))
    assert notes == [] and list(params) == ['a']


@pytest.mark.parametrize(
    ('fields', 'message'),
    [
        ({'pretrained_windows': (3,)}, 'each of 2 stages'),
        ({'pretrained_windows': (3, -1)}, 'each of 2 stages'),
        ({'image_size': 2}, 'at least 4'),
        ({'window': 0}, 'window.*at least 1'),
    ],
)
def test_what_no_model_has_is_refused(fields, message):
    with pytest.raises(UserError, match=message):
        swin_v2.Model(**TINY | fields)
