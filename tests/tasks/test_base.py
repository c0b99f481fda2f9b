"""Defaults of tasks, and which losses are sums over rows."""

import contextlib
import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import contrastive
from helpers.applies import Given
from helpers.experiments import PATHS, ROOT, smoke

from vit_jax import step
from vit_jax.config import load, objects
from vit_jax.errors import UserError
from vit_jax.ops.terms import Term
from vit_jax.tasks import base
from vit_jax.trainer import build

ROWS = 2


class Mean(base.Task):
    """The mean brightness of images, by the defaults alone."""

    def loss(self, outputs, batch):
        mask = self.mask(batch)
        return {'loss': Term((outputs['mean'] * mask).sum(), mask.sum())}


APPLY = Given(lambda image: {'mean': image.mean((1, 2, 3))})


def test_defaults_evaluate_the_terms_of_the_loss_over_real_rows():
    batch = {'image': jnp.arange(4.0).reshape(4, 1, 1, 1), 'mask': jnp.array([1.0, 1, 0, 1])}
    assert Mean().evaluate(APPLY, batch) == {'loss': (4, 3)}
    del batch['mask']
    assert Mean().evaluate(APPLY, batch) == {'loss': (6, 4)}
    assert Mean().augment(jax.random.key(0), batch) is batch
    assert not Mean().predicts and not Mean().couples_rows and Mean().multiple == 1


def test_a_task_without_a_loss_or_of_another_base_is_refused():
    with pytest.raises(TypeError, match='abstract'):
        base.Task()
    config = load.load(f'{ROOT}/experiments/vit/digits.py:smoke')
    config.task = {'name': 'helpers.not_a_task'}
    with pytest.raises(UserError, match=r'not_a_task.*must .* vit_jax.tasks.base.Task'):
        objects.task_class(config.task.name)


@functools.cache
def first_of_each_task():
    found = {}
    for path in PATHS:
        found.setdefault(smoke(path).task.name, smoke(path))
    return found


@functools.cache
def examples_of(name):
    """The task of an experiment, a few rows of its data, and random outputs for them."""
    config = first_of_each_task()[name]
    training = build.build(config, jax.devices()[:1])
    task = training.program.task
    batch = next(training.data.train_batches())
    batch = {key: x[:ROWS] for key, x in batch.items()}
    shapes, _ = jax.eval_shape(
        functools.partial(step.init_with_output, training.program.model, task, seed=0), batch
    )
    rng = np.random.default_rng(0)
    outputs = jax.tree.map(lambda s: rng.uniform(0.1, 0.9, s.shape).astype(s.dtype), shapes)
    return task, outputs, batch


# In `make test`: losses of each kind. Tests of others compare parts of a batch with the whole.
CHECKED = ('classify', 'distill', 'generate', 'lejepa', 'reconstruct', 'siglip', 'translate')


@pytest.mark.slow
@pytest.mark.parametrize(
    'name',
    [
        pytest.param(name, marks=[pytest.mark.long] * (name not in CHECKED))
        for name in sorted(first_of_each_task())
    ],
)
def test_losses_of_the_package_are_sums_over_rows_or_say_that_they_are_not(name):
    task, outputs, batch = examples_of(name)
    coupled = pytest.raises(AssertionError, match='couples the rows')
    with coupled if task.couples_rows else contextlib.nullcontext():
        base.check_rows_are_separable(task, outputs, batch)


def test_a_loss_that_couples_rows_is_found_out():
    task, batch = contrastive.Task(), contrastive.make_batch()
    outputs = {'z': batch['x'][:, 0], 'near': batch['x'][:, 1], 'scale': jnp.ones(())}
    with pytest.raises(AssertionError, match=r"'pairs'.*couples"):
        base.check_rows_are_separable(task, outputs, batch)


@dataclasses.dataclass(frozen=True)
class MeanOfBatch(Mean):
    """Divides by the rows itself, which microbatches have fewer of."""

    def loss(self, outputs, batch):
        return {'loss': Term(outputs['mean'].mean(), 1)}


def test_a_mean_instead_of_a_sum_is_found_out():
    batch = {'image': np.ones((4, 2, 2, 1), np.float32)}
    with pytest.raises(AssertionError, match=r"'loss'.*couples"):
        base.check_rows_are_separable(MeanOfBatch(), {'mean': np.arange(4.0)}, batch)


def test_objects_name_a_task_that_is_abstract():
    config = load.load(f'{ROOT}/experiments/vit/digits.py:smoke')
    config.task = {'name': 'helpers.abstract_task'}
    with pytest.raises(UserError, match=r'config.task: .*abstract'):
        load.model_and_task(config)
