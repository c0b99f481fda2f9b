r"""The best learning rate over width, with and without muP, on CIFAR-10.

    python -m vit_jax sweep create experiments/scaling/cifar10_rates.py --study rates
    python -m vit_jax sweep work rates    # any number of workers, here or elsewhere
    python -m vit_jax scaling collect runs/rates --out rates.csv
    python -m vit_jax sweep plot rates --x optim.lr --by model.width \
        --panel optim.parametrization

Tensor Programs V (arXiv:2203.03466), Figure 1, at small scale: a ViT of two blocks on 16 patches of
8 pixels, four widths from 64 to 512, five rates a factor of 3 apart, 200 steps of 16 images. Two
seeds at width 64. `val` holds 2,000 training images, held out from all runs. muP's base is width
64, where it equals the standard parametrization.

A single one of the 50 runs, the narrowest at its smallest rate:

    python -m vit_jax train experiments/scaling/cifar10_rates.py --workdir runs/one

Expected, as in the paper: the best rate falls with the width in the standard parametrization, and
stays with muP. Measured: from 1e-3 at width 64 and 128 to 3e-4 at 256 and 512; 1e-3 to 3e-3 with
muP at every width. docs/predictions.md has the table and the picture.
"""

import dataclasses

from ml_collections import ConfigDict
from ml_collections.config_dict import placeholder

from vit_jax.sweeps.space import Point, Sweep

WIDTHS = (64, 128, 256, 512)
RATES = (3e-4, 1e-3, 3e-3, 1e-2, 3e-2)
MUP = 'mup(width=64, mlp_dim=128, num_heads=4)'
FILE = 'experiments/scaling/cifar10_rates.py'


def get_sweep() -> Sweep:
    """Every width at every rate, with and without muP."""
    points = [
        {**shape(width), 'optim.lr': rate, 'optim.parametrization': name, 'seed': seed}
        for width in WIDTHS
        for name in ('standard', MUP)
        for rate in RATES
        for seed in range(2 if width == WIDTHS[0] else 1)
    ]
    return Sweep(config=FILE, metric='val/loss', direction='minimize', points=points)


def smoke_sweep(sweep: Sweep) -> Sweep:
    """Reduce the sweep to two widths at two rates and one seed."""
    points = [
        point
        for point in sweep.points
        if point['model.width'] in WIDTHS[:2] and point['optim.lr'] in RATES[1:3]
    ]
    return dataclasses.replace(sweep, points=[point for point in points if not point['seed']])


def shape(width: int) -> Point:
    """A width, with heads of 16 channels."""
    size = {'width': width, 'mlp_dim': 2 * width, 'num_heads': width // 16}
    return {f'model.{key}': value for key, value in size.items()}


def get_config() -> ConfigDict:
    """The narrowest model at the smallest rate."""
    config = ConfigDict()
    config.total = '200 steps'
    config.batch_size = 16

    config.model = dict(name='vit', patch_size=8, width=64, depth=2, mlp_dim=128)
    config.model.update(num_heads=4, pool='gap', posemb='sincos2d', num_classes=placeholder(int))
    config.task = dict(name='classify')

    images = dict(source='tfds:cifar10', cache=True)
    config.data = dict(images, split='train[:45000]', workers=0)
    config.evals = dict(val=dict(images, split='train[45000:47000]', batch_size=500))

    config.optim = dict(name='adamw', lr=RATES[0], b2=0.99, weight_decay=0.0, clip_norm=1.0)
    config.optim.schedule = dict(name='cosine', warmup='10%')
    config.every = dict(log='10%', eval='100%', checkpoint='100%', examples='')
    config.checkpoint = dict(keep_last=1)
    return config


def smoke(config: ConfigDict) -> None:
    """Shrink the run to 20 steps on digits."""
    config.total = '20 steps'
    config.model.patch_size = 4
    config.data.update(source='digits', split='train[:80%]')
    config.evals.val.update(source='digits', split='train[80%:]', batch_size=100)
