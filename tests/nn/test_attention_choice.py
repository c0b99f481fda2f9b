"""When models take the attention kernel of TPUs, in every layout and way of making blocks."""

import functools
import logging

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers.pictures import drawn
from helpers.targets import pretend, runs_on
from jax.sharding import AbstractMesh, AxisType

from vit_jax.config.run import Parallel, Step
from vit_jax.errors import UserError
from vit_jax.models import detr, mae, seq2seq, vit
from vit_jax.nn.attention import AttentionSpec, causal_mask
from vit_jax.nn.attention_choice import Target, choose, current_target
from vit_jax.nn.encoder_decoder import DecoderBlock, Memory
from vit_jax.nn.kernels import attention as attention_lib
from vit_jax.nn.multi_head import MultiHeadAttention
from vit_jax.runtime import sharding
from vit_jax.step import init_state, make_train_step
from vit_jax.tasks import translate
from vit_jax.tasks.classify import Task

SIZE = {'patch_size': 8, 'width': 16, 'depth': 1, 'mlp_dim': 16, 'num_heads': 2}
TPU = Target('TPU v5 lite')
LAYOUTS = {
    'one': {},
    'fsdp': {'fsdp': 8, 'min_split_size': 8},
    'pmap': {'strategy': 'pmap'},
}
ROWS = 16


@pytest.fixture
def calls(monkeypatch):
    """What the kernel was called with; it runs as plain JAX."""
    found = []
    real = functools.partial(attention_lib.fused_attention, interpret=True)

    def called(projected, num_heads, mask, segments, kept, causal, rate, block):
        assert not block
        options = {'masked': mask is not None, 'causal': causal, 'drops': kept is not None}
        found.append(call(*(x.shape for x in projected), **options))
        return real(projected, num_heads, mask, segments, kept, causal, rate)

    monkeypatch.setattr(attention_lib, 'fused_attention', called)
    return found


def call(*shapes, masked=False, causal=False, drops=False):
    return *shapes, masked, causal, drops


def batch():
    rng = np.random.default_rng(0)
    images = rng.integers(0, 256, (ROWS, 16, 16, 3), np.uint8)
    return {'image': images, 'label': np.arange(ROWS, dtype=np.int32) % 3}


def init(model):
    """A state none of whose parameters is at its initial zero."""
    params = drawn(model, jax.ShapeDtypeStruct((1, 16, 16, 3), jnp.float32))
    return init_state({'params': params}, optax.sgd(1.0), seed=0, ema=False)


@functools.cache
def trained(model, layout_name, **options):
    """The parameters after a step."""
    devices = jax.devices()[: 1 if layout_name == 'one' else 8]
    layout = sharding.make_layout(devices, Parallel(**LAYOUTS[layout_name]))
    train_step = make_train_step(model, Task(), optax.sgd(1.0), Step(**options), layout)
    make = functools.partial(init, model)
    step = layout.compile_train(train_step, jax.eval_shape(make))
    state, _ = step(layout.create(make), layout.put_batch(batch()))
    return jax.tree.map(np.asarray, layout.to_global(state).params)


@pytest.mark.slow
@pytest.mark.parametrize(
    ('layout', 'fields', 'options', 'rows'),
    [
        pytest.param(
            *('fsdp', {'scan': True, 'remat': True, 'depth': 2}, {'accum_steps': 2}, 1),
            marks=pytest.mark.long,
        ),
        ('one', {}, {}, ROWS),
        pytest.param('pmap', {}, {}, 2, marks=pytest.mark.long),
    ],
)
def test_a_step_is_the_same_in_every_layout(calls, monkeypatch, layout, fields, options, rows):
    fields = {'num_classes': 3, 'attention_dropout': 0.3, **SIZE, **fields}
    plain = {k: v for k, v in fields.items() if k != 'remat'}
    expected = trained(vit.Model(**plain, attention='xla'), 'one')
    assert not calls
    pretend(monkeypatch, TPU.kind)
    found = trained(vit.Model(**fields, attention='pallas'), layout, **options)
    assert set(calls) == {call((rows, 5, 48), drops=True)}
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-5), found, expected)


