"""When layers take cuDNN's attention, and that they pass it what they should; XLA stands in."""

import functools
import logging
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.messages import mentions
from helpers.pictures import drawn
from helpers.targets import pretend, runs_on
from jax import export
from jax._src.cudnn import fused_attention_stablehlo as jax_cudnn

from vit_jax.errors import UserError
from vit_jax.models import seq2seq, vit
from vit_jax.nn import attention_choice, device
from vit_jax.nn.attention import AttentionSpec, Segments, causal_mask
from vit_jax.nn.attention_choice import Target, choose
from vit_jax.nn.kernels import check, cudnn
from vit_jax.nn.kernels.interface import Cudnn
from vit_jax.nn.multi_head import MultiHeadAttention
from vit_jax.nn.norms import LayerNorm
from vit_jax.nn.rotary import Layout, rope
from vit_jax.runtime import sharding

GPU = Target('NVIDIA H100 80GB HBM3')
SPEC = AttentionSpec((2, 8, 32), 8, 2, 'bfloat16')
REAL = cudnn.fused_attention
by_xla = functools.partial(REAL, implementation='xla')


def takes_cudnn(attention, spec, target):
    return isinstance(choose(attention, spec, target), Cudnn)


@pytest.fixture
def calls(monkeypatch):
    """The shapes and options that the kernel was called with."""
    found = []

    def called(projected, num_heads, mask, segments, bias, causal, implementation='cudnn'):
        assert implementation == 'cudnn'
        options = {'mask': mask, 'segments': segments, 'bias': bias, 'causal': causal or None}
        found.append(
            (
                [x.shape for x in projected],
                {name for name, value in options.items() if value is not None},
            )
        )
        return REAL(projected, num_heads, mask, segments, bias, causal, implementation='xla')

    monkeypatch.setattr(cudnn, 'fused_attention', called)
    monkeypatch.setattr(attention_choice, 'FEWEST_KEYS_OF_CUDNN', 2)
    attention_choice._warn_once.cache_clear()
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    ('queries', 'keys', 'options'),
    [
        (8, 8, {'masked': True, 'causal': True}),
        pytest.param(7, 7, {}, marks=pytest.mark.long),
        pytest.param(7, 7, {'masked': True}, marks=pytest.mark.long),
        (7, 7, {'masked': True, 'mask_queries': True}),
        pytest.param(7, 7, {'segmented': True}, marks=pytest.mark.long),
        (7, 7, {'causal': True}),
        (7, 7, {'bias_rows': 1}),
        pytest.param(6, 9, {'masked': True}, marks=pytest.mark.long),
        (5, 8, {'segmented': True}),
    ],
)
def test_even_and_odd_tokens_masks_and_biases_are_those_of_the_equation(queries, keys, options):
    layout = (3,) if queries == keys else (1, 2)
    spec = AttentionSpec((2, queries, 32), keys, 2, 'float32', layout, **options)
    with mock.patch.object(cudnn, 'fused_attention', by_xla):
        assert check.largest_difference(Cudnn(), spec) < 1e-6


@pytest.mark.slow
def test_scores_of_bfloat16_have_gradients_of_bfloat16_matmuls():
    """The attention of XLA, where cuDNN's cannot be used."""
    x = jnp.asarray(np.random.default_rng(0).normal(size=(2, 2, 6, 8)), jnp.bfloat16)

    def total(x, y):
        from vit_jax.nn.attention import scaled_dot_product

        return scaled_dot_product(x, y, y)[0].astype(jnp.float32).sum()

    text = str(jax.make_jaxpr(jax.grad(total, argnums=(0, 1)))(x, x))
    matmuls = [line for line in text.splitlines() if 'dot_general' in line]
    assert matmuls
    assert not [line for line in matmuls if ' = dot_general[' in line and 'f32[2,2,6,8]' in line]
    gradients = jax.jit(jax.grad(total, argnums=(0, 1)))
    found, expected = gradients(x, x), gradients(*[x.astype(jnp.float32)] * 2)
    for a, b in zip(found, expected, strict=True):
        assert a.dtype == jnp.bfloat16
        np.testing.assert_allclose(a, b, atol=0.02 * np.abs(b).max())


def outputs(layer, x, devices, **options):
    """The layer's result and the gradients of its parameters and inputs."""
    params = drawn(layer, jax.ShapeDtypeStruct(x.shape, x.dtype))

    def apply(params, x):
        with runs_on(devices):
            return layer.apply({'params': params}, x, **options)

    @jax.jit
    def push(params, x):
        out, pull = jax.vjp(apply, params, x)
        return out, *pull(jnp.ones_like(out))

    return push(params, x)


