import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers.sections import optimizer, schedule, section, times

from vit_jax.config.run import Optim
from vit_jax.errors import UserError
from vit_jax.models import bit_resnet, hybrid, seq2seq, vit
from vit_jax.optim import make as optim
from vit_jax.optim import param_groups
from vit_jax.optim.param_groups import layer_scale
from vit_jax.tree_paths import block_paths, param_paths, path_name

STEPS = 5
USUAL = {'adafactor', 'adam', 'adamw', 'lamb', 'lars', 'lion', 'rmsprop', 'sgd'}
USUAL |= {'adafactor_zhai'}


def layers(depth):
    """What a ViT of this depth says of its order."""
    return vit.Model(depth=depth).layer_order()


def vit_params(depth=2, width=8, stacked=False, abstract=False):
    """A tree with the parameter names of a ViT."""
    rng = np.random.default_rng(0)

    def leaf(*shape):
        if abstract:
            return jax.ShapeDtypeStruct(shape, jnp.float32)
        return jnp.asarray(rng.normal(size=shape), jnp.float32)

    def block(*axes):
        return {
            'norm1': {'scale': leaf(*axes, width), 'bias': leaf(*axes, width)},
            'mlp': {'fc1': {'kernel': leaf(*axes, width, 12), 'bias': leaf(*axes, 12)}},
        }

    blocks = {'blocks': block(depth)} if stacked else {f'block_{i}': block() for i in range(depth)}
    return {
        'patch_embed': {'kernel': leaf(4, 4, 3, width), 'bias': leaf(width)},
        'cls_token': leaf(1, 1, width),
        'pos_embed': leaf(1, 5, width),
        'encoder': {**blocks, 'norm': {'scale': leaf(width), 'bias': leaf(width)}},
        'head': {'kernel': leaf(width, 10), 'bias': leaf(10)},
    }


def make(params, order=(), **config):
    """The optimizer for a training of 100 steps."""
    return optimizer(params, 100, order, **{'name': 'sgd', 'lr': 0.1} | config)


def gradients(params, step):
    def gradient(x):
        return np.random.default_rng([step, x.size]).normal(size=x.shape).astype(x.dtype)

    return jax.tree.map(gradient, params)


def train(params, tx, steps=STEPS):
    """Parameters and state after so many steps."""

    def update(carried, gradients):
        params, state = carried
        updates, state = tx.update(gradients, state, params)
        return (optax.apply_updates(params, updates), state), None

    @jax.jit
    def run(params, gradients):
        return jax.lax.scan(update, (params, tx.init(params)), gradients)[0]

    every = [gradients(params, step) for step in range(steps)]
    return run(params, jax.tree.map(lambda *x: np.stack(x), *every))


def one_update(params, order=(), **config):
    """What a single step of SGD at learning rate 1 with gradients of one takes away."""
    tx, _ = make(params, order, **{'lr': 1.0} | config)
    ones = jax.tree.map(np.ones_like, params)
    updates, _ = jax.jit(lambda params: tx.update(ones, tx.init(params), params))(params)
    return {path: -np.asarray(u) for path, u in param_paths(updates).items()}


def torch_training(params, build, lr, clip_norm=None):
    """The same training by torch; parameters that end in `kernel` are its first group."""
    torch = pytest.importorskip('torch')
    paths = param_paths(params)
    weights = {k: torch.nn.Parameter(torch.tensor(np.asarray(v))) for k, v in paths.items()}
    kernels = [w for k, w in weights.items() if k.endswith('kernel')]
    others = [w for k, w in weights.items() if not k.endswith('kernel')]
    optimizer = build(torch.optim, kernels, others)
    for step in range(STEPS):
        for key, gradient in param_paths(gradients(params, step)).items():
            weights[key].grad = torch.tensor(np.asarray(gradient))
        if clip_norm is not None:
            torch.nn.utils.clip_grad_norm_(weights.values(), clip_norm)
        for group in optimizer.param_groups:
            group['lr'] = lr(step)
        optimizer.step()
    return {k: w.detach().numpy() for k, w in weights.items()}


def assert_same(ours, theirs, atol=1e-6):
    for path, value in param_paths(ours).items():
        np.testing.assert_allclose(value, theirs[path], rtol=0, atol=atol, err_msg=path)


