"""Matching images with captions: a golden step, locked images, predictions, errors."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers.applies import Given
from helpers.experiments import ROOT

from vit_jax.config import load
from vit_jax.config.run import Parallel, Step
from vit_jax.errors import UserError
from vit_jax.models.siglip import Model
from vit_jax.ops import terms
from vit_jax.runtime import sharding
from vit_jax.step import bind, init_state, init_variables, make_train_step
from vit_jax.tasks.siglip import Task
from vit_jax.trainer import build

MODEL = Model(
    **{'vocab_size': 11, 'length': 5, 'patch_size': 4, 'width': 16, 'depth': 1, 'mlp_dim': 24},
    **{'num_heads': 2, 'text_width': 8, 'text_depth': 1, 'text_mlp_dim': 16, 'text_num_heads': 2},
    embed_dim=16,
)
# Of the first three steps of Adam; they change only with the model, its initial values or the loss.
GOLDEN = {
    'sigmoid': [8.0731039, 4.3060241, 2.7871146],
    'softmax': [2.2456460, 1.9054865, 1.4419149],
}


def make_batch(rows=6):
    rng = np.random.default_rng(0)
    return {
        'image': jnp.asarray(rng.integers(0, 256, (rows, 8, 8, 3), dtype=np.uint8)),
        'caption': jnp.asarray(rng.integers(0, 11, (rows, 5)), jnp.int32),
    }


def init(task):
    one = jax.tree.map(lambda x: x[:1], make_batch())
    return init_variables(MODEL, task, one, seed=0)


@pytest.mark.slow
@pytest.mark.parametrize('loss_name', ['sigmoid', pytest.param('softmax', marks=pytest.mark.long)])
def test_golden_steps(loss_name):
    task, tx = Task(loss_name=loss_name), optax.adam(1e-2)
    state = jax.jit(lambda: init_state(init(task), tx, 0, ema=False))()
    step, losses = jax.jit(make_train_step(MODEL, task, tx)), []
    for _ in range(3):
        state, metrics = step(state, make_batch())
        losses.append(float(metrics['loss']))
    assert losses == pytest.approx(GOLDEN[loss_name], rel=1e-4)
    assert set(metrics) >= {'loss', 'right_text', 'right_image', 'grad_norm'}


LARGE = {
    'image': jax.ShapeDtypeStruct((2048, 4, 4, 3), 'u1'),
    'caption': jax.ShapeDtypeStruct((2048, 5), 'i4'),
}


def temporaries(parallel, chunk):
    """Bytes that a step on 2,048 pairs holds on each of eight devices."""
    model = MODEL.clone(width=8, embed_dim=8, mlp_dim=8, pool='gap')
    layout = sharding.make_layout(jax.devices()[:8], Parallel(**parallel))
    task, tx = Task(chunk=chunk), optax.sgd(1.0)

    def start():
        one = jax.tree.map(lambda x: jnp.zeros((1, *x.shape[1:]), x.dtype), LARGE)
        return init_state(init_variables(model, task, one, 0), tx, 0, ema=False)

    step = make_train_step(model, task, tx, Step(), layout)
    state, batch = jax.eval_shape(start), LARGE
    if layout.train_axis:  # of pmap, whose arrays have an axis of devices
        step = jax.pmap(step, layout.train_axis, devices=jax.devices()[:8])
        state = jax.tree.map(lambda x: jax.ShapeDtypeStruct((8, *x.shape), x.dtype), state)
        batch = {k: jax.ShapeDtypeStruct((8, 256, *x.shape[1:]), x.dtype) for k, x in LARGE.items()}
    else:
        step = layout.compile_train(step, state)
    return step.lower(state, batch).compile().memory_analysis().temp_size_in_bytes


@pytest.mark.slow
@pytest.mark.parametrize(
    'parallel',
    [
        {'strategy': 'pmap'},
        pytest.param({}, marks=pytest.mark.long),
        pytest.param({'fsdp': 8, 'min_split_size': 8}, marks=pytest.mark.long),
    ],
)
def test_no_device_holds_the_matrix_of_a_large_batch(parallel):
    found = temporaries(parallel, chunk=64)
    assert found < 4 * 2048**2 / 2
    assert temporaries(parallel, chunk=2048) > 3 * found


@pytest.mark.slow
def test_a_locked_image_tower_gets_no_gradient():
    def loss(image, text, task):
        made = {'image': image, 'text': text, 'scale': jnp.float32(1), 'bias': jnp.float32(0)}
        batch = make_batch()
        found = task.outputs(Given(lambda *inputs: made), batch)
        return terms.means(task.loss(found, batch))['loss']

    rng = np.random.default_rng(1)
    image, text = (jnp.asarray(rng.normal(size=(6, 3)), jnp.float32) for _ in range(2))
    grads = jax.jit(jax.grad(loss, argnums=(0, 1)), static_argnums=2)
    locked, free = grads(image, text, Task(locked_image=True)), grads(image, text, Task())
    assert not np.any(locked[0]) and np.all(np.any(free[0], axis=1))
    np.testing.assert_array_equal(locked[1], free[1])


def test_repeated_texts():
    rng = np.random.default_rng(1)
    image, text = (jnp.asarray(rng.normal(size=(4, 3)), jnp.float32) for _ in range(2))
    numbers = {'scale': jnp.float32(1), 'bias': jnp.float32(0)}
    outputs = {'image': image, 'text': text, **numbers}
    batch = {'image': image, 'caption': jnp.array([[1, 2], [3, 4], [1, 2], [5, 6]])}
    logits = np.asarray(image @ text.T)
    for repeats in ('negatives', 'matches'):
        signs = 2 * np.eye(4) - 1
        if repeats == 'matches':
            signs[0, 2] = signs[2, 0] = 1
        found = terms.means(Task(repeats=repeats).loss(outputs, batch))['loss']
        expected = np.log1p(np.exp(-signs * logits)).sum() / 4
        assert float(found) == pytest.approx(expected, rel=1e-5)


@pytest.mark.slow
def test_predictions():
    variables = jax.jit(lambda: init(Task()))()

    @functools.partial(jax.jit, static_argnums=0)
    def predict(task, batch):
        return task.predict(bind(MODEL, task, variables, batch), batch)

    batch = make_batch()
    both = predict(Task(), batch)
    assert both.keys() == {'features', 'text'}
    texts = predict(Task(), {'caption': batch['caption']})
    np.testing.assert_allclose(texts['text'], both['text'], atol=1e-6)
    prompts = tuple(map(tuple, np.asarray(batch['caption'][:3]).tolist()))
    for name, choose in (('sigmoid', jax.nn.sigmoid), ('softmax', jax.nn.softmax)):
        found = predict(Task(loss_name=name, prompts=prompts), {'image': batch['image']})
        cosines = both['features'] @ both['text'][:3].T
        np.testing.assert_allclose(found['similarity'], cosines, atol=1e-5)
        np.testing.assert_allclose(found['probs'], choose(10 * cosines - 10), atol=1e-5)


def test_a_batch_without_captions_is_refused():
    batch = {'image': make_batch()['image'], 'label': jnp.zeros(6)}
    with pytest.raises(UserError, match=r'needs captions, but the examples have image, label: add'):
        Task().loss({}, batch)


@pytest.mark.slow
def test_a_batch_of_one_pair_is_refused():
    config = load.load(f'{ROOT}/experiments/siglip/scenes.py:smoke', ['batch_size=1'])
    with pytest.raises(UserError, match=r'config.batch_size=1: .* siglip compares the examples'):
        build.build(config, jax.devices()[:1])


@pytest.mark.parametrize(
    ('fields', 'message'),
    [
        ({'loss_name': 'clip'}, "unknown config.task.loss_name 'clip'"),
        ({'repeats': 'yes'}, "unknown config.task.repeats 'yes'"),
        ({'chunk': 0}, r'config.task.chunk=0: .* 1'),
    ],
)
def test_invalid_options_are_refused(fields, message):
    with pytest.raises(UserError, match=message):
        Task(**fields)