@pytest.mark.slow
@pytest.mark.parametrize(
    ('fields', 'options', 'passed'),
    [
        ({}, {}, set()),
        ({'no_bias': ('query', 'key')}, {'causal': True}, {'causal'}),
        ({}, {'mask': causal_mask(7)}, {'mask'}),
        ({}, {'bias': jnp.linspace(-1, 1, 98).reshape(1, 2, 7, 7)}, {'bias'}),
        ({}, {'segments': Segments(*[jnp.array([[1, 1, 2, 2, 2, 0, 0]] * 2)] * 2)}, {'segments'}),
        ({'kernels': ('q', 'kv')}, {}, set()),
    ],
)
def test_a_layer_computes_the_same_by_cudnn(calls, fields, options, passed):
    x = jnp.asarray(np.random.default_rng(0).normal(size=(2, 7, 16)), jnp.bfloat16)
    make = functools.partial(MultiHeadAttention, 2, dtype=jnp.bfloat16, **fields)
    found = outputs(make(attention='cudnn' if 'bias' in options else 'auto'), x, GPU, **options)
    assert calls == [([(2, 7, 16)] * 3, passed)]
    expected = outputs(make(attention='xla'), x, GPU, **options)
    assert len(calls) == 1
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, atol=0.03 * float(jnp.abs(b).max()) + 1e-3)


@pytest.mark.slow
@pytest.mark.long
def test_queries_and_keys_are_normed_and_rotated_before_it(calls):
    x = jnp.asarray(np.random.default_rng(0).normal(size=(2, 5, 16)), jnp.bfloat16)
    norm = functools.partial(LayerNorm, 1e-6)
    make = functools.partial(MultiHeadAttention, 2, dtype=jnp.bfloat16, qk_norm=norm)
    rotary = rope(Layout((2, 2), first=1), 8)
    found = outputs(make(attention='auto'), x, GPU, rotary=rotary)[0]
    assert calls == [([(2, 5, 16)] * 3, set())]
    expected = outputs(make(attention='xla'), x, GPU, rotary=rotary)[0]
    np.testing.assert_allclose(found, expected, atol=0.03 * float(jnp.abs(expected).max()))


@pytest.mark.parametrize(
    ('spec', 'devices', 'message'),
    [
        (SPEC._replace(dtype='float32'), GPU, 'bfloat16 or float16, not float32'),
        (SPEC._replace(shape=(2, 8, 40), num_heads=4), GPU, 'multiple of 8 up to 128, not 10'),
        (SPEC._replace(rate=0.1), GPU, 'dropout of weights'),
        (SPEC._replace(bias_rows=2), GPU, 'examples.*share'),
        (SPEC._replace(bias_rows=1, masked=True), GPU, 'bias.*together'),
        (SPEC._replace(shape=(2, 1, 32)), GPU, 'queries.*keys'),
        (SPEC._replace(shape=(2, 3, 8, 32)), GPU, r'needs \[B N D\]'),
        (SPEC, GPU._replace(whole=False), 'config.parallel.tensor'),
        (SPEC, GPU._replace(shards=4), 'a multiple of 4'),
    ],
)
def test_what_cudnn_cannot_do_is_left_to_xla_with_one_line_or_refused(
    calls, caplog, spec, devices, message
):
    with caplog.at_level(logging.WARNING):
        assert not takes_cudnn('auto', spec, devices)
        assert not takes_cudnn('auto', spec, devices)
        (line,) = (record.message for record in caplog.records)
        assert mentions(line, 'attention', 'XLA')
        with pytest.raises(UserError, match=message) as caught:
            takes_cudnn('cudnn', spec, devices)
        assert '\n' not in str(caught.value)


def test_short_sequences_and_biases_are_left_to_xla_unless_cudnn_is_named(caplog):
    with caplog.at_level(logging.WARNING):
        few, many = (SPEC._replace(keys=keys) for keys in (50, 64))
        assert takes_cudnn('auto', many, GPU)
        for left in (few, many._replace(bias_rows=1)):
            assert not takes_cudnn('auto', left, GPU)
            assert takes_cudnn('cudnn', left, GPU)
    assert not caplog.records


def test_each_device_has_its_own_kernel(calls, caplog):
    x = jnp.zeros((2, 8, 32), jnp.bfloat16)
    layer = functools.partial(MultiHeadAttention, 2, dtype=jnp.bfloat16)
    for kind in ('cpu', 'TPU v5 lite'):
        assert not takes_cudnn('auto', SPEC, Target(kind))
        with pytest.raises(UserError, match=f'NVIDIA GPU.* {kind}'):
            takes_cudnn('cudnn', SPEC, Target(kind))
    with pytest.raises(UserError, match=r'TPU.*NVIDIA'):
        outputs(layer(attention='pallas'), x, GPU)
    assert not calls and not caplog.records


