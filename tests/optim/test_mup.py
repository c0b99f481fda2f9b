"""Maximal update parametrization: factors by shape, and sizes of activations that do not grow."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers.sections import optimizer

from vit_jax.config import load
from vit_jax.errors import UserError
from vit_jax.models import seq2seq, vit
from vit_jax.optim import mup
from vit_jax.trainer import build
from vit_jax.tree_paths import param_paths

BASE = dict(width=16, mlp_dim=64, num_heads=2)
SMALL = dict(num_classes=4, patch_size=4, depth=2, pool='gap')


def sizes(times):
    return {key: value * times for key, value in BASE.items()}


def vit_of(**fields):
    return vit.Model(**SMALL | BASE | fields)


@functools.cache
def shapes(model):
    if isinstance(model, seq2seq.Model):
        inputs = [jax.ShapeDtypeStruct((1, 4), np.int32)] * 2
    else:
        inputs = [jax.ShapeDtypeStruct((1, 8, 8, 3), np.float32)]
    return jax.eval_shape(model.init, jax.random.key(0), *inputs)['params']


def factors(model, base):
    return mup.factors(shapes(model), shapes(base), model.mup_kinds)


@pytest.mark.parametrize('scan', [False, True])
def test_factors_of_a_vit(scan):
    found = factors(vit_of(scan=scan, **sizes(4)), vit_of(scan=scan))
    block = 'encoder/blocks' if scan else 'encoder/block_1'
    vector = mup.Factors(1, 1, 4)
    hidden = mup.Factors(1, 1 / 4, 4)
    assert found['patch_embed/kernel'] == found['pos_embed'] == vector
    assert found[f'{block}/norm1/scale'] == found[f'{block}/mlp/fc2/bias'] == vector
    assert found[f'{block}/mlp/fc1/kernel'] == found[f'{block}/mlp/fc2/kernel'] == hidden
    assert found[f'{block}/attention/out/kernel'] == hidden
    assert found[f'{block}/attention/qkv/kernel'] == hidden  # heads are as wide as before
    assert found['head/kernel'] == mup.Factors(1 / 2, 1 / 4, 1)
    assert found['head/bias'] == mup.Factors()


@pytest.mark.parametrize('scan', [False, True])
def test_wider_heads_divide_scores_by_their_width(scan):
    base, wide = vit_of(scan=scan), vit_of(scan=scan, width=64, mlp_dim=256)
    path = f'encoder/{"blocks" if scan else "block_0"}/attention/qkv/kernel'
    found = factors(wide, base)[path]
    np.testing.assert_allclose(found.query_factor.ravel(), [0.5, 1, 1])  # (8 / 32)^1/2
    assert found.update_factor().shape == ((1,) if scan else ()) + (1, 3, 1, 1)
    np.testing.assert_allclose(np.ravel(found.update_factor()), [1 / 8, 1 / 4, 1 / 4])


def test_factors_of_an_encoder_decoder():
    def model(**fields):
        return seq2seq.Model(12, depth=1, tied=False, **dict(BASE, **fields))

    found = factors(model(**sizes(4)), model())
    assert found['embed/source'] == found['embed/target'] == mup.Factors(1, 1 / 2, 2)
    assert found['embed/output'] == mup.Factors(1 / 2, 1 / 4, 1)
    assert found['decoder/block_0/cross/kv/kernel'].rate == 1 / 4
    tied = [seq2seq.Model(12, depth=1, **sizes(times)) for times in (4, 1)]
    with pytest.raises(UserError, match=r'embed/shared .* set config\.model\.tied=False'):
        factors(*tied)


def test_the_base_model_itself_changes_nothing():
    assert set(factors(vit_of(), vit_of()).values()) == {mup.Factors()}


@pytest.mark.parametrize(
    ('fields', 'words'),
    [
        (dict(depth=3), 'differs.*widths'),
        (dict(depth=3, scan=True), 'differ in widths'),
    ],
)
def test_another_depth_is_refused(fields, words):
    with pytest.raises(UserError, match=words):
        factors(vit_of(**fields), vit_of(**{**fields, 'depth': 2}))


@pytest.mark.slow
def test_weight_decay_keeps_the_product_of_rate_and_strength():
    model = vit_of(**sizes(4))
    found = factors(model, vit_of())
    params = jax.tree.map(lambda s: np.ones(s.shape, np.float32), shapes(model))
    zero = jax.tree.map(np.zeros_like, params)
    keys = dict(name='adamw', lr=0.1, weight_decay=0.5, decay_mults=(('fc1', 2.0),))
    tx, _ = optimizer(params, 1, (), found, **keys)
    plain, _ = optimizer(params, 1, **keys)

    @functools.partial(jax.jit, static_argnums=0)
    def updates(tx, params):
        return tx.update(zero, tx.init(params), params)[0]

    jax.tree.map(
        functools.partial(np.testing.assert_allclose, rtol=1e-6),
        updates(tx, params),
        updates(plain, params),
    )


# Changes of what the model computes, by a few steps of Adam.


def batch():
    rng = np.random.default_rng(0)
    images = rng.standard_normal((16, 8, 8, 3)).astype(np.float32)
    return jnp.asarray(images), jnp.asarray(rng.integers(0, 4, 16))


def change(times, is_mup, lr=0.01, steps=3):
    """The RMS of the change of logits by a few steps, at one width."""
    model, base = vit_of(**sizes(times)), vit_of()
    images, labels = batch()
    params = jax.jit(model.init)(jax.random.key(times), images)['params']
    found = factors(model, base) if is_mup else None
    params = mup.scale_initial(params, found) if is_mup else params
    tx, _ = optimizer(params, steps, (), found, name='adam', lr=lr)

    def loss(params):
        logits = model.apply({'params': params}, images)['logits']
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

    @jax.jit
    def step(params, state):
        updates, state = tx.update(jax.grad(loss)(params), state, params)
        return optax.apply_updates(params, updates), state

    logits = jax.jit(lambda params: model.apply({'params': params}, images)['logits'])
    before, state = logits(params), tx.init(params)
    for _ in range(steps):
        params, state = step(params, state)
    return float(jnp.sqrt(jnp.mean((logits(params) - before) ** 2)))


@pytest.mark.slow
@pytest.mark.long
def test_updates_of_what_is_computed_do_not_grow_with_the_width():
    grows = [change(16, is_mup) / change(1, is_mup) for is_mup in (False, True)]
    assert grows[0] > 4  # the standard parametrization
    assert 0.5 < grows[1] < 2


# From a config.


@pytest.fixture
def config(repo):
    fields = ['model.width=64', 'model.mlp_dim=128', 'model.num_heads=4', 'optim.name=adamw']
    return load.load(f'{repo}/experiments/vit/digits.py:smoke', fields)


@pytest.mark.slow
def test_initial_values_follow_the_config(config, one_device):
    def initial(text):
        with config.unlocked():
            config.optim.parametrization = text
        return param_paths(build.build(config).program.init().params)

    plain, wide = initial('standard'), initial('mup(width=32, mlp_dim=64)')
    path = 'encoder/block_0/attention/qkv/kernel'
    ratio = wide[path] / plain[path]
    np.testing.assert_allclose(ratio[:, 0], 0.5**0.5, rtol=1e-5)
    np.testing.assert_allclose(ratio[:, 1:], 1)
    for other in plain.keys() - {path}:
        np.testing.assert_array_equal(plain[other], wide[other])


@pytest.mark.parametrize(
    ('text', 'words'),
    [
        ('mu-p', "write 'standard', or 'mup(width=64, ...)'"),
        ('mup()', "write 'standard', or 'mup(width=64, ...)'"),
        ('mup(width=)', 'config.optim.parametrization: '),
        ('mup(widht=64)', "did you mean 'width'"),
        ('mup(depth=2)', 'not in depth'),
    ],
)
def test_mistakes_are_one_line(config, text, words, one_device):
    with config.unlocked():
        config.optim.parametrization = text
    with pytest.raises(UserError) as error:
        build.build(config)
    assert words in str(error.value)
    assert '\n' not in str(error.value)


def test_other_optimizers_are_refused(config, one_device):
    with config.unlocked():
        config.optim.update(name='sgd', parametrization='mup(width=32)')
    with pytest.raises(UserError, match=r"Adam.*like.*'sgd'"):
        build.build(config)
