"""A task sees the number of the step, and so has schedules of its own."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import linear

from vit_jax.config.run import Parallel, Step
from vit_jax.ops.terms import Term
from vit_jax.runtime import sharding
from vit_jax.step import init_state, init_variables, make_eval_step, make_train_step
from vit_jax.tasks import classify

pytestmark = pytest.mark.slow

MODEL, TX, ROWS = linear.Model(num_classes=3), optax.sgd(0.1), 16
LAYOUTS = {'one': {}, 'jit': {}, 'pmap': {'strategy': 'pmap'}}


@dataclasses.dataclass(frozen=True)
class Scheduled(classify.Task):
    """A loss whose weight rises for four steps."""

    def outputs(self, apply, batch):
        weight = optax.linear_schedule(0.0, 2.0, 4)(apply.step)
        return {**super().outputs(apply, batch), 'weight': weight, 'step': apply.step}

    def loss(self, outputs, batch):
        plain, count = super().loss(outputs, batch)['loss'], self.mask(batch).sum()
        return {
            'loss': Term(outputs['weight'] * plain.sum, plain.count),
            'plain': Term(plain.sum, plain.count, 0.0),
            'step': Term(outputs['step'] * count, count, 0.0),
        }

    evaluate = classify.base.Task.evaluate


class Coupled(Scheduled):
    """The same loss, computed for all rows at once."""

    couples_rows = True


def make_batch(k):
    rng = np.random.default_rng(k)
    image = rng.integers(0, 256, (ROWS, 4, 4, 3), np.uint8)
    return {'image': image, 'label': rng.integers(0, 3, ROWS).astype(np.int32)}


def init():
    one = jax.tree.map(lambda x: jnp.asarray(x[:1]), make_batch(0))
    variables = init_variables(MODEL, Scheduled(), one, seed=0)
    return init_state(variables, TX, seed=0, ema=False)


def compiled(task, name, accum_steps):
    """The layout, and the train step compiled for it."""
    devices = jax.devices()[: 1 if name == 'one' else 4]
    layout = sharding.make_layout(devices, Parallel(**LAYOUTS[name]))
    step = make_train_step(MODEL, task, TX, Step(accum_steps=accum_steps), layout)
    return layout, layout.compile_train(step, jax.eval_shape(init))


@pytest.mark.parametrize(
    ('name', 'accum_steps', 'task'),
    [
        ('pmap', 2, Coupled()),
        *(
            pytest.param(*case, marks=pytest.mark.long)
            for case in (
                ('one', 1, Scheduled()),
                ('one', 1, Coupled()),
                ('pmap', 2, Scheduled()),
                ('jit', 2, Scheduled()),
                ('jit', 2, Coupled()),
            )
        ),
    ],
)
def test_every_layout_and_microbatch_sees_the_step_of_the_state(task, name, accum_steps):
    layout, step = compiled(task, name, accum_steps)
    state = layout.create(init)
    for k in range(6):
        if k == 3:  # stopped and resumed
            state = layout.from_global(jax.device_put(jax.device_get(layout.to_global(state))))
        state, metrics = step(state, layout.put_batch(make_batch(k)))
        assert float(metrics['step']) == k
        weight = 2 * min(k / 4, 1)
        assert float(metrics['loss']) == pytest.approx(weight * float(metrics['plain']), rel=1e-6)
        assert (float(metrics['grad_norm']) > 0) == (k > 0)


def test_evaluation_is_after_training():
    sums = jax.jit(make_eval_step(MODEL, Scheduled()))(init().variables, make_batch(0))
    means = {name: float(total / count) for name, (total, count) in sums.items()}
    assert means['loss'] == pytest.approx(2 * means['plain'])