@pytest.mark.slow
def test_adamw_is_that_of_torch():
    params = vit_params()
    options = {'weight_decay': 0.5, 'b1': 0.8, 'b2': 0.95, 'eps': 1e-6, 'clip_norm': 1.0}
    schedule = {'name': 'cosine', 'warmup': '2'}
    tx, lr = make(params, name='adamw', lr=0.01, schedule=schedule, **options)

    def build(torch_optim, kernels, others):
        groups = [{'params': kernels}, {'params': others, 'weight_decay': 0.0}]
        return torch_optim.AdamW(groups, betas=(0.8, 0.95), eps=1e-6, weight_decay=0.5)

    theirs = torch_training(params, build, lambda step: float(lr(step)), clip_norm=1.0)
    assert_same(train(params, tx)[0], theirs)


@pytest.mark.parametrize('nesterov', [False, True])
def test_sgd_with_weight_decay_is_that_of_torch(nesterov):
    params = vit_params()
    options = {'momentum': 0.9, 'nesterov': nesterov, 'weight_decay': 0.1}
    tx, _ = make(params, lr=0.01, **options)

    def build(torch_optim, kernels, others):
        groups = [{'params': kernels}, {'params': others, 'weight_decay': 0.0}]
        return torch_optim.SGD(groups, lr=0.01, **options)

    assert_same(train(params, tx)[0], torch_training(params, build, lambda _: 0.01))


def with_every_rule(params, name):
    tx, _ = make(
        params,
        layers(1),
        name=name,
        lr=1e-3,
        schedule={'name': 'linear', 'warmup': '1'},
        weight_decay=0.1,
        decay_mults=(('^head/', 3.0),),
        lr_mults=(('^head/', 2.0),),
        freeze=('^pos_embed$',),
        layer_decay=0.75,
        clip_norm=1.0,
        **({'d0': 1.0} if name == 'prodigy' else {}),  # a rate that is felt in the first steps
    )
    return tx


@pytest.mark.parametrize('name', sorted(set(optim.optimizers()) - USUAL))
def test_every_optimizer_can_be_traced_with_every_rule(name):
    params = vit_params(depth=1)
    tx = with_every_rule(params, name)
    trained, _ = jax.eval_shape(lambda params: train(params, tx), params)
    assert jax.tree.map(jnp.shape, trained) == jax.tree.map(jnp.shape, params)


@pytest.mark.slow
@pytest.mark.parametrize(
    'name',
    [x if x in USUAL else pytest.param(x, marks=pytest.mark.long) for x in optim.optimizers()],
)
def test_every_optimizer_runs_with_every_rule(name):
    params = vit_params(depth=1)
    trained, _ = train(params, with_every_rule(params, name))
    for path, before in param_paths(params).items():
        after, before = np.asarray(param_paths(trained)[path]), np.asarray(before)
        assert after.dtype == before.dtype, path
        assert np.isfinite(after).all(), path
        assert (after == before).all() == (path == 'pos_embed'), path


@pytest.mark.slow
@pytest.mark.parametrize(
    'name',
    [x if x in USUAL else pytest.param(x, marks=pytest.mark.long) for x in optim.optimizers()],
)
def test_every_schedule_of_an_optimizer_can_be_set_to_a_step(name):
    """The first update at step 5 is that of the rate, decay and delays of step 5."""
    params = {'kernel': jnp.full((2, 3), 0.5), 'late': jnp.full(3, 0.5), 'later': jnp.full(3, 0.5)}
    grads = gradients(params, 0)
    delays, mults = {'lr_delays': (('later', '9'), ('late', '5'))}, {'decay_mults': (('late', 2),)}
    moving = {'schedule': {'name': 'linear'}, 'decay_schedule': {'name': 'cosine', 'final': 1.0}}
    rule = {'name': name, 'decay_mask': '.', 'freeze': ('kernel',)} | mults
    rule |= {'matrices': 'kernel'} if 'muon' in name else {}
    rule |= {'d0': 0.01} if name == 'prodigy' else {}
    tx, rate = make(params, **rule, **delays, **moving, lr=0.1, weight_decay=0.3)
    decay = schedule(0.3, 100, **moving['decay_schedule'])
    fixed, _ = make(params, **rule, lr=float(rate(5)), weight_decay=float(decay(5)))

    @jax.jit
    def first(params):
        state = param_groups.at_step(tx.init(params), jnp.asarray(5))
        return tx.update(grads, state, params), fixed.update(grads, fixed.init(params), params)[0]

    (found, state), expected = first(params)
    assert not found['later'].any()
    assert np.asarray(found['late']).any()
    np.testing.assert_allclose(found['late'], expected['late'], rtol=1e-5)
    shapes = jax.tree.map(lambda x: (x.shape, x.dtype), jax.eval_shape(tx.init, params))
    assert jax.tree.map(lambda x: (x.shape, x.dtype), state) == shapes


