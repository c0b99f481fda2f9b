"""Windows on a feature map: who sees whom, and that nothing gets lost on the way."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from vit_jax.nn.merging import PatchMerging, _convolve
from vit_jax.nn.windows import (
    WindowAttention,
    WindowMap,
    Windows,
    relative_positions,
)

SHAPES = [(6, 9, 3, False), (6, 9, 3, True), (7, 5, 4, True), (4, 9, 6, True)]


@pytest.mark.parametrize(
    ('height', 'width', 'window', 'expected'),
    [
        (8, 8, 4, Windows(8, 8, 4, 2)),
        (7, 9, 3, Windows(7, 9, 3, 1)),
        (4, 9, 4, Windows(4, 9, 4, 0)),  # no shift where one direction has a single window
        (5, 3, 7, Windows(5, 3, 3, 0)),  # the window shrinks to the map
    ],
)
def test_the_window_fits_the_map(height, width, window, expected):
    assert Windows.over(height, width, window, shifted=True) == expected
    assert Windows.over(height, width, window, shifted=False).shift == 0


@pytest.mark.parametrize('shape', SHAPES)
def test_what_is_cut_can_be_joined(shape):
    windows = Windows.over(*shape)
    x = np.arange(2 * windows.height * windows.width * 6, dtype=np.float32)
    x = jnp.asarray(x.reshape(2, windows.height, windows.width, 6))
    placed = windows.place(x)
    heads = windows.cut(placed.reshape(*placed.shape[:3], 3, 2))
    np.testing.assert_array_equal(windows.restore(windows.join(heads)).reshape(x.shape), x)
    # The numbers of the tokens say the same as the tokens themselves.
    flat = np.asarray(x).reshape(2, -1, 3, 2)
    numbers = windows.tokens()
    expected = np.where(numbers[..., None, None] >= 0, flat[:, numbers], 0)
    np.testing.assert_array_equal(heads.swapaxes(2, 3), expected)


@pytest.mark.parametrize('shape', SHAPES)
def test_a_region_is_contiguous_in_the_map(shape):
    """Two tokens of a window are of one region if and only if no border lies between them."""
    windows = Windows.over(*shape)
    rows, columns = (n * windows.side for n in windows.grid)
    y, x = np.divmod(np.arange(rows * columns).reshape(rows, columns), columns)
    shift = (-windows.shift, -windows.shift)
    y, x = (windows.cut_plain(np.roll(axis, shift, (0, 1))) for axis in (y, x))
    region = windows.regions()
    together = region[:, :, None] == region[:, None]
    near = [abs(a[:, :, None] - a[:, None]) < windows.side for a in (y, x)]
    np.testing.assert_array_equal(together, near[0] & near[1])


def test_relative_positions_follow_the_offset():
    index, side = relative_positions(3, 3), 5
    at = [(y, x) for y in range(3) for x in range(3)]
    for i, (y, x) in enumerate(at):
        for j, (v, u) in enumerate(at):
            assert index[i, j] == (y - v + 2) * side + (x - u + 2)


def attention(shape, dim=4, **fields):
    height, width, window, shifted = shape
    layer = WindowAttention(2, window, shifted, **fields)
    x = jax.random.normal(jax.random.key(0), (1, height, width, dim))
    params = jax.jit(layer.init)(jax.random.key(1), x)['params']
    keys = iter(jax.random.split(jax.random.key(2), len(jax.tree.leaves(params))))
    params = jax.tree.map(lambda p: 0.5 * jax.random.normal(next(keys), p.shape), params)
    return layer, params, x


@pytest.mark.slow
@pytest.mark.parametrize('shape', [(5, 7, 3, True), (2, 4, 3, True)])
def test_the_layer_is_the_formula(shape):
    """softmax(Q K^T / sqrt(K) + B) V among all tokens at once, those of other windows left out."""
    layer, params, x = attention(shape)
    with jax.default_matmul_precision('highest'):
        apply = jax.jit(lambda p, x: layer.apply({'params': p}, x, mutable='intermediates'))
        out, kept = apply(params, x)
    height, width, window, _ = shape
    windows, p = Windows.over(*shape), jax.tree.map(np.asarray, params)
    rows, columns = (n * windows.side for n in windows.grid)
    y, x_ = np.divmod(np.arange(rows * columns), columns)
    down, right = ((y - windows.shift) % rows, (x_ - windows.shift) % columns)
    mates = np.logical_and(*(_pairs(np.equal, axis // windows.side) for axis in (down, right)))
    wrapped = np.logical_or(*(abs(_pairs(np.subtract, axis)) >= windows.side for axis in (y, x_)))
    offsets = (np.where(mates, _pairs(np.subtract, axis), 0) for axis in (down, right))
    bias = p['position_bias'][tuple(d + window - 1 for d in offsets)]
    padded = np.zeros((rows, columns, 4))
    padded[:height, :width] = x[0]
    qkv = np.tensordot(padded, p['qkv']['kernel'], 1) + p['qkv']['bias']
    q, k, v = qkv.reshape(rows * columns, 3, 2, 2).transpose(1, 2, 0, 3)
    scores = q @ k.swapaxes(1, 2) / 2**0.5 + bias.transpose(2, 0, 1) - 100 * wrapped
    scores = np.where(mates, scores, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    inside = (y < height) & (x_ < width)
    found = np.tensordot((weights @ v).swapaxes(0, 1), p['out']['kernel'], 2) + p['out']['bias']
    np.testing.assert_allclose(out.reshape(-1, 4), found[inside], atol=1e-5)
    # The map says the same: a key for the padding where there is any, then those of the tokens.
    laid = np.asarray(WindowMap(kept['intermediates']['attention'][0], windows))[0]
    keys = weights[:, inside]
    if not inside.all():
        keys = np.concatenate([keys[..., ~inside].sum(-1, keepdims=True), keys[..., inside]], -1)
    np.testing.assert_allclose(laid, keys, atol=1e-6)


def _pairs(operation, axis):
    """[query key]"""
    return operation(axis[:, None], axis)


@pytest.mark.parametrize('size', [(6, 10), (7, 9)])
def test_neighbors_are_normalized_and_merged_as_by_a_norm_and_a_linear_layer_of_them(size):
    """Also by the convolution that TPUs take."""
    x = 3 + jax.random.normal(jax.random.key(0), (2, *size, 4))
    module = PatchMerging()
    params = module.init(jax.random.key(1), x)['params']
    keys = jax.random.split(jax.random.key(2), 2)
    params['norm'] = {
        name: value + 0.3 * jax.random.normal(key, value.shape)
        for key, (name, value) in zip(keys, params['norm'].items(), strict=True)
    }
    padded = np.pad(x, ((0, 0), (0, size[0] % 2), (0, size[1] % 2), (0, 0)))
    parts = [padded[:, i::2, j::2] for j in (0, 1) for i in (0, 1)]
    merged = np.concatenate(parts, -1)
    normed = (merged - merged.mean(-1, keepdims=True)) / np.sqrt(
        merged.var(-1, keepdims=True) + 1e-5
    )
    scale, bias = params['norm']['scale'], params['norm']['bias']
    kernel = params['reduction']['kernel']
    expected = (normed * scale + bias) @ kernel
    np.testing.assert_allclose(module.apply({'params': params}, x), expected, atol=1e-5)
    made = _convolve(jnp.asarray(padded), kernel)
    np.testing.assert_allclose(made, merged @ kernel, atol=1e-5)
