"""Low-rank adapters: what they compute, what trains, and that devices and microbatches agree."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers.sections import section

from vit_jax.config import load
from vit_jax.config.run import Lora, Parallel, Step
from vit_jax.errors import UserError
from vit_jax.models import vit
from vit_jax.optim import lora, param_groups
from vit_jax.runtime import sharding
from vit_jax.step import Optimizer, init_state, make_train_step
from vit_jax.tasks import classify
from vit_jax.tree_paths import param_paths

FIELDS = dict(patch_size=4, width=16, depth=2, num_heads=2, mlp_dim=24, num_classes=3)
IMAGES = jnp.asarray(np.random.default_rng(0).normal(size=(8, 8, 8, 3)), jnp.float32)


def drawn(shapes, seed=0):
    rng = np.random.default_rng(seed)
    return jax.tree.map(lambda x: jnp.asarray(rng.normal(size=x.shape) * 0.1, x.dtype), shapes)


def made(options, **fields):
    """A model, its adapters, and random parameters with them."""
    model = vit.Model(**FIELDS | fields)
    shapes = jax.eval_shape(model.init, jax.random.key(0), IMAGES)['params']
    adapters, shapes = lora.make_adapters(section(Lora, **options), model, shapes)
    return model, adapters, drawn(shapes)


@pytest.mark.slow
def test_adapters_change_nothing_at_first():
    model, adapters, params = made({'rank': 2, 'dora': True, 'layers': ('kernel$',)})
    plain = adapters.without(params)
    first = adapters.extend({'params': plain}, 0)
    outputs = [
        jax.jit(m.apply)(v, IMAGES)
        for m, v in ((model, {'params': plain}), (adapters.wrap(model), first))
    ]
    np.testing.assert_allclose(outputs[0]['logits'], outputs[1]['logits'], atol=1e-6)
    a = param_paths(first['params'])['encoder/block_0/mlp/fc1/lora/kernel/a']
    assert 0.2 < np.abs(a).max() <= 0.25  # 1 / sqrt(16)


@pytest.mark.parametrize('scan', [False, True])
def test_a_merged_kernel_is_the_sum_of_the_paper(scan):
    _, _, params = made(
        {'rank': 2, 'alpha': 6.0, 'layers': ('value/kernel', 'out/kernel')}, scan=scan
    )
    blocks = params['encoder']['blocks' if scan else 'block_1']
    module = jax.tree.map(lambda x: x[1] if scan else x, blocks)['attention']
    found = lora.merge_adapters(params, 3.0)['encoder']['blocks' if scan else 'block_1'][
        'attention'
    ]
    qkv, out = (
        found[name]['kernel'][1] if scan else found[name]['kernel'] for name in ('qkv', 'out')
    )
    np.testing.assert_array_equal(qkv[:, :2], module['qkv']['kernel'][:, :2])
    a, b = (np.asarray(module['qkv']['lora']['value'][leaf]) for leaf in 'ab')
    expected = module['qkv']['kernel'][:, 2] + 3 * np.einsum('dr,rhk->dhk', a, b)
    np.testing.assert_allclose(qkv[:, 2], expected, atol=1e-6)
    a, b = (np.asarray(module['out']['lora']['kernel'][leaf]) for leaf in 'ab')
    expected = module['out']['kernel'] + 3 * np.einsum('hkr,rd->hkd', a, b)
    np.testing.assert_allclose(out, expected, atol=1e-6)


def block_of(params, number, scan):
    name = 'blocks' if scan else f'block_{number}'
    return jax.tree.map(lambda x: np.array(x[number] if scan else x), params['encoder'][name])


@pytest.mark.parametrize('scan', [False, True])
def test_layers_with_factors_compute_what_ia3_does(scan):
    """(W x + b) l, and W (x l) + b in the second layer of an MLP, in PyTorch."""
    torch = pytest.importorskip('torch')
    _, _, params = made({'method': 'ia3'}, scan=scan)
    merged = lora.merge_adapters(params, 1.0)
    old, new = (block_of(tree, 1, scan) for tree in (params, merged))
    x = torch.from_numpy(np.random.default_rng(0).normal(size=(5, 24)).astype(np.float32))
    fc2 = old['mlp']['fc2']
    factor = torch.from_numpy(fc2['lora']['kernel']['input_factor'])
    expected = (x * factor) @ torch.from_numpy(fc2['kernel']) + torch.from_numpy(fc2['bias'])
    found = x.numpy() @ new['mlp']['fc2']['kernel'] + new['mlp']['fc2']['bias']
    np.testing.assert_allclose(found, expected.numpy(), atol=1e-6)
    qkv, x = old['attention']['qkv'], x[:, :16]
    found = np.einsum('nd,dphk->nphk', x, new['attention']['qkv']['kernel'])
    found += new['attention']['qkv']['bias']
    for part, letter in enumerate(('query', 'key', 'value')):
        w, b = (torch.from_numpy(qkv[leaf]) for leaf in ('kernel', 'bias'))
        expected = torch.einsum('nd,dhk->nhk', x, w[:, part]) + b[part]
        if letter in qkv['lora']:
            expected *= torch.from_numpy(qkv['lora'][letter]['factor'])
        np.testing.assert_allclose(found[:, part], expected.numpy(), atol=1e-6)
    assert qkv['lora'].keys() == {'key', 'value'}


@pytest.mark.parametrize('scan', [False, True])
def test_vectors_of_vera_scale_matrices_that_layers_share(scan):
    """W x + b * B (d * A x), as in peft's layers, in PyTorch."""
    torch = pytest.importorskip('torch')
    _, _, params = made({'method': 'vera', 'rank': 6}, scan=scan)
    merged = lora.merge_adapters(params, 1.0)
    first, second = (torch.from_numpy(np.array(m)) for m in lora.shared_matrices(16, 16, 6))
    assert 0.2 < first.abs().max() <= 0.25 and second.abs().max() <= 6**-0.5
    x = torch.from_numpy(np.random.default_rng(0).normal(size=(5, 16)).astype(np.float32))
    for block in range(2):
        old, new = (block_of(tree, block, scan) for tree in (params, merged))
        qkv = old['attention']['qkv']
        d, b = (torch.from_numpy(qkv['lora']['value'][f'lambda_{leaf}']) for leaf in 'db')
        plain = torch.einsum('nd,dhk->nhk', x, torch.from_numpy(qkv['kernel'][:, 2]))
        expected = plain + ((x @ first * d) @ second).reshape(plain.shape) * b
        found = np.einsum('nd,dhk->nhk', x, new['attention']['qkv']['kernel'][:, 2])
        np.testing.assert_allclose(found, expected.numpy(), atol=1e-6)


