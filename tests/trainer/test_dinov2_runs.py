"""Runs of DINOv2: mistakes in one line, one's own images, exact resume, a ViT that starts there."""

import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import doors
from helpers.experiments import ROOT
from helpers.pictures import images_like
from helpers.runs import digest, metrics
from PIL import Image

import vit_jax
from experiments.dinov2 import own
from vit_jax import interop
from vit_jax.config import load
from vit_jax.errors import UserError
from vit_jax.interop.families import authors_dinov3
from vit_jax.models import dinov2, vit
from vit_jax.tasks.dinov2 import COPY
from vit_jax.trainer import build, start
from vit_jax.trainer.loop import Preempted

SMOKE = f'{ROOT}/experiments/dinov2/cifar10.py:smoke'
GLOBAL = "views('image', 2, 'inception_crop(8)')"


@pytest.mark.slow
@pytest.mark.parametrize(
    ('override', 'message'),
    [
        ('batch_size=1', r'config.batch_size=1: .* dinov2'),
        ('data.transforms=flip', 'config.data.transforms: .*crops'),
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


def write_photos(folder: pathlib.Path, count: int) -> None:
    """Write images of noise, without labels."""
    rng = np.random.default_rng(0)
    (folder / 'photos' / 'all').mkdir(parents=True)
    for i in range(count):
        pixels = rng.integers(0, 256, (40, 30 + i % 20, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / 'photos' / 'all' / f'{i}.png')


@pytest.mark.long
@pytest.mark.process
def test_images_of_ones_own_need_no_labels(tmp_path):
    write_photos(tmp_path, 400)
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
# Of a student of DINOv3, with a copy of the average from the second step on.
COPIED = (*ANCHORED, 'task.gram_refresh=1')
OWN3 = f'{OWN},v3'


SIZES = {'patch_size': 2, 'width': 32, 'depth': 1, 'mlp_dim': 64, 'num_heads': 2}


def encoder_of(config) -> vit.Model:
    """The ViT of a student's config."""
    student = {key: value for key, value in config.model.to_dict().items() if key != 'name'}
    fields = dinov2.Model(**student).transferable()[0]
    return vit.Model(**{key: value for key, value in fields.items() if key != 'name'})


def write_encoder(config, kind: str, folder: pathlib.Path) -> str:
    """Write a random ViT with the fields of a student to a file; return its path."""
    trained = doors.trained(encoder_of(config))
    if kind != 'pth':
        interop.write(trained, folder / 'released')
        return str(folder / 'released')
    torch = pytest.importorskip('torch')
    arrays = authors_dinov3.write(trained).arrays
    torch.save({k: torch.from_numpy(np.array(v)) for k, v in arrays.items()}, folder / 'a.pth')
    return str(folder / 'a.pth')


@pytest.mark.slow
@pytest.mark.parametrize(
    ('flags', 'kind'),
    [(',v3', 'transformers'), (',v3', 'pth')],
)
def test_pre_training_goes_on_from_an_encoder(flags, kind, tmp_path):
    """Student, average and Gram teacher start from the file; heads and mask token are new."""
    given = [f'model.{key}={value}' for key, value in SIZES.items()]
    given += ['task.gram=2.0', 'task.gram_teacher=average', f'data.source=folder:{tmp_path}/photos']
    given += ['evals.minival.transforms=resize(8)']
    colors = doors.COLORS if kind == 'transformers' else {'mean': own.MEAN, 'std': own.STD}
    given += [f'task.{key}={value}' for key, value in colors.items()]
    write_photos(tmp_path, 40)
    config = load.load(f'{OWN}{flags}', given)
    path = write_encoder(config, kind, tmp_path)
    config = load.override(config, [f'init.from={path}'])
    training = build.build(config, jax.devices()[:1])
    params = start.find_origin(training).params
    model, variables = vit_jax.load(path, image_size=8)
    assert params.keys() == variables['params'].keys()
    released = variables['params']
    state = training.program.layout.create(training.program.init, params)
    for tree in (state.params, state.ema, state.other_emas[COPY]):
        found = {name: tree[name] for name in released}
        jax.tree.map(np.testing.assert_array_equal, found, released)
    assert {'dino_head', 'ibot_head', 'mask_token'} <= state.params.keys()
    if kind == 'pth':
        images = images_like(2, 8, 8, 3)
        student, released = training.program.model, jax.tree.map(jnp.asarray, variables)
        expected = model.apply(released, 2 * images - 1)
        seen = (images - jnp.asarray(own.MEAN)) / jnp.asarray(own.STD)
        found = student.apply({'params': state.params}, seen)
        np.testing.assert_allclose(found['tokens'], expected['tokens'], atol=1e-5)


@pytest.mark.long
@pytest.mark.process
def test_an_anchored_run_resumes_exactly_and_goes_on_at_twice_the_size(tmp_path):
    config = load.load(OWN3, COPIED)
    vit_jax.train(config, tmp_path / 'whole')
    with pytest.raises(Preempted):
        vit_jax.train(config, tmp_path / 'resumed', stop_at=2)
    vit_jax.train(config, tmp_path / 'resumed')
    assert digest(tmp_path / 'resumed') == digest(tmp_path / 'whole')
    assert metrics(tmp_path / 'whole')[-2]['train/gram'] > 0
    larger = LARGER.replace('(16)', '(32)').replace('(8)', '(16)')
    overrides = [*COPIED, f'data.transforms={larger}', f'init.from={tmp_path}/whole']
    overrides += ['init.select=', 'evals.minival.transforms=resize(16)']
    vit_jax.train(load.load(OWN3, overrides), tmp_path / 'high')


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
    config = load.load(OWN3, COPIED)
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
