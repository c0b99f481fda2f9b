"""MLP-Mixer: exact parameter counts, mixing along each axis alone, pictures, other sizes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import precision
from helpers.pictures import count, drawn, images_like, shapes, spec

from vit_jax.errors import UserError
from vit_jax.models.mixer import VARIANTS, MixerLayer, Model, variant
from vit_jax.profiling import flops

SIZES = {'width': 8, 'depth': 2, 'tokens_mlp_dim': 4, 'channels_mlp_dim': 16}
TINY = Model(num_classes=3, patch_size=4, **SIZES)
IMAGES = spec(1, 8, 12, 3)
# With 1000 classes, as timm counts them, which has no H; and table 1's millions, without a head.
COUNTS = {
    'S/32': (19_104_624, 19),
    'S/16': (18_528_264, 18),
    'B/32': (60_293_428, 60),
    'B/16': (59_880_472, 59),
    'L/32': (206_939_264, 206),
    'L/16': (208_196_168, 207),
    'H/14': (432_350_952, 431),
}


@pytest.mark.parametrize('name', COUNTS)
def test_parameter_counts_are_exact(name):
    model = Model(num_classes=1000, scan=True, **variant(name))
    found, published = COUNTS[name]
    assert count(shapes(model)) == found
    assert round((found - 1000 * (model.width + 1)) / 1e6) == published


def test_every_shape_but_the_smallest_has_a_count():
    assert {name[0] for name in COUNTS} == VARIANTS.keys() - {'mu'}


def test_flops_are_those_of_the_dense_layers():
    model = Model(num_classes=1000, scan=True, **variant('B/16'))
    patches = 14 * 14
    macs = patches * 3 * 16 * 16 * 768 + 1000 * 768
    macs += 12 * (2 * 768 * patches * 384 + 2 * patches * 768 * 3072)
    assert flops.forward_flops(model, spec(1, 224, 224, 3)) == 2 * macs


def test_scanned_blocks_compute_the_same():
    params, images = drawn(TINY, IMAGES), images_like(2, 8, 12, 3)
    blocks = [params['encoder'].pop(f'block_{i}') for i in range(2)]
    scanned = {**params, 'encoder': dict(params['encoder'])}
    scanned['encoder']['blocks'] = jax.tree.map(lambda *x: np.stack(x), *blocks)
    params['encoder'] |= {f'block_{i}': block for i, block in enumerate(blocks)}
    outputs, states = jax.jit(TINY.hidden_states)({'params': params}, images)
    found = jax.jit(TINY.clone(scan=True).apply)({'params': scanned}, images)
    np.testing.assert_allclose(found['logits'], outputs['logits'], rtol=1e-5, atol=1e-6)
    assert [state.name for state in states] == [
        'embedding',
        *(f'encoder/block_{i}' for i in (0, 1)),
    ]
    assert states[-1].grid == (2, 3) and states[-1].tokens.shape == (2, 6, 8)


@pytest.mark.parametrize('branch', ['token_mixing', 'channel_mixing'])
def test_a_branch_mixes_along_one_axis(branch):
    block, x = MixerLayer(4, 16), images_like(1, 6, 8)
    params = drawn(block, x)
    other = {'token_mixing': 'channel_mixing', 'channel_mixing': 'token_mixing'}[branch]
    params[other] = jax.tree.map(np.zeros_like, params[other])
    params = jax.tree.map(jnp.asarray, params)
    jacobian = jax.jit(jax.jacrev(lambda x: block.apply({'params': params}, x)[0]))(x)[:, :, 0]
    reached = np.abs(jacobian) > 0
    patch, channel = 2, 5
    if branch == 'token_mixing':  # of channels, only the layer norm's own statistics
        assert reached[patch, channel, :, channel].all()
    else:
        assert reached[patch, channel, patch].all()
        assert not reached[patch, channel, [0, 1, 3, 4, 5]].any()


def test_gradients_reach_every_parameter():
    precision.assert_gradients_reach_all(TINY, drawn(TINY, IMAGES), images_like(2, 8, 12, 3))


def test_the_last_biases_of_mixing_patches_have_no_effect():
    # They move all channels of a token alike, and every layer norm subtracts that.
    params, images = drawn(TINY, IMAGES), images_like(2, 8, 12, 3)
    apply = jax.jit(TINY.apply)
    expected = apply({'params': params}, images)['logits']
    params['encoder']['block_0']['token_mixing']['fc2']['bias'] += 3.0
    found = apply({'params': params}, images)['logits']
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)


def test_pictures_are_those_of_the_units_that_mix_patches():
    params = drawn(TINY, IMAGES)
    first, _, filters = TINY.parameter_pictures(params, (8, 12))
    assert first.pictures.shape == (4, 2, 3) and filters.name == 'patch_embed/kernel'
    kernel = params['encoder']['block_0']['token_mixing']['fc1']['kernel']
    np.testing.assert_array_equal(first.pictures[1, 1], kernel[3:, 1])


def test_other_grids_are_refused():
    params = drawn(TINY, IMAGES)
    assert TINY.resize_params(params, None, (8, 12)) == (params, [])
    with pytest.raises(UserError, match=r'16 x 8 pixels have 4 x 2 patches.*weights for 6 patches'):
        TINY.resize_params(params, None, (8, 16))
    with pytest.raises(UserError, match=r'have 2 x 3 patches.*weights for 3 x 2'):
        TINY.resize_params(params, (8, 12), (12, 8))


@pytest.mark.parametrize(
    ('call', 'message'),
    [
        (lambda: variant('T/16'), "unknown Mixer variant 'T'"),
        (lambda: variant('B'), "'B'.*B/16"),
        (lambda: Model(tokens_mlp_dim=0), r'tokens_mlp_dim .* 1, not 0'),
        (lambda: Model(gelu='exact'), "block.gelu 'exact'"),
    ],
)
def test_mistakes(call, message):
    with pytest.raises(UserError, match=message):
        call()
