"""Recipes with published numbers: what stands in their configs, against what was published."""

from __future__ import annotations

import functools
import pathlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.sections import schedule

from vit_jax.config import load as config_lib
from vit_jax.errors import UserError
from vit_jax.interop.trained import fields
from vit_jax.models import bit_resnet, vit
from vit_jax.nn import options
from vit_jax.step import init_variables
from vit_jax.tasks import classify
from vit_jax.tree_paths import param_paths

EXPERIMENTS = pathlib.Path(__file__).resolve().parents[1] / 'experiments'


def load(spec, *overrides):
    return config_lib.load(str(EXPERIMENTS / spec), overrides)


@pytest.mark.parametrize(
    ('spec', 'classes', 'bias', 'expected'),
    [
        ('vit/augreg.py:S/32', 1000, -6.9, 7.9),
        ('vit/augreg.py:i21k,S/32', 21_843, -10.0, 11.0),
        ('scaling/vit_compute.py:vit', 21_843, -10.0, 11.0),
        ('scaling/vit_compute.py:bit', 21_843, -10.0, 11.0),
        ('scaling/vit_data_size.py:vit', 21_843, -10.0, 11.0),
        ('scaling/vit_data_size.py:bit', 21_843, -10.0, 11.0),
        ('scaling/zhai.py', 21_843, -10.0, 11.0),
    ],
)
def test_the_first_loss_of_sigmoid_pre_training(spec, classes, bias, expected):
    """Kernels of heads are zero: every logit is the bias. A bias of 0 gives 15,140 nats."""
    config = load(spec)
    model, task = config_lib.model_and_task(config)
    assert fields(model)['head_bias'] == bias
    target = jax.nn.one_hot(jnp.array([3]), classes)
    loss = float(classify.LOSSES[task.loss_name](jnp.full((1, classes), bias), target)[0])
    by_hand = np.log1p(np.exp(-bias)) + (classes - 1) * np.log1p(np.exp(bias))
    assert loss == pytest.approx(by_hand, rel=1e-5)
    assert loss == pytest.approx(expected, abs=0.1)


@pytest.mark.slow
def test_heads_start_at_their_bias():
    image = jnp.zeros((1, 32, 32, 3))
    model = bit_resnet.Model(5, layers=(1,), head_bias=-10.0)
    shapes = jax.eval_shape(model.init, jax.random.key(0), image)
    assert shapes['params']['head']['bias'].shape == (5,)
    logits = jax.jit(lambda key: model.init_with_output(key, image)[0])(jax.random.key(0))['logits']
    np.testing.assert_array_equal(logits, -10.0)


def test_positions_start_with_the_deviation_that_is_asked_for():
    image = jnp.zeros((1, 64, 64, 3))
    for std in (0.02, 64**-0.5):
        model = vit.Model(patch_size=4, width=64, depth=0, num_heads=2, posemb_std=std)
        table = jax.jit(model.init)(jax.random.key(0), image)['params']['pos_embed']
        assert float(table.std()) == pytest.approx(std, rel=0.03)


@pytest.mark.parametrize(
    ('spec', 'mixup', 'randaugment'),
    [
        ('Ti/16', 0.0, '2, 0,'),
        ('S/32', 0.2, '2, 15,'),
        ('S/16', 0.5, '2, 15,'),
        ('B/16', 0.5, '2, 15,'),
        ('i21k,Ti/16', 0.0, None),
        ('i21k,S/32', 0.0, None),
        ('i21k,S/16', 0.0, '2, 0,'),
        ('i21k,B/16', 0.2, '2, 10,'),
        ('i21k,L/16', 0.5, '2, 15,'),
        ('S/16,strong2', 0.8, '2, 20,'),
    ],
)
def test_levels_of_augreg(spec, mixup, randaugment):
    config = load(f'vit/augreg.py:{spec}')
    assert config.task.mixup == mixup
    assert ('randaugment' in config.data.transforms) == (randaugment is not None)
    assert (randaugment or '') in config.data.transforms


