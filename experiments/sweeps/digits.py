"""Sweeps of the small ViT on handwritten digits: a search, a grid, and a star of shapes.

    python -m vit_jax sweep create experiments/sweeps/digits.py --study digits_search
    python -m vit_jax sweep work digits_search
    python -m vit_jax sweep best digits_search

The search has 24 trials of at most 30 epochs; any number of workers may share them.
`digits.py:grid` and `digits.py:star` run given points exactly once each. With `smoke` in front, as
in `digits.py:smoke-star`, a trial is 20 steps of a tiny model.
"""

from vit_jax.sweeps.space import Sweep, choice, grid, log_uniform, star

CONFIG = 'experiments/vit/digits.py'
ARGS = ('smoke', 'grid', 'star', 'smoke-grid', 'smoke-star')


def get_sweep(arg: str | None = None) -> Sweep:
    """`arg`: `grid` or `star` instead of a search, with `smoke` for a few tiny trials."""
    smoke, kind = 'smoke' in (arg or ''), (arg or '').removeprefix('smoke').removeprefix('-')
    config = f'{CONFIG}:smoke' if smoke else CONFIG
    base = dict(config=config, metric='test/accuracy')
    if not smoke:
        # Trials are selected on a part of the training images: `test` here is not the test split.
        base['overrides'] = {
            'total': '30 epochs',
            'every.eval': '3 epochs',
            'data.split': 'train[:80%]',
            'evals.test.split': 'train[80%:]',
        }
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
        trials=4 if smoke else 24,
        search='tpe',
        pruner='none' if smoke else 'asha',
        # Of 540 steps, with evaluations at 54, 162 and 486.
        pruner_options={} if smoke else {'min_resource': 54, 'reduction_factor': 3},
    )
