"""What drawn colors are worth, on images of which all is known."""

import pathlib
import types

import flax.linen as nn
import jax
import numpy as np
import pytest
from ml_collections import ConfigDict

from vit_jax.errors import UserError
from vit_jax.inference import drawn_colors
from vit_jax.interop.trained import TrainedModel
from vit_jax.ops import colors
from vit_jax.tasks.coltran_upsampler import Task

BLOCKS = np.random.default_rng(0).integers(60, 196, (3, 2, 2, 3), dtype=np.uint8)
IMAGES = BLOCKS.repeat(2, axis=1).repeat(2, axis=2)
DATA = types.SimpleNamespace(source=[{'image': image} for image in IMAGES])
BATCH = {'index': np.arange(3, dtype=np.int32)}


class Same(nn.Module):
    """Finds the coarse image likeliest."""

    @nn.compact
    def __call__(self, gray, coarse, channels, train=False):
        return {'logits': jax.nn.one_hot(coarse, 256)}


NAME = {'name': 'coltran_upsampler'}
SECTION = {'source': '', 'split': ''}
SECTIONS = {'batch_size': 1, 'data': SECTION, 'evals': {}, 'model': NAME, 'task': NAME}
IMAGE = {'channels': 3, 'size': (4, 4)}


class Run(TrainedModel):
    model, task = Same(), Task(2)


PATH = pathlib.Path('larger')
RUN = Run({}, ConfigDict(SECTIONS), (4, 4), '', path=PATH, step=1, raw_images=IMAGE)


def measure(samples, **options):
    found = drawn_colors.Evaluator(**options)
    found.open(DATA)
    found.update({'samples': samples[:, None]}, BATCH)
    return found.result()


@pytest.mark.slow
def test_true_colors_and_none():
    true = measure(IMAGES)
    assert true['psnr'] > 45
    assert true['colorfulness'] == pytest.approx(true['true_colorfulness'], rel=0.01)
    gray = np.asarray(colors.to_bytes(colors.to_gray(IMAGES / np.float32(255))))
    none = measure(gray.repeat(3, axis=-1))
    assert none['colorfulness'] < 1
    assert none['psnr'] == pytest.approx(none['psnr_of_grey'], abs=0.01)
    assert none['psnr_of_grey'] == true['psnr_of_grey'] < 25


def test_an_upsampler_goes_on_with_the_sample(monkeypatch):
    """Smooth colors of blocks are not theirs; an upsampler that repeats pixels does better."""
    monkeypatch.setattr(drawn_colors, 'open_run', lambda path: RUN)
    assert measure(BLOCKS)['psnr'] < 40
    assert measure(BLOCKS, upsamplers=('larger',))['psnr'] > 45
    with pytest.raises(UserError, match=r'larger .* 2 x 2'):
        measure(IMAGES, upsamplers=('larger',))


def test_mistakes():
    found = drawn_colors.Evaluator()
    with pytest.raises(UserError, match=r'samples.*coltran'):
        found.update({'image': IMAGES}, BATCH)
    found.open(types.SimpleNamespace(source=[{'image': IMAGES[0]}, {'image': IMAGES[1, :3]}]))
    with pytest.raises(UserError, match='size'):
        found.update({'samples': BLOCKS[:2, None]}, {'index': np.arange(2)})