def test_the_usual_optimizers_are_there():
    assert set(optim.optimizers()) >= USUAL


@pytest.mark.slow
@pytest.mark.parametrize(
    'name',
    [
        *('adamw', 'lion', 'adafactor', 'adafactor_zhai'),
        *(pytest.param(name, marks=pytest.mark.long) for name in ('adan', 'adopt', 'nadamw')),
    ],
)
def test_decoupled_decay_takes_lr_times_decay_of_the_kernels(name):
    params = vit_params()
    zeros = jax.tree.map(np.zeros_like, params)
    schedule = {'name': 'linear', 'warmup': '2'}
    tx, lr = make(params, name=name, lr=0.1, weight_decay=0.5, schedule=schedule)

    @jax.jit
    def run(params):
        def update(state, _):
            return tx.update(zeros, state, params)[::-1]

        return jax.lax.scan(update, tx.init(params), length=3)[1]

    values = jax.tree.map(np.asarray, param_paths(params))
    kernels = 0.5 * np.array([float(lr(step)) for step in range(3)])
    for path, updates in param_paths(run(params)).items():
        rates = kernels if path.endswith('kernel') else np.zeros(3)
        expected = -rates.reshape(-1, *[1] * values[path].ndim) * values[path]
        np.testing.assert_allclose(updates, expected, atol=1e-7, err_msg=path)


@pytest.mark.slow
def test_decay_mask_and_multipliers():
    params = vit_params()
    taken = one_update(
        params,
        weight_decay=0.5,
        decay_mask='(kernel|pos_embed)$',
        decay_mults=(('^head/', 4.0), ('head|patch', 0.0)),
    )
    strength = {'pos_embed': 0.5, 'encoder/block_0/mlp/fc1/kernel': 0.5, 'head/kernel': 2.0}
    for path, value in param_paths(params).items():
        if path.startswith('encoder/block_1/mlp') and path.endswith('kernel'):
            continue
        np.testing.assert_allclose(taken[path], 1 + strength.get(path, 0.0) * value, atol=1e-6)


@pytest.mark.slow
def test_decay_multipliers_of_one_change_nothing():
    params = vit_params()
    plain, _ = make(params, name='adamw', lr=0.01, weight_decay=0.3)
    ruled, _ = make(params, name='adamw', lr=0.01, weight_decay=0.3, decay_mults=(('head', 1.0),))
    assert_same(train(params, plain)[0], param_paths(train(params, ruled)[0]), atol=0)


def test_lr_multipliers_are_exact_and_the_first_match_counts():
    taken = one_update(vit_params(), lr_mults=(('^head/kernel', 0.25), ('^head/', 3.0)))
    for path, value in taken.items():
        expected = {'head/kernel': 0.25, 'head/bias': 3.0}.get(path, 1.0)
        np.testing.assert_array_equal(value, expected, err_msg=path)


def test_layer_decay_of_a_fine_tuned_mae():
    """Layers 0 to 13 of ViT-B at 0.65^(13 - layer)."""
    taken = one_update(vit_params(depth=12), layers(12), layer_decay=0.65)
    for path, value in taken.items():
        if path.startswith('encoder/block_'):
            layer = int(re.findall(r'\d+', path)[0]) + 1
        else:
            layer = 0 if re.match('patch_embed|cls_token|pos_embed', path) else 13
        np.testing.assert_allclose(value, 0.65 ** (13 - layer), rtol=1e-6, err_msg=path)
    table = {'pos_embed': 0.0036972, 'encoder/block_0/norm1/bias': 0.0056880}
    table |= {'encoder/block_11/norm1/bias': 0.65, 'encoder/norm/scale': 1.0, 'head/bias': 1.0}
    for path, expected in table.items():
        np.testing.assert_allclose(taken[path], expected, rtol=1e-4, err_msg=path)


def test_layer_decay_of_stacked_blocks_is_that_of_separate_ones():
    separate = one_update(vit_params(depth=3), layers(3), layer_decay=0.7)
    stacked = one_update(vit_params(depth=3, stacked=True), layers(3), layer_decay=0.7)
    for path, value in stacked.items():
        if '/blocks/' not in path:
            np.testing.assert_array_equal(value, separate[path], err_msg=path)
            continue
        for i, row in enumerate(value):
            np.testing.assert_array_equal(row, separate[path.replace('blocks', f'block_{i}')])


