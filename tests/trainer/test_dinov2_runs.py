"""Runs of DINOv2: mistakes in one line, one's own images, exact resume, a ViT that starts there."""

import dataclasses

import jax
import numpy as np
import pytest
from helpers.experiments import ROOT
from helpers.runs import digest, metrics
from PIL import Image

import vit_jax
from vit_jax.config import load
from vit_jax.errors import UserError
from vit_jax.interop.trained import TrainedModel
from vit_jax.models.dinov2 import ENCODER, SAME
from vit_jax.trainer import build, start
from vit_jax.trainer.loop import Preempted

SMOKE = f'{ROOT}/experiments/dinov2/cifar10.py:smoke'
GLOBAL = "views('image', 2, 'inception_crop(8)')"


@pytest.mark.slow
@pytest.mark.parametrize(
    ('override', 'message'),
    [
        ('batch_size=1', r'config.batch_size=1: .* dinov2'),
        ('data.transforms=flip', 'config.data.transforms: .*global crops'),
        (
            f"data.transforms={GLOBAL}|views('local_image', 2, 'inception_crop(4)')",
            'config.data.transforms: .*local_image',
        ),
        (
            f"data.transforms=views('local_image', 2, 'random_crop(12)')|{GLOBAL}",
            r'random_crop\(12\): .* 8 x 8',
        ),
        (
            f"data.transforms=views('local_image', 2, 'inception_crop(3)')|{GLOBAL}",
            r'images are 3 x 3: .* patch_size 2',
        ),
    ],
)
def test_mistakes_are_found_before_anything_is_written(override, message):
    with pytest.raises(UserError, match=message) as caught:
        build.build(load.load(SMOKE, [override]), jax.devices()[:1])
    assert '\n' not in str(caught.value)


