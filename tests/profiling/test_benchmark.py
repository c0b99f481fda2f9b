"""Timing: what is timed, how it is counted, and where it runs."""

import argparse
import dataclasses
import importlib.util
import json
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import linear, toys
from helpers.sections import optimizer

from vit_jax.config.run import Parallel
from vit_jax.models import vit
from vit_jax.profiling import benchmark, flops, task_flops
from vit_jax.runtime import sharding
from vit_jax.tasks import classify

SPEC = benchmark.image_spec(16)


def model():
    return linear.Model(num_classes=3)


def sgd(params):
    return optimizer(params, 1, name='sgd', lr=0.1)[0]


def test_every_call_is_timed():
    seconds = iter([0.5] + 99 * [0.02])

    def call():
        time.sleep(next(seconds))
        return jnp.zeros(())

    first, *rest = benchmark.time_calls(call, steps=5)
    assert first >= 0.5
    assert len(rest) == 5
    assert 0.02 <= np.median(rest) < 0.25


@pytest.mark.slow
@pytest.mark.parametrize('strategy', ['jit', 'pmap'])
def test_both_steps_are_timed(strategy):
    layout = sharding.make_layout(jax.devices()[:2], Parallel(strategy=strategy))
    sizes = {'batch_size': 16, 'steps': 4}
    forward = benchmark.time_forward(model(), classify.Task(), layout, SPEC, **sizes)
    train = benchmark.time_train(model(), classify.Task(), sgd, layout, SPEC, **sizes)
    for timing in (forward, train):
        assert 0 < timing.step_sec_p10 <= timing.step_sec <= timing.step_sec_p90
        assert timing.images_per_sec == pytest.approx(16 / timing.step_sec)
        assert timing.mfu is None  # the peak of a CPU is not known
        assert timing.compile_sec > 0
    per_image = flops.forward_flops(model(), jnp.zeros((1, 16, 16, 3)))
    assert forward.flops_per_sec * forward.step_sec == pytest.approx(16 * per_image)
    assert train.flops_per_sec * train.step_sec == pytest.approx(3 * 16 * per_image)


def test_mfu_where_the_peak_is_known(monkeypatch):
    monkeypatch.setitem(flops.PEAK_FLOPS, 'cpu', 1e9)
    layout = sharding.make_layout(devices=jax.devices()[:2])
    timing = benchmark.time_forward(model(), classify.Task(), layout, SPEC, batch_size=8, steps=3)
    assert timing.mfu == pytest.approx(timing.flops_per_sec / 2e9)


def test_synthetic_batches():
    spec = SPEC | {
        'boxes': jax.ShapeDtypeStruct((5, 4), np.float32),
        'there': jax.ShapeDtypeStruct((5,), bool),
        'tokens': jax.ShapeDtypeStruct((7,), np.int32),
        'mask': jax.ShapeDtypeStruct((), np.float32),
    }
    batch = benchmark.synthetic_batch(spec, 8, seed=1)
    assert {k: (v.shape, v.dtype) for k, v in batch.items()} == {
        'image': ((8, 16, 16, 3), np.uint8),
        'label': ((8,), np.int32),
        'boxes': ((8, 5, 4), np.float32),
        'there': ((8, 5), np.bool_),
        'tokens': ((8, 7), np.int32),
        'mask': ((8,), np.float32),
    }
    assert (batch['image'].min(), batch['image'].max()) == (0, 255)
    assert 0 <= batch['boxes'].min() < 0.1 and 0.9 < batch['boxes'].max() < 1
    assert not batch['label'].any()
    assert all(batch[name].all() for name in ('there', 'tokens', 'mask'))
    again = benchmark.synthetic_batch(spec, 8, seed=1)
    np.testing.assert_array_equal(batch['image'], again['image'])