def test_layer_decay_times_lr_multiplier():
    taken = one_update(vit_params(), layers(2), layer_decay=0.5, lr_mults=(('block_0', 3.0),))
    np.testing.assert_array_equal(taken['encoder/block_0/norm1/bias'], 3 * 0.25)


def test_frozen_parameters_stay_and_have_no_state():
    params = vit_params()
    freeze = ('^patch_embed', 'block_0/')
    tx, _ = make(params, name='adamw', weight_decay=0.1, freeze=freeze)
    trained, state = train(params, tx)
    held = [path for path in param_paths(params) if re.search('|'.join(freeze), path)]
    assert len(held) == 2 + 4
    for path in held:
        before, after = param_paths(params)[path], param_paths(trained)[path]
        np.testing.assert_array_equal(before, after, err_msg=path)
    names = list(param_paths(state))
    assert not [name for name in names for path in held if name.endswith(path)]
    assert sum(name.endswith('head/kernel') for name in names) == 2  # both moments


def test_gradients_of_frozen_parameters_do_not_count_for_clipping():
    params = {'a': {'kernel': jnp.ones(())}, 'b': {'kernel': jnp.ones(())}}
    grads = {'a': {'kernel': jnp.float32(3.0)}, 'b': {'kernel': jnp.float32(1e6)}}
    tx, _ = make(params, lr=1.0, clip_norm=1.5, freeze=('^b/',))
    updates, _ = tx.update(grads, tx.init(params), params)
    assert float(updates['a']['kernel']) == pytest.approx(-1.5)
    assert float(updates['b']['kernel']) == 0.0


def test_clipping_scales_to_the_global_norm_and_leaves_small_gradients():
    params = {'a': jnp.zeros(2), 'b': jnp.zeros(())}
    tx, _ = make(params, lr=1.0, clip_norm=1.0)
    big = {'a': jnp.array([2.0, 3.0]), 'b': jnp.float32(6.0)}
    updates, _ = tx.update(big, tx.init(params), params)
    np.testing.assert_allclose(updates['a'], [-2 / 7, -3 / 7], rtol=1e-6)
    small = jax.tree.map(lambda x: x / 10, big)
    updates, _ = tx.update(small, tx.init(params), params)
    np.testing.assert_allclose(updates['a'], [-0.2, -0.3], rtol=1e-6)


@pytest.mark.slow
def test_lars_adapts_kernels_and_embeddings_not_biases_and_norms():
    """By the rule of MAE's code: momentum of gradients, scaled where a parameter is no vector."""
    params = vit_params()
    tx, _ = make(params, name='lars', lr=0.1, momentum=0.9, weight_decay=0.2)
    update = jax.jit(tx.update)
    state, now, velocity = tx.init(params), params, jax.tree.map(jnp.zeros_like, params)
    masters = dict(param_paths(params))
    for step in range(2):
        grads = jax.tree.map(lambda x, step=step: gradients(x, step), params)
        updates, state = update(grads, state, now)
        now = optax.apply_updates(now, updates)
        for path, gradient in param_paths(grads).items():
            x = masters[path]
            gradient = gradient + 0.2 * x if path.endswith('kernel') else gradient
            if not path.endswith(('bias', 'scale')):
                gradient = gradient * 0.001 * np.linalg.norm(x) / np.linalg.norm(gradient)
            moved = 0.9 * param_paths(velocity)[path] + 0.1 * gradient
            masters[path] = x - moved
            velocity = jax.tree_util.tree_map_with_path(
                lambda keys, v, path=path, moved=moved: moved if path_name(keys) == path else v,
                velocity,
            )
    for path, x in param_paths(now).items():
        np.testing.assert_allclose(x, masters[path], rtol=2e-5, atol=1e-6)


