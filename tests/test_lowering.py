"""Every system's steps keep the form of the state and can be lowered for TPUs, GPUs and CPUs.

The full sizes are built in `test_configs.py`, and the small ones trained in `test_smoke.py`.
"""

from __future__ import annotations

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.experiments import PATHS, ROOT, smoke
from helpers.targets import runs_on
from jax import export
from jax._src.cudnn import fused_attention_stablehlo as cudnn

from vit_jax.config import load
from vit_jax.nn import attention_choice
from vit_jax.nn.attention_choice import Target
from vit_jax.profiling.benchmark import real_rows
from vit_jax.runtime import sharding
from vit_jax.step import bind
from vit_jax.trainer import build

# JAX's platforms, and a kind of device of each.
DEVICES = {'cuda': 'NVIDIA H100 80GB HBM3', 'tpu': 'TPU v5e', 'cpu': 'cpu'}
PALLAS, CUDNN = 'tpu_custom_call', '__cudnn$fmha'
WITHOUT_CUDNN = ('bit_resnet', 'mixer', 'swin', 'coltran', 'coltran_upsampler')
# In `make test`: of each kind of step the cheapest. Others have golden steps beside their tasks.
STEPS = (
    *('vit-classify', 'naflex-classify', 'swin-classify', 'mae-reconstruct', 'jit-generate'),
    *('siglip-siglip', 'detr-detect', 'seq2seq-translate', 'vit-distill'),
)
KERNELS = ('vit-classify', 'naflex-classify', 'jit-generate', 'seq2seq-translate')


def systems():
    """A smoke config for every pair of a model and a task."""
    found = {}
    for path in PATHS:
        config = smoke(path)
        found.setdefault(f'{config.model.name}-{config.task.name}', f'{path}:smoke')
    return [
        pytest.param(spec, id=name, marks=[pytest.mark.long] * (name not in STEPS))
        for name, spec in found.items()
    ]


def optimizers():
    """A small config for every optimizer; `make test` lowers the one with most operations."""
    marks = {'adafactor': (), **dict.fromkeys(('adamw', 'lion', 'sgd'), pytest.mark.long)}
    path = 'experiments/vit/digits.py'
    return [pytest.param(f'{path}:{name}', marks=mark) for name, mark in marks.items()]


def holds(kind, batch):
    """Whether the arrays of a batch are those that were announced for one of its kind."""
    made = {name: (x.shape, x.dtype) for name, x in batch.items()}
    return made == {name: ((kind.rows, *s.shape), s.dtype) for name, s in kind.arrays.items()}


def lower(step, *args):
    """What a step gives, as shapes, after it was lowered."""
    traced = step.trace(*args)
    assert 'stablehlo' in traced.lower(lowering_platforms=('tpu',)).as_text()
    return traced.out_info


@pytest.mark.slow
@pytest.mark.parametrize('spec', [*systems(), *optimizers()])
def test_steps_of_every_system(spec):
    config = load.load(str(ROOT / spec))
    training = build.build(config, jax.devices()[:1])
    program, batch = training.program, next(training.data.train_batches())
    (kind,) = (kind for kind in training.data.shapes if holds(kind, batch))

    state, metrics = lower(program.train_step, program.abstract_state, batch)
    assert jax.tree.structure(state) == jax.tree.structure(program.abstract_state)
    for before, after in zip(*map(jax.tree.leaves, (program.abstract_state, state)), strict=True):
        assert (after.shape, after.dtype) == (before.shape, before.dtype)
    assert metrics['loss'].dtype == jnp.float32
    assert all(m.shape == () for m in metrics.values())

    variables, rows = program.abstract_state.variables, batch | real_rows(kind.rows)

    def outputs(variables, rows):
        return program.task.outputs(bind(program.model, program.task, variables, rows), rows)

    def push(variables, rows):
        params = {'params': variables['params']}
        return jax.jvp(lambda params: outputs(variables | params, rows), (params,), (params,))

    jax.eval_shape(push, variables, rows)  # forward mode
    sums = jax.eval_shape(program.eval_steps.evaluate, variables, rows)  # lowered below
    assert 'loss' in sums
    assert all(part.shape == () for pair in sums.values() for part in pair)
    if any('evaluator' in entry for entry in config.evals.values()):
        lower(program.eval_steps.predict, variables, rows)  # matching, decoding


def exported_systems():
    """Every smoke config, and each system once in bfloat16.

    CLIP is the config of SigLIP with another name. Heads of 4 are too narrow for cuDNN.
    """
    clip = {'name': 'clip', 'eos': 2, 'dtype': 'bfloat16'}
    marks = pytest.mark.long
    cases = [pytest.param('experiments/siglip/scenes.py', clip, marks=marks, id='clip-siglip')]
    seen = set()
    for path in PATHS:
        config = smoke(path)
        names = config.model.name, config.task.name
        if names not in seen:
            fields = {'dtype': 'bfloat16', **({'num_heads': 1} if names[0] == 'seq2seq' else {})}
            name = '-'.join(names)
            marks = [pytest.mark.long] * (name not in KERNELS)
            cases.append(pytest.param(path, fields, marks=marks, id=f'{name}-bfloat16'))
            seen.add(names)
        cases.append(pytest.param(path, {}, marks=pytest.mark.long, id=path))
    return cases


@pytest.mark.slow
@pytest.mark.parametrize(('path', 'model'), exported_systems())
def test_evaluations_take_the_kernels_of_their_platform(monkeypatch, path, model):
    """They are exported for CUDA, TPUs and CPUs without one of them."""
    monkeypatch.setattr(cudnn, 'check_cudnn_version', lambda: 91200)  # there is no cuDNN here
    monkeypatch.setattr(attention_choice, 'FEWEST_KEYS_OF_CUDNN', 2)
    config = load.load(f'{ROOT / path}:smoke')
    with config.model.unlocked():
        config.model.update(model)
    training = build.build(config, jax.devices()[:1])
    kind = training.data.shapes[-1]
    rows = {k: np.zeros((kind.rows, *s.shape), s.dtype) for k, s in kind.spec.items()}
    rows |= real_rows(kind.rows)
    step = training.program.eval_steps.evaluate.__wrapped__.__wrapped__  # for no devices yet
    calls = {}
    for platform, name in DEVICES.items():
        traced = jax.jit(functools.partial(step))
        allowed = export.DisabledSafetyCheck.custom_call(f'{CUDNN}Softmax')
        biased = export.DisabledSafetyCheck.custom_call(f'{CUDNN}ScaleBiasSoftmax')
        make = export.export(traced, platforms=(platform,), disabled_checks=(allowed, biased))
        with runs_on(Target(name)):
            text = make(training.program.abstract_state.variables, rows).mlir_module()
        calls[platform] = ' '.join(re.findall(r'custom_call @"?([\w$.]+)', text))
    assert CUDNN not in calls['tpu'] + calls['cpu']
    assert PALLAS not in calls['cuda'] + calls['cpu']
    takes_kernels = getattr(training.program.model, 'attention', '') != 'xla'
    if model and takes_kernels and config.model.name not in WITHOUT_CUDNN:
        assert CUDNN in calls['cuda']


@pytest.mark.slow
def test_steps_under_pmap(monkeypatch):
    """`strategy=pmap`: what the step of a replica gives is taken off without its devices."""
    monkeypatch.setattr(sharding, 'first_replica', lambda tree: jax.tree.map(lambda x: x[0], tree))
    config = load.load(str(ROOT / 'experiments/vit/digits.py:smoke'), ['parallel.strategy=pmap'])
    training = build.build(config, jax.devices()[:1])
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
