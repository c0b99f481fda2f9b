"""Muon over kernels of heads, convolutions and scanned blocks; AdamW over the rest."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers.sections import optimizer
from optax import contrib

from vit_jax.errors import UserError
from vit_jax.tree_paths import param_paths

D, H, K = 12, 2, 6


def params(rng):
    def leaf(*shape):
        return jnp.asarray(rng.normal(size=shape), jnp.float32)

    attention = {
        'qkv': {'kernel': leaf(D, 3, H, K), 'bias': leaf(3, H, K)},
        'out': {'kernel': leaf(H, K, D), 'bias': leaf(D)},
    }
    block = {'attention': attention, 'mlp': {'fc1': {'kernel': leaf(D, 20)}}}
    return {'encoder': {'block_0': block}, 'head': {'kernel': leaf(D, 4), 'bias': leaf(4)}}


def stepped(values, steps=3, seed=1, **keys):
    """The parameters after a few steps on fixed gradients."""
    tx, _ = optimizer(values, steps, name='muon', lr=0.1, **keys)
    return applied(tx, values, steps, seed)


def applied(tx, values, steps, seed=1, draw=None):
    draw = draw or gradients

    @jax.jit
    def run(values):
        state = tx.init(values)
        for i in range(steps):
            updates, state = tx.update(draw(values, seed + i), state, values)
            values = optax.apply_updates(values, updates)
        return values

    return run(values)


def gradients(values, seed):
    """A gradient for each leaf by its path, the same however many there are."""
    flat = param_paths(values)
    made = {
        path: np.random.default_rng([seed, *path.encode()]).normal(size=x.shape).astype(np.float32)
        for path, x in flat.items()
    }
    return jax.tree.unflatten(jax.tree.structure(values), list(made.values()))


@pytest.fixture
def values():
    return params(np.random.default_rng(0))


def test_each_projection_is_a_matrix_of_its_own(values):
    """That of Optax on matrices, whose updates are those of Moonlight."""
    found = param_paths(stepped(values, weight_decay=0.1))
    flat = param_paths(values)

    def matrices(tree):
        qkv = tree['encoder/block_0/attention/qkv/kernel']
        return {
            **{letter: qkv[:, i].reshape(D, H * K) for i, letter in enumerate('qkv')},
            'out': tree['encoder/block_0/attention/out/kernel'].reshape(H * K, D),
            'fc1': tree['encoder/block_0/mlp/fc1/kernel'],
        }

    def draw(_, seed):
        return matrices(param_paths(gradients(values, seed)))

    theirs = contrib.muon(0.1, weight_decay=0.1, consistent_rms=0.2)
    expected = applied(theirs, matrices(flat), 3, draw=draw)
    for name, matrix in matrices(found).items():
        np.testing.assert_allclose(matrix, expected[name], atol=2e-5, err_msg=name)


def test_what_is_no_kernel_of_a_block_is_trained_by_adamw(values):
    found = param_paths(stepped(values, weight_decay=0.1))
    tx, _ = optimizer(values, 3, name='adamw', lr=0.1, weight_decay=0.1)
    expected = param_paths(applied(tx, values, 3))
    others = {path for path in expected if path.startswith('head') or path.endswith('bias')}
    assert len(others) == 4
    for path in others:
        np.testing.assert_allclose(found[path], expected[path], atol=1e-6, err_msg=path)


def test_updates_are_about_as_large_as_adams(values):
    moved = jax.tree.map(jnp.subtract, stepped(values, steps=1), values)
    for path, update in param_paths(moved).items():
        if path.endswith('kernel') and 'block' in path:
            assert float(jnp.sqrt(jnp.mean(update**2))) == pytest.approx(0.1 * 0.2, rel=0.3)


@pytest.mark.slow
def test_scanned_blocks_are_trained_as_separate_ones():
    rng = np.random.default_rng(0)
    first, second = (params(rng)['encoder']['block_0'] for _ in range(2))
    drawn = [gradients(first, seed) for seed in (5, 6)]
    stacked = {'blocks': jax.tree.map(lambda *x: jnp.stack(x), first, second)}
    apart = {'block_0': first, 'block_1': second}

    def stack(_, seed):
        return {'blocks': jax.tree.map(lambda *x: jnp.stack(x), *drawn)}

    def separate(_, seed):
        return dict(zip(apart, drawn, strict=True))

    def trained(tree, draw):
        tx, _ = optimizer(tree, 2, name='muon', lr=0.1, weight_decay=0.1)
        return applied(tx, tree, 2, draw=draw)

    scanned, unrolled = trained(stacked, stack)['blocks'], trained(apart, separate)
    for i, name in enumerate(apart):
        jax.tree.map(
            lambda a, b, i=i: np.testing.assert_allclose(a[i], b, atol=2e-5),
            scanned,
            unrolled[name],
        )


@pytest.mark.slow
def test_matrices_may_be_others(values):
    plain, wide = stepped(values), stepped(values, matrices='kernel$')
    assert not np.allclose(plain['head']['kernel'], wide['head']['kernel'])
    np.testing.assert_array_equal(plain['head']['bias'], wide['head']['bias'])


START = np.random.default_rng(0).normal(size=(3, 4))
GRADS = np.random.default_rng(1).normal(size=(6, 3, 4))
# timm 1.0.31 in float32 after six steps: a kernel, and one of the rest.
TIMM = {
    'adamuon': (
        [
            [0.145309, -0.131116, 0.623012, 0.120275],
            [-0.545745, 0.354766, 1.281720, 0.947419],
            [-0.684782, -1.276974, -0.640169, 0.023523],
        ],
        [
            [0.155144, -0.128620, 0.631046, 0.165616],
            [-0.580588, 0.352958, 1.304380, 0.953429],
            [-0.726237, -1.310468, -0.688307, -0.038146],
        ],
    ),
    'nadamuon': (
        [
            [0.141603, -0.127482, 0.639027, 0.115499],
            [-0.542661, 0.367642, 1.283950, 0.944838],
            [-0.690482, -1.271916, -0.634409, 0.027860],
        ],
        None,  # timm's NAdamW corrects the bias of its momentum by another power
    ),
}


@pytest.mark.parametrize('name', ['adamuon', 'nadamuon'])
def test_adamuon_is_timms(name):
    x = jnp.asarray(START, jnp.float32)
    tree = {'block_0': {'kernel': x}, 'head': {'kernel': x}}
    tx, _ = optimizer(tree, 6, name=name, lr=0.02, weight_decay=0.1)

    def draw(_, seed):
        return jax.tree.map(lambda _: jnp.asarray(GRADS[seed - 1], jnp.float32), tree)

    found = applied(tx, tree, 6, draw=draw)
    kernel, rest = TIMM[name]
    np.testing.assert_allclose(found['block_0']['kernel'], kernel, atol=3e-6)
    if rest:
        np.testing.assert_allclose(found['head']['kernel'], rest, atol=3e-6)


def test_the_parts_of_adamuons_kernels_are_scaled_by_themselves(values):
    """Each of them has the root mean square 0.2; further iterations are accepted."""
    tx, _ = optimizer(values, 1, name='adamuon', lr=0.1, ns_steps=7)
    after = param_paths(applied(tx, values, 1))
    for path, before in param_paths(values).items():
        if path.endswith('kernel') and 'block' in path:
            update = after[path] - before
            parts = update.swapaxes(0, 1) if 'qkv' in path else update[None]
            for part in parts:
                assert float(jnp.sqrt(jnp.mean(part**2))) == pytest.approx(0.02, rel=1e-4)


def test_matrices_that_no_parameter_matches_are_refused(values):
    with pytest.raises(UserError, match=r'matrices.*blcok'):
        stepped(values, matrices='blcok')


def test_an_unknown_option_is_named(values):
    with pytest.raises(UserError, match=r"\(muon\): unknown key 'ns_step'.*'ns_steps'"):
        stepped(values, ns_step=3)