@pytest.mark.parametrize('freeze', [(), ('cls_token',), ('bias$',)])
def test_parameters_stay_below_their_largest_value(freeze):
    params = vit_params()
    usual, _ = make(params, name='adam', lr=1.0, freeze=freeze)
    bounds = (('cls_token', 0.5), ('bias$', 0.25))
    adam = Optim(name='adam', lr=1.0, freeze=freeze)
    tx, _ = optim.make_optimizer(params, adam, times(100), largest=bounds)
    state = tx.init(params)
    assert jax.tree.structure(state) == jax.tree.structure(usual.init(params))
    grads = jax.tree.map(lambda x: gradients(x, 0), params)
    plain, limited = (
        param_paths(optax.apply_updates(params, one.update(grads, state, params)[0]))
        for one in (usual, tx)
    )
    for path, x in limited.items():
        most = 0.5 if path == 'cls_token' else 0.25 if path.endswith('bias') else np.inf
        if any(re.search(pattern, path) for pattern in freeze):
            most = np.inf
        np.testing.assert_allclose(x, np.minimum(plain[path], most), rtol=1e-6, atol=1e-7)


def test_dtypes_by_name():
    params = vit_params()
    _, state = train(params, make(params, momentum=0.9, accumulator_dtype='bfloat16')[0], steps=1)
    assert {leaf.dtype.name for leaf in jax.tree.leaves(state) if leaf.ndim} == {'bfloat16'}
    _, state = train(params, make(params, name='adamw', mu_dtype='bfloat16')[0], steps=1)
    moments = {n: x.dtype.name for n, x in param_paths(state).items() if x.ndim}
    assert {d for n, d in moments.items() if '/mu/' in n} == {'bfloat16'}
    assert {d for n, d in moments.items() if '/nu/' in n} == {'float32'}


def test_shapes_suffice_to_make_it():
    config = {'name': 'adamw', 'layer_decay': 0.7, 'freeze': ('cls',), 'weight_decay': 0.1}
    params = vit_params()
    concrete, _ = train(params, make(params, layers(2), **config)[0])
    abstract, _ = train(params, make(vit_params(abstract=True), layers(2), **config)[0])
    assert_same(concrete, param_paths(abstract), atol=0)


def test_config_survives_json():
    config = {
        'name': 'adamw',
        'lr': 1e-3,
        'schedule': {'name': 'rsqrt', 'warmup': '5', 'cooldown': '20', 'timescale': '50'},
        'weight_decay': 0.1,
        'decay_mults': (('^head/', 3.0),),
        'lr_mults': (('^head/', 2.0),),
        'freeze': ('cls_token',),
        'mu_dtype': 'bfloat16',
    }
    params = vit_params()
    direct, _ = train(params, make(params, **config)[0])
    stored, _ = train(params, make(params, **json.loads(json.dumps(config)))[0])
    assert_same(direct, param_paths(stored), atol=0)


def test_strength_and_length_do_not_change_the_structure_of_the_state():
    """So that a run may be continued with another weight decay, clipping or schedule."""
    params = vit_params()
    one, _ = make(params, name='adamw')
    other, _ = make(
        params, layers(2), name='adamw', weight_decay=0.1, clip_norm=1.0, layer_decay=0.5
    )
    assert jax.tree.structure(one.init(params)) == jax.tree.structure(other.init(params))


def test_schedule_durations_are_turned_into_steps():
    adam = {'name': 'adam', 'lr': 1.0}
    spec = {'name': 'rsqrt', 'warmup': '10%', 'cooldown': '2 epochs', 'timescale': 30}
    _, lr = optim.make_optimizer(
        vit_params(), section(Optim, **adam, schedule=spec), times(100, 20)
    )
    got = [float(lr(step)) for step in (5, 10, 60, 80, 100)]
    end = np.sqrt(30 / 80)
    np.testing.assert_allclose(got, [0.5, 1.0, end, end / 2, 0.0], rtol=1e-6)
    spec = {'name': 'stair', 'boundaries': ('30', '2 epochs')}
    _, lr = optim.make_optimizer(
        vit_params(), section(Optim, **adam, schedule=spec), times(100, 20)
    )
    np.testing.assert_allclose([float(lr(s)) for s in (29, 30, 40)], [1, 0.1, 0.01], rtol=1e-6)


