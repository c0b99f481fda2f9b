"""The kernel of attention in windows, run as plain JAX: equal to the layer's own attention."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers.pictures import drawn
from helpers.targets import pretend, runs_on

from vit_jax.config.run import Parallel, Step
from vit_jax.errors import UserError
from vit_jax.models import swin
from vit_jax.nn import device
from vit_jax.nn.attention import WindowSpec
from vit_jax.nn.attention_choice import Target, choose
from vit_jax.nn.axial import AxialAttention
from vit_jax.nn.kernels import check
from vit_jax.nn.kernels import windows as windows_lib
from vit_jax.nn.kernels.interface import PallasWindows
from vit_jax.nn.windows import WindowAttention
from vit_jax.runtime import sharding
from vit_jax.step import init_state, make_train_step
from vit_jax.tasks.classify import Task

REAL = functools.partial(windows_lib.window_attention, interpret=True)
TPU = Target('TPU v5 lite')


@pytest.fixture
def calls(monkeypatch):
    """What the kernel was called with."""
    found = []

    def called(qkv, bias, regions):
        found.append((qkv.shape, regions is not None))
        return REAL(qkv, bias, regions)

    monkeypatch.setattr(windows_lib, 'window_attention', called)
    return found


def results(attention, layout, *shape, num_heads=2, dim=16, dtype=jnp.float32):
    """A layer's result, and the gradients of its parameters and tokens."""
    height, width, window, shifted = shape
    layer = WindowAttention(num_heads, window, shifted, dtype=dtype, attention=attention)
    draw = np.random.default_rng(0).normal
    x = draw(size=(8, height, width, dim)).astype(np.float32)
    shapes = jax.eval_shape(layer.init, jax.random.key(0), x)
    params = jax.tree.map(lambda s: (0.5 * draw(size=s.shape)).astype(np.float32), shapes)

    def run(params, rows):
        out, pull = jax.vjp(lambda p, x: layer.apply(p, x), params, rows['x'])
        return out, *pull(jnp.cos(jnp.arange(out.size)).reshape(out.shape).astype(out.dtype))

    return layout.compile_eval(run)(params, layout.put_batch({'x': x}))


@pytest.mark.slow
@pytest.mark.parametrize(
    ('shape', 'devices', 'fields', 'windows'),
    [
        # Maps of whole windows, with padding, in shifted windows, and no larger than one of them.
        pytest.param((6, 9, 3, False), 1, {}, (8, 6, 9, 48), marks=pytest.mark.long),
        ((5, 7, 3, True), 8, {}, (1, 6, 9, 48)),
        ((8, 8, 4, True), 1, {'num_heads': 4, 'dim': 128}, (8, 4, 16, 384)),
        pytest.param((2, 4, 3, True), 8, {}, (1, 2, 4, 48), marks=pytest.mark.long),
        # Windows whose rows are padded to tiles: of 7 tokens to 8, but of 3 not to 8.
        pytest.param((14, 21, 7, True), 1, {}, (8, 6, 56, 48), marks=pytest.mark.long),
        pytest.param((9, 14, 7, False), 8, {}, (1, 4, 56, 48), marks=pytest.mark.long),
    ],
)
def test_a_layer_is_the_same(calls, monkeypatch, shape, devices, fields, windows):
    layout = sharding.make_layout(jax.devices()[:devices])
    expected = results('xla', layout, *shape, **fields)
    assert not calls
    pretend(monkeypatch, TPU.kind)
    found = results('pallas', layout, *shape, **fields)
    assert calls == [(windows, shape[3] and min(shape[:2]) > shape[2])]
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5 * max(np.abs(b).max(), 1))


LAYOUTS = {
    'one': {},
    'pmap': {'strategy': 'pmap'},
    'slices': {'slices': 2, 'fsdp': 2, 'min_split_size': 8},
}
ROWS = 16


def trained(attention, layout_name):
    """Parameters of a small Swin after a step."""
    model = swin.Model(
        num_classes=3,
        **{'width': 16, 'depths': (2,), 'num_heads': (2,), 'window': 2, 'patch_size': 4},
        attention=attention,
    )
    rng, tx = np.random.default_rng(0), optax.sgd(1.0)
    images = rng.integers(0, 256, (ROWS, 16, 16, 3), np.uint8)
    batch = {'image': images, 'label': np.arange(ROWS, dtype=np.int32) % 3}

    def make():
        params = drawn(model, jax.ShapeDtypeStruct((1, 16, 16, 3), jnp.float32))
        return init_state({'params': params}, tx, seed=0, ema=False)

    devices = jax.devices()[: 1 if layout_name == 'one' else 8]
    layout = sharding.make_layout(devices, Parallel(**LAYOUTS[layout_name]))
    train_step = make_train_step(model, Task(), tx, Step(), layout)
    step = layout.compile_train(train_step, jax.eval_shape(make))
    state, _ = step(layout.create(make), layout.put_batch(batch))
    return jax.tree.map(np.asarray, layout.to_global(state).params)


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize(('layout', 'rows'), [(layout, 2) for layout in ('slices', 'pmap')])
def test_a_step_is_the_same_in_every_layout(calls, monkeypatch, layout, rows):
    expected = trained('xla', 'one')
    assert not calls
    pretend(monkeypatch, TPU.kind)
    found = trained('pallas', layout)
    assert set(calls) == {((rows, 4, 4, 48), False), ((rows, 4, 4, 48), True)}
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-5), found, expected)


