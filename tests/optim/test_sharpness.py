"""Sharpness-aware minimization: the authors' gradients, on any devices and in any microbatches."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import contrastive, toys
from helpers.experiments import ROOT
from helpers.messages import says

from vit_jax.commands import inspect
from vit_jax.config import load
from vit_jax.config.run import Durations, Parallel, Sam, Schedule, Step
from vit_jax.errors import UserError
from vit_jax.optim import sharpness
from vit_jax.profiling import cost, flops, task_flops
from vit_jax.runtime import sharding
from vit_jax.step import Optimizer, init_state, init_variables, make_train_step
from vit_jax.trainer import build, start
from vit_jax.tree_paths import param_paths

# The gradients that big_vision's `gsam_gradient` gives for tanh(x a + b) and the squared error.
PARAMS = {'a': [[0.13, -0.13, 0.64], [0.1, -0.54, 0.36]], 'b': [1.3, 0.95, -0.7]}
X = [[-1.27, -0.62], [0.04, -2.33], [-0.22, -1.25], [-0.73, -0.54]]
Y = [[-0.32, 0.41, 1.04], [-0.13, 1.37, -0.67], [0.35, 0.9, 0.09], [-0.74, -0.92, -0.46]]
PUBLISHED = {
    0.0: {
        'a': [
            [-0.08712735, -0.06051399, 0.05187878],
            [-0.12632659, -0.03578458, 0.07644694],
        ],
        'b': [0.12769526, 0.07129672, -0.07826136],
    },
    0.6: {
        'a': [
            [-0.08180024, -0.07713738, 0.06210080],
            [-0.09919977, -0.04615698, 0.09262558],
        ],
        'b': [0.11225133, 0.09126358, -0.09481212],
    },
}
LAYOUTS = {
    'one': {},
    'jit': {},
    'fsdp': {'fsdp': 8, 'min_split_size': 8},
    'pmap': {'strategy': 'pmap'},
    'slices': {'slices': 2, 'fsdp': 2, 'min_split_size': 8},
}
SYSTEMS = {'separable': toys, 'coupled': contrastive}
RHO, ALPHA = 0.5, 0.4
FEW = [('coupled', 'pmap', 2)]
REST = [
    (system, name, steps)
    for system in SYSTEMS
    for name in LAYOUTS
    for steps in (1, 2)
    if (name, steps) != ('one', 1) and (system, name, steps) not in FEW
]


@pytest.mark.parametrize('alpha', PUBLISHED)
def test_gradients_are_those_of_the_authors(alpha):
    def differentiate(forward, loss, params, collections, examples, split):
        value, grads = jax.value_and_grad(lambda p: loss(forward(p)))(params)
        return grads, {'loss': value}, collections

    params, x, y = jax.tree.map(jnp.asarray, (PARAMS, np.float32(X), np.float32(Y)))
    params = {name: jnp.asarray(value, jnp.float32) for name, value in PARAMS.items()}

    def forward(params):
        return jnp.tanh(x @ params['a'] + params['b'])

    def loss(outputs):
        return jnp.square(outputs - y).mean()

    aware = sharpness.make_sharpness_aware(Sam(rho=0.3, alpha=alpha), Schedule(), None)
    step = jax.jit(lambda p: aware(differentiate, jnp.zeros((), int))(forward, loss, p, {}, x, 1))
    grads, metrics, _ = step(params)
    for name, expected in PUBLISHED[alpha].items():
        np.testing.assert_allclose(grads[name], expected, atol=2e-6)
    assert float(metrics['loss']) == pytest.approx(1.1146326, rel=1e-6)

    @jax.jit
    def at_the_edge(params):
        first = jax.grad(lambda p: loss(forward(p)))(params)
        moved = jax.tree.map(lambda p, g: p + 0.3 * g / optax.tree.norm(first), params, first)
        return loss(forward(moved))

    expected = float(at_the_edge(params)) - 1.1146326
    assert float(metrics['sharpness']) == pytest.approx(expected, rel=1e-4) and expected > 0


@functools.cache
def stepped(system, name='one', accum_steps=1, max_skips=0, freeze=(), rho=RHO, alpha=ALPHA):
    """Parameters and averages before and after a step of SGD, and its metrics."""
    model, task = SYSTEMS[system].Model(), SYSTEMS[system].Task()
    batch, tx = SYSTEMS[system].make_batch(), optax.sgd(1.0)
    devices = jax.devices()[: 1 if name == 'one' else 8]
    layout = sharding.make_layout(devices, Parallel(**LAYOUTS[name]))

    def init():
        example = {k: jnp.asarray(x[:1]) for k, x in batch.items()}
        return init_state(init_variables(model, task, example, seed=0), tx, seed=0, ema=True)

    options = {'accum_steps': accum_steps, 'max_skips': max_skips, 'ema_decay': 0.75}
    sam = Step(sam=Sam(rho=rho, alpha=alpha), **options)
    train_step = make_train_step(model, task, Optimizer(tx, freeze), sam, layout)
    step = layout.compile_train(train_step, jax.eval_shape(init))
    state = layout.create(init)
    before = jax.tree.map(np.array, layout.to_global(state))
    state, metrics = step(state, layout.put_batch(batch))
    after = jax.tree.map(np.array, layout.to_global(state))
    return before, after, {key: float(value) for key, value in metrics.items()}


@pytest.mark.slow
@pytest.mark.parametrize(
    ('system', 'name', 'accum_steps'),
    [*FEW, *(pytest.param(*case, marks=pytest.mark.long) for case in REST)],
)
def test_any_layout_trains_like_one_device(system, name, accum_steps):
    _, expected, whole = stepped(system)
    _, after, metrics = stepped(system, name, accum_steps)
    assert metrics == pytest.approx(whole, rel=1e-5, abs=1e-6)
    for path, value in param_paths(expected.params).items():
        found = param_paths(after.params)[path]
        np.testing.assert_allclose(found, value, rtol=1e-6, atol=1e-6, err_msg=path)
    plain = stepped(system, rho=0.0, alpha=0.0)[1]
    apart = jax.tree.map(lambda a, b: np.abs(a - b).max(), plain.params, expected.params)
    assert max(jax.tree.leaves(apart)) > 1e-3 and whole['sharpness'] > 1e-4


@pytest.mark.slow
def test_averages_follow_and_frozen_parameters_stay():
    before, after, _ = stepped('separable', freeze=('first',))
    for path, average in param_paths(after.ema).items():
        old, new = (param_paths(state.params)[path] for state in (before, after))
        np.testing.assert_allclose(average, 0.75 * old + 0.25 * new, atol=1e-6)
        assert np.array_equal(old, new) == path.startswith('first'), path


@pytest.mark.slow
def test_a_step_whose_second_gradient_is_not_finite_is_skipped():
    before, after, metrics = stepped('coupled', max_skips=1, rho=1e38, alpha=0.0)
    assert np.isfinite(metrics['loss']) and not np.isfinite(metrics['sharpness'])
    assert int(after.step) == 1
    jax.tree.map(
        np.testing.assert_array_equal, (before.params, before.ema), (after.params, after.ema)
    )


@pytest.mark.slow
def test_rho_follows_its_schedule():
    model, task, batch = toys.Model(), toys.Task(), toys.make_batch()
    variables = init_variables(model, task, batch, seed=0)
    state = init_state(variables, optax.sgd(1.0), 0, ema=False)
    falling = Step(sam=Sam(rho=RHO), sam_schedule=Schedule(name='linear', final=0.1))
    step = make_train_step(
        model, task, Optimizer(optax.sgd(1.0), times=Durations(1, 1, 4)), falling
    )
    last = jax.jit(step)(state.replace(step=jnp.asarray(4)), batch)[1]
    constant = make_train_step(model, task, optax.sgd(1.0), Step(sam=Sam(rho=0.1)))
    expected = jax.jit(constant)(state.replace(step=jnp.asarray(4)), batch)[1]
    assert float(last['sharpness']) == pytest.approx(float(expected['sharpness']), rel=1e-4)


@pytest.mark.slow
def test_a_step_counts_twice(monkeypatch):
    monkeypatch.setitem(flops.PEAK_FLOPS, 'cpu', 1e12)
    file = f'{ROOT}/tests/helpers/linear.py'
    plain = build.build(load.load(file), jax.devices()[:1])
    config = load.load(file, ['step.sam.rho=0.1', 'step.sam.alpha=0.5'])
    training = build.build(config, jax.devices()[:1])
    program = training.program
    once = task_flops.training_flops(program.model, program.task, training.data.spec)
    assert start.utilization(training) == pytest.approx(2 * start.utilization(plain))
    assert cost.price(training.config).flops == pytest.approx(2 * cost.price(plain.config).flops)
    meta = {'config': training.config.to_dict(), **training.data.facts()}
    assert cost.train_flops(meta, ['helpers']) == pytest.approx(2 * config.batch_size * once.total)
    subject = inspect.InspectedModel(training.config, {'params': {}}, training.data.spec, '')
    shown = {'forward': once.forward, 'train': 2 * once.total}
    assert inspect.make_report(subject)['flops'] == shown
    assert says(sharpness.remarks(training.run.step.sam), 'rho 0.1', 'two gradients')


@pytest.mark.parametrize(
    ('options', 'message'),
    [
        ({'rho': -0.1}, r'config.step.sam.rho=-0.1: .* 0'),
        ({'rho': 0.1, 'alpha': -1.0}, r'config.step.sam.alpha=-1.0: .* 0'),
        ({'alpha': 0.5}, 'config.step.sam.alpha=0.5'),
    ],
)
def test_mistakes(options, message):
    words = [f'step.sam.{key}={value}' for key, value in options.items()]
    with pytest.raises(UserError, match=message):
        load.load(f'{ROOT}/tests/helpers/linear.py', words)
