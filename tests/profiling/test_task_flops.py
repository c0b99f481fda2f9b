"""FLOPs of all that a task asks of its model, and who reports them."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import linear
from helpers.experiments import ROOT
from helpers.self_distillation.models import dino as models
from helpers.self_distillation.tasks import dino
from helpers.two_towers import model as towers
from helpers.two_towers.tasks import captions

from vit_jax.commands import inspect
from vit_jax.config import load
from vit_jax.profiling import benchmark, cost, flops, task_flops
from vit_jax.tasks import classify
from vit_jax.trainer import build, start

SPEC = benchmark.image_spec(8)
MODEL = linear.Model(num_classes=5)
FORWARD = 2 * 8 * 8 * 3 * 5


@dataclasses.dataclass(frozen=True)
class Views(classify.Task):
    """Sees an image several times, and has a teacher for some of them."""

    learning: int = 1
    averaged: int = 0

    def outputs(self, apply, batch):
        assert apply.train
        views = self.inputs(batch)
        seen = [apply(*views)['logits'] for _ in range(self.learning)]
        taught = [apply.average(*views)['logits'] for _ in range(self.averaged)]
        return {'logits': sum(seen) @ jnp.eye(5) - sum(taught)}  # what is not the model is free


def test_one_call_is_the_model():
    counted = task_flops.training_flops(MODEL, classify.Task(), SPEC)
    assert counted == (FORWARD, 0)
    assert (counted.forward, counted.total) == (FORWARD, 3 * FORWARD)
    assert task_flops.evaluation_flops(MODEL, classify.Task(), SPEC) == FORWARD


@pytest.mark.parametrize(('learning', 'averaged'), [(1, 0), (2, 0), (1, 1), (3, 2)])
def test_every_call_counts_and_one_of_the_average_has_no_backward_pass(learning, averaged):
    counted = task_flops.training_flops(MODEL, Views(learning=learning, averaged=averaged), SPEC)
    assert counted.forward == (learning + averaged) * FORWARD
    assert counted.total == (3 * learning + averaged) * FORWARD


def spec(shape, dtype=np.uint8):
    return jax.ShapeDtypeStruct(shape, dtype)


def test_two_towers_cost_what_each_does():
    model = towers.Model(vocab_size=24)
    example = {
        'image': spec((16, 16, 3)),
        'caption': spec((7,), np.int32),
        'caption_mask': spec((7,), bool),
    }

    class Texts(captions.Task):
        def outputs(self, apply, batch):
            _, *texts = self.inputs(batch)
            return apply(*texts, method='embed_text', train=apply.train)

    image, text = (
        task_flops.training_flops(model, task, fields).learning
        for task, fields in ((captions.Task(), {'image': example['image']}), (Texts(), example))
    )
    assert image > text > 0
    assert task_flops.training_flops(model, captions.Task(), example) == (image + text, 0)


def test_a_student_learns_from_all_views_and_its_average_sees_the_global_ones():
    model = models.Model(8, patch_size=2, width=8, depth=1, num_heads=2, hidden=8, bottleneck=4)
    example = {'image': spec((2, 8, 8, 1)), 'local_image': spec((3, 4, 4, 1))}
    counted = task_flops.training_flops(model, dino.Task(), example)
    whole, part = (
        flops.forward_flops(model, spec((1, side, side, 1), np.float32), rngs=dino.Task.rngs)
        for side in (8, 4)
    )
    assert counted == (2 * whole + 3 * part, 2 * whole)


@pytest.mark.slow
def test_a_run_and_its_price_count_the_task(monkeypatch):
    monkeypatch.setitem(flops.PEAK_FLOPS, 'cpu', 1e12)
    home = ROOT / 'tests' / 'helpers' / 'self_distillation'
    training = build.build(load.load(f'{home}/experiments/digits.py:smoke'), jax.devices()[:1])
    model, task = training.program.model, training.program.task
    counted = task_flops.training_flops(model, task, training.data.spec)
    step = 16 * counted.total
    assert start.utilization(training) == pytest.approx(step / 1e12)
    assert cost.price(training.config).flops == pytest.approx(12 * step)
    subject = inspect.InspectedModel(training.config, {'params': {}}, training.data.spec, '')
    shown = {'forward': counted.forward, 'train': counted.total}
    assert inspect.make_report(subject)['flops'] == shown
    meta = {'config': training.config.to_dict(), **training.data.facts()}
    assert cost.train_flops(meta, ['helpers']) == pytest.approx(step)
