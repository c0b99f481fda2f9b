"""Every system's steps keep the form of the state and can be lowered for TPUs.

The full sizes are built in `test_configs.py`, and the small ones trained in `test_smoke.py`.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.experiments import PATHS, ROOT

from vit_jax.config import load as config_lib
from vit_jax.profiling.benchmark import real_rows
from vit_jax.runtime import sharding
from vit_jax.trainer import build as build_lib

DEAR = ('coltran', 'coltran_upsampler', 'colorizer', 'detr_panoptic', 'hybrid', 'lstm')


def systems():
    """A smoke config for every pair of a model and a task; most of `DEAR` is in others, too."""
    found = {}
    for path in PATHS:
        config = config_lib.load(f'{ROOT / path}:smoke')
        found.setdefault((config.model.name, config.task.name), f'{path}:smoke')
    return [
        pytest.param(spec, id='-'.join(names), marks=[pytest.mark.long] * (names[0] in DEAR))
        for names, spec in found.items()
    ]


def optimizers():
    """A small config for every optimizer; `make test` lowers the one with most operations."""
    marks = {'adafactor': (), **dict.fromkeys(('adamw', 'lion', 'sgd'), pytest.mark.long)}
    path = 'experiments/vit/digits.py'
    return [pytest.param(f'{path}:{name}', marks=mark) for name, mark in marks.items()]


def lower(step, *args):
    """What a step gives, as shapes, after it was lowered."""
    traced = step.trace(*args)
    assert 'stablehlo' in traced.lower(lowering_platforms=('tpu',)).as_text()
    return traced.out_info


@pytest.mark.slow
@pytest.mark.parametrize('spec', [*systems(), *optimizers()])
def test_steps_of_every_system(spec):
    config = config_lib.load(str(ROOT / spec))
    training = build_lib.build(config, jax.devices()[:1])
    program, kind = training.program, training.data.shapes[-1]
    batch = {k: np.zeros((kind.rows, *s.shape), s.dtype) for k, s in kind.spec.items()}

    state, metrics = lower(program.train_step, program.abstract_state, batch)
    assert jax.tree.structure(state) == jax.tree.structure(program.abstract_state)
    for before, after in zip(*map(jax.tree.leaves, (program.abstract_state, state)), strict=True):
        assert (after.shape, after.dtype) == (before.shape, before.dtype)
    assert metrics['loss'].dtype == jnp.float32
    assert all(m.shape == () for m in metrics.values())

    variables, rows = program.abstract_state.variables, batch | real_rows(kind.rows)
    sums = lower(program.eval_steps.evaluate, variables, rows)
    assert 'loss' in sums
    assert all(part.shape == () for pair in sums.values() for part in pair)
    if any('evaluator' in entry for entry in config.evals.values()):
        lower(program.eval_steps.predict, variables, rows)  # matching, decoding


@pytest.mark.slow
def test_steps_under_pmap(monkeypatch):
    """`strategy=pmap`: what the step of a replica gives is taken off without its devices."""
    monkeypatch.setattr(sharding, 'first_replica', lambda tree: jax.tree.map(lambda x: x[0], tree))
    config = config_lib.load(str(ROOT / 'experiments/vit/digits.py:smoke'))
    config.parallel.strategy = 'pmap'
    training = build_lib.build(config, jax.devices()[:1])
    program, kind = training.program, training.data.shapes[-1]
    spec = {k: jax.ShapeDtypeStruct((kind.rows, *s.shape), s.dtype) for k, s in kind.spec.items()}
    state, variables, batch, rows = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct((1, *x.shape), x.dtype),
        (program.abstract_state, program.abstract_state.variables, spec, real_rows(kind.rows)),
    )
    after, metrics = lower(jax.jit(program.train_step), state, batch)
    assert jax.tree.map(lambda x: x.shape, after) == jax.tree.map(lambda x: x.shape, state)
    assert metrics['loss'].shape == ()
    sums = lower(jax.jit(program.eval_steps.evaluate), variables, batch | rows)
    assert all(part.shape == () for pair in sums.values() for part in pair)
