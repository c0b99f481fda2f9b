"""Rotary positions: the definition in complex numbers, transformers' tables, random changes."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.targets import runs_on

from vit_jax.errors import UserError
from vit_jax.nn.attention_choice import Target
from vit_jax.nn.multi_head import MultiHeadAttention
from vit_jax.nn.rotary import Layout, Rotary, rope, rope_dinov3


def heads_like(*shape):
    return jnp.asarray(np.random.default_rng(0).normal(size=shape), jnp.float32)


@pytest.mark.parametrize('order', ['yx', 'xy'])
def test_pairs_are_complex_numbers_turned_by_row_and_column(order):
    """EVA-02's: channels 2i and 2i + 1 are a pair, the first half turns with the row."""
    x = heads_like(2, 3, 7, 16)
    layout = Layout((2, 3), first=1)
    options = {'theta': 100.0, 'reference': 4, 'offset': 1.0, 'order': order}
    found = rope(layout, 16, **options).rotate(x)
    y, column = np.mgrid[1:3, 1:4].reshape(2, 6, 1) * np.array([4 / 2, 4 / 3]).reshape(2, 1, 1)
    first, second = (y, column) if order == 'yx' else (column, y)
    frequencies = 100.0 ** -(np.arange(4) / 4)
    angles = np.concatenate([first * frequencies, second * frequencies], axis=1)
    pairs = np.asarray(x)[:, :, 1:].reshape(2, 3, 6, 8, 2)
    turned = (pairs[..., 0] + 1j * pairs[..., 1]) * np.exp(1j * angles)
    expected = np.stack([turned.real, turned.imag], axis=-1).reshape(2, 3, 6, 16)
    np.testing.assert_allclose(found[:, :, 1:], expected, atol=1e-5)
    # A token without a place stays exactly as it is.
    np.testing.assert_array_equal(found[:, :, 0], x[:, :, 0])


@pytest.mark.parity
def test_places_and_pairs_are_those_of_transformers():
    torch = pytest.importorskip('torch')
    video = pytest.importorskip('transformers.models.sam2_video.modeling_sam2_video')
    dino = pytest.importorskip('transformers.models.dinov3_vit.modeling_dinov3_vit')
    x = heads_like(2, 3, 6, 16)
    q = torch.from_numpy(np.array(x))

    # SAM 2 turns the first half of the pairs with the column.
    frequencies = 10_000.0 ** -(torch.arange(0, 8, 2) / 8)
    rows, columns = torch.meshgrid(torch.arange(2), torch.arange(3), indexing='ij')
    angles = [axis.flatten()[:, None] * frequencies for axis in (columns, rows)]
    angles = torch.cat(angles, dim=-1).repeat_interleave(2, dim=-1)
    turned = q * angles.cos() + video.rotate_pairwise(q) * angles.sin()
    found = rope(Layout((2, 3)), 16, order='xy').rotate(x)
    np.testing.assert_allclose(found, turned, atol=1e-6)

    config = dino.DINOv3ViTConfig(hidden_size=48, num_attention_heads=3, patch_size=4)
    tables = dino.DINOv3ViTRopePositionEmbedding(config).eval()(torch.zeros(1, 3, 8, 12))
    turned, _ = dino.apply_rotary_pos_emb(q, q, *tables)
    found = rope_dinov3(Layout((2, 3)), 16).rotate(x)
    np.testing.assert_allclose(found, turned, atol=1e-6)


def angles_of(rotary):
    return np.arctan2(rotary.sin, rotary.cos)


@functools.partial(jax.jit, static_argnums=(1, 2, 3))
def drawn(key, shift, jitter, rescale):
    """Tables for heads of 4 channels, which turn by less than half a turn with each axis."""
    options = {'theta': 1e6, 'shift': shift, 'jitter': jitter, 'rescale': rescale}
    tables = rope_dinov3(Layout((3, 4), registers=1), 8, lambda: key, **options)
    return tables.cos, tables.sin


