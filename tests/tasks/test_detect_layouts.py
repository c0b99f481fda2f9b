"""A train step of detection, matching included, is the same on one device and on eight."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from vit_jax.config.run import Parallel, Step
from vit_jax.runtime import sharding
from vit_jax.step import init_state, init_variables, make_train_step
from vit_jax.tasks.detect import Task
from vit_jax.tree_paths import param_paths

ROWS, OBJECTS, QUERIES, CLASSES, SIDE = 16, 3, 4, 3, 8


class Detector(nn.Module):
    """Two blocks' predictions by one layer each: a detector without what takes long to compile."""

    @nn.compact
    def __call__(self, images, pixel_mask, train=False):
        x = (images * pixel_mask[..., None]).reshape(len(images), -1)
        logits, boxes = (
            nn.Dense(2 * QUERIES * size)(x).reshape(-1, 2, QUERIES, size)
            for size in (CLASSES + 1, 4)
        )
        boxes = nn.sigmoid(boxes)
        last = {'logits': logits[:, -1], 'boxes': boxes[:, -1]}
        return {**last, 'aux_logits': logits[:, :-1], 'aux_boxes': boxes[:, :-1]}


MODEL = Detector()
TASK = Task()
# Without momentum and clipping, so that the update is the gradient.
TX = optax.sgd(1.0)
LAYOUTS = {'one': {}, 'jit': {}, 'pmap': {'strategy': 'pmap'}}


def make_batch():
    """Images with 0, 1, 2, 3, 0, ... objects, every second one padded; a device has two."""
    rng = np.random.default_rng(0)
    corners = np.sort(rng.uniform(0, SIDE / 2, (ROWS, OBJECTS, 2, 2)), axis=2).reshape(ROWS, -1, 4)
    mask = np.ones((ROWS, SIDE, SIDE), bool)
    mask[1::2, :, SIDE // 2 :] = False
    return {
        'image': rng.integers(0, 256, (ROWS, SIDE, SIDE, 3), np.uint8),
        'pixel_mask': mask,
        'boxes': corners.astype(np.float32),
        'labels': rng.integers(CLASSES, size=(ROWS, OBJECTS)).astype(np.int32),
        'object_mask': np.arange(OBJECTS) < (np.arange(ROWS) % (OBJECTS + 1))[:, None],
    }


def init():
    example = {name: jnp.asarray(x[:1]) for name, x in make_batch().items()}
    return init_state(init_variables(MODEL, TASK, example, seed=0), TX, seed=0, ema=False)


@functools.cache
def start():
    return jax.tree.map(np.asarray, jax.jit(init)())


@functools.cache
def stepped(name):
    """Metrics and gradients of one step."""
    layout = sharding.make_layout(
        jax.devices()[: 1 if name == 'one' else 8], Parallel(**LAYOUTS[name])
    )
    step = make_train_step(MODEL, TASK, TX, Step(), layout)
    compiled = layout.compile_train(step, jax.eval_shape(init))
    state = layout.from_global(jax.device_put(start(), layout.shardings(start())))
    before = param_paths(start().params)
    state, metrics = compiled(state, layout.put_batch(make_batch()))
    after = param_paths(jax.tree.map(np.asarray, layout.to_global(state).params))
    return jax.tree.map(float, metrics), {k: before[k] - after[k] for k in before}


@pytest.mark.slow
@pytest.mark.parametrize('name', [pytest.param('jit', marks=pytest.mark.long), 'pmap'])
@pytest.mark.long
def test_eight_devices_take_the_step_of_one(name):
    (metrics, grads), (found, ours) = stepped('one'), stepped(name)
    assert found == pytest.approx(metrics, rel=1e-4)
    assert all(map(np.any, grads.values()))
    for path, wanted in grads.items():
        np.testing.assert_allclose(ours[path], wanted, rtol=1e-3, atol=1e-4, err_msg=path)