@pytest.mark.parametrize(
    'spec',
    [
        'vit/imagenet2012.py:S/16',
        'vit/imagenet2012.py:vit5',
        'vit/augreg.py:i21k,B/16',
        'vit/imagenet2012_paper.py:B/32',
        'vit/imagenet21k.py:L/16',
        'vit/finetune.py:cifar10,R50+B/16',
        'vit/finetune.py:pets,B/32,transfer',
        'scaling/zhai.py:',
        'scaling/vit_compute.py:hybrid',
        'scaling/vit_data_size.py:vit',
        'mae/imagenet.py:B/16',
        'mae/imagenet.py:B/16,finetune',
        'mae/imagenet.py:B/16,probe',
        'swin/imagenet.py:T',
        'swin/imagenet.py:B,22k,384',
    ],
)
def test_the_residual_stream_is_in_float32_unless_it_is_to_be_fast(spec):
    model = load(spec.removesuffix(':')).model
    assert (model.dtype, model.block.residual_dtype) == ('bfloat16', 'float32')
    fast = load(f'{spec}{"" if spec.endswith(":") else ","}fast').model
    assert fast.get('block', {}).get('residual_dtype') is None
    flat, fast_flat = (options.flat_fields(m.to_dict()) for m in (model, fast))
    assert {**flat, 'residual_dtype': None} == {**fast_flat, 'residual_dtype': None}


def test_vit5_is_the_published_model():
    config = load('vit/imagenet2012.py:vit5')
    fields = {**config.model, 'num_classes': 1000}
    del fields['name']
    image = jnp.zeros((1, 224, 224, 3))
    params = jax.eval_shape(vit.Model(**fields).init, jax.random.key(0), image)['params']
    # The authors' has no position of the class token.
    assert sum(leaf.size for leaf in jax.tree.leaves(params)) == 22_039_144 + 384
    assert (config.total, config.batch_size, config.optim.name) == ('800 epochs', 2048, 'lamb')
    assert load('vit/imagenet2012.py:vit5,L/16').total == '400 epochs'
    assert load('vit/imagenet2012.py:vit5,S/16,100ep').total == '100 epochs'
    with pytest.raises(UserError, match="unknown variant 'H/14'"):
        load('vit/imagenet2012.py:vit5,H/14')


def test_a_size_without_a_level_asks_for_one():
    with pytest.raises(UserError, match=r'published.*M/16'):
        load('vit/augreg.py:M/16')


@pytest.mark.parametrize(
    ('name', 'dropout'),
    [('B/16', 0.0), ('L/32', 0.0), ('L/16', 0.1), ('H/14', 0.1), ('R50+B/16', 0.1)],
)
def test_dropout_of_fine_tuning(name, dropout):
    assert load(f'vit/finetune.py:cifar10,{name}').model.dropout == dropout


def test_transfer_is_that_of_big_vision():
    pets, small = (load(f'vit/finetune.py:{name},B/32,transfer') for name in ('pets', 'cifar10'))
    assert pets.data.transforms == 'inception_crop_tf(384)|flip'
    assert small.data.transforms == 'resize_small_tf(448)|random_crop(384)|flip'
    assert pets.evals.test.transforms == 'resize_small_tf(448)|central_crop(384)'
    assert (pets.optim.lr, pets.optim.schedule.warmup) == (0.003, '100 steps')


def hyper_rule(step, images):
    """Published: a tenth once the step, counted from 0, is past a boundary."""
    supports = [100, 200, 300, 400, 500] if images < 20_000 else [500, 3000, 6000, 9000, 10_000]
    if step < supports[0]:
        return 0.003 * step / supports[0]
    return 0.003 * 0.1 ** sum(s < step for s in supports[1:])


