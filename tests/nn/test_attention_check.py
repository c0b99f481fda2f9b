"""The attention kernel is compared with XLA's attention where it will run; here it is plain JAX."""

import functools
import logging

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.messages import says
from helpers.targets import pretend, runs_on

from vit_jax.config.run import Parallel
from vit_jax.errors import UserError
from vit_jax.models import vit
from vit_jax.nn import attention_choice, device
from vit_jax.nn.attention import AttentionSpec
from vit_jax.nn.attention_choice import Target, choose
from vit_jax.nn.kernels import attention as attention_lib
from vit_jax.nn.kernels import check
from vit_jax.nn.kernels.interface import Pallas
from vit_jax.runtime import sharding

REAL = functools.partial(attention_lib.fused_attention, interpret=True)
CALL = AttentionSpec((16, 20, 32), 20, 2, 'float32')
SIZE = {'patch_size': 8, 'width': 16, 'depth': 2, 'mlp_dim': 16, 'num_heads': 2}


TPU = Target('TPU v5 lite')


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


@pytest.fixture
def here(monkeypatch):
    """A CPU of this machine passes for any accelerator."""
    monkeypatch.setattr(device, 'local_accelerator', lambda kind: jax.devices()[0])


def broken(monkeypatch, name):
    monkeypatch.setattr(attention_lib, 'fused_attention', BROKEN[name])


@pytest.mark.slow
@pytest.mark.parametrize(
    ('call', 'block'),
    [
        (CALL, 0),
        *(
            pytest.param(CALL._replace(dtype='bfloat16', **fields), block, marks=pytest.mark.long)
            for fields, block in (
                ({'layout': (2, 1), 'masked': True, 'rate': 0.3}, 0),
                ({'keys': 200, 'layout': (1, 2), 'segmented': True}, 128),
                ({'layout': (1, 1, 1), 'causal': True}, 0),
            )
        ),
    ],
)
def test_an_intact_kernel_differs_by_rounding(call, block):
    found = check.largest_difference(Pallas(block), call)
    assert found < (1e-5 if call.dtype == 'float32' else check.TOLERANCE / 2)


@pytest.mark.parametrize('name', BROKEN)
def test_a_broken_kernel_is_noticed(monkeypatch, here, name, caplog):
    broken(monkeypatch, name)
    call = CALL._replace(keys=21 + [*BROKEN].index(name), masked=True)  # not yet measured
    assert check.failure(Pallas(), call, TPU.kind)
    assert not caplog.records
    with pytest.raises(UserError, match="choose 'xla'") as caught:
        choose('pallas', call, TPU)
    assert '\n' not in str(caught.value)
    assert choose('auto', call, TPU) is None


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
def test_it_is_compared_once_while_a_step_is_traced(here, caplog):
    with caplog.at_level(logging.WARNING):
        program, found = gradient('auto', TPU)
    assert 'pallas_call' in program
    (line,) = (record.message for record in caplog.records)
    assert 'within 0.00% of XLA for 5 queries, 5 keys' in line
    expected = gradient('xla', TPU)[1]
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-4), found, expected)


@pytest.mark.slow
def test_a_broken_kernel_leaves_the_step_to_xla_with_one_warning(monkeypatch, here, caplog):
    broken(monkeypatch, 'wrong gradient')
    program, _ = gradient('auto', TPU, side=24)
    (line,) = (record.message for record in caplog.records)
    assert says(line, 'more than 3%;', 'XLA')
    assert program == gradient('xla', TPU, side=24)[0]
    with pytest.raises(UserError, match='XLA'):
        gradient('pallas', TPU, side=24)


def test_what_is_not_here_is_not_measured(monkeypatch):
    broken(monkeypatch, 'no program')
    assert choose('pallas', CALL, TPU) == Pallas()


@pytest.mark.parametrize('strategy', ['jit', 'pmap'])
def test_layouts_measure_on_a_device_of_this_process(monkeypatch, strategy):
    layout = sharding.make_layout(jax.devices()[2:4], Parallel(strategy=strategy))
    monkeypatch.setattr(check, '_failures', {})
    pretend(monkeypatch, TPU.kind)
    seen = []

    def largest_difference(kernel, spec):
        array = jnp.ones(()) + 0.5
        seen.append(array.devices())
        return float(array)

    monkeypatch.setattr(check, 'largest_difference', largest_difference)

    def trace():
        def step(variables, batch):
            choose('auto', CALL, attention_choice.current_target())
            return batch['x'].sum()

        layout.compile_eval(step)({}, {'x': np.ones((2, 1), np.float32)})

    trace()
    assert not seen
    monkeypatch.setattr(device, 'local_accelerator', lambda kind: jax.devices()[3])
    trace()
    assert seen == [{jax.devices()[3]}]
