r"""ColTran's upsamplers: from coarse to fine colors, from small to large images.

    python -m vit_jax train --config experiments/colorization/coltran_upsamplers.py:color \
        --workdir runs/color
    python -m vit_jax train --config experiments/colorization/coltran_upsamplers.py:spatial \
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

`color,cifar10` is a small model for 16 x 16 pixels and CPUs, `spatial,cifar10` one from 16 x 16 to
32 x 32 pixels. Measured on `test`, in about 10 and 15 minutes of one CPU core: 3.57 bits per byte
(5 if only the coarse level is known), and 4.24.
"""

from ml_collections import ConfigDict

ARGS = (
    'smoke',
    'color',
    'color,cifar10',
    'color,smoke',
    'spatial',
    'spatial,cifar10',
    'spatial,smoke',
)
LEVELS = {'color': 8, 'spatial': 256}  # of an input channel


def get_config(arg: str | None = None) -> ConfigDict:
    """`arg`: `color` or `spatial`, then `cifar10` for a small model or `smoke` for a few steps; by
    default the paper's recipe. `smoke` alone is for `color`.
    """
    kind, _, size = {None: 'color', 'smoke': 'color,smoke'}.get(arg, arg).partition(',')
    config = ConfigDict()
    config.seed = 0
    config.model = dict(name='coltran_upsampler', levels=LEVELS[kind])
    config.task = dict(name='coltran_upsampler', factor=1)
    config.checkpoint = dict(keep_last=2, keep_every='')
    config.parallel = dict(strategy='jit', fsdp=1, tensor=1)
    {'': imagenet, 'cifar10': cifar10, 'smoke': smoke}[size](config, spatial=kind == 'spatial')
    return config


def imagenet(config: ConfigDict, spatial: bool) -> None:
    """The paper's recipe; 10,000 training images are held out for tuning."""
    config.total, config.batch_size = '300000 steps', 32 if spatial else 768
    config.task.factor = 4 if spatial else 1
    config.model.update(depth=3 if spatial else 4, dtype='bfloat16')
    square, small = 'resize_small_tf(256)', '' if spatial else "|resize_tf(64, 'area')"
    images = dict(source='tfds:imagenet2012')
    config.data = dict(images, split='train[:-10000]')
    config.data.transforms = f'{square}|random_crop(256){small}'
    images.update(transforms=f'{square}|central_crop(256){small}')
    config.evals = dict(
        val=dict(images, split='train[-10000:]'),
        test=dict(images, split='validation', every='100%'),
    )
    config.optim = dict(name='rmsprop', lr=3e-4, eps=1e-7, eps_in_sqrt=False)
    config.step = dict(accum_steps=1, ema_decay=0.999)
    config.every = dict(log='100', eval='10000', checkpoint='2000')


def cifar10(config: ConfigDict, spatial: bool) -> None:
    """Adam with a cosine schedule, which does better in few steps."""
    config.total, config.batch_size = '500 steps' if spatial else '1500 steps', 32
    config.task.factor = 2 if spatial else 1
    config.model.update(width=64, mlp_dim=128, depth=2)
    small = '' if spatial else 'resize(16)'
    images = dict(source='tfds:cifar10', cache=True, workers=0)
    config.data = dict(images, split='train[:95%]', transforms=f'{small}|flip'.lstrip('|'))
    images.update(transforms=small, batch_size=100)
    config.evals = dict(
        val=dict(images, split='train[95%:96%]'),
        test=dict(images, split='test[:20%]', every='100%'),
    )
    config.optim = dict(name='adam', lr=2e-3, schedule=dict(name='cosine', warmup='5%'))
    config.step = dict(accum_steps=1, ema_decay=0.99)
    config.every = dict(log='50', eval='500', checkpoint='250')


def smoke(config: ConfigDict, spatial: bool) -> None:
    """A few steps on colored digits."""
    config.total, config.batch_size = '20 steps', 16
    config.task.factor = 4 if spatial else 1
    config.model.update(width=16, num_heads=2, mlp_dim=16, depth=1)
    images = dict(source='scenes:64', transforms="keep('image')|resize(8)", workers=0)
    config.data = dict(images, split='train')
    config.evals = dict(test=dict(images, split='test[:16]'))
    config.optim = dict(name='rmsprop', lr=1e-3, eps=1e-7, eps_in_sqrt=False)
    config.step = dict(accum_steps=1, ema_decay=0.9)
    config.every = dict(log='10', eval='20', checkpoint='10')