@pytest.mark.parametrize(
    ('options', 'fields', 'leaf', 'count'),
    [
        ({'method': 'bitfit'}, {}, 'bias', 2 * 6 + 2),
        ({'method': 'prompts'}, {'registers': 3}, 'register_tokens', 1),
        ({'method': 'ia3'}, {}, 'factor', 2 * 3),
        ({'method': 'vera', 'rank': 4}, {}, 'lambda_b', 2 * 2),
    ],
)
def test_each_method_starts_as_the_checkpoint_and_trains_little(options, fields, leaf, count):
    _, adapters, params = made(options, **fields)
    plain = adapters.without(params)
    first = adapters.extend({'params': plain}, 0)['params']
    merged = lora.merge_adapters(first, 1.0)
    for path, values in param_paths(plain).items():
        np.testing.assert_array_equal(param_paths(merged)[path], values, err_msg=path)
    own, base = (param_paths(tree) for tree in adapters.split(params))
    assert sum(path.endswith(leaf) for path in own if not path.startswith('head/')) == count
    assert {p for p in own if '/lora/' not in p and not p.endswith(leaf)} == {'head/kernel'} | (
        set() if leaf == 'bias' else {'head/bias'}
    )
    assert own.keys() | base.keys() == param_paths(params).keys()


def test_only_adapters_the_head_and_what_is_named_train():
    _, adapters, params = made({'rank': 2, 'train': ('encoder/norm',)})
    own, base = (param_paths(tree) for tree in adapters.split(params))
    tops = {path for path in own if '/lora/' not in path}
    assert tops == {'head/kernel', 'head/bias', 'encoder/norm/scale', 'encoder/norm/bias'}
    assert len(own) == 4 + 2 * 2 * 2
    assert own.keys() | base.keys() == param_paths(params).keys()
    assert not own.keys() & base.keys()


