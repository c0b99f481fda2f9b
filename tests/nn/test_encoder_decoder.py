"""Encoder and decoder blocks whose positions are added in every layer, as in DETR; dropout."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.pictures import drawn

from vit_jax.nn.encoder_decoder import DecoderBlock, EncoderBlock, FeedForward, Memory
from vit_jax.nn.multi_head import MultiHeadAttention

BATCH, QUERIES, CELLS, WIDTH, HEADS, HIDDEN = 2, 4, 6, 16, 2, 24
FIELDS = {'num_heads': HEADS, 'mlp_dim': HIDDEN, 'norm_eps': 1e-5}


def random(*shape, seed=0):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


def scene(seed=0):
    """Features of two images, one of which is padded, and their positions."""
    mask = jnp.asarray(np.arange(CELLS) < np.array([CELLS, 4])[:, None, None, None])
    features = random(BATCH, CELLS, WIDTH, seed=seed)
    return Memory(features, mask, random(BATCH, CELLS, WIDTH, seed=seed + 1))


def detr_state(params):
    """Tensors of a layer of DETR in transformers, by name."""
    import torch

    arrays = {}

    def dense(name, kernel, bias):
        arrays[f'{name}.weight'], arrays[f'{name}.bias'] = np.asarray(kernel).T, bias

    def attention(name, p):
        for fused in ('qkv', 'q', 'kv'):
            for i, letter in enumerate(fused if fused in p else ''):
                kernel = p[fused]['kernel'][:, i].reshape(WIDTH, WIDTH)
                dense(f'{name}.{letter}_proj', kernel, p[fused]['bias'][i].reshape(-1))
        dense(f'{name}.o_proj', p['out']['kernel'].reshape(WIDTH, WIDTH), p['out']['bias'])

    def norm(name, p):
        arrays[f'{name}.weight'], arrays[f'{name}.bias'] = p['scale'], p['bias']

    names = {'attention': 'self_attn', 'cross': 'encoder_attn', 'mlp': 'final'}
    for ours, theirs in names.items():
        if ours in params:
            norm(f'{theirs}_layer_norm', params[f'{ours}_norm'])
            if ours != 'mlp':
                attention(theirs, params[ours])
    for name in ('fc1', 'fc2'):
        dense(f'mlp.{name}', **params['mlp'][name])
    return {name: torch.tensor(np.array(x)) for name, x in arrays.items()}


def detr_layer(name, params):
    """A layer of DETR in transformers with these parameters."""
    modeling_detr = pytest.importorskip('transformers.models.detr.modeling_detr')
    sides = {
        f'{side}_{field}': value
        for side in ('encoder', 'decoder')
        for field, value in [('attention_heads', HEADS), ('ffn_dim', HIDDEN)]
    }
    config = modeling_detr.DetrConfig(d_model=WIDTH, attn_implementation='eager', **sides)
    layer = getattr(modeling_detr, name)(config)
    layer.load_state_dict(detr_state(params), strict=True)
    return layer.eval()


def tensors(**arrays):
    import torch

    return {name: torch.tensor(np.array(x)) for name, x in arrays.items()}


def additive(mask):
    return np.where(mask, 0.0, np.finfo(np.float32).min).astype(np.float32)


@pytest.mark.slow
def test_an_encoder_block_is_that_of_detr():
    torch = pytest.importorskip('torch')
    image, block = scene(), EncoderBlock(**FIELDS)
    params = drawn(block, image.tokens)
    layer = detr_layer('DetrEncoderLayer', params)
    inputs = tensors(
        hidden_states=image.tokens,
        attention_mask=additive(image.mask),
        spatial_position_embeddings=image.positions,
    )
    with torch.no_grad():
        expected = layer(**inputs)

    @jax.jit
    def run(params, image):
        apply = functools.partial(block.apply, {'params': params}, image.tokens, image.mask)
        return apply(positions=image.positions), apply()

    out, without = jax.device_get(run(params, image))
    np.testing.assert_allclose(out, expected, atol=1e-5)
    assert np.abs(out - without).max() > 0.1


@pytest.mark.slow
def test_a_decoder_block_is_that_of_detr():
    torch = pytest.importorskip('torch')
    image, block = scene(), DecoderBlock(**FIELDS)
    x, positions = random(BATCH, QUERIES, WIDTH, seed=5), random(1, QUERIES, WIDTH, seed=6)
    params = drawn(block, x, image)
    layer = detr_layer('DetrDecoderLayer', params)
    inputs = tensors(
        hidden_states=x,
        spatial_position_embeddings=image.positions,
        object_queries_position_embeddings=np.repeat(positions, BATCH, axis=0),
        encoder_hidden_states=image.tokens,
        encoder_attention_mask=additive(image.mask),
    )
    with torch.no_grad():
        expected = layer(**inputs)

    @jax.jit
    def run(params, image):
        apply = functools.partial(block.apply, {'params': params}, x)
        blank = image._replace(positions=None)
        return apply(image, False, positions), [apply(image), apply(blank, False, positions)]

    out, others = jax.device_get(run(params, image))
    np.testing.assert_allclose(out, expected, atol=1e-5)
    assert min(np.abs(out - other).max() for other in others) > 0.01


def test_positions_of_pre_norm_blocks_are_added_after_the_norm():
    """The block is taken apart by its parameters."""
    image, block = scene(), EncoderBlock(**FIELDS, norm='pre')
    params = drawn(block, image.tokens)

    @jax.jit
    def parts(params, x, positions):
        def norm(name, z):
            mean, var = z.mean(-1, keepdims=True), z.var(-1, keepdims=True)
            return (z - mean) / jnp.sqrt(var + 1e-5) * params[name]['scale'] + params[name]['bias']

        y = norm('attention_norm', x)
        placed = y + positions
        x = x + MultiHeadAttention(HEADS).apply({'params': params['attention']}, placed, placed, y)
        mlp = FeedForward(HIDDEN)
        return x + mlp.apply({'params': params['mlp']}, norm('mlp_norm', x))

    expected = parts(params, image.tokens, image.positions)
    out = jax.jit(block.apply)({'params': params}, image.tokens, positions=image.positions)
    np.testing.assert_allclose(out, expected, atol=1e-5)


def test_queries_without_positions_or_mask_are_a_set():
    image, block = scene(), DecoderBlock(**FIELDS)
    x = random(BATCH, QUERIES, WIDTH, seed=5)
    params, apply = drawn(block, x, image), jax.jit(block.apply)
    out, backwards = (
        np.asarray(apply({'params': params}, queries, image))
        for queries in (x, np.asarray(x)[:, ::-1])
    )
    np.testing.assert_allclose(backwards[:, ::-1], out, atol=1e-5)


@pytest.mark.slow
def test_dropout_of_activations_acts_inside_of_the_feed_forward_layer():
    layer, x = FeedForward(HIDDEN, dropout=0.5), random(64, 1, WIDTH)
    params = drawn(layer, x)
    # One output reads one hidden unit alone: half of its positive values are dropped.
    params['fc2'] = {'kernel': np.eye(HIDDEN, WIDTH, dtype=np.float32), 'bias': np.zeros(WIDTH)}

    @jax.jit
    def run(params):
        variables, rngs = {'params': params}, {'dropout': jax.random.key(0)}
        plain = FeedForward(HIDDEN).apply(variables, x)
        return plain, layer.apply(variables, x), layer.apply(variables, x, train=True, rngs=rngs)

    plain, evaluated, trained = jax.device_get(run(params))
    np.testing.assert_array_equal(evaluated, plain)
    alive = plain > 0
    dropped = trained[alive] == 0
    assert 0.4 < dropped.mean() < 0.6
    kept = trained[alive][~dropped]
    np.testing.assert_allclose(kept, 2 * plain[alive][~dropped], rtol=1e-6)
