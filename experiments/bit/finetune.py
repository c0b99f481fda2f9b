r"""Fine-tuning of a BiT-ResNet by the BiT-HyperRule: choose only the dataset.

    python -m vit_jax train experiments/bit/finetune.py:cifar10,variant=R50x1 \
        --config.init.from=BiT-M-R50x1.npz --workdir runs/cifar10_bit

The argument is a dataset (imagenet2012, cifar10, cifar100, pets, flowers) and the checkpoint's
model: R50x1, R50x3, R101x1, R101x3, R152x2, R152x4. `config.init.from` is a file such as
storage.googleapis.com/bit_models/BiT-M-R50x1.npz, or a run folder of `imagenet2012.py`; the head is
reinitialized. An empty value, `--config.init.from=`, trains from scratch.

Kolesnikov et al., 2020, arXiv:1912.11370, section 3.3: the number of training images sets the steps
and mixup, their size the resolution. SGD at 0.003 for a batch of 512, no weight decay, a tenth of
the learning rate at 30, 60 and 90 % of training (40, 60 and 80 % of the shortest). All training
images are used. Expected, as published for BiT-M-R50x1 (README of google-research/big_transfer):
80.68 % on imagenet2012, on 8 V100; 97.3 % on cifar10, 86.4 % on cifar100. No hours are published.
Not measured by this project yet.
"""

from typing import Literal

from ml_collections import ConfigDict
from ml_collections.config_dict import placeholder

from vit_jax.models import bit_resnet

# name: source, training split, test split, training images, whether smaller than 96 x 96 pixels
DATASETS = {
    'imagenet2012': ('tfds:imagenet2012', 'train', 'validation', 1_281_167, False),
    'cifar10': ('tfds:cifar10', 'train', 'test', 50_000, True),
    'cifar100': ('tfds:cifar100', 'train', 'test', 50_000, True),
    'pets': ('tfds:oxford_iiit_pet', 'train', 'test', 3_680, False),
    'flowers': ('tfds:oxford_flowers102', 'train+validation', 'test', 2_040, False),
}
Dataset = Literal['imagenet2012', 'cifar10', 'cifar100', 'pets', 'flowers']


def get_config(dataset: Dataset = 'imagenet2012', variant: str = 'R50x1') -> ConfigDict:
    """Images and the checkpoint's model."""
    source, train, test, images, small = DATASETS[dataset]
    config = ConfigDict()
    config.total, schedule, mixup = hyper_rule(images)
    config.batch_size = 512

    config.model = dict(name='bit_resnet', **bit_resnet.variant(variant))
    config.model.update(num_classes=placeholder(int), dtype='bfloat16')
    config.init = {'from': placeholder(str)}
    config.task = dict(name='classify', mixup=mixup)

    resized, crop = (160, 128) if small else (512, 480)
    augment = f'resize_tf({resized})|random_crop({crop})|flip'
    config.data = dict(source=source, split=train, transforms=augment)
    config.evals = dict(test=dict(source=source, split=test, transforms=f'resize_tf({crop})'))

    config.optim = dict(name='sgd', momentum=0.9, lr=0.003, schedule=schedule)
    config.every = dict(log='50', eval='10%', checkpoint='5%')
    return config


def hyper_rule(images: int) -> tuple[str, dict, float]:
    """Training length, schedule and mixup for a number of training images."""
    if images < 20_000:
        steps, warmup, stairs, mixup = 500, 100, (200, 300, 400), 0.0
    else:
        steps, warmup = 10_000 if images < 500_000 else 20_000, 500
        stairs, mixup = tuple(steps * share // 10 for share in (3, 6, 9)), 0.1
    # In the authors' code, the step at a boundary still uses the previous rate.
    boundaries = tuple(f'{stair + 1} steps' for stair in stairs)
    schedule = dict(name='stair', warmup=f'{warmup} steps', boundaries=boundaries)
    return f'{steps} steps', schedule, mixup


def smoke(config: ConfigDict) -> None:
    """Shrink the run to 20 steps on digits, by the rule for CIFAR-10, from scratch."""
    config.total, schedule, mixup = hyper_rule(50_000)
    config.total, config.batch_size = '20 steps', 16
    config.model.update(layers=(1,))
    config.init = {'from': ''}
    config.task.mixup = mixup
    config.data = dict(source='digits', split='train', workers=0)
    config.data.transforms = 'resize_tf(20)|random_crop(16)|flip'
    config.evals = dict(test=dict(source='digits', split='test', transforms='resize_tf(16)'))
    config.optim.schedule = dict(schedule, warmup='10%', boundaries=('30%', '60%', '90%'))
    config.every = dict(log='10', eval='10', checkpoint='10')
