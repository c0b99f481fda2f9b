"""Encoder blocks: the equations, and that scan and recomputation change nothing."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from vit_jax.nn.blocks import GELUS, Block, BlockOptions, Encoder, Mlp, erf_gelu, quick_gelu
from vit_jax.nn.multi_head import MultiHeadAttention
from vit_jax.nn.norms import LayerNorm
from vit_jax.tree_paths import path_name

BATCH, TOKENS, WIDTH, DEPTH = 4, 6, 16, 2


def random(*shape, seed=0):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


def perturbed(layer, x):
    shapes = jax.eval_shape(layer.init, jax.random.key(0), x)['params']
    rng = np.random.default_rng(1)

    def draw(path, p):
        name = path[-1].key
        deviation = 0.1 if name in ('bias', 'scale') else 0.25
        return np.float32(name == 'scale') + deviation * rng.standard_normal(p.shape, np.float32)

    return jax.tree_util.tree_map_with_path(draw, shapes)


def encoder(**fields):
    block = functools.partial(
        Block, num_heads=2, mlp_dim=32, dropout=fields.pop('dropout', 0.0), gelu='erf'
    )
    return Encoder(block, fields.pop('depth', DEPTH), **fields)


def stacked(params):
    """Parameters of the unrolled encoder as the scanned one has them."""
    blocks = [params[f'block_{i}'] for i in range(DEPTH)]
    return {'blocks': jax.tree.map(lambda *x: np.stack(x), *blocks), 'norm': params['norm']}


def loss_and_grads(layer, params, x, **kwargs):
    def loss(params):
        return jnp.sum(jnp.sin(layer.apply({'params': params}, x, **kwargs)))

    return jax.jit(jax.value_and_grad(loss))(params)


def assert_close(a, b):
    jax.tree.map(functools.partial(np.testing.assert_allclose, atol=2e-5, rtol=1e-4), a, b)


def test_a_parallel_block_reads_one_norm():
    """Dehghani et al., 2023, section 2: x + MSA(LN(x)) + MLP(LN(x))."""
    x = random(BATCH, TOKENS, WIDTH)
    options = BlockOptions(norm_place='parallel', layer_scale=0.5)
    block = Block(num_heads=2, mlp_dim=32, options=options)
    params = jax.tree.map(jnp.asarray, perturbed(block, x))
    assert 'norm2' not in params
    normed = LayerNorm().apply({'params': params['norm1']}, x)
    attention = MultiHeadAttention(2).apply({'params': params['attention']}, normed)
    mlp = Mlp(32).apply({'params': params['mlp']}, normed)
    scales = params['layer_scale1'], params['layer_scale2']
    expected = x + attention * scales[0] + mlp * scales[1]
    assert_close(block.apply({'params': params}, x), expected)


def test_block_is_its_two_equations():
    x = random(BATCH, TOKENS, WIDTH)
    block = Block(num_heads=2, mlp_dim=32)
    params = perturbed(block, x)

    @jax.jit
    def equations(params, x):
        def norm(name, z):
            mean, var = z.mean(-1, keepdims=True), z.var(-1, keepdims=True)
            return (z - mean) / jnp.sqrt(var + 1e-6) * params[name]['scale'] + params[name]['bias']

        attention, mlp = MultiHeadAttention(2), Mlp(32)
        z = attention.apply({'params': params['attention']}, norm('norm1', x)) + x
        return mlp.apply({'params': params['mlp']}, norm('norm2', z)) + z

    found = jax.jit(block.apply)({'params': params}, x)
    np.testing.assert_allclose(found, equations(params, x), atol=2e-5)


@pytest.mark.parametrize(
    ('name', 'plain'), [('tanh', jax.nn.gelu), ('erf', erf_gelu), ('quick', quick_gelu)]
)
def test_a_gelu_keeps_its_input_alone_for_its_gradient(name, plain):
    x = jnp.linspace(-5, 5, 101)
    out, pull = jax.vjp(GELUS[name], x)
    np.testing.assert_array_equal(out, plain(x))
    np.testing.assert_allclose(pull(x)[0], jax.vjp(plain, x)[1](x)[0], atol=1e-6)
    kept = [leaf for leaf in jax.tree.leaves(pull) if leaf.size > 1]
    assert len(kept) == 1
    np.testing.assert_array_equal(kept[0], x)


@pytest.mark.parametrize(('gelu', 'at_one'), [('erf', 0.8413447), ('tanh', 0.8411920)])
def test_gelu_is_the_one_asked_for(gelu, at_one):
    mlp = Mlp(1, gelu=gelu)
    one = {'kernel': jnp.ones((1, 1)), 'bias': jnp.zeros(1)}
    y = mlp.apply({'params': {'fc1': one, 'fc2': one}}, jnp.ones((1, 1)))
    assert float(y[0, 0]) == pytest.approx(at_one, abs=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize('remat', [False, pytest.param('names', marks=pytest.mark.long)])
def test_scanned_encoder_equals_the_unrolled_one(remat):
    x = random(BATCH, TOKENS, WIDTH)
    params = perturbed(encoder(), x)
    loss, grads = loss_and_grads(encoder(), params, x)
    scanned = loss_and_grads(encoder(scan=True, remat=remat), stacked(params), x)
    assert_close(scanned, (loss, stacked(grads)))


@pytest.mark.slow
@pytest.mark.parametrize(
    ('scan', 'remat'),
    [
        (True, 'names'),
        pytest.param(True, 'dots', marks=pytest.mark.long),
        pytest.param(False, 'dots', marks=pytest.mark.long),
        pytest.param(True, 'nothing', marks=pytest.mark.long),
        pytest.param(True, 'offload', marks=pytest.mark.long),
        pytest.param(False, 'offload', marks=pytest.mark.long),
    ],
)
def test_recomputation_changes_neither_values_nor_gradients(scan, remat):
    x = random(BATCH, TOKENS, WIDTH)
    fields = {'depth': 2, 'scan': scan, 'drop_path': 0.5}
    plain, remat = encoder(**fields), encoder(**fields, remat=remat)
    params = perturbed(plain, x)
    shapes = jax.eval_shape(remat.init, jax.random.key(0), x)['params']
    assert jax.tree.structure(params) == jax.tree.structure(shapes)
    kwargs = {'train': True, 'rngs': {'dropout': jax.random.key(1)}}
    assert_close(
        loss_and_grads(plain, params, x, **kwargs), loss_and_grads(remat, params, x, **kwargs)
    )


@pytest.mark.slow
def test_recomputation_keeps_fewer_activations():
    x = random(16, 64, WIDTH)
    params = perturbed(encoder(depth=3, scan=True), x)

    def temporary_bytes(layer):
        grad = jax.jit(jax.grad(lambda p: jnp.sum(layer.apply({'params': p}, x) ** 2)))
        return grad.lower(params).compile().memory_analysis().temp_size_in_bytes

    plain, remat = (temporary_bytes(encoder(depth=3, scan=True, remat=r)) for r in (False, True))
    assert remat < 0.6 * plain


@pytest.mark.slow
@pytest.mark.parametrize('scan', [False, True])
def test_drop_path_spares_the_first_block_and_rises_to_the_last(scan):
    """With branches of a constant 1, an example's sum counts the branches kept, rescaled."""
    examples = 4000
    layer = encoder(scan=scan, depth=3, drop_path=0.6)
    x = jnp.zeros((examples, 1, WIDTH))
    params = jax.eval_shape(layer.init, jax.random.key(0), x[:1])['params']

    def only_output_biases(path, leaf):
        value = path_name(path).endswith(('out/bias', 'fc2/bias'))
        return np.full(leaf.shape, value, leaf.dtype)

    params = jax.tree_util.tree_map_with_path(only_output_biases, params)

    def before_norm(params, x):
        _, kept = layer.apply(
            {'params': params},
            x,
            train=True,
            rngs={'dropout': jax.random.key(2)},
            capture_intermediates=lambda module, _: isinstance(module, Block),
            mutable='intermediates',
        )
        return kept['intermediates']

    blocks = jax.jit(before_norm)(params, x)
    if scan:
        after = blocks['blocks']['__call__'][0]
    else:
        after = jnp.stack([blocks[f'block_{i}']['__call__'][0] for i in range(3)])
    added = np.diff(np.asarray(after)[:, :, 0, 0], axis=0, prepend=0.0)
    for i, rate in enumerate([0.0, 0.3, 0.6]):
        # Two branches a block, each 0 or 1 / (1 - rate).
        counts = added[i] * (1 - rate)
        np.testing.assert_allclose(counts, np.round(counts), atol=1e-5)
        assert counts.mean() / 2 == pytest.approx(1 - rate, abs=0.022)


