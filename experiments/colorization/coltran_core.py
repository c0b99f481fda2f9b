r"""ColTran core: coarse colors of gray images, sampled pixel by pixel.

    python -m vit_jax train --config experiments/colorization/coltran_core.py --workdir runs/core
    python -m vit_jax train --config experiments/colorization/coltran_core.py:cifar10 \
        --workdir runs/core_cifar10
    python -m vit_jax predict --workdir runs/core_cifar10 photo.jpg --out samples.png

Kumar et al., 2021, arXiv:2102.04432: ImageNet at 64 x 64 pixels, RMSprop, 450,000 steps of 224
images, averaged parameters. Expected, as published for all three networks together: FID 19.37 on
ImageNet; in more than 60 % of cases people prefer the best of three samples to the true colors. Not
measured by this project yet. See `coltran_upsamplers.py` for the networks that refine the colors
and enlarge the samples.

Planned (`scaling plan --config experiments/colorization/coltran_core.py`; TPU v3 at 40 % of its
peak): 46,356,936 parameters, 100 exaFLOPs, 563 chip-hours; the authors used 16 TPU v2 chips.

`cifar10` is a small model for 16 x 16 pixels and CPUs. Expected: less than 1.5 bits per pixel on
`val`. Measured after 24,000 images, in about 10 minutes of one CPU core: 1.07, and 1.08 on `test`
(the parallel head has 3.02; uniform colors take 9 bits).

Differences from the authors' code: scales of conditional layers start around one, and those in
attention have biases; images are resized before cropping to a square, not after.
"""

from ml_collections import ConfigDict

ARGS = ('smoke', 'cifar10')


def get_config(arg: str | None = None) -> ConfigDict:
    """`arg`: cifar10 for a small model, smoke for a few steps; by default the paper's recipe."""
    config = ConfigDict()
    config.seed = 0
    config.task = dict(name='coltran')
    config.checkpoint = dict(keep_last=2, keep_every='')
    config.parallel = dict(strategy='jit', fsdp=1, tensor=1)
    {None: imagenet, 'cifar10': cifar10, 'smoke': smoke}[arg](config)
    return config


def imagenet(config: ConfigDict) -> None:
    """The paper's recipe; 10,000 training images are held out for tuning."""
    config.total, config.batch_size = '450000 steps', 224
    config.model = dict(name='coltran', dtype='bfloat16')
    square, small = 'resize_small_tf(256)', "resize_tf(64, 'area')"
    images = dict(source='tfds:imagenet2012')
    config.data = dict(images, split='train[:-10000]')
    config.data.transforms = f'{square}|random_crop(256)|{small}'
    images.update(transforms=f'{square}|central_crop(256)|{small}')
    config.evals = dict(
        val=dict(images, split='train[-10000:]'),
        test=dict(images, split='validation', every='100%'),
    )
    config.optim = dict(name='rmsprop', lr=3e-4, eps=1e-7, eps_in_sqrt=False)
    config.step = dict(accum_steps=1, ema_decay=0.999)
    config.every = dict(log='100', eval='10000', checkpoint='2000')


def cifar10(config: ConfigDict) -> None:
    """Adam with a cosine schedule, which does better in few steps."""
    config.total, config.batch_size = '1500 steps', 16
    config.model = dict(name='coltran', width=48, mlp_dim=64)
    config.model.update(encoder_depth=1, outer_depth=1, inner_depth=1)
    images = dict(source='tfds:cifar10', cache=True, workers=0)
    config.data = dict(images, split='train[:30%]', transforms='resize(16)|flip')
    images.update(transforms='resize(16)', batch_size=100)
    config.evals = dict(
        val=dict(images, split='train[95%:95.2%]'),
        test=dict(images, split='test[:20%]', every='100%'),
    )
    config.optim = dict(name='adam', lr=4e-3, schedule=dict(name='cosine', warmup='5%'))
    config.step = dict(accum_steps=1, ema_decay=0.97)
    config.every = dict(log='25', eval='300', checkpoint='50')


def smoke(config: ConfigDict) -> None:
    """A few steps on colored digits."""
    config.total, config.batch_size = '20 steps', 16
    config.model = dict(name='coltran', width=16, num_heads=2, mlp_dim=16)
    config.model.update(encoder_depth=1, outer_depth=1, inner_depth=1)
    images = dict(source='scenes:64', transforms="keep('image')|resize(8)", workers=0)
    config.data = dict(images, split='train')
    config.evals = dict(test=dict(images, split='test[:16]'))
    config.optim = dict(name='rmsprop', lr=1e-3, eps=1e-7, eps_in_sqrt=False)
    config.step = dict(accum_steps=1, ema_decay=0.9)
    config.every = dict(log='10', eval='20', checkpoint='10')