@pytest.mark.slow
@pytest.mark.long
def test_a_step_under_masks_is_the_same_under_pmap(calls, monkeypatch):
    """Of the Transformer, whose devices have sentences of other lengths each."""
    rng = np.random.default_rng(0)

    def sentences(length):
        lengths = 1 + np.arange(ROWS)[:, None] * length // ROWS
        return np.where(np.arange(length) < lengths, rng.integers(3, 9, (ROWS, length)), 0)

    rows = {name: sentences(n).astype(np.int32) for name, n in (('source', 7), ('target', 5))}

    def stepped(attention, layout_name):
        model = seq2seq.Model(
            9, width=16, depth=1, num_heads=2, mlp_dim=16, dropout=0.0, attention=attention
        )
        devices = jax.devices()[: 1 if layout_name == 'one' else 8]
        layout = sharding.make_layout(devices, Parallel(**LAYOUTS[layout_name]))
        tx = optax.sgd(1.0)

        def make():
            shapes = (jax.ShapeDtypeStruct(x[:1].shape, x.dtype) for x in rows.values())
            return init_state({'params': drawn(model, *shapes)}, tx, seed=0, ema=False)

        step = layout.compile_train(
            make_train_step(model, translate.Task(), tx, Step(), layout),
            jax.eval_shape(make),
        )
        state, _ = step(layout.create(make), layout.put_batch(rows))
        return jax.tree.map(np.asarray, layout.to_global(state).params)

    expected = stepped('xla', 'one')
    assert not calls
    pretend(monkeypatch, TPU.kind)
    found = stepped('pallas', 'pmap')
    assert set(calls) == {
        call((2, 7, 48), masked=True),
        call((2, 5, 48), causal=True),
        call((2, 5, 16), (2, 7, 32), masked=True),
    }
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-5), found, expected)


@pytest.mark.slow
def test_on_other_devices_auto_is_the_very_program_of_xla(calls):
    images = jnp.zeros((2, 16, 16, 3))

    def program(attention, devices):
        model = vit.Model(**SIZE, attention=attention)
        params = jax.eval_shape(model.init, jax.random.key(0), images)
        with runs_on(devices):
            return str(jax.make_jaxpr(model.apply)(params, images))

    assert program('auto', Target('cpu')) == program('xla', Target('cpu'))
    assert program('xla', TPU) == program('xla', Target('cpu'))
    assert not calls
    assert program('auto', TPU) != program('xla', TPU)
    assert calls


def test_the_two_transformers_of_mae_take_it(calls):
    model = mae.Model(
        **SIZE, decoder_width=8, decoder_depth=1, decoder_mlp_dim=8, decoder_heads=2, mask_ratio=0.5
    )
    images, noise = jnp.zeros((2, 16, 16, 3)), jnp.zeros((2, 4))
    variables = jax.eval_shape(model.init, jax.random.key(0), images, noise)
    with runs_on(TPU):
        jax.eval_shape(model.apply, variables, images, noise)
    assert calls == [call((2, 3, 48)), call((2, 5, 24))]


def test_the_transformer_takes_it_for_all_its_attention(calls):
    model = seq2seq.Model(9, width=16, depth=1, num_heads=2, mlp_dim=16, attention='pallas')
    tokens = [jnp.ones((2, n), jnp.int32) for n in (7, 5)]
    variables = jax.eval_shape(model.init, jax.random.key(0), *tokens)
    with runs_on(TPU):
        rngs = {'dropout': jax.random.key(0)}
        jax.eval_shape(functools.partial(model.apply, train=True, rngs=rngs), variables, *tokens)
    assert calls == [
        call((2, 7, 48), masked=True),
        call((2, 5, 48), causal=True),
        call((2, 5, 16), (2, 7, 32), masked=True),
    ]


@pytest.mark.slow
def test_detr_takes_it_whether_or_not_weights_are_dropped(calls):
    size = {'layers': (1,), 'backbone_width': 4, 'num_queries': 5, 'width': 16, 'num_heads': 2}
    model = detr.Model(3, **size, depth=1, decoder_depth=1, mlp_dim=16)
    images = jnp.zeros((2, 8, 12, 3))
    variables = jax.eval_shape(model.init, jax.random.key(0), images)

    def seen(train):
        calls.clear()
        rngs = {'dropout': jax.random.key(0)}
        apply = functools.partial(model.apply, train=train, rngs=rngs)
        with runs_on(TPU):
            jax.eval_shape(apply, variables, images)
        return calls

    for train in (True, False):
        assert seen(train) == [
            call((2, 6, 32), (2, 6, 16), masked=True, drops=train),
            call((2, 5, 32), (2, 5, 16), drops=train),
            call((2, 5, 16), (2, 6, 16), (2, 6, 16), masked=True, drops=train),
        ]