@pytest.mark.slow
@pytest.mark.parametrize(
    ('axis', 'causal'), [('row', True), pytest.param('column', False, marks=pytest.mark.long)]
)
def test_lines_of_a_grid_are_windows(calls, axis, causal):
    draw = np.random.default_rng(0).normal
    x, context = (draw(size=(2, 3, 5, width)).astype(np.float32) for width in (16, 6))
    make = functools.partial(AxialAttention, 2, axis, causal)
    shapes = jax.eval_shape(make().init, jax.random.key(0), x, context)
    params = jax.tree.map(lambda s: (0.5 * draw(size=s.shape)).astype(np.float32), shapes)

    @functools.partial(jax.jit, static_argnums=0)
    def run(attention, *inputs):
        with runs_on(TPU):
            out, pull = jax.vjp(make(attention=attention).apply, *inputs)
        return out, pull(jnp.cos(jnp.arange(out.size)).reshape(out.shape))

    expected = run('xla', params, x, context)
    assert not calls
    found = run('auto', params, x, context)
    assert calls == [((2, 3, 5, 48) if axis == 'row' else (2, 5, 3, 48), False)]
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5 * max(np.abs(b).max(), 1))


@pytest.mark.slow
@pytest.mark.parametrize(
    ('shape', 'heads', 'dtype', 'shifted', 'most'),
    [
        ((2, 6, 49, 96), 3, 'float32', True, 1e-5),
        pytest.param((2, 6, 49, 96), 3, 'float32', False, 1e-5, marks=pytest.mark.long),
        pytest.param((2, 4, 49, 256), 8, 'float32', True, 1e-5, marks=pytest.mark.long),
        pytest.param((2, 4, 49, 256), 8, 'float32', False, 1e-5, marks=pytest.mark.long),
        ((2, 4, 49, 64), 2, 'bfloat16', True, check.TOLERANCE / 2),
        pytest.param(
            *((2, 4, 49, 64), 2, 'bfloat16', False, check.TOLERANCE / 2), marks=pytest.mark.long
        ),
    ],
)
def test_results_and_gradients_are_those_of_attention(
    monkeypatch, shape, heads, dtype, shifted, most
):
    monkeypatch.setattr(windows_lib, 'window_attention', REAL)
    assert (
        check.largest_difference(PallasWindows(), WindowSpec(shape, heads, dtype, shifted)) < most
    )


def broken(qkv, bias, regions):
    return REAL(qkv, bias, None)


def test_a_broken_kernel_is_left_or_refused(monkeypatch, caplog):
    monkeypatch.setattr(windows_lib, 'window_attention', broken)
    call = WindowSpec((8, 4, 9, 16), 2, 'float32', True)
    monkeypatch.setattr(device, 'local_accelerator', lambda kind: jax.devices()[0])
    assert choose('auto', call, TPU) is None
    assert choose('auto', call, TPU) is None
    with pytest.raises(UserError, match='XLA'):
        choose('pallas', call, TPU)
    (record,) = caplog.records
    assert 'windows of 9 tokens' in record.message


@pytest.mark.parametrize(
    ('devices', 'fields', 'message'),
    [
        (TPU, {'dropout': 0.1}, 'support.*dropout'),
        (Target('cpu'), {}, 'this is cpu'),
        (TPU._replace(shards=3), {}, 'a multiple of 3'),
        (Target('TPU v4'), {'num_heads': 64, 'window': 24}, '576 tokens of width 64 need'),
    ],
)
def test_what_the_kernel_cannot_do_is_left_to_xla_or_refused(calls, devices, fields, message):
    fields = {'num_heads': 2, 'window': 4, **fields}
    x = jnp.zeros((2, 24, 24, 64))

    def attend(attention):
        layer = WindowAttention(**fields, attention=attention)
        variables = jax.eval_shape(layer.init, jax.random.key(0), x)
        with runs_on(devices):
            rngs = {'dropout': jax.random.key(0)}
            jax.eval_shape(functools.partial(layer.apply, train=True, rngs=rngs), variables, x)

    attend('auto')
    with pytest.raises(UserError, match=message):
        attend('pallas')
    assert not calls


def test_swin_takes_it_in_every_block_unless_the_weights_are_wanted(calls):
    model = swin.Model(width=16, depths=(2, 1), num_heads=(2, 4), window=2, patch_size=2)
    images = jnp.zeros((2, 8, 8, 3))
    variables = jax.eval_shape(model.init, jax.random.key(0), images)
    with runs_on(TPU):
        jax.eval_shape(model.apply, variables, images)
        assert calls == [((2, 4, 4, 48), False), ((2, 4, 4, 48), True), ((2, 1, 4, 96), False)]
        jax.eval_shape(functools.partial(model.apply, mutable='intermediates'), variables, images)
    assert len(calls) == 3


@pytest.mark.parametrize(('heads', 'width', 'shifted'), [(3, 96, True), (12, 384, False)])
def test_it_can_be_lowered_for_tpus(heads, width, shifted):
    qkv, bias = jnp.zeros((2, 4, 49, 3 * width), jnp.bfloat16), jnp.zeros((heads, 49, 49))
    regions = jnp.zeros((4, 49), jnp.int32) if shifted else None

    def total(*inputs):
        return windows_lib.window_attention(*inputs, regions).astype(jnp.float32).sum()

    lowered = jax.jit(jax.grad(total, (0, 1))).trace(qkv, bias).lower(lowering_platforms=('tpu',))
    assert lowered.as_text().count('tpu_custom_call') == 1


def test_a_program_has_a_divisor_of_the_windows_that_fits():
    assert windows_lib.windows_per_program(64, 49, 96, 2) == 8
    assert windows_lib.windows_per_program(6, 49, 96, 2) == 6
    assert windows_lib.windows_per_program(11, 49, 96, 2) == 1
    assert windows_lib.windows_per_program(64, 144, 1024, 2) == 1
