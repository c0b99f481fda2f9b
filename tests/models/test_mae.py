"""MAE: exact parameter counts, the names of a ViT, masks, and what they save."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.pictures import count

from vit_jax.errors import UserError
from vit_jax.models import mae, vit
from vit_jax.models.mae import Model, fixed_positions
from vit_jax.nn.blocks import Block
from vit_jax.nn.stochastic import example_positions
from vit_jax.profiling.flops import count_flops
from vit_jax.tree_paths import param_paths, path_name

DECODER = {'decoder_width': 8, 'decoder_depth': 1, 'decoder_mlp_dim': 16, 'decoder_heads': 2}
TINY = {'patch_size': 4, 'width': 16, 'depth': 1, 'mlp_dim': 32, 'num_heads': 2}
IMAGES = jnp.asarray(np.random.default_rng(0).normal(size=(3, 16, 24, 3)), jnp.float32)
RNGS = {'mask': jax.random.key(1)}

# Of all arrays, and of those that learn; of transformers.ViTMAEForPreTraining, whose tables of
# positions are parameters too.
COUNTS = {
    'B/16': (111_907_840, 111_655_680),
    'L/16': (329_541_888, 329_239_296),
    'H/14': (657_074_508, None),
}


def init(model, images):
    return model.init({'params': jax.random.key(0), **RNGS}, images)['params']


def shapes(model, size=224):
    return jax.eval_shape(lambda: init(model, jnp.zeros((1, size, size, 3))))


@pytest.fixture(scope='module')
def model():
    return Model(**TINY, **DECODER)


@pytest.fixture(scope='module')
def params(model):
    return jax.jit(lambda: init(model, IMAGES))()


@pytest.fixture(scope='module')
def apply(model):
    """The outputs for a key of the stream 'mask' and the examples' numbers."""

    @jax.jit
    def apply(params, images, key, numbers):
        with example_positions(numbers):
            return model.apply({'params': params}, images, rngs={'mask': key})

    return apply


@pytest.mark.slow
@pytest.mark.parametrize('name', COUNTS)
def test_parameter_counts_are_exact(name):
    params = shapes(Model(scan=True, **vit.variant(name)))
    tables = [leaf for path, leaf in param_paths(params).items() if path.endswith('pos_embed')]
    total, learned = COUNTS[name]
    assert count(params) == total
    assert learned is None or count(params) - count(tables) == learned
    if name == 'B/16':
        assert count({part: params[part] for part in mae.ENCODER}) == 85_798_656
        assert count(params['decoder']) == 26_109_184


def test_the_encoder_has_the_parameters_of_a_vit(model):
    keywords, parts = model.transferable()
    encoder = vit.Model(**{k: v for k, v in keywords.items() if k != 'name'})
    expected = jax.eval_shape(lambda: encoder.init(jax.random.key(0), IMAGES))['params']
    found = jax.eval_shape(lambda: init(model, IMAGES))
    assert {part: found[part] for part in parts} == expected
    assert found.keys() - set(parts) == {'decoder'}


@pytest.mark.slow
def test_positions_are_fixed_sines_and_cosines(model, params):
    """'x goes first': half of the features are of the column, [sin cos], at 10000^(-4i / D)."""
    table = fixed_positions((4, 6), 16)
    frequency = 10_000 ** (-4 * np.arange(4) / 16)
    row, column = 3, 5
    expected = [f(place * frequency) for place in (column, row) for f in (np.sin, np.cos)]
    np.testing.assert_allclose(table[1 + 6 * row + column], np.concatenate(expected), atol=1e-6)
    assert not table[0].any()
    np.testing.assert_array_equal(params['pos_embed'][0], table)

    def loss(params):
        return jnp.square(model.apply({'params': params}, IMAGES, rngs=RNGS)['patches']).sum()

    grads = jax.jit(jax.grad(loss))(params)
    still = {path for path, leaf in param_paths(grads).items() if not np.any(leaf)}
    assert still == {'pos_embed', 'decoder/pos_embed'}


def test_the_encoder_never_sees_what_is_hidden(params, apply):
    numbers = jnp.arange(3)
    before = apply(params, IMAGES, RNGS['mask'], numbers)
    assert before['tokens'].shape == (3, 1 + 6, 16) and before['patches'].shape == (3, 24, 48)
    np.testing.assert_array_equal(before['mask'].sum(1), 18)
    hidden = np.kron(np.asarray(before['mask']).reshape(3, 4, 6), np.ones((4, 4)))[..., None]
    after = apply(params, jnp.where(hidden > 0, 9.0, IMAGES), RNGS['mask'], numbers)
    np.testing.assert_array_equal(before['patches'], after['patches'])
    seen = apply(params, jnp.where(hidden > 0, IMAGES, 9.0), RNGS['mask'], numbers)
    assert (np.abs(before['patches'] - seen['patches']).max(axis=2) > 1e-6).all()


