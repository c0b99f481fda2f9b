"""Locked-image tuning: a text tower is trained beside a ViT that stays as it was."""

import numpy as np
import pytest
from helpers.experiments import ROOT
from helpers.runs import read_item
from jax.tree_util import tree_leaves_with_path

import vit_jax
from vit_jax.config import load

# Images with the class of their digit.
DIGITS = ('source=scenes_captions:digit', "transforms=keep('image', 'label')")
CAPTIONS = ('source=scenes_captions:64', "transforms=tokenize('caption', 64)", 'vocab=bytes')


def params(folder):
    return read_item(folder / 'checkpoints' / '2' / 'variables')['params']


@pytest.mark.long
@pytest.mark.process
def test_the_image_tower_is_the_vit_it_started_from(tmp_path):
    mu = ('patch_size=8', 'width=32', 'depth=1', 'mlp_dim=128', 'num_heads=2')
    short = ['batch_size=16', 'total=2 steps', 'every.eval=2', 'every.checkpoint=2']
    classifier = [
        *(f'model.{field}' for field in (*mu, 'pool=cls', 'posemb=learn')),
        *(f'{section}.{field}' for section in ('data', 'evals.test') for field in DIGITS),
        'evals.test.split=test[:16]',
        'step.ema_decay=0.0',
    ]
    config = load.load(f'{ROOT}/experiments/vit/digits.py:smoke', [*short, *classifier])
    vit_jax.train(config, tmp_path / 'vit')

    lit = [f'init.from={tmp_path / "vit"}', 'optim.schedule.warmup=1 steps']
    for section, split in {
        'data': 'train',
        'evals.test': 'test[:16]',
        'evals.retrieval': 'test[:16]',
    }.items():
        lit += [f'{section}.{field}' for field in (*CAPTIONS, f'split={split}')]
    config = load.load(f'{ROOT}/experiments/siglip/own.py:lit,mu/8', [*short, *lit])
    found = vit_jax.train(config, tmp_path / 'lit')
    assert {'retrieval/text_recall_1', 'retrieval/image_recall_10'} <= found.keys()

    start, after = params(tmp_path / 'vit'), params(tmp_path / 'lit')
    kept = [name for name in start if name != 'head']
    assert sorted(kept) == sorted(after['image'])
    for path, leaf in tree_leaves_with_path({name: start[name] for name in kept}):
        found = after['image']
        for key in path:
            found = found[key.key]
        np.testing.assert_array_equal(found, leaf)
    assert float(after['bias']) != -2.71