@pytest.mark.slow
def test_masks_and_memories_are_split_over_devices_like_queries(calls, monkeypatch):
    """Value and gradient of a decoder's block, which looks at other tokens under a mask."""
    rng = np.random.default_rng(0)
    rows = {
        'x': rng.normal(size=(ROWS, 5, 16)).astype(np.float32),
        'source': rng.normal(size=(ROWS, 7, 16)).astype(np.float32),
        'mask': np.arange(7) < rng.integers(0, 8, (ROWS, 1, 1, 1)),
    }

    def ran(attention, layout_name):
        layout = sharding.make_layout(jax.devices(), Parallel(**LAYOUTS[layout_name]))
        block = DecoderBlock(2, 16, causal=True, attention_by=attention)

        def apply(params, rows):
            return block.apply(params, rows['x'], Memory(rows['source'], rows['mask']))

        def run(params, rows):
            weights = jnp.cos(jnp.arange(rows['x'].size)).reshape(rows['x'].shape)
            out, pull = jax.vjp(apply, params, rows)
            of_params, of_rows = pull(weights)
            return out, of_params, of_rows['x'], of_rows['source']

        one = jax.tree.map(lambda x: jnp.asarray(x[:1]), rows)
        memory = Memory(one['source'], one['mask'])
        params = {'params': drawn(block, one['x'], memory)}
        return layout.compile_eval(run)(params, layout.put_batch(rows))

    expected = ran('xla', 'fsdp')
    pretend(monkeypatch, TPU.kind)
    found = ran('pallas', 'fsdp')
    each = ROWS // len(jax.devices())
    assert calls == [
        call((each, 5, 48), causal=True),
        call((each, 5, 16), (each, 7, 32), masked=True),
    ]
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-5), found, expected)


def test_whoever_wants_the_weights_gets_them(calls):
    model = vit.Model(**SIZE, attention='pallas')
    images = jnp.zeros((2, 16, 16, 3))
    with runs_on(TPU):
        variables = jax.eval_shape(model.init, jax.random.key(0), images)
        seen = functools.partial(model.apply, mutable='intermediates')
        _, kept = jax.eval_shape(seen, variables, images)
    maps = model.attention_maps(kept['intermediates'], images)
    assert [m.weights.shape for m in maps] == [(2, 2, 5, 5)]
    assert not calls


def attend(layer, *inputs, devices=TPU, **options):
    x = jnp.zeros((2, 5, 16))
    variables = jax.eval_shape(layer.init, jax.random.key(0), x)
    with runs_on(devices):
        rngs = {'dropout': jax.random.key(0)}
        call = functools.partial(layer.apply, rngs=rngs, **options)
        jax.eval_shape(call, variables, x, *(jnp.zeros((2, n, 16)) for n in inputs))


@pytest.mark.parametrize(
    ('fields', 'options', 'message'),
    [
        ({}, {'mask': causal_mask(5)}, 'masks'),
        ({}, {'bias': jnp.zeros((1, 2, 5, 5))}, 'support.*biases'),
        ({}, {'devices': Target('cpu')}, 'this is cpu'),
        ({}, {'devices': TPU._replace(whole=False)}, 'config.parallel.tensor'),
        ({}, {'devices': TPU._replace(shards=4)}, 'a multiple of 4'),
    ],
)
def test_what_the_kernel_cannot_do_is_left_to_xla_or_refused(calls, fields, options, message):
    layer = functools.partial(MultiHeadAttention, 2, **fields)
    attend(layer(attention='auto'), **options)
    with pytest.raises(UserError, match=message) as caught:
        attend(layer(attention='pallas'), **options)
    assert '\n' not in str(caught.value)
    assert not calls


@pytest.mark.parametrize(
    ('kernels', 'shapes'),
    [
        (('qkv',), [(2, 5, 16), (2, 7, 32)]),
        (('q', 'kv'), [(2, 5, 16), (2, 7, 32)]),
        (('q', 'k', 'v'), [(2, 5, 16), (2, 7, 16), (2, 7, 16)]),
    ],
)
def test_tokens_that_look_at_others_are_projected_as_they_are_kept(calls, kernels, shapes):
    attend(MultiHeadAttention(2, kernels, attention='pallas'), 7)
    assert calls == [call(*shapes)]


def test_a_mask_of_keys_may_be_one_for_all(calls):
    mask = jnp.ones((1, 1, 1, 1), bool)
    attend(MultiHeadAttention(2, attention='pallas'), mask=mask, causal=True)
    assert calls == [call((2, 5, 48), masked=True, causal=True)]


def test_dropout_that_does_not_act_is_no_obstacle(calls):
    attend(MultiHeadAttention(2, dropout=0.1, attention='pallas'))
    assert calls == [call((2, 5, 48))]


def kernel_block(attention, spec, target=TPU):
    """Queries of a program, 0 for all; None for XLA's attention."""
    kernel = choose(attention, spec, target)
    return None if kernel is None else kernel.block