@pytest.mark.parametrize('scan', [False, True])
def test_attention_of_every_layer_can_be_kept(scan):
    x = random(BATCH, TOKENS, WIDTH)
    layer = encoder(scan=scan)
    variables = {'params': perturbed(layer, x)}
    kept = jax.jit(lambda v: layer.apply(v, x, mutable='intermediates'))(variables)[1]
    kept = kept['intermediates']
    if scan:
        (weights,) = kept['blocks']['attention']['attention']
    else:
        layers = [kept[f'block_{i}']['attention']['attention'][0] for i in range(DEPTH)]
        weights = jnp.stack(layers)
    assert weights.shape == (DEPTH, BATCH, 2, TOKENS, TOKENS)
    np.testing.assert_allclose(weights.sum(-1), 1.0, rtol=1e-6)
    others = functools.partial(layer.apply, mutable='batch_stats')
    assert jax.eval_shape(others, variables, x)[1] == {}


class Counting(nn.Module):
    """A block with a collection and a random stream that the encoder knows nothing of."""

    @nn.compact
    def __call__(self, x, train, rate, segments):
        weight = self.param('weight', nn.initializers.ones, x.shape[-1:])
        calls = self.variable('counts', 'calls', jnp.zeros, ())
        if not self.is_initializing():
            calls.value += 1
        noise = jax.random.normal(self.make_rng('noise'), x.shape)
        self.sow('seen', 'noise', noise)
        return x * weight + noise


def test_scanned_blocks_have_collections_and_random_streams_of_their_own():
    layer, x = Encoder(Counting, DEPTH, scan=True, final_norm=False), random(BATCH, TOKENS, WIDTH)
    rngs = {'params': jax.random.key(0), 'noise': jax.random.key(1)}
    variables = jax.jit(layer.init)(rngs, x)
    variables.pop('seen')
    assert jax.tree.map(jnp.shape, variables['counts']) == {'blocks': {'calls': (DEPTH,)}}
    apply = jax.jit(functools.partial(layer.apply, mutable=['counts', 'seen']))
    found, after = apply(variables, x, rngs={'noise': jax.random.key(2)})
    np.testing.assert_array_equal(after['counts']['blocks']['calls'], np.ones(DEPTH))
    (noise,) = after['seen']['blocks']['noise']
    assert (noise[0] != noise[1]).all()
    np.testing.assert_allclose(found, x + noise.sum(0), atol=1e-5)