LAYOUTS = {
    'accumulation': (1, {}, 2),
    'pmap': (4, {'strategy': 'pmap'}, 2),
    'fsdp': (4, {'fsdp': 4, 'min_split_size': 64}, 1),
}


def stepped(name):
    """Parameters before and after a step."""
    devices, parallel, microbatches = LAYOUTS.get(name, (1, {}, 1))
    model, adapters, params = made({'rank': 2, 'alpha': 4.0, 'dora': True})
    layout = sharding.make_layout(jax.devices()[:devices], Parallel(**parallel))
    tx = param_groups.freeze_matching(optax.sgd(0.5), (adapters.pattern,))

    def init(params):
        return init_state({'params': params}, tx, seed=0, ema=False)

    step = make_train_step(
        adapters.wrap(model),
        classify.Task(),
        Optimizer(tx, (adapters.pattern,)),
        Step(accum_steps=microbatches),
        layout,
    )
    step = layout.compile_train(step, jax.eval_shape(init, params))
    state = layout.create(init, jax.tree.map(np.asarray, params))
    images = (np.asarray(IMAGES) * 40 + 128).astype(np.uint8)
    batch = {'image': images, 'label': np.arange(8, dtype=np.int32) % 3}
    state, _ = step(state, layout.put_batch(batch))
    return adapters, *(param_paths(x) for x in (params, layout.to_global(state).params))


@pytest.mark.slow
@pytest.mark.parametrize('name', [pytest.param(n, marks=pytest.mark.long) for n in LAYOUTS])
def test_devices_and_microbatches_make_the_same_step(name):
    _, _, expected = stepped('one')
    _, _, found = stepped(name)
    for path, leaf in expected.items():
        np.testing.assert_allclose(found[path], leaf, atol=1e-6, err_msg=path)


@pytest.mark.slow
def test_a_step_changes_what_trains_and_nothing_else():
    adapters, before, after = stepped('one')
    changed = {path for path in before if (before[path] != after[path]).any()}
    assert changed == before.keys() - adapters.held


@pytest.mark.parametrize(
    ('options', 'message'),
    [
        ({'rank': 2, 'layers': ('fc3',)}, "'fc3'.*matches"),
        (
            {'rank': 2, 'layers': ('fc1',), 'train': ('fc3',)},
            r"config.lora.train: 'fc3'",
        ),
        ({'rank': 2, 'layers': ('(',)}, 'regex'),
        ({'rank': 2, 'layers': 'fc1'}, r"write a tuple, \('fc1',\)"),
        ({'rank': 2, 'alpha': -1.0}, 'config.lora.alpha=-1.0'),
        ({'rank': -1}, 'config.lora.rank=-1'),
        ({'method': 'ia4'}, "'ia3'"),
        ({'method': 'ia3', 'rank': 2}, "config.lora.method='ia3': has no rank"),
        ({'method': 'vera'}, "config.lora.method='vera': set rank"),
        ({'method': 'vera', 'rank': 2, 'dora': True}, 'dora is an option of lora'),
        ({'method': 'prompts'}, 'config.model.registers'),
    ],
)
def test_a_mistake_is_named(options, message):
    model = vit.Model(**FIELDS)
    shapes = {'block_0': {'mlp': {'fc1': {'kernel': jax.ShapeDtypeStruct((16, 24), jnp.float32)}}}}
    with pytest.raises(UserError, match=message):
        lora.make_adapters(section(Lora, **options), model, shapes)


@pytest.mark.parametrize(
    ('changes', 'message'),
    [
        (['init.from='], 'checkpoint'),
        (['step.ema_decay=0.9'], 'average'),
        (['step.ema_decay=0', 'optim.parametrization=mup(width=8)'], 'muP'),
    ],
)
def test_what_a_run_with_adapters_cannot_have(changes, message, repo):
    words = ['init.from=x', 'lora.rank=2', *changes]
    with pytest.raises(UserError, match=rf'config.lora.rank=2: .*{message}'):
        load.load(f'{repo}/experiments/vit/digits.py', words)
