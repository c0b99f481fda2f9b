r"""What a ViT on large patches of noisy images should predict: 18 small runs on CIFAR-10.

    python -m vit_jax train experiments/vit/cifar10.py --workdir runs/cifar10 \
        --config.model.patch_size=8 --config.total='1 epoch'
    python -m vit_jax sweep create experiments/sweeps/cifar10_jit.py --study jit_predictions
    python -m vit_jax sweep work jit_predictions

A run takes 400 steps of 128 images, and 1,000 samples without guidance, one of the class of each of
1,000 test images, are compared with these in the features of the classifier. Expected: the least
Frechet distances by `x`, above all at patches of 16 pixels (arXiv:2511.13720, table 2). Measured
for seeds 0, 1 and 2, on an Intel Xeon, with a classifier whose accuracy is 0.427:

    patches    x                v                epsilon
    16 pixels  14.6 14.6 16.7   35.9 35.4 37.3   103.3 104.6 103.6
    8 pixels   16.3  8.4  8.6   29.4 31.1 31.6   102.6 103.3 107.0

A run takes 1.5 minutes of CPU time at 16 pixels and 2.2 at 8.
"""

import dataclasses

from vit_jax.sweeps.space import Sweep, grid

CONFIG = 'experiments/jit/cifar10.py'
PREDICTIONS = {'task.prediction': ['x', 'epsilon', 'v']}


def get_sweep() -> Sweep:
    """Three predictions with two patch sizes and three seeds."""
    points = grid({'seed': [0, 1, 2], 'model.patch_size': [16, 8], **PREDICTIONS})
    overrides = {
        'total': '400 steps',
        'model.width': 96,
        'model.depth': 3,
        'model.mlp_dim': 256,
        'model.context_tokens': 0,
        'model.context_start': 0,
        'optim.lr': 1e-3,
        'step.ema_decay': 0.98,
        'task.guidance': 1.0,
        'task.steps': 25,
        'evals.test.evaluator': 'frechet',
        'evals.test.features': 'runs/cifar10',
        'evals.test.split': 'test[:1000]',
        'every.eval': '400 steps',
        'every.examples': '',
    }
    return Sweep(CONFIG, 'test/frechet_cifar10', 'minimize', points, overrides=overrides)


def smoke_sweep(sweep: Sweep) -> Sweep:
    """Reduce the sweep to tiny models on digits, without features."""
    points = grid({'seed': [0], 'model.patch_size': [4], **PREDICTIONS})
    return dataclasses.replace(sweep, metric='test/loss', points=points, overrides={})
