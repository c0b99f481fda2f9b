"""Sweeps of the small ViT on handwritten digits: a search, a grid, and a star of shapes.

    python -m vit_jax sweep create experiments/sweeps/digits.py --study digits_search
    python -m vit_jax sweep work digits_search
    python -m vit_jax sweep best digits_search

The search has 24 trials of at most 30 epochs; any number of workers may share them.
`digits.py:grid` and `digits.py:star` run given points exactly once each. Trials are selected on a
part of the training images: `test` here is not the test split.
"""

import dataclasses
from typing import Literal

from vit_jax.sweeps.space import Sweep, choice, grid, log_uniform, star

CONFIG = 'experiments/vit/digits.py'
SHORT = {
    'total': '30 epochs',
    'every.eval': '3 epochs',
    'data.split': 'train[:80%]',
    'evals.test.split': 'train[80%:]',
}


def get_sweep(kind: Literal['search', 'grid', 'star'] = 'search') -> Sweep:
    """A search, or given points."""
    base = dict(config=CONFIG, metric='test/accuracy', overrides=SHORT)
    if kind == 'grid':
        return Sweep(**base, points=grid({'optim.lr': [1e-3, 3e-3], 'seed': [0, 1]}))
    if kind == 'star':
        center = {'model.width': 32, 'model.depth': 2, 'model.mlp_dim': 64}
        rays = {'model.width': [16, 64], 'model.depth': [1, 4], 'model.mlp_dim': [32, 128]}
        return Sweep(**base, points=star(center, rays))
    return Sweep(
        **base,
        space={
            'optim.lr': log_uniform(1e-4, 1e-1),
            'optim.weight_decay': log_uniform(1e-3, 1.0),
            'task.mixup': choice(0.0, 0.2, 0.5),
        },
        trials=24,
        search='tpe',
        pruner='asha',
        # Of 540 steps, with evaluations at 54, 162 and 486.
        pruner_options={'min_resource': 54, 'reduction_factor': 3},
    )


def smoke_sweep(sweep: Sweep) -> Sweep:
    """Reduce the sweep to tiny trials, four of a search."""
    small = dict(trials=4, pruner='none', pruner_options={}) if sweep.space else {}
    return dataclasses.replace(sweep, overrides={}, **small)
