"""One device, or eight under jit, fsdp, pmap and slices: the same examples, masks and losses."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from vit_jax.config.run import Data, Parallel, Step
from vit_jax.errors import UserError
from vit_jax.models import vit
from vit_jax.runtime import sharding
from vit_jax.step import init_state, init_variables, make_train_step
from vit_jax.tasks import classify
from vit_jax.trainer import evaluate
from vit_jax.trainer.evaluations import open_data
from vit_jax.trainer.program import compile_steps
from vit_jax.tree_paths import param_paths

pytestmark = pytest.mark.slow

STEPS, CLASSES = 4, 10
TENSOR_RULES = (
    (r'fc1/kernel$', (None, 'tensor')),
    (r'fc2/kernel$', ('tensor', None)),
)
LAYOUTS = {
    'one': {'devices': 1},
    'jit': {},
    'fsdp': {'fsdp': 8, 'min_split_size': 64},
    'all axes': {
        'fsdp': 2,
        'tensor': 2,
        'min_split_size': 64,
        'rules': TENSOR_RULES,
        'accum_steps': 2,
    },
    'pmap': {'strategy': 'pmap'},
    'slices': {'slices': 2, 'fsdp': 2, 'min_split_size': 64},
}
# `all axes` computes by `jit`, and other tests train on several slices.
DEAR = ('jit', 'slices')
EIGHT = [name for name in LAYOUTS if name != 'one']
MODEL = vit.Model(
    num_classes=CLASSES,
    patch_size=2,
    width=16,
    depth=1,
    mlp_dim=32,
    num_heads=2,
    pool='gap',
    dropout=0.2,
    drop_path=0.2,
)
TASK = classify.Task(label_smoothing=0.1, mixup=0.8)
TX = optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(0.3, momentum=0.9))


def make_batch(step, size=32):
    rng = np.random.default_rng(step)
    return {
        'image': rng.integers(0, 256, (size, 8, 8, 1), dtype=np.uint8),
        'label': rng.integers(0, CLASSES, size).astype(np.int32),
    }


def make_layout(devices=8, **options):
    return sharding.make_layout(jax.devices()[:devices], Parallel(**options))


def placement(state):
    return {path: x.sharding for path, x in param_paths(state).items()}


def init():
    example = jax.tree.map(jnp.asarray, make_batch(0, size=1))
    variables = init_variables(MODEL, TASK, example, seed=0)
    params = dict(variables['params'])
    # The head starts at zero, which would hide all that comes before it.
    wave = jax.tree.map(
        lambda x: 0.1 * jnp.cos(jnp.arange(x.size)).reshape(x.shape), params['head']
    )
    params['head'] = wave
    return init_state({**variables, 'params': params}, TX, 0, True, other_decays=(0.5,))


class Training:
    """Four steps under one layout: the states, their losses, and the state on the host."""

    def __init__(self, accum_steps=1, **options):
        self.layout = make_layout(**options)
        train_step = make_train_step(
            MODEL, TASK, TX, Step(accum_steps=accum_steps, ema_decay=(0.9, 0.5)), self.layout
        )
        self.step = self.layout.compile_train(train_step, jax.eval_shape(init))
        self.state = self.layout.create(init)
        self.initial, self.placed = self.on_host(self.state), placement(self.state)
        self.metrics = [self.take(i) for i in range(STEPS)]
        self.final = self.on_host(self.state)

    def take(self, i):
        self.state, metrics = self.step(self.state, self.layout.put_batch(make_batch(i)))
        return {name: float(value) for name, value in metrics.items()}

    def on_host(self, state):
        return jax.tree.map(np.asarray, self.layout.to_global(state))


@functools.cache
def training(name):
    return Training(**LAYOUTS[name])


# `all axes` has its parameters split, too.
every_layout = pytest.mark.parametrize(
    'name',
    [pytest.param(x, marks=[pytest.mark.long] * (x in (*DEAR, 'fsdp'))) for x in EIGHT],
)


@every_layout
def test_eight_devices_train_like_one(name):
    one, eight = training('one'), training(name)
    assert eight.layout.mesh.size == 8
    for a, b in zip(eight.metrics, one.metrics, strict=True):
        assert a == pytest.approx(b, rel=1e-5)
    expected = param_paths(one.final)
    for path, value in param_paths(eight.final).items():
        assert value.shape == expected[path].shape
        np.testing.assert_allclose(value, expected[path], rtol=0, atol=3e-6, err_msg=path)


@every_layout
def test_the_first_state_is_the_same_to_the_bit(name):
    expected = param_paths(training('one').initial)
    for path, value in param_paths(training(name).initial).items():
        np.testing.assert_array_equal(value, expected[path], err_msg=path)


@pytest.mark.parametrize(
    'name', [pytest.param(x, marks=[pytest.mark.long] * (x in DEAR)) for x in LAYOUTS]
)
def test_steps_leave_the_state_where_it_was_put(name):
    """Whoever puts it elsewhere has the step compiled twice."""
    run = training(name)
    assert placement(run.state) == run.placed
    target = sharding.abstract_target(run.layout, jax.eval_shape(init))
    stored = jax.tree.map(lambda x, t: jax.device_put(x, t.sharding), run.final, target)
    assert placement(run.layout.from_global(stored)) == run.placed


def test_the_same_example_elsewhere_in_the_batch_draws_other_masks():
    """So that replicas that all drew those of the first rows would be seen above."""
    batch = {key: jnp.asarray(rows) for key, rows in make_batch(0).items()}
    turned = jax.tree.map(lambda x: jnp.roll(x, 16, axis=0), batch)
    step = make_train_step(MODEL, TASK, TX)
    loss_of = jax.jit(lambda state, batch: step(state, batch)[1]['loss'])  # compiles no update
    losses = [float(loss_of(training('one').initial, each)) for each in (batch, turned)]
    assert abs(losses[0] - losses[1]) > 1e-3


def shards(tree):
    """How many different parts of each array the devices hold."""
    return {
        path: len({str(shard.index) for shard in x.addressable_shards})
        for path, x in param_paths(tree).items()
    }


def test_fsdp_splits_parameters_averages_and_optimizer_state():
    state = training('fsdp').state
    for tree in (state.params, state.ema, state.other_emas, state.opt_state):
        for path, x in param_paths(tree).items():
            if x.size < 64 or all(n % 8 for n in x.shape):
                assert x.is_fully_replicated, path
            else:
                assert {shard.data.size for shard in x.addressable_shards} == {x.size // 8}, path
    split = [path for path, count in shards(state.params).items() if count == 8]
    assert 'encoder/block_0/mlp/fc1/kernel' in split
    assert 'pos_embed' in split
    momentum = [path for path, count in shards(state.opt_state).items() if count == 8]
    assert len(momentum) == len(split)


def test_tensor_rules_place_what_they_name():
    count = shards(training('all axes').state.params)
    fc1 = param_paths(training('all axes').state.params)['encoder/block_0/mlp/fc1/kernel']
    assert fc1.sharding.spec == jax.sharding.PartitionSpec(None, 'tensor')
    assert count['encoder/block_0/mlp/fc1/kernel'] == 2
    assert count['encoder/block_0/mlp/fc2/kernel'] == 2


@pytest.mark.parametrize(
    ('first', 'second'),
    [
        *(('pmap', 'fsdp'), ('fsdp', 'pmap')),
        *(
            pytest.param(*names, marks=pytest.mark.long)
            for names in (('jit', 'one'), ('jit', 'slices'), ('slices', 'jit'))
        ),
    ],
)
def test_a_run_goes_on_under_another_layout(first, second):
    """What a layout hands to a checkpoint is what any other one starts from."""
    old, new = training(first), training(second)
    target = sharding.abstract_target(new.layout, jax.eval_shape(init))
    stored = jax.tree.map(lambda x, t: jax.device_put(x, t.sharding), old.final, target)
    state = new.layout.from_global(stored)
    _, metrics = new.step(state, new.layout.put_batch(make_batch(STEPS)))
    reference = training('one')
    expected_state = jax.tree.map(jnp.asarray, reference.final)
    _, expected = reference.step(expected_state, reference.layout.put_batch(make_batch(STEPS)))
    for name, value in metrics.items():
        assert float(value) == pytest.approx(float(expected[name]), rel=2e-5), name


@pytest.mark.parametrize('name', ['one', 'fsdp', 'pmap'])
def test_evaluation_counts_each_of_30_examples_once(name):
    """In two batches of 16, of which the second is padded."""
    layout, params = training(name).layout, training('one').final.ema
    data = open_data(Data(source='digits', split='test[:30]'), 16, layout)
    batches = list(data.eval_batches())
    assert [len(batch['label']) for batch in batches] == [16, 16]

    steps = compile_steps(MODEL, TASK, layout)
    variables = jax.tree.map(jnp.asarray, {'params': params})
    placed = layout.from_global(jax.device_put(variables, layout.shardings(variables)))
    got = evaluate.evaluate(steps, placed, data.eval_batches())

    examples = [data.source[i] for i in range(30)]
    images = np.stack([(np.float32(e['image']) - 127.5) / 127.5 for e in examples])
    logits = np.asarray(jax.jit(MODEL.apply)(variables, images)['logits'], np.float64)
    labels = np.array([e['label'] for e in examples])
    logp = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    assert got['accuracy'] * 30 == pytest.approx((logits.argmax(-1) == labels).sum(), abs=1e-9)
    assert got['loss'] == pytest.approx(-logp[np.arange(30), labels].mean(), rel=1e-6)


@pytest.mark.parametrize(
    ('options', 'message'),
    [
        ({'strategy': 'pjit'}, r"unknown strategy 'pjit'; .* 'jit'"),
        ({'fsdp': 3}, r'fsdp=3 times tensor=1 .* 8 devices'),
        ({'fsdp': 4, 'tensor': 4}, 'must divide the 8 devices'),
        ({'fsdp': 0}, 'fsdp=0'),
        ({'strategy': 'pmap', 'fsdp': 2}, 'pmap.*parallel'),
    ],
)
def test_layouts_that_cannot_be(options, message):
    with pytest.raises(UserError, match=message):
        make_layout(**options)


@pytest.mark.parametrize(
    ('batch_size', 'options', 'message'),
    [
        (12, {}, 'multiple of 8'),
        (24, {'accum_steps': 2}, r'multiple of 16 \(8 devices x 2'),
        (24, {'multiple': 2, 'reason': 'of twins'}, '16, 2 examples for each.*of twins'),
    ],
)
def test_batches_that_do_not_fit(batch_size, options, message):
    sharding.check_batch(make_layout(), 32, **options)
    with pytest.raises(UserError, match=message):
        sharding.check_batch(make_layout(), batch_size, **options)
