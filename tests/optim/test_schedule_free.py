"""Schedule-free optimizers: the paper's equations, and the average that runs evaluate and save."""

from __future__ import annotations

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.digests import tree_digest
from helpers.runs import digest
from helpers.sections import optimizer
from optax import contrib

import vit_jax
from vit_jax.config import load
from vit_jax.config.run import Lora, Step
from vit_jax.errors import UserError
from vit_jax.inference.load import read
from vit_jax.optim import schedule_free
from vit_jax.trainer import build, train

STEPS, RATE, DECAY, B1 = 6, 0.02, 0.1, 0.9
START = np.random.default_rng(0).normal(size=(3, 4))
GRADS = np.random.default_rng(1).normal(size=(STEPS, 3, 4))
# Their AdamWScheduleFree (schedulefree 1.4.1) after six steps, of which three warm up.
AUTHORS = [
    [0.164478, -0.097511, 0.646403, 0.125129],
    [-0.535379, 0.385435, 1.282624, 0.990822],
    [-0.687535, -1.283575, -0.651453, 0.018942],
]


def steps(name: str, **options):
    """Our trained parameters and our average after each step."""
    values = {'kernel': START, 'kept': START}
    params = jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), values)
    rule = {'name': name, 'lr': RATE, 'weight_decay': DECAY, 'freeze': ('kept',)}
    tx, rate = optimizer(params, 100, (), **rule | options)
    state, update, found = tx.init(params), jax.jit(tx.update), []
    for grad in GRADS:
        grads = {'kernel': jnp.asarray(grad, jnp.float32), 'kept': jnp.zeros((3, 4))}
        updates, state = update(grads, state, params)
        params = jax.tree.map(jnp.add, params, updates)
        average = jax.jit(schedule_free.evaluated)(state, params)
        np.testing.assert_array_equal(average['kept'], jnp.asarray(START, jnp.float32))
        found.append((params['kernel'], average['kernel']))
    return found, rate


@pytest.mark.parametrize('name', ['schedule_free_adamw', 'schedule_free_sgd'])
@pytest.mark.parametrize('warmup', ['0', '3'])
def test_it_follows_the_equations(name, warmup):
    """Equations 3 to 5 of section 2, algorithm 1 of appendix E, with decay at y."""
    found, rate = steps(name, schedule={'name': 'constant', 'warmup': warmup})
    x, y, z, v, total = START, START, START, 0.0, 0.0
    for t, (grad, (ours, average)) in enumerate(zip(GRADS, found, strict=True)):
        lr = float(rate(t))
        v = 0.999 * v + 0.001 * grad**2
        if name.endswith('adamw'):
            grad = grad / (np.sqrt(v / (1 - 0.999 ** (t + 1))) + 1e-8)
        z = z - lr * (grad + DECAY * y)
        total += lr**2
        share = lr**2 / total if total else 0.0
        x = (1 - share) * x + share * z
        y = B1 * x + (1 - B1) * z
        np.testing.assert_allclose(ours, y, rtol=2e-5, atol=2e-6)
        np.testing.assert_allclose(average, x, rtol=2e-5, atol=2e-6)


def test_it_is_the_authors():
    """Their warm-up begins above 0."""
    warmup = {'name': 'constant', 'warmup': '2', 'init': RATE / 3}
    found, rate = steps('schedule_free_adamw', schedule=warmup)
    rates = [RATE / 3, RATE * 2 / 3, *[RATE] * 4]
    np.testing.assert_allclose([float(rate(t)) for t in range(STEPS)], rates, rtol=1e-6)
    np.testing.assert_allclose(found[-1][1], AUTHORS, rtol=1e-5, atol=2e-6)


def test_rates_by_path_move_the_iterates():
    plain, _ = steps('schedule_free_sgd', weight_decay=0.0)
    half, _ = steps('schedule_free_sgd', weight_decay=0.0, lr_mults=(('kernel', 0.5),))
    for (ours, average), (most, most_average) in zip(half, plain, strict=True):
        np.testing.assert_allclose(2 * (ours - START), most - START, atol=1e-5)
        np.testing.assert_allclose(2 * (average - START), most_average - START, atol=1e-5)


def test_a_share_of_zero_is_refused():
    with pytest.raises(UserError, match=r'config\.optim\.b1=0'):
        steps('schedule_free_sgd', b1=0.0)


FREE = ('optim.name=schedule_free_adamw', 'optim.lr=0.01', 'optim.schedule.name=constant')
ALLOW = ['helpers']


@pytest.fixture(scope='module')
def make_config(repo):
    def make(*overrides):
        config = load.load(str(repo / 'tests/helpers/linear.py'))
        given = ['total=4 steps', 'every.eval=4', 'every.checkpoint=2', 'every.examples=', *FREE]
        return load.override(config, [*given, 'step.ema_decay=0', *overrides])

    return make


@pytest.mark.slow
def test_runs_evaluate_save_and_resume_the_average(make_config, tmp_path):
    whole, resumed = tmp_path / 'whole', tmp_path / 'resumed'
    train.train(make_config(), whole, devices=jax.devices()[:1])
    with pytest.raises(train.Preempted):
        train.train(make_config(), resumed, devices=jax.devices()[:1], stop_at=2)
    train.train(make_config(), resumed, devices=jax.devices()[:1])
    assert digest(resumed) == digest(whole)
    _, variables = vit_jax.load(whole, allowed=ALLOW)
    trained = read(whole, average='none', allowed=ALLOW).variables
    training = build.build(make_config(), jax.devices()[:1])
    state = training.program.abstract_state
    assert jax.tree.structure(state.ema) == jax.tree.structure(state.params)
    assert tree_digest(variables) != tree_digest(trained)


@pytest.mark.parametrize(('decay', 'rank'), [(0.9, 0), (0.0, 2)])
def test_a_second_average_is_refused(decay, rank):
    parts = {'step': Step(ema_decay=decay), 'lora': Lora(rank=rank)}
    run = SimpleNamespace(optim=SimpleNamespace(name='schedule_free_sgd'), **parts)
    with pytest.raises(UserError, match=r'config\.(step\.ema_decay=0.9|lora\.rank=2).*free_sgd'):
        schedule_free.average_of(run)


def test_the_average_equals_optaxs():
    params = {'kernel': jnp.asarray(START, jnp.float32)}
    tx, _ = optimizer(params, 9, (), name='schedule_free_sgd', lr=RATE)
    updates, state = tx.update({'kernel': jnp.ones((3, 4))}, tx.init(params), params)
    params = jax.tree.map(jnp.add, params, updates)
    expected = contrib.schedule_free_eval_params(state, params)
    found = schedule_free.evaluated(state, params)
    np.testing.assert_allclose(found['kernel'], expected['kernel'], rtol=1e-6)
