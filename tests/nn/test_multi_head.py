"""The multi-head layer: its equation, whoever looks at whom, caches, initial values."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from vit_jax.errors import UserError
from vit_jax.nn.attention import causal_mask, scaled_dot_product
from vit_jax.nn.multi_head import Heads, KeyValue, MultiHeadAttention

BATCH, HEADS, TOKENS, SIZE, MEMORY = 2, 3, 7, 4, 5
WIDTH = HEADS * SIZE
ITSELF = MultiHeadAttention(HEADS)
OTHERS = MultiHeadAttention(HEADS, kernels=('q', 'kv'))
APART = MultiHeadAttention(HEADS, kernels=('q', 'k', 'v'))
every_layout = pytest.mark.parametrize(
    'layer', [ITSELF, OTHERS, APART], ids=['qkv', 'q kv', 'q k v']
)


def random(*shape, seed=0):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


def init(layer, *inputs):
    """Parameters, the biases shifted so that they matter."""
    params = jax.device_get(jax.jit(layer.init)(jax.random.key(0), *inputs)['params'])
    rng = np.random.default_rng(5)
    moved = jax.tree.map(lambda x: x + 0.1 * rng.normal(size=x.shape).astype(x.dtype), params)
    return {'params': jax.tree.map(jnp.asarray, moved)}


def sources():
    """Queries, keys and values of three origins."""
    return (
        random(BATCH, TOKENS, WIDTH),
        random(BATCH, MEMORY, WIDTH, seed=1),
        random(BATCH, MEMORY, WIDTH, seed=2),
    )


def joined(params):
    """Kernel [D 3 D] and bias [3 D] of queries, keys and values, whatever the layout."""
    names = [name for name in ('qkv', 'q', 'kv', 'k', 'v') if name in params]
    kernel = np.concatenate([params[name]['kernel'] for name in names], axis=1)
    bias = np.concatenate([params[name]['bias'] for name in names])
    return kernel.reshape(WIDTH, 3, WIDTH), bias.reshape(3, WIDTH)


def torch_attention(params, query, key, value, **kwargs):
    """What `torch.nn.MultiheadAttention` makes of it."""
    torch = pytest.importorskip('torch')
    kernel, bias = joined(params)
    state = {
        'in_proj_weight': kernel.reshape(WIDTH, -1).T,
        'in_proj_bias': bias.reshape(-1),
        'out_proj.weight': np.reshape(params['out']['kernel'], (WIDTH, WIDTH)).T,
        'out_proj.bias': params['out']['bias'],
    }
    layer = torch.nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)
    layer.load_state_dict({name: torch.tensor(np.array(x)) for name, x in state.items()})
    kwargs = {name: torch.tensor(np.array(x)) for name, x in kwargs.items()}
    with torch.no_grad():
        return layer(*(torch.tensor(np.array(x)) for x in (query, key, value)), **kwargs)[0].numpy()


@pytest.mark.slow
@every_layout
def test_queries_keys_and_values_may_come_from_three_places(layer):
    query, key, value = sources()
    variables = init(layer, query, key, value)
    expected = torch_attention(variables['params'], query, key, value)
    np.testing.assert_allclose(layer.apply(variables, query, key, value), expected, atol=1e-5)


@pytest.mark.slow
@every_layout
def test_positions_may_be_added_to_queries_and_keys_alone(layer):
    x, positions = random(BATCH, TOKENS, WIDTH), random(TOKENS, WIDTH, seed=1)
    placed = x + positions
    variables = init(layer, x)
    expected = torch_attention(variables['params'], placed, placed, x)
    out = layer.apply(variables, placed, placed, x)
    np.testing.assert_allclose(out, expected, atol=1e-5)
    assert np.abs(out - layer.apply(variables, placed)).max() > 0.1
    assert np.abs(out - layer.apply(variables, x)).max() > 0.1


@every_layout
def test_what_is_not_given_is_what_was_given_before(layer):
    query, key, _ = sources()
    variables = init(layer, query, key)
    same = layer.apply(variables, query, key, key)
    np.testing.assert_array_equal(layer.apply(variables, query, key), same)
    # Equal arrays that are not one and the same are projected one by one.
    np.testing.assert_allclose(layer.apply(variables, query, key, key + 0.0), same, atol=1e-6)
    alone = layer.apply(variables, query)
    np.testing.assert_allclose(
        layer.apply(variables, query, query + 0.0, query - 0.0), alone, atol=1e-6
    )


@pytest.mark.parametrize('other', [OTHERS, APART], ids=['q kv', 'q k v'])
def test_layouts_differ_in_names_alone(other):
    query, key, value = sources()
    variables = init(ITSELF, query, key, value)
    kernel, bias = (variables['params']['qkv'][name] for name in ('kernel', 'bias'))
    places = {'q': slice(0, 1), 'k': slice(1, 2), 'v': slice(2, 3), 'kv': slice(1, 3)}
    params = {
        name: {'kernel': kernel[:, places[name]], 'bias': bias[places[name]]}
        for name in other.kernels
    }
    params['out'] = variables['params']['out']
    for inputs in ((query,), (query, key), (query, key, value)):
        np.testing.assert_allclose(
            other.apply({'params': params}, *inputs), ITSELF.apply(variables, *inputs), atol=1e-6
        )


@every_layout
def test_a_mask_may_differ_from_query_to_query(layer):
    query, key, value = sources()
    variables = init(layer, query, key, value)
    mask = np.random.default_rng(3).random((BATCH, 1, TOKENS, MEMORY)) < 0.5
    mask[..., 0] = True
    unseen = np.repeat(~mask, HEADS, axis=1).reshape(-1, TOKENS, MEMORY)
    expected = torch_attention(variables['params'], query, key, value, attn_mask=unseen)
    out = layer.apply(variables, query, key, value, mask=jnp.asarray(mask))
    np.testing.assert_allclose(out, expected, atol=1e-5)


@every_layout
@pytest.mark.parametrize('batch', [BATCH, 1])
def test_a_bias_is_added_to_the_scores(layer, batch):
    query, key, value = sources()
    variables = init(layer, query, key, value)
    bias = random(batch, HEADS, TOKENS, MEMORY, seed=3)
    added = np.broadcast_to(bias, (BATCH, *bias.shape[1:])).reshape(-1, TOKENS, MEMORY)
    expected = torch_attention(variables['params'], query, key, value, attn_mask=added)
    out = layer.apply(variables, query, key, value, bias=bias)
    np.testing.assert_allclose(out, expected, atol=1e-5)


@pytest.mark.slow
def test_windows_are_an_axis_between_batch_and_tokens():
    """A bias of the heads and one of the windows, with gradients that sum over what they serve."""
    windows = 4
    x = random(BATCH, windows, TOKENS, WIDTH)
    variables = init(ITSELF, x)
    of_heads = random(HEADS, TOKENS, TOKENS, seed=3)
    of_windows = jnp.where(random(windows, 1, TOKENS, TOKENS, seed=4) > 1, -100.0, 0.0)
    bias = of_heads + of_windows
    tiled = jnp.asarray(np.tile(bias, (BATCH, 1, 1, 1)))
    repeated = jnp.asarray(np.broadcast_to(of_heads, (BATCH, windows, *of_heads.shape)))

    @jax.jit
    def run(variables, x):
        def loss(bias):
            return (ITSELF.apply(variables, x, bias=bias) ** 2).sum()

        out = ITSELF.apply(variables, x, bias=bias)
        parts = [ITSELF.apply(variables, x[:, i], bias=bias[i]) for i in range(windows)]
        merged = ITSELF.apply(variables, x.reshape(-1, TOKENS, WIDTH), bias=tiled)
        return out, parts, merged, [jax.grad(loss)(each) for each in (of_heads, repeated)]

    out, parts, merged, (of_all, of_each) = jax.device_get(run(variables, x))
    np.testing.assert_allclose(out, np.stack(parts, axis=1), atol=1e-5)
    np.testing.assert_allclose(out.reshape(merged.shape), merged, atol=1e-5)
    np.testing.assert_allclose(of_all, of_each.sum((0, 1)), atol=1e-4)


@every_layout
def test_a_projected_memory_serves_many_queries(layer):
    query, key, value = sources()
    variables = init(layer, query, key, value)
    mask = jnp.arange(MEMORY) < jnp.array([3, 5])[:, None, None, None]
    bias = random(HEADS, TOKENS, MEMORY, seed=3)
    memory = layer.apply(variables, key, value, method='project')
    assert memory.key.shape == memory.value.shape == (BATCH, HEADS, MEMORY, SIZE)
    whole = layer.apply(variables, query, key, value, mask=mask, bias=bias)
    for i in range(TOKENS):
        found = layer.apply(
            variables,
            query[:, i : i + 1],
            memory,
            mask=mask,
            bias=bias[:, i : i + 1],
            method='attend',
        )
        np.testing.assert_allclose(found[:, 0], whole[:, i], atol=5e-6)


def test_only_what_is_given_is_projected():
    layer, x = Heads(HEADS), random(BATCH, TOKENS, WIDTH)
    variables = init(layer, x, x, x)

    def flops(places):
        inputs = [x if place in places else None for place in range(3)]
        compiled = jax.jit(lambda v: layer.apply(v, *inputs)).lower(variables).compile()
        return compiled.cost_analysis()['flops']

    assert flops([1]) == pytest.approx(flops([0, 1, 2]) / 3, rel=0.1)
    heads = layer.apply(variables, x, x, x)
    nothing, key, value = layer.apply(variables, None, x, x)
    assert nothing is None
    np.testing.assert_allclose(key, heads[1], atol=1e-6)
    np.testing.assert_allclose(value, heads[2], atol=1e-6)


@pytest.mark.slow
@every_layout
def test_steps_of_self_attention_equal_the_whole_under_a_causal_mask(layer):
    x = random(BATCH, TOKENS, WIDTH)
    variables = init(layer, x)
    whole = layer.apply(variables, x, causal=True)
    masked = layer.apply(variables, x, mask=causal_mask(TOKENS))
    np.testing.assert_array_equal(whole, masked)
    # Room that is never filled must not be looked at.
    past = KeyValue(*[jnp.full((BATCH, HEADS, TOKENS + 2, SIZE), 9.0)] * 2)
    for i in range(TOKENS):
        y, past = layer.apply(variables, x[:, i : i + 1], past, i, method='step')
        np.testing.assert_allclose(y[:, 0], whole[:, i], atol=5e-6)


@every_layout
def test_attention_is_its_projections_around_the_equation(layer):
    query, key, value = sources()
    variables = init(layer, query, key, value)
    params = variables['params']
    kernel, bias = joined(params)
    heads = [
        (x @ kernel[:, i] + bias[i]).reshape(BATCH, -1, HEADS, SIZE).swapaxes(1, 2)
        for i, x in enumerate((query, key, value))
    ]
    merged = scaled_dot_product(*heads)[0].swapaxes(1, 2)
    expected = np.einsum('bnhk,hkd->bnd', merged, params['out']['kernel']) + params['out']['bias']
    np.testing.assert_allclose(layer.apply(variables, query, key, value), expected, atol=5e-6)


def test_self_attention_follows_a_permutation_of_the_tokens():
    layer, x = ITSELF, random(BATCH, TOKENS, WIDTH)
    variables, order = init(layer, x), np.random.default_rng(0).permutation(TOKENS)
    np.testing.assert_allclose(
        layer.apply(variables, x[:, order]), layer.apply(variables, x)[:, order], atol=1e-5
    )


@every_layout
def test_weights_are_kept_only_when_asked_for(layer):
    x = random(BATCH, TOKENS, WIDTH)
    inputs = (x,) if layer is ITSELF else (x, x[:, :4])
    variables = layer.init(jax.random.key(0), *inputs)
    assert set(variables) == {'params'}
    plain = layer.apply(variables, *inputs)
    out, kept = layer.apply(variables, *inputs, mutable='intermediates')
    np.testing.assert_array_equal(out, plain)
    (weights,) = kept['intermediates']['attention']
    assert weights.shape == (BATCH, HEADS, TOKENS, inputs[-1].shape[1])
    np.testing.assert_allclose(weights.sum(-1), 1.0, rtol=1e-6)


def test_dropout_of_the_weights_acts_in_training_alone():
    layer, x = ITSELF.clone(dropout=0.5), random(BATCH, TOKENS, WIDTH)
    variables = init(layer, x)
    evaluated = layer.apply(variables, x)
    np.testing.assert_array_equal(evaluated, ITSELF.apply(variables, x))
    trained = layer.apply(variables, x, train=True, rngs={'dropout': jax.random.key(0)})
    assert (trained != evaluated).any()


@pytest.mark.slow
def test_every_projection_starts_as_a_xavier_matrix_of_its_own():
    width, heads = 96, 4
    init = jax.jit(MultiHeadAttention(heads).init)
    params = init(jax.random.key(0), np.zeros((1, 3, width), np.float32))['params']
    bound = np.sqrt(6 / (width + width))
    for i in range(3):
        kernel = np.asarray(params['qkv']['kernel'][:, i])
        # Uniform in +-bound; of 9,216 draws the largest lies within 0.1 % of it.
        assert 0.998 * bound < np.abs(kernel).max() <= bound
        assert kernel.std() == pytest.approx(bound / np.sqrt(3), rel=0.02)
    out = np.asarray(params['out']['kernel'])
    assert 0.998 * bound < np.abs(out).max() <= bound
    assert not np.asarray(params['qkv']['bias']).any()


def test_heads_must_divide_the_width():
    with pytest.raises(UserError, match=r'width 12.*num_heads 5'):
        MultiHeadAttention(5).init(jax.random.key(0), jnp.zeros((1, 3, 12)))