@pytest.mark.parametrize(
    ('config', 'message'),
    [
        ({'name': 'adamww'}, r"unknown optimizer 'adamww'; .* 'adamw'"),
        ({'name': 'lbfgs'}, "unknown optimizer 'lbfgs'"),
        ({'lr': float('nan')}, 'config.optim.lr=nan'),
        ({'lr': float('inf')}, 'config.optim.lr=inf'),
        ({'lr': -1e-3}, 'config.optim.lr=-0.001'),
        ({'lr': '1e-3'}, "config.optim.lr='1e-3'"),
        ({'weight_decay': -0.1}, 'config.optim.weight_decay=-0.1'),
        ({'clip_norm': 0}, 'config.optim.clip_norm=0'),
        ({'momentum': 1.0}, r'config.optim.momentum=1.0: .* \[0, 1\)'),
        (
            {'momentun': 0.9},
            r"config.optim \(sgd\): unknown key 'momentun'; .* 'momentum'",
        ),
        ({'clipnorm': 1.0}, "did you mean 'clip_norm'"),
        ({'learning_rate': 1.0}, "unknown key 'learning_rate'"),
        ({'name': 'adamw', 'mask': None}, "unknown key 'mask'"),
        ({'accumulator_dtype': 'bflot16'}, "config.optim.accumulator_dtype='bflot16'"),
        ({'layer_decay': 1.5}, 'config.optim.layer_decay=1.5'),
        ({'freeze': ('^haed/',)}, r"'\^haed/' .* 'head/"),
        ({'freeze': 'head'}, r"write a tuple, \('head',\)"),
        ({'freeze': ('(',)}, 'regex'),
        ({'lr_mults': (('encoder/blok_0', 2.0),)}, "nearest.*'encoder/block_0/"),
        ({'lr_mults': (('head', -1.0),)}, "config.optim.lr_mults 'head'=-1.0"),
        ({'lr_mults': ('head', 2.0)}, r'write \(\(pattern, multiplier\), ...\)'),
        ({'weight_decay': 0.1, 'decay_mask': 'weight$'}, "decay_mask: 'weight\\$' matches no"),
    ],
)
def test_mistakes_are_named(config, message):
    with pytest.raises(UserError, match=message):
        make(vit_params(), **config)


def test_layer_decay_needs_the_order_of_the_layers():
    with pytest.raises(UserError, match=r'define.*layers.*lr_mults'):
        make(vit_params(), layer_decay=0.7)


IMAGE = jax.ShapeDtypeStruct((1, 64, 64, 3), jnp.float32)
TOKENS = jax.ShapeDtypeStruct((1, 3), jnp.int32)
SMALL = dict(width=32, depth=2, mlp_dim=8, num_heads=2)
ORDERED = {
    'vit': (vit.Model(patch_size=32, num_classes=3, pool='map', **SMALL), [IMAGE], 3),
    'scanned vit': (vit.Model(patch_size=32, scan=True, **SMALL), [IMAGE], 3),
    'hybrid': (hybrid.Model(layers=(1, 2), num_classes=3, **SMALL), [IMAGE], 1 + 3 + 3),
    'root alone': (hybrid.Model(layers=(), **SMALL), [IMAGE], 1 + 3),
    'bit_resnet': (bit_resnet.Model(layers=(2, 1), num_classes=3), [IMAGE], 1 + 3),
    'seq2seq': (seq2seq.Model(11, norm='pre', **SMALL), [TOKENS, TOKENS], 1 + 4),
    'untied seq2seq': (seq2seq.Model(11, tied=False, **SMALL), [TOKENS, TOKENS], 1 + 4),
}


@pytest.mark.parametrize('name', ORDERED)
def test_every_layer_of_a_model_that_tells_its_order_has_parameters_of_its_own(name):
    model, inputs, count = ORDERED[name]
    order = model.layer_order()
    params = jax.eval_shape(model.init, jax.random.key(0), *inputs)['params']
    paths = [p for path, leaf in param_paths(params).items() for p in block_paths(path, leaf)]
    assert len(order) == count
    for pattern in order:
        assert any(re.search(pattern, path) for path in paths), pattern
    assert all(sum(bool(re.search(p, path)) for p in order) <= 1 for path in paths)
    last = {path for path in paths if not any(re.search(p, path) for p in order)}
    parts = '(encoder/norm|decoder/norm|norm|map_head|head|embed/output)'
    assert all(re.match(f'^{parts}(/|$)', path) for path in last), last


def test_layers_of_a_hybrid_learn_the_faster_the_nearer_they_are_to_the_head():
    model = ORDERED['hybrid'][0]
    params = jax.eval_shape(model.init, jax.random.key(0), IMAGE)['params']
    scale = layer_scale(params, 0.5, model.layer_order())
    paths = ('resnet/root/conv/kernel', 'resnet/stage_0/block_0/conv1/kernel', 'pos_embed')
    paths += ('encoder/block_1/norm1/scale', 'head/bias')
    assert [scale(path) for path in paths] == [0.5**7, 0.5**6, 0.5**3, 0.5, 1.0]