def test_a_sequence_has_to_fit_the_chip_whole_or_in_blocks():
    call = AttentionSpec((1, 577, 768), 577, 12, 'bfloat16')
    assert kernel_block('auto', call) == 0
    # The compiler of TPUs makes no product of one row.
    assert kernel_block('auto', call._replace(shape=(2, 1, 768))) is None
    assert kernel_block('auto', call._replace(keys=1)) is None
    longest = AttentionSpec((1, 928, 256), 928, 8, 'bfloat16')
    assert kernel_block('auto', longest) == 0
    assert kernel_block('auto', longest._replace(rate=0.1)) == 512
    long = AttentionSpec((1, 1764, 256), 1764, 8, 'bfloat16', rate=0.1)
    assert kernel_block('auto', long) == 256
    # 9 x 128 as 3 x 384: blocks of 256 or 512 would compute more queries that are not there.
    uneven = AttentionSpec((1, 1100, 1024), 1100, 16, 'bfloat16', rate=0.1)
    assert kernel_block('auto', uneven) == 384
    for kind in ('TPU v5', 'TPU v5 lite', 'TPU v6 lite'):
        longest = AttentionSpec((1, 4096, 1024), 4096, 16, 'bfloat16')
        assert kernel_block('auto', longest, Target(kind))
    small = Target('TPU v4')
    assert kernel_block('auto', call._replace(shape=(1, 197, 768), keys=197), small) == 0
    assert kernel_block('auto', call, small) == 128
    longer = call._replace(shape=(1, 2000, 768), keys=2000)
    assert kernel_block('auto', longer, small) is None
    with pytest.raises(UserError, match=r'VMEM.* 2000 .*768'):
        kernel_block('pallas', longer, small)
    with pytest.raises(UserError, match=r'VMEM.*100.*2000.*768'):
        kernel_block('pallas', call._replace(shape=(1, 100, 768), keys=2000), small)


def ambient(kind, platform, types=(AxisType.Auto,) * 2):
    """A mesh of 4 x 2 devices of a kind."""
    device = jax.sharding.AbstractDevice(kind, None, platform)
    return AbstractMesh((4, 2), ('data', 'tensor'), axis_types=types, abstract_device=device)


def test_devices_are_those_of_the_ambient_mesh_or_the_default_ones():
    with jax.sharding.use_abstract_mesh(ambient('TPU v5 lite', 'tpu')):
        assert current_target() == Target('TPU v5 lite', 8, ('data',), 4, whole=False)
    manual = (AxisType.Manual,) * 2
    with jax.sharding.use_abstract_mesh(ambient('TPU v5 lite', 'tpu', manual)):
        assert current_target() == Target('TPU v5 lite', 8)
    with jax.sharding.use_abstract_mesh(ambient('TPU v5 lite', 'tpu', (AxisType.Explicit,) * 2)):
        assert not current_target().whole
    for default in (None, 'cpu', jax.devices()[1]):
        with jax.default_device(default):
            assert current_target() == Target('cpu', 8, assumed=True)


@pytest.mark.slow
@pytest.mark.parametrize('devices', [1, 8])
def test_whoever_jits_a_model_gets_the_kernel_of_the_default_device(calls, caplog, devices):
    """And XLA's attention where arrays may be split over TPUs in ways that nobody has told."""
    model, images = vit.Model(**SIZE), jnp.zeros((2, 16, 16, 3))
    params = jax.eval_shape(model.init, jax.random.key(0), images)
    with runs_on(Target('TPU v5 lite', devices, assumed=True)), caplog.at_level(logging.WARNING):
        traced = jax.jit(lambda params: model.apply(params, images)['pre_logits']).trace(params)
    assert calls == [call((2, 5, 48))] * (devices == 1)
    assert ('jax.set_mesh' in caplog.text) == (devices == 8)
    traced.lower().compile()  # for the CPU, by XLA's attention


@pytest.mark.slow
def test_a_program_for_an_assumed_device_computes_the_same_on_another(calls):
    """With gradients: what the kernel would keep is not kept."""
    images = jnp.linspace(-1, 1, 2 * 16 * 16 * 3).reshape(2, 16, 16, 3)
    params = drawn(vit.Model(**SIZE), images)

    def gradient(attention):
        def loss(params):
            model = vit.Model(**SIZE, attention=attention)
            return jnp.sin(model.apply({'params': params}, images)['pre_logits']).sum()

        return jax.jit(jax.grad(loss))(params)

    expected = gradient('xla')
    with runs_on(Target('TPU v5 lite', assumed=True)):
        found = gradient('auto')
    assert calls
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), found, expected)


def test_an_unknown_name_is_refused():
    with pytest.raises(UserError, match='attention'):
        vit.Model(attention='flash')
