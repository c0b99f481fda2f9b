r"""ColTran's upsamplers: from coarse to fine colors, from small to large images.

    python -m vit_jax train experiments/colorization/coltran_upsamplers.py:color \
        --workdir runs/color
    python -m vit_jax train experiments/colorization/coltran_upsamplers.py:spatial \
        --workdir runs/spatial

Both see the gray image. `color` (the default) maps 8 levels per channel to 256, at 64 x 64 pixels;
`spatial` maps 64 x 64 pixels to 256 x 256.

Kumar et al., 2021, arXiv:2102.04432: ImageNet, RMSprop, 300,000 steps of 768 images (`color`) or of
32 (`spatial`), which train on one channel each, averaged parameters. Expected, as published for all
three networks together: FID 19.37, see `coltran_core.py`. Not measured by this project yet.

Planned (`scaling plan --config experiments/colorization/coltran_upsamplers.py:color`, `:spatial`;
TPU v3 at 40 % of its peak): `color` 13,492,960 parameters, 78 exaFLOPs, 440 chip-hours; `spatial`
10,922,728 parameters, 44 exaFLOPs, 249 chip-hours. These are a third of the command's numbers,
which count all three channels.
"""

from typing import Literal

from ml_collections import ConfigDict

# Levels of an input channel, enlargement, blocks, images a step, resizing.
KINDS = {'color': (8, 1, 4, 768, "|resize_tf(64, 'area')"), 'spatial': (256, 4, 3, 32, '')}


def get_config(kind: Literal['color', 'spatial'] = 'color') -> ConfigDict:
    """One of the two networks."""
    levels, factor, depth, batch_size, small = KINDS[kind]
    config = ConfigDict()
    config.total = '300000 steps'
    config.batch_size = batch_size

    config.model = dict(name='coltran_upsampler', levels=levels, depth=depth, dtype='bfloat16')
    config.task = dict(name='coltran_upsampler', factor=factor)

    images = dict(source='tfds:imagenet2012')
    config.data = dict(images, split='train[:-10000]')
    config.data.transforms = f'resize_small_tf(256)|random_crop(256){small}'
    images.update(transforms=f'resize_small_tf(256)|central_crop(256){small}')
    # 10,000 training images are held out for tuning.
    config.evals = dict(
        val=dict(images, split='train[-10000:]'),
        test=dict(images, split='validation', every='100%'),
    )

    config.optim = dict(name='rmsprop', lr=3e-4, eps=1e-7, eps_in_sqrt=False)
    config.step = dict(ema_decay=0.999)
    config.every = dict(log='100', eval='10000', checkpoint='2000')
    return config


def smoke(config: ConfigDict) -> None:
    """Shrink the run to 20 steps of a tiny model on colored digits."""
    config.total = '20 steps'
    config.batch_size = 16
    config.model.update(width=16, num_heads=2, mlp_dim=16, depth=1, dtype='float32')
    images = dict(source='scenes:64', transforms="keep('image')|resize(8)", workers=0)
    config.data = dict(images, split='train')
    config.evals = dict(test=dict(images, split='test[:16]'))
    config.optim.lr = 1e-3
    config.step.ema_decay = 0.9
    config.every = dict(log='10', eval='20', checkpoint='10')
