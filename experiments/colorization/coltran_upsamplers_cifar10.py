r"""ColTran's upsamplers on CIFAR-10: small models for CPUs.

    python -m vit_jax train experiments/colorization/coltran_upsamplers_cifar10.py:color \
        --workdir runs/color_cifar10

As coltran_upsamplers.py: `color` at 16 x 16 pixels, `spatial` from 16 x 16 to 32 x 32 pixels, with
Adam and a cosine schedule, which does better in few steps. Expected: below 5 of 8 bits per byte.
Measured on `test`, in about 10 and 15 minutes of one CPU core: 3.57 bits per byte (5 if only the
coarse level is known), and 4.24.
"""

from typing import Literal

from ml_collections import ConfigDict

# Levels of an input channel, enlargement, steps, resizing of images, and of images to train on.
KINDS = {
    'color': (8, 1, 1500, 'resize(16)', 'resize(16)|flip'),
    'spatial': (256, 2, 500, '', 'flip'),
}


def get_config(kind: Literal['color', 'spatial'] = 'color') -> ConfigDict:
    """One of the two networks."""
    levels, factor, steps, transforms, augment = KINDS[kind]
    config = ConfigDict()
    config.total = f'{steps} steps'
    config.batch_size = 32

    config.model = dict(name='coltran_upsampler', levels=levels, width=64, mlp_dim=128, depth=2)
    config.task = dict(name='coltran_upsampler', factor=factor)

    images = dict(source='tfds:cifar10', cache=True, workers=0)
    config.data = dict(images, split='train[:95%]', transforms=augment)
    images.update(transforms=transforms, batch_size=100)
    config.evals = dict(
        val=dict(images, split='train[95%:96%]'),
        test=dict(images, split='test[:20%]', every='100%'),
    )

    config.optim = dict(name='adam', lr=2e-3, schedule=dict(name='cosine', warmup='5%'))
    config.step = dict(ema_decay=0.99)
    config.every = dict(log='50', eval='500', checkpoint='250')
    return config


def smoke(config: ConfigDict) -> None:
    """Shrink the run to 20 steps of a tiny model on colored digits."""
    config.total = '20 steps'
    config.batch_size = 16
    config.model.update(width=16, num_heads=2, mlp_dim=16, depth=1)
    images = dict(source='scenes:64', transforms="keep('image')|resize(8)", workers=0)
    config.data = dict(images, split='train')
    config.evals = dict(test=dict(images, split='test[:16]'))
    config.every = dict(log='10', eval='20', checkpoint='10')