@pytest.mark.long
@pytest.mark.process
def test_images_of_ones_own_need_no_labels(tmp_path):
    rng = np.random.default_rng(0)
    (tmp_path / 'photos' / 'all').mkdir(parents=True)
    for i in range(400):
        pixels = rng.integers(0, 256, (40, 30 + i % 20, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(tmp_path / 'photos' / 'all' / f'{i}.png')
    sizes = {'width': 16, 'depth': 1, 'mlp_dim': 32, 'num_heads': 2, 'prototypes': 16}
    sizes |= {'hidden': 16, 'bottleneck': 8, 'patch_size': 14}
    overrides = [
        *(f'model.{key}={value}' for key, value in sizes.items()),
        *('batch_size=8', 'total=2 steps', f'data.source=folder:{tmp_path}/photos'),
    ]
    config = load.load(f'{ROOT}/experiments/dinov2/imagenet.py:S/14,own', overrides)
    found = vit_jax.train(config, tmp_path / 'run')
    assert found.keys() == {'minival/loss', 'minival/entropy'}
    assert 'train/koleo' in metrics(tmp_path / 'run')[-2]


@pytest.mark.long
@pytest.mark.process
def test_a_run_resumes_exactly_and_a_vit_starts_from_it(tmp_path):
    whole, resumed = tmp_path / 'whole', tmp_path / 'resumed'
    vit_jax.train(SMOKE, whole)
    with pytest.raises(Preempted):
        vit_jax.train(SMOKE, resumed, stop_at=7)
    vit_jax.train(SMOKE, resumed)
    assert digest(resumed) == digest(whole)
    encoder = {'patch_size': 2, 'width': 16, 'depth': 1, 'mlp_dim': 32, 'num_heads': 2}
    overrides = [
        *(f'model.{key}={value}' for key, value in encoder.items()),
        *(f'init.from={whole}', 'total=1 steps'),
    ]
    config = load.load(f'{ROOT}/experiments/mae/cifar10.py:smoke-finetune', overrides)
    assert vit_jax.train(config, tmp_path / 'classifier')
    note = (tmp_path / 'classifier').joinpath('config.json').read_text()
    assert str(whole) in note


OWN = f'{ROOT}/experiments/dinov2/own.py:smoke'
ANCHOR = f'{ROOT}/experiments/distill/smoke_teacher.npz'
LARGER = (
    "views('local_image', 2, 'inception_crop(4)')|views('large_image', 2, 'inception_crop(16)')|"
    "views('image', 2, 'resize(8)', of='large_image')"
)
GRAM = ('task.gram=2.0', f'task.gram_teacher={ANCHOR}', 'task.gram_size=16')
ANCHORED = (*GRAM, f'data.transforms={LARGER}', 'total=4 steps', 'every.checkpoint=1')


@pytest.mark.slow
def test_pre_training_goes_on_from_an_encoder():
    """Student and average start from the file, the heads and the mask token are new."""
    config = load.load(OWN)
    training = build.build(config, jax.devices()[:1])
    shapes = training.program.abstract_state.params
    rng = np.random.default_rng(0)
    drawn = {
        name: jax.tree.map(lambda s: rng.normal(size=s.shape).astype(np.float32), shapes[name])
        for name in ENCODER
    }
    fields = {name: config.model[name] for name in SAME if name in config.model}
    released = TrainedModel.from_file(drawn, {'name': 'vit', **fields}, (8, 8), 'a test')
    init = dataclasses.replace(training.run.init, checkpoint='a file')
    run = dataclasses.replace(training.run, init=init)
    training = dataclasses.replace(training, run=run)
    params = start.find_origin(training, checkpoint=released).params
    assert params.keys() == set(ENCODER)
    state = training.program.layout.create(training.program.init, params)
    for tree in (state.params, state.ema):
        jax.tree.map(np.testing.assert_array_equal, {k: tree[k] for k in ENCODER}, drawn)
    assert {'dino_head', 'ibot_head', 'mask_token'} <= state.params.keys()


@pytest.mark.long
@pytest.mark.process
def test_an_anchored_run_resumes_exactly_and_goes_on_at_twice_the_size(tmp_path):
    config = load.load(OWN, ANCHORED)
    vit_jax.train(config, tmp_path / 'whole')
    with pytest.raises(Preempted):
        vit_jax.train(config, tmp_path / 'resumed', stop_at=2)
    vit_jax.train(config, tmp_path / 'resumed')
    assert digest(tmp_path / 'resumed') == digest(tmp_path / 'whole')
    assert metrics(tmp_path / 'whole')[-2]['train/gram'] > 0
    larger = LARGER.replace('(16)', '(32)').replace('(8)', '(16)')
    overrides = [*ANCHORED, f'data.transforms={larger}', f'init.from={tmp_path}/whole']
    overrides += ['init.select=', 'evals.minival.transforms=resize(16)']
    vit_jax.train(load.load(OWN, overrides), tmp_path / 'high')


@pytest.mark.long
@pytest.mark.process
@pytest.mark.parametrize(
    ('devices', 'parallel', 'microbatches'),
    [(1, {}, 2), (2, {'strategy': 'pmap'}, 2), (4, {'fsdp': 4, 'min_split_size': 64}, 1)],
)
def test_an_anchor_is_the_same_in_any_layout(devices, parallel, microbatches):
    found, expected = (
        _stepped(*layout) for layout in ((devices, parallel, microbatches), (1, {}, 1))
    )
    assert found == pytest.approx(expected, rel=1e-5, abs=1e-6)


def _stepped(devices, parallel, microbatches):
    """Metrics after two steps."""
    config = load.load(OWN, ANCHORED)
    with config.unlocked():
        config.parallel = parallel
        config.step = dict(config.get('step', {}), accum_steps=microbatches)
    training = build.build(config, jax.devices()[:devices])
    program, batches = training.program, training.data.train_batches()
    state = program.layout.create(program.init, {}, program.frozen.variables)
    for _ in range(2):
        state, found = program.train_step(state, program.layout.put_batch(next(batches)))
    return {key: float(value) for key, value in found.items()}


@pytest.mark.parametrize(
    ('override', 'message'),
    [
        ('task.gram_teacher=', 'config.task.gram_teacher: name a checkpoint'),
        ('task.gram_teacher=nothing.npz', 'config.task.gram_teacher=nothing.npz: .*no such file'),
        ('task.gram_size=15', 'config.task.gram_teacher=.*: .*patch_size'),
    ],
)
def test_mistakes_in_an_anchor(override, message):
    with pytest.raises(UserError, match=message):
        build.build(load.load(OWN, [*ANCHORED, override]), jax.devices()[:1])
