"""Fine-tuning of AugReg's ViTs, as in big_vision's transfer.

    python -m vit_jax train experiments/vit/transfer.py:pets,variant=B/32 \\
        --config.init.from=hf://timm/vit_base_patch32_224.augreg_in21k --workdir runs/pets

google-research/big_vision, `configs/transfer.py`, with its authors' learning rates for AugReg's
B/32: 448 pixels cropped to 384 in evaluation, on CIFAR in training too; batch 512, 500 steps of
warm-up, 100 in the short runs. `dev` is a part of the training images.

Expected, as published for B/32 of AugReg: 83.27 % on imagenet2012, 98.55 % on cifar10, 91.35 % on
cifar100, 93.78 % on pets, 99.43 % on flowers. No hours are published. Not measured by this project
yet.
"""

from typing import Literal

from ml_collections import ConfigDict
from ml_collections.config_dict import placeholder

from vit_jax.models import hybrid, vit

# name: source, training split, dev split, test split, steps, learning rate
DATASETS = {
    'imagenet2012': ('tfds:imagenet2012', 'train[:99%]', 'train[99%:]', 'validation', 20_000, 0.03),
    'cifar10': ('tfds:cifar10', 'train[:98%]', 'train[98%:]', 'test', 10_000, 0.003),
    'cifar100': ('tfds:cifar100', 'train[:98%]', 'train[98%:]', 'test', 10_000, 0.01),
    'pets': ('tfds:oxford_iiit_pet', 'train[:90%]', 'train[90%:]', 'test', 500, 0.003),
    'flowers': (
        'tfds:oxford_flowers102',
        'train[:90%]+validation[:90%]',
        'train[90%:]+validation[90%:]',
        'test',
        500,
        0.003,
    ),
}
Dataset = Literal['imagenet2012', 'cifar10', 'cifar100', 'pets', 'flowers']


def get_config(
    dataset: Dataset = 'imagenet2012', variant: str = 'B/32', fast: bool = False
) -> ConfigDict:
    """Images and the checkpoint's model; `fast` keeps the residual stream in bfloat16."""
    source, train, dev, test, steps, lr = DATASETS[dataset]
    size = 378 if variant.endswith('/14') else 384  # 27 patches of 14 pixels fit
    larger = f'resize_small_tf({size * 7 // 6})'
    config = ConfigDict()
    config.total = f'{steps} steps'
    config.batch_size = 512

    family, models = ('hybrid', hybrid) if '+' in variant else ('vit', vit)
    config.model = dict(name=family, num_classes=placeholder(int), **models.variant(variant))
    config.model.update(dtype='bfloat16', residual_dtype=None if fast else 'float32')
    config.init = {'from': placeholder(str), 'posemb': 'bilinear'}
    config.task = dict(name='classify')

    crop = f'inception_crop_tf({size})'
    if 'cifar' in dataset:
        crop = f'{larger}|random_crop({size})'
    config.data = dict(source=source, split=train, transforms=f'{crop}|flip')
    images = dict(source=source, transforms=f'{larger}|central_crop({size})')
    config.evals = dict(dev=dict(images, split=dev), test=dict(images, split=test))

    config.optim = dict(name='sgd', momentum=0.9, lr=lr, clip_norm=1.0)
    config.optim.accumulator_dtype = 'bfloat16'
    config.optim.schedule = dict(name='cosine', warmup=f'{min(500, steps // 5)} steps')
    config.every = dict(log='50', eval='10%', checkpoint='5%')
    return config


def smoke(config: ConfigDict) -> None:
    """Shrink the run to 20 steps on digits, from scratch."""
    config.total = '20 steps'
    config.batch_size = 32
    config.model.update(vit.variant('mu/4'))
    config.init = {'from': '', 'posemb': 'bilinear'}
    crop = 'inception_crop_tf(16)|flip'
    config.data = dict(source='digits', split='train[:90%]', transforms=crop)
    images = dict(source='digits', transforms='resize_small_tf(18)|central_crop(16)')
    config.evals = dict(dev=dict(images, split='train[90%:]'), test=dict(images, split='test'))
    config.optim.schedule.warmup = '2 steps'
    config.every = dict(log='10', eval='20', checkpoint='20')
