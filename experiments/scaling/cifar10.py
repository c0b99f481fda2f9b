r"""Accuracy over the number of training images: ViT against BiT-ResNet on CIFAR-10.

    python -m vit_jax sweep create experiments/scaling/cifar10.py:vit --study cifar10_vit
    python -m vit_jax sweep create experiments/scaling/cifar10.py:bit --study cifar10_bit
    python -m vit_jax sweep work cifar10_vit    # any number of workers, here or elsewhere
    python -m vit_jax sweep work cifar10_bit
    python -m vit_jax scaling report --x data_size --y 1-test/accuracy --by model,parameters \
        --form power runs/cifar10_vit runs/cifar10_bit

A small version of Figure 4 of the ViT paper (arXiv:2010.11929): three sizes of each family on 1,000
to 45,000 images, with the same hyperparameters within a family; `val`, 5,000 training images held
out from all runs, is for tuning. Runs on more images see more examples, from 20 epochs of the
smallest subset to 2.7 of the largest.

36 runs; two workers on 2 busy CPU cores took 85 minutes. A single run:

    python -m vit_jax train experiments/scaling/cifar10.py:vit --workdir runs/one

Expected, as the paper found on ImageNet: the ResNet is better on little data, and the ViT gains
more from additional data. Measured: the former holds, the latter does not up to 45,000 images; see
experiments/README.md.
"""

import dataclasses
from typing import Literal

from ml_collections import ConfigDict
from ml_collections.config_dict import placeholder

from vit_jax.sweeps.space import Sweep

# images to train on: examples seen
EXAMPLES = {1000: 20e3, 2500: 30e3, 5000: 40e3, 10000: 60e3, 25000: 90e3, 45000: 120e3}
# Forward MFLOPs per image: 6.6, 16.1 and 44.6 (ViT), 14.3, 29.5 and 44.7 (BiT).
SIZES = {
    'vit': [
        {'model.width': 48, 'model.depth': 2, 'model.mlp_dim': 96, 'model.num_heads': 3},
        {'model.width': 64, 'model.depth': 3, 'model.mlp_dim': 128, 'model.num_heads': 4},
        {'model.width': 96, 'model.depth': 4, 'model.mlp_dim': 192, 'model.num_heads': 3},
    ],
    'bit': [{'model.layers': layers} for layers in ('(1,)', '(1, 1)', '(1, 1, 1)')],
}
OPTIMIZERS = {
    'vit': dict(name='adamw', lr=1e-3, b2=0.99, weight_decay=0.05),
    'bit': dict(name='sgd', lr=0.05, momentum=0.9, weight_decay=5e-4),
}
FILE = 'experiments/scaling/cifar10.py'


def get_sweep(family: Literal['vit', 'bit'] = 'vit') -> Sweep:
    """Three sizes on six subsets."""
    points = [
        {**size, 'data.split': f'train[:{images}]', 'total': f'{examples:.0f} examples'}
        for images, examples in EXAMPLES.items()
        for size in SIZES[family]
    ]
    return Sweep(config=f'{FILE}:{family}', metric='val/accuracy', points=points)


def smoke_sweep(sweep: Sweep) -> Sweep:
    """Reduce the sweep to the smallest model on two subsets."""
    points = [
        {**sweep.points[0], 'data.split': f'train[:{images}]', 'total': '640 examples'}
        for images in (100, 200)
    ]
    return dataclasses.replace(sweep, points=points)


def get_config(family: Literal['vit', 'bit'] = 'vit') -> ConfigDict:
    """The smallest model on all images."""
    config = ConfigDict()
    config.total = '120000 examples'
    config.batch_size = 64

    if family == 'vit':
        config.model = dict(name='vit', patch_size=4, width=48, depth=2, mlp_dim=96, num_heads=3)
        config.model.update(pool='gap', posemb='sincos2d')
    else:
        config.model = dict(name='bit_resnet', layers=(1,), width_factor=1)
    config.model.num_classes = placeholder(int)
    config.task = dict(name='classify')

    images = dict(source='tfds:cifar10', cache=True)
    augment = 'pad_and_crop(4)|flip'
    config.data = dict(images, split='train[:45000]', transforms=augment, workers=0)
    images.update(batch_size=500)
    config.evals = dict(val=dict(images, split='train[45000:]'), test=dict(images, split='test'))

    config.optim = dict(OPTIMIZERS[family], clip_norm=1.0)
    config.optim.schedule = dict(name='cosine', warmup='5%')
    config.every = dict(log='10%', eval='50%', checkpoint='50%')
    config.checkpoint = dict(keep_last=1)
    return config


def smoke(config: ConfigDict) -> None:
    """Shrink the run to 20 steps on digits."""
    config.total = '20 steps'
    config.batch_size = 32
    config.data.update(source='digits', split='train[:80%]', transforms='')
    images = dict(source='digits', cache=True, batch_size=100)
    config.evals = dict(val=dict(images, split='train[80%:]'), test=dict(images, split='test'))
