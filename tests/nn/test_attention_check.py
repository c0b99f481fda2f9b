"""The attention kernel is compared with XLA's attention where it will run; here it is plain JAX."""

import functools
import logging

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from vit_jax.config.run import Parallel
from vit_jax.errors import UserError
from vit_jax.models import vit
from vit_jax.nn import attention_choice
from vit_jax.nn.attention import AttentionSpec
from vit_jax.nn.attention_choice import Devices, runs_on
from vit_jax.nn.kernels import attention as attention_lib
from vit_jax.nn.kernels import check
from vit_jax.runtime import sharding, target

REAL = functools.partial(attention_lib.fused_attention, interpret=True)
CALL = AttentionSpec((16, 20, 32), 20, 2, 'float32')
SIZE = {'patch_size': 8, 'width': 16, 'depth': 2, 'mlp_dim': 16, 'num_heads': 2}


HERE = Devices('TPU v5 lite', measure=target.in_own_thread)


@jax.custom_vjp
def wrong_gradient(x):
    return x


wrong_gradient.defvjp(lambda x: (x, None), lambda _, g: (1.1 * g,))


def of_first_key(projected, *args):
    return REAL(tuple(x.at[:, 0].add(0.5) for x in projected), *args)


def unmasked(projected, num_heads, mask, *args):
    return REAL(projected, num_heads, None, *args)


def failing(*args):
    raise ValueError('Mosaic failed\nto compile')


BROKEN = {
    'one wrong token': of_first_key,
    'no mask': unmasked,
    'wrong gradient': lambda x, *args: REAL(tuple(map(wrong_gradient, x)), *args),
    'NaN': lambda *args: jnp.nan * REAL(*args),
    'no program': failing,
}


@pytest.fixture(autouse=True)
def intact(monkeypatch):
    """The kernel computes what it should; a process measures it once for layers of one size."""
    monkeypatch.setattr(attention_lib, 'fused_attention', REAL)


def broken(monkeypatch, name):
    monkeypatch.setattr(attention_lib, 'fused_attention', BROKEN[name])


@pytest.mark.slow
@pytest.mark.parametrize(
    ('call', 'block'),
    [
        (CALL, 0),
        (CALL._replace(dtype='bfloat16', layout=(2, 1), masked=True, rate=0.3), 0),
        (CALL._replace(dtype='bfloat16', keys=200, layout=(1, 2), segmented=True), 128),
        (CALL._replace(dtype='bfloat16', layout=(1, 1, 1), causal=True), 0),
    ],
)
def test_an_intact_kernel_differs_by_rounding(call, block):
    found = check.largest_difference(call, block)
    assert found < (1e-5 if call.dtype == 'float32' else check.TOLERANCE / 2)


@pytest.mark.parametrize('name', BROKEN)
def test_a_broken_kernel_is_noticed(monkeypatch, name, caplog):
    broken(monkeypatch, name)
    call = CALL._replace(keys=21 + [*BROKEN].index(name), masked=True)  # not yet measured
    assert check.numerical_failure(call, 0, target.in_own_thread)
    assert not caplog.records
    with runs_on(HERE):
        with pytest.raises(UserError, match="choose 'xla'") as caught:
            attention_choice.kernel_block('pallas', call)
        assert '\n' not in str(caught.value)
        assert attention_choice.kernel_block('auto', call) is None


def gradient(attention, devices, side=16):
    """The program of a ViT's gradient for images of a size, and its result."""
    model = vit.Model(**SIZE, attention=attention, scan=True, remat='names')
    images = jnp.linspace(-1, 1, 2 * side * side * 3).reshape(2, side, side, 3)
    shapes = jax.eval_shape(model.init, jax.random.key(0), images)
    params = jax.tree.map(lambda s: jnp.full(s.shape, 0.1), shapes)

    def loss(params):
        with runs_on(devices):
            return (model.apply(params, images)['pre_logits'] ** 2).sum()

    traced = jax.jit(jax.grad(loss)).trace(params)
    return str(traced.jaxpr), traced.lower().compile()(params)


@pytest.mark.slow
def test_it_is_compared_once_while_a_step_is_traced(caplog):
    with caplog.at_level(logging.WARNING):
        program, found = gradient('auto', HERE)
    assert 'pallas_call' in program
    (line,) = (record.message for record in caplog.records)
    assert 'within 0.00% of XLA for 5 queries, 5 keys' in line
    expected = gradient('xla', HERE)[1]
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-4), found, expected)


@pytest.mark.slow
def test_a_broken_kernel_leaves_the_step_to_xla_with_one_warning(monkeypatch, caplog):
    broken(monkeypatch, 'wrong gradient')
    program, _ = gradient('auto', HERE, side=24)
    (line,) = (record.message for record in caplog.records)
    assert 'more than 3%; the attention of XLA takes its place' in line
    assert program == gradient('xla', HERE, side=24)[0]
    with pytest.raises(UserError, match='differs from the attention of XLA by up to'):
        gradient('pallas', HERE, side=24)


def test_what_is_not_here_is_not_measured(monkeypatch):
    broken(monkeypatch, 'no program')
    with runs_on(Devices('TPU v5 lite')):
        assert attention_choice.kernel_block('pallas', CALL) == 0


@pytest.mark.parametrize('strategy', ['jit', 'pmap'])
def test_layouts_measure_on_tpus_of_this_process_alone(monkeypatch, strategy):
    layout = sharding.make_layout(jax.devices()[2:4], Parallel(strategy=strategy))
    monkeypatch.setattr(target, 'device_kind', lambda devices: 'TPU v5 lite')
    monkeypatch.setattr(
        check, 'numerical_failure', lambda call, block, measure: f'by {measure(on)}'
    )
    seen = []

    def on():
        array = jnp.ones(()) + 0.5
        seen.append(array.devices())
        return float(array)

    def trace():
        def step(variables, batch):
            attention_choice.kernel_block('auto', CALL)
            return batch['x'].sum()

        layout.compile_eval(step)({}, {'x': np.ones((2, 1), np.float32)})

    trace()
    assert not seen
    monkeypatch.setattr(target, 'local_accelerator', lambda devices: [*devices][1])
    trace()
    assert seen == [{jax.devices()[3]}]