@pytest.mark.slow
def test_a_model_that_draws_in_evaluation_and_has_boxes_is_measured():
    layout = sharding.make_layout(devices=jax.devices()[:1])
    spec = {
        'x': jax.ShapeDtypeStruct((toys.BOXES, toys.WIDTH), np.float32),
        'there': jax.ShapeDtypeStruct((toys.BOXES,), bool),
    }
    sizes = {'batch_size': 4, 'steps': 2}
    forward = benchmark.time_forward(toys.Model(), toys.Task(), layout, spec, **sizes)
    train = benchmark.time_train(
        toys.Model(), toys.Task(), lambda _: optax.sgd(0.1), layout, spec, **sizes
    )
    products = 2 * toys.BOXES * 8 * (toys.WIDTH + 2)
    assert task_flops.evaluation_flops(toys.Model(), toys.Task(), spec) == products
    assert forward.flops_per_sec * forward.step_sec == pytest.approx(4 * products)
    assert train.flops_per_sec * train.step_sec == pytest.approx(12 * products)


BLOCKER = """
import sys


class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.split('.')[0] in {blocked!r}:
            raise ImportError(f'{{name}} is blocked')


sys.meta_path.insert(0, Blocker())
"""
BLOCKED = ('ml_collections', 'grain', 'tensorflow_datasets', 'orbax', 'matplotlib', 'tensorboard')


@pytest.fixture(scope='module')
def gpu(repo):
    """The script for accelerators as a module."""
    path = repo / 'tests' / 'bench' / 'gpu.py'
    spec = importlib.util.spec_from_file_location('bench_gpu', path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


SIZES = ['--image-size', '32', '--batch-size', '8', '--steps', '2']


@pytest.mark.slow
@pytest.mark.long
def test_the_script_for_accelerators_needs_no_data_stack(gpu, tmp_path, monkeypatch):
    (tmp_path / 'sitecustomize.py').write_text(BLOCKER.format(blocked=BLOCKED))
    monkeypatch.setenv('PYTHONPATH', str(tmp_path))
    monkeypatch.setattr(sys, 'argv', ['gpu.py', *SIZES])
    result = gpu.measure_apart('jax', 'mu/16', 'train')
    assert (result['library'], result['step'], result['batch_size']) == ('jax', 'train', 8)
    assert result['images_per_sec'] * result['step_sec'] == pytest.approx(8)


@pytest.mark.slow
@pytest.mark.parametrize(('step', 'factor'), [('forward', 1), ('train', 3)])
def test_the_script_for_accelerators_measures_torch(gpu, step, factor, monkeypatch):
    pytest.importorskip('torch')
    pytest.importorskip('transformers')
    args = argparse.Namespace(image_size=32, batch_size=2, steps=2, eager=True)
    monkeypatch.setenv('JAX_PLATFORMS', 'cpu')
    result = gpu.measure_torch('mu/16', step, args)
    assert 'torch' in result['implementation']
    image = jnp.zeros((1, 32, 32, 3))
    per_image = flops.forward_flops(vit.Model(num_classes=1000, **vit.variant('mu/16')), image)
    total = result['flops_per_sec'] * result['step_sec']
    assert total == pytest.approx(2 * factor * per_image)


def test_the_script_for_accelerators_prints_failures_too(gpu, tmp_path, monkeypatch, capsys):
    def measure(library, model, step):
        about = {'library': library, 'model': model, 'step': step}
        if library == 'torch':
            return about | {'error': 'out of memory'}
        timing = benchmark.Timing(8, 9.0, 0.5, 0.4, 0.6, 16.0, 1e12, 0.25, 2**31)
        return about | dataclasses.asdict(timing) | {'implementation': 'x', 'device_kind': 'H'}

    out = tmp_path / 'out.json'
    monkeypatch.setattr(gpu, 'measure_apart', measure)
    monkeypatch.setattr(
        sys, 'argv', ['gpu.py', '--parts', 'vits', '--models', 'B/16', '--json', str(out)]
    )
    gpu.main()
    _, _, jax_forward, torch_forward, *_ = capsys.readouterr().out.splitlines()
    assert jax_forward == (
        '| B/16 | forward | jax (x) | H | 500.00 | 400.00-600.00 | 16 | 25.0% | 2.0 | 9 |'
    )
    assert 'out of memory' in torch_forward
    assert torch_forward.count('|') == jax_forward.count('|')
    assert len(json.loads(out.read_text())['vits']) == 4
