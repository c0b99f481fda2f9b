"""Runs of DINOv2: mistakes in one line, one's own images, exact resume, a ViT that starts there."""

import jax
import numpy as np
import pytest
from helpers.experiments import ROOT
from helpers.runs import digest, metrics
from PIL import Image

import vit_jax
from vit_jax.config import load
from vit_jax.errors import UserError
from vit_jax.trainer import build
from vit_jax.trainer.loop import Preempted

SMOKE = f'{ROOT}/experiments/dinov2/cifar10.py:smoke'
GLOBAL = "views('image', 2, 'inception_crop(8)')"


@pytest.mark.slow
@pytest.mark.parametrize(
    ('override', 'message'),
    [
        ('batch_size=1', 'config.batch_size=1: the loss of task dinov2 compares the examples of a'),
        ('data.transforms=flip', 'config.data.transforms: DINOv2 learns from two global crops'),
        (
            f"data.transforms={GLOBAL}|views('local_image', 2, 'inception_crop(4)')",
            'config.data.transforms: write the views of local_image before the views of image',
        ),
        (
            f"data.transforms=views('local_image', 2, 'random_crop(12)')|{GLOBAL}",
            r'random_crop\(12\): the image has 8 x 8 pixels; enlarge it first',
        ),
        (
            f"data.transforms=views('local_image', 2, 'inception_crop(3)')|{GLOBAL}",
            'images are 3 x 3: their height is not a positive multiple of patch_size 2',
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