@pytest.mark.parametrize(('dataset', 'images'), [('cifar10', 50_000), ('pets', 3_680)])
def test_stairs_of_the_hyper_rule(dataset, images):
    config = load(f'bit/finetune.py:{dataset}')
    total, spec = int(config.total.split()[0]), config.optim.schedule
    boundaries = tuple(int(text.split()[0]) for text in spec.boundaries)
    rate = schedule(
        0.003, total, name='stair', warmup=int(spec.warmup.split()[0]), boundaries=boundaries
    )
    marks = [b + d for b in boundaries for d in (-2, -1, 0)]
    for step in [*np.linspace(0, total - 1, 20, dtype=int), *marks]:
        assert float(rate(step)) == pytest.approx(hyper_rule(step, images), rel=1e-5)


def test_the_rate_of_the_transformer_is_equation_three():
    config = load('translate/wmt14.py')
    spec, d = config.optim.schedule, config.model.width
    rate = schedule(
        config.optim.lr,
        100_000,
        name=spec.name,
        warmup=int(spec.warmup.split()[0]),
        timescale=int(spec.timescale.split()[0]),
        init=spec.init,
    )
    for update in [0, 1, 3998, 3999, 4000, *np.linspace(5, 99_999, 15, dtype=int)]:
        t = int(update) + 1
        paper = d**-0.5 * min(t**-0.5, t * 4000**-1.5)
        assert float(rate(update)) == pytest.approx(paper, rel=1e-5)


def test_the_parameters_of_dinov2_that_decay():
    """All but biases, norms and layer scales, as in its authors' `param_groups.py`."""
    config = load('dinov2/imagenet.py:mu/16', 'model.registers=4')
    model, task = config_lib.model_and_task(config)
    spec = {'image': (1, 2, 224, 224, 3), 'local_image': (1, 1, 96, 96, 3)}
    batch = {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in spec.items()}
    init = functools.partial(init_variables, model, task, seed=0)
    params = jax.eval_shape(init, batch)['params']
    decaying = {path for path in param_paths(params) if re.search(config.optim.decay_mask, path)}
    kept = {path for path in param_paths(params) if re.search(r'bias$|norm|layer_scale', path)}
    assert decaying == set(param_paths(params)) - kept
    assert {'register_tokens', 'mask_token', 'pos_embed'} < decaying


def test_the_schedules_of_dinov2():
    """Its authors' `CosineScheduler`: a linear warm-up, then half a cosine over the rest."""
    config = load('dinov2/imagenet.py:L/16')
    total, optim = 125_000, config.optim
    assert config.total == f'{total:_} steps'
    steps = lambda text: round(float(text.rstrip('%')) / 100 * total)  # noqa: E731
    cases = (
        (optim.schedule, 0.004 * (2048 / 1024) ** 0.5, 1e-6, 12_500),
        (optim.decay_schedule, 0.04, 0.4, 0),
        (config.step.ema_schedule, 0.992, 1.0, 0),
    )
    peaks = optim.lr, optim.weight_decay, config.step.ema_decay
    for (spec, base, final, warmup), peak in zip(cases, peaks, strict=True):
        rate = schedule(peak, total, **spec)
        for step in np.linspace(warmup, total - 1, 20, dtype=int):
            share = np.pi * (step - warmup) / (total - warmup)
            expected = final + 0.5 * (base - final) * (1 + np.cos(share))
            assert float(rate(step)) == pytest.approx(expected, rel=1e-3)
        if warmup:
            assert float(rate(warmup // 2)) == pytest.approx(base / 2, rel=1e-3)
    assert config.task.warmup == 30 * 1250
    assert steps(dict(optim.lr_delays)['/prototypes/']) == 1250


@pytest.mark.parametrize(
    'spec',
    [
        *(f'eomt/{name}.py' for name in ('ade20k', 'cityscapes', 'coco_panoptic', 'finetune')),
        *('eomt/scenes_vit_s14.py', 'pmt/coco_panoptic.py', 'pmt/scenes.py'),
    ],
)
def test_the_parts_taken_from_a_vit_are_those_of_the_model(spec):
    """A checkpoint without one of the selected parts is refused."""
    config = load(spec)
    model, _ = config_lib.model_and_task(config)
    assert sorted(config.init.select.split(',')) == sorted(model.transferable()[1])