def test_masks_belong_to_the_key_and_the_example(params, apply):
    masks = [
        np.asarray(apply(params, IMAGES, jax.random.key(seed), jnp.asarray(numbers))['mask'])
        for seed, numbers in ((1, (0, 1, 2)), (1, (7, 2, 0)), (2, (0, 1, 2)))
    ]
    np.testing.assert_array_equal(masks[0][[2, 0]], masks[1][[1, 2]])
    assert (masks[0][0] != masks[0][1]).any() and (masks[0] != masks[2]).any()


@pytest.mark.slow
def test_a_scanned_model_is_the_same(params, apply):
    scanned = Model(**TINY, **DECODER, scan=True)
    decoder = params['decoder']['transformer']
    stacked = params | {
        'encoder': {
            'blocks': jax.tree.map(lambda x: x[None], params['encoder']['block_0']),
            'norm': params['encoder']['norm'],
        },
        'decoder': params['decoder']
        | {
            'transformer': {
                'blocks': jax.tree.map(lambda x: x[None], decoder['block_0']),
                'norm': decoder['norm'],
            }
        },
    }
    one = apply(params, IMAGES, RNGS['mask'], jnp.arange(3))
    other = jax.jit(scanned.apply)({'params': stacked}, IMAGES, rngs=RNGS)
    np.testing.assert_allclose(one['patches'], other['patches'], atol=1e-5)


def test_the_encoder_costs_a_quarter():
    """Of the same encoder on all patches; a little less for the products of the attention."""
    model = Model(**vit.variant('B/16'), scan=True)
    images = jax.ShapeDtypeStruct((1, 224, 224, 3), jnp.float32)

    def flops(seen):
        def encode(params, images):
            return model.apply(
                {'params': params}, images, method=lambda model, x: model.vit(x, seen, False)
            )

        return count_flops(encode, shapes(model), images)

    assert 0.23 < flops(jnp.zeros((1, 49), int)) / flops(None) < 0.26


def test_positions_of_another_size_are_computed(model, params):
    resized, notes = model.resize_params(params, (16, 24), (32, 32))
    fresh = jax.eval_shape(lambda: init(model, jnp.zeros((1, 32, 32, 3))))
    assert jax.tree.map(jnp.shape, resized) == jax.tree.map(jnp.shape, fresh)
    np.testing.assert_array_equal(resized['pos_embed'][0], fixed_positions((8, 8), 16))
    assert [note.partition(':')[0] for note in notes] == ['pos_embed', 'decoder/pos_embed']
    assert model.resize_params(params, None, (16, 24))[1] == []
    turned, _ = model.resize_params(params, None, (24, 16))
    np.testing.assert_array_equal(turned['pos_embed'][0], fixed_positions((6, 4), 16))


@pytest.mark.parametrize(
    ('fields', 'message'),
    [
        ({'mask_ratio': 1.0}, r'mask_ratio .* 0 .* 1, not 1.0'),
        ({'mask_ratio': 0.99}, r'mask_ratio 0.99 .* 24'),
        ({'decoder_heads': 3}, r'decoder_width 8 .* decoder_heads 3'),
        ({'gelu': 'relu'}, "block.gelu 'relu'"),
    ],
)
def test_mistakes(fields, message):
    with pytest.raises(UserError, match=message):
        jax.eval_shape(lambda: init(Model(**{**TINY, **DECODER, **fields}), IMAGES))


def test_other_positions_are_a_mistake(model, params):
    with pytest.raises(UserError, match=r'pos_embed.*25'):
        jax.eval_shape(lambda p: model.apply({'params': p}, IMAGES[:, :8], rngs=RNGS), params)


@pytest.mark.parametrize(('residual', 'sums'), [(None, 'bfloat16'), ('float32', 'float32')])
def test_both_residual_streams_have_the_dtype_asked_for(residual, sums):
    model = Model(**TINY, **DECODER, dtype='bfloat16', residual_dtype=residual)
    params = jax.eval_shape(lambda: init(model, IMAGES))
    is_block = lambda module, _: isinstance(module, Block)  # noqa: E731

    def call(params):
        options = {'rngs': RNGS, 'capture_intermediates': is_block}
        return model.apply({'params': params}, IMAGES, **options)[1]

    found = jax.tree_util.tree_leaves_with_path(jax.eval_shape(call, params))
    dtypes = [x.dtype for path, x in found if '__call__' in path_name(path)]
    assert dtypes == [jnp.dtype(sums)] * 2
