"""CIFAR-10 from scratch: a plain ViT that two CPU cores train over a coffee break.

    python -m vit_jax train --config experiments/vit/cifar10.py --workdir runs/cifar10

Requires `cifar10` prepared by TFDS as ArrayRecord (see docs/data.md). Expected: test accuracy >=
0.62 in under 45 minutes on 2 CPU cores. Measured: 0.652 after 27 minutes. With `:gpu`, a larger ViT
and 200 epochs of RandAugment, mixup and cutmix; expected >= 0.90 on one GPU, not measured yet.
"""

from ml_collections import ConfigDict
from ml_collections.config_dict import placeholder

from vit_jax.models import vit

ARGS = ('smoke', 'gpu')


def get_config(arg: str | None = None) -> ConfigDict:
    """The default is for a CPU; `gpu` is the long run, `smoke` a few steps on digits."""
    gpu, smoke = arg == 'gpu', arg == 'smoke'
    config = ConfigDict()
    config.seed = 0
    config.total = '20 steps' if smoke else '200 epochs' if gpu else '10 epochs'
    config.batch_size = 32 if smoke else 512 if gpu else 64

    config.model = dict(name='vit', num_classes=placeholder(int), pool='gap')
    if gpu:
        config.model.update(vit.variant('S/4'), drop_path=0.1, dtype='bfloat16')
    else:
        config.model.update(patch_size=4, width=128, depth=4, num_heads=4, mlp_dim=256)
        config.model.posemb = 'sincos2d'
    config.task = dict(
        name='classify',
        label_smoothing=0.1 if gpu else 0.0,
        mixup=0.8 if gpu else 0.0,
        cutmix=1.0 if gpu else 0.0,
    )

    augment = (
        'pad_and_crop(4)|flip|randaugment(2, 10, translate=14, cutout=6)'
        if gpu
        else 'pad_and_crop(2)|flip'
    )
    source = 'digits' if smoke else 'tfds:cifar10'
    config.data = dict(
        source=source, split='train', transforms=augment, cache=not gpu, workers=8 if gpu else 0
    )
    config.evals = dict(
        test=dict(source=source, split='test', transforms='', cache=True, batch_size=500)
    )

    config.optim = dict(
        name='adamw',
        lr=1e-3,
        b2=0.99,
        weight_decay=0.05,
        clip_norm=1.0,
        schedule=dict(name='cosine', warmup='5%'),
    )
    config.step = dict(accum_steps=1, ema_decay=0.0)
    config.every = dict(log='10' if smoke else '200', eval='20' if smoke else '1 epoch')
    config.every.checkpoint = '20' if smoke else '1 epoch'
    config.checkpoint = dict(keep_last=2, keep_every='')
    config.parallel = dict(strategy='jit', fsdp=1, tensor=1)
    return config
