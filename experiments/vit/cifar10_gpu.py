"""CIFAR-10 from scratch on one GPU: a larger ViT, 200 epochs of RandAugment, mixup and cutmix.

    python -m vit_jax train experiments/vit/cifar10_gpu.py --workdir runs/cifar10_gpu

Requires `cifar10` prepared by TFDS as ArrayRecord (docs/datasets.md). Expected: test accuracy >=
0.90 on one GPU. Not measured yet.
"""

from ml_collections import ConfigDict
from ml_collections.config_dict import placeholder

from vit_jax.models import vit


def get_config() -> ConfigDict:
    """The recipe."""
    config = ConfigDict()
    config.total = '200 epochs'
    config.batch_size = 512

    config.model = dict(name='vit', num_classes=placeholder(int), **vit.variant('S/4'))
    config.model.update(pool='gap', drop_path=0.1, dtype='bfloat16')
    config.task = dict(name='classify', label_smoothing=0.1, mixup=0.8, cutmix=1.0)

    images = dict(source='tfds:cifar10')
    augment = 'pad_and_crop(4)|flip|randaugment(2, 10, translate=14, cutout=6)'
    config.data = dict(images, split='train', transforms=augment, workers=8)
    config.evals = dict(test=dict(images, split='test', cache=True, batch_size=500))

    config.optim = dict(name='adamw', lr=1e-3, b2=0.99, weight_decay=0.05, clip_norm=1.0)
    config.optim.schedule = dict(name='cosine', warmup='5%')
    config.every = dict(log='200', eval='1 epoch', checkpoint='1 epoch')
    return config


def smoke(config: ConfigDict) -> None:
    """Shrink the run to 20 steps on digits."""
    config.total = '20 steps'
    config.batch_size = 32
    config.model.update(vit.variant('mu/4'))
    config.data.update(source='digits', workers=0)
    config.evals.test.source = 'digits'
    config.every = dict(log='10', eval='20', checkpoint='20')
