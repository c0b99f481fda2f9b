"""CIFAR-10 from scratch: a plain ViT that two CPU cores train over a coffee break.

    python -m vit_jax train experiments/vit/cifar10.py --workdir runs/cifar10

Requires `cifar10` prepared by TFDS as ArrayRecord (docs/datasets.md). Expected: test accuracy >=
0.62 in under 45 minutes on 2 CPU cores. Measured: 0.652 after 27 minutes. See cifar10_gpu.py for
a longer run.
"""

from ml_collections import ConfigDict
from ml_collections.config_dict import placeholder


def get_config() -> ConfigDict:
    """The recipe."""
    config = ConfigDict()
    config.total = '10 epochs'
    config.batch_size = 64

    config.model = dict(name='vit', patch_size=4, width=128, depth=4, num_heads=4, mlp_dim=256)
    config.model.update(pool='gap', posemb='sincos2d', num_classes=placeholder(int))
    config.task = dict(name='classify')

    images = dict(source='tfds:cifar10', cache=True)
    augment = 'pad_and_crop(2)|flip'
    config.data = dict(images, split='train', transforms=augment, workers=0)
    config.evals = dict(test=dict(images, split='test', batch_size=500))

    config.optim = dict(name='adamw', lr=1e-3, b2=0.99, weight_decay=0.05, clip_norm=1.0)
    config.optim.schedule = dict(name='cosine', warmup='5%')
    config.every = dict(log='200', eval='1 epoch', checkpoint='1 epoch')
    return config


def smoke(config: ConfigDict) -> None:
    """Shrink the run to 20 steps on digits."""
    config.total = '20 steps'
    config.batch_size = 32
    config.data.source = config.evals.test.source = 'digits'
    config.every = dict(log='10', eval='20', checkpoint='20')
