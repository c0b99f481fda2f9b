"""Every system trains alike on one device, on several and in microbatches, at its smoke size."""

from __future__ import annotations

import functools

import jax
import pytest
from helpers.experiments import ROOT, one_of_each_kind

from vit_jax.config import load
from vit_jax.trainer import build

pytestmark = [pytest.mark.slow, pytest.mark.long]  # `test_step_layouts` has a small model in each

STEPS = 2
# name: devices, config.parallel, microbatches
LAYOUTS = {
    'one': (1, {}, 1),
    'jit': (4, {}, 1),
    'fsdp': (4, {'fsdp': 4, 'min_split_size': 64}, 1),
    'pmap': (2, {'strategy': 'pmap'}, 1),
    'accumulation': (1, {}, 2),
    'slices': (4, {'slices': 2}, 1),
}
SEVERAL = [name for name in LAYOUTS if name != 'one']
FSDP = {'fsdp': 8, 'min_split_size': 64}
EIGHT = {
    f'{name} of 8, {microbatches} microbatches': (8, parallel, microbatches)
    for name, parallel in (('jit', {}), ('fsdp', FSDP), ('pmap', {'strategy': 'pmap'}))
    for microbatches in (1, 2, 4)
}
# The gradient of a bias of keys is zero but for rounding, which Adam brings to the size of other
# updates.
ADAM_ON_ROUNDING = 'experiments/translate/multi30k.py'
# Norms of whole batches need one step of one program.
WITHOUT_STATISTICS = {
    'experiments/lejepa/cifar10.py': ('model.projector_norm=layer',),
    'experiments/pmt/scenes.py': ('model.map_norm=none',),
}
SYSTEMS = one_of_each_kind('experiments/vit/digits.py')
# A config and what it is given: losses that couple rows, and images of mixed sizes, for which each
# step draws a length.
SCENES = 'experiments/siglip/scenes.py'
ON_EIGHT = {
    'siglip': (SCENES, ('batch_size=32',)),
    'dinov2': ('experiments/dinov2/cifar10.py', ('batch_size=32',)),
    'siglip2': (
        'experiments/siglip2/scenes.py',
        ('batch_size=32', 'task.start=1', 'step.ema_start=1'),
    ),
    'naflex': ('experiments/vit/digits_naflex.py', ('batch_size=32',)),
    'siglip_naflex': (
        SCENES,
        (
            *('batch_size=32', 'model.name=siglip_naflex', 'model.pos_grid=6'),
            'model.patch_dropout=0.25',
            'data.plan=patches(patch_size=8, lengths=(16, 36))',
        ),
    ),
}


@functools.lru_cache(maxsize=2)  # the tests of a system follow one another
def trained(path: str, name: str, given: tuple[str, ...] = ()) -> list[dict[str, float]]:
    """The metrics of the first steps."""
    devices, parallel, microbatches = {**LAYOUTS, **EIGHT}[name]
    config = load.load(f'{ROOT / path}:smoke', given)
    with config.unlocked():
        config.parallel = {**config.get('parallel', {}), **parallel}
        config.step = {**config.get('step', {}), 'accum_steps': microbatches}
        # In bfloat16 each device rounds its part of a gradient before the parts are added up: norms
        # of updates would agree to 1e-4.
        config.model.dtype = 'float32'
    training = build.build(config, jax.devices()[:devices])
    program, batches, metrics = training.program, training.data.train_batches(), []
    state = program.layout.create(program.init)
    for _ in range(STEPS):
        state, found = program.train_step(state, program.layout.put_batch(next(batches)))
        metrics.append({key: float(value) for key, value in found.items()})
    return metrics


@pytest.mark.parametrize(
    ('path', 'name'),
    [(path, name) for path in SYSTEMS for name in SEVERAL],
)
def test_a_system_trains_alike_in_every_layout(path, name):
    whole = name in ('jit', 'fsdp')
    given = () if whole else WITHOUT_STATISTICS.get(path, ())
    for step, expected in zip(trained(path, name, given), trained(path, 'one', given), strict=True):
        if path == ADAM_ON_ROUNDING:
            assert step['update_norm'] == pytest.approx(expected['update_norm'], rel=1e-3)
            expected = expected | {'update_norm': step['update_norm']}
        assert step == pytest.approx(expected, rel=1e-5, abs=1e-6)


@pytest.mark.parametrize('name', EIGHT)
@pytest.mark.parametrize('system', ON_EIGHT)
def test_one_device_and_eight_train_alike(system, name):
    path, given = ON_EIGHT[system]
    for step, expected in zip(trained(path, name, given), trained(path, 'one', given), strict=True):
        assert step == pytest.approx(expected, rel=1e-5, abs=1e-6)
