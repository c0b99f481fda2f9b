r"""ColTran's spatial upsampler: images of 256 x 256 pixels of 64 x 64, with the large grey image.

    python -m vit_jax train --config experiments/colorization/coltran_spatial.py \
        --workdir runs/spatial
    python -m vit_jax train --config experiments/colorization/coltran_spatial.py:cifar10 \
        --workdir runs/spatial_cifar10

Kumar et al., 2021, arXiv:2102.04432: ImageNet at 256 x 256 pixels, RMSprop, 300,000 steps of 32
images, of which one channel each is learnt from, an average of the parameters. Expected, as
published of all three networks together: FID 19.37, see `coltran_core.py`. Not measured by this
project yet.

Planned (`scaling plan --config experiments/colorization/coltran_spatial.py`; TPU v3 at 40 % of
its peak): 10,922,728 parameters, 44 exaFLOPs, 249 chip-hours. That is a third of what the command
says, for it counts all three channels.

`cifar10` is a small model for CPUs, from 16 x 16 to 32 x 32 pixels.
"""

from ml_collections import ConfigDict

ARGS = ('smoke', 'cifar10')


def get_config(arg: str | None = None) -> ConfigDict:
    """`arg`: cifar10 for a small model, smoke for a few steps; by default the paper's recipe."""
    config = ConfigDict()
    config.seed = 0
    config.task = dict(name='coltran_upsampler', factor=4)
    config.checkpoint = dict(keep_last=2, keep_every='')
    config.parallel = dict(strategy='jit', fsdp=1, tensor=1)
    {None: imagenet, 'cifar10': cifar10, 'smoke': smoke}[arg](config)
    return config


def imagenet(config: ConfigDict) -> None:
    """The paper's recipe; 10,000 training images are left out to choose by."""
    config.total, config.batch_size = '300000 steps', 32
    config.model = dict(name='coltran_upsampler', levels=256, depth=3, dtype='bfloat16')
    square = 'resize_small_tf(256)'
    images = dict(source='tfds:imagenet2012', workers=16)
    config.data = dict(images, split='train[:-10000]')
    config.data.transforms = f'{square}|random_crop(256)'
    images.update(transforms=f'{square}|central_crop(256)')
    config.evals = dict(
        val=dict(images, split='train[-10000:]'),
        test=dict(images, split='validation', every='100%'),
    )
    config.optim = dict(name='rmsprop', lr=3e-4, eps=1e-7, eps_in_sqrt=False)
    config.step = dict(accum_steps=1, ema_decay=0.999)
    config.every = dict(log='100', eval='10000', checkpoint='2000')


def cifar10(config: ConfigDict) -> None:
    """Adam with a cosine, which gets further in few steps."""
    config.total, config.batch_size = '3000 steps', 32
    config.task.factor = 2
    config.model = dict(name='coltran_upsampler', levels=256, width=64, mlp_dim=128, depth=2)
    images = dict(source='tfds:cifar10', cache=True, workers=0)
    config.data = dict(images, split='train[:95%]', transforms='flip')
    images.update(transforms='', batch_size=100)
    config.evals = dict(
        val=dict(images, split='train[95%:96%]'), test=dict(images, split='test', every='100%')
    )
    config.optim = dict(name='adam', lr=2e-3, schedule=dict(name='cosine', warmup='5%'))
    config.step = dict(accum_steps=1, ema_decay=0.99)
    config.every = dict(log='50', eval='500', checkpoint='250')


def smoke(config: ConfigDict) -> None:
    """A few steps on digits in colours."""
    config.total, config.batch_size = '20 steps', 16
    config.model = dict(name='coltran_upsampler', levels=256, width=16, num_heads=2)
    config.model.update(mlp_dim=16, depth=1)
    images = dict(source='scenes:64', transforms="keep('image')|resize(8)", workers=0)
    config.data = dict(images, split='train')
    config.evals = dict(test=dict(images, split='test[:16]'))
    config.optim = dict(name='rmsprop', lr=1e-3, eps=1e-7, eps_in_sqrt=False)
    config.step = dict(accum_steps=1, ema_decay=0.9)
    config.every = dict(log='10', eval='20', checkpoint='10')