def test_places_change_at_random_as_in_dinov3():
    """The slow pairs, whose angles are far from a whole turn, show what was done to the places."""
    plain = angles_of(rope_dinov3(Layout((3, 4), registers=1), 8, theta=1e6))[1:, 1::2]
    for key in jax.random.split(jax.random.key(0), 20):
        found = {}
        for name, limits in {
            'shift': (0.5, 1.0, 1.0),
            'jitter': (0.0, 1.5, 1.0),
            'rescale': (0.0, 1.0, 2.0),
        }.items():
            tables = Rotary(*drawn(key, *limits))
            np.testing.assert_array_equal(tables.sin[0], 0)  # the register stays
            found[name] = angles_of(tables)[1:, 1::2]
        unit = 2 * np.pi / 1000
        shifts = (found['shift'] - plain) / unit
        np.testing.assert_allclose(shifts, np.broadcast_to(shifts[:1], (12, 2)), atol=1e-4)
        assert (np.abs(shifts) <= 0.5 + 1e-4).all()
        assert shifts[0, 0] != pytest.approx(shifts[0, 1])
        inside = np.abs(plain) > 1e-6  # the middle row stays where it is
        for name, most in (('jitter', 1.5), ('rescale', 2.0)):
            factors = [found[name][:, i][inside[:, i]] / plain[:, i][inside[:, i]] for i in (0, 1)]
            for axis in factors:
                np.testing.assert_allclose(axis, axis[0], rtol=1e-3)
                assert 1 / most - 1e-3 <= axis[0] <= most + 1e-3
            same = factors[0][0] == pytest.approx(factors[1][0], rel=1e-3)
            assert same == (name == 'rescale')


def test_without_changes_no_key_is_drawn():
    def draw():
        raise AssertionError('drawn')

    rope_dinov3(Layout((2, 2)), 8, draw)
    rope(Layout((2, 2)), 8, draw)


@pytest.mark.parametrize('normalize', ['separate', 'max', 'min'])
def test_the_normalized_side_goes_from_minus_one_to_one(normalize):
    angles = angles_of(rope_dinov3(Layout((2, 4)), 8, theta=1e6, normalize=normalize))[:, 1::2]
    places = angles * 1000 / (2 * np.pi)
    ends = {
        'separate': ((-0.5, 0.5), (-0.75, 0.75)),
        'max': ((-0.75, -0.25), (-0.75, 0.75)),
        'min': ((-0.5, 0.5), (-0.5, 2.5)),
    }[normalize]
    found = list(zip(places.min(0), places.max(0), strict=True))
    np.testing.assert_allclose(found, ends, atol=1e-4)


def test_registers_form_a_grid_of_their_own():
    tables = rope(Layout((2, 2), first=1, registers=4), 8, theta=100.0, registers=9.0)
    alone = rope(Layout((2, 2)), 8, theta=9.0)
    np.testing.assert_array_equal(tables.cos[1:5], alone.cos)
    np.testing.assert_array_equal(tables.cos[5:], rope(Layout((2, 2)), 8, theta=100.0).cos)
    with pytest.raises(UserError, match=r'registers.*\b3\b'):
        rope(Layout((2, 2), registers=3), 8, registers=9.0)


@pytest.mark.parametrize(
    ('options', 'message'),
    [
        ({'normalize': 'both'}, "unknown normalize 'both'"),
        ({'jitter': 0.5}, 'rescale.*1'),
    ],
)
def test_impossible_options_are_refused(options, message):
    with pytest.raises(UserError, match=message):
        rope_dinov3(Layout((2, 2)), 8, **options)
    with pytest.raises(UserError, match=r'heads.*\b6\b'):
        rope(Layout((2, 2)), 6)


def test_scores_depend_on_the_difference_of_places():
    q, k = heads_like(2, 1, 1, 1, 8)
    tables = rope(Layout((4, 4)), 8, theta=10.0)
    at = [tables.replace(cos=tables.cos[i : i + 1], sin=tables.sin[i : i + 1]) for i in range(16)]
    score = [[float((a.rotate(q) * b.rotate(k)).sum()) for b in at] for a in at]
    assert score[0][5] == pytest.approx(score[10][15], abs=1e-5)
    assert score[0][5] != pytest.approx(score[0][6], abs=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize('norm', [None, 'layer'])
def test_the_kernel_takes_positions_and_norms(monkeypatch, norm):
    import flax.linen as nn

    from vit_jax.nn.kernels import attention as attention_lib

    real = functools.partial(attention_lib.fused_attention, interpret=True)
    called = []

    def fused(projected, *args):
        called.append([x.shape for x in projected])
        return real(projected, *args)

    monkeypatch.setattr(attention_lib, 'fused_attention', fused)
    qk_norm = norm and functools.partial(nn.LayerNorm, 1e-6)
    layer = functools.partial(MultiHeadAttention, 2, qk_norm=qk_norm, no_bias=('key',))
    x = heads_like(2, 5, 16)
    rotary = rope(Layout((2, 2), first=1), 8)
    shapes = jax.eval_shape(layer().init, jax.random.key(0), x)
    params = jax.tree.map(lambda p: heads_like(*p.shape), shapes)

    def loss(attention, params):
        with runs_on(Target('TPU v5 lite')):
            y = layer(attention=attention).apply(params, x, rotary=rotary)
        return (y**2).mean(), y

    results = [
        jax.jit(jax.value_and_grad(functools.partial(loss, attention), has_aux=True))(params)
        for attention in ('pallas', 'xla')
    ]
    assert called == [[(2, 5, 16)] * 3]
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-4), *results)
