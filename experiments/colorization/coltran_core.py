"""ColTran core: coarse colors of gray images, sampled pixel by pixel.

    python -m vit_jax train experiments/colorization/coltran_core.py --workdir runs/core

Kumar et al., 2021, arXiv:2102.04432: ImageNet at 64 x 64 pixels, RMSprop, 450,000 steps of 224
images, averaged parameters. 10,000 training images are held out for tuning. coltran_upsamplers.py
has the networks that refine the colors and enlarge the samples; coltran_core_cifar10.py is a small
model.

Expected, as published for all three networks together: FID 19.37 on ImageNet; in more than 60 % of
cases people prefer the best of three samples to the true colors. Not measured by this project yet.
Planned (`scaling plan --config experiments/colorization/coltran_core.py`; TPU v3 at 40 % of its
peak): 46,356,936 parameters, 100 exaFLOPs, 563 chip-hours; the authors used 16 TPU v2 chips.

Differences from the authors' code: scales of conditional layers start around one, and those in
attention have biases; images are resized before cropping to a square, not after.
"""

from ml_collections import ConfigDict


def get_config() -> ConfigDict:
    """The recipe."""
    config = ConfigDict()
    config.total = '450000 steps'
    config.batch_size = 224

    config.model = dict(name='coltran', dtype='bfloat16')
    config.task = dict(name='coltran')

    images = dict(source='tfds:imagenet2012')
    square, small = 'resize_small_tf(256)', "resize_tf(64, 'area')"
    config.data = dict(images, split='train[:-10000]')
    config.data.transforms = f'{square}|random_crop(256)|{small}'
    images.update(transforms=f'{square}|central_crop(256)|{small}')
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
    config.model.update(width=16, num_heads=2, mlp_dim=16, dtype='float32')
    config.model.update(encoder_depth=1, outer_depth=1, inner_depth=1)
    images = dict(source='scenes:64', transforms="keep('image')|resize(8)", workers=0)
    config.data = dict(images, split='train')
    config.evals = dict(test=dict(images, split='test[:16]'))
    config.optim.lr = 1e-3
    config.step.ema_decay = 0.9
    config.every = dict(log='10', eval='20', checkpoint='10')
