"""The attention kernel of TPUs, run as plain JAX: equal to attention's own functions."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from vit_jax.nn.attention import Segments, attend, attention_weights, causal_mask
from vit_jax.nn.kernels.attention import fused_attention, vmem_bytes

kernel = functools.partial(fused_attention, interpret=True)
LAYOUTS = ('qk v', 'q kv', 'q k v')


blocks = functools.partial(kernel, block=128)


def plain(projected, num_heads, mask=None, segments=None, causal=False, keep_mask=None, rate=0.0):
    width = sum(x.shape[-1] for x in projected) // 3
    parts = [y for x in projected for y in jnp.split(x, x.shape[-1] // width, axis=-1)]
    heads = [x.reshape(*x.shape[:2], num_heads, -1).swapaxes(1, 2) for x in parts]
    seen = None if mask is None else mask[:, None, None]
    masks = [causal_mask(parts[0].shape[1])] if causal else []
    masks += [] if segments is None else [segments.mask()]
    for other in masks:
        seen = other if seen is None else seen & other
    query, key, value = heads
    weights = attention_weights(query, key, seen)
    if keep_mask is not None:
        weights = jnp.where(keep_mask, weights / (1 - rate), 0.0)
    out = attend(weights, value).swapaxes(1, 2)
    return out.reshape(*out.shape[:2], width)


def value_and_gradient(function, projected, num_heads, **options):
    def run(projected):
        out, pull = jax.vjp(lambda x: function(x, num_heads, **options), projected)
        weights = np.random.default_rng(1).normal(size=out.shape)
        return out, *pull(jnp.asarray(weights, out.dtype))[0]

    return jax.tree.map(lambda x: np.asarray(x, np.float32), jax.jit(run)(projected))


def random(batch, tokens, num_heads, size, dtype=jnp.float32, layout='qkv', keys=None):
    rng, width = np.random.default_rng(0), num_heads * size
    shapes = [
        (batch, tokens if 'q' in letters else keys or tokens, len(letters) * width)
        for letters in layout.split()
    ]
    return tuple(jnp.asarray(rng.normal(size=shape), dtype) for shape in shapes)


def assert_equal(found, expected, atol=2e-5):
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_allclose(a, b, atol=atol)


@pytest.mark.slow
@pytest.mark.parametrize(
    ('tokens', 'num_heads', 'size'),
    [
        (1, 2, 64),
        pytest.param(49, 5, 32, marks=pytest.mark.long),
        pytest.param(50, 2, 64, marks=pytest.mark.long),
        pytest.param(50, 3, 128, marks=pytest.mark.long),
        pytest.param(50, 12, 32, marks=pytest.mark.long),
        pytest.param(196, 2, 80, marks=pytest.mark.long),
        (197, 3, 64),
        pytest.param(577, 1, 72, marks=pytest.mark.long),
    ],
)
def test_values_and_gradients_are_those_of_attention(tokens, num_heads, size):
    qkv = random(2, tokens, num_heads, size)
    found = value_and_gradient(kernel, qkv, num_heads)
    expected = value_and_gradient(plain, qkv, num_heads)
    assert_equal(found, expected)
    assert min(np.abs(x).max() for x in expected) > 0.1 or tokens == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ('tokens', 'keys', 'num_heads', 'size', 'layout', 'masked', 'causal'),
    [
        (1, 7, 2, 64, 'q kv', False, False),
        pytest.param(7, 1, 1, 32, 'q k v', True, False, marks=pytest.mark.long),
        (7, 7, 4, 32, 'qkv', True, True),
        pytest.param(50, 50, 2, 80, 'qkv', False, True, marks=pytest.mark.long),
        pytest.param(50, 50, 4, 64, 'qk v', True, False, marks=pytest.mark.long),
        (100, 850, 4, 32, 'q k v', True, False),
    ],
)
def test_masks_and_other_keys(tokens, keys, num_heads, size, layout, masked, causal):
    projected = random(3, tokens, num_heads, size, layout=layout, keys=keys)
    # Padding at the right, as of sentences; at the left, where it leaves causal queries nothing;
    # and an example of nothing but padding.
    lengths = np.array([[keys - keys // 3], [keys], [0]])
    mask = np.arange(keys) < lengths
    mask[1, : keys // 2] = False
    options = {'mask': jnp.asarray(mask) if masked else None, 'causal': causal}
    found = value_and_gradient(kernel, projected, num_heads, **options)
    expected = value_and_gradient(plain, projected, num_heads, **options)
    assert_equal(found, expected)
    if masked:
        free = jax.jit(functools.partial(plain, num_heads=num_heads, causal=causal))(projected)
        assert keys == 1 or np.abs(np.asarray(free) - expected[0]).max() > 0.1
    assert all(x.shape == y.shape for x, y in zip(found[1:], projected, strict=True))


@pytest.mark.slow
@pytest.mark.parametrize(
    ('queries', 'keys', 'layout', 'causal'),
    [
        pytest.param(50, 50, 'qkv', False, marks=pytest.mark.long),
        (50, 50, 'qk v', True),
        (3, 50, 'q kv', False),
    ],
)
def test_queries_see_the_keys_of_their_segment(queries, keys, layout, causal):
    projected = random(2, queries, 2, 64, layout=layout, keys=keys)
    ends = np.array([[9, 31, 44], [50, 50, 50]])
    number = (np.arange(keys)[None, :, None] >= ends[:, None]).sum(-1) + 1
    number[0, 44:] = 0
    rows = number if queries == keys else np.broadcast_to(np.arange(1, 4), (2, 3))
    segments = Segments(jnp.asarray(rows), jnp.asarray(number))
    options = {'segments': segments, 'causal': causal}
    found = value_and_gradient(kernel, projected, 2, **options)
    assert_equal(found, value_and_gradient(plain, projected, 2, **options))


@pytest.mark.slow
@pytest.mark.parametrize(
    ('tokens', 'keys', 'num_heads', 'size', 'layout', 'options'),
    [
        pytest.param(50, 50, 4, 64, 'qkv', {}, marks=pytest.mark.long),
        (7, 9, 2, 80, 'q kv', {}),
        (50, 50, 8, 32, 'qk v', {'mask': jnp.arange(50)[None] < jnp.array([[40], [50]])}),
        pytest.param(9, 9, 1, 16, 'qkv', {'causal': True}, marks=pytest.mark.long),
    ],
)
def test_weights_are_dropped(tokens, keys, num_heads, size, layout, options):
    projected = random(2, tokens, num_heads, size, layout=layout, keys=keys)
    keep_mask = np.random.default_rng(2).random((2, num_heads, tokens, keys)) < 0.7
    keep_mask[0, 0, 0] = False
    options = {'keep_mask': jnp.asarray(keep_mask), 'rate': 0.3, **options}
    found = value_and_gradient(kernel, projected, num_heads, **options)
    expected = value_and_gradient(plain, projected, num_heads, **options)
    assert_equal(found, expected)
    assert not found[0][0, 0, :size].any()
    assert min(np.abs(x).max() for x in expected) > 0.1


@pytest.mark.slow
def test_it_does_not_matter_which_projections_come_together():
    whole, width = random(2, 7, 2, 16), 32
    expected = value_and_gradient(kernel, whole, 2, causal=True)
    for letters in LAYOUTS:
        cuts = np.cumsum([width * len(part) for part in letters.split()])[:-1]
        parts = tuple(np.split(np.asarray(whole[0]), cuts, axis=-1))
        out, *gradients = value_and_gradient(kernel, parts, 2, causal=True)
        np.testing.assert_array_equal(out, expected[0])
        np.testing.assert_array_equal(np.concatenate(gradients, axis=-1), expected[1])


@pytest.mark.slow
@pytest.mark.parametrize(
    'options',
    [
        pytest.param({}, marks=pytest.mark.long),
        {'mask': jnp.arange(197)[None] < jnp.array([[90], [197]])},
    ],
)
def test_in_half_precision_it_is_as_far_from_the_truth_as_attention_is(options):
    qkv = random(2, 197, 2, 64, jnp.bfloat16)
    truth = value_and_gradient(plain, (qkv[0].astype(jnp.float32),), 2, **options)
    errors = [
        [
            np.abs(a - b).max()
            for a, b in zip(value_and_gradient(f, qkv, 2, **options), truth, strict=True)
        ]
        for f in (kernel, plain)
    ]
    assert np.all(errors[0] <= 1.5 * np.array(errors[1]))


def test_large_scores_do_not_overflow():
    qkv = (60 * random(1, 49, 2, 32)[0],)
    for a, b in zip(
        value_and_gradient(kernel, qkv, 2), value_and_gradient(plain, qkv, 2), strict=True
    ):
        assert np.isfinite(a).all()
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-2)


def test_examples_do_not_see_each_other():
    (qkv,) = random(3, 49, 2, 32)
    changed = qkv.at[1].add(1.0)
    for a, b in zip(
        value_and_gradient(kernel, (qkv,), 2),
        value_and_gradient(kernel, (changed,), 2),
        strict=True,
    ):
        np.testing.assert_array_equal(a[[0, 2]], b[[0, 2]])
        assert np.abs(a[1] - b[1]).max() > 1e-3


@pytest.mark.parametrize(
    ('tokens', 'keys', 'num_heads', 'size', 'layout', 'options'),
    [
        (197, 197, 3, 64, 'qkv', {}),
        (50, 50, 4, 80, 'qkv', {'causal': True}),
        (100, 850, 8, 32, 'q k v', {'mask': jnp.ones((2, 850), bool)}),
        (64, 64, 8, 64, 'qk v', {'mask': jnp.ones((2, 64), bool), 'causal': True}),
        (100, 850, 8, 32, 'q k v', {'keep_mask': jnp.ones((2, 8, 100, 850), bool), 'rate': 0.1}),
        (256, 256, 3, 64, 'qkv', {'segments': Segments(*2 * [jnp.ones((2, 256), int)])}),
    ],
)
def test_it_can_be_lowered_for_tpus(tokens, keys, num_heads, size, layout, options):
    projected = random(2, tokens, num_heads, size, jnp.bfloat16, layout, keys)

    def total(projected):
        return fused_attention(projected, num_heads, **options).astype(jnp.float32).sum()

    lowered = jax.jit(jax.grad(total)).trace(projected).lower(lowering_platforms=('tpu',))
    assert lowered.as_text().count('tpu_custom_call') == 1


def test_memory_grows_with_tokens_and_width():
    assert vmem_bytes(197, 197, 768, 12, 2) < 12 * 2**20
    sizes = [
        vmem_bytes(197, 197, 768, 12, 2),
        vmem_bytes(197, 577, 768, 12, 2),
        vmem_bytes(577, 577, 768, 12, 2),
        vmem_bytes(577, 577, 768, 12, 4),
    ]
    assert sizes == sorted(set(sizes))
    assert vmem_bytes(577, 577, 768, 12, 2) < vmem_bytes(577, 577, 1024, 16, 2)
    dropout = vmem_bytes(577, 577, 768, 12, 2, drops=True) - vmem_bytes(577, 577, 768, 12, 2)
    assert dropout > 2 * 12 * 577 * 577


@pytest.mark.slow
@pytest.mark.parametrize(
    ('tokens', 'keys', 'num_heads', 'size', 'layout', 'masked', 'causal'),
    [
        pytest.param(300, 300, 4, 64, 'qkv', False, False, marks=pytest.mark.long),
        (256, 256, 2, 16, 'qk v', True, True),
        (150, 70, 4, 32, 'q kv', True, False),
        pytest.param(129, 129, 8, 80, 'qkv', False, True, marks=pytest.mark.long),
        pytest.param(7, 300, 2, 64, 'q k v', True, False, marks=pytest.mark.long),
        pytest.param(4096, 4096, 1, 64, 'qkv', True, False, marks=pytest.mark.long),
    ],
)
def test_blocks_of_queries(tokens, keys, num_heads, size, layout, masked, causal):
    projected = random(2, tokens, num_heads, size, layout=layout, keys=keys)
    mask = jnp.arange(keys) < jnp.array([[keys - keys // 3], [0]]) if masked else None
    options = {'mask': mask, 'causal': causal}
    found = value_and_gradient(blocks, projected, num_heads, **options)
    assert_equal(found, value_and_gradient(plain, projected, num_heads, **options), atol=1e-5)
    assert all(x.shape == y.shape for x, y in zip(found[1:], projected, strict=True))


@pytest.mark.slow
def test_blocks_drop_weights_and_know_segments():
    projected = random(2, 200, 4, 64)
    keep_mask = jnp.asarray(np.random.default_rng(2).random((2, 4, 200, 200)) < 0.7)
    number = jnp.asarray(np.repeat([[1, 2, 3, 0], [1, 1, 1, 1]], 50, axis=1))
    options = {'segments': Segments(number, number), 'keep_mask': keep_mask, 'rate': 0.3}
    found = value_and_gradient(blocks, projected, 4, **options)
    assert_equal(found, value_and_gradient(plain, projected, 4, **options), atol=1e-5)


@pytest.mark.slow
def test_blocks_in_half_precision_are_whole_sequences():
    projected = random(1, 300, 2, 64, jnp.bfloat16)
    found, expected = (value_and_gradient(f, projected, 2) for f in (blocks, kernel))
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_allclose(a, b, atol=0.02)