def test_it_is_compared_before_it_is_trusted(calls, monkeypatch, caplog):
    monkeypatch.setattr(device, 'local_accelerator', lambda kind: jax.devices()[0])
    spec = SPEC._replace(shape=(2, 12, 32), keys=12)
    with caplog.at_level(logging.WARNING):
        assert takes_cudnn('auto', spec, GPU)
        assert mentions(caplog.records[0].message, 'attention', '0')

        def failing(*args):
            raise RuntimeError('cuDNN is not detected.')

        monkeypatch.setattr(cudnn, 'fused_attention', failing)
        spec = spec._replace(causal=True)
        assert not takes_cudnn('auto', spec, GPU)
        assert mentions(caplog.records[-1].message, 'cuDNN', 'detected')
        with pytest.raises(UserError, match=r'cuDNN.*detected'):
            takes_cudnn('cudnn', spec, GPU)


def test_models_of_images_and_texts_take_it_for_all_their_attention(calls):
    size = {'width': 16, 'depth': 1, 'num_heads': 2, 'mlp_dim': 16}
    images = jnp.zeros((2, 16, 16, 3))
    model = vit.Model(**size, patch_size=8, pool='cls', dtype='bfloat16')
    variables = jax.eval_shape(model.init, jax.random.key(0), images)
    with runs_on(GPU):
        jax.eval_shape(model.apply, variables, images)
    assert calls == [([(2, 5, 16)] * 3, set())]
    calls.clear()
    text = seq2seq.Model(9, **size, dtype='bfloat16')
    tokens = [jnp.ones((2, n), jnp.int32) for n in (7, 5)]
    variables = jax.eval_shape(text.init, jax.random.key(0), *tokens)
    with runs_on(GPU):
        jax.eval_shape(text.apply, variables, *tokens)
    assert calls == [
        ([(2, 7, 16)] * 3, {'mask'}),
        ([(2, 5, 16)] * 3, {'causal'}),
        ([(2, 5, 16), (2, 7, 16), (2, 7, 16)], {'mask'}),
    ]


def test_every_device_attends_within_its_own_rows(calls, monkeypatch):
    """With a learned bias, whose gradient is the sum over the devices."""
    rows = np.random.default_rng(0).normal(size=(8, 6, 16)).astype(np.float32)
    bias = jnp.linspace(-1, 1, 72).reshape(1, 2, 6, 6)

    def ran(attention):
        layout = sharding.make_layout(jax.devices()[:4])
        layer = MultiHeadAttention(2, dtype=jnp.bfloat16, attention=attention)
        params = drawn(layer, jax.ShapeDtypeStruct((1, 6, 16), jnp.float32))

        def run(variables, batch):
            def apply(variables):
                return layer.apply(
                    {'params': variables['params']}, batch['x'], bias=variables['bias']
                )

            out, pull = jax.vjp(apply, variables)
            return out, pull(jnp.ones_like(out))

        variables = {'params': params, 'bias': bias}
        return layout.compile_eval(run)(variables, layout.put_batch({'x': rows}))

    expected = ran('xla')
    assert not calls
    pretend(monkeypatch, GPU.kind)
    found = ran('cudnn')
    assert calls == [([(2, 6, 16)] * 3, {'bias'})]
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, atol=0.01 * float(jnp.abs(b).max()) + 1e-3)


def test_a_program_for_an_assumed_gpu_takes_it_on_gpus_alone(monkeypatch):
    """It may be compiled for another platform, as by arrays that are put on the CPU."""
    monkeypatch.setattr(jax_cudnn, 'check_cudnn_version', lambda: 91200)  # there is no cuDNN here
    model = vit.Model(width=16, depth=1, num_heads=2, mlp_dim=16, patch_size=2, dtype='bfloat16')
    images = jax.ShapeDtypeStruct((2, 16, 16, 3), jnp.float32)
    variables = jax.eval_shape(model.init, jax.random.key(0), images)
    allowed = [export.DisabledSafetyCheck.custom_call('__cudnn$fmhaSoftmax')]
    with runs_on(GPU._replace(assumed=True)):
        for platform in ('cuda', 'cpu'):
            make = export.export(
                jax.jit(model.apply), platforms=[platform], disabled_checks=allowed
            )
            text = make(variables, images).mlir_module()
            assert ('__cudnn$fmha' in text) == (platform == 'cuda')
